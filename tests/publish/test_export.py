"""Exports compared with the live policy and with other libraries: PEFT, transformers, compressed-tensors."""

import copy
import json
import multiprocessing
import shutil
import signal
import time
import weakref
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_trl import NVFP4Config
from qerl_trl.checkpoint import seal
from qerl_trl.checkpoint.settings import recorded_tokenizer
from qerl_trl.nvfp4.config import from_pretrained
from qerl_trl.nvfp4.linear import NVFP4Linear
from qerl_trl.publish import export, merge, write
from qerl_trl.publish.distance import logit_distance, logits_of
from qerl_trl.publish.load import TrainedPolicy, load_any, load_policy
from qerl_trl.publish.quantize import quantize_folder
from tests.faults.tiny_runs import FILE, make_policy
from tests.publish.conftest import CODE

IDS = torch.randint(5, 300, (3, 16), generator=torch.Generator().manual_seed(0))
VARIANTS = {
    "lora": {},
    "some-layers": {"target_modules": ["q_proj", "down_proj"]},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "norms": {"modules_to_save": ["input_layernorm", "post_attention_layernorm"]},
    "tokens": {"trainable_token_indices": list(range(5, 105))},
}


def assert_untouched(model, before):
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert not [name for name, value in before.items() if not torch.equal(after[name], value)]


def parameters_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# --- what is written is the policy, or its base ---


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_is_the_policy_exactly_in_float32(tiny_model_dir, tiny_tokenizer, tmp_path, variant):
    policy = make_policy(tiny_model_dir("qwen2"), **VARIANTS[variant])
    before = parameters_of(policy)
    expected = logits_of(policy, [IDS])
    export.save_merged(policy, tmp_path / "merged", tiny_tokenizer, dtype=torch.float32)
    assert_untouched(policy, before)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not any(isinstance(module, NVFP4Linear) for module in loaded.modules())
    assert logit_distance(expected, logits_of(loaded, [IDS]))["max_logit_distance"] < 2e-5
    with policy.disable_adapter():
        assert logit_distance(expected, logits_of(policy, [IDS]))["mean_logit_distance"] > 1e-2


@pytest.mark.parametrize(
    ("family", "base"), [("qwen3", "nvfp4"), ("gemma3", "nvfp4"), ("phi3", "nvfp4"), ("llama", "dense")]
)
def test_every_weight_in_bf16_is_the_float32_merge_rounded_once(tiny_model_dir, tmp_path, family, base):
    policy = make_policy(tiny_model_dir(family), base=base)
    before = parameters_of(policy)
    export.save_merged(policy, tmp_path / "merged")
    assert_untouched(policy, before)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16).state_dict()
    merged = policy.merge_and_unload().state_dict()
    assert written.keys() == merged.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, merged[name].to(torch.bfloat16)), name


def test_base_round_trip_is_byte_exact(tiny_model_dir, tmp_path):
    policy = make_policy(tiny_model_dir("gemma3"), dtype="bfloat16")
    export.save_base(policy, tmp_path / "base")
    again = from_pretrained(tmp_path / "base")
    layers = {n: m for n, m in policy.get_base_model().named_modules() if isinstance(m, NVFP4Linear)}
    assert layers
    for name, layer in layers.items():
        other = again.get_submodule(name.removesuffix(".base_layer"))
        assert all(torch.equal(a, b) for a, b in zip(layer.nvfp4, other.nvfp4, strict=True)), name


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
    folder = str(tiny_model_dir("qwen2"))
    policy = make_policy(folder, **VARIANTS["norms"])
    settings = {"base_format": "nvfp4", "scale_rule": "rtn", "dtype": "float32", "model": folder}
    export.save_adapter(TrainedPolicy(policy, tiny_tokenizer, settings), tmp_path / "adapter")
    again = load_policy(tmp_path / "adapter", base_model=folder)
    assert again.settings["scale_rule"] == "rtn"
    distance = logit_distance(logits_of(policy, [IDS]), logits_of(again.model, [IDS]))
    assert distance["max_logit_distance"] == 0.0
    other = load_policy(tmp_path / "adapter", base_model=folder, base_format="bf16")
    assert export.save_merged(other, tmp_path / "other")["kind"] == "merged_other_base"
    assert logit_distance(logits_of(policy, [IDS]), logits_of(other.model, [IDS]))["kl_nats_per_token"] > 1e-5


def test_load_policy_without_knowing_the_base_is_refused(tiny_model_dir, tmp_path):
    make_policy(tiny_model_dir("qwen2")).save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="--base-format nvfp4"):
        load_policy(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"neither config\.json nor adapter_config\.json"):
        load_policy(tmp_path)


