"""What a run says of its own end and of going on: the lines for whom a scheduler, a signal or a crash has interrupted."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from . import checkpoint, redaction

logger = logging.getLogger(__name__)


def goes_on(output_dir: str, source: str, done: int, wanted: int, epoch: float | None) -> str:
    """Of a run that is resumed before its last step: from what, and that nothing else needs doing.

    Args:
        source: the checkpoint, in `output_dir` or elsewhere.
        done: steps that it has behind it, of those `wanted`.
    """
    inside = Path(source).parent.resolve() == Path(output_dir).resolve()
    where = Path(source).name if inside else source
    at = "" if epoch is None else f" (epoch {epoch:.2f})"
    return redaction.redact(
        f"{output_dir} goes on at step {done} of {wanted}{at}, from {where}: steps after it were not saved and are done again. Nothing needs doing; "
        "to begin anew, choose another output_dir."
    )


def last_whole(saved: str | None) -> str:
    """What there is to go on from after a run that did not end by itself."""
    if saved is None:
        return "No checkpoint was written yet, so the same command starts over."
    if not checkpoint.keeps_optimizer(saved):
        return f"The last whole checkpoint is {saved}. It keeps no optimizer (save_only_model=True, or a run ended with it), so no run goes on from it; choose another output_dir."
    return f"The last whole checkpoint is {saved}: the same command goes on from it (resume_from_checkpoint=True)."


@contextmanager
def told_of_interrupts(text: str) -> Iterator[None]:
    """Around what happens before or after a training: Ctrl-C, whose error says nothing."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(text)
        raise


@contextmanager
def told_of_exits(trainer: Any) -> Iterator[None]:
    """Around a training: Ctrl-C, whose error says nothing; and an `exit()` in a tool, an environment, a callback or a handler of a signal, which ends
    the process without a word, and as a success."""
    try:
        yield
    except KeyboardInterrupt as error:
        state = trainer.state
        error.add_note(f"It was at step {state.global_step} of {state.max_steps}. {last_whole(trainer._saved)}")
        raise
    except SystemExit as error:
        logger.error(
            "exit(%s) was called at step %d of %d, so this run ends here, unfinished: by something that it called (a tool, an environment, a rollout "
            "function, a callback), or by a handler of a signal. %s",
            "" if error.code is None else error.code,
            trainer.state.global_step,
            trainer.state.max_steps,
            last_whole(trainer._saved),
        )
        raise


@contextmanager
def ended_by_signal(trainer: Any) -> Iterator[None]:
    """Around a training: SIGTERM, by which schedulers, containers and `kill` end a process, is told before it acts as ever.

    Where something else handles it (a script's own handler), outside of the main thread, and in all but the main process, nothing is changed. The
    main process, where it hangs inside a C function, is ended when that returns, or by SIGKILL, which schedulers and torchrun send 10 to 30 s later.
    """
    own = os.getpid()

    def tell(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == own:  # a child that was forked has this handler, too
            state = trainer.state
            text = (
                f"SIGTERM at step {state.global_step} of {state.max_steps}: this run was ended from outside (a scheduler's time limit, a stopped "
                f"container, kill). {last_whole(trainer._saved)}"
            )
            # not through the buffer of a stream that this may have interrupted
            os.write(2, f"\n{redaction.redact(text)}\n".encode())
        os.kill(os.getpid(), number)

    free = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not free or not trainer.accelerator.is_main_process:
        yield
        return
    signal.signal(signal.SIGTERM, tell)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is tell:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
