"""Where the seconds of a training step go: rollout, rewards, and the update, which is what is left."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Wall-clock seconds per phase since the last [`take`]. A phase measured inside another counts for the inner one only."""

    def __init__(self, *phases: str) -> None:
        self._seconds = dict.fromkeys(phases, 0.0)

    @contextmanager
    def phase(self, name: str, counts: bool = True) -> Iterator[None]:
        """Add the time of the block to `name`, also when it raises; with `counts=False` (evaluation) add nothing."""
        started, inner = time.perf_counter(), sum(self._seconds.values())
        try:
            yield
        finally:
            if counts:
                inner = sum(self._seconds.values()) - inner
                self._seconds[name] += time.perf_counter() - started - inner

    def take(self) -> dict[str, float]:
        """Seconds per phase, and start again from zero."""
        taken = self._seconds
        self._seconds = dict.fromkeys(taken, 0.0)
        return taken
