"""Gluon kernels for Hopper (sm_90): what the portable kernel's layout idea becomes when layouts and pipelines are written by hand.

`skinny_kernel` (up to 16 tokens): weights go from global memory straight into the registers that feed `mma.sync`; no shared memory,
no barrier in the loop.  The warps of a program share its rows and split K; their sums meet once per tile.  The next unit of weights
and x is always in flight while the current one is decoded, also across tiles.  `hopper_wgmma.py` has the kernel for more tokens.

Both cut the work, tiles x steps along K, into one equal contiguous range of units per program.  A tile that several programs share
is added up by the program that begins it, always in the same order: results do not depend on timing.

Shape suffixes as in portable.py.  A decoded weight carries a factor 2^-8, put right in a tile's last step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .gluon_names import barrier
from .portable import DECODE_WORD

# Blackwell's own conversion of a byte, two neighbouring codes
CONVERT_WORD = gl.constexpr("""{
    .reg .b8 b0, b1, b2, b3; .reg .b32 s2, nz; mov.b32 nz, 0x80008000;
    mov.b32 s2, {$5, $5};
    mov.b32 {b0, b1, b2, b3}, $4;
    cvt.rn.bf16x2.e2m1x2 $0, b0; fma.rn.bf16x2 $0, $0, s2, nz;
    cvt.rn.bf16x2.e2m1x2 $1, b1; fma.rn.bf16x2 $1, $1, s2, nz;
    cvt.rn.bf16x2.e2m1x2 $2, b2; fma.rn.bf16x2 $2, $2, s2, nz;
    cvt.rn.bf16x2.e2m1x2 $3, b3; fma.rn.bf16x2 $3, $3, s2, nz;
}""")
# what a scale is multiplied by for either, as two bfloat16: 2^118 for the bits of a code, 2^-8 for its value
FOR_BITS, FOR_VALUES = gl.constexpr("0x7a807a80"), gl.constexpr("0x3b803b80")


@gluon.jit
def decode_word(q, s, ASM: gl.constexpr = DECODE_WORD):
    """int32 words of 8 codes, bfloat16 scale * 2^118 (* 2^-8 for CONVERT_WORD) -> 4 int32, the bfloat16 pairs (n_i, n_{i+4}), or of
    neighbours (n_2i, n_{2i+1}), * scale * 2^-8."""
    return gl.inline_asm_elementwise(
        asm=ASM,
        constraints="=&r,=&r,=&r,=&r,r,h",
        args=[q, s],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def scales_asm(factor):
    return """{
        .reg .b32 t, c0, c1, nz, w; mov.b32 nz, 0x80008000;
        mov.b32 c0, 0x7b807b80;
        mov.b32 c1, FACTOR;
        cvt.u32.u16 w, $2;
        prmt.b32 t, w, 0, 0x4140; shl.b32 t, t, 4; fma.rn.bf16x2 t, t, c0, nz; fma.rn.bf16x2 t, t, c1, nz;
        mov.b32 {$0, $1}, t;
        }""".replace("FACTOR", factor)


@gluon.jit
def decode_scales(s, FACTOR: gl.constexpr = FOR_BITS):
    """int16 = two e4m3 bytes (not negative) -> two bfloat16, scale * FACTOR; subnormal and zero scales included."""
    return gl.inline_asm_elementwise(
        asm=scales_asm(FACTOR),
        constraints="=h,=h,h",
        args=[s],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def halves(p):
    """int32 (two bfloat16) [...] -> bfloat16 [..., 2]; no instruction."""
    lo = (p & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
    hi = ((p >> 16) & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(lo, hi)


@gluon.jit
def spread_scales(s, q, FACTOR: gl.constexpr):
    """int16 [..., 4 lanes] scale pairs -> bfloat16 [..., 4 lanes, 2 groups, 2 words], one scale per word of 8 codes."""
    s0, s1 = decode_scales(s, FACTOR)
    sc = gl.join(s0, s1)
    return gl.convert_layout(gl.join(sc, sc), q.type.layout, assert_trivial=True)


@gluon.jit
def load_words(ptr):
    """Four words per thread.  The second-level cache fetches 256 bytes of the row, which other warps or the next unit want, and lets go first.

    Pure assembly, because gl.load cannot ask for the 256 bytes.
    """
    return gl.inline_asm_elementwise(
        asm="""{
        .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;
        ld.global.L1::evict_first.L2::cache_hint.L2::256B.v4.b32 {$0, $1, $2, $3}, [$4], policy;
        }""",
        constraints="=r,=r,=r,=r,l,l,l,l",
        args=[ptr.to(gl.int64)],
        dtype=gl.int32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def load_scales(ptr):
    """Two scales per thread, and 128 bytes of the row to the second-level cache."""
    return gl.inline_asm_elementwise(
        asm="ld.global.L2::128B.b16 $0, [$1];",
        constraints="=h,l",
        args=[ptr.to(gl.int64)],
        dtype=gl.int16,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def finish():
    """The threads end here: ptxas serializes wgmma where warps could come back to fewer registers, as Triton's could."""
    gl.inline_asm_elementwise("exit; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


# --- the end of a tile ------------------------------------------------------------------------------------------------------------


@gluon.jit
def opaque_zero():
    """A zero the compiler cannot see through: keeps the address arithmetic of the epilogue out of the registers of the main loop."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def await_asm(n):
    """While one of n neighbours has the bits of an empty cell, load them again."""
    out, found = [f"${i}" for i in range(n)], [f"${n + i}" for i in range(n)]
    kind = {1: "", 2: ".v2", 4: ".v4"}[n]
    lines = [".reg .pred p; .reg .b64 a;", f"mad.wide.s32 a, ${2 * n}, 4, ${3 * n};"]
    lines += [f"mov.b32 {o}, {f};" for o, f in zip(out, found, strict=True)]
    lines += [f"AGAIN: setp.eq.s32 p, {out[0]}, -1;"] + [f"setp.eq.or.s32 p, {o}, -1, p;" for o in out[1:]]
    lines += ["@!p bra DONE;", f"ld.volatile.global{kind}.b32 {{{', '.join(out)}}}, [a];", "bra AGAIN; DONE:"]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def await_constraints(n):
    return ",".join(["=&r"] * n + ["r"] * (2 * n) + ["l"] * n)


@gluon.jit
def await_words(v, off, ptr, PACK: gl.constexpr):
    """v = ptr[off], but wait for the words that are still empty (all ones); PACK of a thread's words are neighbours."""
    return gl.inline_asm_elementwise(
        asm=await_asm(PACK),
        constraints=await_constraints(PACK),
        args=[v, off, (ptr + off * 0).to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=PACK,
    )


@gluon.jit
def gather_pieces(
    y, off, first, steps, U, ws_ptr, SIZE: gl.constexpr, PACK: gl.constexpr, BATCH: gl.constexpr, SHARED: gl.constexpr
):
    """Add to the piece of a tile (which begins at unit `first`) of the program that begins it those of the programs that follow.

    Everyone else leaves its piece in ws_ptr as float32 bits; all ones (a NaN no arithmetic gives) are an empty cell, and what was read
    is emptied again: one trip through the second-level cache, where a counter takes three (fence, atomic, read).  A program waits for
    later ones, so all must be resident; launch_skinny limits the registers accordingly.  A launch that was aborted leaves cells behind.
    """
    G = gl.num_programs(0)
    p0 = ((first + 1) * G - 1) // U
    p1 = ((first + steps) * G - 1) // U
    for p in range(p0 + 1, p1 + 1, BATCH):  # a batch of loads is on its way at once
        pieces = ()
        for i in gl.static_range(BATCH):
            piece = gl.load(ws_ptr + (p + i) * SIZE + off, mask=p + i <= p1, other=0, cache_modifier=".cg")
            pieces = pieces + (piece,)  # noqa: RUF005  Gluon knows no starred expressions
        for i in gl.static_range(BATCH):
            y += await_words(pieces[i], off, ws_ptr + (p + i) * SIZE, PACK).to(gl.float32, bitcast=True)
        if SHARED:  # several threads read the same cell
            barrier()
        for i in gl.static_range(BATCH):
            gl.store(ws_ptr + (p + i) * SIZE + off, off * 0 - 1, mask=p + i <= p1)
    return y


# --- up to 16 tokens --------------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def warp_bases(WK, WN, rank, row_dim):
    """Warps: WN groups of 16 rows first, then WK chunks of 128 columns (dimension 0)."""
    bases = []
    n = 1
    while n < WN:
        bases.append([0] * rank)
        if row_dim is not None:
            bases[-1][row_dim] = 16 * n
        n *= 2
    k = 1
    while k < WK:
        bases.append([k] + [0] * (rank - 1))
        k *= 2
    return bases


@gluon.constexpr_function
def skinny_w_layout(WK, WN):
    """[WK chunks, rows, 16 words]: a lane holds 4 words of two rows, 8 lanes hold 8 rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 8, 0]],
        lane_bases=[[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=warp_bases(WK, WN, 3, 1),
        block_bases=[],
        shape=[WK, 16 * WN, 16],
    )


@gluon.constexpr_function
def skinny_s_layout(WK, WN):
    """[WK chunks, rows, 4 pairs of scales]."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 8, 0]],
        lane_bases=[[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=warp_bases(WK, WN, 3, 1),
        block_bases=[],
        shape=[WK, 16 * WN, 4],
    )


@gluon.constexpr_function
def skinny_x_layout(WK, WN, BM):
    """[WK chunks, tokens, 4 lanes, 32 columns], natural order."""
    regs = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 0, 16]]
    m = 8
    while m < BM:
        regs.append([0, m, 0, 0])
        m *= 2
    return gl.DistributedLinearLayout(
        reg_bases=regs,
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        warp_bases=warp_bases(WK, WN, 4, None),
        block_bases=[],
        shape=[WK, BM, 4, 32],
    )


@gluon.jit
def load_x(ptr, WK: gl.constexpr, BM: gl.constexpr):
    """int32 [WK, BM, 4 lanes, 16], two neighbouring columns a word; no instruction but the loads."""
    lo, hi = gl.split(gl.load(ptr, eviction_policy="evict_last").reshape([WK, BM, 4, 16, 2]))
    return (lo.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) | (hi.to(gl.int16, bitcast=True).to(gl.int32) << 16)


@gluon.jit
def pair_up(x, WK: gl.constexpr, BM: gl.constexpr, CONVERT: gl.constexpr):
    """load_x's words -> bfloat16 [WK, 128, BM], columns in the order of the decoded weights: i and i + 4 are a pair, or neighbours."""
    if CONVERT:
        pairs = x.reshape([WK, BM, 4, 4, 2, 2])
    else:
        lo, hi = gl.split(x.reshape([WK, BM, 4, 4, 2, 2]).permute([0, 1, 2, 3, 5, 4]))
        even, odd = gl.inline_asm_elementwise(
            asm="prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
            constraints="=&r,=r,r,r",
            args=[lo, hi],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
        pairs = gl.join(even, odd)
    return halves(pairs).permute([0, 1, 3, 2, 4, 5, 6]).reshape([WK, BM, 128]).permute([0, 2, 1])


@gluon.jit
def stack(parts, R: gl.constexpr):
    """A tuple of R tensors [WK, rows, tokens] -> [WK, R rows, tokens]."""
    WK: gl.constexpr = parts[0].shape[0]
    ROWS: gl.constexpr = R * parts[0].shape[1]
    BM: gl.constexpr = parts[0].shape[2]
    if R == 1:
        return parts[0]
    elif R == 2:
        return gl.join(parts[0], parts[1]).permute([0, 3, 1, 2]).reshape([WK, ROWS, BM])
    else:
        both = gl.join(gl.join(parts[0], parts[2]), gl.join(parts[1], parts[3]))
        return both.permute([0, 3, 4, 1, 2]).reshape([WK, ROWS, BM])


@gluon.constexpr_function
def sum_layout(WK, WN, values, rows):
    """[WK chunks, rows, tokens] for adding up the chunks; up to four of the `values` of a thread are neighbouring rows."""
    v = max(1, min(4, values))
    warps = max(1, min(WK * WN, rows // (8 * v)))
    return gl.BlockedLayout([WK, v, 1], [1, 8, 4], [1, warps, WK * WN // warps], [0, 1, 2])


LORA_WORDS = gl.constexpr(384)  # a token's x A^T for three shards of rank 256, two ranks per word
LORA_CELLS = gl.constexpr(16 * 384)  # one of its two buffers


@gluon.jit
def draw_ticket(now, ticket_ptr, NW: gl.constexpr):
    """If `now`, thread 0 counts this program in; the number arrives while other work is done (`inc`: an `add` would be waited for)."""
    i = gl.arange(0, NW * 32, layout=gl.BlockedLayout([1], [32], [NW], [0]))
    return gl.inline_asm_elementwise(
        asm="""{
        .reg .pred p; setp.eq.s32 p, $1, 0; mov.b32 $0, 0;
        @p atom.relaxed.gpu.global.inc.u32 $0, [$2], 0xFFFFFFFE;
        }""",
        constraints="=&r,r,l",
        args=[gl.where(now, i, 1), (ticket_ptr + i * 0).to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def settle_ticket(ticket, ticket_ptr, NW: gl.constexpr):
    """The last program that was counted in sets the count (low 16 bits) to zero and counts the launch (the bits above)."""
    i = gl.arange(0, NW * 32, layout=gl.BlockedLayout([1], [32], [NW], [0]))
    G = gl.num_programs(0)
    gl.inline_asm_elementwise(
        asm="""{
        .reg .pred p; .reg .b32 c; and.b32 c, $1, 0xFFFF; setp.eq.s32 p, $2, 0; setp.eq.and.s32 p, c, $3, p;
        @p red.relaxed.gpu.global.add.u32 [$5], $4; mov.b32 $0, 0;
        }""",
        constraints="=&r,r,r,r,r,l",
        args=[ticket, i, G - 1, 65536 - G, (ticket_ptr + i * 0).to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def lora_layout(ROWS, NW):
    warps = min(NW, ROWS // 16)
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, NW // warps], instr_shape=[16, 8])


@gluon.jit
def load_lora_up(b_ptr, row0, r0, wanted, RANK: gl.constexpr, ROWS: gl.constexpr, NW: gl.constexpr):
    """32 columns of B, as the left operand of the matrix instruction."""
    AL: gl.constexpr = gl.DotOperandLayout(0, lora_layout(ROWS, NW), 4)
    n = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, AL))
    r = r0 + gl.arange(0, 32, layout=gl.SliceLayout(0, AL))
    return gl.load(b_ptr + (n[:, None] * RANK + r[None, :]), mask=(r < RANK)[None, :] & wanted, other=0.0)


@gluon.jit
def load_cells(cells_ptr, z, r0, wanted, RANK: gl.constexpr, BM: gl.constexpr, NW: gl.constexpr):
    """32 ranks of x A^T, two a word, perhaps not there yet; and where they are.  A program reads each cell once."""
    L: gl.constexpr = gl.BlockedLayout([2, 1], [8, 4], [1, NW], [0, 1])
    r = r0 // 2 + gl.arange(0, 16, layout=gl.SliceLayout(1, L))
    m = gl.arange(0, BM, layout=gl.SliceLayout(0, L)) + z
    off = (m * LORA_WORDS)[None, :] + r[:, None]
    return gl.load(cells_ptr + off, mask=(2 * r < RANK)[:, None] & wanted, other=0, cache_modifier=".cg"), off


@gluon.jit
def skinny_lora_down(
    task,
    buffer,
    x_ptr,
    a_ptr,
    xa_ptr,
    slice_ptr,
    cnt_ptr,
    M,
    sxm,
    RS,
    tasks,
    K: gl.constexpr,
    BM: gl.constexpr,
    NW: gl.constexpr,
    SLICE: gl.constexpr,
):
    """x A^T for 16 rows of A over one slice of K; whoever is the last of a row tile adds up the slices, in order, and publishes.

    The warps split the slice; a and x are read in natural order, 16 bytes a lane.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[NW, 1, 1], instr_shape=[1, 16, 8])
    AL: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    BL: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    OL: gl.constexpr = gl.BlockedLayout([NW, 1, 1], [1, 8, 4], [1, NW, 1], [0, 1, 2])
    YL: gl.constexpr = gl.BlockedLayout([2, 1], [8, 4], [1, NW], [0, 1])
    KS: gl.constexpr = (K + SLICE - 1) // SLICE
    rt = task // KS
    ks = task % KS
    k0 = ks * SLICE
    w_a = gl.arange(0, NW, layout=gl.SliceLayout(1, gl.SliceLayout(2, AL)))[:, None, None]
    r_a = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, AL)))[None, :, None]
    k_a = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, AL)))[None, None, :]
    w_b = gl.arange(0, NW, layout=gl.SliceLayout(1, gl.SliceLayout(2, BL)))[:, None, None]
    k_b = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, BL)))[None, :, None]
    m_b = gl.arange(0, BM, layout=gl.SliceLayout(0, gl.SliceLayout(1, BL)))[None, None, :]
    rows = gl.minimum(rt * 16 + r_a, RS - 1)
    ms = gl.minimum(m_b, M - 1)
    acc = gl.zeros([NW, 16, BM], gl.float32, MMA)
    for c in gl.static_range(0, SLICE, 128 * NW):
        ka = k0 + c + w_a * 128 + k_a
        kb = k0 + c + w_b * 128 + k_b
        a = gl.load(a_ptr + (rows * K + ka), mask=ka < K, other=0.0)
        x = gl.load(x_ptr + (ms * sxm + kb), mask=kb < K, other=0.0)
        acc = mma_v2(a, x, acc)
    # the buffer of the launch before this one is empty again when the next launch fills it
    e = gl.arange(0, NW * 128, layout=gl.BlockedLayout([4], [32], [NW], [0]))
    for c in range(task * (NW * 128), LORA_CELLS, tasks * (NW * 128)):
        gl.store(xa_ptr + ((1 - buffer) * LORA_CELLS + c + e), e * 0 - 1)
    y = gl.convert_layout(gl.sum(gl.convert_layout(acc, OL), 0), YL)
    r = gl.arange(0, 16, layout=gl.SliceLayout(1, YL))
    m = gl.arange(0, BM, layout=gl.SliceLayout(0, YL))
    off = m[None, :] * 16 + r[:, None]
    gl.store(slice_ptr + (task * (16 * BM) + off), y)
    barrier()
    if gl.atomic_add(cnt_ptr + rt, 1, sem="acq_rel") == KS - 1:
        y = y * 0.0
        for i in gl.static_range(0, KS):
            y += gl.load(slice_ptr + ((rt * KS + i) * (16 * BM) + off), cache_modifier=".cg")
        even, odd = gl.split(y.to(gl.bfloat16).to(gl.int16, bitcast=True).reshape([8, 2, BM]).permute([0, 2, 1]))
        words = (even.to(gl.int32) & 0xFFFF) | (odd.to(gl.int32) << 16)
        w = rt * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, words.type.layout))
        m_w = gl.arange(0, BM, layout=gl.SliceLayout(0, words.type.layout))
        cell = xa_ptr + (buffer * LORA_CELLS + m_w[None, :] * LORA_WORDS + w[:, None])
        gl.store(cell, words, mask=(2 * w < RS)[:, None])
        gl.store(cnt_ptr + rt, 0)


@gluon.jit(do_not_specialize=["M", "U", "steps", "sgs", "RS", "e1", "e2", "tiles", "tasks", "cost"])
def skinny_kernel(
    x_ptr,
    w_ptr,
    s_ptr,
    gs_ptr,
    bias_ptr,
    a_ptr,
    b_ptr,
    xa_ptr,
    slice_ptr,
    ticket_ptr,
    y_ptr,
    ws_ptr,
    cnt_ptr,
    M,
    sxm,
    sym,
    sgs,
    RS,
    e1,
    e2,
    tiles,
    steps,
    tasks,
    cost,
    swn: gl.constexpr,
    ssn: gl.constexpr,
    BM: gl.constexpr,
    WK: gl.constexpr,
    WN: gl.constexpr,
    R: gl.constexpr,
    BIAS: gl.constexpr,
    RANK: gl.constexpr,
    K: gl.constexpr,
    SLICE: gl.constexpr,
    LATE: gl.constexpr,
    PDL: gl.constexpr,
    CONVERT: gl.constexpr,
):
    """y[m, n] for M <= BM; N a multiple of 16 R WN, K of 128 WK.  w_ptr int32 (N, K/8), s_ptr int16 (N, K/32); steps = K / (128 WK).

    A warp's rows are R groups of 16, decoded and multiplied one after the other.  x of the next unit is always loaded before this one is
    decoded: it comes from the second-level cache.  So are the words; or LATE, each group's after its own, in the same registers.

    With CONVERT (Blackwell) its conversion instruction decodes, which makes pairs of neighbouring codes; x then keeps its order.

    The row strides are compile-time constants, so that the rows of a thread are immediate offsets of one address.

    With RANK > 0 the first `tasks` * `cost` units of work are x A^T, `cost` of them a task (skinny_lora_down), and the tiles follow.
    The cells of x A^T hold float32 bits, or -1 (a NaN no arithmetic gives) while empty: no flag is needed, and the last step of a tile
    asks for them before it needs them.  Two buffers take turns from launch to launch, so that one is emptied while the other is used.
    Whose turn it is stands in ticket_ptr[0] until every program has read it.  Tasks come first and wait for nobody: nobody waits forever.
    """
    NW: gl.constexpr = WK * WN
    ASM: gl.constexpr = CONVERT_WORD if CONVERT else DECODE_WORD
    FACTOR: gl.constexpr = FOR_VALUES if CONVERT else FOR_BITS
    ROWS: gl.constexpr = 16 * R * WN
    GROUP: gl.constexpr = 16 * WN
    WL: gl.constexpr = skinny_w_layout(WK, WN)
    SL: gl.constexpr = skinny_s_layout(WK, WN)
    XL: gl.constexpr = skinny_x_layout(WK, WN, BM)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WK, WN, 1], instr_shape=[1, 16, 8])
    AL: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    BL: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    OL: gl.constexpr = sum_layout(WK, WN, ROWS * BM // (NW * 32), ROWS)
    YL: gl.constexpr = gl.SliceLayout(0, OL)
    SPARE: gl.constexpr = 8 if not LATE else 16 if RANK > 0 else 32  # registers for pieces of other programs
    BATCH: gl.constexpr = max(1, min(4, SPARE * NW * 32 // (ROWS * BM)))
    pid = gl.program_id(0)
    G = gl.num_programs(0)
    skip = tasks * cost
    U = tiles * steps + skip
    v0 = pid * U // G
    v1 = (pid + 1) * U // G
    u0 = gl.maximum(v0, skip) - skip
    u1 = gl.maximum(v1, skip) - skip
    b_w = gl.arange(0, WK, layout=gl.SliceLayout(1, gl.SliceLayout(2, WL)))[:, None, None].to(gl.int64)
    n_w = gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(2, WL)))[None, :, None].to(gl.int64)
    k_w = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, WL)))[None, None, :].to(gl.int64)
    b_s = gl.arange(0, WK, layout=gl.SliceLayout(1, gl.SliceLayout(2, SL)))[:, None, None].to(gl.int64)
    n_s = gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(2, SL)))[None, :, None].to(gl.int64)
    k_s = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, SL)))[None, None, :].to(gl.int64)
    b_x = gl.arange(0, WK, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, XL))))[:, None, None, None]
    m_x = gl.arange(0, BM, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, XL))))[None, :, None, None]
    t_x = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, XL))))[None, None, :, None]
    k_x = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, XL))))[None, None, None, :]
    n_y = gl.arange(0, ROWS, layout=gl.SliceLayout(1, YL))
    m_y = gl.arange(0, BM, layout=gl.SliceLayout(0, YL))
    # rows: bits 0 to 2 belong to the lane, bit 3 to the register, the others to the warp
    LANE: gl.constexpr = 7 + 16 * (WN - 1)
    w_lane = w_ptr + ((n_w & LANE) * swn + b_w * 16 + k_w)
    w_reg = (n_w & (-1 - LANE)) * swn
    s_lane = s_ptr + ((n_s & LANE) * ssn + b_s * 4 + k_s)
    s_reg = (n_s & (-1 - LANE)) * ssn
    tile = u0 // steps
    it = u0 - tile * steps
    wo = tile.to(gl.int64) * (ROWS * swn) + it * (WK * 16)
    so = tile.to(gl.int64) * (ROWS * ssn) + it * (WK * 4)
    x_lane = x_ptr + (gl.minimum(m_x, M - 1).to(gl.int64) * sxm + b_x * 128 + t_x * 32 + k_x)
    xo = it * (WK * 128)
    seg0 = u0
    if PDL:
        gdc_launch_dependents()
    q = ()
    s = ()
    for g in gl.static_range(R):
        q = q + (load_words((w_lane + wo) + (w_reg + g * GROUP * swn)),)  # noqa: RUF005
        s = s + (load_scales((s_lane + so) + (s_reg + g * GROUP * ssn)),)  # noqa: RUF005
    if PDL:
        gdc_wait()
    if RANK > 0:
        buffer = (gl.load(ticket_ptr, volatile=True) >> 16) & 1
        for task in range((v0 + cost - 1) // cost, gl.minimum((v1 + cost - 1) // cost, tasks)):
            skinny_lora_down(
                task, buffer, x_ptr, a_ptr, xa_ptr, slice_ptr, cnt_ptr + tiles, M, sxm, RS, tasks, K, BM, NW, SLICE
            )
        ticket = draw_ticket(u0 == u1, ticket_ptr, NW)
    x_next = load_x(x_lane + xo, WK, BM)
    while seg0 < u1:
        seg1 = gl.minimum((tile + 1) * steps, u1)
        acc = ()
        for _g in gl.static_range(R):
            acc = acc + (gl.zeros([WK, GROUP, BM], gl.float32, MMA),)  # noqa: RUF005
        for u in range(seg0, seg1):
            x = gl.convert_layout(pair_up(x_next, WK, BM, CONVERT), BL, assert_trivial=True)
            if u + 1 < seg1:
                wo += WK * 16
                so += WK * 4
                xo += WK * 128
            elif u + 1 < u1:  # on to the next tile; the very last unit is simply loaded twice
                wo += ROWS * swn - (steps - 1) * (WK * 16)
                so += ROWS * ssn - (steps - 1) * (WK * 4)
                xo = xo * 0
            x_next = load_x(x_lane + xo, WK, BM)
            q_next = ()
            s_next = ()
            sums = ()
            if not LATE:
                for g in gl.static_range(R):
                    q_next = q_next + (load_words((w_lane + wo) + (w_reg + g * GROUP * swn)),)  # noqa: RUF005
                    s_next = s_next + (load_scales((s_lane + so) + (s_reg + g * GROUP * ssn)),)  # noqa: RUF005
            for g in gl.static_range(R):
                codes = q[g].reshape([WK, GROUP, 4, 2, 2])
                p0, p1, p2, p3 = decode_word(codes, spread_scales(s[g], codes, FACTOR), ASM)
                P = halves(gl.join(gl.join(p0, p1), gl.join(p2, p3)))
                P = P.reshape([WK, GROUP, 4, 4, 2, 2, 2]).permute([0, 1, 3, 2, 5, 4, 6]).reshape([WK, GROUP, 128])
                sums = sums + (mma_v2(gl.convert_layout(P, AL, assert_trivial=True), x, acc[g]),)  # noqa: RUF005
                if LATE:
                    q_next = q_next + (load_words((w_lane + wo) + (w_reg + g * GROUP * swn)),)  # noqa: RUF005
                    s_next = s_next + (load_scales((s_lane + so) + (s_reg + g * GROUP * ssn)),)  # noqa: RUF005
            acc = sums
            q = q_next
            s = s_next
        z = opaque_zero()
        row0 = tile * ROWS + z
        rows = row0 + n_y
        mine = seg0 == tile * steps
        if RANK > 0:  # what the last step needs is on its way while the warps' sums meet
            shard = (row0 >= e1).to(gl.int32) + (row0 >= e2).to(gl.int32)
            cells_ptr = xa_ptr + (buffer * LORA_CELLS + shard * (RANK // 2))
            b = load_lora_up(b_ptr, row0, 0, mine, RANK, ROWS, NW)
            words, where = load_cells(cells_ptr, z, 0, mine, RANK, BM, NW)
        y = gl.sum(gl.convert_layout(stack(acc, R), OL), 0)
        gs = gl.load(gs_ptr + rows * sgs)
        if BIAS:
            bias = gl.load(bias_ptr + rows)
        if RANK > 0:
            ticket += draw_ticket(seg1 == u1, ticket_ptr, NW)
        off = (n_y + z)[:, None] + ((m_y + z) * ROWS)[None, :]
        if mine:
            if seg1 - seg0 < steps:
                y = gather_pieces(
                    y, off, seg0 + skip, steps, U, ws_ptr, ROWS * BM, OL.size_per_thread[1], BATCH, ROWS * BM < NW * 32
                )
            y = y * gl.div_rn(gs * 0.0 + 256.0, gs)[:, None]
            if BIAS:
                y += bias.to(gl.float32)[:, None]
            if RANK > 0:
                up = gl.zeros([ROWS, BM], gl.float32, lora_layout(ROWS, NW))
                BL32: gl.constexpr = gl.DotOperandLayout(1, lora_layout(ROWS, NW), 4)
                for r0 in gl.static_range(0, RANK, 32):
                    if r0 > 0:
                        b = load_lora_up(b_ptr, row0, r0, True, RANK, ROWS, NW)
                        words, where = load_cells(cells_ptr, z, r0, True, RANK, BM, NW)
                    xa = halves(await_words(words, where, cells_ptr, 2)).permute([0, 2, 1]).reshape([32, BM])
                    up = mma_v2(b, gl.convert_layout(xa, BL32), up)
                y += gl.convert_layout(up, YL)
            gl.store(y_ptr + (m_y[None, :] * sym + rows[:, None]), y.to(gl.bfloat16), mask=(m_y < M)[None, :])
        else:
            gl.store(ws_ptr + (pid * (ROWS * BM) + off), y.to(gl.int32, bitcast=True))
        seg0 = seg1
        tile += 1
    if RANK > 0:
        settle_ticket(ticket, ticket_ptr, NW)
