"""The Hopper kernel for any multiple of 16 tokens per tile, up to 288: one decoded weight, several widths of `wgmma`.

As in hopper_wgmma.py, P groups of four warps decode 64 rows each into the register operand.  Triton's tensors have powers of two as
shapes, a `wgmma` takes any multiple of 8 tokens: so a tile of BM tokens is a sum of powers of two, 160 = 128 + 32, each part with an
accumulator, a buffer of x and a `wgmma` of its own, all from the same registers of decoded weights.  More tokens per decoded weight cost
the decode once.

Words and x come in two rings.  A stage of words is a unit, 256 columns, with its scales; a stage of x only 64 columns, so that 288
tokens fit beside it.  x must be in the order in which words are decoded (portable.permute_kernel), or bytes are decoded in its own (NATURAL).

    loading warp                                P groups of 4 warps
    wait words_free[st] <-------------------+
    copy words, scales ~~> words_full[st] ----> | wait words_full[st]; 2 times: words into registers (NATURAL: 32 columns at a time)
    wait x_free[xs] <-----------------------+   |   2 times: wait x_full[xs]; 2 times: decode 32 columns, wgmma of every part
    copy x of each part ~~> x_full[xs] -------> |     arrive x_free[the one before], after the first wgmma of the next 64 columns
                                                |   arrive words_free[the one before], after the first wgmma of the next unit
The adapter, split tiles, and the order of tiles are those of hopper_wgmma.py.
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

from .gluon_names import async_load, barrier
from .hopper import finish, opaque_zero
from .hopper_adapt import SUMS_SHARED, T, fence_proxies, lower_flags, read_flag, shard_of, task_rows
from .hopper_wgmma import (
    R,
    idle,
    load_weights,
    partial_layout,
    piece_of,
    read,
    segment,
    spare,
    tiles_of,
    units_of,
    write,
)

PIECE = 64  # columns of a stage of x
C = gl.constexpr(PIECE)
WORDS_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)  # 32 words of a row


def parts_of(BM: int) -> list[int]:
    """Powers of two that make up a tile's tokens, the largest first."""
    return [1 << i for i in range(8, 3, -1) if BM >> i & 1]


def boxes_of(BM: int) -> list[int]:
    """Tokens of the three copies that bring a tile's x; a tile of fewer parts never asks for the last ones."""
    parts = parts_of(BM)
    return (parts + parts[:1] * 2)[:3]


_parts = gluon.constexpr_function(parts_of)


@gluon.constexpr_function
def count(BM):
    return len(_parts(BM))


@gluon.constexpr_function
def size(BM, i):
    return _parts(BM)[i]


@gluon.constexpr_function
def start(BM, i):
    return sum(_parts(BM)[:i])


@gluon.constexpr_function
def accumulator(B):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, B, 16])


@gluon.constexpr_function
def operand(B):
    return gl.DotOperandLayout(0, accumulator(B), 2)


# --- the warp that fills the rings ------------------------------------------------------------------------------------------------


@gluon.jit
def load_x(maps, x_sh, here, at, m0, k0, BM: gl.constexpr):
    """64 columns of x of every part."""
    mbarrier.expect(here.index(at), BM * 128)
    for i in gl.static_range(count(BM)):
        async_load(maps[i], [m0 + start(BM, i), k0], here.index(at), x_sh[i].index(at))


