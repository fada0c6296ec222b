"""A Gluon kernel for 17 and more tokens on every GPU from sm_80 on: `mma.sync` and asynchronous copies, nothing that Hopper added.

A program computes a tile of BN = 16 R WN rows and BM tokens over one slice of K, 128 columns at a time.  Words and scales go from global
memory straight into registers, those of the next columns while these are decoded.  x goes through a ring of NS stages in shared memory,
filled by `cp.async`.  WN warps split the rows, WT warps the tokens; a warp of one tile half decodes what the warp of the other half
decodes too, so that 32 rows of weights meet 64 tokens in its registers: that many matrix instructions stand beside a decode, and x is
read from shared memory half as often as 16 rows would need it.

Shape suffixes as in portable.py.  A decoded weight carries a factor 2^-8, put right in a tile's last step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .gluon_names import barrier, copy_to_shared
from .hopper import decode_scales, decode_word, halves, load_words


@gluon.constexpr_function
def warps_along(WN, WT, token_dim, row_dim):
    """Bases of the warps: WT along the tokens, then WN along the rows; a dimension that a tensor lacks is None."""
    bases = []
    t = 1
    while t < WT:
        bases.append([0, 0])
        if token_dim is not None:
            bases[-1][token_dim] = 8 * t
        t *= 2
    n = 1
    while n < WN:
        bases.append([0, 0])
        if row_dim is not None:
            bases[-1][row_dim] = 16 * n
        n *= 2
    return bases


@gluon.constexpr_function
def w_layout(WN, WT):
    """[rows, 16 words]: a lane holds 4 words of two rows, 8 lanes hold 8 rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=warps_along(WN, WT, None, 0),
        block_bases=[],
        shape=[16 * WN, 16],
    )


