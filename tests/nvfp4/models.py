"""Parts of tiny packed models that the tests compare."""

import itertools

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qerl_trl.nvfp4.architectures import DECODER
from qerl_trl.nvfp4.linear import NVFP4Linear

LAYOUT_NAMES = ["compressed-tensors", "modelopt"]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12)).logits


def stock_logits(folder) -> torch.Tensor:
    """Of the model that plain transformers loads from a folder."""
    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))


def same_state(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in a)


def nvfp4_layers(model) -> dict[str, NVFP4Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, NVFP4Linear)}


def dense_layers(model) -> set[str]:
    return {name for name, module in model.named_modules() if type(module) is nn.Linear}


def assert_fused(model) -> None:
    """q/k/v and gate/up: one storage each, in order, one global scale."""
    groups = 0
    for parent, group in itertools.product(model.modules(), DECODER.groups):
        layers = [getattr(parent, name, None) for name in group]
        if not all(isinstance(layer, NVFP4Linear) for layer in layers):
            continue
        groups += 1
        assert len({bytes(layer.weight_global_scale.tolist()) for layer in layers}) == 1
        for attribute in ("weight_packed", "weight_scale"):
            parts = [getattr(layer, attribute) for layer in layers]
            assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
            for before, after in itertools.pairwise(parts):
                assert after.data_ptr() == before.data_ptr() + before.numel()
    assert groups == 2 * model.config.num_hidden_layers
