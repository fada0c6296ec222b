"""The adapter's x A^T, beside the Hopper kernel's matrix products: some programs of the launch ("helpers") do only this.

Helpers are the first programs to start and wait for none of the others; the multiprocessors that a small matrix leaves idle are theirs.
K is cut into slices, one buffer each: a tile's last step multiplies B with every slice, so that nobody has to add them up first.
The ring is not used for it: with two stages, one more unit at the end of each tile would cost as much as any other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from .gluon_names import async_load, barrier, reinterpret


def task_side(BM: int) -> int:
    """Tokens, and rows of A, in a task: few tokens are soon done in small tasks, many take less traffic in larger ones."""
    return 16 if BM <= 64 else 32


side_of = gluon.constexpr_function(task_side)


@gluon.constexpr_function
def sums_layout(T):
    """[4 warps * T tokens, T rows of A] float32."""
    return gl.SwizzledSharedLayout(4, 32 // T, T // 4, order=[1, 0])


@gluon.constexpr_function
def result_layout(T):
    """[T tokens, T rows of A]"""
    n = T * T // 128
    return gl.BlockedLayout([1, n], [32 * n // T, T // n], [4, 1], [1, 0])


@gluon.jit
def fence_proxies():
    """Ordinary accesses before this come before those of the bulk copy engine after it, for memory of any kind."""
    gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def read_flag(ptr):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def shard_of(n, shards):
    return (n >= shards[0]).to(gl.int32) + (n >= shards[1]).to(gl.int32)


@gluon.jit
def load_adapter(
    b_d,
    xa_d,
    lora,
    shards,
    n0,
    m_tile,
    waited,
    turn,
    P: gl.constexpr,
    BM: gl.constexpr,
    RANK: gl.constexpr,
    SLICES: gl.constexpr,
):
    """The loading warp, for one tile: turn by turn 32 columns of B, and of a shard's x A^T once all of it is there."""
    b_sh, xa_sh, ready, free = lora
    _, _, flag_ptr, _, M, RS, mt = shards
    T: gl.constexpr = side_of(BM)
    tasks = (gl.minimum(M - m_tile * BM, BM) + T - 1) // T * ((RS + T - 1) // T) * SLICES
    for shard in range(shard_of(n0, shards), shard_of(n0 + (P - 1) * 64, shards) + 1):
        for r in gl.static_range(0, RANK, 32):
            mbarrier.wait(free, turn ^ 1)
            mbarrier.expect(ready, P * 4096 + SLICES * BM * 64)
            for p in gl.static_range(P):
                async_load(b_d, [n0 + p * 64, r], ready, b_sh.index(p))
            if waited != m_tile + 1:
                while read_flag(flag_ptr + m_tile) < tasks:
                    pass
                fence_proxies()
                waited = m_tile + 1
            for i in gl.static_range(SLICES):
                at = [(i * mt + m_tile) * BM, shard * RANK + r]
                async_load(xa_d, at, ready, xa_sh.index(i))
            turn ^= 1
    return waited, turn


@gluon.jit
def multiply_adapter(
    acc,
    lora,
    shards,
    n0,
    part: gl.constexpr,
    turn,
    P: gl.constexpr,
    RANK: gl.constexpr,
    SLICES: gl.constexpr,
    AL: gl.constexpr,
):
    """Four warps, rows part * 64 .. of the tile: what load_adapter brings; of another shard it brings nothing for these rows."""
    b_sh, xa_sh, ready, free = lora
    mine = shard_of(n0 + part * 64, shards)
    for shard in range(shard_of(n0, shards), shard_of(n0 + (P - 1) * 64, shards) + 1):
        for _ in gl.static_range(0, RANK, 32):
            mbarrier.wait(ready, turn)
            b = b_sh.index(part).load(AL)
            b = gl.where(shard == mine, b, gl.zeros_like(b))
            for i in gl.static_range(SLICES):
                acc = warpgroup_mma(b, xa_sh.index(i).permute([1, 0]), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free)
            turn ^= 1
    return acc, turn


