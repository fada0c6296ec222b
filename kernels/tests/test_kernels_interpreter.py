"""The Triton kernels in Triton's CPU interpreter, against the plain PyTorch reference."""

import pytest
import torch
from nvfp4_cases import Problem, check_fp8_bits, every_code_and_scale, random_weight, relative_error

from qerl_nvfp4 import ops, portable, reference, select

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not portable.INTERPRET, reason="runs where there is no GPU, with TRITON_INTERPRET=1")
per_row = pytest.mark.parametrize("per_row", [False, True], ids=["scalar", "per_row"])


def poisoned(*shape, dtype=torch.bfloat16):
    return torch.full(shape, float("nan"), dtype=dtype)


def test_every_code_times_every_scale_is_exact():
    packed, scale = every_code_and_scale()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for gs in (torch.tensor([1.0]), torch.tensor([3.0])):
            out = poisoned(127, 16, dtype=dtype)
            ops._dequantize(packed, scale, gs, dtype, out)
            assert torch.equal(out, reference.dequantize(packed, scale, gs, dtype))


@pytest.mark.parametrize("N,K,rows_of_a_launch", [(5, 16, None), (19, 1040, None), (37, 32, 2)])
@per_row
def test_dequantize(monkeypatch, N, K, rows_of_a_launch, per_row):
    """A row slice, as the trainer's fused storage has them; and in several launches."""
    if rows_of_a_launch:
        monkeypatch.setattr(ops, "_MAX_GRID_Y", rows_of_a_launch)
    packed, scale, gs = random_weight(N + 3, K, seed=N, per_row=per_row)
    rows = slice(2, 2 + N)
    packed, scale, gs = packed[rows], scale[rows], gs[rows] if per_row else gs
    out = poisoned(N, K)
    ops._dequantize(packed, scale, gs, torch.bfloat16, out)
    assert torch.equal(out, reference.dequantize(packed, scale, gs))


@pytest.mark.parametrize("rule", reference.SCALE_RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("gs", [2.0**13, 9000.0], ids=["power_of_two", "any"])
def test_quantize_is_bit_equal(rule, dtype, gs):
    g = torch.Generator().manual_seed(1)
    weight = (torch.randn(9, 528, generator=g) * 0.05).to(dtype)
    weight[1, 16:48] = 0
    weight[2, :16] = 6.0 / 8192  # exact ties after the division
    weight[3, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2, dtype=dtype) / 8192
    weight[4, :16] *= 1e-4
    weight[5, ::2] = -0.0
    expected = reference.quantize(weight, rule, torch.tensor([gs]))
    assert all(map(torch.equal, ops._quantize(weight, rule, torch.tensor([gs])), expected))


def test_fp8_is_bit_equal():
    check_fp8_bits("cpu", 16, 560)


@pytest.mark.parametrize("dtype,limit", [(torch.bfloat16, 5e-3), (torch.float16, 3e-3)], ids=["bf16", "fp16"])
@per_row
def test_fp8_products(per_row, dtype, limit):
    problem = Problem(5, 768, 128, 8, (512, 256), dtype=dtype, per_row=per_row)
    dy = torch.randn(2, 3, 768).to(dtype)
    out = problem.by(select.DENSE_FP8, multiply=ops.product_by_any, x8=("only Hopper's kernel", "reads it"))
    assert relative_error(out, problem.exact("w4a8")) < limit
    exact = reference.linear_backward(dy.double(), *problem.weight, "w4a8")
    assert relative_error(ops.backward_fp8(dy, *problem.weight), exact) < limit


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("K,transposed", [(17, False), (600, False), (64, True)])
def test_rms_norm(K, transposed, residual):
    g = torch.Generator().manual_seed(K)
    x, r = (torch.randn(K, 3, generator=g).bfloat16().t() for _ in range(2))
    x, r = (x, r) if transposed else (x.contiguous(), r.contiguous())
    w = 1 + torch.randn(2 * K, generator=g)[:: 2 if transposed else 1][:K] * 1e-3
    y, h = ops._rms_norm(x, w, 1e-6, r if residual else None)
    expected = reference.rms_norm(x, w, 1e-6, r if residual else None)
    assert relative_error(y, expected[0] if residual else expected) < 1e-3
    assert not residual or torch.equal(h, expected[1])


def configuration(BM, BN, SK, MMA=3, BK=128, fp8=False):
    return {"kernel": "portable", "BM": BM, "BN": BN, "BK": BK, "SK": SK, "NW": 4, "NS": 1, "MMA": MMA, "fp8": fp8}


@pytest.mark.parametrize("dtype,limit", [(torch.bfloat16, 3e-3), (torch.float16, 5e-4)], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "M,N,K,config",
    [
        pytest.param(1, 48, 128, configuration(16, 32, 1), id="one-token"),
        pytest.param(17, 40, 384, configuration(16, 32, 3), id="17-tokens-split3"),
        pytest.param(5, 70, 272, configuration(16, 64, 2, MMA=2), id="odd-N-tail-K"),
        pytest.param(33, 24, 16, configuration(32, 32, 1), id="K16"),
        pytest.param(3, 64, 512, configuration(16, 64, 2, BK=256), id="BK256"),
        pytest.param(1, 48, 128, configuration(16, 32, 1, fp8=True), id="W4A8-one-token"),
        pytest.param(17, 70, 656, configuration(16, 64, 3, fp8=True), id="W4A8-split3-odd-N-tail-K"),
    ],
)
def test_gemm(M, N, K, config, dtype, limit):
    Problem(M, N, K, seed=M, dtype=dtype, per_row=N % 16 == 0).check(config, 2, limit, pdl=False)


@pytest.mark.parametrize(
    "rank,splits", [(4, (32, 64)), (32, (32, 32, 32)), (32, (40, 56)), (136, None), (136, (32, 64)), (256, (40, 56))]
)
@pytest.mark.parametrize("compute", reference.COMPUTE)
def test_fused_lora(rank, splits, compute):
    problem = Problem(5, 96, 1152, rank, splits, seed=rank, bias=False)
    out = problem.by(configuration(16, 32, 2, fp8=compute == "w4a8"), pdl=False)
    assert relative_error(out, problem.exact(compute)) < 5e-3
    base = reference.linear(problem.x.double(), *problem.weight, compute=compute)
    assert relative_error(out, base) > 2e-2  # the adapter is large enough to be missed


@pytest.mark.parametrize("splits", [None, (500, 140, 128)], ids=["one", "three"])
@pytest.mark.parametrize("rank", [8, 12], ids=["joined", "maybe_afterwards"])
def test_dense_product_with_an_adapter(rank, splits):
    """In wide outputs a stacked rank that is a multiple of 8 joins the product, another is added afterwards."""
    problem = Problem(5, 768, 64, rank, splits, seed=rank)
    assert relative_error(problem.by({"kernel": "dense"}, multiply=ops.product), problem.exact()) < 6e-3


def test_the_backward_product_goes_through_the_dequantized_weight():
    packed, scale, gs = random_weight(48, 64)
    dy = torch.randn(2, 3, 48).bfloat16()
    expected = reference.linear_backward(dy.double(), packed, scale, gs)
    assert relative_error(ops.backward_dense(dy, packed, scale, gs), expected) < 6e-3
