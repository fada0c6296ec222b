"""The adapter's x A^T beside the Hopper kernel's matrix products: computed by four warps of every program, waited for by the one that loads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_wait


@gluon.jit
def fence_proxies():
    """Ordinary accesses before this come before those of the bulk copy engine after it, for memory of any kind."""
    gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_adapter(it, steps, flag_ptr, tiles, waited, RANK: gl.constexpr):
    """Before the first piece of x A^T is asked for: all of it must be there."""
    if RANK > 0:  # noqa: SIM102
        if (it >= steps) & (waited == 0):
            while gl.atomic_add(flag_ptr, 0, sem="acquire") < tiles:
                pass
            fence_proxies()
            waited += 1
    return waited


@gluon.jit
def adapt(adapter, G, PDL: gl.constexpr):
    """Four warps: the programs share out x A^T in pieces of 16 rows of A, 16 tokens and 512 columns, one at a time.

    Who finishes the last piece of a 16 x 16 tile adds its pieces up, in order, and raises the flag by one.
    """
    x_ptr, a_ptr, xa_ptr, sum_ptr, cnt_ptr, flag_ptr, M, K, sxm, RS = adapter
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8])
    AL: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    BL: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    OL: gl.constexpr = gl.BlockedLayout([16, 1, 2], [1, 4, 8], [1, 4, 1], [2, 1, 0])
    YL: gl.constexpr = gl.SliceLayout(0, OL)
    w_a = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, AL)))[:, None, None] * 128
    r_a = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, AL)))[None, :, None]
    k_a = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, AL)))[None, None, :]
    w_b = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, BL)))[:, None, None] * 128
    k_b = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, BL)))[None, :, None]
    m_b = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, BL)))[None, None, :]
    s_o = gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, OL)))[:, None, None]
    r_y = gl.arange(0, 16, layout=gl.SliceLayout(1, YL))
    m_y = gl.arange(0, 16, layout=gl.SliceLayout(0, YL))
    off = r_y[:, None] * 16 + m_y[None, :]
    slices = (K + 511) // 512
    row_tiles = (RS + 15) // 16
    tiles = row_tiles * ((M + 15) // 16)
    if PDL:
        gdc_wait()
    for job in range(gl.program_id(0), tiles * slices, G):
        ks = job // tiles
        tile = job - ks * tiles
        m0 = tile // row_tiles * 16
        r0 = (tile - tile // row_tiles * row_tiles) * 16
        ka = ks * 512 + w_a + k_a
        kb = ks * 512 + w_b + k_b
        a = gl.load(a_ptr + (gl.minimum(r0 + r_a, RS - 1) * K + ka), mask=ka < K, other=0.0)
        x = gl.load(x_ptr + (gl.minimum(m0 + m_b, M - 1) * sxm + kb), mask=kb < K, other=0.0)
        acc = mma_v2(a, x, gl.zeros([4, 16, 16], gl.float32, MMA))
        gl.store(xa_ptr + (job * 256 + off), gl.convert_layout(gl.sum(acc, 0), YL))
        gl.thread_barrier()
        if gl.atomic_add(cnt_ptr + tile, 1, sem="acq_rel") == slices - 1:
            y = gl.zeros([16, 16], gl.float32, YL)
            for s0 in range(0, slices, 16):
                piece = xa_ptr + (((s0 + s_o) * tiles + tile) * 256 + gl.expand_dims(off, 0))
                y += gl.sum(gl.load(piece, mask=s0 + s_o < slices, other=0.0, cache_modifier=".cg"), 0)
            mask = (m0 + m_y < M)[None, :] & (r0 + r_y < RS)[:, None]
            gl.store(sum_ptr + ((m0 + m_y)[None, :] * RS + (r0 + r_y)[:, None]), y.to(gl.bfloat16), mask=mask)
            gl.store(cnt_ptr + tile, 0)
            fence_proxies()
            gl.thread_barrier()
            gl.atomic_add(flag_ptr, 1, sem="acq_rel")
