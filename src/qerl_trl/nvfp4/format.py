"""NVFP4: four bits per weight, explained and implemented in plain PyTorch. The reference for every kernel.

**The element.** A 4-bit float `E2M1`: one sign bit, two exponent bits, one mantissa bit, so eight magnitudes:

    code & 7     0    1    2    3    4    5    6    7           code & 8 is the sign
    magnitude    0   0.5   1   1.5   2    3    4    6           (code 8 is minus zero)

The step between neighbours is 0.5 below 2, then 1, then 2: relative precision is roughly constant, as in every float.
On its own this grid is useless for a weight of 0.013, hence two scales.

**Two scales.** Sixteen neighbours along a row (along the *input* dimension K) form a block with one 8-bit float `E4M3`
as its scale (4 exponent bits, 3 mantissa bits, 2^-9 ... 448, no infinity). All blocks of a tensor share one float32,
the *global scale*, to bring the block scales into E4M3's range. With `N` output rows, `K` input columns:

    W[n, k]  =  e2m1(code[n, k]) * e4m3(block_scale[n, k // 16]) / global_scale

The global scale **divides**, as in compressed-tensors, the layout on disk. ModelOpt stores the reciprocal and
multiplies; `qerl_trl.nvfp4.checkpoints` converts. 4 bits + 8/16 bits = 4.5 bits per weight, 0.5625 bytes.

**In memory.** Two codes per byte, the even column in the low nibble, plain row-major (nothing is swizzled, so a row
slice of a matrix is the matrix of these rows):

    packed        uint8   (N, K/2)     byte j of a row = code[2j] | code[2j+1] << 4
    block_scale   uint8   (N, K/16)    the E4M3 bit patterns (uint8: nothing casts or averages it by accident)
    global_scale  float32 (1,)

**A worked example.** A block with largest magnitude 0.3, in a tensor with largest magnitude 1.2. Ideal global scale:
the block with 1.2 should get the largest block scale, 1.2 = 6 * 448 / g, so g = 2688 / 1.2 = 2240. We round it *down*
to a power of two, g = 2048. Block scale: 0.3 should become code 7 (= 6), so s = 0.3 / 6 * 2048 = 102.4, stored in E4M3
as 104. The block's unit is 104 / 2048 = 0.05078. The weight 0.1 is 1.969 units; the nearest code is 4 (= 2): stored as
0.1016. The weight 0.3 is 5.9 units, code 7: 0.3047. The weight 0.01 is 0.197 units, code 0.

**Why a power of two.** e2m1 * e4m3 has at most 6 significant bits, so with a power-of-two global scale every
dequantized weight is exact in bfloat16, and moving block scales to another global scale (for one shared by q, k and v)
is an exponent shift: exact. It costs at most 0.21 % of mean squared error. For the same reason our block scales never
go below 2^-6, the smallest *normal* E4M3 number: the Marlin kernels flush subnormal ones to zero.

**Choosing the block scale** (`scale_rule`):

    "rtn"             s = amax / 6, rounded to nearest. Plain rounding, as in the QeRL paper.
    "four_over_six"   also tries s = amax / 4 and keeps the better one: the codes' grid is denser below 4 than above
                      (https://arxiv.org/abs/2512.02010). 8 to 16 % less squared error than rtn.
    "neighbor_sweep"  also tries the 8 E4M3 neighbours on each side. 15 to 27 % less error than rtn, 20 times slower.

Less squared error does not imply more accuracy, so rtn stays the reference until an evaluation shows otherwise.

**Products in FP8** (`compute="w4a8"`) round both operands to E4M3, activations with one scale per token:

    weight      w8[n, k] = e4m3(e2m1(code[n, k]) * block_scale / 8)       at most 6 * 448 / 8 = 336
    activation  x8[m, k] = e4m3(x[m, k] * (448 / amax[m]))                amax[m] = max |x[m]|, at least 2^-100
    product     y[m, n]  = (sum_k x8 w8) * (8 / global_scale[n]) * (amax[m] / 448)       the sum in float32

The gradient of x is computed likewise from dy, as if the rounding of x were the identity.

**Not implemented.** No 4-bit activations, no Hadamard rotation, no calibration data, no stochastic rounding, no
swizzled scale layout for Blackwell tensor cores, no gradient with respect to the weight: the base stays frozen.

Shape suffixes: M tokens, N output rows, K input columns, B = K/16 blocks of a row, R rows of a chunk.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch

BLOCK_SIZE = 16
SCALE_RULES = ("rtn", "four_over_six", "neighbor_sweep")
#: operands of a product: decoded weights and 16-bit activations, or both in FP8
COMPUTES = ("w4a16", "w4a8")

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
#: smallest block scale written: 2^-6, E4M3's smallest normal number (bit pattern 0x08)
MIN_BLOCK_SCALE = 2.0**-6
_MIN_BLOCK_CODE, _MAX_BLOCK_CODE = 0x08, 0x7E
#: largest power-of-two global scale: keeps 0.5 * 2^-6 / g a normal number in bfloat16 (2^-107), for any weights
_MAX_GLOBAL_EXPONENT = 100
_SWEEP_RADIUS = 8
#: factor between a block's scaled weights and their FP8 operands
FP8_DIVISOR = 8.0
#: largest magnitude assumed for a token without any
_LEAST_AMAX = 2.0**-100

#: weights per chunk: small enough for the second-level cache of a CPU, large enough to fill a GPU
_CHUNK_WEIGHTS = {"cpu": 1 << 16, "cuda": 1 << 24}


class NVFP4Tensor(NamedTuple):
    """A quantized matrix: `packed` uint8 (N, K/2), `block_scale` uint8 (N, K/16), `global_scale` float32 (1,)."""

    packed: torch.Tensor
    block_scale: torch.Tensor
    global_scale: torch.Tensor


# --- the element ------------------------------------------------------------------------------------------------------


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest E2M1 codes (uint8) of `x` (float, no NaN). Ties go to the even code, |x| > 6 saturates.

    The code is the number of grid steps plus two for each exponent: 1.5 is 3 steps in [1, 2), code 3; 3 is 3 steps in
    [2, 4), code 5.
    """
    magnitude = x.to(torch.float32, copy=True)
    sign = (magnitude.view(torch.int32) >> 28).bitwise_and_(8)
    exponent, magic = _grid_exponent(magnitude.abs_().clamp_(max=E2M1_MAX))
    steps = magnitude.add_(magic).view(torch.int32).bitwise_and_(7)
    doubled_exponent = exponent.bitwise_right_shift_(22).sub_(2 * 127)
    return steps.add_(doubled_exponent).bitwise_or_(sign).to(torch.uint8)


