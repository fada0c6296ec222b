"""The adapter in hopper_wgmma.py: x A^T, and its product with B in the last step of a tile.

Every program needs x A^T at the end of its first tile.  Two otherwise idle warps of each program compute it in small tasks, taken from a
counter: an access takes microseconds while weights are loaded, which no other warp can spare.  There is no deadlock, however few
programs are resident: tasks wait for nothing, and these warps take tasks until none is left.  For many tokens cuBLAS computes x A^T before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma
from triton.language.extra.cuda import gdc_wait

from .cost import STEP, TASK
from .gluon_names import async_load, barrier, record
from .hopper_tile import count, operand, size, start, wait

T = gl.constexpr(TASK)
C = gl.constexpr(STEP)
SUMS_SHARED = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 4, order=[1, 0]))  # [2 warps * T tokens, T rows of A] float32
RESULT = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [2, 1], [1, 0]))  # [T tokens, T rows of A]


@gluon.jit
def fence_proxies():
    """Ordinary accesses before this come before those of the bulk copy engine after it, for memory of any kind."""
    gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def read_flag(ptr):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@record
class Lora:
    """(x A^T) B^T, up to three shards of rows of B with an A each, and who waits for x A^T."""

    b_sh: gl.shared_memory_descriptor  # [P, R rows, 32 ranks]
    xa_sh: gl.tuple  # [tokens of a part, 32 ranks] of each part
    ready: gl.shared_memory_descriptor  # both have arrived
    free: gl.shared_memory_descriptor  # every group is done with them
    e1: gl.tensor  # where the second and the third shard begin
    e2: gl.tensor
    flag_ptr: gl.tensor  # for each tile of tokens: how many blocks of x A^T are done
    done_ptr: gl.tensor  # programs that will not wait any more
    M: gl.tensor
    RS: gl.tensor  # rows of the stacked A's

    @gluon.jit
    def shard(self, n):
        return (n >= self.e1).to(gl.int32) + (n >= self.e2).to(gl.int32)


@gluon.jit
def load_adapter(b_d, xa_maps, lora, n0, m_tile, waited, turn, tile):
    """The loading warp, for one tile: turn by turn 32 columns of B, and of a shard's x A^T once all of it is there."""
    for shard in range(lora.shard(n0), lora.shard(n0 + (tile.P - 1) * 64) + 1):
        for r in gl.static_range(0, tile.RANK, 32):
            mbarrier.wait(lora.free, turn ^ 1)
            mbarrier.expect(lora.ready, tile.P * 4096 + tile.BM * 64)
            for p in gl.static_range(tile.P):
                async_load(b_d, [n0 + p * 64, r], lora.ready, lora.b_sh.index(p))
            if tile.TASKS:  # noqa: SIM102
                if waited != m_tile + 1:
                    blocks = task_rows(lora.M, m_tile, tile.BM) * ((lora.RS + T - 1) // T)
                    while read_flag(lora.flag_ptr + m_tile) < blocks:
                        pass
                    fence_proxies()
                    waited = m_tile + 1
            for i in gl.static_range(count(tile.BM)):
                first = m_tile * tile.BM + start(tile.BM, i)
                async_load(xa_maps[i], [first, shard * tile.RANK + r], lora.ready, lora.xa_sh[i])
            turn ^= 1
    return waited, turn


@gluon.jit
def multiply_adapter(accs, lora, n0, part: gl.constexpr, turn, tile):
    """Four warps, rows part * 64 .. of the tile: what load_adapter brings; of another shard it brings nothing for these rows."""
    mine = lora.shard(n0 + part * 64)
    for shard in range(lora.shard(n0), lora.shard(n0 + (tile.P - 1) * 64) + 1):
        for _ in gl.static_range(0, tile.RANK, 32):
            mbarrier.wait(lora.ready, turn)
            b = lora.b_sh.index(part).load(operand(size(tile.BM, 0)))
            b = gl.where(shard == mine, b, gl.zeros_like(b))
            begun = ()
            for i in gl.static_range(count(tile.BM)):
                left = gl.convert_layout(b, operand(size(tile.BM, i)), assert_trivial=True)
                begun = begun + (warpgroup_mma(left, lora.xa_sh[i].permute([1, 0]), accs[i], is_async=True),)  # noqa: RUF005
            accs = wait(begun, 0, tile.BM)
            mbarrier.arrive(lora.free)
            turn ^= 1
    return accs, turn


@gluon.jit
def lower_flags(lora, work):
    """Called once by every program that waits: the last of them makes the flags ready for the next launch."""
    if gl.atomic_add(lora.done_ptr, 1, sem="acq_rel") == work.G - 1:
        for i in range(work.mt):
            gl.store(lora.flag_ptr + i, 0)
        gl.store(lora.done_ptr, 0)


# --- x A^T ------------------------------------------------------------------------------------------------------------------------


@gluon.jit
def task_rows(M, m_tile, BM: gl.constexpr):
    """Tasks' rows of tokens in a tile."""
    return (gl.minimum(M - m_tile * BM, BM) + T - 1) // T


@gluon.jit
def fetch_adapter(a_ptr, count):
    """A is no one's output: it comes into the second-level cache while the kernel before this one ends."""
    line = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [2], [0])) * 64
    for i in range(gl.program_id(0) * 4096, count, gl.num_programs(0) * 4096):
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(a_ptr + gl.minimum(i + line, count - 1)).to(gl.int64)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@record
class Down:
    """x A^T in tasks of T tokens, T rows of the stacked A's (RS of them) and one of KS slices of K."""

    x_ptr: gl.tensor
    a_ptr: gl.tensor
    slice_ptr: gl.tensor  # float32, the sums of slices
    xa_ptr: gl.tensor
    flag_ptr: gl.tensor
    taken_ptr: gl.tensor  # the next task
    count_ptr: gl.tensor  # of each block: slices that are done
    M: gl.tensor
    K: gl.tensor
    sxm: gl.tensor  # elements from one row of x to the next
    RS: gl.tensor
    KS: gl.tensor


