"""The kernels on a real GPU with fresh random data: every family, poisoned outputs, graphs, torch.compile."""

import subprocess
import sys

import pytest
import torch
from nvfp4_cases import Problem, check_fp8_bits, random_weight, relative_error

import qerl_nvfp4
from qerl_nvfp4 import bounds, cost, ops, reference, select

pytestmark = [pytest.mark.gpu, pytest.mark.kernels_ci]


def seed() -> int:
    return torch.seed() % 2**31


def problem_of(*arguments, **more) -> Problem:
    return Problem(*arguments, seed=seed(), device="cuda", **more)


def run(config, M, N, K, rank=0, splits=None, launches=3, dtype=torch.bfloat16, pdl=True, **more):
    aligned = config["kernel"] in ("wgmma", "wide")
    problem = problem_of(M, N, K, rank, splits, dtype=dtype, aligned=aligned, **more)
    problem.check(config, launches, 4e-3 if dtype == torch.bfloat16 else 1e-3, pdl=pdl)


def by_values(configs):
    return pytest.mark.parametrize("config", configs, ids=lambda c: "_".join(str(v) for v in c.values()))


SKINNY = [
    {"kernel": "skinny", "BM": BM, "WK": WK, "WN": WN, "R": R, "grid": grid}
    for BM in (8, 16)
    for WK, WN, R in ((4, 1, 1), (4, 1, 2), (2, 2, 2), (2, 4, 1), (1, 1, 1), (8, 1, 1))
    for grid in (7, 132, 700)
]
SKINNY += [
    {"kernel": "skinny", "BM": BM, "WK": 4, "WN": 1, "R": R, "late": late, "grid": 132}
    for BM in (8, 16)
    for R, late in ((2, True), (4, False), (4, True))
]


@pytest.mark.gluon
@by_values(SKINNY)
def test_skinny(config):
    BM, with_lora = config["BM"], {"WK": 4, "WN": 1, "R": 2, "grid": config["grid"] + 5, "cost": 3}
    run(config, BM, 512, 2048, per_row=True, launches=40)
    run(config, 1, 384, 1024, rank=32, splits=(128, 256), launches=40)
    run(config | with_lora, BM, 384, 1024, rank=64, splits=(128, 128, 128))
    run(config, BM - 3, 256, 1024, rank=8, pdl=False)
    run(config, 3, 256, 1024, rank=6)


WGMMA = [
    {"kernel": "wgmma", "BM": BM, "P": P, "S": S, "permute": permute, "grid": grid}
    for BM, P, S, permute in cost.WGMMA
    for grid in (5, 132)
]
WGMMA += [config | {"natural": True} for config in WGMMA if cost.can_be_natural(config)]


@pytest.mark.hopper
@by_values(WGMMA)
def test_wgmma(config):
    BM, before, few = config["BM"], config | {"tasks": False}, config | {"grid": 7}
    run(config, BM, 768, 2048, per_row=True)
    run(config, 1, 400, 1024)
    run(config, BM + 17, 1024, 1024, rank=32, splits=(576, 256, 192))
    run(config, BM - 3, 768, 768, rank=72, pdl=False)
    run(config, BM, 528, 1280, rank=256, launches=20)
    run(before, 2 * BM + 1, 1024, 2048, rank=32, splits=(512, 512))
    run(config, 1, 512, 768, rank=8)
    run(config, BM, 256, 512, rank=12)  # rows of B that the copy engine cannot read
    run(few, 3 * BM + 1, 1280, 512)  # whole tiles for every program, and split ones
    # K no multiple of 256, nor of 128: the copy engine fills the columns beyond it
    run(config, BM + 17, 1152, 896, rank=32, splits=(896, 128, 128))
    run(before, 2 * BM + 1, 1024, 1152, rank=32, splits=(512, 512))
    run(config, BM, 400, 288, rank=16)
    run(few, 3 * BM + 1, 1280, 480)


MMA = [
    {"kernel": "mma", "BM": BM, "R": R, "NS": NS, "SK": SK}
    for BM, R in bounds.ISSUED
    for NS, SK in ((2, 1), (3, 4))
    if NS * BM * 256 <= select.SMALLEST_SHARED_MEMORY
]


@pytest.mark.gluon
@by_values(MMA)
def test_mma(config):
    """Selected on other GPUs than Hopper, right on all."""
    BM = config["BM"]
    run(config, BM, 512, 2048, per_row=True, launches=20)
    run(config, 1, 200, 1024)
    run(config, BM + 17, 1024, 1152, rank=32, splits=(576, 256, 192), launches=20)
    run(config, BM - 3, 1001, 128, rank=6)
    run(config, 3 * BM + 1, 528, 1280, rank=256)


