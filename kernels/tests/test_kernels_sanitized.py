"""Triton's concurrency sanitizer watches our kernels' shared memory: who writes, reads and waits, per partition and
barrier, on a real GPU.

`TRITON_INSTRUMENTATION_MODE=consan` puts the checks into a kernel when it is compiled, and what it finds is a
device-side assertion, after which a process cannot use the GPU any more: each case has a process of its own. Copies
that are read before they were waited for are planted first: a sanitizer that does not see them would show nothing.

`skinny` is not here: it has no shared memory of its own, and the sanitizer puts not one check into it.
`wgmma` and `wide` become 11 MB of PTX each under it, minutes of ptxas, and are only run with QERL_EXHAUSTIVE=1.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from nvfp4_cases import in_a_fresh_process

pytestmark = [pytest.mark.gpu, pytest.mark.kernels_ci]
CASE = os.environ.get("QERL_SANITIZED_CASE", "")
FOUND = ("Buffer being accessed has outstanding", "Accessing buffer with pending access")  # what the sanitizer says
CONFIGS = {
    "mma": {"kernel": "mma", "BM": 32, "R": 1, "NS": 3, "SK": 2},
    "wgmma": {"kernel": "wgmma", "BM": 16, "P": 2, "S": 3, "permute": True, "grid": 4},
    "wide": {"kernel": "wide", "BM": 16, "P": 2, "S": 3, "X": 5, "grid": 4},
}
SLOW = ("wgmma", "wide")  # to compile


def why_not() -> str:
    """Why the sanitizer cannot be had; "": it can."""
    triton = pytest.importorskip("triton")
    if not hasattr(triton.knobs.compilation, "instrumentation_mode"):
        return f"Triton {triton.__version__} has no instrumentation modes"
    from qerl_nvfp4 import ops

    if not (torch.cuda.is_available() and ops.use_gluon(0)):
        return "needs a GPU and a Triton with Gluon's names"
    if torch.cuda.get_device_capability()[0] < 9:
        return "the sanitizer knows barriers of Hopper and newer GPUs"
    return ""


def planted() -> None:
    """A stage of a ring that is read before its copy was waited for."""
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy

    from qerl_nvfp4.gluon_names import copy_to_shared

    @gluon.jit
    def kernel(x_ptr, y_ptr):
        layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
        k = gl.arange(0, 1024, layout=layout)
        buffer = gl.allocate_shared_memory(gl.bfloat16, [2, 1024], gl.SwizzledSharedLayout(8, 1, 1, [0]))
        for i in gl.static_range(2):
            copy_to_shared(buffer.index(i), x_ptr + i * 1024 + k)
            async_copy.commit_group()
        async_copy.wait_group(1)
        gl.store(y_ptr + k, buffer.index(1).load(layout))

    x = torch.randn(2048, device="cuda").bfloat16()
    kernel[(1,)](x, torch.empty_like(x), num_warps=4)
    torch.cuda.synchronize()


def product(config: dict) -> None:
    """Two launches, with an adapter but for those whose compilation takes long enough without."""
    from nvfp4_cases import in_aligned_rows, random_weight, relative_error

    from qerl_nvfp4 import launch, reference

    M, N, K, rank = 20, 256, 1024, 0 if config["kernel"] in SLOW else 32
    packed, scale, gs = random_weight(N, K, 0, "cuda")
    scale = in_aligned_rows(scale) if config["kernel"] in SLOW else scale
    x = torch.randn(M, K, device="cuda").bfloat16()
    a = b = None
    exact = reference.linear(x.double(), packed, scale, gs)
    if rank:
        a, b = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((rank, K), (N, rank)))
        exact += reference.lora(x.double(), a.double(), b.double(), None)
    for _ in range(2):
        out = torch.full((M, N), float("nan"), device="cuda", dtype=torch.bfloat16)
        launch.launch(config, x, packed, scale, gs, None, a, b, None, out)
        torch.cuda.synchronize()
        assert relative_error(out, exact) < 5e-3


@pytest.mark.skipif(not CASE, reason="run by the other tests of this file")
def test_inside():
    import triton

    assert triton.knobs.compilation.instrumentation_mode == "consan"
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))
    if CASE == "planted":
        planted()
    else:
        product(CONFIGS[CASE])


def run(case: str, seconds: int, cache: Path) -> subprocess.CompletedProcess:
    variables = {"TRITON_INSTRUMENTATION_MODE": "consan", "TRITON_CACHE_DIR": str(cache), "CUDA_LAUNCH_BLOCKING": "1"}
    return in_a_fresh_process(f"{__file__}::test_inside", seconds, "-s", QERL_SANITIZED_CASE=case, **variables)


@pytest.mark.skipif(bool(CASE), reason="the outer test")
def test_the_sanitizer_sees_a_copy_that_was_not_waited_for(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    found = run("planted", 300, tmp_path)
    text = found.stdout + found.stderr
    assert found.returncode and any(words in text for words in FOUND), text[-3000:]


@pytest.mark.skipif(bool(CASE), reason="the outer test")
@pytest.mark.parametrize("kernel", CONFIGS)
def test_it_finds_nothing_in_ours(kernel, tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    if kernel in SLOW and os.environ.get("QERL_EXHAUSTIVE") != "1":
        pytest.skip("minutes of ptxas; QERL_EXHAUSTIVE=1 runs it")
    found = run(kernel, 1500 if kernel in SLOW else 300, tmp_path)
    text = found.stdout + found.stderr
    assert found.returncode == 0 and "1 passed" in text and not any(words in text for words in FOUND), text[-3000:]
