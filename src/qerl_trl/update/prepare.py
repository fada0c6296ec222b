"""Make a built trainer's update fast: one function, called once, when model, adapter and noise are in place."""

from typing import Any

from ..memory import recompute
from . import lora_linear, packing
from .compiled_layers import compile_for


def prepare(trainer: Any) -> None:
    """Each part changes how the update is computed, never what; where it cannot, it leaves TRL's own way and says so once.

    In this order: first what changes the forward of single modules; then packing, which tries the model as it will run and may leave its
    attention as it is; then what comes of it is compiled; last, of all that it depends how many layers have to recompute.
    """
    if trainer.args.fused_lora:
        lora_linear.fuse(trainer.accelerator.unwrap_model(trainer.model))
    packing.prepare(trainer)
    trainer._compiled = compile_for(trainer)
    recompute.prepare(trainer)
