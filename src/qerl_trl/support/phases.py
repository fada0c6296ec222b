"""Measure and limit the time of a block, and set the model's mode in it.

Phases of a training step are rollout and rewards; the rest is the update. [`deadline`] limits a block by a watchdog
thread, which interrupts the main thread by SIGALRM, repeatedly until the block has ended. No interval timer is set, so
code inside may set one (`signal.alarm`, as graders of mathematics do).
"""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from torch import nn


class PhaseTimer:
    """Wall-clock seconds per phase since the last [`take`]. An inner phase's time does not count for the outer one."""

    def __init__(self, *phases: str) -> None:
        self._seconds = dict.fromkeys(phases, 0.0)

    @contextmanager
    def phase(self, name: str, counts: bool = True) -> Iterator[None]:
        """Add the block's time to phase `name`, also if it raises; with `counts=False` (evaluation) add nothing."""
        started, inner = time.perf_counter(), sum(self._seconds.values())
        try:
            yield
        finally:
            if counts:
                inner = sum(self._seconds.values()) - inner
                self._seconds[name] += time.perf_counter() - started - inner

    def take(self) -> dict[str, float]:
        """Return the seconds per phase, and start again from zero."""
        taken = self._seconds
        self._seconds = dict.fromkeys(taken, 0.0)
        return taken


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context manager for evaluation mode. Restores each module's flag, as parts may have been in that mode before."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Context manager for an evaluation that casts the model in place (`bf16_full_eval`): restores its tensors."""
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module._buffers, module._buffers.copy()) for module in model.modules()]
    try:
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for now, before in buffers:
            now.update(before)


class Collector:
    """Hides the first compilation's objects from the garbage collector, which took 0.3 to 1.2 s per rollout to scan."""

    _frozen = False

    def freeze(self) -> None:
        if not self._frozen:
            self._frozen = True
            gc.collect()
            gc.freeze()

    def unfreeze(self) -> None:
        if self._frozen:
            gc.unfreeze()
            self._frozen = False


#: seconds between two interruptions of a running block
_AGAIN = 5.0


@contextmanager
def deadline(seconds: float | None, error: Callable[[], Exception]) -> Iterator[None]:
    """Context manager: raises `error()` if the block exceeds `seconds`, even if it catches that. May be nested.

    Args:
        seconds: `None` or 0 for no limit. Only the main thread has a limit: Python runs signal handlers there only.
    """
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return
    expired, ended = threading.Event(), threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def on_alarm(number: int, frame: FrameType | None) -> None:
        if expired.is_set():
            if not ended.is_set():
                raise error()
        elif callable(before):  # someone else's handler
            before(number, frame)

    def watch() -> None:
        if not ended.wait(seconds):
            expired.set()
            while not ended.is_set():
                signal.pthread_kill(main, signal.SIGALRM)
                ended.wait(_AGAIN)

    before = signal.signal(signal.SIGALRM, on_alarm)
    watchdog = threading.Thread(target=watch, name="deadline", daemon=True)
    watchdog.start()
    try:
        yield
        if expired.is_set():
            raise error()
    finally:
        ended.set()
        watchdog.join()
        signal.signal(signal.SIGALRM, before)
