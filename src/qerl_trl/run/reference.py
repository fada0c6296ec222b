"""The reference model that TRL moves towards the policy (`sync_ref_model`), which a run cannot go on without and `Trainer` does not save."""

import logging
import os
from pathlib import Path

from safetensors.torch import load_file, save_file

from ..support.trl import OnlineTrainer

logger = logging.getLogger(__name__)

NAME = "reference_model.safetensors"


def moves(trainer: OnlineTrainer) -> bool:
    """Whether this run's reference is another model than it began with."""
    return trainer.ref_model is not None and bool(getattr(trainer.args, "sync_ref_model", False))


def _is_sharded(trainer: OnlineTrainer) -> bool:
    return trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled


def save(trainer: OnlineTrainer, folder: str | os.PathLike) -> None:
    """Write it into an unsealed checkpoint; not where it is sharded."""
    if not moves(trainer) or not trainer.args.should_save or _is_sharded(trainer):
        return
    parameters = trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters()  # tied ones once
    save_file({name: p.detach().cpu().contiguous() for name, p in parameters}, Path(folder, NAME), {"format": "pt"})


def load(trainer: OnlineTrainer, folder: str | os.PathLike) -> None:
    """Load it from the checkpoint that a run is resumed from; a sharded one is in none, which is a warning."""
    if not moves(trainer):
        return
    if not (file := Path(folder, NAME)).is_file():
        logger.warning(
            "%s has no %s (a sharded one is not saved): the reference model is the first one again.", folder, NAME
        )
        return
    found = load_file(file)
    for name, parameter in trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters():
        parameter.data.copy_(found[name])
