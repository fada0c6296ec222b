"""Make a built trainer's update fast: one function, called once, when model, adapter and noise are in place."""

from ..upstream import OnlineTrainer
from . import packing


def prepare(trainer: OnlineTrainer) -> None:
    """Each part changes how the update is computed, never what; where it cannot, it leaves TRL's own way and says so once.

    In this order: packing tries the model and may leave its attention as it is, before anything is compiled.
    """
    packing.prepare(trainer)
