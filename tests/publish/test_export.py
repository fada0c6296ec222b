"""Exports against the live policy and against other libraries: PEFT, transformers, compressed-tensors."""

import copy
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import types
import weakref
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils

from qerl_trl import NVFP4Config, QeRLConfig
from qerl_trl.checkpoint import seal
from qerl_trl.checkpoint.fingerprint import base_sha256
from qerl_trl.checkpoint.settings import recorded_tokenizer as recorded
from qerl_trl.model.lora import prepare_trainable, register_nvfp4_lora
from qerl_trl.nvfp4 import headers
from qerl_trl.nvfp4.config import from_pretrained
from qerl_trl.nvfp4.linear import NVFP4Linear
from qerl_trl.publish import export, merge, write
from qerl_trl.publish.export import logit_distance, logits_of
from qerl_trl.publish.load import TrainedPolicy, load_any, load_policy
from tests.publish.conftest import CODE
from tests.tiny_models import make_tiny_tokenizer

IDS = torch.randint(5, 300, (3, 16), generator=torch.Generator().manual_seed(0))
VARIANTS = {
    "lora": {},
    "some-layers": {"target_modules": ["q_proj", "down_proj"]},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "norms": {"modules_to_save": ["input_layernorm", "post_attention_layernorm"]},
    "tokens": {"trainable_token_indices": list(range(5, 105))},
}


def make_policy(folder, dtype="float32", size=0.05, base="nvfp4", **lora):
    """A trained-looking policy: NVFP4 (or dense) base of `folder`, LoRA with non-zero B, shifted trained norms."""
    quantization = {"quantization_config": NVFP4Config(compute_dtype=dtype)} if base == "nvfp4" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **quantization)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **lora})
    torch.manual_seed(0)
    model = get_peft_model(model, register_nvfp4_lora(config))
    prepare_trainable(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name or "trainable_tokens" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    return model.eval()


def bytes_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_untouched(model, before):
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name


@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]], ids=str)
def test_the_base_of_a_trained_head_or_embedding_stays_tied(tiny_tokenizer, tmp_path, saved):
    """At 5445a84 it was written with two matrices, which nobody took for the run's base any more."""
    from tests.tiny_models import make_tiny_model

    make_tiny_model("qwen2", tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    policy = make_policy(tmp_path / "model", target_modules=["q_proj"], modules_to_save=saved)
    export.save_base(policy, tmp_path / "base", tiny_tokenizer)
    loaded = from_pretrained(tmp_path / "base")
    assert loaded.config.tie_word_embeddings and loaded.lm_head.weight is loaded.model.embed_tokens.weight
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded.lm_head.weight.float(), dense.lm_head.weight.float().to(loaded.dtype).float())


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_is_the_policy_exactly_in_float32(tiny_model_dir, tiny_tokenizer, tmp_path, variant):
    policy = make_policy(tiny_model_dir("qwen2"), **VARIANTS[variant])
    before = bytes_of(policy)
    expected = logits_of(policy, [IDS])
    export.save_merged(policy, tmp_path / "merged", tiny_tokenizer, dtype=torch.float32)
    assert_untouched(policy, before)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not any(isinstance(module, NVFP4Linear) for module in loaded.modules())
    distance = logit_distance(expected, logits_of(loaded, [IDS]))
    assert distance["max_logit_distance"] < 2e-5
    # and the adapter mattered
    with policy.disable_adapter():
        assert logit_distance(expected, logits_of(policy, [IDS]))["mean_logit_distance"] > 1e-2


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma3", "phi3"])
def test_merged_bf16_is_the_policy_up_to_bf16_rounding(tiny_model_dir, tmp_path, family):
    """Every weight is the float32 merge rounded once; so the logits differ by what bf16 rounding of weights does."""
    policy = make_policy(tiny_model_dir(family))
    expected = logits_of(policy, [IDS])
    export.save_merged(policy, tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    merged = policy.merge_and_unload().state_dict()
    written = loaded.state_dict()
    assert written.keys() == merged.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, merged[name].to(torch.bfloat16)), name
    distance = logit_distance(expected, logits_of(loaded.float(), [IDS]))
    assert 0 < distance["mean_logit_distance"] < 0.01 * torch.cat(expected).std().item()


