"""Exit messages: a signal, Ctrl-C, and how to resume."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ..checkpoint import seal
from ..support import secrets

logger = logging.getLogger(__name__)


def goes_on(output_dir: str, source: str, done: int, wanted: int, epoch: float | None) -> str:
    """The line of a resumed run.

    Args:
        source: the checkpoint, in `output_dir` or elsewhere.
        done: its steps, of those `wanted`.
    """
    inside = Path(source).parent.resolve() == Path(output_dir).resolve()
    where = Path(source).name if inside else source
    at = "" if epoch is None else f" (epoch {epoch:.2f})"
    return secrets.redact(
        f"{output_dir} goes on at step {done} of {wanted}{at}, from {where}. For a fresh start, choose another output_dir."
    )


def last_whole(saved: str | None) -> str:
    """How to resume a run that was interrupted, from its last whole checkpoint."""
    if saved is None:
        return "No checkpoint was written yet, so the same command starts over."
    if not seal.keeps_optimizer(saved):
        return f"The last whole checkpoint is {saved}, without an optimizer (save_only_model=True), so it cannot be resumed; choose another output_dir."
    return f"The last whole checkpoint is {saved}: the same command goes on from it (resume_from_checkpoint=True)."


@contextmanager
def told_of_interrupts(text: str) -> Iterator[None]:
    """Add `text` to Ctrl-C's error, before or after a training."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(text)
        raise


@contextmanager
def told_of_exits(trainer: Any) -> Iterator[None]:
    """Around a training: Ctrl-C, `exit()` and SIGTERM (schedulers, containers) name the step and the checkpoint to resume from.

    A handler that the script has set for SIGTERM stays; only the main process prints.
    """
    own = os.getpid()

    def told(what: str) -> str:
        state = trainer.state
        return secrets.redact(f"{what} at step {state.global_step} of {state.max_steps}. {last_whole(trainer._saved)}")

    def tell(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == own:  # a forked child has this handler, too
            os.write(2, f"\n{told('SIGTERM')}\n".encode())
        os.kill(os.getpid(), number)

    main = threading.current_thread() is threading.main_thread() and trainer.accelerator.is_main_process
    if handled := main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, tell)
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(told("Interrupted"))
        raise
    except SystemExit as error:
        logger.error(told(f"exit({'' if error.code is None else error.code}) was called"))
        raise
    finally:
        if handled and signal.getsignal(signal.SIGTERM) is tell:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
