"""The Triton kernels in Triton's CPU interpreter, against the plain PyTorch reference."""

import pytest
import torch
from nvfp4_cases import random_weight, relative_error

from qerl_nvfp4 import ops as launchers
from qerl_nvfp4 import portable, reference
from qerl_nvfp4.launch import permute_columns

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not portable.INTERPRET, reason="runs where there is no GPU, with TRITON_INTERPRET=1")
tl = portable.tl


def poisoned(*shape, dtype=torch.bfloat16):
    return torch.full(shape, float("nan"), dtype=dtype)


def test_every_code_times_every_scale_is_exact():
    """16 codes x 127 scales; the last row's scale would be NaN and is left out."""
    packed = torch.tensor([(2 * i) | (2 * i + 1) << 4 for i in range(8)], dtype=torch.uint8).repeat(127, 1)
    scale = torch.arange(127, dtype=torch.uint8).unsqueeze(1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for gs in (torch.tensor([1.0]), torch.tensor([3.0])):
            out = poisoned(127, 16, dtype=dtype)
            launchers._dequantize(packed, scale, gs, dtype, out)
            assert torch.equal(out, reference.dequantize(packed, scale, gs, dtype))


@pytest.mark.parametrize("N,K", [(5, 16), (8, 512), (19, 1040)])
@pytest.mark.parametrize("per_row", [False, True], ids=["scalar", "per_row"])
def test_dequantize(N, K, per_row):
    packed, scale, gs = random_weight(N + 3, K, seed=N, per_row=per_row)
    rows = slice(2, 2 + N)  # a row slice, as the trainer's fused storage has them
    packed, scale, gs = packed[rows], scale[rows], gs[rows] if per_row else gs
    out = poisoned(N, K)
    launchers._dequantize(packed, scale, gs, torch.bfloat16, out)
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
    packed, scale = launchers._quantize(weight, rule, torch.tensor([gs]))
    assert torch.equal(scale, expected[1])
    assert torch.equal(packed, expected[0])


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("K", [17, 256, 600])
def test_rms_norm(K, residual):
    g = torch.Generator().manual_seed(K)
    x = torch.randn(3, K, generator=g).bfloat16()
    r = torch.randn(3, K, generator=g).bfloat16() if residual else None
    w = 1 + torch.randn(K, generator=g) * 1e-3
    y, h = launchers._rms_norm(x, w, 1e-6, r)
    expected = reference.rms_norm(x, w, 1e-6, r)
    assert relative_error(y, expected[0] if residual else expected) < 1e-3
    if residual:
        assert torch.equal(h, expected[1])


def test_rms_norm_of_tensors_that_are_not_contiguous():
    g = torch.Generator().manual_seed(0)
    x, r = (torch.randn(64, 3, generator=g).bfloat16().t() for _ in range(2))
    w = torch.randn(128, generator=g)[::2]
    y, h = launchers._rms_norm(x, w, 1e-6, r)
    expected = reference.rms_norm(x, w, 1e-6, r)
    assert relative_error(y, expected[0]) < 1e-3
    assert torch.equal(h, expected[1])


@pytest.mark.parametrize("gs", [(64.0,), range(32, 45)], ids=["scalar", "per_row"])
def test_quantize_in_several_launches(monkeypatch, gs):
    """As many rows as one launch cannot take."""
    monkeypatch.setattr(launchers, "_MAX_GRID_Y", 2)
    weight = torch.randn(13, 32, generator=torch.Generator().manual_seed(0))
    gs = torch.tensor([float(v) for v in gs])
    got, expected = launchers._quantize(weight, "four_over_six", gs), reference.quantize(weight, "four_over_six", gs)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("per_row", [False, True], ids=["scalar", "per_row"])
def test_dequantize_in_several_launches(monkeypatch, per_row):
    monkeypatch.setattr(launchers, "_MAX_GRID_Y", 2)
    packed, scale, gs = random_weight(37, 32, per_row=per_row)
    out = poisoned(37, 32)
    launchers._dequantize(packed, scale, gs, torch.bfloat16, out)
    assert torch.equal(out, reference.dequantize(packed, scale, gs))


def configuration(BM, BN, SK, MMA=3, BK=128):
    return {"kernel": "portable", "BM": BM, "BN": BN, "BK": BK, "SK": SK, "NW": 4, "NS": 1, "MMA": MMA}


GEMMS = [
    pytest.param(1, 48, 128, configuration(16, 32, 1), id="one-token"),
    pytest.param(17, 40, 384, configuration(16, 32, 3), id="17-tokens-split3"),
    pytest.param(5, 70, 272, configuration(16, 64, 2, MMA=2), id="odd-N-tail-K"),
    pytest.param(33, 24, 16, configuration(32, 32, 1), id="K16"),
    pytest.param(3, 64, 512, configuration(16, 64, 2, BK=256), id="BK256"),
]


@pytest.mark.parametrize("M,N,K,config", GEMMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_gemm(M, N, K, config, dtype):
    packed, scale, gs = random_weight(N, K, seed=M, per_row=N % 16 == 0)
    g = torch.Generator().manual_seed(M)
    x = torch.randn(M, K, generator=g).to(dtype)
    bias = torch.randn(N, generator=g).to(dtype)
    out = poisoned(M, N, dtype=dtype)
    launchers.launch(config, x, packed, scale, gs, bias, None, None, None, out, pdl=False)
    exact = x.double() @ reference.dequantize(packed, scale, gs, torch.float64).T + bias.double()
    assert relative_error(out, exact) < (3e-3 if dtype == torch.bfloat16 else 5e-4)
    again = poisoned(M, N, dtype=dtype)
    launchers.launch(config, x, packed, scale, gs, bias, None, None, None, again, pdl=False)
    assert torch.equal(out, again)  # deterministic, and the split-K counters were reset


@pytest.mark.parametrize("rank", [4, 32, 136, 256])
@pytest.mark.parametrize("splits", [None, (32, 64), (32, 32, 32), (40, 56)], ids=["one", "two", "three", "unaligned"])
def test_fused_lora(rank, splits):
    M, N, K = 5, 96, 1152
    packed, scale, gs = random_weight(N, K)
    shards = 1 if splits is None else len(splits)
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(M, K, generator=g).bfloat16()
    a = (torch.randn(shards * rank, K, generator=g) * 2).bfloat16()
    b = (torch.randn(N, rank, generator=g) * 2).bfloat16()
    out = poisoned(M, N)
    launchers.launch(configuration(16, 32, 2), x, packed, scale, gs, None, a, b, splits, out, pdl=False)
    base = x.double() @ reference.dequantize(packed, scale, gs, torch.float64).T
    adapter = reference.lora(x.double(), a.double(), b.double(), splits)
    assert relative_error(out, base + adapter) < 5e-3
    assert relative_error(out, base) > 5e-2  # the adapter is large enough to be missed


@pytest.mark.parametrize("K", [128, 384])
def test_permuted_x_has_the_order_of_the_decoded_weights(K):
    x = torch.arange(5 * K, dtype=torch.float32).view(5, K).to(torch.bfloat16)
    out = poisoned(5, K)
    permute_columns(x, out, False)
    k = torch.arange(K)
    c, t, j, pp, i1, i0 = k // 128, k % 128 // 32, k % 32 // 8, k % 8 // 4, k % 4 // 2, k % 2
    expected = torch.empty_like(x)
    expected[:, 128 * c + 32 * j + 16 * i1 + 8 * i0 + 2 * t + pp] = x
    assert torch.equal(out, expected)


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("splits", [None, (500, 140, 128)], ids=["one", "three"])
@pytest.mark.parametrize("rank", [8, 12], ids=["joined", "maybe_afterwards"])
def test_dense_product_with_an_adapter(rank, splits, pieces):
    """Wide output: the adapter is part of the product when its stacked rank is a multiple of 8, and is added afterwards
    if not.
    """
    N, K, M = 768, 64, 5
    packed, scale, gs = random_weight(N, K, seed=rank)
    g = torch.Generator().manual_seed(1)
    shards = len(splits or (N,))
    a, b, x = (torch.randn(*shape, generator=g).bfloat16() for shape in ((shards * rank, K), (N, rank), (M, K)))
    a, b = a * 0.1, b * 0.1
    bias = torch.randn(N, generator=g).bfloat16()
    out = poisoned(M, N)
    launchers.linear_dense(x, packed, scale, gs, bias, a, b, splits, out, pieces)
    exact = (x.double(), packed, scale, gs, bias.double())
    expected = reference.linear(*exact, a.double(), b.double(), splits)
    assert relative_error(out, expected) < 6e-3
    assert relative_error(reference.linear(*exact), expected) > 0.02  # what a forgotten adapter would give


def test_the_backward_product_goes_through_the_dequantized_weight():
    packed, scale, gs = random_weight(48, 64)
    dy = torch.randn(2, 3, 48).bfloat16()
    expected = reference.linear_backward(dy.double(), packed, scale, gs)
    assert relative_error(launchers.backward_dense(dy, packed, scale, gs), expected) < 6e-3