def test_dense_base_is_merged_without_touching_it(tiny_model_dir, tmp_path):
    policy = make_policy(tiny_model_dir("llama"), dtype="bfloat16", base="dense")
    before = bytes_of(policy)
    export.save_merged(policy, tmp_path / "merged")
    assert_untouched(policy, before)
    merged = policy.merge_and_unload().float()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=2**-7, atol=1e-6)


def test_tied_embedding_is_written_once_and_stays_tied(tiny_model_dir, tmp_path):
    policy = make_policy(tiny_model_dir("qwen2"))
    export.save_merged(policy, tmp_path / "merged")
    with safe_open(tmp_path / "merged/model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def test_an_adapted_tied_head_is_untied(tiny_model_dir, tmp_path):
    """A dense arm may adapt lm_head; the published model must then carry both matrices."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"), dtype=torch.float32)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        policy = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    expected = logits_of(policy, [IDS])
    export.save_merged(policy, tmp_path / "merged", dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not loaded.config.tie_word_embeddings
    assert logit_distance(expected, logits_of(loaded, [IDS]))["max_logit_distance"] < 2e-5


def test_several_shards_with_an_index(tiny_model_dir, tmp_path):
    policy = make_policy(tiny_model_dir("llama"))
    export.save_merged(policy, tmp_path / "one", dtype=torch.float32)
    export.save_merged(policy, tmp_path / "many", dtype=torch.float32, max_shard_bytes=200_000)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    one, many = (AutoModelForCausalLM.from_pretrained(tmp_path / n, dtype=torch.float32) for n in ("one", "many"))
    for name, tensor in one.state_dict().items():
        assert torch.equal(many.state_dict()[name], tensor)
    index = json.loads((tmp_path / "many" / headers.INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in one.state_dict().values())


def test_base_is_what_was_trained_on_and_loads_in_plain_transformers(tiny_model_dir, tiny_tokenizer, tmp_path):
    policy = make_policy(tiny_model_dir("qwen2"), dtype="bfloat16")
    export.save_base(policy, tmp_path / "base", tiny_tokenizer)
    config = json.loads((tmp_path / "base/config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "nvfp4-pack-quantized")
    code = f"""
        import sys, torch
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "base")!r}, dtype=torch.bfloat16)
        torch.save(model(torch.load(sys.argv[1])).logits.float(), sys.argv[2])
        assert "qerl_trl" not in sys.modules
    """
    torch.save(IDS, tmp_path / "ids.pt")
    arguments = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "ids.pt"), str(tmp_path / "logits.pt")]
    subprocess.run(arguments, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"})
    with policy.disable_adapter():
        torch.testing.assert_close(
            torch.load(tmp_path / "logits.pt"), torch.cat(logits_of(policy, [IDS])), rtol=0, atol=0
        )


def test_base_round_trip_is_byte_exact(tiny_model_dir, tmp_path):
    policy = make_policy(tiny_model_dir("gemma3"), dtype="bfloat16")
    export.save_base(policy, tmp_path / "base")
    again = from_pretrained(tmp_path / "base")
    layers = {n: m for n, m in policy.get_base_model().named_modules() if isinstance(m, NVFP4Linear)}
    assert layers
    for name, layer in layers.items():
        other = again.get_submodule(name.removesuffix(".base_layer"))
        for mine, theirs in zip(layer.nvfp4, other.nvfp4, strict=True):
            assert torch.equal(mine, theirs), name


def test_adapter_loads_in_plain_peft_and_can_name_another_base(tiny_model_dir, tiny_tokenizer, tmp_path):
    folder = tiny_model_dir("qwen2")
    policy = make_policy(folder)
    export.save_adapter(policy, tmp_path / "adapter", tiny_tokenizer, base_model="someone/base")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/base"
    assert str(folder) not in "".join(p.read_text() for p in (tmp_path / "adapter").glob("*.json"))
    loaded = PeftModel.from_pretrained(policy.get_base_model().dequantize(), tmp_path / "adapter").eval()
    assert len([n for n, _ in loaded.named_parameters() if "lora_A" in n]) == 14


def test_load_policy_from_an_export_is_the_policy(tiny_model_dir, tiny_tokenizer, tmp_path):
    policy = make_policy(tiny_model_dir("qwen2"), **VARIANTS["norms"])
    settings = {"base_format": "nvfp4", "scale_rule": "rtn", "dtype": "float32", "model": str(tiny_model_dir("qwen2"))}
    export.save_adapter(TrainedPolicy(policy, tiny_tokenizer, settings), tmp_path / "adapter")
    again = load_policy(tmp_path / "adapter", base_model=str(tiny_model_dir("qwen2")))
    assert again.settings["scale_rule"] == "rtn"
    distance = logit_distance(logits_of(policy, [IDS]), logits_of(again.model, [IDS]))
    assert distance["max_logit_distance"] == 0.0
    other = load_policy(tmp_path / "adapter", base_model=str(tiny_model_dir("qwen2")), base_format="bf16")
    run = export.save_merged(other, tmp_path / "other")
    assert run["kind"] == "merged_other_base"
    assert logit_distance(logits_of(policy, [IDS]), logits_of(other.model, [IDS]))["kl_nats_per_token"] > 1e-5


def test_load_policy_without_knowing_the_base_is_refused(tiny_model_dir, tmp_path):
    policy = make_policy(tiny_model_dir("qwen2"))
    policy.save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="--base-format nvfp4"):
        load_policy(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"neither config\.json nor adapter_config\.json"):
        load_policy(tmp_path)


@pytest.mark.parametrize(("size", "refused"), [(0.0005, True), (0.3, False)], ids=["small-change", "large-change"])
def test_requantized_merge_says_what_survived(tiny_model_dir, tmp_path, capsys, size, refused):
    policy = make_policy(tiny_model_dir("qwen2"), dtype="bfloat16", size=size)
    target = tmp_path / "nvfp4"
    if refused:
        with pytest.raises(ValueError, match="survives rounding"):
            export.save_merged_nvfp4(policy, target)
        assert not target.exists()
        run = export.save_merged_nvfp4(policy, target, force=True)
        assert run["survived"]["kept_fraction"] < export.MIN_KEPT_FRACTION
    else:
        run = export.save_merged_nvfp4(policy, target)
        assert run["survived"]["kept_fraction"] > 0.5
    assert "of the adapter's change" in capsys.readouterr().out
    # measured again from the published weights, against an independent merge
    written_model = from_pretrained(target)
    base = {n: m.dequantize(torch.float32) for n, m in policy.named_modules() if isinstance(m, NVFP4Linear)}
    kept = change = 0.0
    for name, weight in base.items():
        path = name.removeprefix("base_model.model.").removesuffix(".base_layer")
        delta = policy.get_submodule(name.removesuffix(".base_layer")).get_delta_weight("default")
        written = written_model.get_submodule(path).dequantize(torch.float32) - weight
        kept += (written * delta).sum().item()
        change += (delta * delta).sum().item()
    assert kept / change == pytest.approx(run["survived"]["kept_fraction"], abs=5e-3)


@pytest.mark.parametrize(("size", "dtype"), [(0.0005, "bfloat16"), (0.3, "bfloat16"), (0.05, "float16")])
@pytest.mark.parametrize("base_format", ["nvfp4", "bf16"])
def test_a_merge_records_what_its_rounding_keeps(tiny_model_dir, tmp_path, size, dtype, base_format):
    """Measured again from the written weights: a small change is lost in the steps of the weights' type, a large one is kept."""
    policy = make_policy(tiny_model_dir("qwen2"), dtype="bfloat16", size=size, base=base_format)
    run = export.save_merged(policy, tmp_path / "merged", dtype=getattr(torch, dtype))
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    kept = change = error = 0.0
    for name, layer in policy.named_modules():
        if isinstance(layer, LoraLinear):
            base = layer.get_base_layer()
            weight = base.dequantize(torch.float32) if isinstance(base, NVFP4Linear) else base.weight.float()
            delta = layer.get_delta_weight("default").float()
            written = stored[f"{name.removeprefix('base_model.model.')}.weight"].float() - weight
            kept, change = kept + (written * delta).sum().item(), change + (delta * delta).sum().item()
            error += (written - delta).square().sum().item()
    assert run["survived"]["kept_fraction"] == pytest.approx(kept / change, abs=1e-3)
    assert run["survived"]["error_ratio"] == pytest.approx((error / change) ** 0.5, rel=1e-2)
    assert (run["survived"]["error_ratio"] < 0.1) == (size > 0.0005)
    assert seal.recorded_run(tmp_path / "merged")["survived"] == run["survived"]


