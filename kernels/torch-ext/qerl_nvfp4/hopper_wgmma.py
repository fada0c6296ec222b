"""The Hopper kernel for 17 to a few hundred tokens, in Gluon: warps with roles.

A program computes tiles of 64 P rows (weights) by BM columns (tokens).  P groups of four warps own 64 rows each: they decode words from
shared memory into the *register* operand of `wgmma`; while one group decodes, the matrix units work for the others.  One warp keeps a
ring of S stages full: the bulk copy engine brings words, scales and x.  x must be in the k order in which words are decoded: either it
comes so (portable.permute_kernel), or (PERMUTE) four more warps put it in order in shared memory, which saves a launch.

An adapter has shared memory of its own for B and x A^T, filled when a tile's last unit has been asked for (hopper_adapt.py).

Work is cut as in hopper.py; of the programs that share a tile, the one that begins it adds up what the others leave, in order.
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

from .hopper import decode_scales, decode_word, halves, opaque_zero
from .hopper_adapt import adapt, load_adapter, lower_flags, multiply_adapter

X_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
W_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)
S_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
L_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)  # 32 columns of B or of x A^T
R = gl.constexpr(64)  # rows of a group of four warps

# [64 rows, 16 words]: a lane holds 4 words of a row, so 32 consecutive columns; [64 rows, 4 pairs of scales] goes with it
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)
SCALES = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)


def registers(P: int, permute: bool) -> int:
    """Of a thread: what 64 Ki registers allow (the one warp that fills the ring counts as four)."""
    return 65536 // (128 * (P + 1 + permute)) // 8 * 8


@gluon.constexpr_function
def tokens_layout(T):
    """[T tokens, 128 columns]: reads and writes of 16 bytes without bank conflicts, in either order of k."""
    regs = [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64]] + ([[32, 0]] if T > 32 else [])
    return gl.DistributedLinearLayout(regs, [[1, 0], [2, 0], [4, 0], [0, 8], [0, 16]], [[8, 0], [16, 0]], [], [T, 128])


# --- the warps that fill the ring ------------------------------------------------------------------------------------------------


@gluon.jit
def load_weights(w_d, s_d, w_sh, s_sh, full, st, sc, h: gl.constexpr, n0, it, P: gl.constexpr):
    """Half h of a unit: words of 128 columns and (h = 0) the scales of all 256, in place sc."""
    slot = st * 2 + h
    mbarrier.expect(full.index(slot), P * R * 64 + (1 - h) * (P * R * 16))
    for p in gl.static_range(P):
        tma.async_copy_global_to_shared(w_d, [n0 + p * R, it * 32 + h * 16], full.index(slot), w_sh.index(slot * P + p))
        if h == 0:
            tma.async_copy_global_to_shared(s_d, [n0 + p * R, it * 8], full.index(slot), s_sh.index(sc * P + p))


@gluon.jit
def load_x(x_d, x_sh, raw, st, h: gl.constexpr, m0, it, BM: gl.constexpr):
    """Half h of a unit: 128 columns of x."""
    slot = st * 2 + h
    mbarrier.expect(raw.index(slot), BM * 256)
    tma.async_copy_global_to_shared(x_d, [m0, it * 256 + h * 128], raw.index(slot), x_sh.index(slot))


@gluon.jit
def produce(
    maps,
    ring,
    work,
    lora,
    shards,
    P: gl.constexpr,
    BM: gl.constexpr,
    S: gl.constexpr,
    RANK: gl.constexpr,
    SLICES: gl.constexpr,
    PDL: gl.constexpr,
    PERMUTE: gl.constexpr,
):
    """One warp that asks for everything."""
    x_d, w_d, s_d, b_d, xa_d = maps
    w_sh, s_sh, x_sh, raw, full, empty = ring
    _, G, u0, u1, steps, _, mt = work
    arrived = raw if PERMUTE else full
    for i in gl.static_range(S):  # weights do not depend on the previous kernel
        if i < u1 - u0:
            tile = (u0 + i) // steps
            for h in gl.static_range(2):
                load_weights(w_d, s_d, w_sh, s_sh, full, i, i, h, tile // mt * (P * R), u0 + i - tile * steps, P)
    if PDL:
        gdc_wait()
    st = 0
    sc = 0
    phase = 1
    turn = 0
    waited = 0
    seg0 = u0
    tile = u0 // steps
    while seg0 < u1:
        first = tile * steps
        seg1 = gl.minimum(first + steps, u1)
        n0 = tile // mt * (P * R)
        m_tile = tile % mt
        for u in range(seg0, seg1):
            for h in gl.static_range(2):
                mbarrier.wait(empty.index(st * 2 + h), phase)
                if u - u0 >= S:
                    load_weights(w_d, s_d, w_sh, s_sh, full, st, sc, h, n0, u - first, P)
                load_x(x_d, x_sh, arrived, st, h, m_tile * BM, u - first, BM)
            st += 1
            if st == S:
                st = 0
                phase ^= 1
            sc += 1
            if sc == S + 1:
                sc = 0
        if RANK > 0:  # noqa: SIM102
            if seg0 == first:
                waited, turn = load_adapter(b_d, xa_d, lora, shards, n0, m_tile, waited, turn, P, BM, RANK, SLICES)
        seg0 = seg1
        tile += 1
    if RANK > 0:  # noqa: SIM102
        if u1 > u0:
            lower_flags(shards, G)


@gluon.jit
def permute(ring, work, BM: gl.constexpr, S: gl.constexpr):
    """Four warps: column 32 t + 8 j + 4 p + 2 i1 + i0 of x moves to 32 j + 16 i1 + 8 i0 + 2 t + p, in place."""
    _, _, x_sh, raw, full, _ = ring
    _, _, u0, u1, _, _, _ = work
    T: gl.constexpr = min(BM, 64)
    st = 0
    phase = 0
    for _ in range(u0, u1):
        for h in gl.static_range(2):
            mbarrier.wait(raw.index(st * 2 + h), phase)
            for i in gl.static_range(BM // T):
                part = x_sh.index(st * 2 + h).slice(i * T, T, 0)
                x = part.load(tokens_layout(T)).reshape([T, 4, 4, 2, 2, 2])
                part.store(x.permute([0, 2, 4, 5, 1, 3]).reshape([T, 128]))
            fence_async_shared()
            mbarrier.arrive(full.index(st * 2 + h))
        st += 1
        if st == S:
            st = 0
            phase ^= 1


# --- the warps that multiply --------------------------------------------------------------------------------------------------------


@gluon.jit
def decode(q, s, AL: gl.constexpr):
    """[64 rows, 4 lanes, 2 words] and a scale each -> the left operand, 64 columns."""
    s = gl.convert_layout(gl.join(s, s), q.type.layout, assert_trivial=True)
    p0, p1, p2, p3 = decode_word(q, s)
    A = halves(gl.join(gl.join(p0, p1), gl.join(p2, p3)))
    return gl.convert_layout(A.permute([0, 2, 4, 3, 1, 5]).reshape([R, 64]), AL, assert_trivial=True)


@gluon.jit
def gather(
    acc,
    off,
    cnt_ptr,
    ws_ptr,
    part: gl.constexpr,
    pid,
    G,
    first,
    seg0,
    seg1,
    steps,
    U,
    P: gl.constexpr,
    SIZE: gl.constexpr,
):
    """Of the programs that share a tile, the one that began it waits for the others and adds theirs in order."""
    if seg1 - seg0 < steps:
        if seg0 == first:
            p1 = ((first + steps) * G - 1) // U
            while gl.atomic_add(cnt_ptr, 0, sem="acquire") < p1 - pid:
                pass
            gl.thread_barrier()
            for p in range(pid + 1, p1 + 1):
                acc += gl.load(ws_ptr + ((p * P + part) * SIZE + off), cache_modifier=".cg")
            gl.store(cnt_ptr, 0)
        else:
            gl.store(ws_ptr + ((pid * P + part) * SIZE + off), acc)
            gl.thread_barrier()
            gl.atomic_add(cnt_ptr, 1, sem="release")
    return acc


@gluon.jit
def consume(
    ring,
    work,
    out,
    lora,
    shards,
    adapter,
    part: gl.constexpr,
    P: gl.constexpr,
    BM: gl.constexpr,
    S: gl.constexpr,
    BIAS: gl.constexpr,
    RANK: gl.constexpr,
    SLICES: gl.constexpr,
    REGS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Four warps: rows part * 64 .. of every tile."""
    w_sh, s_sh, x_sh, _, full, empty = ring
    pid, G, u0, u1, steps, U, mt = work
    gs_ptr, bias_ptr, y_ptr, ws_ptr, cnt_ptr, M, N, sym, sgs = out
    if RANK > 0:
        adapt(adapter, x_sh, part, gl.num_programs(0) - G, mt, P, BM, SLICES, REGS, PDL)
    # one wgmma runs on during the next decode, where ptxas has the registers not to serialize
    LAG: gl.constexpr = P == 2 and (128 if BM <= 64 else 168) <= REGS
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    AL: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    n_y = gl.arange(0, R, layout=gl.SliceLayout(1, MMA))
    m_y = gl.arange(0, BM, layout=gl.SliceLayout(0, MMA))
    seg0 = u0
    tile = u0 // steps
    st = 0
    sc = 0
    phase = 0
    turn = 0
    while seg0 < u1:
        first = tile * steps
        seg1 = gl.minimum(first + steps, u1)
        acc = gl.zeros([R, BM], gl.float32, MMA)
        for u in range(seg0, seg1):
            for h in gl.static_range(2):
                slot = st * 2 + h
                mbarrier.wait(full.index(slot), phase)
                sa0, sa1 = decode_scales(s_sh.index(sc * P + part).slice(h * 4, 4, 1).load(SCALES))
                q = w_sh.index(slot * P + part).load(WORDS).reshape([R, 4, 2, 2]).permute([0, 1, 3, 2])
                q0, q1 = gl.split(q)
                x = x_sh.index(slot).permute([1, 0])
                acc = warpgroup_mma(decode(q0, sa0, AL), x.slice(0, 64, 0), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                if LAG:
                    if h == 1:
                        mbarrier.arrive(empty.index(st * 2))
                    else:
                        mbarrier.arrive(empty.index(gl.where(st == 0, S - 1, st - 1) * 2 + 1), pred=u > seg0)
                acc = warpgroup_mma(decode(q1, sa1, AL), x.slice(64, 64, 0), acc, is_async=True)
                if LAG:
                    acc = warpgroup_mma_wait(1, deps=[acc])
                else:
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    mbarrier.arrive(empty.index(slot))
            st += 1
            if st == S:
                st = 0
                phase ^= 1
            sc += 1
            if sc == S + 1:
                sc = 0
        if LAG:
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(gl.where(st == 0, S - 1, st - 1) * 2 + 1))
        z = opaque_zero()
        # two columns are one access; three groups of 128 tokens have no registers to keep the columns' addresses in
        m_off = m_y + z if P * BM > 256 else m_y
        off = (n_y + z)[:, None] * BM + m_off[None, :]
        pn = tile // mt
        rows = pn * (P * R) + part * R + n_y + z
        safe = gl.minimum(rows, N - 1)
        gs = gl.load(gs_ptr + safe * sgs)  # on their way while the others' sums are awaited
        if BIAS:
            bias = gl.load(bias_ptr + safe)
        acc = gather(
            acc, off, cnt_ptr + (tile * P + part), ws_ptr, part, pid, G, first, seg0, seg1, steps, U, P, R * BM
        )
        if seg0 == first:
            m0 = (tile - pn * mt) * BM + z
            acc = acc * gl.div_rn(gs * 0.0 + 256.0, gs)[:, None]
            if BIAS:
                acc += bias.to(gl.float32)[:, None]
            if RANK > 0:
                acc, turn = multiply_adapter(acc, lora, shards, pn * (P * R), part, turn, P, RANK, SLICES, AL)
            ms = m0 + m_y
            gl.store(
                y_ptr + (ms[None, :] * sym + rows[:, None]),
                acc.to(gl.bfloat16),
                mask=(ms < M)[None, :] & (rows < N)[:, None],
            )
        seg0 = seg1
        tile += 1


