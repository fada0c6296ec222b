"""A block that takes too long ends with the error given, whatever it does with signals and exceptions."""

import contextlib
import signal
import threading
import time

import pytest

from qerl_trl.support import time_limit as module
from qerl_trl.support.time_limit import deadline


class Late(RuntimeError):
    pass


def late():
    return Late("took longer than 0.1 s")


def run(function):
    try:
        function()
    except Late as error:
        return error


def busy(seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def test_a_block_that_hangs_is_interrupted():
    def hangs():
        with deadline(0.1, late):
            busy()

    start = time.monotonic()
    assert isinstance(run(hangs), Late)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("seconds", [None, 0, 5.0])
def test_a_block_in_time_is_left_alone(seconds):
    before = signal.getsignal(signal.SIGALRM)

    def quick():
        with deadline(seconds, late):
            busy(0.02)

    assert run(quick) is None
    assert signal.getsignal(signal.SIGALRM) is before
    assert not [thread for thread in threading.enumerate() if thread.name == "deadline" and seconds is None]


def test_a_wait_in_the_operating_system_ends_in_the_main_thread():
    start = time.monotonic()
    with pytest.raises(Late), deadline(0.1, late):
        time.sleep(5)
    assert time.monotonic() - start < 2


def test_in_another_thread_there_is_no_limit():
    ended = []

    def slow():
        with deadline(0.01, late):
            busy(0.1)
        ended.append(True)

    thread = threading.Thread(target=slow)
    thread.start()
    thread.join()
    assert ended


def test_who_catches_everything_is_late_all_the_same(monkeypatch):
    monkeypatch.setattr(module, "_AGAIN", 60)

    def stubborn():
        with deadline(0.1, late), contextlib.suppress(BaseException):
            busy(2)

    assert isinstance(run(stubborn), Late)


def test_an_alarm_of_the_block_neither_disarms_nor_is_lost():
    """What math_verify does around each parse."""
    rang = []

    def parse():
        before = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        try:
            time.sleep(0.05)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    with pytest.raises(Late), deadline(0.3, late):
        parse()
        assert rang
        time.sleep(5)


def test_the_outer_of_two_may_be_the_shorter():
    def nested():
        with deadline(0.1, late), deadline(3, lambda: ValueError("the inner one")):
            busy()

    assert isinstance(run(nested), Late)


def test_errors_pass_as_they_are():
    def fails():
        with pytest.raises(KeyError), deadline(5, late):
            raise KeyError("mine")

    assert run(fails) is None