@pytest.mark.parametrize("changed", [True, False])
def test_a_merge_without_rounding_or_change_records_none(tiny_model_dir, tmp_path, changed):
    policy = make_policy(tiny_model_dir("qwen2"), dtype="bfloat16", size=0.3 if changed else 0.0)
    dtype = torch.float32 if changed else torch.bfloat16
    assert "survived" not in export.save_merged(policy, tmp_path / "merged", dtype=dtype)


def test_requantized_fused_groups_share_a_global_scale(tiny_model_dir, tmp_path):
    policy = make_policy(tiny_model_dir("llama"), dtype="bfloat16", size=0.3)
    export.save_merged_nvfp4(policy, tmp_path / "nvfp4")
    with safe_open(tmp_path / "nvfp4/model.safetensors", "pt") as file:
        for layer in range(2):
            scales = {
                file.get_tensor(f"model.layers.{layer}.self_attn.{c}_proj.weight_global_scale").item() for c in "qkv"
            }
            assert len(scales) == 1


def test_untrained_adapter_is_refused_for_requantizing(tiny_model_dir, tmp_path):
    policy = make_policy(tiny_model_dir("qwen2"), size=0.0)
    with pytest.raises(ValueError, match=r"Only 0\.000 of the adapter's change"):
        export.save_merged_nvfp4(policy, tmp_path / "out")


