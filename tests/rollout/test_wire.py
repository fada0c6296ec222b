"""Adapter and norms as one message."""

import pytest
import torch
from safetensors.torch import save

from qerl_trl.rollout import wire
from qerl_trl.rollout.wire import AdapterTensors, decode_update, encode_update


def test_update_survives_the_wire():
    adapter = {"model.layers.0.mlp.up_proj": AdapterTensors(torch.randn(4, 8), torch.randn(16, 4), 3.0)}
    norms = {"model.norm": torch.randn(8)}
    decoded, decoded_norms = decode_update(encode_update(adapter, norms, torch.float32), torch.device("cpu"))
    (tensors,) = decoded.values()
    assert torch.equal(tensors.a, adapter["model.layers.0.mlp.up_proj"].a)
    assert torch.equal(tensors.b, adapter["model.layers.0.mlp.up_proj"].b * 3.0) and tensors.scaling == 1.0
    assert torch.equal(decoded_norms["model.norm"], norms["model.norm"])


@pytest.mark.parametrize("data", [b"", b"\x80\x04\x95\x00", b"x" * 100])
def test_what_is_no_update_is_refused(data):
    with pytest.raises(ValueError, match="not a safetensors file"):
        decode_update(data, torch.device("cpu"))


def test_an_update_with_half_an_adapter_is_refused():
    with pytest.raises(ValueError, match="only half"):
        decode_update(save({"a:x": torch.zeros(2)}), torch.device("cpu"))
    with pytest.raises(ValueError, match="expected a:NAME"):
        decode_update(save({"weight": torch.zeros(2)}), torch.device("cpu"))


def test_changes_of_hundreds_of_tensors_are_seen(monkeypatch):
    monkeypatch.setattr(wire, "_TOGETHER", 40)
    tensors = [torch.randn(3, 4) for _ in range(9)] + [torch.randn(50), torch.randn(4).bfloat16(), torch.randn(7)]
    before = wire.changes(tensors)
    assert before == wire.changes([t.clone() for t in tensors])
    for tensor in tensors:
        kept = tensor.clone()
        tensor.view(-1)[-1] += 1
        assert wire.changes(tensors) != before
        tensor.copy_(kept)
    assert wire.changes(tensors) == before
