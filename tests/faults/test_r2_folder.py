"""Faults of a checkpoint folder on disk: each is an edit of a whole one, judged where a user's folder is read.

An NVFP4 folder, as llm-compressor writes it, is loaded; a dense one is quantized offline. Neither may give a model, and neither is
changed by being refused: with the whole files in their place the same call gives what it would have given at once.
"""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import qerl_trl
from qerl_trl.nvfp4.headers import INDEX_NAME
from qerl_trl.publish.quantize import quantize_folder
from tests.faults.catalog import fault, told
from tests.faults.tiny_runs import WEIGHTS, Interrupted, TinyRuns, contents, interrupting, tiny_runs  # noqa: F401

FILE = "model.safetensors"
Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def packed(packed_model_dir) -> Path:
    return packed_model_dir("compressed-tensors")


@pytest.fixture(scope="module")
def expected(packed, tiny_model_dir, tmp_path_factory) -> dict[str, dict]:
    """What each door gives for a whole folder: the model's tensors, the quantized files."""
    folder = shutil.copytree(tiny_model_dir("llama"), tmp_path_factory.mktemp("whole") / "quantize")
    quantize_folder(folder, folder.parent / "out")
    return {"load": qerl_trl.from_pretrained(packed).state_dict(), "quantize": contents(folder.parent / "out")}


@pytest.fixture
def refused(packed, tiny_model_dir, expected, tmp_path) -> Callable[..., None]:
    """`refused(edit, *words, where="load")`: the edited folder gives no model, and the message holds the words. Nothing is written, there
    or beside it; once the files are whole again, the same call gives what it gives for a folder that always was."""

    def check(edit: Callable[[Path], None], *words: str, where: str = "load") -> None:
        whole = packed if where == "load" else tiny_model_dir("llama")
        folder = shutil.copytree(whole, tmp_path / where)
        edit(folder)
        damaged = contents(tmp_path)

        def call():
            return qerl_trl.from_pretrained(folder) if where == "load" else quantize_folder(folder, tmp_path / "out")

        with told(ValueError, str(folder), *words):
            call()
        assert contents(tmp_path) == damaged

        restore(folder, whole)
        product = call()
        if where == "quantize":
            assert contents(tmp_path / "out") == expected[where]
        else:
            state = product.state_dict()
            assert state.keys() == expected[where].keys()
            assert all(torch.equal(state[name], tensor) for name, tensor in expected[where].items())

    return check


def restore(folder: Path, whole: Path) -> None:
    """Download it again: the files of `whole`, and no others."""
    for path in folder.iterdir():
        path.unlink()
    shutil.copytree(whole, folder, dirs_exist_ok=True)


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        stored = load_file(folder / FILE)
        change(stored)
        save_file(stored, folder / FILE, metadata={"format": "pt"})

    return edit


def header(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = (folder / FILE).read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        entries = json.loads(content[8 : 8 + size])
        change(entries)
        text = json.dumps(entries).encode()
        (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])

    return edit


def in_shards(folder: Path) -> dict[str, str]:
    """Two shards with their index."""
    stored = load_file(folder / FILE)
    (folder / FILE).unlink()
    names = sorted(stored)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: stored[name] for name in part}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


BOTH = pytest.mark.parametrize("where", ["load", "quantize"])


@fault("R2.truncated", recovered=True)
@BOTH
@pytest.mark.parametrize("bytes_left", [5, 200, -1])
def test_truncated(bytes_left, where, refused):
    def cut(folder):
        (folder / FILE).write_bytes((folder / FILE).read_bytes()[:bytes_left])

    refused(cut, FILE, "cut off or damaged", "download it again", where=where)


@fault("R2.empty", recovered=True)
@BOTH
def test_empty(where, refused):
    refused(lambda folder: (folder / FILE).write_bytes(b""), FILE, "0 bytes", "download it again", where=where)


@fault("R2.header_bomb", recovered=True)
@BOTH
def test_header_bomb(where, refused):
    def bomb(folder):
        (folder / FILE).write_bytes(struct.pack("<Q", 1 << 40) + b"{" * 1000)

    refused(bomb, FILE, "header too large", "download it again", where=where)


@fault("R2.header_bomb", recovered=True)
@BOTH
def test_a_shape_whose_size_overflows(where, refused):
    change = header(lambda entries: entries["model.norm.weight"].update(shape=[1 << 40, 1 << 40]))
    refused(change, FILE, "overflow", "download it again", where=where)


@fault("R2.overlapping_offsets", recovered=True)
@BOTH
def test_overlapping_offsets(where, refused):
    def overlap(entries):
        first, second = sorted((n for n in entries if n != "__metadata__"), key=lambda n: entries[n]["data_offsets"])[
            :2
        ]
        entries[second]["data_offsets"][0] = entries[first]["data_offsets"][1] - 16

    refused(header(overlap), FILE, "invalid", "download it again", where=where)


@fault("R2.missing_shard", recovered=True)
@BOTH
def test_missing_shard(where, refused):
    def lose(folder):
        in_shards(folder)
        (folder / "model-00002-of-00002.safetensors").unlink()

    refused(lose, "lacks model-00002-of-00002.safetensors", "Download it again", where=where)