@gluon.jit
def load_adapter(
    b_d,
    maps,
    lora,
    shards,
    n0,
    m_tile,
    waited,
    turn,
    P: gl.constexpr,
    BM: gl.constexpr,
    RANK: gl.constexpr,
    TASKS: gl.constexpr,
):
    """For one tile: turn by turn 32 columns of B, and of a shard's x A^T once all of it is there."""
    b_sh, xa_sh, ready, free = lora
    _, _, flag_ptr, _, M, RS, _ = shards
    for shard in range(shard_of(n0, shards), shard_of(n0 + (P - 1) * 64, shards) + 1):
        for r in gl.static_range(0, RANK, 32):
            mbarrier.wait(free, turn ^ 1)
            mbarrier.expect(ready, P * 4096 + BM * 64)
            for p in gl.static_range(P):
                async_load(b_d, [n0 + p * 64, r], ready, b_sh.index(p))
            if TASKS:  # noqa: SIM102
                if waited != m_tile + 1:
                    while read_flag(flag_ptr + m_tile) < task_rows(M, m_tile, BM) * ((RS + T - 1) // T):
                        pass
                    fence_proxies()
                    waited = m_tile + 1
            for i in gl.static_range(count(BM)):
                async_load(maps[i], [m_tile * BM + start(BM, i), shard * RANK + r], ready, xa_sh[i])
            turn ^= 1
    return waited, turn


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
    X: gl.constexpr,
    RANK: gl.constexpr,
    TASKS: gl.constexpr,
    PDL: gl.constexpr,
):
    """One warp that asks for everything."""
    x_maps, xa_maps, w_d, s_d, b_d = maps
    w_sh, s_sh, x_sh, words_full, words_free, x_full, x_free = ring
    pid, G, u0, _, steps, _, mt, D = work
    for i in gl.static_range(S):  # weights do not depend on the previous kernel
        if i < units_of(work):
            tile = i // steps * G + pid
            it = i % steps
            if i >= D * steps:
                u = u0 + i - D * steps
                tile = D * G + u // steps
                it = u % steps
            load_weights(w_d, s_d, w_sh, s_sh, words_full, i, 0, tile // mt * (P * R), it, P, 1)
    if PDL:
        gdc_wait()
    st = 0
    phase = 1
    xs = 0
    x_phase = 1
    turn = 0
    waited = 0
    v = 0
    for j in range(tiles_of(work)):
        tile, _, s0, s1 = segment(j, work)
        n0 = tile // mt * (P * R)
        m_tile = tile % mt
        for it in range(s0, s1):
            if v >= S:
                mbarrier.wait(words_free.index(st), phase)
                load_weights(w_d, s_d, w_sh, s_sh, words_full, st, 0, n0, it, P, 1)
            for c in gl.static_range(4):
                mbarrier.wait(x_free.index(xs), x_phase)
                load_x(x_maps, x_sh, x_full, xs, m_tile * BM, it * 256 + c * C, BM)
                xs += 1
                if xs == X:
                    xs = 0
                    x_phase ^= 1
            v += 1
            st += 1
            if st == S:
                st = 0
                phase ^= 1
        if RANK > 0:  # noqa: SIM102
            if s0 == 0:
                waited, turn = load_adapter(b_d, xa_maps, lora, shards, n0, m_tile, waited, turn, P, BM, RANK, TASKS)
    if TASKS:  # noqa: SIM102
        if units_of(work) > 0:
            lower_flags(shards, G)
    finish()


# --- the warps that multiply --------------------------------------------------------------------------------------------------------


@gluon.jit
def multiply(accs, a, x_sh, at, c: gl.constexpr, BM: gl.constexpr):
    """accs[i] += a [64, 32 columns] times x of part i; returns when what was begun before this is done."""
    begun = ()
    for i in gl.static_range(count(BM)):
        left = gl.convert_layout(a, operand(size(BM, i)), assert_trivial=True)
        right = x_sh[i].index(at).permute([1, 0]).slice(c * 32, 32, 0)
        begun = begun + (warpgroup_mma(left, right, accs[i], is_async=True),)  # noqa: RUF005
    return wait(begun, count(BM), BM)


@gluon.jit
def wait(accs, outstanding: gl.constexpr, BM: gl.constexpr):
    if count(BM) == 1:
        return (warpgroup_mma_wait(outstanding, deps=[accs[0]]),)
    elif count(BM) == 2:
        a0, a1 = warpgroup_mma_wait(outstanding, deps=[accs[0], accs[1]])
        return (a0, a1)
    else:
        a0, a1, a2 = warpgroup_mma_wait(outstanding, deps=[accs[0], accs[1], accs[2]])
        return (a0, a1, a2)


@gluon.jit
def offsets(B: gl.constexpr):
    """Of a thread's values of a part in what a program leaves."""
    L: gl.constexpr = partial_layout(B)
    piece = gl.arange(0, B // 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    thread = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    return piece * 512 + thread * 4 + four + opaque_zero() * 4


@gluon.jit
def leave(acc, ptr):
    """16 bytes of every thread side by side."""
    B: gl.constexpr = acc.shape[1]
    a = acc.reshape([4, 2, 8, B // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    a = gl.convert_layout(a.reshape([B // 8, 128, 4]), partial_layout(B), assert_trivial=True)
    gl.store(ptr + offsets(B), a)


@gluon.jit
def finished(acc, ptr, stride, pid, p1, factor, bias, BIAS: gl.constexpr):
    """The sum of a part with what programs pid + 1 to p1 left, in order; times 256 / scale, plus bias."""
    B: gl.constexpr = acc.shape[1]
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    off = offsets(B)
    a = acc.reshape([4, 2, 8, B // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    a = gl.convert_layout(a.reshape([B // 8, 128, 4]), partial_layout(B), assert_trivial=True)
    for p in range(pid + 1, p1 + 1):
        a += gl.load(ptr + (p * stride + off), cache_modifier=".cg")
    total = a.reshape([B // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    acc = gl.convert_layout(total.reshape([R, B]), acc.type.layout, assert_trivial=True)
    acc = acc * gl.convert_layout(factor, rows, assert_trivial=True)[:, None]
    if BIAS:
        acc += gl.convert_layout(bias, rows, assert_trivial=True)[:, None]
    return acc


@gluon.jit
def multiply_adapter(
    accs, lora, shards, n0, part: gl.constexpr, turn, P: gl.constexpr, RANK: gl.constexpr, BM: gl.constexpr
):
    """Rows part * 64 .. of the tile: what load_adapter brings; of another shard it brings nothing for these rows."""
    b_sh, xa_sh, ready, free = lora
    mine = shard_of(n0 + part * 64, shards)
    for shard in range(shard_of(n0, shards), shard_of(n0 + (P - 1) * 64, shards) + 1):
        for _ in gl.static_range(0, RANK, 32):
            mbarrier.wait(ready, turn)
            b = b_sh.index(part).load(operand(size(BM, 0)))
            b = gl.where(shard == mine, b, gl.zeros_like(b))
            begun = ()
            for i in gl.static_range(count(BM)):
                left = gl.convert_layout(b, operand(size(BM, i)), assert_trivial=True)
                begun = begun + (warpgroup_mma(left, xa_sh[i].permute([1, 0]), accs[i], is_async=True),)  # noqa: RUF005
            accs = wait(begun, 0, BM)
            mbarrier.arrive(free)
            turn ^= 1
    return accs, turn


@gluon.jit
def consume(
    ring,
    work,
    out,
    lora,
    shards,
    part: gl.constexpr,
    P: gl.constexpr,
    BM: gl.constexpr,
    S: gl.constexpr,
    X: gl.constexpr,
    BIAS: gl.constexpr,
    RANK: gl.constexpr,
    NATURAL: gl.constexpr,
):
    """Four warps: rows part * 64 .. of every tile."""
    w_sh, s_sh, x_sh, words_full, words_free, x_full, x_free = ring
    pid, G, _, _, steps, U, mt, _ = work
    y_d, y_sh, gs_ptr, bias_ptr, ws_ptr, cnt_ptr, N, sgs = out
    LAST: gl.constexpr = operand(size(BM, 0))
    st = 0
    phase = 0
    xs = 0
    x_phase = 0
    turn = 0
    for j in range(tiles_of(work)):
        tile, t, s0, s1 = segment(j, work)
        accs = ()
        for i in gl.static_range(count(BM)):
            accs = accs + (gl.zeros([R, size(BM, i)], gl.float32, accumulator(size(BM, i))),)  # noqa: RUF005
        for u in range(s0, s1):
            mbarrier.wait(words_full.index(st), phase)
            for h in gl.static_range(2):
                words, scales = read(w_sh, s_sh, st, h, part, P, 1, NATURAL)
                for c in gl.static_range(2):
                    mbarrier.wait(x_full.index(xs), x_phase)
                    accs = multiply(accs, piece_of(words, scales, 2 * c, LAST, NATURAL), x_sh, xs, 0, BM)
                    # every wgmma of the columns before is done
                    mbarrier.arrive(x_free.index(gl.where(xs == 0, X - 1, xs - 1)), pred=(u > s0) | (h + c > 0))
                    if h + c == 0:
                        mbarrier.arrive(words_free.index(gl.where(st == 0, S - 1, st - 1)), pred=u > s0)
                    accs = multiply(accs, piece_of(words, scales, 2 * c + 1, LAST, NATURAL), x_sh, xs, 1, BM)
                    xs += 1
                    if xs == X:
                        xs = 0
                        x_phase ^= 1
            st += 1
            if st == S:
                st = 0
                phase ^= 1
        accs = wait(accs, 0, BM)
        mbarrier.arrive(x_free.index(gl.where(xs == 0, X - 1, xs - 1)))
        mbarrier.arrive(words_free.index(gl.where(st == 0, S - 1, st - 1)))
        pn = tile // mt
        n0 = pn * (P * R) + part * R
        n_a = gl.arange(0, R, layout=gl.SliceLayout(1, LAST.parent))
        safe = gl.minimum(n0 + n_a + opaque_zero(), N - 1)
        gs = gl.load(gs_ptr + safe * sgs)  # on their way while the others' sums are awaited
        bias = gs
        if BIAS:
            bias = gl.load(bias_ptr + safe).to(gl.float32)
        p1 = pid  # the last program that has a share in this tile
        if s1 - s0 < steps:
            counter = cnt_ptr + (t * P + part)
            if s0 == 0:
                p1 = ((t + 1) * steps * G - 1) // U
                while gl.atomic_add(counter, 0, sem="acquire") < p1 - pid:
                    pass
                barrier()
                gl.store(counter, 0)
            else:
                for i in gl.static_range(count(BM)):
                    leave(accs[i], ws_ptr + ((pid * P + part) * (R * BM) + R * start(BM, i)))
                barrier()
                gl.atomic_add(counter, 1, sem="release")
        if s0 == 0:
            factor = gl.div_rn(gs * 0.0 + 256.0, gs)
            sums = ()
            for i in gl.static_range(count(BM)):
                left = ws_ptr + (part * (R * BM) + R * start(BM, i))
                sums = sums + (finished(accs[i], left, P * R * BM, pid, p1, factor, bias, BIAS),)  # noqa: RUF005
            if RANK > 0:
                sums, turn = multiply_adapter(sums, lora, shards, pn * (P * R), part, turn, P, RANK, BM)
            for i in gl.static_range(count(BM)):
                m0 = (tile - pn * mt) * BM + start(BM, i)
                # a last part of 16 tokens takes the second buffer: what is written next waits for all copies but one, and takes the first
                write(sums[i].to(gl.bfloat16), y_d, y_sh, m0, n0, part, 1 if size(BM, i) == 16 else 0, size(BM, i))
    tma.store_wait(0)  # shared memory must outlive what is read from it
    finish()


@gluon.jit(do_not_specialize=["M", "U", "steps", "sgs", "mt", "D", "e1", "e2", "R8", "H", "KS"])
def wide_kernel(
    x0_d,
    x1_d,
    x2_d,
    w_d,
    s_d,
    b_d,
    xa0_d,
    xa1_d,
    xa2_d,
    y_d,
    x_ptr,
    a_ptr,
    slice_ptr,
    xa_ptr,
    flag_ptr,
    done_ptr,
    taken_ptr,
    count_ptr,
    gs_ptr,
    bias_ptr,
    ws_ptr,
    cnt_ptr,
    M,
    N,
    K,
    sxm,
    sgs,
    R8,
    H,
    KS,
    e1,
    e2,
    steps,
    U,
    mt,
    D,
    BM: gl.constexpr,
    P: gl.constexpr,
    S: gl.constexpr,
    X: gl.constexpr,
    BIAS: gl.constexpr,
    RANK: gl.constexpr,
    TASKS: gl.constexpr,
    PDL: gl.constexpr,
    NATURAL: gl.constexpr,
    REGS: gl.constexpr,
    RING_REGS: gl.constexpr,
):
    """y[m, n] as hopper_wgmma.wgmma_kernel computes it; x0_d, x1_d, x2_d and xa0_d, ... are x (in order, or NATURAL) and x A^T in boxes of a part's tokens
    by 64 and by 32 columns (of parts that a tile does not have: any).
    """
    gl.static_assert(P == 2 or P == 3, "two or three groups")
    gl.static_assert(count(BM) <= 3 and start(BM, count(BM) - 1) + size(BM, count(BM) - 1) == BM, "parts of a tile")
    w_sh = gl.allocate_shared_memory(gl.int32, [S * P, R, 32], w_d.layout)
    s_sh = gl.allocate_shared_memory(gl.int16, [S * P, R, 8], s_d.layout)
    x_maps = (x0_d, x1_d, x2_d)
    x_sh = ()
    for i in gl.static_range(count(BM)):
        x_sh = x_sh + (gl.allocate_shared_memory(gl.bfloat16, [X, size(BM, i), C], x0_d.layout),)  # noqa: RUF005
    y_sh = gl.allocate_shared_memory(gl.bfloat16, [2 * P, 16, R], y_d.layout)
    words_full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    words_free = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [X, 1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [X, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(words_full.index(i), 2)  # words, and scales
        mbarrier.init(words_free.index(i), P)
    for i in gl.static_range(X):
        mbarrier.init(x_full.index(i), 1)
        mbarrier.init(x_free.index(i), P)
    ring = (w_sh, s_sh, x_sh, words_full, words_free, x_full, x_free)
    lora = ring
    if RANK > 0:
        b_sh = gl.allocate_shared_memory(gl.bfloat16, [P, R, 32], b_d.layout)
        xa_sh = ()
        for i in gl.static_range(count(BM)):
            xa_sh = xa_sh + (gl.allocate_shared_memory(gl.bfloat16, [size(BM, i), 32], xa0_d.layout),)  # noqa: RUF005
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(ready, 1)
        mbarrier.init(free, P)
        lora = (b_sh, xa_sh, ready, free)
    sums_sh = y_sh
    if TASKS:
        sums_sh = gl.allocate_shared_memory(gl.float32, [2 * T, T], SUMS_SHARED)
    fence_async_shared()
    barrier()
    G = gl.num_programs(0) - H
    pid = gl.num_programs(0) - 1 - gl.program_id(0)  # programs wait for larger pid only, which started no later
    u0 = gl.minimum(pid, G) * U // G
    u1 = gl.minimum(pid + 1, G) * U // G
    if PDL:
        gdc_launch_dependents()
    maps = (x_maps, (xa0_d, xa1_d, xa2_d), w_d, s_d, b_d)
    work = (pid, G, u0, u1, steps, U, mt, gl.where(pid < G, D, 0))
    out = (y_d, y_sh, gs_ptr, bias_ptr, ws_ptr, cnt_ptr, N, sgs)
    RS = R8 * 8
    shards = (e1, e2, flag_ptr, done_ptr, M, RS, mt)
    adapter = (x_ptr, a_ptr, slice_ptr, xa_ptr, flag_ptr, taken_ptr, count_ptr, M, K, sxm, RS)
    ROUND: gl.constexpr = 1 + (RING_REGS > 128)
    if P == 2:
        gl.warp_specialize(
            [
                (consume, (ring, work, out, lora, shards, 0, P, BM, S, X, BIAS, RANK, NATURAL)),
                (consume, (ring, work, out, lora, shards, 1, P, BM, S, X, BIAS, RANK, NATURAL)),
                (produce, (maps, ring, work, lora, shards, P, BM, S, X, RANK, TASKS, PDL)),
                (idle, ()),
                (spare, (adapter, sums_sh, KS, BM, ROUND, TASKS, PDL)),
            ],
            [4, 1, 1, 2],
            [REGS, RING_REGS, RING_REGS, RING_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (ring, work, out, lora, shards, 0, P, BM, S, X, BIAS, RANK, NATURAL)),
                (consume, (ring, work, out, lora, shards, 1, P, BM, S, X, BIAS, RANK, NATURAL)),
                (consume, (ring, work, out, lora, shards, 2, P, BM, S, X, BIAS, RANK, NATURAL)),
                (produce, (maps, ring, work, lora, shards, P, BM, S, X, RANK, TASKS, PDL)),
                (idle, ()),
                (spare, (adapter, sums_sh, KS, BM, ROUND, TASKS, PDL)),
            ],
            [4, 4, 1, 1, 2],
            [REGS, REGS, RING_REGS, RING_REGS, RING_REGS],
        )