@gluon.jit
def adapt(down, sums_sh, tile, ROUND: gl.constexpr):
    """Two warps: takes tasks until there are no more.

    The warps share out a slice, 128 columns each at a time; ROUND times as many are asked for at once.  Of the programs that computed
    slices of the same rows, the last adds them up, in order, and raises the flag.
    """
    M, K, RS, KS = down.M, down.K, down.RS, down.KS
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 1, 1], instr_shape=[1, 16, 8])
    XL: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    AL: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    w_x = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, XL)))[:, None, None] * 128
    m_x = gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(2, XL)))[None, :, None]
    k_x = w_x + gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, XL)))[None, None, :]
    w_a = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, AL)))[:, None, None] * 128
    k_a = w_a + gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, AL)))[None, :, None]
    r_a = gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(1, AL)))[None, None, :]
    m_y = gl.arange(0, T, layout=gl.SliceLayout(1, RESULT))[:, None]
    r_y = gl.arange(0, T, layout=gl.SliceLayout(0, RESULT))[None, :]
    row_tiles = (RS + T - 1) // T
    blocks = (M + T - 1) // T * row_tiles
    steps = (K + C - 1) // C
    fetch_adapter(down.a_ptr, RS * K)
    if tile.PDL:
        gdc_wait()
    task = gl.atomic_add(down.taken_ptr, 1, sem="relaxed")
    while task < blocks * KS:
        block = task % blocks
        ks = task // blocks
        r0 = block % row_tiles * T
        m0 = block // row_tiles * T
        x_off = gl.minimum(m0 + m_x, M - 1) * down.sxm + k_x
        a_off = gl.minimum(r0 + r_a, RS - 1) * K + k_a
        acc = gl.zeros([2, T, T], gl.float32, MMA)
        k1 = gl.minimum((ks + 1) * steps // KS * C, K)  # the last step may be a part of one
        for k0 in range(ks * steps // KS * C, k1, C * ROUND):
            loads = ()
            for i in gl.static_range(ROUND):
                k = k0 + i * C
                x = gl.load(down.x_ptr + (x_off + k), mask=k_x < k1 - k, other=0.0)
                loads = loads + ((x, gl.load(down.a_ptr + (a_off + k), mask=k_a < k1 - k, other=0.0)),)  # noqa: RUF005
            for i in gl.static_range(ROUND):
                acc = mma_v2(loads[i][0], loads[i][1], acc)
        sums_sh.store(acc.reshape([2 * T, T]))
        barrier()
        y = gl.zeros([T, T], gl.float32, RESULT)
        for w in gl.static_range(2):
            y += sums_sh.slice(w * T, T, 0).load(RESULT)
        last = KS == 1
        if KS > 1:
            off = m_y * T + r_y
            gl.store(down.slice_ptr + (task * (T * T) + off), y)
            barrier()
            last = gl.atomic_add(down.count_ptr + block, 1, sem="acq_rel") == KS - 1
            if last:
                y = gl.zeros([T, T], gl.float32, RESULT)
                for i in range(0, KS, 16):  # as many are on their way at once
                    parts = ()
                    for j in gl.static_range(16):
                        part = down.slice_ptr + (((i + j) * blocks + block) * (T * T) + off)
                        part = gl.load(part, mask=off * 0 + i + j < KS, other=0.0, cache_modifier=".cg")
                        parts = parts + (part,)  # noqa: RUF005
                    for j in gl.static_range(16):
                        y += parts[j]
                gl.store(down.count_ptr + block, 0)
        if last:
            gl.store(down.xa_ptr + ((m0 + m_y) * RS + r0 + r_y), y.to(gl.bfloat16), mask=r0 + r_y < RS)
            fence_proxies()
            barrier()
            gl.atomic_add(down.flag_ptr + m0 // tile.BM, 1, sem="release")
        barrier()  # everyone has read the sums
        task = gl.atomic_add(down.taken_ptr, 1, sem="relaxed")
    if task == blocks * KS + gl.num_programs(0) - 1:  # everyone has been told once that there are no more
        gl.store(down.taken_ptr, 0)
