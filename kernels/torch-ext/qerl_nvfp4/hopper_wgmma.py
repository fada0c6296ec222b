"""The Hopper kernel in Gluon, for more than 16 tokens (W4A8: any number): warps with roles.

A program computes tiles of 64 P rows (weights) by BM columns (tokens).  P groups of four warps own 64 rows each: they decode words from
shared memory into the *register* operand of `wgmma` (hopper_decode.py); while one group decodes, the matrix units work for the others.
One warp keeps the rings full: the bulk copy engine brings words, scales and x, and takes y away.

    loading warp                               P groups of 4 warps
    wait empty[st] <-----------------------+
    copy words, scales ~~> full[st] --------> | wait full[st]; 2 times: words into registers
    wait x_free[xs] <----------------------+  |   for each stage of x: wait x_full[xs]; decode 32 columns, wgmma of every part
    copy x of each part ~~> x_full[xs] -----> |     arrive x_free[the one before], after the first wgmma of the next stage
                                              |   arrive empty[the one before], after the first wgmma of the next unit

Two forms of the ring.  X = 0: x comes with the words, 256 columns at a time, in full[st]; a ring of two stages is then filled and emptied by
halves (B = 2).  X > 0: x has a ring of its own of fewer columns, so that up to 256 tokens fit beside the words.

x must be in the k order of the decoded words: portable.permute_kernel or quantize_fp8_kernel wrote it so ("decoded"), four more warps
reorder it in shared memory, which saves a launch ("permute"), or words are decoded in x's own order ("natural").

With FP8 (W4A8) x is e4m3 with a scale per token, weights are decoded to e4m3, and the last step of a tile multiplies by both scales.  The
adapter stays bfloat16; its shared memory for B and x A^T is filled after the copies of a tile's last unit were started (hopper_adapt.py).

Programs first compute whole tiles, neighbours at the same time, so that they share words and x in the second-level cache.  The units of
the remaining tiles are cut into equal ranges, one per program; the program that begins a shared tile adds up the others' sums, in order.

Legend: st, xs stages; phase, x_phase the parity that is waited for; it, u units along K; h halves of a unit; part a group of warps;
n0, m0 first row and token; the constants of `Tile` (hopper_tile.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .gluon_names import async_load, async_store, barrier, partitions, record
from .hopper import finish, opaque_zero
from .hopper_adapt import SUMS_SHARED, Down, Lora, T, adapt, load_adapter, lower_flags, multiply_adapter
from .hopper_decode import piece_of, read
from .hopper_tile import R, Tile, Work, accumulator, count, operand, size, start, wait


@record
class Ring:
    """Shared memory that is filled and emptied again and again, and its barriers."""

    w_sh: gl.shared_memory_descriptor  # [S B P, R rows, 32 / B words]
    s_sh: gl.shared_memory_descriptor  # [S P, R rows, 8 pairs of scales]
    x_sh: gl.tuple  # [stages, tokens of a part, C columns] of each part
    full: gl.shared_memory_descriptor  # words and scales (X = 0: and x, in order) have arrived
    empty: gl.shared_memory_descriptor  # every group is done with them
    x_full: gl.shared_memory_descriptor  # x has arrived ("permute": as it is)
    x_free: gl.shared_memory_descriptor


@record
class Out:
    """Where y goes, and what a tile's last step needs."""

    y_d: gl.tensor
    y_sh: gl.shared_memory_descriptor  # [2 P, 16 tokens, R rows]
    gs_ptr: gl.tensor  # float32 divisors of rows, sgs apart
    bias_ptr: gl.tensor
    xs_ptr: gl.tensor  # float32 scales of tokens
    ws_ptr: gl.tensor  # float32, what programs leave of tiles that they share
    cnt_ptr: gl.tensor  # how many have left theirs
    M: gl.tensor
    N: gl.tensor
    sgs: gl.tensor


@gluon.constexpr_function
def partial_layout(BM):
    """The accumulator as [pieces, 128 threads, 4]: what a thread holds is 16 bytes of every piece."""
    pieces = BM // 8
    regs = [[0, 0, 1], [0, 0, 2]] + [[1 << i, 0, 0] for i in range(pieces.bit_length() - 1)]
    threads = [[0, 1 << i, 0] for i in range(7)]
    return gl.DistributedLinearLayout(regs, threads[:5], threads[5:], [], [pieces, 128, 4])


