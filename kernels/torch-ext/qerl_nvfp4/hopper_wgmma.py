"""The Hopper kernel for 17 to about a thousand tokens, in Gluon: warps with roles.

A program computes tiles of 64 P rows (weights) by BM columns (tokens).  P groups of four warps own 64 rows each: they decode words from
shared memory into the *register* operand of `wgmma`; while one group decodes, the matrix units work for the others.  One warp keeps a
ring of S stages full: the bulk copy engine brings words, scales and x, and takes y away.  x must be in the k order in which words are decoded: either it
comes so (portable.permute_kernel), or (PERMUTE) four more warps put it in order in shared memory, which saves a launch, or (NATURAL) bytes are decoded
in x's own order, which takes more instructions and neither.

An adapter has shared memory of its own for B and x A^T, filled when a tile's last unit has been asked for (hopper_adapt.py).

Programs first compute whole tiles, neighbours at the same time, so that they share words and x in the second-level cache.  What does
not go round is cut as in hopper.py; of the programs that share a tile, the one that begins it adds up what the others leave, in order.
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

from .gluon_names import async_load, async_store, barrier
from .hopper import decode_scales, decode_word, fetch_next, finish, halves, opaque_zero
from .hopper_adapt import SUMS_SHARED, T, adapt, load_adapter, lower_flags, multiply_adapter

X_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
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


# all of four words, or of four pairs of scales, of a row in each of the lanes that share it
SHARED_BY_LANES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
)
# One byte (a lane's own, chosen by $8) of each of four words, two codes of neighbouring columns.  A code's bits are put where a bfloat16
# has them by two multiplications that leave both copies of a byte side by side, the lower code's in the lower half.
DECODE_BYTES = gl.constexpr(
    "{ .reg .b32 c, u, s2, nz; mov.b32 nz, 0x80008000; mov.b32 s2, {$9, $9};"
    + "".join(
        ("mov.b32 s2, {$10, $10};" if i == 2 else "")
        + f"prmt.b32 c, ${4 + i}, 0, $8; mul.lo.u32 u, c, 0x00040040; mul.lo.u32 c, c, 0x01001000;"
        f"and.b32 u, u, 0x01C001C0; and.b32 c, c, 0x80008000; or.b32 u, u, c; fma.rn.bf16x2 ${i}, u, s2, nz;"
        for i in range(4)
    )
    + "}"
)


@gluon.constexpr_function
def partial_layout(BM):
    """The accumulator as [pieces, 128 threads, 4]: what a thread holds is 16 bytes of every piece."""
    pieces = BM // 8
    regs = [[0, 0, 1], [0, 0, 2]] + [[1 << i, 0, 0] for i in range(pieces.bit_length() - 1)]
    threads = [[0, 1 << i, 0] for i in range(7)]
    return gl.DistributedLinearLayout(regs, threads[:5], threads[5:], [], [pieces, 128, 4])


def pieces_of(S: int) -> int:
    """Pieces of a unit, each with barriers of its own: a short ring is filled by halves."""
    return 2 if S == 2 else 1


def words_layout(S: int):
    """32 words of a row, or half as many."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128 // pieces_of(S), element_bitwidth=32, rank=2)


barriers_of = gluon.constexpr_function(pieces_of)


def registers(BM: int, P: int, permute: bool, tasks: bool) -> tuple[int, int, int]:
    """Registers a thread: what 64 Ki allow on average, of the groups that multiply, and of the ring's warp (it counts as four).

    Where there are no other warps, the ring's gives most of its registers to those that multiply; fewer if x A^T is computed beside it,
    except where a tile is so wide that its sums leave no others.
    """
    average = 65536 // (128 * (P + 1 + permute)) // 8 * 8
    if permute:
        return average, average, average
    ring = 24 if not tasks else 152 if P == 2 and BM < 256 else 88
    return average, ((P + 1) * average - ring) // P // 8 * 8, ring


