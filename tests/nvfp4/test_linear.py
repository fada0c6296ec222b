"""`NVFP4Linear` against the dense layer with the dequantized weight: values, gradients, memory."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import qerl_nvfp4
from qerl_trl.nvfp4 import linear as linear_module
from qerl_trl.nvfp4.linear import NVFP4Linear, decoded_weights, linear, set_compute

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def make_layer(n: int = 48, k: int = 64, bias: bool = True, dtype=torch.bfloat16, seed: int = 0) -> NVFP4Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NVFP4Linear.from_linear(nn.Linear(k, n, bias=bias, dtype=dtype))


def dense(layer: NVFP4Linear, dtype=None) -> nn.Linear:
    """The ordinary layer that `layer` should equal."""
    twin = nn.Linear(
        layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=dtype or layer.compute_dtype
    )
    with torch.no_grad():
        twin.weight.copy_(layer.dequantize(torch.float32))
        if layer.bias is not None:
            twin.bias.copy_(layer.bias)
    return twin


def forward_backward(layer, x: torch.Tensor, dy_seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(dy_seed)).to(y.device, y.dtype)
    y.backward(dy)
    return y.detach(), x.grad


@given(
    n=st.integers(1, 40),
    blocks=st.integers(1, 6),
    leading=st.sampled_from([(), (5,), (2, 3), (0,)]),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_forward_and_backward_equal_the_dense_layer_bit_for_bit(n, blocks, leading, dtype, bias, seed):
    layer = make_layer(n, 16 * blocks, bias, dtype, seed)
    x = torch.randn(*leading, 16 * blocks, generator=torch.Generator().manual_seed(seed)).to(dtype)
    for ours, theirs in zip(forward_backward(layer, x), forward_backward(dense(layer), x), strict=True):
        assert ours.dtype == dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_w4a8_is_the_kernels_function_bit_for_bit(dtype):
    layer, x = make_layer(dtype=dtype, bias=False), torch.randn(5, 64).to(dtype)
    packed, block_scale, scale = layer.nvfp4
    for scales in (scale, scale * 2.0 ** (torch.arange(48) % 5)):
        weight = packed, block_scale, scales
        y, dx = forward_backward(lambda x, weight=weight: linear(x, *weight, compute="w4a8"), x)
        assert torch.equal(y, qerl_nvfp4.linear(x, *weight, compute="w4a8"))
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert torch.equal(dx, qerl_nvfp4.linear_backward(dy, *weight, compute="w4a8"))
    layer.compute = "w4a8"
    assert torch.equal(layer(x), linear(x, *layer.nvfp4, compute="w4a8"))


@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_float32_input_is_computed_in_compute_dtype_and_returned_as_float32(compute_dtype):
    layer, x = make_layer(dtype=compute_dtype), torch.randn(5, 64)
    y, dx = forward_backward(layer, x)
    assert y.dtype == dx.dtype == torch.float32
    assert torch.equal(y, F.linear(x.to(compute_dtype), layer.dequantize(), layer.bias).float())
    for dtype in DTYPES:
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = layer(x.to(dtype)), dense(layer)(x.to(dtype))
        assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs)


def test_backward_keeps_only_packed_bytes():
    layer = make_layer(256, 512)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(torch.randn(3, 512, dtype=torch.bfloat16, requires_grad=True))
    assert {(t.dtype, tuple(t.shape)) for t in saved} == {
        (torch.uint8, (256, 256)),
        (torch.uint8, (256, 32)),
        (torch.float32, (1,)),
    }
    own = {layer.weight_packed.data_ptr(), layer.weight_scale.data_ptr(), layer.weight_global_scale.data_ptr()}
    assert {t.data_ptr() for t in saved} == own, "something was copied for backward"
    assert y.requires_grad


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half, nn.Module.float])
def test_casting_the_module_leaves_the_bytes(cast):
    layer = make_layer()
    before = {name: p.clone() for name, p in layer.named_parameters() if name != "bias"}
    assert sorted(before) == ["weight_global_scale", "weight_packed", "weight_scale"]
    assert not any(p.requires_grad for p in layer.parameters()) and "weight" not in layer.state_dict()
    cast(layer)
    for name, value in before.items():
        assert value.dtype == torch.uint8 and torch.equal(layer.get_parameter(name), value)


@pytest.mark.parametrize(
    ("dtype", "implementation", "autocast", "compute"),
    [
        (torch.bfloat16, "auto", False, "w4a16"),
        (torch.bfloat16, "reference", False, "w4a8"),
        (torch.float16, "decode", False, "w4a16"),
        (torch.float32, "auto", True, "w4a8"),
    ],
)
def test_compiles_as_one_graph_with_the_same_results(dtype, implementation, autocast, compute):
    torch.compiler.reset()
    model = nn.Sequential(make_layer(64, 64, dtype=dtype), nn.SiLU(), make_layer(48, 64, seed=1, dtype=dtype))
    set_compute(model, compute)
    for layer in (model[0], model[2]):
        layer.implementation = implementation
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 64, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        results = [forward_backward(m, x) for m in (model, compiled)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("tokens", "implementation", "called"),
    [
        (128, "auto", "linear"),
        (129, "auto", "dequantize"),
        (1536, "auto", "dequantize"),
        (1537, "auto", "linear"),
        (1, "decode", "dequantize"),
    ],
)
def test_training_micro_batches_compile_no_kernel_of_their_own(monkeypatch, tokens, implementation, called):
    """Else a first step of 129 to 1024 tokens takes minutes. Above 1536 the kernels' own choice is to decode."""
    calls = []
    package = SimpleNamespace(
        select=qerl_nvfp4.select,
        linear=lambda x, *rest: calls.append("linear") or x.new_zeros(*x.shape[:-1], 64),
        dequantize=lambda *rest: calls.append("dequantize") or torch.zeros(64, 64, dtype=torch.bfloat16),
    )
    monkeypatch.setattr(linear_module, "_kernels", lambda device: (package, ""))
    y = make_layer(64, 64)(torch.randn(1, tokens, 64, dtype=torch.bfloat16), implementation)
    assert y.shape == (1, tokens, 64) and calls == [called]


def test_decoded_weights_are_used_inside_the_context_only():
    model = nn.Sequential(make_layer(64), make_layer(48))
    model[1].implementation = "reference"
    with pytest.raises(KeyError), decoded_weights(model):
        assert [layer.implementation for layer in model] == ["decode", "reference"]
        raise KeyError
    assert [layer.implementation for layer in model] == ["auto", "reference"]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("rows", [8, 200, 2048])
def test_a_compiled_model_launches_the_same_kernels(rows, backend):
    torch.compiler.reset()
    layer = make_layer(512, 1024).cuda()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(rows, 1024, dtype=torch.bfloat16, device="cuda")
    for ours, theirs in zip(forward_backward(compiled, x), forward_backward(layer, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2 * theirs.abs().max().item())
