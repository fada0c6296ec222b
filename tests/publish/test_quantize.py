"""Folder quantization: the same bytes as quantizing at load, whole or absent, within its memory."""

import json
import multiprocessing
import shutil
import signal
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_trl import NVFP4Config
from qerl_trl.checkpoint import seal
from qerl_trl.nvfp4 import headers
from qerl_trl.nvfp4.config import from_pretrained
from qerl_trl.nvfp4.format import SCALE_RULES
from qerl_trl.nvfp4.linear import NVFP4Linear
from qerl_trl.publish import quantize, write
from qerl_trl.publish.quantize import quantize_folder
from tests.hub_server import TOKEN
from tests.publish.conftest import CODE

IDS = torch.randint(5, 300, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma3", "phi3"])
def test_folder_equals_quantizing_at_load(tiny_model_dir, tmp_path, family, rule):
    done = quantize_folder(tiny_model_dir(family), tmp_path / "out", rule)
    ours = from_pretrained(tmp_path / "out")
    live = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir(family), quantization_config=NVFP4Config(rule), dtype="bfloat16"
    )
    state, expected = ours.state_dict(), live.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    layers = {name for name, module in live.named_modules() if isinstance(module, NVFP4Linear)}
    assert {layer["name"] for layer in done.layers} == layers
    assert (
        ours.config.quantization_config.to_dict()["ignore"] == live.hf_quantizer.quantization_config.to_dict()["ignore"]
    )


@torch.compiler.set_stance("force_eager")  # compressed-tensors compiles its unpacking: seconds, for nothing
def test_stock_transformers_reads_it(tiny_model_dir, tmp_path):
    quantize_folder(tiny_model_dir("llama"), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert not any(isinstance(module, NVFP4Linear) for module in loaded.modules())
    ours = from_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, ours(IDS).logits, rtol=0, atol=0)


def test_several_shards_and_workers_give_the_same_tensors(tiny_model_dir, tmp_path):
    quantize_folder(tiny_model_dir("qwen2"), tmp_path / "one", workers=1)
    quantize_folder(tiny_model_dir("qwen2"), tmp_path / "many", workers=4, max_shard_bytes=40_000)
    index = json.loads((tmp_path / "many" / headers.INDEX_NAME).read_text())["weight_map"]
    assert len(set(index.values())) > 3
    with safe_open(tmp_path / "one/model.safetensors", "pt") as one:
        assert set(one.keys()) == set(index)
        for name, file in index.items():
            with safe_open(tmp_path / "many" / file, "pt") as shard:
                a, b = one.get_tensor(name), shard.get_tensor(name)
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def test_tensors_larger_than_a_buffer_are_copied_whole(tiny_model_dir, tmp_path, monkeypatch):
    quantize_folder(tiny_model_dir("llama"), tmp_path / "one")
    monkeypatch.setattr(quantize, "_PIECE_BYTES", 1000)  # less than an embedding, more than some of its rows
    quantize_folder(tiny_model_dir("llama"), tmp_path / "many")
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "many/model.safetensors").read_bytes()


@pytest.mark.parametrize("workers", [1, 3])
def test_slices_odd_sizes_and_hashes(tmp_path, workers):
    tensors = {
        "odd": torch.arange(5, dtype=torch.uint8),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "matrix": torch.randn(7, 3).bfloat16(),
        "wide": torch.randn(6, 4),
        "three": torch.randn(3).half(),
    }

    def job(name, tensor):
        pieces = tensor.split(2) if name in ("matrix", "wide") else [tensor]
        return write.Job((write.TensorSpec(name, tensor.dtype, tuple(tensor.shape)),), lambda: pieces)

    with write.staging(tmp_path / "out", {}) as folder:
        write.write_shards(folder, [job(*item) for item in tensors.items()], {}, workers=workers)
    assert not seal.problems(tmp_path / "out")  # compares the hashes
    content = (tmp_path / "out/model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.dtype.itemsize == 0
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())


@pytest.mark.gpu
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_a_gpu_gives_the_same_files(tiny_model_dir, tmp_path, monkeypatch, rule):
    quantize_folder(tiny_model_dir("qwen2"), tmp_path / "cpu", rule)
    monkeypatch.setattr(quantize, "_PIECE_BYTES", 1000)
    quantize_folder(tiny_model_dir("qwen2"), tmp_path / "cuda", rule, device="cuda")
    assert (tmp_path / "cpu/model.safetensors").read_bytes() == (tmp_path / "cuda/model.safetensors").read_bytes()


