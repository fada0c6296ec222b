"""The norms that feed linear layers, by family and wrapper; tracing leaves the model unchanged."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from qerl_trl.noise.norms import find_noisy_norms, multiplier_rms
from qerl_trl.nvfp4 import linear as linear_module
from qerl_trl.nvfp4.linear import NVFP4Linear
from tests.tiny_models import FAMILIES, make_tiny_model

SECOND_NORM = dict.fromkeys(FAMILIES, "post_attention_layernorm") | {
    "gemma2": "pre_feedforward_layernorm",
    "gemma3": "pre_feedforward_layernorm",
}


def expected_names(family: str, layers: int = 2) -> list[str]:
    return [
        f"model.layers.{layer}.{norm}" for layer in range(layers) for norm in ("input_layernorm", SECOND_NORM[family])
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_that_feed_linears(family):
    model = make_tiny_model(family)
    found = find_noisy_norms(model)
    assert list(found) == expected_names(family)
    assert all(found[name] is model.get_submodule(name) for name in found)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_multiplier_rms(family):
    norms = find_noisy_norms(make_tiny_model(family))
    for name, norm in norms.items():
        multiplier = norm.weight.detach().double() + (family == "gemma2")
        assert multiplier_rms(norms)[name] == pytest.approx(multiplier.square().mean().sqrt().item(), rel=1e-12)


def quantized(model: nn.Module) -> nn.Module:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            model.set_submodule(name, NVFP4Linear.from_linear(module))
    return model


TRAINED = ["input_layernorm", SECOND_NORM["gemma3"]]
WRAPPINGS = {
    "lora": lambda model: get_peft_model(model, LoraConfig(target_modules="all-linear")),
    "modules_to_save": lambda model: get_peft_model(
        model, LoraConfig(target_modules=["q_proj"], modules_to_save=TRAINED)
    ),
    "data_parallel": nn.DataParallel,  # the layout of DistributedDataParallel: everything under `module`
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "nvfp4": quantized,
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_wrapper_changes_no_name(wrapping):
    found = find_noisy_norms(WRAPPINGS[wrapping](make_tiny_model("gemma3")))
    assert list(found) == expected_names("gemma3")
    if wrapping == "modules_to_save":  # the copy that is trained and used, not the frozen original
        assert all(module.weight.requires_grad for module in found.values())


def test_tracing_leaves_no_trace():
    model = get_peft_model(make_tiny_model("qwen2"), LoraConfig(target_modules="all-linear", lora_dropout=0.5))
    model.train()
    frozen_part = model.get_submodule("base_model.model.model.layers.0.mlp").eval()  # mixed flags
    flags = {name: module.training for name, module in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    random_state = torch.get_rng_state()
    find_noisy_norms(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert not frozen_part.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_packed_weights_are_not_decoded(monkeypatch):
    """On a CPU that takes a minute for 7B, and FSDP leaves the model there until training starts."""
    model = make_tiny_model("llama")
    expected = list(find_noisy_norms(model))
    quantized(model)
    with monkeypatch.context() as context:
        context.setattr(linear_module, "dequantize", lambda *_: pytest.fail("a weight was decoded"))
        assert list(find_noisy_norms(model)) == expected
    assert model(input_ids=torch.arange(4)[None]).logits.abs().sum() > 0, "the layers compute again"