WIDE = [
    {"kernel": "wide", "BM": BM, "P": P, "S": S, "X": X, "grid": grid} for BM, P, S, X in cost.WIDE for grid in (5, 132)
]
WIDE += [config | {"natural": True} for config in WIDE if cost.can_be_natural(config)]


@pytest.mark.hopper
@by_values(WIDE)
def test_wide(config):
    BM, before = config["BM"], config | {"tasks": False}
    few = before | {"grid": 7}
    run(before, BM, 768, 2048, per_row=True)
    run(before, 1, 400, 1024)
    run(before, 2 * BM + 1, 1024, 2048, rank=32, splits=(512, 512), launches=20)
    run(few, 3 * BM + 1, 1280, 512)  # whole tiles for every program, and split ones
    run(before, BM + 1, 1152, 896, rank=32, splits=(896, 128, 128))  # the last step is a part of one
    run(few, 3 * BM + 1, 640, 480)
    run(config, BM + 17, 1024, 1024, rank=32, splits=(576, 256, 192), launches=20)
    run(config, BM - 3, 768, 768, rank=72, pdl=False)


@pytest.mark.parametrize("form", [torch.bfloat16, torch.float16, "fp8"], ids=str)
@pytest.mark.parametrize("M,N,K,SK", [(1, 200, 384, 3), (17, 70, 272, 1), (40, 1000, 1024, 4), (64, 256, 16, 1)])
def test_portable(M, N, K, SK, form):
    BM, fp8 = 16 if M <= 16 else 32 if M <= 32 else 64, form == "fp8"
    dtype = torch.bfloat16 if fp8 else form
    if fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 matrix units")
    config = {"kernel": "portable", "BM": BM, "BN": 64, "BK": 128, "SK": SK, "NW": 4, "NS": 3, "fp8": fp8}
    config["MMA"] = 3 if torch.cuda.get_device_capability()[0] == 9 else 2
    for rank in (0, 16, 200):
        run(config, M, N, K, rank=rank, per_row=rank == 0, dtype=dtype)


