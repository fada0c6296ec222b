"""`NVFP4Linear` against the dense layer with the dequantized weight: values, gradients, what is kept in memory."""

import copy
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qerl_nvfp4
from qerl_trl.nvfp4 import linear as linear_module
from qerl_trl.nvfp4.format import NVFP4Tensor, dequantize, quantize
from qerl_trl.nvfp4.linear import NVFP4Linear, decoded_weights, describe, linear
from tests.nvfp4.models import same_state
from tests.tiny_models import gathered

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


# --- values


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (0, 64)], ids=str)
def test_forward_and_backward_equal_the_dense_layer_bit_for_bit(shape, dtype, bias):
    layer = make_layer(bias=bias, dtype=dtype)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for ours, theirs in zip(forward_backward(layer, x), forward_backward(dense(layer), x), strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs)


@given(n=st.integers(1, 40), blocks=st.integers(1, 6), rows=st.integers(1, 5), seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_any_shape(n, blocks, rows, seed):
    layer = make_layer(n, 16 * blocks, seed=seed)
    x = torch.randn(rows, 16 * blocks, generator=torch.Generator().manual_seed(seed)).bfloat16()
    for ours, theirs in zip(forward_backward(layer, x), forward_backward(dense(layer), x), strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_of_what_is_around_the_layer():
    """LoRA beside it, a norm before it: the same gradients as through the dense layer."""

    class Block(nn.Module):
        def __init__(self, base):
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.base = nn.RMSNorm(64), base
            self.a, self.b = nn.Linear(64, 4, bias=False), nn.Linear(4, 48, bias=False)

        def forward(self, x):
            x = self.norm(x)
            return self.base(x) + self.b(self.a(x))

    layer = make_layer(dtype=torch.float32)
    x = torch.randn(7, 64)
    gradients = []
    for base in (layer, dense(layer).requires_grad_(False)):
        block = Block(base)
        block(x).square().sum().backward()
        gradients.append({name: p.grad for name, p in block.named_parameters() if p.requires_grad})
    assert set(gradients[0]) == {"norm.weight", "a.weight", "b.weight"}
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_gradcheck_in_double_precision():
    layer = make_layer(6, 16)
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, bias: linear(x, *layer.nvfp4, bias), (x, bias))


def test_bias_can_learn():
    layer = make_layer(dtype=torch.float32)
    layer.bias.requires_grad_(True)
    twin = dense(layer)
    x, dy = torch.randn(2, 3, 64), torch.randn(2, 3, 48)
    layer(x).backward(dy)
    twin(x).backward(dy)
    torch.testing.assert_close(layer.bias.grad, twin.bias.grad)


@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_float32_input_is_computed_in_compute_dtype_and_returned_as_float32(compute_dtype):
    layer = make_layer(dtype=compute_dtype)
    x = torch.randn(5, 64)
    y, dx = forward_backward(layer, x)
    assert y.dtype == dx.dtype == torch.float32
    assert torch.equal(y, F.linear(x.to(compute_dtype), layer.dequantize(), layer.bias).float())


@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
def test_autocast_decides_the_dtype(x_dtype):
    layer = make_layer(dtype=torch.float32)
    x = torch.randn(5, 64, dtype=x_dtype)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = layer(x), dense(layer)(x)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, theirs)


# --- memory


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


