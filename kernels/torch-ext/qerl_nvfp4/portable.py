"""Triton kernels for every GPU that Triton knows, and for its CPU interpreter.

The matrix product keeps the weights where a matrix instruction wants them without a detour through shared memory.  Two ideas make
that possible on the plain row-major layout (nothing is repacked, so a row slice of a weight is a weight):

1. y^T = W x^T: the weights are the *left* operand, which the tensor cores of every generation since Ampere read from registers.
2. A dot product does not care about the order of k.  A lane of a quad loads 16 consecutive bytes (32 codes, two scales); the k order
   inside 128 columns is then permuted, for the weights by relabelling registers (free) and for x by a shuffle.

Eight codes are decoded at once.  A code `s e e m` is placed into a bfloat16 as sign, the two low exponent bits and the top mantissa
bit, which is its value times 2^-126 (subnormals included); one multiplication by scale * 2^118 gives value * scale * 2^-8, exactly:
e2m1 * e4m3 has at most 6 significant bits.  The missing 2^8 and the tensor's scale are applied once, in float32, to the result.

Shape suffixes: M tokens, N output features, K input features, W words of 8 codes, S scales.  `INTERP` marks the interpreter, whose
bfloat16 arithmetic is not reliable; there the same integers are decoded in float32.
"""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"


@triton.jit
def decode_bits(q):
    """int32 words of 8 codes n0..n7 -> 4 int32, the bfloat16 pairs (n_i, n_{i+4}) * 2^-126."""
    S: tl.constexpr = -2147450880  # 0x80008000
    M: tl.constexpr = 0x01C001C0
    p0 = ((q << 12) & S) | ((q << 6) & M)
    p1 = ((q << 8) & S) | ((q << 2) & M)
    p2 = ((q << 4) & S) | ((q >> 2) & M)
    p3 = (q & S) | ((q >> 6) & M)
    return p0, p1, p2, p3


# x * 0x1040 = (x << 12) | (x << 6) moves sign and magnitude at once, on the otherwise idle multiply pipe
DECODE_WORD = tl.constexpr("""{
    .reg .b32 t, u, s2, nz; mov.b32 nz, 0x80008000;
    mov.b32 s2, {$5, $5};
    and.b32 t, $4, 0x000F000F; mul.lo.u32 t, t, 0x1040; and.b32 t, t, 0x81C081C0; fma.rn.bf16x2 $0, t, s2, nz;
    and.b32 t, $4, 0x00F000F0; mul.lo.u32 t, t, 0x0104; and.b32 t, t, 0x81C081C0; fma.rn.bf16x2 $1, t, s2, nz;
    shr.u32 u, $4, 8;
    and.b32 t, u, 0x000F000F; mul.lo.u32 t, t, 0x1040; and.b32 t, t, 0x81C081C0; fma.rn.bf16x2 $2, t, s2, nz;
    and.b32 t, u, 0x00F000F0; mul.lo.u32 t, t, 0x0104; and.b32 t, t, 0x81C081C0; fma.rn.bf16x2 $3, t, s2, nz;
}""")