@pytest.mark.parametrize("dtype,limit", [(torch.bfloat16, 5e-3), (torch.float16, 1e-3)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("compute", reference.COMPUTE)
@pytest.mark.parametrize("rank", [0, 16], ids=["base", "adapter"])
@pytest.mark.parametrize("M", [1, 17, 64, 128, 300])
@pytest.mark.parametrize("N,K", [(3584, 3584), (1000, 1040), (1024, 18944), (1152, 896), (576, 960)])
def test_linear_picks_something_right(M, N, K, rank, compute, dtype, limit):
    """Rows of scales may be aligned, as an engine's, or not, as a trainer's: another kernel, the same product."""
    problem = problem_of(M, N, K, rank, dtype=dtype, bias=False, per_row=rank == 0)
    limit = limit if compute == "w4a16" else 5e-3  # rounded to bfloat16 first; sums in the matrix units: 4e-3
    packed, scale, gs = problem.weight
    exact = problem.exact(compute)
    for each in {scale.stride(): scale, (aligned := qerl_nvfp4.align_scale_rows(scale)).stride(): aligned}.values():
        problem.weight = packed, each, gs
        y = problem.linear(compute=compute)
        assert y.dtype == dtype and relative_error(y, exact) < limit
    dy = torch.randn(M, N, device="cuda").to(dtype)
    exact = reference.linear_backward(dy.double(), *problem.weight, compute)
    assert relative_error(qerl_nvfp4.linear_backward(dy, *problem.weight, compute), exact) < 4e-3


@pytest.mark.parametrize("rank", [0, 16], ids=["base", "adapter"])
@pytest.mark.parametrize("shape", [(0,), (2, 0)], ids=str)
def test_no_tokens(rank, shape):
    problem = problem_of(1, 512, 1024, rank)
    problem.x = x = torch.empty(*shape, 1024, device="cuda", dtype=torch.bfloat16)
    assert problem.linear().shape == (*shape, 512)
    dy = torch.empty(*shape, 512, device="cuda", dtype=torch.bfloat16)
    assert qerl_nvfp4.linear_backward(dy, *problem.weight).shape == x.shape
    assert [h.shape for h in qerl_nvfp4.rms_norm(x, torch.ones(1024, device="cuda"), 1e-6, x)] == [x.shape] * 2


def not_contiguous(M: int, K: int) -> tuple[torch.Tensor, ...]:
    """(M, K) transposed, every second column, every second row from an odd place on, one row repeated."""
    sizes = (K, M), (M, 2 * K), (2 * M, K + 3), (1, K)
    a, b, c, d = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    return a.t(), b[:, ::2], c[::2, 3:], d.expand(M, K)


@pytest.mark.parametrize("M", [4, 48, 300])
def test_tensors_that_are_not_contiguous(M):
    N, K = 512, 1024
    problem = problem_of(M, N, K)
    problem.bias = 30 * torch.randn(2 * N, device="cuda", dtype=torch.bfloat16)[::2]
    for problem.x in not_contiguous(M, K):
        assert relative_error(problem.linear(), problem.exact()) < 4e-3
    dy = torch.randn(N, M, device="cuda", dtype=torch.bfloat16).t()
    exact = dy.double() @ reference.dequantize(*problem.weight, torch.float64)
    assert relative_error(qerl_nvfp4.linear_backward(dy, *problem.weight), exact) < 4e-3


@pytest.mark.parametrize("rule", reference.SCALE_RULES)
def test_quantize_and_dequantize_equal_the_cpu_bit_for_bit(rule):
    weight = (torch.randn(300, 1040) * 0.02).bfloat16()
    weight[3, :64] = 0
    weight[100:200] *= torch.exp2(torch.randint(-12, 4, (100, 1040)))
    for gs in (torch.tensor([2.0**14]), torch.tensor([20000.0]), torch.rand(300) * 20000 + 1):
        packed, scale = reference.quantize(weight, rule, gs)
        got = qerl_nvfp4.quantize(weight.cuda(), rule, gs.cuda())
        assert torch.equal(got[1].cpu(), scale)
        assert torch.equal(got[0].cpu(), packed)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            dense = qerl_nvfp4.dequantize(*got, gs.cuda(), dtype)
            assert torch.equal(dense.cpu(), reference.dequantize(packed, scale, gs, dtype))


def test_fp8_equals_the_cpu_bit_for_bit():
    check_fp8_bits("cuda", 16, 1040, 3584, 18944)


@pytest.mark.parametrize("M", [4, 48])
def test_cuda_graph_sees_new_data_and_new_adapters(M):
    problem = problem_of(M, 1024, 1024, 32)
    problem.linear()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = problem.linear()
    for _ in range(3):
        problem.x.normal_()
        problem.adapter[1].normal_()
        graph.replay()
        assert relative_error(y, problem.exact()) < 5e-3


@pytest.mark.hopper
@pytest.mark.parametrize("M", [64, 128])
def test_other_processes_on_the_gpu_change_no_bit(M):
    """The GPU switches between processes in the middle of a launch. New tokens in every launch show stale values."""
    other = "import torch\nx = torch.randn(8192, 8192, device='cuda')\nprint('runs', flush=True)\nwhile True:\n"
    other += "    x @ x\n    torch.cuda.synchronize()"
    N, K, rank = 3584, 18944, 32
    weight = random_weight(N, K, seed(), "cuda")
    a, b = torch.randn(rank, K, device="cuda").bfloat16() * 0.01, torch.randn(N, rank, device="cuda").bfloat16()
    BM, S = (64, 4) if M == 64 else (128, 2)
    config = {"kernel": "wgmma", "BM": BM, "P": 2, "S": S, "permute": False, "grid": 132, "tasks": True}
    xs = [torch.randn(M, K, device="cuda").bfloat16() for _ in range(8)]
    outs = [torch.empty(M, N, device="cuda", dtype=torch.bfloat16) for _ in xs]

    def launch_all() -> None:
        for x, out in zip(xs, outs, strict=True):
            out.fill_(float("nan"))
            ops.launch(config, x, *weight, None, a, b, [N], out)

    launch_all()
    torch.cuda.synchronize()
    alone = [out.clone() for out in outs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_all()
    neighbours = [subprocess.Popen([sys.executable, "-c", other], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        assert all(neighbour.stdout.readline().strip() == b"runs" for neighbour in neighbours)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(600):  # in one queue: where the GPU waits for the host it changes between launches only
            graph.replay()
            for out, expected in zip(outs, alone, strict=True):
                wrong += (out != expected).sum()
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
    assert not wrong


def test_torch_compile():
    packed, scale, gs = random_weight(512, 1024, seed(), "cuda")
    x = torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: qerl_nvfp4.linear(x, packed, scale, gs) * 2, fullgraph=True)
    assert relative_error(compiled(x), qerl_nvfp4.linear(x, packed, scale, gs) * 2) < 1e-3