@gluon.constexpr_function
def tokens_layout(T):
    """[T tokens, 128 columns]: reads and writes of 16 bytes without bank conflicts, in either order of k."""
    regs = [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64]] + ([[32, 0]] if T > 32 else [])
    return gl.DistributedLinearLayout(
        regs, [[1, 0], [2, 0], [4, 0], [0, 8], [0, 16]], [[8, 0], [16, 0] if T > 16 else [0, 0]], [], [T, 128]
    )


@gluon.jit
def idle():
    """A warp that only makes up a group of four."""
    finish()


@gluon.jit
def spare(adapter, sums_sh, KS, BM: gl.constexpr, ROUND: gl.constexpr, TASKS: gl.constexpr, PDL: gl.constexpr):
    """Two more such warps, which compute x A^T if there are TASKS."""
    if TASKS:
        adapt(adapter, sums_sh, KS, BM, ROUND, PDL)
    finish()


@gluon.jit
def units_of(work):
    """Of this program."""
    _, _, u0, u1, steps, _, _, D = work
    return D * steps + u1 - u0


@gluon.jit
def tiles_of(work):
    """Of this program, also those that it shares."""
    _, _, u0, u1, steps, _, _, D = work
    return D + (u1 + steps - 1) // steps - u0 // steps


@gluon.jit
def segment(j, work):
    """What this program computes j-th: a tile (which of all, which of the split ones) and its first and last step."""
    pid, G, u0, u1, steps, _, _, D = work
    tile = j * G + pid
    t = 0
    s0 = 0
    s1 = steps
    if j >= D:
        t = u0 // steps + j - D
        tile = D * G + t
        s0 = gl.maximum(u0 - t * steps, 0)
        s1 = gl.minimum(u1 - t * steps, steps)
    return tile, t, s0, s1


# --- the warps that fill the ring ------------------------------------------------------------------------------------------------