def _grid_exponent(magnitude: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float32 bits of 2^e (int32), and the addend that rounds to the grid; magnitude: float32 in [0, 6].

    Within [2^e, 2^(e+1)) the grid step is 2^(e-1). The last bit of 2^(e+22) in float32 is worth exactly one step, so
    adding it leaves magnitude / step, rounded half to even by the hardware, in the low bits of the sum. Below 1 the
    step is that of e = 0.
    """
    exponent = magnitude.clamp(min=1.0).view(torch.int32).bitwise_and_(0x7F800000)
    return exponent, (exponent + (22 << 23)).view(torch.float32)


def decode_e2m1(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values of E2M1 codes (uint8 0..15, any shape); exact in every float dtype."""
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=dtype, device=codes.device)
    return table[codes.to(torch.int32)]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack two codes per byte: uint8 (..., K) -> uint8 (..., K/2), even column in the low nibble. K must be even."""
    pairs = codes.contiguous().view(torch.int16)  # even | odd << 8
    return pairs.bitwise_right_shift(4).bitwise_or_(pairs).to(torch.uint8)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack`: uint8 (..., K/2) -> uint8 (..., K), one code per byte."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


# --- the scales -------------------------------------------------------------------------------------------------------


def power_of_two_global_scale(amax: torch.Tensor | float) -> torch.Tensor:
    """Return the largest power of two g with g * amax <= 2688 = 6 * 448, as float32 (1,) on `amax`'s device.

    `amax` is the largest magnitude of the tensor (or of a group with one scale). 0 (an all-zero tensor) gives 1. Raises
    `ValueError` if it is not finite.
    """
    amax = torch.as_tensor(amax, dtype=torch.float32).reshape(1)
    if not bool(torch.isfinite(amax)):
        raise ValueError(
            f"the largest weight magnitude is {amax.item()}: NVFP4 has neither NaN nor infinity. Check the checkpoint."
        )
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, 0.5 <= mantissa < 1; 2688 = 0.65625 * 2^12
    power = (12 - exponent - (mantissa > 0.65625).to(exponent.dtype)).clamp(-126, _MAX_GLOBAL_EXPONENT)
    scale = torch.ldexp(torch.ones_like(amax), power)
    return torch.where(amax == 0, torch.ones_like(amax), scale)


def rescale(
    block_scale: torch.Tensor, old_global_scale: torch.Tensor, new_global_scale: torch.Tensor
) -> tuple[torch.Tensor, bool]:
    """Move block scales from one global scale to another: uint8 (N, B) -> (uint8 (N, B), exact).

    `exact`: every unit block_scale / global_scale is unchanged bit for bit, so the codes stay valid. True if the
    quotient of the global scales is a power of two and all block scales stay in [2^-6, 448]; others are clamped.
    """
    old = decode_scale(block_scale)
    old_global, new_global = old_global_scale.to(old.device).reshape(1), new_global_scale.to(old.device).reshape(1)
    moved = (old * (new_global / old_global)).clamp_(MIN_BLOCK_SCALE, E4M3_MAX).to(torch.float8_e4m3fn)
    exact = torch.equal(moved.to(torch.float32) / new_global, old / old_global)
    return moved.view(torch.uint8), exact


def decode_scale(block_scale: torch.Tensor) -> torch.Tensor:
    """Return block scales as float32; `block_scale`: E4M3 bit patterns (uint8), or float8_e4m3fn."""
    return (block_scale.view(torch.float8_e4m3fn) if block_scale.dtype == torch.uint8 else block_scale).to(
        torch.float32
    )


# --- the matrix -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def quantize(weight_NK: torch.Tensor, scale_rule: str = "rtn", global_scale: torch.Tensor | None = None) -> NVFP4Tensor:
    """Quantize a matrix (N, K), K a multiple of 16. Deterministic, the same bytes on every device.

    Args:
        weight_NK: the matrix. Not modified.
        scale_rule: one of `SCALE_RULES`, see the module's docstring.
        global_scale: float32 (1,) divisor to use, e.g. one shared by q, k and v. Default: the tensor's own power of
            two.

    Memory beyond the result: a few row chunks of 64 K weights (CPU) or 16 M weights (GPU), in float32.
    Raises `ValueError` for a weight that is NaN or infinite.
    """
    assert scale_rule in SCALE_RULES, scale_rule
    rows, columns = weight_NK.shape
    device = weight_NK.device
    own_scale = power_of_two_global_scale(largest_magnitude(weight_NK))  # refuses NaN and infinity
    if global_scale is None:
        global_scale = own_scale
    global_scale = global_scale.detach().to(device, torch.float32).reshape(1).clone()
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
    block_scale = torch.empty(rows, columns // BLOCK_SIZE, dtype=torch.uint8, device=device)
    for chunk in _row_chunks(rows, columns, device):
        packed[chunk], block_scale[chunk] = _quantize_rows(weight_NK[chunk], scale_rule, global_scale)
    return NVFP4Tensor(packed, block_scale, global_scale)


@torch.no_grad()
def dequantize(
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    transpose: bool = False,
) -> torch.Tensor:
    """Decode a quantized matrix to a dense one (N, K), bit for bit equal to the decompression of compressed-tensors.

    In float32: e2m1 * (e4m3 / global_scale), then one rounding to `dtype`.

    Args:
        packed: uint8 (N, K/2).
        block_scale: uint8 bit patterns or float8_e4m3fn, (N, K/16).
        global_scale: float32 (1,), or (N,) with one divisor per row (fused layers with separate scales).
        transpose: return (K, N), contiguous.
    """
    rows, columns = packed.shape[0], packed.shape[1] * 2
    device = packed.device
    pair_values = _pair_values(device)
    global_scale = global_scale.detach().to(device, torch.float32).reshape(-1, 1).expand(rows, 1)
    dense = torch.empty((columns, rows) if transpose else (rows, columns), dtype=dtype, device=device)
    by_rows = dense.t() if transpose else dense
    for chunk in _row_chunks(rows, columns, device):
        unit_RB = decode_scale(block_scale[chunk]) / global_scale[chunk]
        # one gather of 8 bytes, the two float32 values of a packed byte, instead of two of 4
        value_RB16 = torch.index_select(pair_values, 0, packed[chunk].reshape(-1).to(torch.int32)).view(torch.float32)
        value_RB16 = value_RB16.view(*unit_RB.shape, BLOCK_SIZE)
        by_rows[chunk] = value_RB16.mul_(unit_RB.unsqueeze(-1)).view(-1, columns)
    return dense


def _quantize_rows(
    weight_RK: torch.Tensor, scale_rule: str, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a few rows: returns (packed, block_scale)."""
    weight_RB16 = weight_RK.to(torch.float32).reshape(weight_RK.shape[0], -1, BLOCK_SIZE)
    amax_RB = weight_RB16.abs().amax(-1)
    # divide by a tensor: for a number CUDA multiplies by the reciprocal, rounded differently
    code_RB = _round_scale(amax_RB / torch.full_like(global_scale, E2M1_MAX) * global_scale)
    if scale_rule == "four_over_six":
        code_RB = _best_scale(weight_RB16, global_scale, [code_RB, _round_scale(amax_RB / 4.0 * global_scale)])
    elif scale_rule == "neighbor_sweep":
        offsets = sorted(range(-_SWEEP_RADIUS, _SWEEP_RADIUS + 1), key=abs)  # rtn first: it wins ties
        middle = code_RB.to(torch.int16)
        candidates = ((middle + offset).clamp_(_MIN_BLOCK_CODE, _MAX_BLOCK_CODE).to(torch.uint8) for offset in offsets)
        code_RB = _best_scale(weight_RB16, global_scale, candidates)
    unit_RB1 = (decode_scale(code_RB) / global_scale).unsqueeze(-1)
    codes = encode_e2m1(weight_RB16 / unit_RB1)
    return pack(codes.view(weight_RK.shape)), code_RB