@gluon.constexpr_function
def tokens_layout(T):
    """[T tokens, 128 columns]: reads and writes of 16 bytes without bank conflicts, in either order of k."""
    regs = [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64]] + ([[32, 0]] if T > 32 else [])
    return gl.DistributedLinearLayout(
        regs, [[1, 0], [2, 0], [4, 0], [0, 8], [0, 16]], [[8, 0], [16, 0] if T > 16 else [0, 0]], [], [T, 128]
    )


@gluon.jit
def before(st, S: gl.constexpr):
    """The stage before this one."""
    return gl.where(st == 0, S - 1, st - 1)


@gluon.jit
def idle():
    """A warp that only makes up a group of four."""
    finish()


@gluon.jit
def spare(down, sums_sh, tile, ROUND: gl.constexpr):
    """Two more such warps, which compute x A^T if there are TASKS."""
    if tile.TASKS:
        adapt(down, sums_sh, tile, ROUND)
    finish()


# --- the warps that fill the rings ------------------------------------------------------------------------------------------------


@gluon.jit
def load_weights(maps, ring, st, b: gl.constexpr, n0, it, tile):
    """Words of piece b of a unit; with the last piece come the scales of all, for which the first one's readers wait too."""
    P: gl.constexpr = tile.P
    B: gl.constexpr = tile.B
    mbarrier.expect(ring.full.index(st * B + b), P * R * 128 // B)
    for p in gl.static_range(P):
        at = [n0 + p * R, it * 32 + b * 16]
        async_load(maps[0], at, ring.full.index(st * B + b), ring.w_sh.index((st * B + b) * P + p))
    if b == B - 1:
        mbarrier.expect(ring.full.index(st * B), P * R * 16)
        for p in gl.static_range(P):
            async_load(maps[1], [n0 + p * R, it * 8], ring.full.index(st * B), ring.s_sh.index(st * P + p))


@gluon.jit
def load_x(x_maps, ring, arrived, at, m0, k0, tile):
    """A stage of x: C columns of every part."""
    for i in gl.static_range(count(tile.BM)):
        async_load(x_maps[i], [m0 + start(tile.BM, i), k0], arrived, ring.x_sh[i].index(at))


@gluon.jit
def produce(x_maps, w_maps, xa_maps, ring, work, lora, tile):
    """One warp that asks for everything."""
    B: gl.constexpr = tile.B
    BYTES: gl.constexpr = tile.BM * tile.C * (1 if tile.FP8 else 2)  # of a stage of x
    for i in gl.static_range(tile.S):  # weights do not depend on the previous kernel
        if i < work.units():
            t = i // work.steps * work.G + work.pid
            it = i % work.steps
            if i >= work.D * work.steps:
                u = work.u0 + i - work.D * work.steps
                t = work.D * work.G + u // work.steps
                it = u % work.steps
            for b in gl.static_range(B):
                load_weights(w_maps, ring, i, b, t // work.mt * (tile.P * R), it, tile)
    if tile.PDL:
        gdc_wait()
    st = 0
    phase = 1
    xs = 0
    x_phase = 1
    turn = 0
    waited = 0
    v = 0
    for j in range(work.tiles()):
        t, _, s0, s1 = work.segment(j)
        n0 = t // work.mt * (tile.P * R)
        m_tile = t % work.mt
        for it in range(s0, s1):
            if tile.X == 0:
                for b in gl.static_range(B):
                    mbarrier.wait(ring.empty.index(st * B + b), phase)
                    if v >= tile.S:
                        load_weights(w_maps, ring, st, b, n0, it, tile)
                    arrived = ring.x_full.index(st * B + b) if tile.ORDER == "permute" else ring.full.index(st * B + b)
                    mbarrier.expect(arrived, 2 * BYTES // B)
                    for h in gl.static_range(b, 2, B):
                        load_x(x_maps, ring, arrived, st * 2 + h, m_tile * tile.BM, it * 256 + h * 128, tile)
            else:
                if v >= tile.S:
                    mbarrier.wait(ring.empty.index(st), phase)
                    load_weights(w_maps, ring, st, 0, n0, it, tile)
                for c in gl.static_range(256 // tile.C):
                    mbarrier.wait(ring.x_free.index(xs), x_phase)
                    mbarrier.expect(ring.x_full.index(xs), BYTES)
                    load_x(x_maps, ring, ring.x_full.index(xs), xs, m_tile * tile.BM, it * 256 + c * tile.C, tile)
                    xs += 1
                    if xs == tile.X:
                        xs = 0
                        x_phase ^= 1
            v += 1
            st += 1
            if st == tile.S:
                st = 0
                phase ^= 1
        if tile.RANK > 0:  # noqa: SIM102
            if s0 == 0:
                waited, turn = load_adapter(w_maps[2], xa_maps, lora, n0, m_tile, waited, turn, tile)
    if tile.TASKS:  # noqa: SIM102
        if work.units() > 0:
            lower_flags(lora, work)
    finish()


@gluon.jit
def permute(ring, work, tile):
    """Four warps: column 32 t + 8 j + 4 p + 2 i1 + i0 of x moves to 32 j + 16 i1 + 8 i0 + 2 t + p, in place."""
    T: gl.constexpr = min(tile.BM, 64)
    st = 0
    phase = 0
    for _ in range(work.units()):
        mbarrier.wait(ring.x_full.index(st), phase)
        for i in gl.static_range(2 * tile.BM // T):
            part = ring.x_sh[0].index(st * 2 + i % 2).slice(i // 2 * T, T, 0)
            x = part.load(tokens_layout(T)).reshape([T, 4, 4, 2, 2, 2])
            part.store(x.permute([0, 2, 4, 5, 1, 3]).reshape([T, 128]))
        fence_async_shared()
        mbarrier.arrive(ring.full.index(st))
        st += 1
        if st == tile.S:
            st = 0
            phase ^= 1
    finish()


# --- the warps that multiply --------------------------------------------------------------------------------------------------------


@gluon.jit
def multiply(accs, a, x_sh, at, k: gl.constexpr, tile):
    """accs[i] += a [64, 32 columns] times x of part i, columns 32 k .. of a stage; returns when what was begun before this is done."""
    begun = ()
    for i in gl.static_range(count(tile.BM)):
        left = gl.convert_layout(a, operand(size(tile.BM, i), tile.FP8), assert_trivial=True)
        right = x_sh[i].index(at).permute([1, 0]).slice(k * 32, 32, 0)
        begun = begun + (warpgroup_mma(left, right, accs[i], is_async=True),)  # noqa: RUF005
    return wait(begun, count(tile.BM), tile.BM)


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
    """16 bytes of every thread next to each other."""
    B: gl.constexpr = acc.shape[1]
    a = acc.reshape([4, 2, 8, B // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    a = gl.convert_layout(a.reshape([B // 8, 128, 4]), partial_layout(B), assert_trivial=True)
    gl.store(ptr + offsets(B), a)


@gluon.jit
def finished(acc, ptr, stride, pid, p1, factor, bias, xs_ptr, m0, M, tile):
    """The sum of a part with what programs pid + 1 to p1 left, in order; times the rows' and the tokens' factors, plus bias."""
    B: gl.constexpr = acc.shape[1]
    rows: gl.constexpr = gl.SliceLayout(1, accumulator(B))
    off = offsets(B)
    a = acc.reshape([4, 2, 8, B // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    a = gl.convert_layout(a.reshape([B // 8, 128, 4]), partial_layout(B), assert_trivial=True)
    for p in range(pid + 1, p1 + 1):
        a += gl.load(ptr + (p * stride + off), cache_modifier=".cg")
    total = a.reshape([B // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    acc = gl.convert_layout(total.reshape([R, B]), accumulator(B), assert_trivial=True)
    acc = acc * gl.convert_layout(factor, rows, assert_trivial=True)[:, None]
    if tile.FP8:
        m = m0 + gl.arange(0, B, layout=gl.SliceLayout(0, accumulator(B)))
        acc = acc * gl.load(xs_ptr + gl.minimum(m, M - 1))[None, :]
    if tile.BIAS:
        acc += gl.convert_layout(bias, rows, assert_trivial=True)[:, None]
    return acc


@gluon.constexpr_function
def first_buffer(BM, i):
    """A last part of 16 tokens takes the second buffer: what is written next waits for all copies but one, and takes the first."""
    return int(BM % 32 == 16 and BM > 16 and i == bin(BM).count("1") - 1)


@gluon.jit
def write(y, out, m0, n0, part: gl.constexpr, turn: gl.constexpr, BM: gl.constexpr):
    """y [rows, tokens] -> global memory, 16 tokens at a time, through two buffers."""
    if y.shape[1] > 16:
        lo, hi = gl.split(y.reshape([y.shape[0], 2, y.shape[1] // 2]).permute([0, 2, 1]))
        write(lo, out, m0, n0, part, turn, BM)
        write(hi, out, m0 + y.shape[1] // 2, n0, part, turn + y.shape[1] // 32, BM)
    else:
        buffer = out.y_sh.index(part * 2 + turn % 2)
        tma.store_wait(0 if BM == 16 else 1)
        barrier()
        buffer.store(y.permute([1, 0]))
        fence_async_shared()
        barrier()
        async_store(out.y_d, [m0, n0], buffer)


@gluon.jit
def consume(ring, work, out, lora, part: gl.constexpr, tile):
    """Four warps: rows part * 64 .. of every tile."""
    B: gl.constexpr = tile.B
    BM: gl.constexpr = tile.BM
    PARTS: gl.constexpr = count(BM)
    EACH: gl.constexpr = tile.C // 32  # wgmma of a stage of x
    A_LAYOUT: gl.constexpr = operand(size(BM, 0), tile.FP8)
    DECODED: gl.constexpr = 8.0 if tile.FP8 else 256.0
    st = 0
    phase = 0
    xs = 0
    x_phase = 0
    turn = 0
    for j in range(work.tiles()):
        t, shared, s0, s1 = work.segment(j)
        accs = ()
        for i in gl.static_range(PARTS):
            accs = accs + (gl.zeros([R, size(BM, i)], gl.float32, accumulator(size(BM, i), tile.FP8)),)  # noqa: RUF005
        for u in range(s0, s1):
            for h in gl.static_range(2):
                if h < B:
                    mbarrier.wait(ring.full.index(st * B + h), phase)
                words, scales = read(ring.w_sh, ring.s_sh, st, h, part, tile)
                for i in gl.static_range(4):
                    if tile.X == 0:
                        accs = multiply(
                            accs, piece_of(words, scales, i, A_LAYOUT, tile), ring.x_sh, st * 2 + h, i, tile
                        )
                        if i == 0:
                            if h == 0:  # the last wgmma of the unit before is done
                                mbarrier.arrive(ring.empty.index(before(st, tile.S) * B + B - 1), pred=u > s0)
                            elif B == 2:
                                mbarrier.arrive(ring.empty.index(st * B))
                    else:
                        if i % EACH == 0:
                            mbarrier.wait(ring.x_full.index(xs), x_phase)
                        accs = multiply(accs, piece_of(words, scales, i, A_LAYOUT, tile), ring.x_sh, xs, i % EACH, tile)
                        if i % EACH == 0:  # every wgmma of the columns before is done
                            mbarrier.arrive(ring.x_free.index(before(xs, tile.X)), pred=(u > s0) | (h + i > 0))
                            if h + i == 0:
                                mbarrier.arrive(ring.empty.index(before(st, tile.S)), pred=u > s0)
                        if i % EACH == EACH - 1:
                            xs += 1
                            if xs == tile.X:
                                xs = 0
                                x_phase ^= 1
            st += 1
            if st == tile.S:
                st = 0
                phase ^= 1
        accs = wait(accs, 0, BM)
        if tile.X > 0:
            mbarrier.arrive(ring.x_free.index(before(xs, tile.X)))
        mbarrier.arrive(ring.empty.index(before(st, tile.S) * B + B - 1))
        pn = t // work.mt
        n0 = pn * (tile.P * R) + part * R
        n_a = gl.arange(0, R, layout=gl.SliceLayout(1, accumulator(size(BM, 0))))
        safe = gl.minimum(n0 + n_a + opaque_zero(), out.N - 1)
        gs = gl.load(out.gs_ptr + safe * out.sgs)  # on their way while the others' sums are awaited
        bias = gs
        if tile.BIAS:
            bias = gl.load(out.bias_ptr + safe).to(gl.float32)
        p1 = work.pid  # the last program that has a share in this tile
        if s1 - s0 < work.steps:
            counter = out.cnt_ptr + (shared * tile.P + part)
            if s0 == 0:
                p1 = ((shared + 1) * work.steps * work.G - 1) // work.U
                while gl.atomic_add(counter, 0, sem="acquire") < p1 - work.pid:
                    pass
                barrier()
                gl.store(counter, 0)
            else:
                for i in gl.static_range(PARTS):
                    leave(accs[i], out.ws_ptr + ((work.pid * tile.P + part) * (R * BM) + R * start(BM, i)))
                barrier()
                gl.atomic_add(counter, 1, sem="release")
        if s0 == 0:
            factor = gl.div_rn(gs * 0.0 + DECODED, gs)
            sums = ()
            for i in gl.static_range(PARTS):
                left = out.ws_ptr + (part * (R * BM) + R * start(BM, i))
                m0 = (t - pn * work.mt) * BM + start(BM, i)
                y = finished(accs[i], left, tile.P * R * BM, work.pid, p1, factor, bias, out.xs_ptr, m0, out.M, tile)
                sums = sums + (y,)  # noqa: RUF005
            if tile.RANK > 0:
                sums, turn = multiply_adapter(sums, lora, pn * (tile.P * R), part, turn, tile)
            for i in gl.static_range(PARTS):
                m0 = (t - pn * work.mt) * BM + start(BM, i)
                write(sums[i].to(gl.bfloat16), out, m0, n0, part, first_buffer(BM, i), size(BM, i))
    tma.store_wait(0)  # shared memory must outlive what is read from it
    finish()


@gluon.constexpr_function
def warps_of(P, permute):
    return [4] * (P - 1 + permute) + [1, 1, 2]


@gluon.constexpr_function
def registers_of(P, permute, groups, ring):
    return [groups] * (P - 1 + permute) + [ring] * 3


@gluon.jit
def wgmma_kernel(
    x0_d, x1_d, x2_d, w_d, s_d, b_d, xa0_d, xa1_d, xa2_d, y_d, pointers, aligned, sizes, V: gl.constexpr
):  # fmt: skip
    """y[m, n]; K a multiple of 32, steps = ceil(K / 256), mt = ceil(M / BM), tiles = ceil(N / 64 P) * mt.

    Of the last step, the copy engine fills columns beyond K with zeros: words, scales, and x. It counts their bytes like others.

    The H programs that start first have no tiles, only tasks of x A^T, in KS slices of K.  Without TASKS xa0_d, ... hold it already.
    x0_d, x1_d, x2_d (M, K) bfloat16, or e4m3 in decode order; boxes of a part's tokens by C columns; w_d int32 (N, K/8), box (64, 32 or
    16); s_d int16 (N, K/32), box (64, 8); y_d bfloat16 (M, N), box (16, 64); b_d bfloat16 (N, RANK), box (64, 32); xa0_d, ... bfloat16
    (mt * BM, shards * RANK = 8 R8), x A^T, boxes of a part's tokens by 32 columns.  Of parts that a tile does not have, and of
    an adapter that there is not: None, for a parameter fewer.
    `V` is a `hopper_tile.Variant`; the others are tuples, in the order of `launch.launch_wgmma`. `sizes` are the upper
    halves of int64 whose lower half is no multiple of 16: Triton makes a kernel for each 1 and each multiple of 16 in a tuple, whatever
    `do_not_specialize` says, and a half is read from the parameters like a number.
    """
    (
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
        xs_ptr,
        ws_ptr,
        cnt_ptr,
    ) = pointers
    N, K, sxm = aligned
    M, sgs, R8, H, KS, e1, e2, steps, U, mt, D = [(number >> 32).to(gl.int32) for number in sizes]
    PERMUTE: gl.constexpr = V.ORDER == "permute"
    tile = Tile(V.BM, V.P, V.S, V.X, V.C, V.B, V.ORDER, V.FP8, V.BIAS, V.RANK, V.TASKS, V.PDL)
    gl.static_assert(V.P < 4 or not PERMUTE, "four groups leave no registers to put x in order")
    gl.static_assert(not PERMUTE or (V.B == 1 and V.X == 0), "x is put in order a unit at a time, not by halves")
    gl.static_assert(start(V.BM, count(V.BM) - 1) + size(V.BM, count(V.BM) - 1) == V.BM, "parts of a tile")
    w_sh = gl.allocate_shared_memory(gl.int32, [V.S * V.B * V.P, R, 32 // V.B], w_d.layout)
    s_sh = gl.allocate_shared_memory(gl.int16, [V.S * V.P, R, 8], s_d.layout)
    x_sh = ()
    X_TYPE: gl.constexpr = gl.float8e4nv if V.FP8 else gl.bfloat16
    STAGES: gl.constexpr = V.X if V.X > 0 else 2 * V.S
    for i in gl.static_range(count(V.BM)):
        x_sh = x_sh + (gl.allocate_shared_memory(X_TYPE, [STAGES, size(V.BM, i), V.C], x0_d.layout),)  # noqa: RUF005
    y_sh = gl.allocate_shared_memory(gl.bfloat16, [2 * V.P, 16, R], y_d.layout)
    # A barrier that nobody waits for must not be made: Triton gives its memory to a buffer, and a GPU that changes between processes
    # writes barriers back when it returns (PTX: mbarrier.inval before the memory is used for anything else).
    full = gl.allocate_shared_memory(gl.int64, [V.S * V.B, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [V.S * V.B, 1], mbarrier.MBarrierLayout())
    x_full = full
    x_free = empty
    if PERMUTE or V.X > 0:
        x_full = gl.allocate_shared_memory(gl.int64, [V.X if V.X > 0 else V.S, 1], mbarrier.MBarrierLayout())
    if V.X > 0:
        x_free = gl.allocate_shared_memory(gl.int64, [V.X, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(V.S * V.B):
        if PERMUTE:
            mbarrier.init(x_full.index(i), 1)
        mbarrier.init(full.index(i), 2 if V.X > 0 or i % V.B else 3)  # words, scales, and perhaps x
        mbarrier.init(empty.index(i), V.P)
    for i in gl.static_range(V.X * 1):
        mbarrier.init(x_full.index(i), 1)
        mbarrier.init(x_free.index(i), V.P)
    ring = Ring(w_sh, s_sh, x_sh, full, empty, x_full, x_free)
    b_sh = w_sh
    xa_sh = x_sh
    ready = full
    free = empty
    if V.RANK > 0:
        b_sh = gl.allocate_shared_memory(gl.bfloat16, [V.P, R, 32], b_d.layout)
        xa_sh = ()
        for i in gl.static_range(count(V.BM)):
            xa_sh = xa_sh + (gl.allocate_shared_memory(gl.bfloat16, [size(V.BM, i), 32], xa0_d.layout),)  # noqa: RUF005
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(ready, 1)
        mbarrier.init(free, V.P)
    RS = R8 * 8
    lora = Lora(b_sh, xa_sh, ready, free, e1, e2, flag_ptr, done_ptr, M, RS)
    sums_sh = y_sh
    if V.TASKS:
        sums_sh = gl.allocate_shared_memory(gl.float32, [2 * T, T], SUMS_SHARED)
    fence_async_shared()
    barrier()
    G = gl.num_programs(0) - H
    pid = gl.num_programs(0) - 1 - gl.program_id(0)  # programs wait for larger pid only, which started no later
    u0 = gl.minimum(pid, G) * U // G
    u1 = gl.minimum(pid + 1, G) * U // G
    if V.PDL:
        gdc_launch_dependents()
    work = Work(pid, G, u0, u1, steps, U, mt, gl.where(pid < G, D, 0))
    out = Out(y_d, y_sh, gs_ptr, bias_ptr, xs_ptr, ws_ptr, cnt_ptr, M, N, sgs)
    down = Down(x_ptr, a_ptr, slice_ptr, xa_ptr, flag_ptr, taken_ptr, count_ptr, M, K, sxm, RS, KS)
    x_maps = (x0_d,)
    xa_maps = (xa0_d,)
    if count(V.BM) == 2:
        x_maps = (x0_d, x1_d)
        xa_maps = (xa0_d, xa1_d)
    elif count(V.BM) == 3:
        x_maps = (x0_d, x1_d, x2_d)
        xa_maps = (xa0_d, xa1_d, xa2_d)
    ROUND: gl.constexpr = 1 + (V.RING_REGS > 128)
    gl.warp_specialize(
        partitions(
            [
                (consume, (ring, work, out, lora, 0, tile)),
                (consume, (ring, work, out, lora, 1, tile)),
                (consume, (ring, work, out, lora, 2, tile)),
                (consume, (ring, work, out, lora, 3, tile)),
            ],
            V.P,
            [(permute, (ring, work, tile))] if PERMUTE else [],
            [
                (produce, (x_maps, (w_d, s_d, b_d), xa_maps, ring, work, lora, tile)),
                (idle, ()),
                (spare, (down, sums_sh, tile, ROUND)),
            ],
        ),
        warps_of(V.P, PERMUTE),
        registers_of(V.P, PERMUTE, V.REGS, V.RING_REGS),
    )
