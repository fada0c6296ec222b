"""The numbers of adaptive quantization noise: unit normals as a pure function of a key, with the same bits everywhere.

Counter-based, so any part of any norm can be computed anywhere, and in integers and exactly rounded operations only
(integer sums and products, a table lookup, one conversion, one product), so neither torch version nor device nor
instruction set changes a value; `torch.randn`, and logarithms or cosines on a GPU, vary. For number i of a norm:

    k0, k1   the 16-byte blake2b digest of "seed:step:generation:name", two little-endian 64-bit integers
    w        mix(mix(c * GOLDEN + k0) + k1), c = i // 2      64 random bits; mix is the finalizer of SplitMix64
    a, b     bits 0-15 and 16-31 of w for even i, 32-47 and 48-63 for odd i
    z        (T[a] + T[b]) * SCALE

T holds the 65536 midpoint quantiles of the unit normal as integers in units of 2^-20, and SCALE makes the variance 1.
One lookup would end at 4.3 standard deviations; the sum of two goes to 6.1, with a kurtosis of 2.9996 (normal: 3).
Every sum is below 2^24: exact in float32.

SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; Stafford's variant 13.
"""

import functools
import hashlib
import struct
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import torch

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
_BITS = 16
#: units per standard deviation in the table
_UNIT = 2**20


class _Plan(NamedTuple):
    """Layout of the words of a draw.

    counter: (words,) int64, c * GOLDEN. norm: (words,) int64, number of the norm. keep: indices into the 2 * words
    numbers, None for all: a norm of odd length drops one.
    """

    counter: torch.Tensor
    norm: torch.Tensor
    shifts: torch.Tensor
    keep: torch.Tensor | None


def standard_noise(seed: int, step: int, generation: int, name: str, numel: int) -> torch.Tensor:
    """Compute unit normal noise of one norm, (numel,) float32 on the CPU: `standard_noises` of this norm alone."""
    return standard_noises(seed, step, generation, [name], [numel], torch.device("cpu"))


@torch.no_grad()
def standard_noises(
    seed: int, step: int, generation: int, names: Sequence[str], sizes: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Compute unit normal noise of many norms, concatenated: about forty launches in all, no wait for the device.

    Args:
        seed: of the run.
        step: the trainer's global step of the draw.
        generation: number of the generation within that step, from 0.
        names: canonical names of the norm modules (`canonical_name`), for example "model.layers.0.input_layernorm".
        sizes: length of each norm's weight.

    Returns:
        (sum of sizes,) float32 on `device`.
    """
    table, scale = _table(device)
    plan = _plan(tuple(sizes), device)
    digests = [
        hashlib.blake2b(f"{seed}:{step}:{generation}:{name}".encode(), digest_size=16).digest() for name in names
    ]
    keys = [struct.unpack("<2q", digest) for digest in digests]
    k0, k1 = torch.tensor(keys, dtype=torch.int64).T.contiguous().to(device, non_blocking=True)[:, plan.norm]
    words = _mix(_mix(plan.counter + k0) + k1)
    pieces = (words[:, None] >> plan.shifts) & (2**_BITS - 1)
    flat = table[pieces].view(-1, 2).sum(1).float() * scale
    return flat if plan.keep is None else flat[plan.keep]


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's finalizer to int64 values with the bits of unsigned integers."""
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        x = x ^ ((x >> shift) & (2 ** (64 - shift) - 1))  # torch copies the sign bit
        if multiplier != 1:
            x = x * _signed(multiplier)
    return x


def _signed(value: int) -> int:
    """Return the signed 64-bit integer with the same bits."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


@functools.lru_cache(maxsize=8)
def _plan(sizes: tuple[int, ...], device: torch.device) -> _Plan:
    with torch.inference_mode(False):
        words = torch.tensor([(size + 1) // 2 for size in sizes])
        norm = torch.repeat_interleave(torch.arange(len(sizes)), words)
        counter = torch.arange(len(norm)) - (words.cumsum(0) - words)[norm]
        place = 2 * counter[:, None] + torch.arange(2)
        keep = None
        if any(size % 2 for size in sizes):
            keep = (place < torch.tensor(sizes)[norm][:, None]).flatten().nonzero()[:, 0].to(device)
        counted, shifts = (counter * _signed(GOLDEN)).to(device), torch.arange(0, 64, _BITS).to(device)
        return _Plan(counted, norm.to(device), shifts, keep)


@functools.lru_cache(maxsize=8)
def _table(device: torch.device) -> tuple[torch.Tensor, float]:
    """Return T, and SCALE = 1 / sqrt(2 mean(T^2))."""
    count = 2**_BITS
    quantile = NormalDist().inv_cdf
    upper = [round(_UNIT * quantile((i + 0.5) / count)) for i in range(count // 2, count)]
    with torch.inference_mode(False):
        table = torch.tensor([-value for value in reversed(upper)] + upper, dtype=torch.int32)
        scale = torch.tensor((count / (4 * sum(value * value for value in upper))) ** 0.5, dtype=torch.float32)
        return table.to(device), scale.item()
