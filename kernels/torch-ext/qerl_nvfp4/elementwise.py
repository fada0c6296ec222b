"""Triton kernels that stream: quantize a matrix to NVFP4 or FP8, decode NVFP4 to FP8, RMSNorm and SwiGLU."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .portable import decode_block, decode_e2m1, e4m3_value, encode_e4m3, encode_scale, join4, narrow, widen


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
    x_ptr, w_ptr, s_ptr, gs_ptr, N, K, sxn, sgs,
    BN: tl.constexpr, BK: tl.constexpr, RULE: tl.constexpr, NARROW: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
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


def _rtn_asm() -> str:
    """PTX for one block of 16 bfloat16 ($3..$10, two a register) and its divisor ($11): codes ($0, $1) and the scale byte ($2).

    With v = |x| / unit the code is min(2 v, v + 2, v / 2 + 4), each rounded to the nearest integer, ties to even (the grid has step 1/2
    below 2, 1 below 4, 2 above).  All of that is done for two values at once in bfloat16, where adding to 128 rounds to integers.

    It takes v as a bfloat16 that is a tie of the grid exactly where x / unit is one, and else on the same side of it.  For a divisor that
    is a power of two: unit has 4 significant bits and a tie 3, so tie * unit is a bfloat16 like x, and x / unit is a tie or at least 8/15
    of a step of bfloat16 away from one: x times 1 / unit, as the sum of two bfloat16, rounds to the right side.  And amax * (1 / 6)
    rounds to the same e4m3 as amax / 6.  Otherwise (and where the scale is cut at 448, so that v can be large) x is divided in float32,
    and cut to a bfloat16 whose last bit is set if anything was cut off.
    """
    words, magnitudes = [f"${i + 3}" for i in range(8)], [f"a{i}" for i in range(8)]
    code = """{
    .reg .b32 a<8>, c<8>, high, low, one, two, half, add0, add2, add4, m, n, p; .reg .f32 amax, q, val, inv, rest; .reg .pred ok;
    """
    code += "".join(f"abs.bf16x2 {a}, {w};\n" for a, w in zip(magnitudes, words, strict=True))
    code += "max.bf16x2 m, a0, a1;\n" + "".join(f"max.bf16x2 m, m, {a};\n" for a in magnitudes[2:])
    code += """
    shl.b32 n, m, 16; max.bf16x2 m, m, n; and.b32 m, m, 0xFFFF0000; mov.b32 amax, m;
    mov.b32 n, $11; and.b32 m, n, 0x7FFFFF; setp.eq.u32 ok, m, 0;
    sub.u32 n, n, 0x0D800000; setp.lt.and.u32 ok, n, 0x64000000, ok;
    mul.rn.f32 q, amax, 0f3E2AAAAB; mul.rn.f32 q, q, $11; setp.le.and.f32 ok, q, 0f43E00000, ok;
    @ok bra SCALE;
    div.rn.f32 q, amax, 0f40C00000; mul.rn.f32 q, q, $11; min.f32 q, q, 0f43E00000;
    SCALE: max.f32 q, q, 0f3C800000;
    mov.b32 m, q; shr.u32 n, m, 20; and.b32 n, n, 1; add.u32 m, m, n; add.u32 m, m, 0x7FFFF; shr.u32 m, m, 20;
    sub.u32 $2, m, 960; shl.b32 n, m, 20; mov.b32 val, n;
    @!ok bra DIVIDE;
    rcp.approx.ftz.f32 inv, val; mul.rn.f32 inv, inv, $11;
    cvt.rn.bf16x2.f32 high, inv, inv; shl.b32 n, high, 16; mov.b32 rest, n;
    sub.rn.f32 rest, inv, rest; cvt.rn.bf16x2.f32 low, rest, rest; mov.b32 n, 0x80008000;
    """
    code += "".join(f"fma.rn.bf16x2 m, {a}, low, n; fma.rn.bf16x2 {a}, {a}, high, m;\n" for a in magnitudes)
    code += "bra ROUND;\nDIVIDE: div.rn.f32 inv, val, $11;\n"
    for a in magnitudes:
        for value, part in ((f"shl.b32 m, {a}, 16", "n"), (f"and.b32 m, {a}, 0x7FFF0000", "p")):
            code += f"{value}; mov.b32 q, m; div.rn.f32 q, q, inv; min.f32 q, q, 0f40C00000; mov.b32 m, q;\n"
            code += f"and.b32 {part}, m, 0xFFFF; add.u32 {part}, {part}, 0xFFFF; or.b32 {part}, {part}, m;\n"
        code += f"prmt.b32 {a}, n, p, 0x7632;\n"
    code += """ROUND: mov.b32 one, 0x3F803F80; mov.b32 two, 0x40004000; mov.b32 half, 0x3F003F00;
    mov.b32 add0, 0x43004300; mov.b32 add2, 0x43024302; mov.b32 add4, 0x43044304;
    """
    for a, c in zip(magnitudes, [f"c{i}" for i in range(8)], strict=True):
        code += f"fma.rn.bf16x2 m, {a}, two, add0; fma.rn.bf16x2 n, {a}, one, add2; fma.rn.bf16x2 p, {a}, half, add4;\n"
        code += f"min.bf16x2 m, m, n; min.bf16x2 {c}, m, p;\n"
    for i in (
        0,
        2,
        4,
        6,
    ):  # the codes of weights 0, 2, 1, 3, a byte each, with their signs (prmt spreads a byte's first bit)
        code += f"prmt.b32 c{i}, c{i}, c{i + 1}, 0x6240; prmt.b32 m, {words[i]}, {words[i + 1]}, 0xFBD9;\n"
        code += f"lop3.b32 c{i}, 0x08080808, m, c{i}, 0xCA;\n"
    for i in (0, 4):
        code += (
            f"prmt.b32 n, c{i}, c{i + 2}, 0x5410; prmt.b32 m, c{i}, c{i + 2}, 0x7632; mad.lo.u32 ${i // 4}, m, 16, n;\n"
        )
    return code + "}"


RTN_ASM = tl.constexpr(_rtn_asm())


@triton.jit
def quantize_rtn_kernel(x_ptr, w_ptr, s_ptr, gs_ptr, blocks, blocks_per_row, PER_ROW: tl.constexpr, BB: tl.constexpr):
    """quantize_kernel for rtn and a contiguous bfloat16 matrix on a GPU, one thread per block: x_ptr int32, two values per word."""
    b_B = tl.program_id(0).to(tl.int64) * BB + tl.arange(0, BB)
    inside = b_B < blocks
    x0_ptr = x_ptr + b_B[:, None] * 8 + tl.arange(0, 4)[None, :]
    x0 = tl.load(x0_ptr, mask=inside[:, None], other=0, eviction_policy="evict_first")
    x1 = tl.load(x0_ptr + 4, mask=inside[:, None], other=0, eviction_policy="evict_first")
    if PER_ROW:
        gs = tl.load(gs_ptr + b_B // blocks_per_row, mask=inside, other=1.0)
    else:
        gs = tl.broadcast_to(tl.load(gs_ptr), (BB,))
    even, odd = tl.split(x0.reshape(BB, 2, 2))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    even, odd = tl.split(x1.reshape(BB, 2, 2))
    w4, w6 = tl.split(even)
    w5, w7 = tl.split(odd)
    c0, c1, s = tl.inline_asm_elementwise(
        asm=RTN_ASM,
        constraints="=&r,=&r,=&r,r,r,r,r,r,r,r,r,f",
        args=[w0, w1, w2, w3, w4, w5, w6, w7, gs],
        dtype=(tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    out_ptr = w_ptr + b_B[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(out_ptr, tl.join(c0, c1), mask=inside[:, None])
    tl.store(s_ptr + b_B, s.to(tl.uint8), mask=inside)


@triton.jit
def row_factor(top, s_ptr):
    """448 / amax, of which amax / 448 is stored; amax is the largest of the magnitudes `top` of a row."""
    amax = tl.maximum(tl.max(top, axis=0), 7.888609052210118e-31)  # 2^-100
    tl.store(s_ptr, tl.div_rn(amax, 448.0))
    return tl.div_rn(448.0, amax)


@triton.jit
def store_x8(y, factor, k, q_ptr, K, INTERP: tl.constexpr):
    """e4m3(y * factor) of columns k of a row of K, in decode order; zeros beyond K."""
    p = k // 128 * 128 + k // 8 % 4 * 32 + k // 4 % 2 * 16 + k // 32 % 4 * 4 + k % 4
    tl.store(q_ptr + p, encode_e4m3(y * factor, INTERP).to(tl.uint8), mask=k < tl.cdiv(K, 128) * 128)


@triton.jit
def rms_norm_kernel(
    x_ptr, r_ptr, w_ptr, y_ptr, h_ptr, q_ptr, s_ptr, K, sx, sr, eps,
    RESIDUAL: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """y = h / sqrt(mean(h^2) + eps) * w with h = x [+ residual], rounded to x's type and stored; w float32; one program per row.

    With q_ptr, x8 of y in decode order and its scale are stored too.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    mask = k < K
    # before the wait: only our kernels let the next one begin early, and none of them writes a weight
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
    y = narrow(h * scale * w, y_ptr.dtype.element_ty, INTERP)
    tl.store(y_ptr + row * K + k, y, mask=mask)
    if q_ptr is not None:
        y = widen(y, INTERP)
        store_x8(y, row_factor(tl.abs(y), s_ptr + row), k, q_ptr + row * (tl.cdiv(K, 128) * 128), K, INTERP)


@triton.jit
def swiglu_kernel(
    x_ptr, y_ptr, q_ptr, s_ptr, K, sx, CHUNKS: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr, INTERP: tl.constexpr
):
    """y = silu(gate) * up of x = [gate | up] (M, 2 K), both steps rounded to x's type; its x8 in decode order, and scale.

    One program per row, which it reads once, in CHUNKS of BK columns.
    """
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gates, ups, ys = (), (), ()
    for c in tl.static_range(CHUNKS):  # all loads are on their way before the first is used
        k = c * BK + tl.arange(0, BK)
        gates = gates + (tl.load(x_ptr + row * sx + k, mask=k < K, other=0.0),)  # noqa: RUF005
        ups = ups + (tl.load(x_ptr + row * sx + K + k, mask=k < K, other=0.0),)  # noqa: RUF005
    top = tl.zeros([BK], tl.float32)
    for c in tl.static_range(CHUNKS):
        k = c * BK + tl.arange(0, BK)
        gate = widen(gates[c], INTERP)
        silu = widen(narrow(gate / (1.0 + tl.exp(-gate)), y_ptr.dtype.element_ty, INTERP), INTERP)
        y = narrow(silu * widen(ups[c], INTERP), y_ptr.dtype.element_ty, INTERP)
        tl.store(y_ptr + row * K + k, y, mask=k < K)
        ys = ys + (widen(y, INTERP),)  # noqa: RUF005
        top = tl.maximum(top, tl.abs(ys[c]))
    factor = row_factor(top, s_ptr + row)
    for c in tl.static_range(CHUNKS):
        k = c * BK + tl.arange(0, BK)
        store_x8(ys[c], factor, k, q_ptr + row * (tl.cdiv(K, 128) * 128), K, INTERP)


@triton.jit
def quantize_fp8_kernel(
    x_ptr, f_ptr, q_ptr, s_ptr, K, columns, sx,
    FACTOR: tl.constexpr, ORDER: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """e4m3 bytes (M, columns) and scales (M,) of x (M, K), times f (K,) with FACTOR; ORDER: columns as `reference.in_decode_order` has them.

    One program per row, which it reads once.
    """
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BK)
    # with ORDER p = 32 w + 16 h + 4 t + i: a thread reads four groups of four neighbours and writes 16 bytes
    k = p // 128 * 128 + p // 4 % 4 * 32 + p // 32 % 4 * 8 + p // 16 % 2 * 4 + p % 4 if ORDER else p
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = widen(tl.load(x_ptr + row * sx + k, mask=k < K, other=0.0), INTERP)
    if FACTOR:
        x *= tl.load(f_ptr + k, mask=k < K, other=0.0)
    x8 = encode_e4m3(x * row_factor(tl.abs(x), s_ptr + row), INTERP)
    tl.store(q_ptr + row * columns + p, x8.to(tl.uint8), mask=p < columns)


@triton.jit
def decode_fp8(w_ptr, s_ptr, n, b, N, blocks, swn, ssn, INTERP: tl.constexpr):
    """Blocks b of rows n -> int32 [n, b, 2, 2] of four e4m3(code * scale / 8) each; the codes of a block are one int64."""
    mask = (n[:, None] < N) & (b[None, :] < blocks)
    n64 = n[:, None].to(tl.int64)
    q = tl.load(w_ptr + n64 * swn + b[None, :], mask=mask, other=0, eviction_policy="evict_first")
    s = tl.load(s_ptr + n64 * ssn + b[None, :], mask=mask, other=0)
    return decode_block(q, s, INTERP)


@triton.jit
def dequantize_fp8_kernel(
    w_ptr, s_ptr, o_ptr, N, K, swn, ssn,
    TRANSPOSE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """e4m3(code * block_scale / 8), int32 of four: (N, K), or with TRANSPOSE (K, N), N a multiple of 4; w_ptr int64."""
    n0 = tl.program_id(0) // tl.cdiv(K, BK) * BN
    k0 = tl.program_id(0) % tl.cdiv(K, BK) * BK
    b = k0 // 16 + tl.arange(0, BK // 16)
    if TRANSPOSE:
        g = n0 // 4 + tl.arange(0, BN // 4)
        u = decode_fp8(w_ptr, s_ptr, 4 * g, b, N, K // 16, swn, ssn, INTERP)
        v = decode_fp8(w_ptr, s_ptr, 4 * g + 1, b, N, K // 16, swn, ssn, INTERP)
        w = decode_fp8(w_ptr, s_ptr, 4 * g + 2, b, N, K // 16, swn, ssn, INTERP)
        x = decode_fp8(w_ptr, s_ptr, 4 * g + 3, b, N, K // 16, swn, ssn, INTERP)
        # 4 x 4 bytes: first the halves of u and w, of v and x, then the bytes of both
        L: tl.constexpr = 0x00FF00FF
        H: tl.constexpr = -16711936  # 0xFF00FF00
        u, w = u & 0xFFFF | w << 16, u >> 16 & 0xFFFF | w & -65536
        v, x = v & 0xFFFF | x << 16, v >> 16 & 0xFFFF | x & -65536
        words = join4(u & L | (v & L) << 8, u >> 8 & L | v & H, w & L | (x & L) << 8, w >> 8 & L | x & H)
        k = k0 + tl.arange(0, BK)
        at = k[:, None].to(tl.int64) * (N // 4) + g[None, :]
        tl.store(o_ptr + at, words.reshape(BN // 4, BK).trans(), mask=(k[:, None] < K) & (g[None, :] < N // 4))
    else:
        n = n0 + tl.arange(0, BN)
        k = k0 // 4 + tl.arange(0, BK // 4)
        words = decode_fp8(w_ptr, s_ptr, n, b, N, K // 16, swn, ssn, INTERP).reshape(BN, BK // 4)
        at = n[:, None].to(tl.int64) * (K // 4) + k[None, :]
        tl.store(o_ptr + at, words, mask=(n[:, None] < N) & (k[None, :] < K // 4))