@gluon.constexpr_function
def s_layout(WN, WT):
    """[rows, 4 pairs of scales]."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=warps_along(WN, WT, None, 0),
        block_bases=[],
        shape=[16 * WN, 4],
    )


@gluon.constexpr_function
def x_layout(WN, WT, BM):
    """[tokens, 128 columns], natural order: a lane holds 32 neighbouring columns of every eighth token of its warp."""
    regs = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]]
    m = 8 * WT
    while m < BM:
        regs.append([m, 0])
        m *= 2
    return gl.DistributedLinearLayout(
        reg_bases=regs,
        lane_bases=[[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        warp_bases=warps_along(WN, WT, 0, None),
        block_bases=[],
        shape=[BM, 128],
    )


@gluon.constexpr_function
def x_shared(BM):
    """Where a stage's 16 bytes at column 32 t + 8 j of token m lie: place (t0, t1 ^ j1, m0 ^ j0) of a line of 128 bytes.

    Eight lanes that read (all t, two tokens, one j) and eight that copy (all j, two t, one token) meet eight different places: no bank
    is asked twice.
    """
    bases = [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [1, 0], [1, 8], [0, 80]]
    m = 2
    while m < BM:
        bases.append([m, 0])
        m *= 2
    return gl.SharedLinearLayout(bases)


@gluon.jit
def columns_of_lanes(x, BM: gl.constexpr):
    """bfloat16 [BM, 128], columns 32 t + 8 j + i -> four [32, BM] of one j each, in the order of the decoded words: i and i + 4 are a pair."""
    x = x.reshape([BM, 4, 2, 2, 2, 2, 2]).permute([0, 1, 5, 6, 4, 2, 3])  # m, t, i1, i0, pp, j1, j0
    even, odd = gl.split(x)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return (
        x0.reshape([BM, 32]).permute([1, 0]),
        x1.reshape([BM, 32]).permute([1, 0]),
        x2.reshape([BM, 32]).permute([1, 0]),
        x3.reshape([BM, 32]).permute([1, 0]),
    )


@gluon.jit
def words_of_lanes(q, ROWS: gl.constexpr):
    """int32 [ROWS, 16], words 4 t + j -> four [ROWS, 4] of one j each; no instruction."""
    even, odd = gl.split(q.reshape([ROWS, 4, 2, 2]))
    q0, q2 = gl.split(even)
    q1, q3 = gl.split(odd)
    return q0, q1, q2, q3


@gluon.jit
def decoded(q, s, ROWS: gl.constexpr, AL: gl.constexpr):
    """One word per lane and row, and its scale -> bfloat16 [ROWS, 32], the left operand."""
    p0, p1, p2, p3 = decode_word(q, gl.convert_layout(s, q.type.layout, assert_trivial=True))
    P = halves(gl.join(gl.join(p0, p1), gl.join(p2, p3)))  # n, t, i0, i1, pp
    P = P.permute([0, 1, 3, 2, 4]).reshape([ROWS, 32])
    return gl.convert_layout(P, AL, assert_trivial=True)


@gluon.jit(do_not_specialize=["M", "sxa", "sgs", "steps", "per_split", "splits", "e1", "e2"])
def mma_kernel(
    x_ptr,
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
    sxm,
    swn,
    ssn,
    sym,
    sxa,
    sgs,
    e1,
    e2,
    steps,
    per_split,
    splits,
    BM: gl.constexpr,
    R: gl.constexpr,
    WN: gl.constexpr,
    WT: gl.constexpr,
    NS: gl.constexpr,
    SPLIT: gl.constexpr,
    BIAS: gl.constexpr,
    RANK: gl.constexpr,
    PDL: gl.constexpr,
):
    """y[m, n] = sum_k x[m, k] W[n, k] [+ bias[n]] [+ sum_r xa[m, shard(n) RANK + r] b[n, r]]; K = 128 steps.

    w_ptr int32 (N, K/8), s_ptr int16 (N, K/32), xa_ptr bfloat16 (M, shards RANK).  Programs: tiles, the tokens' fastest, times slices of
    K of `per_split` steps.  PDL, from sm_90 on: the first words are asked for before the kernel before has ended.  Every program of a sliced tile parks its float32 tile in ws_ptr; the last one to arrive adds them up in the
    order of K and sets the counter back.
    """
    NW: gl.constexpr = WN * WT
    GROUP: gl.constexpr = 16 * WN
    BN: gl.constexpr = GROUP * R
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WN, WT], instr_shape=[16, 8])
    AL: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    BL: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    WL: gl.constexpr = w_layout(WN, WT)
    SL: gl.constexpr = s_layout(WN, WT)
    XL: gl.constexpr = x_layout(WN, WT, BM)
    YL: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [WN // 4, NW * 4 // WN], [0, 1])
    CL: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NW, 1], [1, 0])
    pid = gl.program_id(0)
    sk = gl.program_id(1)
    tokens = (M + BM - 1) // BM
    pn = pid // tokens
    pm = pid % tokens
    it0 = sk * per_split
    it1 = gl.minimum(it0 + per_split, steps)
    # rows and tokens beyond the last are the last one again, and are not stored
    n_w = gl.arange(0, GROUP, layout=gl.SliceLayout(1, WL))
    k_w = gl.arange(0, 16, layout=gl.SliceLayout(0, WL))
    n_s = gl.arange(0, GROUP, layout=gl.SliceLayout(1, SL))
    k_s = gl.arange(0, 4, layout=gl.SliceLayout(0, SL))
    m_x = gl.minimum(pm * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, CL)), M - 1)
    k_x = gl.arange(0, 128, layout=gl.SliceLayout(0, CL))
    wp = ()
    sp = ()
    acc = ()
    for g in gl.static_range(R):
        rows_w = gl.minimum(pn * BN + g * GROUP + n_w, N - 1).to(gl.int64)
        rows_s = gl.minimum(pn * BN + g * GROUP + n_s, N - 1).to(gl.int64)
        wp = wp + (w_ptr + (rows_w[:, None] * swn + (it0 * 16 + k_w)[None, :]),)  # noqa: RUF005  Gluon knows no starred expressions
        sp = sp + (s_ptr + (rows_s[:, None] * ssn + (it0 * 4 + k_s)[None, :]),)  # noqa: RUF005
        acc = acc + (gl.zeros([GROUP, BM], gl.float32, MMA),)  # noqa: RUF005
    xp = x_ptr + (m_x.to(gl.int64)[:, None] * sxm + (it0 * 128 + k_x)[None, :])
    ring = gl.allocate_shared_memory(gl.bfloat16, [NS, BM, 128], x_shared(BM))
    q = ()
    s = ()
    if PDL:
        gdc_launch_dependents()
    for g in gl.static_range(R):
        q = q + (load_words(wp[g]),)  # noqa: RUF005
        s = s + (gl.load(sp[g]),)  # noqa: RUF005
    if PDL:
        gdc_wait()
    for i in gl.static_range(NS - 1):
        if it0 + i < it1:
            copy_to_shared(ring.index(i), xp + i * 128)
        async_copy.commit_group()
    stage = 0
    for it in range(it0, it1):
        async_copy.wait_group(NS - 2)
        barrier()  # what all warps copied is there, and all have read the stage that is filled next
        ahead = it + NS - 1
        if ahead < it1:
            filled = gl.where(stage == 0, NS - 1, stage - 1)
            copy_to_shared(ring.index(filled), xp + (ahead - it0) * 128)
        async_copy.commit_group()
        step = gl.minimum(it + 1, it1 - 1) - it0  # the very last unit is simply loaded twice
        q_next = ()
        s_next = ()
        for g in gl.static_range(R):
            q_next = q_next + (load_words(wp[g] + step * 16),)  # noqa: RUF005
            s_next = s_next + (gl.load(sp[g] + step * 4),)  # noqa: RUF005
        x0, x1, x2, x3 = columns_of_lanes(ring.index(stage).load(XL), BM)
        x0 = gl.convert_layout(x0, BL, assert_trivial=True)
        x1 = gl.convert_layout(x1, BL, assert_trivial=True)
        x2 = gl.convert_layout(x2, BL, assert_trivial=True)
        x3 = gl.convert_layout(x3, BL, assert_trivial=True)
        sums = ()
        for g in gl.static_range(R):
            q0, q1, q2, q3 = words_of_lanes(q[g], GROUP)
            s0, s1 = decode_scales(s[g])
            y = mma_v2(decoded(q0, s0, GROUP, AL), x0, acc[g])
            y = mma_v2(decoded(q1, s0, GROUP, AL), x1, y)
            y = mma_v2(decoded(q2, s1, GROUP, AL), x2, y)
            y = mma_v2(decoded(q3, s1, GROUP, AL), x3, y)
            sums = sums + (y,)  # noqa: RUF005
        acc = sums
        q = q_next
        s = s_next
        stage = gl.where(stage == NS - 1, 0, stage + 1)
    async_copy.wait_group(0)
    n_y = gl.arange(0, GROUP, layout=gl.SliceLayout(1, MMA))
    m_y = gl.arange(0, BM, layout=gl.SliceLayout(0, MMA))
    base = ws_ptr + (pid * splits).to(gl.int64) * (BN * BM)
    off = n_y[:, None] * BM + m_y[None, :]
    last = True
    if SPLIT:
        for g in gl.static_range(R):
            gl.store(base + (sk * (BN * BM) + g * (GROUP * BM) + off), acc[g])
        barrier()
        last = gl.atomic_add(cnt_ptr + pid, 1, sem="acq_rel") == splits - 1
    if last:
        for g in gl.static_range(R):
            y = acc[g]
            if SPLIT:
                y = gl.zeros([GROUP, BM], gl.float32, MMA)
                for piece in range(splits):
                    y += gl.load(base + (piece * (BN * BM) + g * (GROUP * BM) + off), cache_modifier=".cg")
            row0 = pn * BN + g * GROUP
            n_N = gl.minimum(row0 + n_y, N - 1)
            gs = gl.load(gs_ptr + n_N * sgs)
            y = y * gl.div_rn(gs * 0.0 + 256.0, gs)[:, None]
            if BIAS:
                y += gl.load(bias_ptr + n_N).to(gl.float32)[:, None]
            if RANK > 0:
                y = add_adapter(y, xa_ptr, b_ptr, row0, pm * BM, M, N, sxa, e1, e2, GROUP, BM, RANK, MMA)
            out = gl.convert_layout(y.to(gl.bfloat16), YL)
            n_o = row0 + gl.arange(0, GROUP, layout=gl.SliceLayout(1, YL))
            m_o = pm * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, YL))
            where = m_o.to(gl.int64)[None, :] * sym + n_o[:, None]
            gl.store(y_ptr + where, out, mask=(m_o < M)[None, :] & (n_o < N)[:, None])
        if SPLIT:
            gl.store(cnt_ptr + pid, 0)


@gluon.jit
def add_adapter(
    y,
    xa_ptr,
    b_ptr,
    row0,
    m0,
    M,
    N,
    sxa,
    e1,
    e2,
    GROUP: gl.constexpr,
    BM: gl.constexpr,
    RANK: gl.constexpr,
    MMA: gl.constexpr,
):
    """y [GROUP, BM] + b xa^T, 32 ranks at a time."""
    AL: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    BL: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    shard = (row0 >= e1).to(gl.int32) + (row0 >= e2).to(gl.int32)
    n_b = gl.minimum(row0 + gl.arange(0, GROUP, layout=gl.SliceLayout(1, AL)), N - 1).to(gl.int64)
    r_b = gl.arange(0, 32, layout=gl.SliceLayout(0, AL))
    m_a = gl.minimum(m0 + gl.arange(0, BM, layout=gl.SliceLayout(0, BL)), M - 1).to(gl.int64)
    r_a = gl.arange(0, 32, layout=gl.SliceLayout(1, BL))
    for r0 in range(0, RANK, 32):
        b = gl.load(b_ptr + (n_b[:, None] * RANK + (r0 + r_b)[None, :]), mask=(r0 + r_b < RANK)[None, :], other=0.0)
        at = m_a[None, :] * sxa + (shard * RANK + r0 + r_a)[:, None]
        xa = gl.load(xa_ptr + at, mask=(r0 + r_a < RANK)[:, None], other=0.0)
        y = mma_v2(b, xa, y)
    return y
