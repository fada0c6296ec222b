"""Processes that would compile the same: one does, the others find it; none waits for a process that is gone."""

import multiprocessing
import os
import signal
import time

import pytest

from qerl_nvfp4 import turns

parallel = multiprocessing.get_context("fork")
pytestmark = pytest.mark.skipif(turns.fcntl is None, reason="no locks on this system")


def compile_into(folder, said, compiling=None, go_on=None) -> None:
    """As `precompile`: what is in the cache is not compiled."""
    with turns.one_process_at_a_time(folder, "code", "17 kernels", lambda line: said.put((os.getpid(), line))):
        if not (folder / "binary").exists():
            if compiling is not None:
                compiling.set()
                go_on.wait(60)
            with (folder / "compiled").open("a") as log:
                log.write(f"{os.getpid()}\n")
            (folder / "binary").touch()


@pytest.fixture
def two(tmp_path, monkeypatch):
    """(the first process, which compiles until it is told to go on, the second one, not started, what both said, the
    event, the folder)
    """
    monkeypatch.setattr(turns, "QUIET_S", 0.1)
    said, compiling, go_on = parallel.SimpleQueue(), parallel.Event(), parallel.Event()
    first = parallel.Process(target=compile_into, args=(tmp_path, said, compiling, go_on))
    second = parallel.Process(target=compile_into, args=(tmp_path, said))
    first.start()
    assert compiling.wait(60)
    yield first, second, said, go_on, tmp_path
    for process in (first, second):
        if process.pid:
            process.kill()
            process.join()


def test_the_second_process_compiles_nothing_and_says_what_it_waits_for(two):
    first, second, said, go_on, folder = two
    second.start()
    pid, line = said.get()
    assert pid == second.pid
    assert line.startswith(
        f"Waiting for process {first.pid} of this machine to compile 17 kernels (first start only, 900 s"
    )
    assert not (folder / "compiled").exists() and second.is_alive()
    go_on.set()
    assert said.get()[1].startswith("... waited ")
    second.join(60)
    assert (folder / "compiled").read_text().split() == [str(first.pid)]


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM], ids=lambda by: by.name)
def test_nobody_waits_for_a_process_that_was_killed(two, by):
    first, second, said, _, folder = two
    second.start()
    said.get()
    os.kill(first.pid, by)
    second.join(60)
    assert second.exitcode == 0
    assert (folder / "compiled").read_text().split() == [str(second.pid)]


def test_nobody_waits_for_ever_for_one_that_hangs(two):
    first, _, _, _, folder = two
    lines, begin = [], time.monotonic()
    with turns.one_process_at_a_time(folder, "code", "17 kernels", lines.append, longest=0.5):
        assert 0.5 < time.monotonic() - begin < 30
    assert first.is_alive() and lines[-1].endswith("so this process compiles 17 kernels too")


def test_what_is_compiled_under_another_name_is_not_waited_for(two):
    lines = []
    with turns.one_process_at_a_time(two[-1], "other code", "1 kernel", lines.append):
        assert two[0].is_alive() and not lines


def test_an_error_lets_the_next_one_in(tmp_path):
    with pytest.raises(ZeroDivisionError), turns.one_process_at_a_time(tmp_path, "code", "1 kernel"):
        raise ZeroDivisionError
    lines = []
    with turns.one_process_at_a_time(tmp_path, "code", "1 kernel", lines.append, longest=0):
        assert not lines


def test_a_folder_without_locks_or_rights_stops_nobody(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with turns.one_process_at_a_time(tmp_path / "file" / "no folder", "code", "1 kernel"):
        pass

    def no_locks(*args):
        raise OSError("no locks available")

    monkeypatch.setattr(turns.fcntl, "flock", no_locks)
    with turns.one_process_at_a_time(tmp_path, "code", "1 kernel"):
        pass
