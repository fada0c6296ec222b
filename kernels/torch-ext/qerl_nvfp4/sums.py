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

from .launch import launcher
from .portable import INTERPRET, narrow, widen

#: words of 8 bytes, and elements, that one program sums
PIECE = 2**15
_BLOCK = 1024
#: all bits of the exponent, set where a value is NaN or infinite, of each dtype of floats that is read here
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


@triton.jit
def placed_sums_kernel(
    table_ptr,
    sums_ptr,
    SOURCE: tl.constexpr,
    PLACE: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERP: tl.constexpr,
):
    """The sum of one piece's words of 8 bytes, each mixed with its place in the tensor. SOURCE: of floats, two of which are a word as float32; None: words."""
    row_ptr = table_ptr + tl.program_id(0).to(tl.int64) * 4
    address = tl.load(row_ptr)
    left = tl.load(row_ptr + 1)  # words, of floats elements
    number = tl.load(row_ptr + 2)
    first = tl.load(row_ptr + 3)
    count = left if SOURCE is None else (left + 1) // 2
    total_B = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, count, BLOCK):
        w_B = start + tl.arange(0, BLOCK)
        if SOURCE is None:
            word_B = tl.load(address.to(tl.pointer_type(tl.int64)) + w_B, mask=w_B < count, other=0)
        else:
            x_ptr = address.to(tl.pointer_type(SOURCE))
            low_B = widen(tl.load(x_ptr + 2 * w_B, mask=2 * w_B < left, other=0.0), INTERP).to(tl.int32, bitcast=True)
            high_B = widen(tl.load(x_ptr + 2 * w_B + 1, mask=2 * w_B + 1 < left, other=0.0), INTERP)
            high_B = high_B.to(tl.int32, bitcast=True).to(tl.int64) << 32
            word_B = (low_B.to(tl.int64) & 0xFFFFFFFF) | high_B
        mixed_B = (word_B + (first + w_B) * PLACE) * FIRST
        mixed_B = (mixed_B ^ (mixed_B >> 31)) * SECOND
        total_B += tl.where(w_B < count, mixed_B, 0)
    tl.atomic_add(sums_ptr + number, tl.sum(total_B, axis=0))


@functools.lru_cache(maxsize=16)
def _table(tensors: tuple[tuple[int, int], ...], size: int) -> torch.Tensor:
    """(pieces, 3) int64 for tensors given by address and number of elements of `size` bytes. On the CPU, where no engine that sleeps takes its memory away;
    kept, since what is summed once is mostly summed again, where it is."""
    addresses, counts = torch.tensor(tensors, dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
    pieces = -(-counts // PIECE)
    number = torch.repeat_interleave(pieces)
    before = (torch.arange(len(number), device="cpu") - (pieces.cumsum(0) - pieces)[number]) * PIECE
    return torch.stack([addresses[number] + before * size, (counts[number] - before).clamp(max=PIECE), number], dim=1)


def _launch(kernel, table: torch.Tensor, found: torch.Tensor, *arguments: torch.Tensor, **constants) -> None:
    """A program for each row of the table, which goes to where `found` is."""
    if len(table):
        with torch.cuda.device_of(found):
            table = table.to(found.device, non_blocking=True)
            launcher(kernel, len(table))(table, *arguments, **constants, BLOCK=_BLOCK, num_warps=4)


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
    _launch(sums_kernel, _table(tuple(words), 8), found, found, LANES=lanes)
    return found


def largest(words: Sequence[tuple[int, int]], lanes: int, device: torch.device) -> torch.Tensor:
    """The bits of the largest magnitude in all of these tensors of floats, () int64 on `device`: integers of that size compare as the floats do, NaN beyond
    infinity. No wait for the device.

    Args:
        words: `words_of` each tensor.
        lanes: floats in a word, 2 or 4.
    """
    found = torch.zeros((), dtype=torch.int64, device=device)
    _launch(largest_kernel, _table(tuple(words), 8), found, found, LANES=lanes)
    return found


def placed_sums(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype | None, constants: tuple[int, int, int]
) -> torch.Tensor:
    """Sum over each tensor's words of 8 bytes, modulo 2^64, of `w = (word + place * a) * b; (w ^ w >> 31) * c`: (count,) int64 on their device. It tells
    elements that changed places. No wait for the device.

    Args:
        tensors: contiguous, on one device. With `dtype` all are of that (bfloat16, float16 or float32) and count as float32, an odd one padded with
            zero; with None each is whole words (`words_of`).
        constants: a, b, c, below 2^63.
    """
    device = tensors[0].device
    found = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    size, per_word = (8, 1) if dtype is None else (dtype.itemsize, 2)
    table = _table(tuple((t.data_ptr(), t.nbytes // size) for t in tensors), size)
    first = (table[:, 0] - torch.tensor([t.data_ptr() for t in tensors], device="cpu")[table[:, 2]]) // (
        size * per_word
    )
    table = torch.cat([table, first[:, None]], dim=1)
    source = None if dtype is None else _TYPES[dtype]
    mixing = dict(zip(("PLACE", "FIRST", "SECOND"), constants, strict=True))
    _launch(placed_sums_kernel, table, found, found, SOURCE=source, **mixing, INTERP=INTERPRET)
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
    count = len(tensors)
    # both rows begin at a multiple of 16 bytes: a kernel is compiled for that apart
    found = torch.zeros(2, count + count % 2, dtype=torch.int64, device=device)[:, :count]
    table = _table(tuple((t.data_ptr(), t.numel()) for t in tensors), tensors[0].element_size())
    _launch(
        rounded_sums_kernel,
        table,
        found,
        torch.tensor(factors, dtype=torch.float32).to(device, non_blocking=True),
        found[0],
        found[1],
        SOURCE=_TYPES[source],
        TARGET=_TYPES[dtype],
        INTEGER=tl.int32 if dtype == torch.float32 else tl.int16,
        EXPONENT=EXPONENT[dtype],
        INTERP=INTERPRET,
    )
    return found[0], found[1]
