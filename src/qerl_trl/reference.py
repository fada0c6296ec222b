"""The reference model that TRL moves towards the policy (`sync_ref_model`), which a run cannot go on without and `Trainer` does not save."""

import logging
import os
from pathlib import Path

from safetensors.torch import load_file, save_file

from . import checkpoint
from .upstream import OnlineTrainer

logger = logging.getLogger(__name__)

NAME = "reference_model.safetensors"


def moves(trainer: OnlineTrainer) -> bool:
    """Whether this run's reference is another model than it began with."""
    return trainer.ref_model is not None and bool(getattr(trainer.args, "sync_ref_model", False))


def _is_sharded(trainer: OnlineTrainer) -> bool:
    return trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled


def warn_if_not_saved(trainer: OnlineTrainer) -> None:
    """At the start of a training whose checkpoints will not have it."""
    if moves(trainer) and _is_sharded(trainer) and checkpoint.can_go_on(trainer.args):
        logger.warning(
            "sync_ref_model=True moves the reference model, and under FSDP or DeepSpeed it is in no checkpoint: this run cannot go on on the same trajectory "
            "once it is stopped. Train it in one piece, or on whole models (data parallel)."
        )


def save(trainer: OnlineTrainer, folder: str | os.PathLike) -> None:
    """Write it into an unsealed checkpoint; not where it is sharded."""
    if not moves(trainer) or not trainer.args.should_save or _is_sharded(trainer):
        return
    parameters = trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters()  # tied ones once
    save_file({name: p.detach().cpu().contiguous() for name, p in parameters}, Path(folder, NAME), {"format": "pt"})


def load(trainer: OnlineTrainer, folder: str | os.PathLike) -> list[str]:
    """Bring it back from the checkpoint that a run goes on from. Returns what was allowed to be otherwise, in words.

    Raises:
        `ValueError`: it is not there, and no other one is allowed (`allow_other_settings`).
    """
    if not moves(trainer):
        return []
    if (file := Path(folder, NAME)).is_file():
        found = load_file(file)
        for name, parameter in trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters():
            parameter.data.copy_(found[name])
        return []
    if not trainer.args.allow_other_settings:
        raise ValueError(
            f"{folder} has no {NAME}, and with sync_ref_model=True the reference model is no longer the one that the run began with (a sharded "
            "one is not saved): the run cannot go on on the same trajectory. Start it again in another output_dir, or go on with the model "
            "that it began with as reference: allow_other_settings=True (--allow_other_settings true)."
        )
    line = "sync_ref_model: the reference model is the first one again"
    logger.warning("Going on from %s as allowed: %s.", folder, line)
    return [line]
