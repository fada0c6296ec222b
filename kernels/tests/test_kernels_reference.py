"""The plain PyTorch path: values of the format, shapes, errors, torch.library registration."""

import pytest
import torch
from nvfp4_cases import every_code_and_scale, random_weight, relative_error, rows_for_fp8

import qerl_nvfp4
from qerl_nvfp4 import ops as ops_module
from qerl_nvfp4 import reference
from qerl_nvfp4.ops import ops

nvfp4 = pytest.importorskip("qerl_trl.nvfp4.format")


def test_dequantize_equals_the_package_reference_bit_for_bit():
    for per_row in (False, True):
        packed, scale, gs = random_weight(24, 96, per_row=per_row)
        expected = nvfp4.dequantize(packed, scale, gs)
        assert torch.equal(reference.dequantize(packed, scale, gs), expected)
        assert torch.equal(qerl_nvfp4.dequantize(packed, scale, gs), expected)
        out = torch.full((24, 96), float("nan"), dtype=torch.bfloat16)
        assert qerl_nvfp4.dequantize(packed, scale, gs, out=out) is out
        assert torch.equal(out, expected)


@pytest.mark.parametrize("rule", reference.SCALE_RULES)
def test_quantize_reference_equals_the_package_reference(rule):
    weight = torch.randn(16, 160) * 0.03
    weight[2, :32] = 0
    for gs in (nvfp4.power_of_two_global_scale(weight.abs().max()), torch.tensor([2500.0])):
        expected = nvfp4.quantize(weight, rule, gs)
        packed, scale = reference.quantize(weight, rule, gs)
        assert torch.equal(packed, expected.packed)
        assert torch.equal(scale, expected.block_scale)


def nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    """float64 -> the nearest e4m3 number, of two the one with the even code."""
    codes = torch.tensor([*range(0, 127, 2), *range(1, 127, 2)], dtype=torch.uint8)
    grid = codes.view(torch.float8_e4m3fn).double()
    return grid[(values.abs().unsqueeze(-1) - grid).abs().argmin(-1)].copysign(values)


def test_fp8_rounds_to_the_nearest_number():
    x = rows_for_fp8(272)
    x8, scale = qerl_nvfp4.quantize_fp8(x)
    amax = x.double().abs().amax(1, keepdim=True).clamp(min=2.0**-100)
    assert torch.equal(scale, (amax / 448).float().squeeze(1))
    assert torch.equal(x8.double(), nearest_e4m3((x.double() * (448 / amax).float()).float().double()))
    packed, scale = every_code_and_scale()
    exact = nvfp4.dequantize(packed, scale, torch.tensor([8.0]), torch.float64)
    assert torch.equal(qerl_nvfp4.dequantize_fp8(packed, scale).double(), nearest_e4m3(exact))
    assert torch.equal(qerl_nvfp4.dequantize_fp8(packed, scale, True).double(), nearest_e4m3(exact.T))


@pytest.mark.parametrize("compute", reference.COMPUTE)
@pytest.mark.parametrize("per_row", [False, True], ids=["scalar", "per_row"])
def test_products_with_a_bias_and_each_shards_own_adapter(compute, per_row):
    packed, scale, gs = weight = random_weight(48, 64, per_row=per_row)
    x, dy = torch.randn(6, 64).bfloat16(), torch.randn(6, 48).bfloat16()
    bias, a, b = torch.randn(48).bfloat16(), torch.randn(8, 64).bfloat16(), torch.randn(48, 4).bfloat16()
    W, x64, dy64 = nvfp4.dequantize(packed, scale, gs, torch.float64), x.double(), dy.double()
    base, dx = x64 @ W.T, dy64 @ W
    if compute == "w4a8":
        w8, factor = qerl_nvfp4.dequantize_fp8(packed, scale).double(), (8 / gs.double()).float()
        (x8, m), (dy8, n) = map(qerl_nvfp4.quantize_fp8, (x, dy.float() * factor if per_row else dy))
        base = x8.double() @ w8.T * m.unsqueeze(1) * factor
        dx = dy8.double() @ w8 * n.unsqueeze(1) * (1 if per_row else factor)
    a64, b64 = a.double(), b.double()
    adapter = torch.cat([(x64 @ a64[:4].T) @ b64[:32].T, (x64 @ a64[4:].T) @ b64[32:].T], dim=-1)
    y = qerl_nvfp4.linear(x.view(2, 3, 64), *weight, bias, a, b, (32, 16), compute=compute)
    assert y.shape == (2, 3, 48) and relative_error(y.view(6, 48), base + bias.double() + adapter) < 5e-3
    assert relative_error(qerl_nvfp4.linear(x, *weight, compute=compute), base) < 4e-3
    assert relative_error(qerl_nvfp4.linear_backward(dy, *weight, compute), dx) < 4e-3