@gluon.jit
def load_weights(w_d, s_d, w_sh, s_sh, full, st, b: gl.constexpr, n0, it, P: gl.constexpr, B: gl.constexpr):
    """Words of piece b of a unit; with the last piece come the scales of all, for which the first one's readers wait too."""
    mbarrier.expect(full.index(st * B + b), P * R * 128 // B)
    for p in gl.static_range(P):
        at = [n0 + p * R, it * 32 + b * 16]
        async_load(w_d, at, full.index(st * B + b), w_sh.index((st * B + b) * P + p))
    if b == B - 1:
        mbarrier.expect(full.index(st * B), P * R * 16)
        for p in gl.static_range(P):
            async_load(s_d, [n0 + p * R, it * 8], full.index(st * B), s_sh.index(st * P + p))


@gluon.jit
def load_x(x_d, x_sh, arrived, st, b: gl.constexpr, m0, it, BM: gl.constexpr, B: gl.constexpr):
    """x of piece b of a unit; a buffer for each half of it."""
    mbarrier.expect(arrived.index(st * B + b), BM * 512 // B)
    for h in gl.static_range(b, 2, B):
        async_load(x_d, [m0, it * 256 + h * 128], arrived.index(st * B + b), x_sh.index(st * 2 + h))


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
    TASKS: gl.constexpr,
    PDL: gl.constexpr,
    PERMUTE: gl.constexpr,
    FETCH: gl.constexpr,
    following,
):
    """One warp that asks for everything."""
    next_ptr, lines, wanted = following
    x_d, w_d, s_d, b_d, xa_d = maps
    B: gl.constexpr = barriers_of(S)
    w_sh, s_sh, x_sh, raw, full, empty = ring
    pid, G, u0, _, steps, _, mt, D = work
    arrived = raw if PERMUTE else full
    for i in gl.static_range(S):  # weights do not depend on the previous kernel
        if i < units_of(work):
            tile = i // steps * G + pid
            it = i % steps
            if i >= D * steps:
                u = u0 + i - D * steps
                tile = D * G + u // steps
                it = u % steps
            for b in gl.static_range(B):
                load_weights(w_d, s_d, w_sh, s_sh, full, i, b, tile // mt * (P * R), it, P, B)
    if PDL:
        gdc_wait()
    st = 0
    phase = 1
    turn = 0
    waited = 0
    v = 0
    for j in range(tiles_of(work)):
        tile, _, s0, s1 = segment(j, work)
        n0 = tile // mt * (P * R)
        m_tile = tile % mt
        for it in range(s0, s1):
            for b in gl.static_range(B):
                mbarrier.wait(empty.index(st * B + b), phase)
                if v >= S:
                    load_weights(w_d, s_d, w_sh, s_sh, full, st, b, n0, it, P, B)
                load_x(x_d, x_sh, arrived, st, b, m_tile * BM, it, BM, B)
            v += 1
            st += 1
            if st == S:
                st = 0
                phase ^= 1
        if RANK > 0:  # noqa: SIM102
            if s0 == 0:
                waited, turn = load_adapter(b_d, xa_d, lora, shards, n0, m_tile, waited, turn, P, BM, RANK, TASKS)
    if FETCH:
        fetch_next(next_ptr, lines, wanted, gl.program_id(0), gl.num_programs(0), 1)
    if TASKS:  # noqa: SIM102
        if units_of(work) > 0:
            lower_flags(shards, G)
    finish()


@gluon.jit
def permute(ring, work, BM: gl.constexpr, S: gl.constexpr):
    """Four warps: column 32 t + 8 j + 4 p + 2 i1 + i0 of x moves to 32 j + 16 i1 + 8 i0 + 2 t + p, in place."""
    _, _, x_sh, raw, full, _ = ring
    T: gl.constexpr = min(BM, 64)
    st = 0
    phase = 0
    for _ in range(units_of(work)):
        mbarrier.wait(raw.index(st), phase)
        for i in gl.static_range(2 * BM // T):
            part = x_sh.index(st * 2 + i % 2).slice(i // 2 * T, T, 0)
            x = part.load(tokens_layout(T)).reshape([T, 4, 4, 2, 2, 2])
            part.store(x.permute([0, 2, 4, 5, 1, 3]).reshape([T, 128]))
        fence_async_shared()
        mbarrier.arrive(full.index(st))
        st += 1
        if st == S:
            st = 0
            phase ^= 1
    finish()


# --- the warps that multiply --------------------------------------------------------------------------------------------------------


@gluon.jit
def taken_on():
    """A warp waits for its wgmma to be taken on: ptxas must not gather the decodes before the first of them."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def left_operand(p0, p1, p2, p3, AL: gl.constexpr):
    """[64 rows, 4 lanes] pairs, those of 8 columns of the operand in each."""
    A = halves(gl.join(gl.join(p0, p1), gl.join(p2, p3)))
    return gl.convert_layout(A.permute([0, 3, 2, 1, 4]).reshape([R, 32]), AL, assert_trivial=True)


@gluon.jit
def decode(q, s, AL: gl.constexpr):
    """[64 rows, 4 lanes] words and a scale each -> the left operand, 32 columns."""
    taken_on()
    p0, p1, p2, p3 = decode_word(q, gl.convert_layout(s, q.type.layout, assert_trivial=True))
    return left_operand(p0, p1, p2, p3, AL)


@gluon.jit
def of_a_row(v):
    """[64 rows, 4] of SHARED_BY_LANES -> four [64 rows, 1]."""
    even, odd = gl.split(v.reshape([R, 2, 2]))
    v0, v2 = gl.split(even)
    v1, v3 = gl.split(odd)
    L: gl.constexpr = gl.SliceLayout(1, SCALES)
    v0 = gl.convert_layout(v0, L, assert_trivial=True)[:, None]
    v1 = gl.convert_layout(v1, L, assert_trivial=True)[:, None]
    v2 = gl.convert_layout(v2, L, assert_trivial=True)[:, None]
    v3 = gl.convert_layout(v3, L, assert_trivial=True)[:, None]
    return v0, v1, v2, v3


@gluon.jit
def decode_natural(words, s0, s1, AL: gl.constexpr):
    """Four words of each row and the scales of two and two -> the left operand, 32 columns in the order in which they lie in memory.

    A lane takes one byte of each word, two neighbouring columns of 8, as the operand has them.
    """
    taken_on()
    q0, q1, q2, q3 = of_a_row(words.load(SHARED_BY_LANES))
    byte = gl.arange(0, 4, layout=gl.SliceLayout(0, SCALES))[None, :] + 0x4440  # zeros above it
    p0, p1, p2, p3 = gl.inline_asm_elementwise(
        asm=DECODE_BYTES,
        constraints="=&r,=&r,=&r,=&r,r,r,r,r,r,h,h",
        args=[q0, q1, q2, q3, byte, s0, s1],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return left_operand(p0, p1, p2, p3, AL)


@gluon.jit
def gather(acc, cnt_ptr, ws_ptr, part: gl.constexpr, pid, G, t, s0, s1, steps, U, P: gl.constexpr):
    """Of the programs that share tile t of the split ones, the one that began it waits for the others and adds theirs in order."""
    if s1 - s0 < steps:
        BM: gl.constexpr = acc.shape[1]
        L: gl.constexpr = partial_layout(BM)
        piece = gl.arange(0, BM // 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
        thread = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
        four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
        off = piece * 512 + thread * 4 + four + opaque_zero() * 4
        a = acc.reshape([4, 2, 8, BM // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
        a = gl.convert_layout(a.reshape([BM // 8, 128, 4]), L, assert_trivial=True)
        if s0 == 0:
            p1 = ((t + 1) * steps * G - 1) // U
            while gl.atomic_add(cnt_ptr, 0, sem="acquire") < p1 - pid:
                pass
            barrier()
            for p in range(pid + 1, p1 + 1):
                a += gl.load(ws_ptr + ((p * P + part) * (R * BM) + off), cache_modifier=".cg")
            gl.store(cnt_ptr, 0)
            total = a.reshape([BM // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
            acc = gl.convert_layout(total.reshape([R, BM]), acc.type.layout, assert_trivial=True)
        else:
            gl.store(ws_ptr + ((pid * P + part) * (R * BM) + off), a)
            barrier()
            gl.atomic_add(cnt_ptr, 1, sem="release")
    return acc


@gluon.jit
def write(y, y_d, y_sh, m0, n0, part: gl.constexpr, turn: gl.constexpr, BM: gl.constexpr):
    """y [rows, tokens] -> global memory, 16 tokens at a time, through two buffers."""
    if y.shape[1] > 16:
        lo, hi = gl.split(y.reshape([y.shape[0], 2, y.shape[1] // 2]).permute([0, 2, 1]))
        write(lo, y_d, y_sh, m0, n0, part, turn, BM)
        write(hi, y_d, y_sh, m0 + y.shape[1] // 2, n0, part, turn + y.shape[1] // 32, BM)
    else:
        buffer = y_sh.index(part * 2 + turn % 2)
        tma.store_wait(0 if BM == 16 else 1)
        barrier()
        buffer.store(y.permute([1, 0]))
        fence_async_shared()
        barrier()
        async_store(y_d, [m0, n0], buffer)


@gluon.jit
def words_of(w_sh, st, h: gl.constexpr, part: gl.constexpr, P: gl.constexpr, B: gl.constexpr):
    """Half h of a group's unit."""
    if B == 2:
        return w_sh.index((st * 2 + h) * P + part)
    else:  # Triton 3.9 compiles what follows a return, whatever the condition
        return w_sh.index(st * P + part).slice(h * 16, 16, 1)


@gluon.jit
def read(w_sh, s_sh, st, h: gl.constexpr, part: gl.constexpr, P: gl.constexpr, B: gl.constexpr, NATURAL: gl.constexpr):
    """What `piece_of` takes of half a unit: words, which are loaded piece by piece if x is in its NATURAL order, and a row's eight scales or
    the two of a lane's words, decoded."""
    scales = s_sh.index(st * P + part).slice(h * 4, 4, 1)
    if NATURAL:
        s0, s1, s2, s3 = of_a_row(scales.load(SHARED_BY_LANES))
        scales = (decode_scales(s0), decode_scales(s1), decode_scales(s2), decode_scales(s3))
        return words_of(w_sh, st, h, part, P, B), scales
    else:
        s0, s1 = decode_scales(scales.load(SCALES))
        even, odd = gl.split(words_of(w_sh, st, h, part, P, B).load(WORDS).reshape([R, 4, 2, 2]))
        q0, q2 = gl.split(even)
        q1, q3 = gl.split(odd)
        return (q0, q1, q2, q3), (s0, s1)


@gluon.jit
def piece_of(words, scales, i: gl.constexpr, AL: gl.constexpr, NATURAL: gl.constexpr):
    """The left operand of the i-th 32 of 128 columns."""
    if NATURAL:
        return decode_natural(words.slice(4 * i, 4, 1), scales[i][0], scales[i][1], AL)
    else:
        return decode(words[i], scales[i // 2], AL)


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
    BIAS: gl.constexpr,
    RANK: gl.constexpr,
    NATURAL: gl.constexpr,
):
    """Four warps: rows part * 64 .. of every tile."""
    B: gl.constexpr = barriers_of(S)
    w_sh, s_sh, x_sh, _, full, empty = ring
    pid, G, _, _, steps, U, mt, _ = work
    y_d, y_sh, gs_ptr, bias_ptr, ws_ptr, cnt_ptr, N, sgs = out
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    AL: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    n_a = gl.arange(0, R, layout=gl.SliceLayout(1, MMA))
    st = 0
    phase = 0
    turn = 0
    for j in range(tiles_of(work)):
        tile, t, s0, s1 = segment(j, work)
        acc = gl.zeros([R, BM], gl.float32, MMA)
        for u in range(s0, s1):
            for h in gl.static_range(2):
                if h < B:
                    mbarrier.wait(full.index(st * B + h), phase)
                words, scales = read(w_sh, s_sh, st, h, part, P, B, NATURAL)
                x = x_sh.index(st * 2 + h).permute([1, 0])
                for i in gl.static_range(4):
                    a = piece_of(words, scales, i, AL, NATURAL)
                    acc = warpgroup_mma(a, x.slice(32 * i, 32, 0), acc, is_async=True)
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    if i == 0:
                        if h == 0:  # the last wgmma of the unit before is done
                            mbarrier.arrive(empty.index(gl.where(st == 0, S - 1, st - 1) * B + B - 1), pred=u > s0)
                        elif B == 2:
                            mbarrier.arrive(empty.index(st * B))
            st += 1
            if st == S:
                st = 0
                phase ^= 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(gl.where(st == 0, S - 1, st - 1) * B + B - 1))
        pn = tile // mt
        n0 = pn * (P * R) + part * R
        safe = gl.minimum(n0 + n_a + opaque_zero(), N - 1)
        gs = gl.load(gs_ptr + safe * sgs)  # on their way while the others' sums are awaited
        if BIAS:
            bias = gl.load(bias_ptr + safe)
        acc = gather(acc, cnt_ptr + (t * P + part), ws_ptr, part, pid, G, t, s0, s1, steps, U, P)
        if s0 == 0:
            acc = acc * gl.div_rn(gs * 0.0 + 256.0, gs)[:, None]
            if BIAS:
                acc += bias.to(gl.float32)[:, None]
            if RANK > 0:
                acc, turn = multiply_adapter(acc, lora, shards, pn * (P * R), part, turn, P, RANK, AL)
            write(acc.to(gl.bfloat16), y_d, y_sh, (tile - pn * mt) * BM, n0, part, 0, BM)
    tma.store_wait(0)  # shared memory must outlive what is read from it
    finish()


@gluon.jit(do_not_specialize=["M", "U", "steps", "sgs", "mt", "D", "e1", "e2", "R8", "H", "KS", "lines", "wanted"])
def wgmma_kernel(
    x_d,
    w_d,
    s_d,
    b_d,
    xa_d,
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
    next_ptr,
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
    lines,
    wanted,
    BM: gl.constexpr,
    P: gl.constexpr,
    S: gl.constexpr,
    BIAS: gl.constexpr,
    RANK: gl.constexpr,
    TASKS: gl.constexpr,
    PDL: gl.constexpr,
    PERMUTE: gl.constexpr,
    NATURAL: gl.constexpr,
    FETCH: gl.constexpr,
    REGS: gl.constexpr,
    RING_REGS: gl.constexpr,
):
    """y[m, n]; K a multiple of 32, steps = ceil(K / 256), mt = ceil(M / BM), tiles = ceil(N / 64 P) * mt.

    Of the last step, the copy engine fills columns beyond K with zeros: words, scales, and x. It counts their bytes like others.

    The H programs that start first have no tiles, only tasks of x A^T.  The G others compute D whole tiles each; the steps of the tiles
    that then remain, U in all, are cut into G ranges.  TASKS: x A^T is computed here, in KS slices of K; else xa_d holds it already.
    x_d bfloat16 (M, K), box (BM, 128); w_d int32 (N, K/8), box (64, 32 or 16); s_d int16 (N, K/32), box (64, 8);
    y_d bfloat16 (M, N), box (16, 64); b_d bfloat16 (N, RANK), box (64, 32); xa_d bfloat16 (mt * BM, shards * RANK = 8 R8), x A^T, box (BM, 32).
    """
    B: gl.constexpr = barriers_of(S)
    gl.static_assert(P < 4 or not PERMUTE, "four groups leave no registers to put x in order")
    gl.static_assert(B == 1 or not PERMUTE, "x is put in order a unit at a time, not by halves")
    w_sh = gl.allocate_shared_memory(gl.int32, [S * B * P, R, 32 // B], w_d.layout)
    s_sh = gl.allocate_shared_memory(gl.int16, [S * P, R, 8], s_d.layout)
    x_sh = gl.allocate_shared_memory(gl.bfloat16, [2 * S, BM, 128], x_d.layout)
    y_sh = gl.allocate_shared_memory(gl.bfloat16, [2 * P, 16, R], y_d.layout)
    full = gl.allocate_shared_memory(
        gl.int64, [S * B, 1], mbarrier.MBarrierLayout()
    )  # words have arrived, and x is in order
    empty = gl.allocate_shared_memory(gl.int64, [S * B, 1], mbarrier.MBarrierLayout())  # every group is done
    # A barrier that nobody waits for must not be made: Triton gives its memory to a buffer, and a GPU that changes between processes
    # writes barriers back when it returns (PTX: mbarrier.inval before the memory is used for anything else).
    raw = full
    if PERMUTE:
        raw = gl.allocate_shared_memory(gl.int64, [S * B, 1], mbarrier.MBarrierLayout())  # x as it is has arrived
    for i in gl.static_range(S * B):
        if PERMUTE:
            mbarrier.init(raw.index(i), 1)
        mbarrier.init(full.index(i), 2 if i % B else 3)
        mbarrier.init(empty.index(i), P)
    ring = (w_sh, s_sh, x_sh, raw, full, empty)
    lora = ring
    if RANK > 0:
        b_sh = gl.allocate_shared_memory(gl.bfloat16, [P, R, 32], b_d.layout)
        xa_sh = gl.allocate_shared_memory(gl.bfloat16, [BM, 32], xa_d.layout)
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
    maps = (x_d, w_d, s_d, b_d, xa_d)
    work = (pid, G, u0, u1, steps, U, mt, gl.where(pid < G, D, 0))
    out = (y_d, y_sh, gs_ptr, bias_ptr, ws_ptr, cnt_ptr, N, sgs)
    RS = R8 * 8
    shards = (e1, e2, flag_ptr, done_ptr, M, RS, mt)
    adapter = (x_ptr, a_ptr, slice_ptr, xa_ptr, flag_ptr, taken_ptr, count_ptr, M, K, sxm, RS)
    following = (next_ptr, lines, wanted)
    ROUND: gl.constexpr = 1 + (RING_REGS > 128)
    if P == 2 and PERMUTE:
        gl.warp_specialize(
            [
                (consume, (ring, work, out, lora, shards, 0, P, BM, S, BIAS, RANK, NATURAL)),
                (consume, (ring, work, out, lora, shards, 1, P, BM, S, BIAS, RANK, NATURAL)),
                (permute, (ring, work, BM, S)),
                (produce, (maps, ring, work, lora, shards, P, BM, S, RANK, TASKS, PDL, PERMUTE, FETCH, following)),
                (idle, ()),
                (spare, (adapter, sums_sh, KS, BM, ROUND, TASKS, PDL)),
            ],
            [4, 4, 1, 1, 2],
            [REGS, REGS, RING_REGS, RING_REGS, RING_REGS],
        )
    elif P == 2:
        gl.warp_specialize(
            [
                (consume, (ring, work, out, lora, shards, 0, P, BM, S, BIAS, RANK, NATURAL)),
                (consume, (ring, work, out, lora, shards, 1, P, BM, S, BIAS, RANK, NATURAL)),
                (produce, (maps, ring, work, lora, shards, P, BM, S, RANK, TASKS, PDL, PERMUTE, FETCH, following)),
                (idle, ()),
                (spare, (adapter, sums_sh, KS, BM, ROUND, TASKS, PDL)),
            ],
            [4, 1, 1, 2],
            [REGS, RING_REGS, RING_REGS, RING_REGS],
        )
    elif P == 4:
        gl.warp_specialize(
            [
                (consume, (ring, work, out, lora, shards, 0, P, BM, S, BIAS, RANK, NATURAL)),
                (consume, (ring, work, out, lora, shards, 1, P, BM, S, BIAS, RANK, NATURAL)),
                (consume, (ring, work, out, lora, shards, 2, P, BM, S, BIAS, RANK, NATURAL)),
                (consume, (ring, work, out, lora, shards, 3, P, BM, S, BIAS, RANK, NATURAL)),
                (produce, (maps, ring, work, lora, shards, P, BM, S, RANK, TASKS, PDL, PERMUTE, FETCH, following)),
                (idle, ()),
                (spare, (adapter, sums_sh, KS, BM, ROUND, TASKS, PDL)),
            ],
            [4, 4, 4, 1, 1, 2],
            [REGS, REGS, REGS, RING_REGS, RING_REGS, RING_REGS],
        )
    elif PERMUTE:
        gl.warp_specialize(
            [
                (consume, (ring, work, out, lora, shards, 0, P, BM, S, BIAS, RANK, NATURAL)),
                (consume, (ring, work, out, lora, shards, 1, P, BM, S, BIAS, RANK, NATURAL)),
                (consume, (ring, work, out, lora, shards, 2, P, BM, S, BIAS, RANK, NATURAL)),
                (permute, (ring, work, BM, S)),
                (produce, (maps, ring, work, lora, shards, P, BM, S, RANK, TASKS, PDL, PERMUTE, FETCH, following)),
                (idle, ()),
                (spare, (adapter, sums_sh, KS, BM, ROUND, TASKS, PDL)),
            ],
            [4, 4, 4, 1, 1, 2],
            [REGS, REGS, REGS, RING_REGS, RING_REGS, RING_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (ring, work, out, lora, shards, 0, P, BM, S, BIAS, RANK, NATURAL)),
                (consume, (ring, work, out, lora, shards, 1, P, BM, S, BIAS, RANK, NATURAL)),
                (consume, (ring, work, out, lora, shards, 2, P, BM, S, BIAS, RANK, NATURAL)),
                (produce, (maps, ring, work, lora, shards, P, BM, S, RANK, TASKS, PDL, PERMUTE, FETCH, following)),
                (idle, ()),
                (spare, (adapter, sums_sh, KS, BM, ROUND, TASKS, PDL)),
            ],
            [4, 4, 1, 1, 2],
            [REGS, REGS, RING_REGS, RING_REGS, RING_REGS],
        )
