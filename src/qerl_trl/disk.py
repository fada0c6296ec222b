"""Room on the disk for what a run will write, and what is said when there is none left."""

import math
from pathlib import Path

from transformers import TrainingArguments

from . import preflight
from .memory.formulas import model_bytes, optimizer_bytes
from .upstream import OnlineTrainer


def check(trainer: OnlineTrainer) -> None:
    """Whether the checkpoints of this run fit where they will be written.

    Raises:
        `RuntimeError`: not even one does.
    """
    args = trainer.args
    if not args.should_save or args.output_dir is None:
        return
    sizes = model_bytes(trainer.accelerator.unwrap_model(trainer.model))
    one, count = sizes.trained, 1
    if args.save_strategy != "no":
        one += 0 if args.save_only_model else optimizer_bytes(str(args.optim), sizes)
        count = _checkpoints_kept(args)
    preflight.tell(preflight.disk(Path(args.output_dir), one, count))


def _checkpoints_kept(args: TrainingArguments) -> int:
    """As many as lie in the folder at a time, as far as the arguments say; an old one goes when the new one is whole."""
    if args.save_total_limit:
        return args.save_total_limit + 1
    if args.save_strategy == "epoch":
        return math.ceil(args.num_train_epochs)
    if args.save_steps < 1:
        return math.ceil(1 / args.save_steps)
    return max(1, math.ceil(args.max_steps / args.save_steps))
