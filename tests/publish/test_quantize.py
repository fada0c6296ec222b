"""Folder quantization: the same bytes as quantizing at load, whole or absent, within its memory."""

import json
import multiprocessing
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_trl import NVFP4Config
from qerl_trl.checkpoint import seal
from qerl_trl.nvfp4.config import from_pretrained
from qerl_trl.nvfp4.format import SCALE_RULES
from qerl_trl.nvfp4.headers import INDEX_NAME
from qerl_trl.nvfp4.linear import NVFP4Linear
from qerl_trl.publish import quantize, write
from qerl_trl.publish.quantize import quantize_folder
from tests.faults.tiny_runs import FILE, edit

IDS = torch.randint(5, 300, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("family", ["qwen2", "gemma3", "phi3"])
def test_folder_equals_quantizing_at_load(tiny_model_dir, tmp_path, family, rule):
    done = quantize_folder(tiny_model_dir(family), tmp_path / "out", rule)
    ours = from_pretrained(tmp_path / "out")
    live = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir(family), quantization_config=NVFP4Config(rule), dtype="bfloat16"
    )
    state, expected = ours.state_dict(), live.state_dict()
    assert state.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(state[name], tensor)]
    layers = {name for name, module in live.named_modules() if isinstance(module, NVFP4Linear)}
    assert {layer["name"] for layer in done.layers} == layers
    ignored = live.hf_quantizer.quantization_config.to_dict()["ignore"]
    assert ours.config.quantization_config.to_dict()["ignore"] == ignored


@torch.compiler.set_stance("force_eager")  # compressed-tensors compiles its unpacking: seconds, for nothing
def test_stock_transformers_reads_it(tiny_model_dir, tmp_path):
    quantize_folder(tiny_model_dir("llama"), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert not any(isinstance(module, NVFP4Linear) for module in loaded.modules())
    ours = from_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, ours(IDS).logits, rtol=0, atol=0)


def test_shards_workers_and_small_pieces_give_the_same_tensors(tiny_model_dir, tmp_path, monkeypatch):
    quantize_folder(tiny_model_dir("qwen2"), tmp_path / "one", workers=1)
    monkeypatch.setattr(quantize, "_PIECE_BYTES", 1000)  # less than an embedding, more than some of its rows
    quantize_folder(tiny_model_dir("qwen2"), tmp_path / "many", workers=4, max_shard_bytes=40_000)
    one, shards = load_file(tmp_path / "one" / FILE), sorted((tmp_path / "many").glob("*.safetensors"))
    many = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert one.keys() == many.keys() and len(shards) > 3
    index = json.loads((tmp_path / "many" / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    assert index["weight_map"].keys() == one.keys()
    assert not [name for name in one if not torch.equal(one[name].view(torch.uint8), many[name].view(torch.uint8))]


@pytest.mark.gpu
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_a_gpu_gives_the_same_files(tiny_model_dir, tmp_path, monkeypatch, rule):
    quantize_folder(tiny_model_dir("qwen2"), tmp_path / "cpu", rule)
    monkeypatch.setattr(quantize, "_PIECE_BYTES", 1000)
    quantize_folder(tiny_model_dir("qwen2"), tmp_path / "cuda", rule, device="cuda")
    assert (tmp_path / "cpu/model.safetensors").read_bytes() == (tmp_path / "cuda/model.safetensors").read_bytes()


def test_the_report_and_skipped_modules(tiny_model_dir, tmp_path):
    done = quantize_folder(tiny_model_dir("llama"), tmp_path / "out", modules_to_not_convert=["1.mlp.down_proj"])
    report = json.loads((tmp_path / "out" / quantize.REPORT_NAME).read_text())
    assert report["not_quantized"] == done.skipped == ["lm_head", "model.layers.1.mlp.down_proj"]
    stored = load_file(tmp_path / "out" / FILE)
    assert "model.layers.1.mlp.down_proj.weight" in stored and "model.layers.1.mlp.up_proj.weight_packed" in stored
    dense = AutoModelForCausalLM.from_pretrained(tiny_model_dir("llama"))
    packed = from_pretrained(tmp_path / "out")
    for layer in report["layers"]:
        weight = dense.get_submodule(layer["name"]).weight.float()
        error = packed.get_submodule(layer["name"]).dequantize(torch.float32) - weight
        assert layer["nmse"] == pytest.approx((error.square().sum() / weight.square().sum()).item(), rel=1e-5)
        assert layer["largest_error"] == pytest.approx(error.abs().max().item())
    assert 0.005 < done.nmse < 0.02


def test_a_source_that_cannot_be_quantized_is_refused(tiny_model_dir, tmp_path):
    source = shutil.copytree(tiny_model_dir("llama"), tmp_path / "source")
    edit(source / FILE, lambda stored: {n: t for n, t in stored.items() if "0.mlp.up_proj" not in n})
    with pytest.raises(ValueError, match=r"no tensor of their shape in .*up_proj"):
        quantize_folder(source, tmp_path / "out")
    (source / FILE).unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        quantize_folder(source, tmp_path / "out")
    with pytest.raises(ValueError, match="neither a folder here nor a Hub id"):
        quantize_folder(tmp_path / "nothing", tmp_path / "out")
    quantize_folder(tiny_model_dir("llama"), tmp_path / "out")
    with pytest.raises(ValueError, match="quantized already"):
        quantize_folder(tmp_path / "out", tmp_path / "twice")


def test_killed_and_continued(tiny_model_dir, tmp_path, monkeypatch):
    source, target, partial = tiny_model_dir("qwen2"), tmp_path / "out", tmp_path / ".out.partial"
    options = {"max_shard_bytes": 40_000, "workers": 2}
    write_at = write._write_at

    def slow():
        torch.set_num_threads(1)
        monkeypatch.setattr(write, "_write_at", lambda *args: (time.sleep(0.02), write_at(*args)))
        quantize_folder(source, target, **options)

    process = multiprocessing.get_context("fork").Process(target=slow)
    process.start()
    while len(list(partial.glob("*.safetensors"))) < 2 and process.is_alive():
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not target.exists()
    stamps = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.safetensors")}
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


def test_another_tokenizer_with_the_same_weights_is_another_base(tiny_model_dir, tiny_tokenizer, tmp_path):
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
