"""Tiles of the Hopper kernel (hopper_wgmma.py): constants, parts, layouts, registers, and how programs share the tiles.

Shapes of Triton's tensors are powers of two, so a tile of BM tokens is a sum of them: 160 = 128 + 32.  Each part has an accumulator, a
buffer of x and a `wgmma`; all parts use the same registers of decoded weights.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from .gluon_names import record

R = gl.constexpr(64)  # rows of a group of four warps
UNIT = gl.constexpr(256)  # columns of a stage of words
X_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
X8_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
S_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
L_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)  # 32 columns of B or of x A^T


class Variant(NamedTuple):
    """The constants of a compiled kernel, as `variant` makes them. Legend: see `Tile`."""

    BM: int
    P: int
    S: int
    X: int
    C: int
    B: int
    ORDER: str
    FP8: bool
    BIAS: bool
    RANK: int
    TASKS: bool
    PDL: bool
    REGS: int
    RING_REGS: int


def variant(BM: int, P: int, S: int, X: int, order: str, fp8: bool, *others) -> Variant:
    """Rows of a stage of x have 128 bytes, or 256 that come with the words; a short ring that brings both is filled by halves."""
    return Variant(BM, P, S, X, 128 if fp8 or not X else 64, 2 if S == 2 and not X else 1, order, fp8, *others)


def words_shared(B: int) -> gl.NVMMASharedLayout:
    """32 words of a row, or half as many."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128 // B, element_bitwidth=32, rank=2)


def parts_of(BM: int) -> list[int]:
    """Powers of two that make up a tile's tokens, the largest first."""
    return [1 << i for i in range(8, 3, -1) if BM >> i & 1]


def boxes_of(BM: int) -> list[int]:
    """Tokens of the three copies that bring a tile's x; 0: a tile of fewer parts."""
    return [*parts_of(BM), 0, 0][:3]


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
def accumulator(B, FP8=False):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, B, 32 if FP8 else 16])


@gluon.constexpr_function
def operand(B, FP8=False):
    return gl.DotOperandLayout(0, accumulator(B, FP8), 4 if FP8 else 2)


@record
class Tile:
    """64 P rows (of weights) by BM columns (of tokens), and how it is computed. All constants."""

    BM: gl.constexpr  # tokens
    P: gl.constexpr  # groups of four warps, 64 rows each
    S: gl.constexpr  # stages of words, 256 columns and their scales in each
    X: gl.constexpr  # stages of x in a ring of its own; 0: it comes with the words
    C: gl.constexpr  # columns of a stage of x
    B: gl.constexpr  # pieces in which a unit comes, each with barriers of its own
    ORDER: gl.constexpr  # of x: "decoded" as words are; "permute", put in it by four warps; "natural", its own
    FP8: gl.constexpr  # x and decoded weights are e4m3, else bfloat16
    BIAS: gl.constexpr
    RANK: gl.constexpr  # of the adapter; 0: none
    TASKS: gl.constexpr  # x A^T is computed here, else before
    PDL: gl.constexpr  # the launch begins before the one before it ends


@record
class Work:
    """Whose are the tiles: of the G programs each computes D whole ones; the units of those that remain, U, are cut into G ranges."""

    pid: gl.tensor
    G: gl.tensor
    u0: gl.tensor  # this program's range of those units
    u1: gl.tensor
    steps: gl.tensor  # units of a tile, along K
    U: gl.tensor
    mt: gl.tensor  # tiles along the tokens
    D: gl.tensor

    @gluon.jit
    def units(self):
        """Of this program."""
        return self.D * self.steps + self.u1 - self.u0

    @gluon.jit
    def tiles(self):
        """Of this program, also those that it shares."""
        return self.D + (self.u1 + self.steps - 1) // self.steps - self.u0 // self.steps

    @gluon.jit
    def segment(self, j):
        """What this program computes j-th: a tile (which of all, which of the split ones) and its first and last step."""
        tile = j * self.G + self.pid
        t = 0
        s0 = 0
        s1 = self.steps
        if j >= self.D:
            t = self.u0 // self.steps + j - self.D
            tile = self.D * self.G + t
            s0 = gl.maximum(self.u0 - t * self.steps, 0)
            s1 = gl.minimum(self.u1 - t * self.steps, self.steps)
        return tile, t, s0, s1


@gluon.jit
def wait(accs, outstanding: gl.constexpr, BM: gl.constexpr):
    """Until all wgmma but the last `outstanding` are done; the accumulators of a tile's parts."""
    if count(BM) == 1:
        return (warpgroup_mma_wait(outstanding, deps=[accs[0]]),)
    elif count(BM) == 2:
        a0, a1 = warpgroup_mma_wait(outstanding, deps=[accs[0], accs[1]])
        return (a0, a1)
    else:
        a0, a1, a2 = warpgroup_mma_wait(outstanding, deps=[accs[0], accs[1], accs[2]])
        return (a0, a1, a2)