def test_existing_folder_is_kept_unless_overwritten(tiny_model_dir, tmp_path):
    policy = make_policy(tiny_model_dir("qwen2"))
    target = tmp_path / "merged"
    target.mkdir()
    (target / "precious.txt").write_text("mine")
    with pytest.raises(ValueError, match="already exists"):
        export.save_merged(policy, target)
    assert [p.name for p in target.iterdir()] == ["precious.txt"]
    export.save_merged(policy, target, overwrite=True)
    assert not (target / "precious.txt").exists()
    assert not seal.problems(target)
    assert [p.name for p in tmp_path.iterdir()] == ["merged"]


@pytest.mark.parametrize("as_policy", [False, True], ids=["model", "policy"])
def test_another_tokenizer_is_another_export(tiny_model_dir, tiny_tokenizer, tmp_path, caplog, as_policy):
    """What is passed beside a policy is what is written, as beside a model or a trainer; and told where the run had another one."""
    policy, other = make_policy(tiny_model_dir("qwen2")), copy.deepcopy(tiny_tokenizer)
    other.chat_template = "{{ messages[0].content }}"
    exported = TrainedPolicy(policy, tiny_tokenizer, recorded(tiny_tokenizer)) if as_policy else policy
    export.save_merged(exported, tmp_path / "merged", tiny_tokenizer, overwrite=True)
    assert "is not the one that the run was trained with" not in caplog.text
    export.save_merged(exported, tmp_path / "merged", other, overwrite=True)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == other.chat_template
    assert ("is not the one that the run was trained with" in caplog.text) == as_policy