def test_error_report_is_true(tiny_model_dir, tmp_path):
    done = quantize_folder(tiny_model_dir("llama"), tmp_path / "out")
    report = json.loads((tmp_path / "out" / quantize.REPORT_NAME).read_text())
    assert report["not_quantized"] == ["lm_head"]
    dense = AutoModelForCausalLM.from_pretrained(tiny_model_dir("llama"))
    packed = from_pretrained(tmp_path / "out")
    for layer in report["layers"]:
        weight = dense.get_submodule(layer["name"]).weight.float()
        error = packed.get_submodule(layer["name"]).dequantize(torch.float32) - weight
        assert layer["nmse"] == pytest.approx((error.square().sum() / weight.square().sum()).item(), rel=1e-5)
        assert layer["largest_error"] == pytest.approx(error.abs().max().item())
    assert 0.005 < done.nmse < 0.02


def test_skipping_modules(tiny_model_dir, tmp_path):
    done = quantize_folder(tiny_model_dir("qwen2"), tmp_path / "out", modules_to_not_convert=["down_proj"])
    assert "model.layers.0.mlp.down_proj" in done.skipped
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.down_proj.weight" in file.keys()  # noqa: SIM118
        assert "model.layers.0.mlp.up_proj.weight_packed" in file.keys()  # noqa: SIM118


