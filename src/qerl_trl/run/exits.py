"""Exits of a run: messages and saves after a signal, Ctrl-C or an error in a rollout, and how to resume."""

import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import TrainerState

from ..checkpoint import seal
from ..rollout.engine import RolloutError
from ..support import secrets

logger = logging.getLogger(__name__)


def goes_on(output_dir: str, source: str, done: int, wanted: int, epoch: float | None) -> str:
    """Return the message of a run resumed from the checkpoint `source` (in any folder) at `done` of `wanted` steps."""
    inside = Path(source).parent.resolve() == Path(output_dir).resolve()
    where, at = Path(source).name if inside else source, "" if epoch is None else f" (epoch {epoch:.2f})"
    return secrets.redact(
        f"{output_dir} resumes at step {done} of {wanted}{at}, from {where}. For a fresh start, choose another "
        "output_dir."
    )


def last_whole(saved: str | None) -> str:
    """Return how to resume an interrupted run from its last whole checkpoint."""
    if saved is None:
        return "No checkpoint was written yet, so the same command starts over."
    if not seal.keeps_optimizer(saved):
        return (
            f"The last whole checkpoint is {saved}, without an optimizer (save_only_model=True), so it cannot be "
            "resumed; choose another output_dir."
        )
    return f"The last whole checkpoint is {saved}: the same command resumes from it (resume_from_checkpoint=True)."


@contextmanager
def told_of_interrupts(text: Callable[[], str]) -> Iterator[None]:
    """Add the note `text()` to a `KeyboardInterrupt` from this block."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(text())
        raise


@contextmanager
def told_of_exits(trainer: Any) -> Iterator[None]:
    """Around a training: Ctrl-C and SIGTERM (schedulers, containers) name the step and the checkpoint to resume from.
    The script's own handler for SIGTERM stays; only the main process prints."""
    own = os.getpid()

    def told(what: str) -> str:
        state = trainer.state
        return secrets.redact(f"{what} at step {state.global_step} of {state.max_steps}. {last_whole(trainer._saved)}")

    def tell(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == own:  # a forked child inherits this handler
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
    finally:
        if handled and signal.getsignal(signal.SIGTERM) is tell:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Moment(NamedTuple):
    """Random states and token count, which making a batch changes."""

    python: Any
    numpy: Any
    torch: torch.Tensor
    cuda: torch.Tensor | None
    tokens: int

    @classmethod
    def now(cls, state: TrainerState) -> "_Moment":
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        tokens = state.num_input_tokens_seen
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda, tokens)

    def restore(self, state: TrainerState) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        state.num_input_tokens_seen = self.tokens


@contextmanager
def as_of(moment: _Moment | None, state: TrainerState) -> Iterator[None]:
    """Restore `moment` (`None`: now) inside, and the present state afterwards."""
    now = _Moment.now(state)
    (moment or now).restore(state)
    try:
        yield
    finally:
        now.restore(state)


class Rescue:
    """Saves the last completed step if the making of a batch (rollout, rewards) fails, so that it can be resumed."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._in_batch = False
        #: the error was raised on all ranks, so a collective save is safe
        self._all_failed = False
        #: step and RNG snapshot taken before the rollout, if it started on a step boundary
        self._between: tuple[int, _Moment] | None = None

    @contextmanager
    def around(self, made: bool = False) -> Iterator[None]:
        """Save on an error in this block. `made`: the batch was made before, and is checked now."""
        trainer = self._trainer
        self._in_batch, self._all_failed = True, False
        if not made and trainer.model.training and trainer._step == trainer._saves.updated_at:
            self._between = trainer.state.global_step, _Moment.now(trainer.state)
        try:
            yield
        except Exception as error:
            if not isinstance(error, RolloutError):  # the engine has saved already
                error.add_note(self())
            raise
        finally:
            self._in_batch = False

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Around code that fails on all ranks or none, so a collective save is safe."""
        self._all_failed = True
        yield
        self._all_failed = False

    def __call__(self) -> str:
        """Save a checkpoint of the last completed step, if safe, and return how to resume. Not safe if one rank fails
        alone, or if the step began with completions of an earlier rollout, which no checkpoint has
        (`steps_per_generation` not a multiple of the accumulation)."""
        trainer, step = self._trainer, self._trainer.state.global_step
        resume = "resume from the last checkpoint (resume_from_checkpoint=True) once the cause is gone"
        wanted = trainer.args.save_strategy != "no" and step > 0 and trainer.model.training
        moment = None
        if self._in_batch:
            between, moment = self._between or (None, None)
            wanted = wanted and between == step
        if wanted and (trainer.accelerator.num_processes == 1 or self._all_failed):
            try:
                with as_of(moment, trainer.state):
                    trainer._save_checkpoint(trainer.model, None)
                trainer.accelerator.wait_for_everyone()  # an early exit would end the rank that seals
            except Exception as error:  # torch reports a full disk as RuntimeError; the Hub has its own errors
                return f"Saving step {step} failed too ({type(error).__name__}: {error}); {resume}."
            return f"Step {step} is saved; {resume}."
        return f"The trainer's own state is intact; {resume}."
