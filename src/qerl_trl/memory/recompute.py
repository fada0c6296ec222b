"""Recompute only what memory demands: how many decoder layers keep their activations for the backward pass.

Gradient checkpointing keeps the input of each layer and computes the layer once more in the backward pass. Where `gradient_checkpointing`
is left out, the plan (`memory/plan.py`) says how many layers need not: the last ones, since what they keep is given back before the first
ones recompute. transformers' own switch per layer (`GradientCheckpointingLayer`) takes them out, and the others too where they are compiled:
those recompute within the compiled layer (`CompiledLayers.recompute`), where it costs less.
"""

import logging
from typing import Any

import torch

from ..update import how
from ..update.layers import decoder_layers, decoder_of
from .of_trainer import plan_again

logger = logging.getLogger(__name__)


def prepare(trainer: Any) -> None:
    """Let as many layers of a trainer's model keep their activations as its plan says, at each update anew: where layers turn out not to
    compile, or a row not to be packed, fewer fit. The others recompute, compiled ones inside."""
    compiled = trainer._compiled if trainer.args.gradient_checkpointing else None
    model = trainer.accelerator.unwrap_model(trainer.model)
    layers = decoder_layers(model)
    count = 0
    if trainer.memory_plan is not None:
        _follow(trainer)
        count = trainer.memory_plan.work.kept_layers
    if not count and compiled is None:
        return
    if len(layers) < count:
        logger.warning(
            "%s has %d layers that can be taken out of gradient checkpointing one by one, and %d need not recompute by the plan: all "
            "recompute. gradient_checkpointing=False recomputes none.",
            type(model).__name__,
            len(layers),
            count,
        )
        count = 0
    kept = layers[len(layers) - count :]
    inside = [] if compiled is None else [layer for layer in layers if layer in compiled.layers]

    def divide() -> None:
        if compiled is not None:
            compiled.recompute([layer for layer in inside if layer not in kept])

    def take_out(*_: Any) -> None:
        if count and torch.is_grad_enabled():
            _follow(trainer)
            too_many = max(0, len(kept) - trainer.memory_plan.work.kept_layers)
            for layer in kept[:too_many]:
                layer.gradient_checkpointing = True
            del kept[:too_many]
            if too_many:
                divide()
        # at each forward: TRL switches the whole model off and on again around each rollout
        for layer in (*kept, *inside):
            layer.gradient_checkpointing = False

    divide()
    decoder_of(model).register_forward_pre_hook(take_out)


def _follow(trainer: Any) -> None:
    """Plan again where updates are computed in another way than was planned."""
    now, work = how.computed(trainer), trainer.memory_plan.work
    if any(getattr(work, name) != value for name, value in now.items()):
        plan_again(trainer, **now)
