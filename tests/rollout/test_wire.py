"""Fingerprints of adapter and norms."""

import pytest
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


ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("together", [40, 2**22])
def test_sums_of_many_tensors_are_those_of_each(monkeypatch, together, device):
    monkeypatch.setattr(wire, "_TOGETHER", together)
    integers = [torch.randint(0, 255, shape, dtype=torch.uint8) for shape in ((8, 3), (5,), (4, 4))]
    floats = [torch.randn(3, 4) for _ in range(9)] + [torch.randn(50), torch.randn(7).bfloat16(), torch.tensor(3.0)]
    tensors = [*floats, *integers, torch.randn(64, 2).bfloat16()[:, :1], torch.randn(8).double(), torch.zeros(0)]
    tensors = [tensor.to(device) for tensor in tensors]
    assert torch.equal(wire.all_bits(tensors), torch.stack([wire.bits(t) for t in tensors]))
    assert wire.all_bits([]).tolist() == []


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("together", [10, 2**22])
def test_a_change_of_any_byte_changes_the_words(monkeypatch, together, device):
    """Of tensors of any size, dtype and place in their storage, those with 8 bytes at a time and the others."""
    monkeypatch.setattr(wire, "_TOGETHER", together)
    tensors = [
        torch.randn(64, 24).bfloat16(),
        torch.randn(33),
        torch.randn(5).bfloat16(),
        torch.tensor(2.0),
        torch.randn(8, 3)[:, :2],
    ]
    tensors += [torch.randint(0, 255, shape, dtype=torch.uint8) for shape in ((256, 3), (7,))]
    tensors += [torch.randn(9)[1:], torch.zeros(0), torch.randn(16, 16).to(torch.float8_e4m3fn)]
    tensors = [tensor.to(device) for tensor in tensors]
    before = wire.all_bits(tensors, wire.words)
    assert torch.equal(before, torch.stack([wire.words(t) for t in tensors]))
    assert torch.equal(before, wire.all_bits(tensors, wire.words))
    for number, tensor in enumerate(tensors):
        for place in {0, tensor.numel() // 2, tensor.numel() - 1} if tensor.numel() else ():
            changed = tensor.clone(memory_format=torch.preserve_format)
            view = changed.view(torch.uint8) if changed.element_size() == 1 else changed
            view.view(-1)[place] += 1
            others = [*tensors[:number], changed, *tensors[number + 1 :]]
            differ = wire.all_bits(others, wire.words) != before
            assert differ.nonzero().flatten().tolist() == [number]
    assert wire.changes(tensors) == wire.changes(tensors)
    assert wire.changes(tensors) != wire.changes([-tensors[0], *tensors[1:]])
    assert wire.changes(tensors) != wire.changes(tensors[:-1])


def test_a_large_tensor_is_summed_without_a_copy_of_it(monkeypatch):
    tensor = torch.randn(1000, 1000).bfloat16()
    whole = wire.bits(tensor)
    monkeypatch.setattr(wire, "_AT_ONCE", 10_000)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        assert torch.equal(wire.bits(tensor), whole)
    assert max(event.self_cpu_memory_usage for event in profile.events()) < 100_000  # it has 2,000,000


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_that_are_not_finite_are_named(dtype, device):
    named = {str(i): torch.randn(3, 5).to(dtype) for i in range(5)} | {"float32": torch.randn(2)}
    named["1"][2, 3], named["3"][0, 0] = float("nan"), -float("inf")
    named = {name: tensor.to(device) for name, tensor in named.items()}
    assert wire.not_finite(named.items()) == ["1", "3"]
    assert wire.not_finite([]) == []