@gluon.jit(do_not_specialize=["M", "U", "steps", "sgs", "mt", "e1", "e2", "R8", "H"])
def wgmma_kernel(
    x_d,
    w_d,
    s_d,
    b_d,
    xa_d,
    x_ptr,
    a_ptr,
    xa_ptr,
    flag_ptr,
    done_ptr,
    gs_ptr,
    bias_ptr,
    y_ptr,
    ws_ptr,
    cnt_ptr,
    M,
    N,
    K,
    sxm,
    sym,
    sgs,
    R8,
    H,
    e1,
    e2,
    steps,
    U,
    mt,
    BM: gl.constexpr,
    P: gl.constexpr,
    S: gl.constexpr,
    BIAS: gl.constexpr,
    RANK: gl.constexpr,
    SLICES: gl.constexpr,
    PDL: gl.constexpr,
    PERMUTE: gl.constexpr,
    REGS: gl.constexpr,
):
    """y[m, n]; K a multiple of 256, steps = K / 256, mt = ceil(M / BM), units U = ceil(N / 64 P) * mt * steps.

    x_d bfloat16 (M, K), box (BM, 128); w_d int32 (N, K/8), box (64, 16); s_d int16 (N, K/32), box (64, 8);
    b_d bfloat16 (N, RANK), box (64, 32); xa_d bfloat16, SLICES times (mt * BM, shards * RANK = 8 R8) of x A^T, box (BM, 32).
    The H programs that start first compute x A^T, the others are left with the units.
    """
    w_sh = gl.allocate_shared_memory(gl.int32, [2 * S * P, R, 16], w_d.layout)
    # one place more: the first half's words are asked for before the second half's scales have been read
    s_sh = gl.allocate_shared_memory(gl.int16, [(S + 1) * P, R, 8], s_d.layout)
    x_sh = gl.allocate_shared_memory(gl.bfloat16, [2 * S, BM, 128], x_d.layout)
    raw = gl.allocate_shared_memory(gl.int64, [2 * S, 1], mbarrier.MBarrierLayout())  # x as it is has arrived
    full = gl.allocate_shared_memory(gl.int64, [2 * S, 1], mbarrier.MBarrierLayout())  # words have, and x is in order
    empty = gl.allocate_shared_memory(gl.int64, [2 * S, 1], mbarrier.MBarrierLayout())  # every group is done
    for i in gl.static_range(2 * S):
        mbarrier.init(raw.index(i), 1)
        mbarrier.init(full.index(i), 2)
        mbarrier.init(empty.index(i), P)
    ring = (w_sh, s_sh, x_sh, raw, full, empty)
    lora = ring
    if RANK > 0:
        b_sh = gl.allocate_shared_memory(gl.bfloat16, [P, R, 32], b_d.layout)
        xa_sh = gl.allocate_shared_memory(gl.bfloat16, [SLICES, BM, 32], xa_d.layout)
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(ready, 1)
        mbarrier.init(free, P)
        lora = (b_sh, xa_sh, ready, free)
    fence_async_shared()
    gl.thread_barrier()
    G = gl.num_programs(0) - H
    pid = gl.num_programs(0) - 1 - gl.program_id(0)  # programs wait for larger pid only, which started no later
    u0 = gl.minimum(pid, G) * U // G
    u1 = gl.minimum(pid + 1, G) * U // G
    if PDL:
        gdc_launch_dependents()
    maps = (x_d, w_d, s_d, b_d, xa_d)
    work = (pid, G, u0, u1, steps, U, mt)
    out = (gs_ptr, bias_ptr, y_ptr, ws_ptr, cnt_ptr, M, N, sym, sgs)
    RS = R8 * 8
    shards = (e1, e2, flag_ptr, done_ptr, M, RS, mt)
    adapter = (x_ptr, a_ptr, xa_ptr, flag_ptr, M, K, sxm, RS)
    if P == 2 and PERMUTE:
        gl.warp_specialize(
            [
                (consume, (ring, work, out, lora, shards, adapter, 0, P, BM, S, BIAS, RANK, SLICES, REGS, PDL)),
                (consume, (ring, work, out, lora, shards, adapter, 1, P, BM, S, BIAS, RANK, SLICES, REGS, PDL)),
                (permute, (ring, work, BM, S)),
                (produce, (maps, ring, work, lora, shards, P, BM, S, RANK, SLICES, PDL, PERMUTE)),
            ],
            [4, 4, 1],
            [REGS, REGS, REGS],
        )
    elif P == 2:
        gl.warp_specialize(
            [
                (consume, (ring, work, out, lora, shards, adapter, 0, P, BM, S, BIAS, RANK, SLICES, REGS, PDL)),
                (consume, (ring, work, out, lora, shards, adapter, 1, P, BM, S, BIAS, RANK, SLICES, REGS, PDL)),
                (produce, (maps, ring, work, lora, shards, P, BM, S, RANK, SLICES, PDL, PERMUTE)),
            ],
            [4, 1],
            [REGS, REGS],
        )
    elif PERMUTE:
        gl.warp_specialize(
            [
                (consume, (ring, work, out, lora, shards, adapter, 0, P, BM, S, BIAS, RANK, SLICES, REGS, PDL)),
                (consume, (ring, work, out, lora, shards, adapter, 1, P, BM, S, BIAS, RANK, SLICES, REGS, PDL)),
                (consume, (ring, work, out, lora, shards, adapter, 2, P, BM, S, BIAS, RANK, SLICES, REGS, PDL)),
                (permute, (ring, work, BM, S)),
                (produce, (maps, ring, work, lora, shards, P, BM, S, RANK, SLICES, PDL, PERMUTE)),
            ],
            [4, 4, 4, 1],
            [REGS, REGS, REGS, REGS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (ring, work, out, lora, shards, adapter, 0, P, BM, S, BIAS, RANK, SLICES, REGS, PDL)),
                (consume, (ring, work, out, lora, shards, adapter, 1, P, BM, S, BIAS, RANK, SLICES, REGS, PDL)),
                (consume, (ring, work, out, lora, shards, adapter, 2, P, BM, S, BIAS, RANK, SLICES, REGS, PDL)),
                (produce, (maps, ring, work, lora, shards, P, BM, S, RANK, SLICES, PDL, PERMUTE)),
            ],
            [4, 4, 1],
            [REGS, REGS, REGS],
        )
