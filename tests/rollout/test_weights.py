"""An update as bytes, memory shared by two processes, and checksums of weights."""

import multiprocessing
from pathlib import Path

import pytest
import torch

from qerl_trl.rollout.engine import AdapterTensors, Update
from qerl_trl.rollout.weights import SharedMemory, UpdateLayout, checksum_of

CPU = torch.device("cpu")


def test_an_update_comes_back():
    dtype = torch.bfloat16
    adapter = {
        "model.layers.0.mlp.up_proj": AdapterTensors(torch.randn(3, 8), torch.randn(5, 3), 3.0),
        "model.layers.0.mlp.down_proj": AdapterTensors(torch.randn(3, 5), torch.randn(8, 3), 0.5),
    }
    norms = {"model.norm": torch.randn(7)}
    layout = UpdateLayout.of(Update(adapter, norms), dtype)
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.pack(Update(adapter, norms), flat)
    parsed = UpdateLayout.parse(layout.text)
    assert parsed == layout and parsed.nbytes == layout.nbytes and UpdateLayout.parse(layout.text) is parsed
    found, found_norms = parsed.unpack(flat)
    assert list(found) == list(adapter) and found_norms.keys() == norms.keys()
    for name, tensors in adapter.items():
        assert torch.equal(found[name].a, tensors.a.to(dtype)) and found[name].scaling == 1.0
        assert torch.equal(found[name].b, (tensors.b * tensors.scaling).to(dtype))
    assert torch.equal(found_norms["model.norm"], norms["model.norm"])


def test_any_changed_byte_changes_the_checksum():
    flat = torch.randint(0, 256, (3 * 2**16,), dtype=torch.uint8)
    before = checksum_of(flat)
    for place in (0, 70_000, 3 * 2**16 - 1):
        flat[place] ^= 1
        assert checksum_of(flat) != before
        flat[place] ^= 1
    blocks = flat.view(3, -1)
    assert checksum_of(flat) == before != checksum_of(blocks[[1, 0, 2]].reshape(-1))


def total_of(name: str) -> int:
    return int(SharedMemory(4096, CPU, name).data[100:].sum())


def test_another_process_of_this_user_sees_what_is_written():
    memory = SharedMemory(4096, CPU)
    path = Path("/dev/shm", memory.name)
    assert path.stat().st_mode & 0o777 == 0o600 and SharedMemory.is_here(memory.name)
    memory.data[100:] = 3
    with multiprocessing.get_context("fork").Pool(1) as other:
        assert other.apply(total_of, (memory.name,)) == 3 * 3996
    assert path.exists(), "the other process has not removed it"
    del memory
    assert not path.exists()
    with pytest.raises(OSError):  # at once, not as a signal when the memory is used
        SharedMemory(2**50, CPU)
