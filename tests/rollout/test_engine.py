"""Sums of tensors read as integers, and fingerprints of adapters and norms."""

import pytest
import torch

from qerl_trl.rollout import engine

ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def some_tensors(device):
    """Of all dtypes, sizes and places in their storage, read 8 bytes at a time or not."""
    tensors = [torch.randn(64, 24).bfloat16(), torch.randn(33), torch.tensor(2.0), torch.randn(8, 3)[:, :2]]
    tensors += [torch.randint(0, 255, shape, dtype=torch.uint8) for shape in ((256, 3), (7,))]
    tensors += [torch.randn(9)[1:], torch.zeros(0), torch.randn(16, 16).to(torch.float8_e4m3fn)]
    tensors += [torch.randn(8).double(), torch.randn(5).bfloat16()]
    return [tensor.to(device) for tensor in tensors]


@pytest.mark.parametrize("device", ON)
def test_a_change_of_any_byte_changes_the_sum_of_its_tensor(device):
    tensors = some_tensors(device)
    before = engine.all_bits(tensors)
    assert torch.equal(before, torch.stack([engine.bits(t) for t in tensors])) and engine.all_bits([]).tolist() == []
    for number, tensor in enumerate(tensors):
        for place in {0, tensor.numel() // 2, tensor.numel() - 1} if tensor.numel() else ():
            changed = tensor.clone(memory_format=torch.preserve_format)
            view = changed.view(torch.uint8) if changed.element_size() == 1 else changed
            view.view(-1)[place] += 1
            differ = engine.all_bits([*tensors[:number], changed, *tensors[number + 1 :]]) != before
            assert differ.nonzero().flatten().tolist() == [number]
    assert engine.changes(tensors) == engine.changes(tensors)
    assert engine.changes(tensors) != engine.changes([-tensors[0], *tensors[1:]])
    assert engine.changes(tensors) != engine.changes(tensors[:-1])


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounded_has_the_bits_of_a_copy_and_finds_values_that_are_not_finite(dtype, device):
    like = torch.zeros(1, dtype=dtype, device=device)
    parts = [torch.randn(5, 7), torch.randn(8, 3).bfloat16(), torch.randn(4, 6).half()[:, 1:4]]
    parts = [part.to(device) for part in [*parts, torch.randn(33).double(), torch.zeros(0, 3)]] + [torch.randn(6)]
    factors = [1.0, 2.0, 0.70710678, 1.0, 1.0, 0.3]
    found, finite = engine.rounded(parts, factors, like)
    copied = [(part.float() * factor).to(like) for part, factor in zip(parts, factors, strict=True)]
    assert found.tolist() == [int(engine.bits(part)) if part.numel() else 0 for part in copied]
    assert finite.all()
    parts[1][2, 1], parts[3][5] = float("nan"), -float("inf")
    parts[5][0], factors[5] = 3e38, 2.0
    assert engine.rounded(parts, factors, like)[1].tolist() == [True, False, True, False, True, False]
    named = {"a": parts[0], "b": parts[1], "c": parts[3], "d": parts[2]}
    assert engine.not_finite(named.items()) == ["b", "c"] and engine.not_finite([]) == []