def _round_scale(scale: torch.Tensor) -> torch.Tensor:
    """Round to E4M3 bit patterns (uint8) within [2^-6, 448]."""
    return scale.clamp(MIN_BLOCK_SCALE, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _best_scale(
    weight_RB16: torch.Tensor, global_scale: torch.Tensor, candidates: Iterable[torch.Tensor]
) -> torch.Tensor:
    """Choose per block the candidate scale with the least squared error; the first one wins a tie.

    The error is measured in units of 1 / global_scale (tiny weights must not underflow when squared) and summed as a
    fixed binary tree of halves, 16 -> 8 -> 4 -> 2 -> 1, so that a kernel can make the same choice bit for bit.
    """
    magnitude_RB16 = weight_RB16.abs()
    best: tuple[torch.Tensor, torch.Tensor] | None = None
    for code_RB in candidates:
        unit_RB1 = (decode_scale(code_RB) / global_scale).unsqueeze(-1)
        rounded = (magnitude_RB16 / unit_RB1).clamp_(max=E2M1_MAX)
        magic = _grid_exponent(rounded)[1]
        error = rounded.add_(magic).sub_(magic).mul_(unit_RB1).sub_(magnitude_RB16).mul_(global_scale).square_()
        while error.shape[-1] > 1:
            half = error.shape[-1] // 2
            error = error[..., :half] + error[..., half:]
        error = error.squeeze(-1)
        if best is None:
            best = code_RB, error
        else:
            better = error < best[1]
            best = torch.where(better, code_RB, best[0]), torch.where(better, error, best[1])
    assert best is not None, "a scale rule has candidates"
    return best[0]


def largest_magnitude(weight_NK: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of a matrix (N, K) in float32, without copying the matrix."""
    if weight_NK.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=weight_NK.device)
    smallest, largest = torch.aminmax(weight_NK)
    return torch.maximum(largest.float(), -smallest.float())


def _row_chunks(rows: int, columns: int, device: torch.device):
    """Yield slices of rows with about `_CHUNK_WEIGHTS` weights each."""
    step = max(1, _CHUNK_WEIGHTS.get(device.type, 1 << 22) // max(columns, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


_PAIR_VALUES: dict[torch.device, torch.Tensor] = {}


def _pair_values(device: torch.device) -> torch.Tensor:
    """Return int64 (256,): entry b is, bit for bit, the two float32 values of packed byte b, low nibble first."""
    if device not in _PAIR_VALUES:
        byte = torch.arange(256, device=device, dtype=torch.uint8)
        _PAIR_VALUES[device] = decode_e2m1(unpack(byte.unsqueeze(-1))).contiguous().view(torch.int64).view(256)
    return _PAIR_VALUES[device]


# --- FP8 operands -----------------------------------------------------------------------------------------------------


def quantize_fp8(*parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round activations (M, K), in one or more blocks of columns, to float8_e4m3fn with one scale per row.

    Returns (x8 (M, K), scale float32 (M,)).
    """
    floats = [part.to(torch.float32) for part in parts]
    amax_M1 = functools.reduce(torch.maximum, (part.abs().amax(-1, keepdim=True) for part in floats))
    amax_M1 = amax_M1.clamp(min=_LEAST_AMAX)
    top = torch.full_like(amax_M1, E4M3_MAX)  # a number's reciprocal would be rounded first
    x8 = [(part * (top / amax_M1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn) for part in floats]
    scale = (amax_M1 / top).squeeze(-1)
    if len(x8) == 1:
        return x8[0], scale
    return torch.cat([part.view(torch.uint8) for part in x8], -1).view(torch.float8_e4m3fn), scale  # cat takes no FP8


def as_rounded(x: torch.Tensor) -> torch.Tensor:
    """Return x; compiled code fuses a float32 producer with a 16-bit x, and the use of its bits forces the rounding."""
    compiling = torch.compiler.is_compiling() and x.itemsize == 2
    return (x.view(torch.int16) | 0).view(x.dtype) if compiling else x


@torch.no_grad()
def decode_fp8(packed: torch.Tensor, block_scale: torch.Tensor, transpose: bool = False) -> torch.Tensor:
    """Decode a quantized matrix to its FP8 operand: float8_e4m3fn (N, K), or (K, N), contiguous. Multiplied by
    8 / global_scale it is the weight, rounded to E4M3. Arguments as in [`dequantize`]."""
    return dequantize(packed, block_scale, torch.full((1,), FP8_DIVISOR), torch.float8_e4m3fn, transpose)


# --- FP8 layers of a mixed ModelOpt checkpoint ------------------------------------------------------------------------

#: rows per chunk: each weight's table index takes four bytes
_ROWS = 1024


@torch.no_grad()
def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode (N, K) float8_e4m3fn with one float32 scale (multiplied) to `dtype`, on the codes' device."""
    codes = torch.arange(256, dtype=torch.uint8, device=weight.device).view(torch.float8_e4m3fn)
    table = (codes.to(torch.float64) * scale.to(weight.device, torch.float64).reshape(())).to(dtype)
    return torch.cat([table[rows.int()] for rows in weight.view(torch.uint8).split(_ROWS)])
