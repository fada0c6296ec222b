"""Exact sums of tensors read as integers: hundreds of tensors in one launch, each byte read once.

What a checksum of a model costs is not its bytes but its tensors: a reduction, a cast and a view each, microseconds of the host, for several hundred.
Here the host writes one table, three integers per piece of a tensor (its address, what is left of the tensor there, the tensor's number), and every program
adds its piece to its tensor's sum. Integers wrap, so the order does not matter.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .portable import INTERPRET, narrow, widen

#: words of 8 bytes, and elements, that one program sums
PIECE = 2**15
_BLOCK = 1024
#: all bits of the exponent: set where a value is NaN or infinite
EXPONENT = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def sums_kernel(table_ptr, sums_ptr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the integers of one piece, LANES in each word of 8 bytes, to its tensor's sum."""
    row_ptr = table_ptr + tl.program_id(0).to(tl.int64) * 3
    word_ptr = tl.load(row_ptr).to(tl.pointer_type(tl.int64))
    left = tl.load(row_ptr + 1)
    number = tl.load(row_ptr + 2)
    total_B = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, left, BLOCK):
        w_B = start + tl.arange(0, BLOCK)
        word_B = tl.load(word_ptr + w_B, mask=w_B < left, other=0)
        for lane in tl.static_range(LANES):
            total_B += (word_B << (64 // LANES * lane)) >> (64 - 64 // LANES)
    tl.atomic_add(sums_ptr + number, tl.sum(total_B, axis=0))


@triton.jit
def rounded_sums_kernel(
    table_ptr,
    factors_ptr,
    sums_ptr,
    bad_ptr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    INTEGER: tl.constexpr,
    EXPONENT: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERP: tl.constexpr,
):
    """The same for elements of SOURCE times their tensor's factor in float32, rounded to TARGET; how many of those are not finite."""
    row_ptr = table_ptr + tl.program_id(0).to(tl.int64) * 3
    x_ptr = tl.load(row_ptr).to(tl.pointer_type(SOURCE))
    left = tl.load(row_ptr + 1)
    number = tl.load(row_ptr + 2)
    factor = tl.load(factors_ptr + number)
    total_B = tl.zeros((BLOCK,), tl.int64)
    bad_B = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, left, BLOCK):
        x_B = start + tl.arange(0, BLOCK)
        value_B = widen(tl.load(x_ptr + x_B, mask=x_B < left, other=0.0), INTERP) * factor
        integer_B = narrow(value_B, TARGET, INTERP).to(INTEGER, bitcast=True)
        inside = x_B < left  # an infinite factor makes NaN of the zeros beyond
        total_B += tl.where(inside, integer_B.to(tl.int64), 0)
        bad_B += tl.where(inside & ((integer_B & EXPONENT) == EXPONENT), 1, 0).to(tl.int64)
    tl.atomic_add(sums_ptr + number, tl.sum(total_B, axis=0))
    tl.atomic_add(bad_ptr + number, tl.sum(bad_B, axis=0))


@functools.lru_cache(maxsize=16)
def _table(tensors: tuple[tuple[int, int], ...], size: int) -> torch.Tensor:
    """(pieces, 3) int64 for tensors given by address and number of elements of `size` bytes. On the CPU, where no engine that sleeps takes its memory away;
    kept, since what is summed once is mostly summed again, where it is."""
    addresses, counts = torch.tensor(tensors, dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
    pieces = -(-counts // PIECE)
    number = torch.repeat_interleave(pieces)
    before = (torch.arange(len(number), device="cpu") - (pieces.cumsum(0) - pieces)[number]) * PIECE
    return torch.stack([addresses[number] + before * size, (counts[number] - before).clamp(max=PIECE), number], dim=1)


@triton.jit
def largest_kernel(table_ptr, largest_ptr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of the integers of one piece, LANES in each word, without their signs."""
    row_ptr = table_ptr + tl.program_id(0).to(tl.int64) * 3
    word_ptr = tl.load(row_ptr).to(tl.pointer_type(tl.int64))
    left = tl.load(row_ptr + 1)
    most_B = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, left, BLOCK):
        w_B = start + tl.arange(0, BLOCK)
        word_B = tl.load(word_ptr + w_B, mask=w_B < left, other=0)
        for lane in tl.static_range(LANES):
            most_B = tl.maximum(most_B, (word_B >> (64 // LANES * lane)) & ((1 << (64 // LANES - 1)) - 1))
    tl.atomic_max(largest_ptr, tl.max(most_B, axis=0))


def words_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Address and number of the words of 8 bytes that a tensor is; None: it is not one piece of memory that begins and ends at a multiple of 8 bytes."""
    address, size = tensor.data_ptr(), tensor.nbytes
    return (address, size // 8) if not (address | size) & 7 and tensor.is_contiguous() else None


def sums(words: Sequence[tuple[int, int]], lanes: int, device: torch.device) -> torch.Tensor:
    """Sum of each tensor's bytes as integers of 8 / `lanes` bytes, signed, modulo 2^64: (count,) int64 on their device. No wait for the device.

    Args:
        words: `words_of` each tensor, of any dtype, which live on `device` until this returns.
        lanes: 1, 2, 4 or 8.
    """
    found = torch.zeros(len(words), dtype=torch.int64, device=device)
    table = _table(tuple(words), 8).to(device, non_blocking=True)
    if len(table):
        with torch.cuda.device_of(found):
            sums_kernel[(len(table),)](table, found, LANES=lanes, BLOCK=_BLOCK, num_warps=4)
    return found


def largest(words: Sequence[tuple[int, int]], lanes: int, device: torch.device) -> torch.Tensor:
    """The bits of the largest magnitude in all of these tensors of floats, () int64 on `device`: integers of that size compare as the floats do, NaN beyond
    infinity. No wait for the device.

    Args:
        words: `words_of` each tensor.
        lanes: floats in a word, 2 or 4.
    """
    found = torch.zeros((), dtype=torch.int64, device=device)
    table = _table(tuple(words), 8).to(device, non_blocking=True)
    if len(table):
        with torch.cuda.device_of(found):
            largest_kernel[(len(table),)](table, found, LANES=lanes, BLOCK=_BLOCK, num_warps=4)
    return found


@torch.no_grad()
def rounded_sums(
    tensors: Sequence[torch.Tensor], factors: Sequence[float], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each tensor times its factor, multiplied in float32 and rounded once to `dtype`: the sum of its elements as integers, and how many are NaN or
    infinite; (count,) int64 both, on their device. Nothing is written and the device is not waited for.

    Args:
        tensors: contiguous, on one device, of one dtype; that and `dtype` bfloat16, float16 or float32.
    """
    device, source = tensors[0].device, tensors[0].dtype
    found = torch.zeros(2, len(tensors), dtype=torch.int64, device=device)
    table = _table(tuple((t.data_ptr(), t.numel()) for t in tensors), tensors[0].element_size())
    table = table.to(device, non_blocking=True)
    if len(table):
        with torch.cuda.device_of(found):
            rounded_sums_kernel[(len(table),)](
                table,
                torch.tensor(factors, dtype=torch.float32).to(device, non_blocking=True),
                found[0],
                found[1],
                SOURCE=_TYPES[source],
                TARGET=_TYPES[dtype],
                INTEGER=tl.int32 if dtype == torch.float32 else tl.int16,
                EXPONENT=EXPONENT[dtype],
                BLOCK=_BLOCK,
                INTERP=INTERPRET,
                num_warps=4,
            )
    return found[0], found[1]
