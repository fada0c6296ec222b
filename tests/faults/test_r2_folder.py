"""Faults of a model's folder on disk, judged when it is loaded for training or quantized."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import qerl_trl
from qerl_trl.model import loading
from qerl_trl.nvfp4.headers import INDEX_NAME
from qerl_trl.publish import export
from qerl_trl.publish.load import load_any
from qerl_trl.publish.quantize import quantize_folder
from tests.faults.catalog import fault, raises
from tests.faults.tiny_runs import FILE, contents, edit, flip_a_bit, make_policy, poison

Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def refused(packed_model_dir, tiny_model_dir, tmp_path) -> Callable[..., None]:
    """`refused(change, *words, where="load")`: the changed folder gives no model, and nothing is written."""

    def check(change: Callable[[Path], object], *words: str, where: str = "load") -> None:
        whole = packed_model_dir("compressed-tensors") if where == "load" else tiny_model_dir("llama")
        folder = shutil.copytree(whole, tmp_path / where)
        change(folder)
        damaged = contents(folder)
        with raises(ValueError, str(folder), *words):
            qerl_trl.from_pretrained(folder) if where == "load" else quantize_folder(folder, tmp_path / "out")
        assert contents(folder) == damaged and not (tmp_path / "out").exists()

    return check


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: edit(folder / FILE, change)


@fault("R2.truncated")
@pytest.mark.parametrize(
    ("kept", "words", "where"),
    [(-1, "cut off or damaged", "load"), (-1, "cut off or damaged", "quantize"), (0, "0 bytes", "load")],
)
def test_a_file_that_is_cut_off(kept, words, where, refused):
    def cut(folder: Path) -> None:
        (folder / FILE).write_bytes((folder / FILE).read_bytes()[:kept])

    refused(cut, FILE, words, "download it again", where=where)


def lose_a_shard(folder: Path) -> None:
    stored, parts = load_file(folder / FILE), [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (folder / FILE).unlink()
    weight_map = {name: parts[index % 2] for index, name in enumerate(sorted(stored))}
    save_file({name: stored[name] for name, part in weight_map.items() if part == parts[0]}, folder / parts[0])
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def to_pickle(folder: Path) -> None:
    torch.save(load_file(folder / FILE), folder / "pytorch_model.bin")
    (folder / FILE).unlink()


@pytest.mark.parametrize("where", ["load", "quantize"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            lose_a_shard,
            ("lacks model-00002-of-00002.safetensors", "Download it again"),
            marks=fault("R2.missing_shard"),
        ),
        pytest.param(to_pickle, ("pytorch_model.bin", "can run code", "to safetensors"), marks=fault("R2.pickle_only")),
    ],
)
def test_missing_files(change, words, where, refused):
    refused(change, *words, where=where)


def replace(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict], None]:
    return lambda stored: stored.update({f"{Q}.{name}": change(stored[f"{Q}.{name}"]).clone()})


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        pytest.param("weight_packed", lambda t: t[:, :-4], ("Download or export",), marks=fault("R2.scale_shape")),
        pytest.param("weight_scale", lambda t: t[:, :4], ("Download or export",), marks=fault("R2.scale_shape")),
        pytest.param("weight_global_scale", torch.zeros_like, ("is 0",), marks=fault("R2.global_scale")),
        pytest.param(
            "weight_global_scale",
            torch.reciprocal,
            ("like the reciprocal", "fix its exporter"),
            marks=fault("R2.global_scale"),
        ),
    ],
)
def test_packed_tensors_that_cannot_be_right(name, change, words, refused):
    refused(tensors(replace(name, change)), f"{Q}.{name}", *words)


@fault("R2.nan")
def test_a_block_scale_is_nan(refused):
    change = tensors(lambda stored: stored[f"{Q}.weight_scale"].view(torch.uint8)[3, 2:4].fill_(0x7F))
    refused(change, f"{Q}.weight_scale", "2 of", "NaN", "Download, export")


@fault("R2.w4a4_config", recovered=True)
def test_a_configuration_with_quantized_activations_is_read_for_its_weights(packed_model_dir, tmp_path, caplog):
    folder = shutil.copytree(packed_model_dir("compressed-tensors"), tmp_path / "w4a4")
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {**group["weights"], "dynamic": "local"}
    (folder / "config.json").write_text(json.dumps(config))
    model = qerl_trl.from_pretrained(folder)
    for word in (f"{folder}: config.json", "W4A16", "weight-only checkpoint"):
        assert word in caplog.text
    expected = qerl_trl.from_pretrained(packed_model_dir("compressed-tensors")).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    group = model.hf_quantizer.quantization_config.to_dict()["config_groups"]["group_0"]
    assert group["input_activations"] is None


# --- a sealed folder that was edited ---


@pytest.fixture(scope="module")
def sealed(tiny_model_dir, tiny_tokenizer, tmp_path_factory) -> Path:
    """An NVFP4 model with its manifest."""
    source = shutil.copytree(tiny_model_dir("llama"), tmp_path_factory.mktemp("models") / "dense")
    tiny_tokenizer.save_pretrained(source)
    quantize_folder(source, source.with_name("sealed"))
    return source.with_name("sealed")


@fault("R7.folder_edited")
@pytest.mark.parametrize("load", [qerl_trl.from_pretrained, lambda folder: load_any(str(folder))])
def test_an_edited_model_folder_is_not_loaded(load, sealed, tmp_path):
    folder = shutil.copytree(sealed, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with raises(ValueError, str(folder), "config.json", "Export or download it again", "remove qerl_manifest.json"):
        load(folder)


@fault("R7.folder_edited")
def test_a_flipped_bit_is_found_before_the_first_step(sealed, tiny_runs, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "_AT_ONCE_BYTES", 100_000)
    folder = shutil.copytree(sealed, tmp_path / "model")
    flip_a_bit(folder / FILE)
    trainer = tiny_runs.trainer(tmp_path / "run", model=str(folder))
    with raises(ValueError, str(folder), FILE, "download it again"):
        trainer.train()
    assert trainer.state.global_step == 0


# --- NaN in dense tensors ---


@fault("R2.nan")
@pytest.mark.parametrize("where", ["load", "quantize"])
def test_a_model_with_nan_is_not_read(where, refused):
    change = tensors(lambda stored: poison(stored, "model.norm.weight"))
    refused(change, FILE, "model.norm.weight", "1 of", "NaN or infinite", "Download", where=where)


@fault("R2.nan")
@pytest.mark.parametrize("save", [export.save_merged, export.save_base, export.save_merged_nvfp4, export.save_adapter])
def test_a_policy_with_nan_is_not_exported(save, tiny_model_dir, tmp_path):
    policy = make_policy(tiny_model_dir("llama"), size=0.2)
    name = "lora_A" if save is export.save_adapter else "model.norm.weight"
    with torch.no_grad():
        poison(dict(policy.named_parameters()), name)
    with raises(ValueError, str(tmp_path), name, "NaN or infinite", "again"):
        save(policy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@fault("R2.nan", recovered=True)
def test_weights_that_the_last_step_made_infinite_are_not_saved(tiny_runs, tmp_path):
    """The gradient was finite, and no loss comes after it."""
    trainer = tiny_runs.trainer(tmp_path / "run", max_steps=1, learning_rate=1e39)
    with raises(RuntimeError, "8 of 8 trained parameters are not finite", "Nothing was written", "lower learning_rate"):
        trainer.train()
    with raises(RuntimeError, "not finite", "lower learning_rate"):
        trainer.save_model()
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    assert tiny_runs.command(tmp_path / "run", max_steps=1).state.global_step == 1
