"""Room on the disk for a checkpoint, and the message where there is none left."""

import errno
import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoint import seal
from ..checks import environment
from ..memory.formulas import model_bytes, optimizer_bytes
from ..support.trl import OnlineTrainer

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: safetensors and torch.save lose the number of the error, and the latter mostly its text too
_FULL_TEXT = re.compile(
    rf"\(os error ({'|'.join(map(str, sorted(_FULL)))})\)|No space left|PytorchStreamWriter failed|unexpected pos \d+ vs \d+",
    re.IGNORECASE,
)


def check(trainer: OnlineTrainer) -> None:
    """
    Raises:
        `RuntimeError`: not even one checkpoint of this run fits where it will be written.
    """
    args = trainer.args
    if args.should_save and args.output_dir is not None:
        sizes = model_bytes(trainer.accelerator.unwrap_model(trainer.model))
        optimizer = optimizer_bytes(str(args.optim), sizes) if seal.can_go_on(args) else 0
        environment.tell(environment.disk(Path(args.output_dir), sizes.trained + optimizer))


def full_is_named(method: Callable) -> Callable:
    """A trainer's method that writes. Where the disk is full, a checkpoint that was begun is removed.

    Raises:
        `OSError`: the disk is full; names the last whole checkpoint and what to do.
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
    if begun.is_dir() and not (begun / seal.MANIFEST_NAME).is_file():
        seal.discard(begun)
    resume = f"resume with the same command from {trainer._saved}" if trainer._saved else "start again"
    return OSError(
        errno.ENOSPC,
        f"There was no room to write step {step} to {folder}: {environment.size_text(shutil.disk_usage(folder).free)} are free. Free space there, "
        f"or keep fewer checkpoints (save_total_limit=1); then {resume}.",
    )
