"""A block that takes too long ends with the given error, whatever it does with signals and exceptions."""

import contextlib
import signal
import threading
import time

import pytest

from qerl_trl.support import time_limit
from qerl_trl.support.time_limit import deadline


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
    monkeypatch.setattr(time_limit, "_AGAIN", 60)
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
