"""Decodes words and scales of a stage into the register operand of `wgmma`: 64 rows by 32 columns for four warps, in one of three ways.

    bfloat16, decode order   a lane's operand columns are one word of 8 codes; x must be in the same order
    bfloat16, natural order  a lane takes one byte, two neighbouring codes, of each of four words: 1.5 instructions more per weight
    e4m3 (W4A8)              byte permutes look up code * scale / 8, rounded to e4m3, in a table of 8 bytes per block

Decoded bfloat16 weights carry a factor 2^-8, e4m3 ones 2^-3, which the last step of a tile removes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper import decode_scales, decode_word, halves
from .hopper_tile import R

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
# Two scales (e4m3 bytes) -> for each 8 bytes: the magnitudes of the codes 0 to 7 times it, / 8, rounded to e4m3.  The products are exact
# in float16: a code times 1/8 has two significant bits, a scale four, and both are far from its limits.
TABLES = gl.constexpr(
    "{ .reg .b16 c0, c1; .reg .b32 h, x, y, z, k0, k1, k2, k3; cvt.rn.f16x2.e4m3x2 h, $4;"
    "mov.b32 k0, 0x2c000000; mov.b32 k1, 0x32003000; mov.b32 k2, 0x36003400; mov.b32 k3, 0x3a003800;"
    + "".join(
        f"prmt.b32 x, h, 0, {scale};"
        + "".join(
            f"mul.rn.f16x2 y, x, k{2 * i}; mul.rn.f16x2 z, x, k{2 * i + 1};"
            "cvt.rn.satfinite.e4m3x2.f16x2 c0, y; cvt.rn.satfinite.e4m3x2.f16x2 c1, z;"
            f"mov.b32 ${2 * s + i}, {{c0, c1}};"
            for i in range(2)
        )
        for s, scale in enumerate(("0x1010", "0x3232"))
    )
    + "}"
)
# A word of 8 codes by the table of its block ($3, $4): each byte permute looks up four magnitudes, signs are spread over their bytes
DECODE_E4M3 = gl.constexpr("""{
    .reg .b32 x, y, g0, g1; and.b32 x, $2, 0x77777777; shl.b32 y, $2, 4;
    prmt.b32 g0, $2, y, 0x9D8C; prmt.b32 g1, $2, y, 0xBFAE;
    prmt.b32 $0, $3, $4, x; shr.u32 x, x, 16; prmt.b32 $1, $3, $4, x;
    lop3.b32 $0, $0, g0, 0x80808080, 0xF8; lop3.b32 $1, $1, g1, 0x80808080, 0xF8;
}""")


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
def tables(s):
    """int16, two scales -> four int32, 8 bytes for each scale: the magnitudes of all codes times it, / 8, as e4m3."""
    return gl.inline_asm_elementwise(
        asm=TABLES,
        constraints="=&r,=&r,=&r,=&r,h",
        args=[s],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def four_bytes(p):
    """int32 [...] -> e4m3 [..., 2, 2], the second byte of a pair behind the first; no instruction."""
    b0 = (p & 0xFF).to(gl.int8).to(gl.float8e4nv, bitcast=True)
    b1 = ((p >> 8) & 0xFF).to(gl.int8).to(gl.float8e4nv, bitcast=True)
    b2 = ((p >> 16) & 0xFF).to(gl.int8).to(gl.float8e4nv, bitcast=True)
    b3 = ((p >> 24) & 0xFF).to(gl.int8).to(gl.float8e4nv, bitcast=True)
    return gl.join(gl.join(b0, b2), gl.join(b1, b3))


@gluon.jit
def decode_e4m3(q, t0, t1, AL: gl.constexpr):
    """[64 rows, 4 lanes] words and the table of each -> the left operand, 32 columns."""
    taken_on()
    L: gl.constexpr = q.type.layout
    lo, hi = gl.inline_asm_elementwise(
        asm=DECODE_E4M3,
        constraints="=&r,=&r,r,r,r",
        args=[q, gl.convert_layout(t0, L, assert_trivial=True), gl.convert_layout(t1, L, assert_trivial=True)],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    A = gl.join(four_bytes(lo), four_bytes(hi))  # row, lane, low bit, high bit of a byte's place, half of the word
    return gl.convert_layout(A.permute([0, 4, 1, 2, 3]).reshape([R, 32]), AL, assert_trivial=True)


@gluon.jit
def words_of(w_sh, st, h: gl.constexpr, part: gl.constexpr, tile):
    """Half h of a group's unit."""
    if tile.B == 2:
        return w_sh.index((st * 2 + h) * tile.P + part)
    else:  # Triton 3.9 compiles what follows a return, whatever the condition
        return w_sh.index(st * tile.P + part).slice(h * 16, 16, 1)


@gluon.jit
def read(w_sh, s_sh, st, h: gl.constexpr, part: gl.constexpr, tile):
    """What `piece_of` takes of half a unit: words, which are loaded piece by piece if x is in its natural order, and a row's eight scales, or
    the two of a lane's words, decoded, or the tables of both."""
    scales = s_sh.index(st * tile.P + part).slice(h * 4, 4, 1)
    if tile.ORDER == "natural":
        s0, s1, s2, s3 = of_a_row(scales.load(SHARED_BY_LANES))
        scales = (decode_scales(s0), decode_scales(s1), decode_scales(s2), decode_scales(s3))
        return words_of(w_sh, st, h, part, tile), scales
    else:
        if tile.FP8:
            t0, t1, t2, t3 = tables(scales.load(SCALES))
            decoded = ((t0, t1), (t2, t3))
        else:
            decoded = decode_scales(scales.load(SCALES))
        even, odd = gl.split(words_of(w_sh, st, h, part, tile).load(WORDS).reshape([R, 4, 2, 2]))
        q0, q2 = gl.split(even)
        q1, q3 = gl.split(odd)
        return (q0, q1, q2, q3), decoded


@gluon.jit
def piece_of(words, scales, i: gl.constexpr, AL: gl.constexpr, tile):
    """The left operand of the i-th 32 of 128 columns."""
    if tile.ORDER == "natural":
        return decode_natural(words.slice(4 * i, 4, 1), scales[i][0], scales[i][1], AL)
    elif tile.FP8:
        return decode_e4m3(words[i], scales[i // 2][0], scales[i // 2][1], AL)
    else:
        return decode(words[i], scales[i // 2], AL)
