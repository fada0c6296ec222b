"""Sums of tensors read as integers: in Triton's interpreter and on a GPU, against PyTorch."""

import pytest
import torch

pytest.importorskip("triton")
from qerl_nvfp4 import portable, sums

interpreted = pytest.param("cpu", marks=pytest.mark.skipif(not portable.INTERPRET, reason="interpreter"))
on_each = pytest.mark.parametrize("device", [interpreted, pytest.param("cuda", marks=pytest.mark.gpu)])
INTEGERS = {1: torch.int64, 2: torch.int32, 4: torch.int16, 8: torch.int8}


def sums_of(tensors, lanes):
    return sums.sums([sums.words_of(tensor) for tensor in tensors], lanes, tensors[0].device)


@pytest.fixture
def small_pieces(monkeypatch):
    """A tensor of many pieces, the last of which is shorter, in a size that the interpreter can do."""
    monkeypatch.setattr(sums, "PIECE", 1200)


@on_each
@pytest.mark.parametrize("lanes", INTEGERS)
def test_sums_of_words(lanes, device, small_pieces):
    torch.manual_seed(lanes)
    tensors = [torch.randint(-(2**63), 2**63 - 1, (count,)) for count in (1, 7, 1024, 0, 1200, 5001)]
    tensors.append(torch.randn(12, 8).bfloat16()[4:])  # begins inside its storage
    tensors.append(torch.full((3000,), -1))  # all bits: every lane is negative
    tensors = [tensor.to(device) for tensor in tensors]
    expected = [int(tensor.view(-1).view(INTEGERS[lanes]).sum(dtype=torch.int64)) for tensor in tensors]
    assert sums_of(tensors, lanes).tolist() == expected


def test_tensors_that_cannot_be_read_in_words():
    for tensor in (torch.zeros(8, 8)[:, :4], torch.zeros(3), torch.zeros(9)[1:]):
        assert sums.words_of(tensor) is None
    assert sums.words_of(torch.zeros(10)[2:])[1] == 4 and sums.words_of(torch.zeros(0)) == (0, 0)


@on_each
@pytest.mark.parametrize("source", sums.EXPONENT, ids=str)
@pytest.mark.parametrize("target", sums.EXPONENT, ids=str)
def test_sums_of_rounded_values(source, target, device, small_pieces):
    torch.manual_seed(0)
    sizes = (1, 33, 1200, 0, 2500)
    tensors = [(torch.randn(size) * 10 ** torch.empty(size).uniform_(-9, 4)).to(source).to(device) for size in sizes]
    factors = [1.0, 2.0, 0.70710678, 1.0, 1 / 3]
    found, bad = sums.rounded_sums(tensors, factors, target)
    rounded = [(tensor.float() * factor).to(target) for tensor, factor in zip(tensors, factors, strict=True)]
    integer = INTEGERS[8 // target.itemsize]
    finite = [bool(part.isfinite().all()) for part in rounded]
    assert sum(finite) >= 3 and bad.tolist() == [int((~part.isfinite()).sum()) for part in rounded]
    for number, part in enumerate(rounded):
        assert not finite[number] or int(found[number]) == int(part.view(integer).sum(dtype=torch.int64))
    tensors[4][2499], tensors[1][0] = float("nan"), float("-inf")
    _, bad_now = sums.rounded_sums(tensors, factors, target)
    assert (bad_now > 0).tolist() == [not f or number in (1, 4) for number, f in enumerate(finite)]


@on_each
@pytest.mark.parametrize("dtype", sums.EXPONENT, ids=str)
def test_the_largest_magnitude(dtype, device, small_pieces):
    torch.manual_seed(0)
    tensors = [torch.randn(size).to(dtype).to(device) for size in (8, 5000, 0, 1024)]
    integer = INTEGERS[8 // dtype.itemsize]

    def found() -> float:
        bits = sums.largest([sums.words_of(t) for t in tensors], 8 // dtype.itemsize, tensors[0].device)
        return float(bits.to(integer).view(dtype))

    assert found() == max(float(t.abs().max()) for t in tensors if t.numel())
    for place, value in ((4999, -9.0), (17, 11.0), (0, -float("inf"))):
        tensors[1][place] = value
        assert found() == abs(value)
    tensors[3][3] = float("nan")
    assert found() != found()
    for tensor in tensors:
        tensor.zero_()
    assert found() == 0.0


def placed(tensor: torch.Tensor, a: int, b: int, c: int) -> int:
    """In Python's integers."""
    if tensor.is_floating_point():
        tensor = torch.nn.functional.pad(tensor.float(), (0, tensor.numel() % 2))
    total = 0
    for place, word in enumerate(tensor.cpu().view(torch.int64).tolist()):
        word = (word + place * a) * b & (1 << 64) - 1
        word = word - (word >> 63 << 64)  # its sign
        total += (word ^ word >> 31) * c
    return (total + 2**63) % 2**64 - 2**63


@on_each
@pytest.mark.parametrize("dtype", [None, *sums.EXPONENT], ids=str)
def test_sums_of_words_in_their_places(dtype, device, small_pieces):
    torch.manual_seed(0)
    constants = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
    sizes = (1, 7, 1024, 0, 2400, 2401, 5003)
    tensors = [torch.randn(n).to(dtype) if dtype else torch.randint(-(2**63), 2**63 - 1, (n,)) for n in sizes]
    tensors = [tensor.to(device) for tensor in tensors]
    expected = [placed(tensor, *constants) for tensor in tensors]
    assert sums.placed_sums(tensors, dtype, constants).tolist() == expected
    tensors[6][[17, 4000]] = tensors[6][[4000, 17]]
    changed = sums.placed_sums(tensors, dtype, constants).tolist()
    assert [a != b for a, b in zip(changed, expected, strict=True)] == [number == 6 for number in range(7)]
