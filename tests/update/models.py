"""Tiny models with an adapter, their updates, and the comparisons that the tests of `update` and `memory` share."""

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.utils import counters

from qerl_trl.model.lora import register_nvfp4_lora
from qerl_trl.nvfp4.fused import fuse_storage
from qerl_trl.nvfp4.linear import NVFP4Linear, set_compute
from tests.tiny_models import make_tiny_model

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
#: few prompts, long and short, so that micro-batches share some of them
PROMPTS = Dataset.from_dict({"prompt": ["say one ", "a longer prompt: say two ", "six ", "ten and eleven "] * 4})
LOSSES = ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
#: relative difference of sums of some hundred float32 terms in another order
REORDERED = 1e-5


def adapted(family: str = "qwen2", base: str = "packed", dtype=torch.float32, layers: int = 2, **options) -> nn.Module:
    """A tiny model with a random adapter of a scaling that is not 1, in training mode."""
    model = make_tiny_model(family, dtype=dtype, num_hidden_layers=layers)
    if base != "dense":
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and name != "lm_head":
                    setattr(parent, name, NVFP4Linear.from_linear(child))
        fuse_storage(model)
        set_compute(model, base if base == "w4a8" else "w4a16")
    model.requires_grad_(False)
    options = {"r": 8, "lora_alpha": 12, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    model = get_peft_model(model, register_nvfp4_lora(LoraConfig(**options)))
    randomize(model)
    return model.train()


def small(family: str = "qwen2", layers: int = 2, **options) -> nn.Module:
    """A dense one with LoRA on two projections per layer, quick to compile."""
    options = {"target_modules": ["o_proj", "down_proj"], "task_type": None, **options}
    return adapted(family, "dense", layers=layers, **options)


class Branching(nn.Module):
    """A module that no compiler can make one graph of."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.sum().item() > -1e9 else x


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 1, only: str = "lora_") -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if only in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


def checkpointed(model: nn.Module, reentrant: bool = False) -> None:
    """transformers' own checkpoints around the layers."""
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def layers_of(model: nn.Module) -> list[nn.Module]:
    return list(model.get_base_model().get_decoder().layers)


def batch(length: int, sequences: int = 2, padded: bool = True) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 300, (sequences, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[0, : 3 * padded] = 0
    return {"input_ids": ids, "attention_mask": mask}


def update(model: nn.Module, given: dict[str, torch.Tensor], autocast: bool = False) -> dict[str, torch.Tensor]:
    """The logits of a batch, and the gradient of every tensor that has one."""
    model.zero_grad()
    given = {name: values.to(model.device) for name, values in given.items()}
    with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
        logits = model(**given, use_cache=False).logits[:, 3:].float()
    logits.log_softmax(-1)[..., 7].mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest over all tensors of |found - expected| / |expected|."""
    assert found.keys() == expected.keys() and len(found) > 1, set(found) ^ set(expected)
    return max(((found[n] - e).double().norm() / e.double().norm()).item() for n, e in expected.items())


def saved_bytes(model: nn.Module, run: Callable[[], Any]) -> int:
    """Bytes that `run()` keeps for its backward pass, without the model's parameters."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in saved.values())


def graphs() -> int:
    """Graphs compiled so far in this test."""
    return counters["stats"]["unique_graphs"]


def adapter_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name}


def assert_identical(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert not [name for name in left if not torch.equal(left[name], right[name])]


def forwards_of(trainer: Any) -> list[tuple[int, int]]:
    """Shape of the tokens of each forward with gradients in training, in a list that grows."""
    seen: list[tuple[int, int]] = []

    def note(module, args, output):
        if torch.is_grad_enabled() and trainer.model.training:
            seen.append(tuple(args[0].shape))

    trainer._packing.inner(trainer.model).get_input_embeddings().register_forward_hook(note)
    return seen