def test_a_base_of_another_format_than_the_runs_says_its_own_fingerprint(tiny_model_dir, tmp_path):
    """An adapter that was trained on a dense base, whose NVFP4 base is exported: it is compared when it is loaded."""
    policy = make_policy(tiny_model_dir("qwen2"))
    recorded = {"base_format": "bf16", "merged_onto": "nvfp4", "base_sha256": "0" * 64}
    made = export.save_base(TrainedPolicy(policy, None, recorded), tmp_path / "base")
    assert made["settings"]["base_sha256"] == base_sha256(policy)


def test_what_a_run_recorded_of_its_base_is_what_the_export_says(tiny_model_dir, tmp_path):
    policy = make_policy(tiny_model_dir("qwen2"))
    settings = {"base_format": "nvfp4", "base_sha256": base_sha256(policy), "lora": {"r": 4}}
    assert export.save_merged(TrainedPolicy(policy, None, settings), tmp_path / "merged")["settings"] == settings


@pytest.mark.parametrize("save", [export.save_merged, export.save_base], ids=["merged", "base"])
def test_a_model_with_code_of_its_own_is_loaded_where_its_code_is_named(own_code, tmp_path, caplog, save):
    quantized = {} if save is export.save_merged else {"quantization_config": NVFP4Config()}
    model = AutoModelForCausalLM.from_pretrained(own_code, trust_remote_code=True, **quantized)
    save(model, tmp_path / "made")
    (said,) = [record.getMessage() for record in caplog.records if "code of this model" in record.getMessage()]
    for word in (
        "configuration_own.py, modeling_own.py",
        str(tmp_path / "made"),
        "user/name--modeling_own.OwnForCausalLM",
    ):
        assert word in said
    with pytest.raises(OSError, match=r"_own\.py"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "made", trust_remote_code=True)
    caplog.clear()
    model.config.auto_map = {role: f"{own_code}--{name}" for role, name in CODE.items()}
    save(model, tmp_path / "made", overwrite=True)
    assert "code of this model" not in caplog.text and not list((tmp_path / "made").glob("*.py"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "made", trust_remote_code=True)
    assert type(loaded).__name__ == "OwnForCausalLM"


def test_no_path_of_this_machine_is_published(tiny_model_dir, tiny_tokenizer, tmp_path):
    folder = str(tiny_model_dir("qwen2"))
    policy = make_policy(folder)
    trained = TrainedPolicy(policy, tiny_tokenizer, {"base_format": "nvfp4", "model": folder})
    export.save_merged(trained, tmp_path / "merged")
    export.save_base(trained, tmp_path / "base")
    for path in [*(tmp_path / "merged").iterdir(), *(tmp_path / "base").iterdir()]:
        assert str(Path(folder).parent).encode() not in path.read_bytes(), path


@pytest.mark.parametrize("save", [export.save_merged, export.save_merged_nvfp4], ids=["bf16", "nvfp4"])
def test_one_merged_weight_is_alive_at_a_time(tiny_model_dir, tmp_path, monkeypatch, save):
    policy = make_policy(tiny_model_dir("llama"), dtype="bfloat16", size=0.3)
    merged_layer, alive, most = merge.merged_layer, set(), []

    def counted(layer):
        weight, bias = merged_layer(layer)
        alive.add(len(most))
        weakref.finalize(weight, alive.discard, len(most))
        most.append(len(alive))
        return weight, bias

    monkeypatch.setattr(merge, "merged_layer", counted)
    save(policy, tmp_path / "out")
    assert len(most) >= 14
    assert max(most) <= 2  # the one being made, and the one the writer is about to drop


def kill_after(seconds, work):
    """Run `work` in a forked process and kill it: SIGKILL, nothing of it can clean up."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    time.sleep(seconds)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("old", [False, True], ids=["new-folder", "replacing"])
def test_killed_at_any_moment_the_folder_is_old_or_new(tiny_model_dir, tmp_path, monkeypatch, old):
    target, partial = tmp_path / "merged", tmp_path / ".merged.partial"
    policy = make_policy(tiny_model_dir("qwen2"))
    if old:
        target.mkdir()
        (target / "old.txt").write_text("old")
    write_at = write._write_at

    def slow_export():
        torch.set_num_threads(1)  # no thread pool of the parent exists here
        monkeypatch.setattr(write, "_write_at", lambda *args: (time.sleep(0.02), write_at(*args)))
        export.save_merged(policy, target, overwrite=True, max_shard_bytes=100_000)

    for delay in (0.1, 0.5):
        kill_after(delay, slow_export)
        assert sorted(p.name for p in target.iterdir()) == ["old.txt"] if old else not target.exists()
    assert list(partial.glob("*.safetensors"))
    export.save_merged(policy, target, overwrite=True, max_shard_bytes=100_000)
    assert not seal.problems(target)
    assert [p.name for p in tmp_path.iterdir()] == ["merged"]
    export.save_merged(policy, tmp_path / "fresh")
    resumed, fresh = (AutoModelForCausalLM.from_pretrained(tmp_path / n).state_dict() for n in ("merged", "fresh"))
    assert all(torch.equal(resumed[name], fresh[name]) for name in fresh)


@pytest.mark.parametrize("step", ["config", "seal", "rename"])
def test_killed_while_finishing(tiny_model_dir, tmp_path, monkeypatch, step):
    """After the last shard: killed while the small files, the manifest or the final rename are due."""
    target = tmp_path / "merged"
    target.mkdir()
    (target / "old.txt").write_text("old")
    policy = make_policy(tiny_model_dir("qwen2"))
    owner, name = {
        "config": (export, "_save_config"),
        "seal": (seal, "write_json_atomically"),
        "rename": (write, "_replace"),
    }[step]
    original = getattr(owner, name)

    def stop(*args):
        if step != "seal" or args[0].name == seal.MANIFEST_NAME:
            time.sleep(60)
        original(*args)

    def stopped_export():
        torch.set_num_threads(1)
        monkeypatch.setattr(owner, name, stop)
        export.save_merged(policy, target, overwrite=True)

    kill_after(0.7, stopped_export)
    assert [p.name for p in target.iterdir()] == ["old.txt"]
    export.save_merged(policy, target, overwrite=True)
    assert not seal.problems(target)
    assert [p.name for p in tmp_path.iterdir()] == ["merged"]


def _ddp_rank(rank, port, policy, folder, results):
    """One of two processes under DDP with gloo: exports."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    trainer = types.SimpleNamespace(
        accelerator=accelerator,
        model=torch.nn.parallel.DistributedDataParallel(policy),
        processing_class=make_tiny_tokenizer(),
        sources={},
        given_optimizers={},
        args=QeRLConfig(str(Path(folder).with_name("run")), use_cpu=True, bf16=False, report_to="none"),
        state=types.SimpleNamespace(global_step=3),
        reward_func_names=[],
        reward_funcs=[],
        train_dataset=None,
        base_sha256=base_sha256(policy),
        _name="QeRL-GRPO",
        chat_template_kwargs={},
        eos_token_ids=[],
    )
    run = export.save_merged(trainer, folder, dtype=torch.float32)
    with pytest.raises(AssertionError if rank else ValueError, match="rank 0" if rank else "already exists"):
        export.save_merged(trainer, folder, dtype=torch.float32)
    results.put((rank, run["kind"], run["settings"]["global_step"]))