@gluon.jit
def lower_flags(shards, G):
    """Called once by every program that waits: the last of them makes the flags ready for the next launch."""
    _, _, flag_ptr, done_ptr, _, _, mt = shards
    if gl.atomic_add(done_ptr, 1, sem="acq_rel") == G - 1:
        for i in range(mt):
            gl.store(flag_ptr + i, 0)
        gl.store(done_ptr, 0)


@gluon.jit
def adapt(
    adapter,
    x_sh,
    part: gl.constexpr,
    H,
    mt,
    P: gl.constexpr,
    BM: gl.constexpr,
    SLICES: gl.constexpr,
    REGS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Four warps of a helper: tasks of T tokens, T rows of A and a slice of K, which the warps share out, KC columns each at a time."""
    x_ptr, a_ptr, xa_ptr, flag_ptr, M, K, sxm, RS = adapter
    T: gl.constexpr = side_of(BM)
    KC: gl.constexpr = 128 if T == 16 else 64 if REGS >= 128 else 32
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8])
    XL: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    AL: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    YL: gl.constexpr = result_layout(T)
    w_x = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, XL)))[:, None, None] * KC
    m_x = gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(2, XL)))[None, :, None]
    k_x = w_x + gl.arange(0, KC, layout=gl.SliceLayout(0, gl.SliceLayout(1, XL)))[None, None, :]
    w_a = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, AL)))[:, None, None] * KC
    k_a = w_a + gl.arange(0, KC, layout=gl.SliceLayout(0, gl.SliceLayout(2, AL)))[None, :, None]
    r_a = gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(1, AL)))[None, None, :]
    m_y = gl.arange(0, T, layout=gl.SliceLayout(1, YL))
    r_y = gl.arange(0, T, layout=gl.SliceLayout(0, YL))
    row_tiles = (RS + T - 1) // T
    a_slice = row_tiles * SLICES
    tasks = (M + T - 1) // T * a_slice
    steps = (K + 4 * KC - 1) // (4 * KC)
    start = gl.program_id(0) + part * H
    if gl.program_id(0) >= H:
        start = tasks
    if start < tasks:
        # A is no one's output: it comes into the second-level cache while the kernel before this one ends
        line = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0])) * 64
        for i in range(start * 8192, RS * K, H * P * 8192):
            gl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [(a_ptr + gl.minimum(i + line, RS * K - 1)).to(gl.int64)],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
        if PDL:
            gdc_wait()
    for task in range(start, tasks, H * P):
        i = task % a_slice
        ks = i // row_tiles
        r0 = (i - ks * row_tiles) * T
        m0 = task // a_slice * T
        k1 = (ks + 1) * steps // SLICES * (4 * KC)
        x_off = gl.minimum(m0 + m_x, M - 1) * sxm + k_x
        a_off = gl.minimum(r0 + r_a, RS - 1) * K + k_a
        acc = gl.zeros([4, T, T], gl.float32, MMA)
        for k in range(ks * steps // SLICES * (4 * KC), k1, 4 * KC):
            x = gl.load(x_ptr + (x_off + k), mask=k_x + k < K, other=0.0)
            a = gl.load(a_ptr + (a_off + k), mask=k_a + k < K, other=0.0)
            acc = mma_v2(x, a, acc)
        # a helper's ring is empty; all of a half's BM * 256 bytes, since Triton 3.8 wants a view to be as large as what it shows
        sums = reinterpret(x_sh.index(part), gl.float32, [BM * 64 // T, T], sums_layout(T))
        sums.slice(0, 4 * T, 0).store(acc.reshape([4 * T, T]))
        barrier()
        y = gl.zeros([T, T], gl.float32, YL)
        for w in gl.static_range(4):
            y += sums.slice(w * T, T, 0).load(YL)
        rows = (ks * mt * BM + m0 + m_y) * (row_tiles * T)
        gl.store(xa_ptr + (rows[:, None] + (r0 + r_y)[None, :]), y.to(gl.bfloat16))
        fence_proxies()
        barrier()
        gl.atomic_add(flag_ptr + m0 // BM, 1, sem="release")
