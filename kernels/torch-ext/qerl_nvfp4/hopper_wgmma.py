"""The Hopper kernel for 16 to a few hundred tokens, in Gluon.

Weights, scales and x arrive by the bulk copy engine, several stages deep; weights are decoded into the *register* operand of `wgmma`
while the previous `wgmma` runs.  x must be permuted (portable.permute_block).  What it shares with skinny_kernel is in hopper.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .hopper import decode_word, gather_partials, halves, load_lora_down, opaque_zero, scale_and_bias, spread_scales

X_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
W_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)
S_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)


@gluon.constexpr_function
def wgmma_rows(BN, NW):
    regs = [[8, 0]]
    warps = []
    n = 16
    while n < 16 * NW:
        warps.append([n, 0])
        n *= 2
    while n < BN:
        regs.append([n, 0])
        n *= 2
    return regs, warps


@gluon.constexpr_function
def wgmma_q_layout(BN, NW):
    regs, warps = wgmma_rows(BN, NW)
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *regs], lanes, warps, [], [BN, 16])


@gluon.constexpr_function
def wgmma_s_layout(BN, NW):
    regs, warps = wgmma_rows(BN, NW)
    return gl.DistributedLinearLayout(regs, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warps, [], [BN, 4])


@gluon.jit
def load_weights(w_d, s_d, w_sh, s_sh, full, st, tile, it, mt, BN: gl.constexpr, BM: gl.constexpr):
    """Ask for 256 columns of a tile: two blocks of words, one of scales (x follows, on the same barrier)."""
    n0 = tile // mt * BN
    mbarrier.expect(full.index(st), 2 * BN * 64 + BN * 16 + 2 * BM * 256)
    tma.async_copy_global_to_shared(w_d, [n0, it * 32], full.index(st), w_sh.index(st * 2))
    tma.async_copy_global_to_shared(w_d, [n0, it * 32 + 16], full.index(st), w_sh.index(st * 2 + 1))
    tma.async_copy_global_to_shared(s_d, [n0, it * 8], full.index(st), s_sh.index(st))


@gluon.jit
def load_x(x_d, x_sh, full, st, tile, it, mt, BM: gl.constexpr):
    m0 = (tile - tile // mt * mt) * BM
    tma.async_copy_global_to_shared(x_d, [m0, it * 256], full.index(st), x_sh.index(st * 2))
    tma.async_copy_global_to_shared(x_d, [m0, it * 256 + 128], full.index(st), x_sh.index(st * 2 + 1))


@gluon.jit
def refill(st, u, u1, steps, mt, x_d, w_d, s_d, w_sh, s_sh, x_sh, full, BN: gl.constexpr, BM: gl.constexpr):
    """Every warp is done with stage st: load unit u into it."""
    gl.thread_barrier()
    if u < u1:
        tile = u // steps
        load_weights(w_d, s_d, w_sh, s_sh, full, st, tile, u - tile * steps, mt, BN, BM)
        load_x(x_d, x_sh, full, st, tile, u - tile * steps, mt, BM)


@gluon.jit
def wgmma_lora(
    acc, xa_sh, xa_ptr, b_ptr, row0, m0, N, mp, RS, e1, e2, KS, RANK: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr
):
    """acc + B[rows] (x A^T)^T, 32 ranks at a time."""
    NW: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = acc.type.layout
    AL: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    TM: gl.constexpr = 32 if BM >= 128 else BM // 4
    TL: gl.constexpr = gl.BlockedLayout([1, 4], [32 // TM, TM], [NW, 1], [1, 0])
    n_a = gl.minimum(row0 + gl.arange(0, BN, layout=gl.SliceLayout(1, AL)), N - 1)
    r_a = gl.arange(0, 32, layout=gl.SliceLayout(0, AL))
    r_t = gl.arange(0, 32, layout=gl.SliceLayout(1, TL))
    m_t = m0 + gl.arange(0, BM, layout=gl.SliceLayout(0, TL))
    row = ((row0 >= e1).to(gl.int32) + (row0 >= e2).to(gl.int32)) * RANK
    for r0 in gl.static_range(0, RANK, 32):
        b = gl.load(b_ptr + (n_a[:, None] * RANK + (r0 + r_a)[None, :]), mask=(r0 + r_a < RANK)[None, :], other=0.0)
        xa = load_lora_down(xa_ptr, row, m_t, r0 + r_t, mp, RS, KS, RANK)
        xa_sh.store(xa.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(b, xa_sh, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
    return acc


@gluon.jit(do_not_specialize=["M", "U", "steps", "sgs", "mt", "RS", "mp", "e1", "e2"])
def wgmma_kernel(
    x_d,
    w_d,
    s_d,
    gs_ptr,
    bias_ptr,
    xa_ptr,
    b_ptr,
    y_ptr,
    ws_ptr,
    cnt_ptr,
    M,
    N,
    sym,
    sgs,
    RS,
    mp,
    e1,
    e2,
    steps,
    U,
    mt,
    BM: gl.constexpr,
    BN: gl.constexpr,
    NW: gl.constexpr,
    S: gl.constexpr,
    BIAS: gl.constexpr,
    RANK: gl.constexpr,
    KS: gl.constexpr,
    PDL: gl.constexpr,
):
    """y[m, n]; K a multiple of 256, steps = K / 256, mt = ceil(M / BM), units U = ceil(N / BN) * mt * steps.

    x_d bfloat16 (M, K) *permuted*, box (BM, 128); w_d int32 (N, K/8), box (BN, 16); s_d int16 (N, K/32), box (BN, 8).
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, BM, 16])
    AL: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    QL: gl.constexpr = wgmma_q_layout(BN, NW)
    SL: gl.constexpr = wgmma_s_layout(BN, NW)
    w_sh = gl.allocate_shared_memory(gl.int32, [2 * S, BN, 16], w_d.layout)
    s_sh = gl.allocate_shared_memory(gl.int16, [S, BN, 8], s_d.layout)
    x_sh = gl.allocate_shared_memory(gl.bfloat16, [2 * S, BM, 128], x_d.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    if RANK > 0:
        XA: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=min(128, BM * 2), element_bitwidth=16, rank=2)
        xa_sh = gl.allocate_shared_memory(gl.bfloat16, [32, BM], XA)
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), 1)
    fence_async_shared()
    gl.thread_barrier()
    pid = gl.program_id(0)
    G = gl.num_programs(0)
    u0 = pid * U // G
    u1 = (pid + 1) * U // G
    if PDL:
        gdc_launch_dependents()
    for i in gl.static_range(S):  # weights do not depend on the previous kernel
        if u0 + i < u1:
            t = (u0 + i) // steps
            load_weights(w_d, s_d, w_sh, s_sh, full, i, t, u0 + i - t * steps, mt, BN, BM)
    if PDL:
        gdc_wait()
    for i in gl.static_range(S):
        if u0 + i < u1:
            t = (u0 + i) // steps
            load_x(x_d, x_sh, full, i, t, u0 + i - t * steps, mt, BM)
    n_y = gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
    m_y = gl.arange(0, BM, layout=gl.SliceLayout(0, MMA))
    seg0 = u0
    tile = u0 // steps
    st = 0
    phase = 0
    while seg0 < u1:
        seg1 = gl.minimum((tile + 1) * steps, u1)
        acc = gl.zeros([BN, BM], gl.float32, MMA)
        for u in range(seg0, seg1):
            mbarrier.wait(full.index(st), phase)
            for c in gl.static_range(2):
                q = w_sh.index(st * 2 + c).load(QL).reshape([BN, 4, 2, 2])
                s = s_sh.index(st).slice(c * 4, 4, 1).load(SL)
                p0, p1, p2, p3 = decode_word(q, spread_scales(s, q))
                P = halves(gl.join(gl.join(p0, p1), gl.join(p2, p3)))
                P = P.permute([0, 2, 3, 5, 4, 1, 6]).reshape([BN, 128])
                P = gl.convert_layout(P, AL, assert_trivial=True)
                acc = warpgroup_mma(P, x_sh.index(st * 2 + c).permute([1, 0]), acc, is_async=True)
                acc = warpgroup_mma_wait(
                    1, deps=[acc]
                )  # the previous one is done, this one runs on during the next decode
                if c == 0:  # noqa: SIM102
                    if u > seg0:
                        refill(
                            (st + (S - 1)) % S, u - 1 + S, u1, steps, mt, x_d, w_d, s_d, w_sh, s_sh, x_sh, full, BN, BM
                        )
            st += 1
            if st == S:
                st = 0
                phase ^= 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        refill((st + (S - 1)) % S, seg1 - 1 + S, u1, steps, mt, x_d, w_d, s_d, w_sh, s_sh, x_sh, full, BN, BM)
        z = opaque_zero()
        off = (n_y + z)[:, None] * BM + m_y[None, :]
        acc, finish = gather_partials(acc, off, tile, seg0, seg1, u0, steps, U, ws_ptr, cnt_ptr, BN * BM)
        if finish:
            pn = tile // mt
            m0 = (tile - pn * mt) * BM + z
            rows = pn * BN + n_y + z
            acc = scale_and_bias(acc, gl.minimum(rows, N - 1), gs_ptr, sgs, bias_ptr, BIAS)
            if RANK > 0:
                acc = wgmma_lora(acc, xa_sh, xa_ptr, b_ptr, pn * BN + z, m0, N, mp, RS, e1, e2, KS, RANK, BN, BM)
            ms = m0 + m_y
            gl.store(
                y_ptr + (ms[None, :] * sym + rows[:, None]),
                acc.to(gl.bfloat16),
                mask=(ms < M)[None, :] & (rows < N)[:, None],
            )
        seg0 = seg1
        tile += 1
