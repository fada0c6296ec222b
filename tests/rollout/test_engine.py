"""Sums of tensors read as integers, and fingerprints of adapters and norms."""

import pytest
import torch

from qerl_trl.rollout import engine

ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", ON)
def test_sums_of_many_tensors_are_those_of_each(device):
    integers = [torch.randint(0, 255, shape, dtype=torch.uint8) for shape in ((8, 3), (5,), (4, 4))]
    floats = [torch.randn(3, 4) for _ in range(9)] + [torch.randn(50), torch.randn(7).bfloat16(), torch.tensor(3.0)]
    tensors = [*floats, *integers, torch.randn(64, 2).bfloat16()[:, :1], torch.randn(8).double(), torch.zeros(0)]
    tensors = [tensor.to(device) for tensor in tensors]
    assert torch.equal(engine.all_bits(tensors), torch.stack([engine.bits(t) for t in tensors]))
    assert engine.all_bits([]).tolist() == []


@pytest.mark.parametrize("device", ON)
def test_a_change_of_any_byte_changes_the_sum(device):
    """Of tensors of any size, dtype and place in their storage, those with 8 bytes at a time and the others."""
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
    before = engine.all_bits(tensors)
    for number, tensor in enumerate(tensors):
        for place in {0, tensor.numel() // 2, tensor.numel() - 1} if tensor.numel() else ():
            changed = tensor.clone(memory_format=torch.preserve_format)
            view = changed.view(torch.uint8) if changed.element_size() == 1 else changed
            view.view(-1)[place] += 1
            others = [*tensors[:number], changed, *tensors[number + 1 :]]
            differ = engine.all_bits(others) != before
            assert differ.nonzero().flatten().tolist() == [number]
    assert engine.changes(tensors) == engine.changes(tensors)
    assert engine.changes(tensors) != engine.changes([-tensors[0], *tensors[1:]])
    assert engine.changes(tensors) != engine.changes(tensors[:-1])


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_will_be_rounded_has_the_bits_of_what_was(dtype, device):
    """Of any dtype, contiguous or not, there or elsewhere; with a factor or without; NaN, infinity and overflow are
    seen."""
    like = torch.zeros(1, dtype=dtype, device=device)
    parts = [
        torch.randn(5, 7),
        torch.randn(8, 3).bfloat16(),
        torch.randn(4, 6).half()[:, 1:4],
        torch.randn(33).double(),
    ]
    parts = [part.to(device) for part in parts] + [torch.randn(6), torch.zeros(0, 3, device=device)]
    factors = [1.0, 2.0, 0.70710678, 1.0, 0.3, 1.0]
    found, finite = engine.rounded(parts, factors, like)
    copied = [(part.float() * factor).to(like) for part, factor in zip(parts, factors, strict=True)]
    assert found.tolist() == [int(engine.bits(part)) if part.numel() else 0 for part in copied]
    assert finite.all()
    parts[1][2, 1], parts[3][5] = float("nan"), -float("inf")
    parts[4][0], factors[4] = 3e38, 2.0
    assert engine.rounded(parts, factors, like)[1].tolist() == [True, False, True, False, False, True]


@pytest.mark.gpu
def test_on_a_gpu_they_are_summed_in_one_launch():
    tensors = [torch.randn(shape, device="cuda").bfloat16() for shape in [(32, 3584)] * 300]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = engine.all_bits(tensors)
        torch.cuda.synchronize()
    assert found.tolist() == [int(engine.bits(t)) for t in tensors]
    kernels = [
        e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in e.name
    ]
    assert kernels.count("sums_kernel") == 1 and len(kernels) < 5


def test_everything_an_engine_sums_is_launched_ahead(monkeypatch):
    """What `launch_each` launches is what `all_bits` and `rounded` do, for the dtypes that an engine holds."""
    kernels = pytest.importorskip("qerl_nvfp4.sums")
    launched = set()

    def launch(kernel, table, found, *arguments, **constants):
        launched.add((kernel.__name__, *sorted((k, str(v)) for k, v in constants.items())))

    monkeypatch.setattr(kernels, "_launch", launch)
    engine.launch_each(torch.bfloat16)
    ahead = set(launched)
    launched.clear()
    monkeypatch.setattr(engine, "_launches", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    engine.all_bits([torch.zeros(64, dtype=dtype) for dtype in (torch.uint8, torch.bfloat16, torch.float32)])
    engine.rounded([torch.zeros(64)], [2.0], torch.zeros(1, dtype=torch.bfloat16))
    assert launched == ahead


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_that_are_not_finite_are_named(dtype, device):
    named = {str(i): torch.randn(3, 5).to(dtype) for i in range(5)} | {"float32": torch.randn(2)}
    named["1"][2, 3], named["3"][0, 0] = float("nan"), -float("inf")
    named = {name: tensor.to(device) for name, tensor in named.items()}
    assert engine.not_finite(named.items()) == ["1", "3"]
    assert engine.not_finite([]) == []
