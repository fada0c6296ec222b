"""A folder that was written tensor by tensor computes the same read back layer by layer as loaded whole, and is compared with it."""

import json
import shutil

import pytest
import torch

import qerl_trl
from qerl_trl import checkpoint, forward
from qerl_trl.nvfp4.config import from_pretrained
from qerl_trl.publish import export, read_back
from qerl_trl.publish.quantize import quantize_folder
from qerl_trl.publish.run import TrainedPolicy, load_any
from tests.faults.catalog import told
from tests.faults.tiny_runs import tiny_runs  # noqa: F401  (a fixture)
from tests.publish.test_export import make_policy


def recorded(folder):
    return json.loads((folder / forward.FORWARD_NAME).read_text())


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma3", "phi3"])
def test_layer_by_layer_is_as_whole(family, tiny_model_dir, tmp_path):
    quantize_folder(tiny_model_dir(family), tmp_path / "out")
    then = recorded(tmp_path / "out")
    now = forward.measure(from_pretrained(tmp_path / "out"), then["tokens"])
    assert now["model_class"] == then["model_class"] and now["packed"] and then["packed"]
    assert forward.difference(then, now) < 1e-3
    assert forward.FORWARD_NAME in checkpoint.sealed_files(tmp_path / "out")


def test_one_layer_is_in_memory_at_a_time(tiny_model_dir, tmp_path, monkeypatch):
    held = []

    def put(module, old, new):
        keep(module, old, new)
        held.append(sum(p.numel() * p.element_size() for p in module.parameters() if not p.is_meta))

    quantize_folder(tiny_model_dir("llama", num_hidden_layers=6), tmp_path / "out")
    keep = read_back._put
    monkeypatch.setattr(read_back, "_put", put)
    (tmp_path / "out" / forward.FORWARD_NAME).unlink()
    assert read_back.record(tmp_path / "out")
    dense = 2 * (2 * 320 * 128 + 128)
    one = (sum(f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors")) - dense) / 6
    assert max(held) <= max(dense, 1.2 * one)


def test_what_is_rounded_again_is_recorded(tiny_model_dir, tiny_tokenizer, tmp_path):
    policy = TrainedPolicy(make_policy(tiny_model_dir("llama"), size=0.2), tiny_tokenizer, {})
    export.save_merged_nvfp4(policy, tmp_path / "out", force=True, notify=lambda text: None)
    then = recorded(tmp_path / "out")
    assert forward.difference(then, forward.measure(load_any(str(tmp_path / "out")).model, then["tokens"])) < 1e-3


def other_forward(folder):
    """The seal is whole, and says that something else was computed."""
    then = recorded(folder)
    (folder / forward.FORWARD_NAME).write_text(json.dumps({**then, "logps": [logp - 9.0 for logp in then["logps"]]}))
    checkpoint.seal(folder, checkpoint.recorded_run(folder))
    return folder


def test_a_folder_that_computes_something_else_is_not_trained_on(tiny_runs, tmp_path):  # noqa: F811
    base = tmp_path / "base"
    quantize_folder(tiny_runs.model, base)
    tiny_runs.model, dense = str(base), tiny_runs.model
    try:
        whole = tiny_runs.trainer(tmp_path / "run", max_steps=1)
        next(p for name, p in whole.model.named_parameters() if "lora_A" in name).requires_grad_(False)
        trained = [name for name, parameter in whole.model.named_parameters() if parameter.requires_grad]
        whole.train()
        assert [name for name, parameter in whole.model.named_parameters() if parameter.requires_grad] == trained
        other_forward(base)
        with told(ValueError, str(base), "something else than when it was exported", "torch", "export it again"):
            tiny_runs.trainer(tmp_path / "other").train()
    finally:
        tiny_runs.model = dense
    assert not list((tmp_path / "other").glob("checkpoint-*"))


def test_what_takes_long_on_a_cpu_is_neither_recorded_nor_compared(tiny_model_dir, tmp_path, monkeypatch):
    quantize_folder(tiny_model_dir("llama"), tmp_path / "out")
    other = other_forward(shutil.copytree(tmp_path / "out", tmp_path / "other"))
    with pytest.raises(ValueError, match="computes something else"):
        qerl_trl.from_pretrained(other)
    monkeypatch.setattr(forward, "_MOST_ON_A_CPU", 1000)
    qerl_trl.from_pretrained(other)
    quantize_folder(tiny_model_dir("llama"), tmp_path / "large")
    assert not (tmp_path / "large" / forward.FORWARD_NAME).exists()
    assert forward.is_quick(from_pretrained(tmp_path / "large"), torch.device("cuda"))