# --- the share of the adapter's change that rounding keeps ---


@pytest.mark.parametrize(
    ("base", "size", "dtype"),
    [
        ("nvfp4", 0.0005, "bfloat16"),
        ("dense", 0.3, "bfloat16"),
        ("nvfp4", 0.05, "float16"),
        ("nvfp4", 0.0005, "nvfp4"),
        ("nvfp4", 0.3, "nvfp4"),
    ],
)
def test_a_merge_records_the_share_that_rounding_keeps(tiny_model_dir, tmp_path, capsys, base, size, dtype):
    """Measured again from the written weights: a small change is lost in the steps of their type."""
    policy, made = make_policy(tiny_model_dir("qwen2"), dtype="bfloat16", size=size, base=base), tmp_path / "made"
    if dtype == "nvfp4":
        run = export.save_merged_nvfp4(policy, made, force=size == 0.0005)
        assert "of the adapter's change" in capsys.readouterr().out
        layers = {n: m for n, m in from_pretrained(made).named_modules() if isinstance(m, NVFP4Linear)}
        stored = {f"{name}.weight": layer.dequantize(torch.float32) for name, layer in layers.items()}
    else:
        run = export.save_merged(policy, made, dtype=getattr(torch, dtype))
        stored = load_file(made / FILE)
    kept = change = error = 0.0
    for name, layer in policy.named_modules():
        if isinstance(layer, LoraLinear):
            delta = layer.get_delta_weight("default").float()
            written = stored[f"{name.removeprefix('base_model.model.')}.weight"].float() - merge.dense_weight(layer)
            kept, change = kept + (written * delta).sum().item(), change + (delta * delta).sum().item()
            error += (written - delta).square().sum().item()
    assert run["survived"]["kept_fraction"] == pytest.approx(kept / change, abs=5e-3 if dtype == "nvfp4" else 1e-3)
    assert run["survived"]["error_ratio"] == pytest.approx((error / change) ** 0.5, rel=1e-2)
    if dtype == "nvfp4":
        assert (run["survived"]["kept_fraction"] < export.MIN_KEPT_FRACTION) == (size == 0.0005)
    else:
        assert (run["survived"]["error_ratio"] < 0.1) == (size > 0.0005)
        assert seal.recorded_run(made)["survived"] == run["survived"]


def test_a_merge_without_rounding_or_change(tiny_model_dir, tmp_path):
    policy = make_policy(tiny_model_dir("qwen2"), dtype="bfloat16", size=0.3)
    assert "survived" not in export.save_merged(policy, tmp_path / "exact", dtype=torch.float32)
    untrained = make_policy(tiny_model_dir("qwen2"), dtype="bfloat16", size=0.0)
    assert "survived" not in export.save_merged(untrained, tmp_path / "untrained")
    with pytest.raises(ValueError, match=r"Only 0\.000 of the adapter's change"):
        export.save_merged_nvfp4(untrained, tmp_path / "out")


def test_requantized_fused_groups_share_a_global_scale(tiny_model_dir, tmp_path):
    policy = make_policy(tiny_model_dir("llama"), dtype="bfloat16", size=0.3)
    export.save_merged_nvfp4(policy, tmp_path / "nvfp4")
    stored = load_file(tmp_path / "nvfp4" / FILE)
    for layer in range(2):
        names = [f"model.layers.{layer}.self_attn.{c}_proj.weight_global_scale" for c in "qkv"]
        assert len({stored[name].item() for name in names}) == 1


# --- folder, tokenizer, records ---


@pytest.mark.parametrize("as_policy", [False, True], ids=["model", "policy"])
def test_the_tokenizer_that_is_passed_is_written(tiny_model_dir, tiny_tokenizer, tmp_path, caplog, as_policy):
    """With a warning if the run had another one."""
    policy, other = make_policy(tiny_model_dir("qwen2")), copy.deepcopy(tiny_tokenizer)
    other.chat_template = "{{ messages[0].content }}"
    exported = TrainedPolicy(policy, tiny_tokenizer, recorded_tokenizer(tiny_tokenizer)) if as_policy else policy
    export.save_merged(exported, tmp_path / "merged", tiny_tokenizer, overwrite=True)
    assert "is not the one that the run was trained with" not in caplog.text
    export.save_merged(exported, tmp_path / "merged", other, overwrite=True)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == other.chat_template
    assert ("is not the one that the run was trained with" in caplog.text) == as_policy