def test_rms_norm_keeps_a_float32_weight():
    x, r, w = torch.randn(3, 40).bfloat16(), torch.randn(3, 40).bfloat16(), 1 + torch.randn(40) * 1e-3
    added, h = qerl_nvfp4.rms_norm(x, w, 1e-6, r)
    assert torch.equal(h, (x.float() + r.float()).bfloat16())
    for y, of in ((qerl_nvfp4.rms_norm(x, w, 1e-6), x.double()), (added, h.double())):
        assert relative_error(y, of / (of.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()) < 4e-3


def refuses(match: str, call, *arguments) -> None:
    with pytest.raises(ValueError, match=match):
        call(*arguments)


def test_wrong_shapes_name_the_numbers():
    packed, scale, gs = weight = random_weight(32, 64)
    x, a, b = torch.randn(2, 64), torch.randn(4, 64), torch.randn(32, 4)
    linear, rms_norm = qerl_nvfp4.linear, qerl_nvfp4.rms_norm
    refuses("48 columns", linear, torch.randn(2, 48), *weight)
    refuses("block_scale has shape", linear, x, packed, scale[:, :2], gs)
    refuses("7 elements", linear, x, packed, scale, torch.ones(7))
    refuses("w8a8", qerl_nvfp4.linear_backward, torch.randn(2, 32), *weight, "w8a8")
    refuses("best", qerl_nvfp4.quantize, torch.randn(4, 32), "best", gs)
    refuses(r"bias has shape \(16,\)", linear, x, *weight, torch.zeros(16))
    refuses("both lora_a", linear, x, *weight, None, a)
    refuses(r"lora_splits are \(16, 8\)", linear, x, *weight, None, a.repeat(2, 1), b, (16, 8))
    refuses(r"2 shards of rank 4 need \(8, 64\)", linear, x, *weight, None, a, b, (16, 16))
    refuses(r"2 shards of rank 0 need \(0, 64\)", linear, x, *weight, None, a, torch.empty(32, 0), (16, 16))
    refuses("dy has 31 columns", qerl_nvfp4.linear_backward, torch.randn(2, 31), *weight)
    refuses(r"needs a weight \(64,\)", rms_norm, x, torch.ones(63), 1e-6)
    memory = torch.zeros(32, 64, dtype=torch.bfloat16)
    for out in (memory[:16], memory.float(), memory.t()):
        refuses("out is", qerl_nvfp4.dequantize, *weight, torch.bfloat16, out)
    assert not memory.any(), "nothing was written"


def refused_by_all(match: str, packed, scale, gs) -> None:
    refuses(match, qerl_nvfp4.linear, torch.randn(2, packed.shape[1] * 2), packed, scale, gs)
    refuses(match, qerl_nvfp4.linear_backward, torch.randn(2, packed.shape[0]), packed, scale, gs)
    refuses(match, qerl_nvfp4.dequantize, packed, scale, gs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2], ids=str)
def test_block_scales_of_another_type_are_refused(dtype):
    packed, scale, gs = random_weight(64, 64)
    refused_by_all(f"block_scale is {dtype}", packed, scale.view(torch.float8_e4m3fn).float().to(dtype), gs)


