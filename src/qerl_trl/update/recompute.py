"""Recompute only what memory demands: how many decoder layers keep their activations for the backward pass.

Gradient checkpointing keeps the input of each layer and computes the layer once more in the backward pass. Where `gradient_checkpointing`
is left out, the plan (`memory/plan.py`) says how many layers need not: the last ones, since what they keep is given back before the first
ones recompute. transformers' own switch per layer (`GradientCheckpointingLayer`) takes them out.
"""

import logging
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..memory.plan import plan_again
from . import how

logger = logging.getLogger(__name__)


def prepare(trainer: Any) -> None:
    """Let as many layers of a trainer's model keep their activations as its plan says, at each update anew: where layers turn out not to
    compile, or a row not to be packed, fewer fit."""
    if trainer.memory_plan is None:
        return
    _follow(trainer)
    count = trainer.memory_plan.work.kept_layers
    if not count:
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    layers = decoder_layers(model)
    if len(layers) < count:
        logger.warning(
            "%s has %d layers that can be taken out of gradient checkpointing one by one, and %d need not recompute by the plan: all "
            "recompute. gradient_checkpointing=False recomputes none.",
            type(model).__name__,
            len(layers),
            count,
        )
        return
    kept = layers[len(layers) - count :]

    def take_out(*_: Any) -> None:
        if torch.is_grad_enabled():
            _follow(trainer)
            too_many = max(0, len(kept) - trainer.memory_plan.work.kept_layers)
            for layer in kept[:too_many]:
                layer.gradient_checkpointing = True
            del kept[:too_many]
        # at each forward: TRL switches the whole model off and on again around each rollout
        for layer in kept:
            layer.gradient_checkpointing = False

    model.register_forward_pre_hook(take_out)


def _follow(trainer: Any) -> None:
    """Plan again where updates are computed in another way than was planned."""
    now, work = how.computed(trainer), trainer.memory_plan.work
    if any(getattr(work, name) != value for name, value in now.items()):
        plan_again(trainer, **now)


def decoder_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers of a model's text part that can be checkpointed one by one, the first one first."""
    inner: Any = model
    if is_peft_model(model):
        inner = inner.get_base_model()
    decoder = inner.get_decoder() if hasattr(inner, "get_decoder") else inner
    return [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
