"""Triton kernels that stream: quantize a matrix, RMSNorm with a float32 weight."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .portable import e4m3_value, narrow, widen


@triton.jit
def encode_scale(v):
    """float32 in [2^-6, 448] -> e4m3 bits (int32), round to nearest even."""
    b = v.to(tl.int32, bitcast=True)
    return ((b + 0x7FFFF + ((b >> 20) & 1)) >> 20) - 960


@triton.jit
def encode_e2m1(v):
    """float32 >= 0 -> e2m1 code 0..7 (int32), ties to even, saturating at 6.

    Within [2^e, 2^(e+1)) the grid step is 2^(e-1): adding 2^(e+22) leaves v / step, rounded to even, in the lowest bits.
    """
    v = tl.minimum(v, 6.0)
    exponent = tl.maximum(v, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
    steps = (v + (exponent + (22 << 23)).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) & 7
    return steps + (exponent >> 22) - 254


@triton.jit
def decode_e2m1(c):
    """e2m1 code 0..7 (int32) -> float32 (its bits are a float's exponent and mantissa with bias 1)."""
    return (c << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def halve(e, BN: tl.constexpr, BS: tl.constexpr, H: tl.constexpr):
    """[BN, BS, 2H] -> [BN, BS, H]: first half plus second half."""
    lo, hi = tl.split(e.reshape(BN, BS, 2, H).permute(0, 1, 3, 2))
    return lo + hi


@triton.jit
def block_error(x, a, unit, gs, BN: tl.constexpr, BS: tl.constexpr):
    """Squared error of a block rounded with `unit`, in units of 1 / gs, added 16 -> 8 -> 4 -> 2 -> 1 as the reference does."""
    u = tl.broadcast_to(unit[:, :, None], (BN, BS, 16))
    g = tl.broadcast_to(gs[:, None, None], (BN, BS, 16))
    r = decode_e2m1(encode_e2m1(tl.div_rn(a, u)))
    d = (r * u - a) * g
    e = d * d
    e = halve(e, BN, BS, 8)
    e = halve(e, BN, BS, 4)
    e = halve(e, BN, BS, 2)
    e = halve(e, BN, BS, 1)
    return e.reshape(BN, BS)


@triton.jit
def quantize_kernel(
    x_ptr,
    w_ptr,
    s_ptr,
    gs_ptr,
    N,
    K,
    sxn,
    sgs,
    BN: tl.constexpr,
    BK: tl.constexpr,
    RULE: tl.constexpr,
    NARROW: tl.constexpr,
    INTERP: tl.constexpr,
):
    """x (N, K) -> codes (N, K/2), e4m3 block scales (N, K/16) for the divisor gs.  RULE 0: rtn, 1: four_over_six, 2: neighbor_sweep.

    NARROW says that x is a 16-bit float; with a power-of-two gs the quotient x / unit is then either a tie of the e2m1 grid or at
    least 2^-14 away from one, so multiplying by 1 / unit and snapping to a grid of 2^-17 decides like a true division, and faster.
    Launch with enable_fp_fusion=False: a fused multiply-add would round differently from the reference.
    """
    BS: tl.constexpr = BK // 16
    n_N = tl.program_id(1) * BN + tl.arange(0, BN)
    k_K = tl.program_id(0) * BK + tl.arange(0, BK)
    b_K = tl.program_id(0) * (BK // 2) + tl.arange(0, BK // 2)
    s_S = tl.program_id(0) * BS + tl.arange(0, BS)
    in_N = n_N < N
    n64 = n_N.to(tl.int64)
    mask = in_N[:, None] & (k_K[None, :] < K)
    x = widen(
        tl.load(x_ptr + n64[:, None] * sxn + k_K[None, :], mask=mask, other=0.0, eviction_policy="evict_first"), INTERP
    )
    x = x.reshape(BN, BS, 16)
    gs = tl.load(gs_ptr + n_N * sgs, mask=in_N, other=1.0)
    a = tl.abs(x)
    amax = tl.max(a, axis=2)
    g2 = tl.broadcast_to(gs[:, None], (BN, BS))
    best = tl.div_rn(amax, tl.full((BN, BS), 6.0, tl.float32)) * g2
    best = encode_scale(tl.minimum(tl.maximum(best, 0.015625), 448.0))
    if RULE == 1:
        wide = tl.div_rn(amax, tl.full((BN, BS), 4.0, tl.float32)) * g2
        wide = encode_scale(tl.minimum(tl.maximum(wide, 0.015625), 448.0))
        e0 = block_error(x, a, tl.div_rn(e4m3_value(best), g2), gs, BN, BS)
        e1 = block_error(x, a, tl.div_rn(e4m3_value(wide), g2), gs, BN, BS)
        best = tl.where(e1 < e0, wide, best)
    if RULE == 2:
        middle = best
        least = block_error(x, a, tl.div_rn(e4m3_value(best), g2), gs, BN, BS)
        for i in range(1, 17):  # -1, 1, -2, 2, ...: the nearer code wins a tie
            step = (i + 1) // 2
            offset = tl.where(i % 2 == 1, -step, step)
            code = tl.minimum(tl.maximum(middle + offset, 8), 126)
            e = block_error(x, a, tl.div_rn(e4m3_value(code), g2), gs, BN, BS)
            better = e < least
            best = tl.where(better, code, best)
            least = tl.where(better, e, least)
    unit = tl.div_rn(e4m3_value(best), g2)
    if NARROW:
        exact = tl.max(tl.where(in_N, gs.to(tl.int32, bitcast=True) & 0x7FFFFF, 0), axis=0) == 0
        if exact:
            inverse = tl.div_rn(tl.full((BN, BS), 1.0, tl.float32), unit)
            v = tl.minimum(a * tl.broadcast_to(inverse[:, :, None], (BN, BS, 16)), 7.0)
            v = (v + 64.0) - 64.0
        else:
            v = tl.div_rn(a, tl.broadcast_to(unit[:, :, None], (BN, BS, 16)))
    else:
        v = tl.div_rn(a, tl.broadcast_to(unit[:, :, None], (BN, BS, 16)))
    c = encode_e2m1(v) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
    lo, hi = tl.split(c.reshape(BN, BK // 2, 2))
    tl.store(
        w_ptr + n64[:, None] * (K // 2) + b_K[None, :],
        (lo | (hi << 4)).to(tl.uint8),
        mask=in_N[:, None] & (b_K[None, :] * 2 < K),
    )
    tl.store(
        s_ptr + n64[:, None] * (K // 16) + s_S[None, :], best.to(tl.uint8), mask=in_N[:, None] & (s_S[None, :] * 16 < K)
    )


@triton.jit
def rms_norm_kernel(
    x_ptr,
    r_ptr,
    w_ptr,
    y_ptr,
    h_ptr,
    K,
    sx,
    sr,
    eps,
    RESIDUAL: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
    INTERP: tl.constexpr,
):
    """y = h / sqrt(mean(h^2) + eps) * w with h = x [+ residual], rounded to x's type and stored; w float32; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    mask = k < K
    w = tl.load(w_ptr + k, mask=mask, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    h = widen(tl.load(x_ptr + row * sx + k, mask=mask, other=0.0), INTERP)
    if RESIDUAL:
        h = narrow(
            h + widen(tl.load(r_ptr + row * sr + k, mask=mask, other=0.0), INTERP), y_ptr.dtype.element_ty, INTERP
        )
        tl.store(h_ptr + row * K + k, h, mask=mask)
        h = widen(h, INTERP)
    scale = tl.rsqrt(tl.sum(h * h, axis=0) / K + eps)
    tl.store(y_ptr + row * K + k, narrow(h * scale * w, y_ptr.dtype.element_ty, INTERP), mask=mask)