def test_under_ddp_rank_zero_writes_and_all_get_the_record(tiny_model_dir, tmp_path):
    policy = make_policy(tiny_model_dir("qwen2"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(target=_ddp_rank, args=(r, port, policy, str(tmp_path / "out"), results)) for r in (0, 1)
    ]
    for process in processes:
        process.start()
    got = sorted(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    assert got[0][1:3] == got[1][1:3] == (got[0][1], 3)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert logit_distance(logits_of(policy, [IDS]), logits_of(loaded, [IDS]))["max_logit_distance"] < 2e-5


def test_two_writers_of_one_folder_are_refused(tmp_path):
    with (
        write.staging(tmp_path / "out", {"a": 1}) as _,
        pytest.raises(RuntimeError, match=r"Another process .*Wait for it or end it"),
        write.staging(tmp_path / "out", {"a": 1}),
    ):
        pass


def test_tokenizer_that_reads_back_differently_is_refused(tiny_model_dir, tiny_tokenizer, tmp_path, monkeypatch):
    policy = make_policy(tiny_model_dir("qwen2"))
    other = AutoTokenizer.from_pretrained

    class Wrong:
        def __call__(self, text):
            return {"input_ids": [1, 2, 3]}

    monkeypatch.setattr(export.AutoTokenizer, "from_pretrained", lambda *a, **k: Wrong())
    with pytest.raises(RuntimeError, match="encodes differently"):
        export.save_merged(policy, tmp_path / "merged", tiny_tokenizer)
    assert not (tmp_path / "merged").exists()
    monkeypatch.setattr(export.AutoTokenizer, "from_pretrained", other)
    export.save_merged(policy, tmp_path / "merged", tiny_tokenizer)
    assert AutoConfig.from_pretrained(tmp_path / "merged").model_type == "qwen2"


def test_memory_that_nobody_ties_again_is_not_left_out(tiny_model_dir, tmp_path):
    """As PEFT's layer_replication leaves it: what was written had layers without weights."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"))
    layers = model.model.layers
    layers[1].input_layernorm.weight = layers[0].input_layernorm.weight
    with pytest.raises(ValueError, match=r"model\.layers\.1\.input_layernorm\.weight is in the same memory"):
        export.save_merged(model, tmp_path / "merged")


@pytest.mark.parametrize("save", [export.save_merged, export.save_base], ids=["merged", "base"])
def test_a_generation_config_that_contradicts_itself_is_handed_on(tiny_model_dir, tmp_path, save):
    folder = shutil.copytree(tiny_model_dir("qwen2"), tmp_path / "base")
    (folder / seal.MANIFEST_NAME).unlink(missing_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_p": 0.6, "do_sample": False}))
    save(make_policy(folder), tmp_path / "made")
    written = json.loads((tmp_path / "made/generation_config.json").read_text())
    assert (written["temperature"], written["top_p"]) == (0.9, 0.6)


@pytest.mark.parametrize("base_format", ["bf16", "nvfp4"])
def test_a_run_on_a_base_with_code_of_its_own_is_rebuilt_with_leave(own_code, tiny_tokenizer, tmp_path, base_format):
    tiny_tokenizer.save_pretrained(own_code)
    base = AutoModelForCausalLM.from_pretrained(own_code, trust_remote_code=True)
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_policy(tmp_path / "adapter", str(own_code), base_format)
    policy = load_policy(tmp_path / "adapter", str(own_code), base_format, trust_remote_code=True)
    assert type(policy.transformers_model).__name__ == "OwnForCausalLM"
    assert type(load_any(str(own_code), trust_remote_code=True).model).__name__ == "OwnForCausalLM"


def test_a_tokenizer_with_code_of_its_own_is_read_back_by_it(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", sys.path[:])
    folder = tmp_path / "tokenizer"
    make_tiny_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": [None, "tok.OwnTokenizer"]}, "tokenizer_class": "OwnTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tok.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    own = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    export.save_adapter(make_policy(tiny_model_dir("qwen2")), tmp_path / "made", tokenizer=own, base_model="user/name")
    assert (tmp_path / "made/tokenizer_config.json").is_file()


@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head", "embed_tokens"]], ids=str)
def test_a_trained_copy_that_peft_ties_is_no_part_of_a_base(tmp_path, saved):
    from tests.tiny_models import make_tiny_model

    make_tiny_model("qwen2", tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    policy = make_policy(tmp_path / "model", target_modules=["q_proj"], modules_to_save=saved, ensure_weight_tying=True)
    export.save_base(policy, tmp_path / "base")
    loaded = from_pretrained(tmp_path / "base")
    assert loaded.config.tie_word_embeddings and loaded.lm_head.weight is loaded.model.embed_tokens.weight
