"""Faults of what is read and written: model folders, manifests, run folders. They passed without a word at 843f908."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl_trl.nvfp4.config import from_pretrained
from qerl_trl.nvfp4.shards import INDEX_NAME
from qerl_trl.publish.quantize import quantize_folder
from tests.faults.catalog import fault, told


@pytest.fixture
def dense(tiny_model_dir, tmp_path) -> Path:
    """A dense model, to be damaged."""
    return shutil.copytree(tiny_model_dir("llama"), tmp_path / "dense")


def edit_header(file: Path, change) -> None:
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    header = change(header) or header
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


def shift(header: dict) -> None:
    """The second tensor's bytes become the last of the first one's and some of its own."""
    first, second = sorted(
        (name for name in header if name != "__metadata__"), key=lambda n: header[n]["data_offsets"]
    )[:2]
    end = header[second]["data_offsets"][1] - 32
    header[second]["data_offsets"] = [header[first]["data_offsets"][1] - 32, end]


def negative(header: dict) -> None:
    header["lm_head.weight"]["data_offsets"] = [-64, header["lm_head.weight"]["data_offsets"][1] - 64]


@fault("S.negative_offsets")
@pytest.mark.parametrize("change", [shift, negative], ids=["overlapping", "negative"])
def test_offsets_that_safetensors_refuses_are_not_quantized(change, dense, tmp_path):
    edit_header(dense / "model.safetensors", change)
    with told(ValueError, "dense/model.safetensors", "offset" if change is shift else "-64", "download it again"):
        quantize_folder(dense, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@fault("S.odd_header")
@pytest.mark.parametrize(
    "change",
    [lambda h: [1], lambda h: {"x": 1}, lambda h: h["model.norm.weight"].pop("data_offsets") and None],
    ids=["list", "no entry", "no offsets"],
)
def test_an_odd_header_is_named(change, dense, tmp_path):
    edit_header(dense / "model.safetensors", change)
    with told(ValueError, "dense/model.safetensors", "not a whole safetensors file", "download it again"):
        quantize_folder(dense, tmp_path / "out")


@fault("S.odd_header", recovered=True)
def test_a_legal_integer_buffer_is_copied(dense, tmp_path):
    tensors = load_file(dense / "model.safetensors")
    buffers = {"model.positions": torch.arange(7), "model.flags": torch.tensor([True, False])}
    save_file({**tensors, **buffers}, dense / "model.safetensors", metadata={"format": "pt"})
    quantize_folder(dense, tmp_path / "out")
    written = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in buffers.items())


def by_index(folder: Path, other: Path) -> None:
    weights = dict.fromkeys(load_file(other / "model.safetensors"), f"../{other.name}/model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weights}))


def by_link(folder: Path, other: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(other / "model.safetensors")


@fault("S.path_leads_out")
@pytest.mark.parametrize("lead", [by_index, by_link])
@pytest.mark.parametrize("use", [from_pretrained, lambda folder: quantize_folder(folder, folder.parent / "out")])
def test_files_outside_of_the_folder_are_not_read(use, lead, dense, tiny_model_dir, tmp_path):
    other = shutil.copytree(tiny_model_dir("llama"), tmp_path / "other")
    lead(dense, other)
    with told(ValueError, "dense", str(other / "model.safetensors"), "leads out", "name the folder"):
        use(dense)


@fault("S.path_leads_out")
def test_a_linked_text_is_not_copied_into_what_will_be_published(dense, tmp_path):
    (tmp_path / "private.json").write_text('"a secret"')
    (dense / "tokenizer.json").symlink_to(tmp_path / "private.json")
    with told(ValueError, "dense/tokenizer.json", "leads out", "copy them here"):
        quantize_folder(dense, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_links_of_the_hubs_cache_are_followed(tiny_model_dir, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b/snapshots/1234", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in tiny_model_dir("llama").iterdir():
        shutil.copyfile(file, blobs / f"hash-of-{file.name}")
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / f"hash-of-{file.name}", snapshot))
    quantize_folder(snapshot, tmp_path / "out")
    from_pretrained(snapshot)
