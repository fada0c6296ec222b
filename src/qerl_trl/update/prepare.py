"""Make a built trainer's update fast: one function, called once, when model, adapter and noise are in place."""

from ..upstream import OnlineTrainer
from . import lora_linear, packing, recompute
from .compiled import compile_for


def prepare(trainer: OnlineTrainer) -> None:
    """Each part changes how the update is computed, never what; where it cannot, it leaves TRL's own way and says so once.

    In this order: first what changes the forward of single modules; then packing, which tries the model as it will run and may leave its
    attention as it is; last, what comes of it is compiled.
    """
    if trainer.args.fused_lora:
        lora_linear.fuse(trainer.accelerator.unwrap_model(trainer.model))
    recompute.prepare(trainer)
    packing.prepare(trainer)
    compile_for(trainer)
