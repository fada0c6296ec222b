"""Room on the disk for what a run will write, and what is said when there is none left."""

import errno
import functools
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from . import checkpoint, preflight
from .memory.formulas import model_bytes, optimizer_bytes
from .upstream import OnlineTrainer

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: safetensors and torch.save lose the number of the error, and the latter mostly its text too
_FULL_TEXT = re.compile(
    rf"\(os error ({'|'.join(map(str, sorted(_FULL)))})\)|No space left|PytorchStreamWriter failed|unexpected pos \d+ vs \d+",
    re.IGNORECASE,
)


def check(trainer: OnlineTrainer) -> None:
    """Whether the checkpoints of this run fit where they will be written.

    Raises:
        `RuntimeError`: not even one does.
    """
    args = trainer.args
    if not args.should_save or args.output_dir is None:
        return
    one, count = _checkpoint_bytes(trainer), 1
    if args.save_strategy != "no":
        count = _checkpoints_kept(args)
    preflight.tell(preflight.disk(Path(args.output_dir), one, count))


def _checkpoint_bytes(trainer: OnlineTrainer) -> int:
    args, sizes = trainer.args, model_bytes(trainer.accelerator.unwrap_model(trainer.model))
    without_optimizer = not checkpoint.can_go_on(args)
    return sizes.trained + (0 if without_optimizer else optimizer_bytes(str(args.optim), sizes))


def _checkpoints_kept(args: TrainingArguments) -> int:
    """As many as lie in the folder at a time, as far as the arguments say; an old one goes when the new one is whole."""
    if args.save_total_limit:
        return args.save_total_limit + 1
    if args.save_strategy == "epoch":
        return math.ceil(args.num_train_epochs)
    if args.save_steps < 1:
        return math.ceil(1 / args.save_steps)
    return max(1, math.ceil(args.max_steps / args.save_steps))


def full_is_named(method: Callable) -> Callable:
    """A trainer's method that writes: where the disk is full it says so and what to do. A checkpoint that was begun is removed.

    Raises:
        `OSError`: in place of what was raised.
    """

    @functools.wraps(method)
    def writing(trainer: OnlineTrainer, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(trainer, *args, **kwargs)
        except Exception as error:
            if not _is_full(error):
                raise
            raise _explained(trainer, error) from error

    return writing


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if getattr(error, "errno", None) in _FULL or _FULL_TEXT.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _explained(trainer: Any, error: Exception) -> OSError:
    folder, step = Path(trainer.args.output_dir or "."), trainer.state.global_step
    begun = folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"
    if begun.is_dir() and not (begun / checkpoint.MANIFEST_NAME).is_file():
        checkpoint.discard(begun)
    newest = trainer._saved
    state = (
        f"The last whole checkpoint is {newest}: the same command goes on from it"
        if newest
        else "No checkpoint is whole yet"
    )
    return OSError(
        errno.ENOSPC,
        f"There was no room to write step {step} to {folder} ({str(error).strip().splitlines()[0]}). "
        f"{preflight.size_text(shutil.disk_usage(folder).free)} are free now, a checkpoint of this run takes "
        f"{preflight.size_text(_checkpoint_bytes(trainer))}. Free space there (or raise the quota), or keep fewer checkpoints: "
        f"save_total_limit=1, or, for a run that will not be resumed, save_only_model=True. {state}.",
    )