def test_parameters_are_frozen_bytes():
    layer = make_layer()
    assert {name: (p.dtype, p.requires_grad) for name, p in layer.named_parameters()} == {
        "weight_packed": (torch.uint8, False),
        "weight_scale": (torch.uint8, False),
        "weight_global_scale": (torch.uint8, False),
        "bias": (torch.bfloat16, False),
    }
    assert "weight" not in layer.state_dict()  # it is decoded where it is looked at (test_view.py)


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half, nn.Module.float, lambda m: m.to(torch.float16)])
def test_casting_the_module_leaves_the_bytes(cast):
    layer = make_layer()
    before = {name: p.clone() for name, p in layer.named_parameters() if p.dtype == torch.uint8}
    cast(layer)
    assert all(torch.equal(layer.get_parameter(name), value) for name, value in before.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bytes_that_were_gathered_as_floats_are_the_same_bytes(dtype):
    layer = make_layer(dtype=dtype)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    twin = gathered(layer, dtype)
    assert twin.weight_packed.dtype == dtype
    for found, expected in zip(
        (*forward_backward(twin, x), *twin.nvfp4), (*forward_backward(layer, x), *layer.nvfp4), strict=True
    ):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


# --- torch.compile


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("implementation", ["auto", "decode", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiles_as_one_graph_with_the_same_results(dtype, implementation, autocast):
    torch.compiler.reset()
    model = nn.Sequential(make_layer(64, 64, dtype=dtype), nn.SiLU(), make_layer(48, 64, seed=1, dtype=dtype))
    for layer in (model[0], model[2]):
        layer.implementation = implementation
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 64, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        results = [forward_backward(m, x) for m in (model, compiled)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("implementation", "operators"),
    [
        ("auto", {"dequantize", "linear_backward"}),
        ("kernel", {"linear", "linear_backward"}),
        ("decode", {"dequantize", "linear_backward"}),
        ("reference", {"dequantize"}),
    ],
)
def test_the_compiler_sees_the_operators_of_the_kernels_package(implementation, operators):
    torch.compiler.reset()
    layer, seen = make_layer(64, 64), set()
    layer.implementation = implementation

    def note(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        seen.update(str(node.target).split(".")[:2][1] for node in graph.graph.nodes if "qerl" in str(node.target))
        return make_boxed_func(graph.forward)

    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=note, bw_compiler=note), fullgraph=True)
    forward_backward(compiled, torch.randn(5, 64, dtype=torch.bfloat16))
    assert seen == operators


@pytest.mark.parametrize(
    ("tokens", "called"),
    [(1, "linear"), (128, "linear"), (129, "dequantize"), (1024, "dequantize"), (1536, "dequantize"), (1537, "linear")],
)
def test_training_micro_batches_compile_no_kernel_of_their_own(monkeypatch, tokens, called):
    """A first step of a micro-batch of 129 to 1024 tokens took minutes: one kernel per shape and range of lengths was compiled. Above 1536 the
    kernels' own choice is to decode, too."""
    calls = []
    package = SimpleNamespace(
        select=qerl_nvfp4.select,
        linear=lambda x, *rest: calls.append("linear") or x.new_zeros(*x.shape[:-1], 64),
        dequantize=lambda *rest: calls.append("dequantize") or torch.zeros(64, 64, dtype=torch.bfloat16),
    )
    monkeypatch.setattr(linear_module, "_pick", lambda *rest: package)
    layer = make_layer(64, 64)
    assert layer(torch.randn(1, tokens, 64, dtype=torch.bfloat16)).shape == (1, tokens, 64)
    assert calls == [called]


# --- copies and moves


def fused_pair() -> nn.ModuleDict:
    """Two layers that hold row slices of one storage, as q/k/v do."""
    layers = nn.ModuleDict({"a": make_layer(32, 64), "b": make_layer(16, 64, seed=1)})
    for attribute in ("weight_packed", "weight_scale"):
        fused = torch.cat([getattr(layer, attribute).detach() for layer in layers.values()])
        layers["a"].get_parameter(attribute).data, layers["b"].get_parameter(attribute).data = fused.split([32, 16])
    for layer in layers.values():
        layer.fused_rows = 48
    return layers


def is_fused(layers: nn.ModuleDict) -> bool:
    a, b = layers["a"].weight_packed, layers["b"].weight_packed
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and b.data_ptr() == a.data_ptr() + a.numel()


def test_deepcopy_keeps_the_shared_storage_and_shares_nothing_with_the_original():
    layers = fused_pair()
    twin = copy.deepcopy(layers)
    assert same_state(layers, twin) and is_fused(twin)
    twin["b"].weight_packed.zero_()
    assert twin["a"].weight_packed.any() and layers["b"].weight_packed.any()


def test_deepcopy_of_one_fused_layer_alone():
    layers = fused_pair()
    alone = copy.deepcopy(layers["b"])
    assert same_state(alone, layers["b"])
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert torch.equal(alone(x), layers["b"](x))


def test_deepcopy_keeps_parameters_shared_within_the_module_shared():
    layer = make_layer()
    twin = copy.deepcopy(nn.ModuleList([layer, layer]))
    assert twin[0] is twin[1]


def test_moving_keeps_the_shared_storage(monkeypatch):
    """A CPU has nowhere to move to: `_apply` with a copying function is what `.to(device)` does."""
    layers = fused_pair()
    before = copy.deepcopy(layers)
    copies = []
    layers._apply(lambda tensor: copies.append(tensor.nbytes) or tensor.clone())
    assert same_state(layers, before) and is_fused(layers)
    assert copies.count(48 * 32) == 1, "the fused storage was copied more than once"


@pytest.mark.gpu
def test_moving_to_the_gpu_keeps_the_shared_storage():
    layers = fused_pair()
    before = copy.deepcopy(layers)
    layers.to("cuda")
    assert is_fused(layers)
    layers.to("cpu")
    assert is_fused(layers) and same_state(layers, before)


def test_to_dtype_does_not_break_the_shared_storage():
    assert is_fused(fused_pair().to(torch.float16))


def test_meta_and_to_empty():
    layers = fused_pair().to("meta")
    assert all(p.is_meta for p in layers.parameters())
    layers.to_empty(device="cpu")
    assert layers["a"].weight_packed.shape == (32, 32)


# --- construction, choice, errors


def test_from_nvfp4_copies_nothing_and_accepts_float8_scales():
    packed, block_scale, global_scale = quantize(torch.randn(48, 64))
    layer = NVFP4Linear.from_nvfp4(NVFP4Tensor(packed, block_scale.view(torch.float8_e4m3fn), global_scale))
    assert layer.weight_packed.data_ptr() == packed.data_ptr()
    assert torch.equal(layer.weight_scale, block_scale)
    assert layer.global_scale.item() == global_scale.item()
    assert torch.equal(layer.dequantize(), dequantize(packed, block_scale, global_scale))


def test_a_width_that_is_no_multiple_of_16_is_refused_by_torch():
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        NVFP4Linear.from_linear(nn.Linear(24, 8))


def test_decoded_weights_launch_no_kernel_for_few_tokens(monkeypatch):
    """A stand-in for the kernels: each call is recorded."""
    asked = []

    class Kernels:
        @staticmethod
        def linear(x, *rest):
            raise AssertionError("a kernel for few tokens")

        @staticmethod
        def dequantize(*given):
            asked.append("dequantize")
            return dequantize(*given)

    monkeypatch.setattr(linear_module, "_kernels", lambda device: (Kernels, ""))
    model = nn.Sequential(make_layer(64), make_layer(48))
    model[1].implementation = "reference"
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with decoded_weights(model):
        y = model(x)
    assert asked == ["dequantize"]
    assert torch.equal(y, dense(model[1])(dense(model[0])(x)))
    assert [layer.implementation for layer in model] == ["auto", "reference"], "as before"
    with pytest.raises(KeyError), decoded_weights(model):
        raise KeyError
    assert model[0].implementation == "auto"


def test_describe_is_one_line_with_a_reason():
    line = describe("cpu")
    assert "\n" not in line
    assert "reference" in line and "CUDA" in line


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 200])
def test_the_kernels_agree_with_the_reference(rows):
    if "reference" in describe("cuda").split(";")[0]:
        pytest.skip(describe("cuda"))
    layer = make_layer(512, 1024).cuda()
    x = torch.randn(rows, 1024, dtype=torch.bfloat16, device="cuda")
    layer.implementation = "reference"
    expected = forward_backward(layer, x)
    layer.implementation = "kernel"
    for ours, theirs in zip(forward_backward(layer, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * theirs.abs().max().item())


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
