"""Fingerprints of adapter and norms."""

import torch

from qerl_trl.rollout import wire


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