@triton.jit
def decode_word(q, s):
    """int32 words, bfloat16 scale * 2^118 -> 4 int32, the bfloat16 pairs (n_i, n_{i+4}) * scale * 2^-8."""
    return tl.inline_asm_elementwise(
        asm=DECODE_WORD,
        constraints="=&r,=&r,=&r,=&r,r,h",
        args=[q, s],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def decode_scale(s):
    """uint8 e4m3 (not negative; subnormal and zero included) -> bfloat16 scale * 2^118."""
    return tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 t, c0, c1, nz; mov.b32 nz, 0x80008000;
        mov.b32 c0, 0x7b807b80;
        mov.b32 c1, 0x7a807a80;
        prmt.b32 t, $2, 0, 0x4140; shl.b32 t, t, 4; fma.rn.bf16x2 t, t, c0, nz; fma.rn.bf16x2 $0, t, c1, nz;
        prmt.b32 t, $2, 0, 0x4342; shl.b32 t, t, 4; fma.rn.bf16x2 t, t, c0, nz; fma.rn.bf16x2 $1, t, c1, nz;
        }""",
        constraints="=&r,=&r,r",
        args=[s],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def e4m3_value(s):
    """uint8 e4m3 -> float32: normal numbers by moving the bits, subnormal ones as mantissa * 2^-9."""
    b = s.to(tl.int32)
    normal = ((b << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where((b & 0x78) == 0, (b & 7).to(tl.float32) * 0.001953125, normal)


@triton.jit
def halves(p):
    """int32 (two bfloat16) [...] -> bfloat16 [..., 2]; no instruction."""
    lo = (p & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    hi = ((p >> 16) & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(lo, hi)


@triton.jit
def halves_f32(p):
    return tl.join((p << 16).to(tl.float32, bitcast=True), (p & -65536).to(tl.float32, bitcast=True))


@triton.jit
def narrow(v, DTYPE: tl.constexpr, INTERP: tl.constexpr):
    """float32 -> DTYPE, to nearest even (the interpreter's own bfloat16 cast rounds half up and drops carries)."""
    if INTERP and tl.bfloat16 == DTYPE:
        b = v.to(tl.int32, bitcast=True)
        b = b + 0x7FFF + ((b >> 16) & 1)
        return (b >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return v.to(DTYPE)


@triton.jit
def widen(v, INTERP: tl.constexpr):
    """bfloat16 or float16 -> float32 (the interpreter loses bfloat16 subnormals)."""
    if INTERP and v.dtype == tl.bfloat16:
        return (v.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return v.to(tl.float32)


@triton.jit
def encode_scale(v):
    """float32 in [2^-6, 448] -> e4m3 bits (int32), round to nearest even."""
    b = v.to(tl.int32, bitcast=True)
    return ((b + 0x7FFFF + ((b >> 20) & 1)) >> 20) - 960


@triton.jit
def encode_e4m3(v, INTERP: tl.constexpr):
    """float32, |v| < 464 or NaN -> e4m3 bits (int32), round to nearest even."""
    if INTERP:
        a = tl.abs(v)
        small = (a + 16384.0).to(tl.int32, bitcast=True) & 15  # steps of 2^-9, the last bits of this sum
        bits = tl.where(v == v, tl.where(a < 0.015625, small, encode_scale(a)), 127)
        return bits | ((v.to(tl.int32, bitcast=True) >> 24) & 128)
    else:  # Triton's own cast goes through float16 on sm_89, and so rounds twice
        bits = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [v], dtype=tl.uint8, is_pure=True, pack=2
        )
        return bits.to(tl.int32)


@triton.jit
def join4(a, b, c, d):
    """Four [...] -> [..., 2, 2], in this order."""
    return tl.join(tl.join(a, c), tl.join(b, d))


# the 8 magnitudes times the scale ($6) / 8, exact in float16, as e4m3; a byte permute looks up four, signs are spread over their bytes
DECODE_BLOCK = tl.constexpr(
    "{ .reg .b16 a, b; .reg .b32 x, y, h, low, high; prmt.b32 x, $6, 0, 0x4400; mov.b32 {a, b}, x; cvt.rn.f16x2.e4m3x2 h, a;"
    + "".join(
        f"mov.b32 x, {first}; mul.rn.f16x2 x, h, x; cvt.rn.satfinite.e4m3x2.f16x2 a, x;"
        f"mov.b32 x, {second}; mul.rn.f16x2 x, h, x; cvt.rn.satfinite.e4m3x2.f16x2 b, x; mov.b32 {table}, {{a, b}};"
        for table, first, second in (("low", "0x2c000000", "0x32003000"), ("high", "0x36003400", "0x3a003800"))
    )
    + "".join(
        f"and.b32 x, {q}, 0x77777777; prmt.b32 {w0}, low, high, x; shr.u32 x, x, 16; prmt.b32 {w1}, low, high, x; shl.b32 y, {q}, 4;"
        f"prmt.b32 x, {q}, y, 0x9D8C; lop3.b32 {w0}, {w0}, x, 0x80808080, 0xF8;"
        f"prmt.b32 x, {q}, y, 0xBFAE; lop3.b32 {w1}, {w1}, x, 0x80808080, 0xF8;"
        for q, w0, w1 in (("$4", "$0", "$1"), ("$5", "$2", "$3"))
    )
    + "}"
)


@triton.jit
def decode_e2m1(c):
    """e2m1 code 0..7 (int32) -> float32 (its bits are a float's exponent and mantissa with bias 1)."""
    return (c << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def decode_four(q, v, INTERP: tl.constexpr):
    """The four lowest codes times v, as e4m3 bytes of an int32."""
    word = tl.zeros(q.shape, tl.int32)
    for i in tl.static_range(4):
        c = (q >> (4 * i)).to(tl.int32)
        word |= (encode_e4m3(decode_e2m1(c & 7) * v, INTERP) | (c & 8) << 4) << (8 * i)
    return word


@triton.jit
def decode_block(q, s, INTERP: tl.constexpr):
    """int64 of 16 codes, uint8 scales -> int32 [..., 2, 2], four e4m3(code * scale / 8) each."""
    if INTERP:
        v = e4m3_value(s) * 0.125
        w0, w1 = decode_four(q, v, INTERP), decode_four(q >> 16, v, INTERP)
        w2, w3 = decode_four(q >> 32, v, INTERP), decode_four(q >> 48, v, INTERP)
    else:
        words = [q.to(tl.int32), (q >> 32).to(tl.int32), s.to(tl.int32)]
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            DECODE_BLOCK, "=&r,=&r,=&r,=&r,r,r,r", words, (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
        )
    return join4(w0, w1, w2, w3)


@triton.jit
def e4m3(b, INTERP: tl.constexpr):
    """Bytes (any integer type) -> e4m3; in the interpreter their values in float32."""
    if INTERP:
        return tl.where(b & 128 == 0, e4m3_value(b & 127), -e4m3_value(b & 127))
    else:
        return b.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def decode_tile(q, s, BN: tl.constexpr, W: tl.constexpr, INTERP: tl.constexpr):
    """q int32 [BN, W], s uint8 [BN, W/2] -> [BN, W, 2 (i0), 2 (i1), 2 (pp)], values * 2^-8; column k = 8w + 4pp + 2*i1 + i0."""
    if INTERP:
        sf = e4m3_value(s) * 3.3230699894622897e35  # 2^118
        sf = tl.reshape(tl.broadcast_to(sf[:, :, None], (BN, W // 2, 2)), (BN, W))
        p0, p1, p2, p3 = decode_bits(q)
        P = halves_f32(tl.join(tl.join(p0, p1), tl.join(p2, p3)))
        return P * sf[:, :, None, None, None]
    else:
        sc = decode_scale(s)
        sc = tl.reshape(tl.broadcast_to(sc[:, :, None], (BN, W // 2, 2)), (BN, W))
        p0, p1, p2, p3 = decode_word(q, sc)
        return halves(tl.join(tl.join(p0, p1), tl.join(p2, p3)))


@triton.jit(do_not_specialize=["sgs"])
def dequantize_kernel(
    w_ptr,
    s_ptr,
    gs_ptr,
    o_ptr,
    N,
    K,
    swn,
    ssn,
    son,
    sgs,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERP: tl.constexpr,
):
    """o[n, k] = DTYPE(e2m1 * (e4m3 / global_scale)), two float32 roundings and one to DTYPE, as compressed-tensors does."""
    n_N = tl.program_id(1) * BN + tl.arange(0, BN)
    W: tl.constexpr = BK // 8
    w_W = tl.program_id(0) * W + tl.arange(0, W)
    s_S = tl.program_id(0) * (W // 2) + tl.arange(0, W // 2)
    k_K = tl.program_id(0) * BK + tl.arange(0, BK)
    in_N = n_N < N
    n64 = n_N.to(tl.int64)
    q = tl.load(
        w_ptr + n64[:, None] * swn + w_W[None, :],
        mask=in_N[:, None] & (w_W[None, :] * 8 < K),
        other=0,
        eviction_policy="evict_first",
    )
    s = tl.load(s_ptr + n64[:, None] * ssn + s_S[None, :], mask=in_N[:, None] & (s_S[None, :] * 16 < K), other=0)
    gs = tl.load(gs_ptr + n_N * sgs, mask=in_N, other=1.0)
    unit = tl.div_rn(e4m3_value(s), tl.broadcast_to(gs[:, None], (BN, W // 2)))
    unit = tl.reshape(tl.broadcast_to(unit[:, :, None], (BN, W // 2, 2)), (BN, W))
    p0, p1, p2, p3 = decode_bits(q)
    P = halves_f32(tl.join(tl.join(p0, p1), tl.join(p2, p3)))  # code value * 2^-126, exact in float32
    P = (P * 8.507059173023462e37) * unit[:, :, None, None, None]
    P = P.permute(0, 1, 4, 3, 2).reshape(BN, BK)
    mask = in_N[:, None] & (k_K[None, :] < K)
    tl.store(o_ptr + n64[:, None] * son + k_K[None, :], narrow(P, DTYPE, INTERP), mask=mask)


@triton.jit
def lora_down_block(
    x_ptr,
    a_ptr,
    xa_ptr,
    pid,
    M,
    K,
    RS,
    sxm,
    mp,
    KSLICE: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERP: tl.constexpr,
):
    """xa[ks, row, m] = sum over slice ks of a[row, k] * x[m, k], float32; a (RS, K), x (M, K).

    The slice length is a compile-time constant: only then are 16-byte loads provably aligned.
    """
    nr = tl.cdiv(RS, BR)
    nm = tl.cdiv(M, BM)
    pr = pid % nr
    pm = (pid // nr) % nm
    ks = pid // (nr * nm)
    r_R = pr * BR + tl.arange(0, BR)
    m_M = pm * BM + tl.arange(0, BM)
    k_K = ks * KSLICE + tl.arange(0, BK)
    ap = a_ptr + tl.minimum(r_R, RS - 1)[:, None].to(tl.int64) * K + k_K[None, :]
    xp = x_ptr + tl.minimum(m_M, M - 1)[:, None].to(tl.int64) * sxm + k_K[None, :]
    acc = tl.zeros((BR, BM), tl.float32)
    steps = tl.cdiv(tl.minimum(KSLICE, K - ks * KSLICE), BK)
    for i in tl.range(0, steps):
        if EVEN_K:
            a = tl.load(ap)
            x = tl.load(xp)
        else:
            a = tl.load(ap, mask=k_K[None, :] + i * BK < K, other=0.0)
            x = tl.load(xp, mask=k_K[None, :] + i * BK < K, other=0.0)
        ap += BK
        xp += BK
        if INTERP:
            acc += tl.dot(widen(a, INTERP), tl.trans(widen(x, INTERP)))
        else:
            acc = tl.dot(a, tl.trans(x), acc)
    out = xa_ptr + (ks * RS + r_R[:, None]) * mp + m_M[None, :]
    tl.store(out, acc, mask=(r_R[:, None] < RS) & (m_M[None, :] < mp))


@triton.jit(do_not_specialize=["M"])
def permute_kernel(x_ptr, o_ptr, M, K, sxm, BM: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):
    """x[:, 128c + 32t + 8j + 4pp + 2*i1 + i0] -> o[:, 128c + 32j + 16*i1 + 8*i0 + 2t + pp], the order of wgmma_kernel; columns of the last
    128 that x does not have are zeros."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    m_M = tl.program_id(0) * BM + tl.arange(0, BM)
    k_K = tl.program_id(1) * BK + tl.arange(0, BK)
    mask = (m_M[:, None] < M) & (k_K[None, :] < K)
    x = tl.load(x_ptr + m_M[:, None].to(tl.int64) * sxm + k_K[None, :], mask=mask, other=0.0)
    columns = (K + 127) // 128 * 128
    mask = (m_M[:, None] < M) & (k_K[None, :] < columns)
    x = x.reshape(BM, BK // 128, 4, 4, 2, 2, 2).permute(0, 1, 3, 5, 6, 2, 4).reshape(BM, BK)
    tl.store(o_ptr + m_M[:, None].to(tl.int64) * columns + k_K[None, :], x, mask=mask)


@triton.jit(do_not_specialize=["M", "RS", "mp"])
def lora_down_kernel(
    x_ptr,
    a_ptr,
    xa_ptr,
    M,
    K,
    RS,
    sxm,
    mp,
    KSLICE: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERP: tl.constexpr,
):
    """x A^T in slices of K, one per program."""
    lora_down_block(x_ptr, a_ptr, xa_ptr, tl.program_id(0), M, K, RS, sxm, mp, KSLICE, BM, BR, BK, EVEN_K, INTERP)


@triton.jit(do_not_specialize=["M", "e1", "e2"])
def lora_up_kernel(
    xa_ptr,
    b_ptr,
    y_ptr,
    M,
    N,
    sxam,
    sym,
    e1,
    e2,
    RANK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BRANK: tl.constexpr,
    INTERP: tl.constexpr,
):
    """y += (x A^T) B^T; the shards of y end at rows e1 and e2 of B, multiples of BN."""
    n0 = tl.program_id(0) * BN
    shard = (n0 >= e1).to(tl.int32) + (n0 >= e2).to(tl.int32)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = n0 + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for r0 in tl.static_range(0, RANK, BRANK):
        r = r0 + tl.arange(0, BRANK)
        xa_off = m[:, None] * sxam + (shard * RANK + r)[None, :]
        xa = tl.load(xa_ptr + xa_off, mask=(m < M)[:, None] & (r < RANK)[None, :], other=0.0)
        b = tl.load(b_ptr + n[None, :] * RANK + r[:, None], mask=(n < N)[None, :] & (r < RANK)[:, None], other=0.0)
        acc = tl.dot(widen(xa, INTERP), widen(b, INTERP), acc) if INTERP else tl.dot(xa, b, acc)
    y = y_ptr + m[:, None].to(tl.int64) * sym + n[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    acc += tl.load(y, mask=mask, other=0.0).to(tl.float32)
    tl.store(y, narrow(acc, y_ptr.dtype.element_ty, INTERP), mask=mask)


@triton.jit(do_not_specialize=["M", "sgs", "iters_per_split", "num_splits", "mp", "ks_n", "e1", "e2", "RS"])
def gemm_kernel(
    x_ptr,
    token_ptr,
    w_ptr,
    s_ptr,
    gs_ptr,
    bias_ptr,
    xa_ptr,
    b_ptr,
    y_ptr,
    ws_ptr,
    cnt_ptr,
    M,
    N,
    K,
    sxm,
    swn,
    ssn,
    sym,
    sgs,
    RS,
    mp,
    ks_n,
    e1,
    e2,
    iters_per_split,
    num_splits,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    MMA: tl.constexpr,
    BIAS: tl.constexpr,
    RANK: tl.constexpr,
    BRANK: tl.constexpr,
    FP8: tl.constexpr,
    INTERP: tl.constexpr,
):
    """y[m, n] = sum_k x[m, k] W[n, k] [+ bias[n]] [+ sum_r xa[shard(n) * RANK + r, m] b[n, r]].

    MMA: 3 = the k order that suits wgmma (sm_90, num_warps % 4 == 0, BM >= 16), 2 = the one that suits mma.sync.  Both are right
    everywhere; the wrong one only takes the weights through shared memory.  Split-K is deterministic: every split parks its float32
    tile, the last one to arrive adds them in a fixed order and resets the counter.

    FP8: x is e4m3 bytes with a scale per token, w_ptr int64, the 16 codes of a block.
    """
    pid = tl.program_id(0)
    sk = tl.program_id(1)
    num_m = tl.cdiv(M, BM)
    pm = pid % num_m  # m fastest: programs that share a weight tile run together
    pn = pid // num_m
    n_N = pn * BN + tl.arange(0, BN)
    m_M = pm * BM + tl.arange(0, BM)
    nc_N = tl.minimum(n_N, N - 1)
    CODES: tl.constexpr = 16 if FP8 else 8  # per element of w_ptr
    W: tl.constexpr = BK // CODES
    NC: tl.constexpr = BK // 128
    it0 = sk * iters_per_split
    it1 = tl.minimum(it0 + iters_per_split, tl.cdiv(K, BK))
    w_W = it0 * W + tl.arange(0, W)
    s_S = it0 * (BK // 16) + tl.arange(0, BK // 16)
    k_K = it0 * BK + tl.arange(0, BK)
    wp = w_ptr + nc_N[:, None].to(tl.int64) * swn + w_W[None, :]
    sp = s_ptr + nc_N[:, None].to(tl.int64) * ssn + s_S[None, :]
    xp = x_ptr + m_M[:, None].to(tl.int64) * sxm + k_K[None, :]
    in_M = m_M[:, None] < M
    acc = tl.zeros((BN, BM), tl.float32)
    for i in tl.range(it0, it1):
        if EVEN_K:
            q = tl.load(wp, eviction_policy="evict_first")
            s = tl.load(sp)
            x = tl.load(xp, mask=in_M, other=0.0)
        else:
            done = (i - it0) * BK
            q = tl.load(wp, mask=w_W[None, :] * CODES + done < K, other=0)
            s = tl.load(sp, mask=s_S[None, :] * 16 + done < K, other=0)
            x = tl.load(xp, mask=in_M & (k_K[None, :] + done < K), other=0.0)
        wp += W
        sp += BK // 16
        xp += BK
        # a lane t of a quad owns 32 consecutive k of a chunk of 128
        if FP8:
            P = decode_block(q, s, INTERP)
            P = join4(
                e4m3(P & 255, INTERP),
                e4m3(P >> 8 & 255, INTERP),
                e4m3(P >> 16 & 255, INTERP),
                e4m3(P >> 24 & 255, INTERP),
            )
            P = P.reshape(BN, NC, 4, 4, 8).permute(0, 1, 3, 2, 4).reshape(BN, BK)  # n, c, t, word, code
            x = e4m3(x, INTERP).reshape(BM, NC, 4, 4, 8).permute(0, 1, 3, 2, 4).reshape(BM, BK)
        else:
            P = decode_tile(q, s, BN, W, INTERP).reshape(BN, NC, 4, 4, 2, 2, 2)  # n, c, t, j, i0, i1, pp
            x = x.reshape(BM, NC, 4, 4, 2, 2, 2)  # m, c, t, j, pp, i1, i0
            if MMA == 3:
                P = P.permute(0, 1, 3, 5, 4, 2, 6).reshape(BN, BK)
                x = x.permute(0, 1, 3, 5, 6, 2, 4).reshape(BM, BK)
            else:
                P = P.permute(0, 1, 3, 2, 5, 4, 6).reshape(BN, BK)
                x = x.permute(0, 1, 3, 2, 5, 6, 4).reshape(BM, BK)
        if INTERP:
            acc += tl.dot(P, tl.trans(widen(x, INTERP)))
        elif x.dtype == tl.float16:
            acc = tl.dot((P.to(tl.float32) * 256.0).to(tl.float16), x.T, acc)
        else:
            acc = tl.dot(P, x.T, acc)
    if x_ptr.dtype.element_ty == tl.float16 and not INTERP:
        unit = tl.div_rn(tl.full((BN,), 1.0, tl.float32), tl.load(gs_ptr + nc_N * sgs))
    else:
        unit = tl.div_rn(tl.full((BN,), 8.0 if FP8 else 256.0, tl.float32), tl.load(gs_ptr + nc_N * sgs))
    if SPLIT:
        base = (
            ws_ptr
            + pid.to(tl.int64) * num_splits * (BN * BM)
            + tl.arange(0, BN)[:, None] * BM
            + tl.arange(0, BM)[None, :]
        )
        tl.store(base + sk * (BN * BM), acc)
        tl.debug_barrier()
        last = tl.atomic_add(cnt_ptr + pid, 1, sem="acq_rel") == num_splits - 1
        if last:
            acc = tl.zeros((BN, BM), tl.float32)
            for i in range(num_splits):
                acc += tl.load(base + i * (BN * BM), cache_modifier=".cg")
            tl.store(cnt_ptr + pid, 0)
    else:
        last = True
    if last:
        acc = acc * unit[:, None]
        if FP8:
            acc *= tl.load(token_ptr + m_M, mask=m_M < M, other=0.0)[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + nc_N).to(tl.float32)[:, None]
        if RANK > 0:
            shard = (pn * BN >= e1).to(tl.int32) + (pn * BN >= e2).to(tl.int32)
            for r0 in tl.static_range(0, RANK, BRANK):  # shared memory for BRANK ranks, however many there are
                r_R = r0 + tl.arange(0, BRANK)
                row = shard * RANK + r_R
                ok = r_R < RANK
                xa = tl.zeros((BRANK, BM), tl.float32)
                for ks in range(ks_n):
                    xa += tl.load(
                        xa_ptr + (ks * RS + row[:, None]) * mp + m_M[None, :],
                        mask=ok[:, None] & (m_M[None, :] < mp),
                        other=0.0,
                    )
                b = tl.load(b_ptr + nc_N[:, None].to(tl.int64) * RANK + r_R[None, :], mask=ok[None, :], other=0.0)
                if INTERP:
                    acc += tl.dot(widen(b, INTERP), widen(narrow(xa, b.dtype, INTERP), INTERP))
                else:
                    acc = tl.dot(b, xa.to(b.dtype), acc)
        yp = y_ptr + m_M[None, :].to(tl.int64) * sym + n_N[:, None]
        tl.store(yp, narrow(acc, y_ptr.dtype.element_ty, INTERP), mask=(m_M[None, :] < M) & (n_N[:, None] < N))
