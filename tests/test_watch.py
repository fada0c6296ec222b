"""One process's end ends the others, with its cause."""

import os
import signal
import threading
import time

import pytest
from accelerate import PartialState

from qerl_trl import watch
from qerl_trl.watch import working
from tests.ranks import on_ranks


def started(rank: int, ranks: int, grace: float = 1.0) -> None:
    PartialState(cpu=True)
    watch.GRACE = grace
    assert watch.start(rank, ranks) is watch.current() is watch.start(rank, ranks)


def hang() -> None:
    threading.Event().wait(50)


@pytest.mark.parametrize("how", ["raises", "killed"])
@pytest.mark.parametrize("failing", [0, 2])
def test_whoever_hangs_ends_with_the_cause(how, failing):
    begin = time.monotonic()

    def work(rank):
        started(rank, 3)
        with working():
            if rank == failing and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == failing:
                raise KeyError("no such column")
            hang()

    outcomes = on_ranks(3, work)
    assert time.monotonic() - begin < 20
    for rank, outcome in enumerate(outcomes):
        if rank == failing:
            assert outcome.code == (-signal.SIGKILL if how == "killed" else 0)  # what it does with its error is its own
            continue
        assert outcome.code == 1
        assert f"Process {failing} of 3" in outcome.stderr and f"Process {rank} ends too" in outcome.stderr
        assert ("no such column" if how == "raises" else "ended without a word") in outcome.stderr


def test_an_error_before_the_others_begin_is_known_when_they_do():
    def work(rank):
        started(rank, 2)
        if rank == 1:
            with working():
                raise KeyError("early")
        assert watch.current().wait(20).said == "KeyError: 'early'"
        with working():
            hang()

    assert on_ranks(2, work)[0].code == 1


def test_who_catches_the_error_goes_on():
    """All of them, as with a batch that was too large; and one that ends its process afterwards harms nobody."""

    def work(rank):
        started(rank, 2)
        try:
            with working(), working():
                if rank == 1:
                    raise MemoryError("too large")
                watch.current().wait(20)
                raise MemoryError("too large")  # its own, or what came of the other's
        except MemoryError:
            pass
        with working():
            time.sleep(1.5)  # longer than the grace
        if rank == 1:
            os._exit(0)
        time.sleep(1.5)
        return "done"

    survivor, _ = on_ranks(2, work)
    assert (survivor.answer, survivor.code) == ("done", 0)


@pytest.mark.parametrize("leaving", [0, 2])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_whoever_waits_for_a_process_that_came_to_its_end_is_told(leaving, when):
    """Exit code 0, or sys.exit(1): no launcher ends the others for the first, and neither leaves an error behind."""

    def work(rank):
        started(rank, 3)
        with working():  # all build a trainer
            pass
        if rank == leaving:
            time.sleep(2 if when == "meanwhile" else 0)
            watch.current().close()  # as at the end of the interpreter
            return "left"
        time.sleep(0 if when == "meanwhile" else 2)
        with working():  # and train
            hang()

    begin = time.monotonic()
    outcomes = on_ranks(3, work)
    assert time.monotonic() - begin < 20
    for rank, outcome in enumerate(outcomes):
        if rank == leaving:
            assert (outcome.answer, outcome.code) == ("left", 0)
        else:
            assert outcome.code == 1
            assert f"Process {leaving} of 3" in outcome.stderr and "came to its end without an error" in outcome.stderr


def test_whoever_has_done_its_part_may_leave():
    """While another one is still in the same work, and before what that one does alone."""

    def work(rank):
        started(rank, 2)
        with working():
            if rank == 0:
                time.sleep(1.5)
        if rank == 1:
            watch.current().close()
            return "left"
        with working("save_adapter"):
            time.sleep(1.5)  # longer than the grace
        return "done"

    assert [(outcome.answer, outcome.code) for outcome in on_ranks(2, work)] == [("done", 0), ("left", 0)]


def test_one_process_has_none():
    assert watch.start(0, 1) is None and watch.current() is None
