"""Durations of a step's phases. A block over its limit ends with the given error, whatever it catches."""

import contextlib
import signal
import threading
import time

import pytest

from qerl_trl.support import phases
from qerl_trl.support.phases import deadline


def test_nested_evaluation_and_failed_phases(monkeypatch):
    """An inner phase counts once, evaluation not at all, a failed phase as long as it ran."""
    now = [0.0]
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now[0])
    timer = phases.PhaseTimer("rollout", "update")
    with timer.phase("update"):
        now[0] += 1
        with timer.phase("rollout"):
            now[0] += 10
        now[0] += 2
    assert timer.take() == {"rollout": 10.0, "update": 3.0}
    with timer.phase("rollout", counts=False):
        now[0] += 5
    with pytest.raises(KeyError), timer.phase("rollout"):
        now[0] += 1
        raise KeyError
    assert timer.take() == {"rollout": 1.0, "update": 0.0}


class Late(RuntimeError):
    pass


def busy(seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def catches_everything():
    with contextlib.suppress(BaseException):
        busy(1)


def alarm_of_the_block():
    """As math_verify sets one around each parse."""
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        time.sleep(0.05)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rang
    busy()


@pytest.mark.parametrize("block", [busy, catches_everything, alarm_of_the_block])
def test_a_late_block_is_interrupted(block, monkeypatch):
    monkeypatch.setattr(phases, "_AGAIN", 60)
    start = time.monotonic()
    with pytest.raises(Late), deadline(0.2, Late):
        block()
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("seconds", [None, 0, 5.0])
def test_a_block_in_time_leaves_no_trace(seconds):
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyError, match="mine"), deadline(seconds, Late):
        raise KeyError("mine")
    with deadline(seconds, Late):
        assert any(thread.name == "deadline" for thread in threading.enumerate()) == bool(seconds)
    assert signal.getsignal(signal.SIGALRM) is before
