"""An update as bytes."""

import json

import pytest
import torch

from qerl_trl.rollout.layout import UpdateLayout, mark
from qerl_trl.rollout.wire import AdapterTensors


def update(dtype=torch.float32):
    adapter = {
        "model.layers.0.mlp.up_proj": AdapterTensors(torch.randn(3, 8), torch.randn(5, 3), 3.0),
        "model.layers.0.mlp.down_proj": AdapterTensors(torch.randn(3, 5), torch.randn(8, 3), 0.5),
    }
    return adapter, {"model.norm": torch.randn(7)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_comes_back(dtype):
    adapter, norms = update()
    layout = UpdateLayout.of(adapter, norms, dtype)
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.pack(adapter, norms, flat)
    told = UpdateLayout.parse(layout.text())
    assert told == layout and told.nbytes == layout.nbytes
    found, found_norms = told.unpack(flat)
    assert list(found) == list(adapter) and found_norms.keys() == norms.keys()
    for name, tensors in adapter.items():
        assert torch.equal(found[name].a, tensors.a.to(dtype)) and found[name].scaling == 1.0
        assert torch.equal(found[name].b, (tensors.b * tensors.scaling).to(dtype))
    assert torch.equal(found_norms["model.norm"], norms["model.norm"])


def test_the_views_of_a_buffer_are_made_once():
    adapter, norms = update()
    layout = UpdateLayout.of(adapter, norms, torch.float32)
    flat, other = (torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2))
    first = layout.views(flat)
    layout.pack(adapter, norms, flat)
    assert layout.views(flat) is first and torch.equal(first[0], norms["model.norm"])
    layout.pack(adapter, norms, other)
    assert torch.equal(other, flat) and layout.views(other)[0].data_ptr() == other.data_ptr()
    assert layout == UpdateLayout.of(adapter, norms, torch.float32)


def test_any_changed_byte_changes_the_mark():
    flat = torch.randint(0, 256, (3 * 2**16,), dtype=torch.uint8)
    before = mark(flat)
    for place in (0, 70_000, 3 * 2**16 - 1):
        flat[place] ^= 1
        assert mark(flat) != before
        flat[place] ^= 1
    blocks = flat.view(3, -1)
    assert mark(flat) == before != mark(blocks[[1, 0, 2]].reshape(-1))


A, B = ["a", "x", "bfloat16", [4, 8]], ["b", "x", "bfloat16", [6, 4]]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("no json", "no layout"), ([1], "no layout"), ([["a", "x"]], "no layout"), ([A], "only half"), ([A, B, A], "twice"),
        ([["weight", "x", "bfloat16", [4]]], "expected a, b or norm"), ([["a", "x", "float8", [4]]], "expected a, b or norm"),
        ([["a", "x", "bfloat16", [-4, 8]]], "expected a, b or norm"), ([["a", "x", "bfloat16", []]], "expected a, b or norm"),
        ([["a", 1, "bfloat16", [4]]], "expected a, b or norm"), ([["a", "x", "bfloat16", [True]]], "expected a, b or norm"),
        ([["a", "x", "bfloat16", [2**20, 2**20]], B], "largest adapter"), ([A, B, ["norm", "n", "float32", [4]]], "not be aligned"),
    ],
)  # fmt: skip
def test_what_is_no_layout_is_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        UpdateLayout.parse(entries if isinstance(entries, str) else json.dumps(entries))
