"""Fingerprints of adapter and norms."""

import pytest
import torch

from qerl_trl.rollout import engine

ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_changes_of_hundreds_of_tensors_are_seen():
    tensors = [torch.randn(3, 4) for _ in range(9)] + [torch.randn(50), torch.randn(4).bfloat16(), torch.randn(7)]
    before = engine.changes(tensors)
    assert before == engine.changes([t.clone() for t in tensors])
    for tensor in tensors:
        kept = tensor.clone()
        tensor.view(-1)[-1] += 1
        assert engine.changes(tensors) != before
        tensor.copy_(kept)
    assert engine.changes(tensors) == before


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_that_are_not_finite_are_named(dtype, device):
    named = {str(i): torch.randn(3, 5).to(dtype) for i in range(5)} | {"float32": torch.randn(2)}
    named["1"][2, 3], named["3"][0, 0] = float("nan"), -float("inf")
    named = {name: tensor.to(device) for name, tensor in named.items()}
    assert engine.not_finite(named.items()) == ["1", "3"]
    assert engine.not_finite([]) == []