@pytest.mark.parametrize(
    "wrong,match",
    [(torch.ones(1).double(), "global_scale is torch.float64")]
    + [(torch.ones(s), "elements.* each of the 64 rows") for s in ((1, 64), (3,), (64, 1), (64, 2), (0,))],
    ids=lambda value: str(value.shape) if isinstance(value, torch.Tensor) else "",
)
def test_a_global_scale_of_another_type_or_shape_is_refused(wrong, match):
    """(1, N) was read as the first row's for all, three as the first three rows' and the memory behind them."""
    refused_by_all(match, *random_weight(64, 64)[:2], wrong)
    refuses(match, qerl_nvfp4.quantize, torch.randn(64, 64).bfloat16(), "rtn", wrong)


@pytest.mark.parametrize("name", ["x", "block_scale", "global_scale", "bias", "lora_a", "lora_b"])
def test_a_tensor_of_another_device_is_refused(name):
    """Its address would have been read on this one."""
    x, dy, a, b = (torch.randn(shape) for shape in ((2, 64), (2, 32), (4, 64), (32, 4)))
    given = dict(zip(("x", "packed", "block_scale", "global_scale"), (x, *random_weight(32, 64)), strict=True))
    given |= {"bias": torch.randn(32), "lora_a": a, "lora_b": b, "lora_splits": None}
    given[name] = given[name].to("meta")
    refuses(f"{name} is on meta, the packed weight on cpu", ops_module.check, *given.values())
    refuses("dy is on meta", ops_module.check_backward, dy.to("meta"), *random_weight(32, 64))


def test_an_adapter_of_rank_0_adds_nothing():
    weight = random_weight(48, 64)
    x, a, b = torch.randn(3, 64).bfloat16(), torch.empty(0, 64).bfloat16(), torch.empty(48, 0).bfloat16()
    assert torch.equal(qerl_nvfp4.linear(x, *weight, None, a, b, (32, 16)), qerl_nvfp4.linear(x, *weight))


def test_a_gradient_that_would_be_lost_is_refused():
    packed, scale, gs = random_weight(32, 64)
    x, weight = torch.randn(2, 64, requires_grad=True), torch.ones(64, requires_grad=True)
    b = torch.randn(32, 4, requires_grad=True)
    for call in (
        lambda: qerl_nvfp4.linear(x, packed, scale, gs),
        lambda: qerl_nvfp4.linear(x.detach(), packed, scale, gs, None, torch.randn(4, 64), b),
        lambda: qerl_nvfp4.rms_norm(x.detach(), weight, 1e-6),
        lambda: torch.compile(lambda x: qerl_nvfp4.linear(x, packed, scale, gs) + x.sum(), backend="aot_eager")(x),
    ):
        with pytest.raises(Exception, match="no autograd"):
            call()
        with torch.no_grad():
            call()


def test_operators_have_correct_fakes():
    weight = random_weight(32, 64)
    x, dy = torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(3, 32, dtype=torch.bfloat16)
    strided = torch.randn(2, 5, 3, 64).bfloat16().transpose(1, 2)
    for operator, arguments in (
        (ops.linear, (x, *weight)),
        (ops.linear, (x, *weight, None, None, None, None, False, "w4a8")),
        (ops.linear_backward, (dy, *weight)),
        (ops.linear_backward, (dy, *weight, "w4a8")),
        (ops.quantize_fp8, (x, True)),
        (ops.quantize_fp8, (x,)),
        (ops.dequantize_fp8, (*weight[:2], True)),
        (ops.dequantize, (*weight, torch.bfloat16)),
        (ops.rms_norm, (x, torch.ones(64), 1e-6, x)),
        (ops.rms_norm, (strided, torch.ones(64), 1e-6)),
        (ops.rms_norm, (strided, torch.ones(64), 1e-6, strided, True)),
        (ops.swiglu, (strided,)),
        (ops.rms_norm, (strided.float(), torch.ones(64), 1e-6)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))