def damaged(folder, tmp_path, change):
    from safetensors.torch import load_file

    copy = tmp_path / "source"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_an_evaluation_of_the_source_stays_with_the_source(tiny_model_dir, tmp_path):
    """At 843f908 the sealed folder had what `qerl-trl eval` measured of the unquantized model as if it were its own."""
    source = damaged(tiny_model_dir("qwen2"), tmp_path, lambda tensors: None)
    (source / "eval-gsm8k.json").write_text('{"accuracy": 0.9}')
    (source / "tokenizer_config.json").write_text("{}")
    quantize_folder(source, tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert "tokenizer_config.json" in names and not [name for name in names if name.startswith("eval-")]


def test_a_nan_is_refused_with_its_place(tiny_model_dir, tmp_path):
    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")

    source = damaged(tiny_model_dir("llama"), tmp_path, change)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight': .*(nan|NaN)"):
        quantize_folder(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_tensors_and_wrong_sources_are_refused(tiny_model_dir, tmp_path):
    source = damaged(
        tiny_model_dir("llama"), tmp_path, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight")
    )
    with pytest.raises(ValueError, match=r"no tensor of their shape in .*up_proj"):
        quantize_folder(source, tmp_path / "out")
    with pytest.raises(ValueError, match="neither a folder here nor a Hub id"):
        quantize_folder(tmp_path / "nothing", tmp_path / "out")
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        quantize_folder(source, tmp_path / "out")
    quantize_folder(tiny_model_dir("llama"), tmp_path / "out")
    with pytest.raises(ValueError, match="quantized already"):
        quantize_folder(tmp_path / "out", tmp_path / "twice")


@pytest.mark.parametrize("delay", [0.15, 0.4])
def test_killed_and_continued(tiny_model_dir, tmp_path, monkeypatch, delay):
    source, target, partial = tiny_model_dir("qwen2"), tmp_path / "out", tmp_path / ".out.partial"
    options = {"max_shard_bytes": 40_000, "workers": 2}
    write_at = write._write_at

    def slow():
        torch.set_num_threads(1)
        monkeypatch.setattr(write, "_write_at", lambda *args: (time.sleep(0.02), write_at(*args)))
        quantize_folder(source, target, **options)

    process = multiprocessing.get_context("fork").Process(target=slow)
    process.start()
    while not list(partial.glob("*.safetensors")) and process.is_alive():
        time.sleep(0.01)
    time.sleep(delay)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not target.exists()
    stamps = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.safetensors")}
    assert stamps
    done = quantize_folder(source, target, **options)
    assert {name: (target / name).stat().st_mtime_ns for name in stamps} == stamps
    assert len(done.layers) == 14  # the report covers shards of both runs
    assert not seal.problems(target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert quantize_folder(source, target, **options) == done


def test_other_options_do_not_continue_an_old_run(tiny_model_dir, tmp_path, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize, "_copy_beside", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize_folder(tiny_model_dir("qwen2"), tmp_path / "out", "rtn")
    monkeypatch.undo()
    assert (tmp_path / ".out.partial/model.safetensors").is_file()
    quantize_folder(tiny_model_dir("qwen2"), tmp_path / "out", "four_over_six")
    quantize_folder(tiny_model_dir("qwen2"), tmp_path / "fresh", "four_over_six")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "fresh/model.safetensors").read_bytes()


def test_code_that_stays_with_the_source_is_told(own_code, tmp_path, caplog):
    """As of an export (test_export.py), beforehand: nobody can load what is written by itself."""
    config = json.loads((own_code / "config.json").read_text())
    quantize_folder(own_code, tmp_path / "made", trust_remote_code=True)
    said = [record.getMessage() for record in caplog.records if "code of this model" in record.getMessage()]
    for word in (
        "configuration_own.py, modeling_own.py",
        str(tmp_path / "made"),
        "user/name--modeling_own.OwnForCausalLM",
    ):
        assert [word in line for line in said] == [True]
    assert not list((tmp_path / "made").glob("*.py"))
    caplog.clear()
    named = {role: f"{own_code}--{name}" for role, name in CODE.items()}
    (own_code / "config.json").write_text(json.dumps({**config, "auto_map": named}))
    quantize_folder(own_code, tmp_path / "made", trust_remote_code=True, overwrite=True)
    assert "code of this model" not in caplog.text and not list((tmp_path / "made").glob("*.py"))
    loaded = from_pretrained(tmp_path / "made", trust_remote_code=True)
    assert type(loaded).__name__ == "OwnForCausalLM"


def test_of_a_model_on_the_hub_the_repository_with_its_code_is_named(own_code, server, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (own_code / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokens_own.Own", None]}})
    )
    server.put("someone/own", **{path.name: path.read_bytes() for path in own_code.iterdir()})
    quantize_folder("someone/own", tmp_path / "made", trust_remote_code=True)
    assert "code of this model" not in caplog.text and not list((tmp_path / "made").glob("*.py"))
    written = json.loads((tmp_path / "made/config.json").read_text())["auto_map"]
    assert written == {role: f"someone/own--{name}" for role, name in CODE.items()}
    tokenizer = json.loads((tmp_path / "made/tokenizer_config.json").read_text())["auto_map"]
    assert tokenizer == {"AutoTokenizer": ["someone/own--tokens_own.Own", None]}


def test_another_tokenizer_beside_the_same_weights_is_another_base(tiny_model_dir, tiny_tokenizer, tmp_path):
    """Weights and configuration are as they were, and a template was mended since."""
    shutil.copytree(tiny_model_dir("qwen2"), tmp_path / "source")
    tiny_tokenizer.save_pretrained(tmp_path / "source")
    quantize_folder(tmp_path / "source", tmp_path / "made")
    stamp = (tmp_path / "made/model.safetensors").stat().st_mtime_ns
    quantize_folder(tmp_path / "source", tmp_path / "made")  # is there already
    assert (tmp_path / "made/model.safetensors").stat().st_mtime_ns == stamp
    time.sleep(0.01)
    (tmp_path / "source/chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ValueError, match="already exists"):
        quantize_folder(tmp_path / "source", tmp_path / "made")
    quantize_folder(tmp_path / "source", tmp_path / "made", overwrite=True)
    assert AutoTokenizer.from_pretrained(tmp_path / "made").chat_template == "{{ messages[0].content }}"


def test_what_a_run_left_beside_its_model_is_not_copied(tiny_model_dir, tmp_path):
    """A base that looks like a run is not replaced by a later command."""
    source = shutil.copytree(tiny_model_dir("qwen2"), tmp_path / "checkpoint-500")
    for name in ("trainer_state.json", "all_results.json", "before.json"):
        (source / name).write_text("{}")
    quantize_folder(source, tmp_path / "base")
    assert not seal.of_a_run(tmp_path / "base")
    assert not {"trainer_state.json", "all_results.json", "before.json"} & {
        p.name for p in (tmp_path / "base").iterdir()
    }
    quantize_folder(source, tmp_path / "base", "four_over_six", overwrite=True)