@fault("R2.extra_tensor", recovered=True)
def test_an_extra_tensor_beside_packed_weights(refused):
    extra = {f"{Q}.pre_quant_scale": torch.ones(128)}
    refused(
        tensors(lambda stored: stored.update(extra)),
        f"{Q}.pre_quant_scale",
        "may change what the weights mean",
        "plain NVFP4",
    )


@fault("R2.extra_tensor", recovered=True)
def test_packed_weights_of_a_layer_that_the_model_has_not(refused):
    def double(stored):
        stored.update({n.replace("layers.1.", "layers.7."): t.clone() for n, t in stored.items() if n.startswith(Q)})

    refused(tensors(double), "layers.7.self_attn.q_proj", "no linear of the model", "config.json is another model's")


@fault("R2.wrong_packed_dtype", recovered=True)
def test_wrong_packed_dtype(refused):
    name = f"{Q}.weight_packed"
    refused(
        tensors(lambda stored: stored.update({name: stored[name].view(torch.int8)})),
        name,
        "is I8",
        "Download or export",
    )


@fault("R2.odd_k", recovered=True)
def test_a_width_that_is_no_multiple_of_16(refused):
    name = f"{Q}.weight_packed"
    refused(
        tensors(lambda stored: stored.update({name: stored[name][:, :-4].clone()})),
        name,
        "belongs there",
        "Download or export",
    )


@fault("R2.scale_shape", recovered=True)
def test_scale_shape(refused):
    name = f"{Q}.weight_scale"
    refused(
        tensors(lambda stored: stored.update({name: stored[name][:, :4].clone()})),
        name,
        "belongs there",
        "Download or export",
    )


@fault("R2.scale_nan", recovered=True)
@pytest.mark.parametrize("bits", [0x7F, 0xFF])
def test_a_block_scale_is_nan(bits, refused):
    change = tensors(lambda stored: stored[f"{Q}.weight_scale"].view(torch.uint8)[3, 2:4].fill_(bits))
    refused(change, f"{Q}.weight_scale", "2 of", "NaN", "Download, export")


@fault("R2.global_scale_not_finite", recovered=True)
@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), -1.0])
def test_the_global_scale_is_no_positive_finite_number(value, refused):
    change = tensors(lambda stored: stored[f"{Q}.weight_global_scale"].fill_(value))
    refused(change, f"{Q}.weight_global_scale", f"is {value:g}", "no positive finite number", "Download or export")


@fault("R2.global_scale_reciprocal", recovered=True)
def test_the_global_scale_is_the_reciprocal(refused):
    change = tensors(lambda stored: stored[f"{Q}.weight_global_scale"].reciprocal_())
    refused(change, f"{Q}.weight_global_scale", "looks like the reciprocal", "fix its exporter")


@fault("R2.w4a4_config", recovered=True)
def test_a_configuration_that_quantizes_activations_too_is_read_for_its_weights(packed, tmp_path, caplog):
    folder = shutil.copytree(packed, tmp_path / "w4a4")
    edit_group(folder, lambda group: group.update(input_activations={**group["weights"], "dynamic": "local"}))
    model = qerl_trl.from_pretrained(folder)
    assert (
        f"{folder}: config.json" in caplog.text and "W4A16" in caplog.text and "weight-only checkpoint" in caplog.text
    )
    state, expected = model.state_dict(), qerl_trl.from_pretrained(packed).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert model.hf_quantizer.quantization_config.to_dict()["config_groups"]["group_0"]["input_activations"] is None


@fault("R2.w4a4_config")
def test_a_configuration_that_quantizes_activations_only(refused):
    def only(group):
        group.update(input_activations=group["weights"], weights=None)

    words = ("config.json", "'num_bits': None", "Start from the unquantized model")
    refused(lambda folder: edit_group(folder, only), *words)


def edit_group(folder: Path, change: Callable[[dict], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"]["config_groups"]["group_0"])
    (folder / "config.json").write_text(json.dumps(config))


@fault("R2.pickle_only", recovered=True)
@BOTH
def test_pickle_only(where, refused):
    def pickle(folder):
        torch.save(load_file(folder / FILE), folder / "pytorch_model.bin")
        (folder / FILE).unlink()

    refused(pickle, "pytorch_model.bin", "can run code", "Convert the checkpoint to safetensors", where=where)


@fault("R2.truncated", recovered=True)
@fault("R2.empty", recovered=True)
def test_a_run_whose_base_was_damaged_goes_on(tiny_runs, tmp_path):  # noqa: F811
    """Interrupted after its first step, then refused for its base, it ends as the run that nothing happened to."""
    whole, run, base = tmp_path / "whole", tmp_path / "run", tmp_path / "base"
    shutil.copytree(tiny_runs.model, base)
    runs = TinyRuns(base, tiny_runs.tokenizer)
    runs.command(whole)
    with pytest.raises(Interrupted):
        runs.trainer(run, reward=interrupting(2)).train()
    before, saved = contents(run), contents(run / "checkpoint-1")
    content = (base / FILE).read_bytes()
    for left in (-1, 0):
        (base / FILE).write_bytes(content[:left])
        with told(ValueError, str(base), FILE, "download it again"):
            runs.command(run)
        assert contents(run) == before
    restore(base, Path(tiny_runs.model))
    trainer = runs.command(run)
    assert contents(run / "checkpoint-1") == saved  # it went on from there
    assert trainer.state.global_step == 2 and (run / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
