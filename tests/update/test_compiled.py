"""Regional compilation: the same values and gradients as eager, few graphs whatever the lengths, and nothing else changed.

Mostly with the backend "aot_eager", which traces and splits forward and backward as inductor does and generates no code.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.utils import counters

from qerl_trl.update.compiled import compile_layers
from tests.tiny_models import FAMILIES, make_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def adapted(family: str = "qwen2", layers: int = 2, **config) -> nn.Module:
    """LoRA on two projections per layer, B not 0, in training mode."""
    torch.manual_seed(0)
    model = make_tiny_model(family, dtype=torch.float32, num_hidden_layers=layers)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    targets = [name for name in names if name.endswith(("o_proj", "down_proj"))]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **config)).train()


def layers_of(model: nn.Module) -> list[nn.Module]:
    return list(model.get_base_model().get_decoder().layers)


def batch(length: int, sequences: int = 2, padded: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(2, 300, (sequences, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def update(model: nn.Module, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(logits, gradients)"""
    model.zero_grad()
    logits = model(**given, use_cache=False).logits[:, 3:].float()
    logits.log_softmax(-1)[..., 7].mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected, rtol=1e-4, atol=1e-6) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=rtol, atol=1e-4)
    assert found[1].keys() == expected[1].keys() and found[1]
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            found[1][name], gradient, rtol=rtol, atol=atol + 1e-5 * gradient.abs().max(), msg=name
        )


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_eager(family):
    model = adapted(family)
    expected = {length: update(model, batch(length)) for length in (40, 33)}
    compile_layers(model, backend="aot_eager")
    for length, wanted in expected.items():
        assert_same(update(model, batch(length)), wanted)
    assert graphs() and not counters["graph_break"]


def test_no_length_compiles_again():
    model = adapted(layers=3)
    compile_layers(model, backend="eager")
    for length in (40, 41, 64, 33, 57, 128):
        update(model, batch(length))
    update(model, batch(45, sequences=3))
    assert graphs() == 2  # the layers, and the norm after them