def test_no_path_of_this_machine_is_published(tiny_model_dir, tiny_tokenizer, tmp_path):
    folder = str(tiny_model_dir("qwen2"))
    trained = TrainedPolicy(make_policy(folder), tiny_tokenizer, {"base_format": "nvfp4", "model": folder})
    export.save_merged(trained, tmp_path / "merged")
    export.save_base(trained, tmp_path / "base")
    for path in [*(tmp_path / "merged").iterdir(), *(tmp_path / "base").iterdir()]:
        assert str(Path(folder).parent).encode() not in path.read_bytes(), path


def test_a_generation_config_that_contradicts_itself_is_kept(tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir("qwen2"), tmp_path / "base")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_p": 0.6, "do_sample": False}))
    export.save_merged(make_policy(folder), tmp_path / "made")
    written = json.loads((tmp_path / "made/generation_config.json").read_text())
    assert (written["temperature"], written["top_p"]) == (0.9, 0.6)


# --- models and tokenizers with code of their own ---


@pytest.mark.parametrize("way", ["merged", "base", "quantized"])
def test_a_model_with_code_of_its_own_is_loaded_where_its_code_is_named(own_code, tmp_path, caplog, way):
    made = tmp_path / "made"

    def make(auto_map):
        if way == "quantized":
            config = json.loads((own_code / "config.json").read_text())
            (own_code / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
            return quantize_folder(own_code, made, trust_remote_code=True, overwrite=True)
        quantized = {} if way == "merged" else {"quantization_config": NVFP4Config()}
        model = AutoModelForCausalLM.from_pretrained(own_code, trust_remote_code=True, **quantized)
        model.config.auto_map = auto_map
        return (export.save_merged if way == "merged" else export.save_base)(model, made, overwrite=True)

    make(CODE)
    (said,) = [record.getMessage() for record in caplog.records if "code of this model" in record.getMessage()]
    for word in ("configuration_own.py, modeling_own.py", str(made), "user/name--modeling_own.OwnForCausalLM"):
        assert word in said
    with pytest.raises(OSError, match=r"_own\.py"):
        AutoModelForCausalLM.from_pretrained(made, trust_remote_code=True)
    caplog.clear()
    make({role: f"{own_code}--{name}" for role, name in CODE.items()})
    assert "code of this model" not in caplog.text and not list(made.glob("*.py"))
    assert type(from_pretrained(made, trust_remote_code=True)).__name__ == "OwnForCausalLM"


@pytest.mark.parametrize("base_format", ["bf16", "nvfp4"])
def test_a_run_on_a_base_with_code_of_its_own_is_rebuilt_with_consent(own_code, tiny_tokenizer, tmp_path, base_format):
    tiny_tokenizer.save_pretrained(own_code)
    base = AutoModelForCausalLM.from_pretrained(own_code, trust_remote_code=True)
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_policy(tmp_path / "adapter", str(own_code), base_format)
    policy = load_policy(tmp_path / "adapter", str(own_code), base_format, trust_remote_code=True)
    assert type(policy.transformers_model).__name__ == "OwnForCausalLM"
    assert type(load_any(str(own_code), trust_remote_code=True).model).__name__ == "OwnForCausalLM"


# --- memory and interruptions ---


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


@pytest.mark.parametrize(("owner", "name", "number"), [(write._Shard, "_publish", 3), (write, "_replace", 1)])
def test_an_export_that_is_killed_leaves_the_old_folder(tiny_model_dir, tmp_path, monkeypatch, owner, name, number):
    """SIGKILL between shards, or when the final rename is due."""
    target, shards = tmp_path / "merged", {"max_shard_bytes": 100_000}
    target.mkdir()
    (target / "old.txt").write_text("old")
    policy = make_policy(tiny_model_dir("qwen2"))
    with pytest.raises(ValueError, match="already exists"):
        export.save_merged(policy, target)
    original, calls = getattr(owner, name), []

    def stop(*args):
        calls.append(args)
        if len(calls) == number:
            (tmp_path / "due").write_text("")
            time.sleep(60)
        original(*args)

    def stopped_export():
        torch.set_num_threads(1)  # the thread pool of the parent does not exist here
        monkeypatch.setattr(owner, name, stop)
        export.save_merged(policy, target, overwrite=True, **shards)

    process = multiprocessing.get_context("fork").Process(target=stopped_export)
    process.start()
    while not (tmp_path / "due").exists() and process.is_alive():
        time.sleep(0.01)
    process.kill()
    process.join()
    (tmp_path / "due").unlink()
    assert process.exitcode == -signal.SIGKILL
    assert [p.name for p in target.iterdir()] == ["old.txt"]
    assert list((tmp_path / ".merged.partial").glob("*.safetensors"))
    export.save_merged(policy, target, overwrite=True, **shards)
    assert not seal.problems(target) and not (target / "old.txt").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["merged"]
