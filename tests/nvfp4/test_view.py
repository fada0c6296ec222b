"""`NVFP4Linear.weight`: reads as the dequantized weight, and a write is never lost."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qerl_trl.nvfp4.linear import NVFP4Linear
from qerl_trl.nvfp4.view import DecodedWeight


@pytest.fixture
def layer() -> NVFP4Linear:
    torch.manual_seed(0)
    return NVFP4Linear.from_linear(nn.Linear(64, 32).bfloat16())


def test_it_reads_as_the_dequantized_weight(layer):
    view, dense = layer.weight, layer.dequantize()
    assert isinstance(view, DecodedWeight) and view.shape == (32, 64) and view.dtype == torch.bfloat16
    assert view.device == dense.device and not view.requires_grad
    for look in (lambda w: w.data, lambda w: w.float().sum(), lambda w: w.T @ w, lambda w: w[3:5], copy.deepcopy):
        assert torch.equal(look(view), look(dense))
    assert isinstance(layer, NVFP4Linear) and "weight" not in dict(layer.named_parameters())


def test_a_product_with_it_has_the_gradient_of_a_dense_one(layer):
    x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    y = F.linear(x, layer.weight)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(y) @ layer.dequantize())


@pytest.mark.parametrize("given", [lambda w: w, lambda w: w.data, lambda w: nn.Parameter(w, requires_grad=False)])
def test_its_own_weight_changes_nothing(layer, given):
    """As PEFT does it when an adapter is unloaded."""
    before = layer.dequantize()
    layer.weight = given(layer.weight)
    assert isinstance(layer, NVFP4Linear) and torch.equal(layer.weight, before)


def test_the_weight_of_another_packed_layer_is_copied(layer):
    other = NVFP4Linear.from_linear(nn.Linear(64, 32).bfloat16())
    layer.weight = other.weight
    assert type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and not layer.weight.requires_grad
    assert torch.equal(layer.weight, other.dequantize()) and isinstance(other, NVFP4Linear)


def add_in_place(layer, delta):
    with torch.no_grad():
        layer.weight.add_(delta)


def add_to_data(layer, delta):
    layer.weight.data += delta


def replace(layer, delta):
    layer.weight = nn.Parameter(layer.weight.data + delta, requires_grad=False)


@pytest.mark.parametrize("write", [add_in_place, add_to_data, replace])
def test_a_write_makes_the_layer_dense(layer, write):
    before, delta = layer.dequantize(), torch.randn(32, 64).bfloat16()
    x, bias = torch.randn(3, 64, dtype=torch.bfloat16), layer.bias
    write(layer, delta)
    assert type(layer) is nn.Linear and vars(layer).keys() == vars(nn.Linear(1, 1)).keys()
    assert sorted(layer.state_dict()) == ["bias", "weight"] and layer.bias is bias
    assert torch.equal(layer.weight, before + delta) and torch.equal(layer(x), F.linear(x, before + delta, bias))


@pytest.mark.parametrize(
    "write", [lambda w: w[0].fill_(1), lambda w: w.T.add_(1), lambda w: torch.add(w[0], 1, out=w[0])]
)
def test_a_write_to_a_part_that_would_be_lost_is_refused(layer, write):
    before = layer.dequantize()
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"write to a part.*dequantize"):
            write(layer.weight)
    assert isinstance(layer, NVFP4Linear) and torch.equal(layer.dequantize(), before)


@pytest.mark.parametrize("ask", [lambda w: w.requires_grad_(), lambda w: setattr(w, "requires_grad", True)])
def test_a_gradient_is_refused(layer, ask):
    with pytest.raises(RuntimeError, match=r"\(32, 64\) is packed in 4 bits.*modules_to_not_convert"):
        ask(layer.weight)
    layer.weight.requires_grad_(False)


def test_the_output_of_a_layer_can_be_added_to_in_place(layer):
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y += 1
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
