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
    """As `precompile`: files in the cache are not compiled."""
    with turns.one_process_at_a_time(folder, "code", "17 kernels", lambda line: said.put((os.getpid(), line))):
        if not (folder / "binary").exists():
            if compiling is not None:
                compiling.set()
                go_on.wait(60)
            (folder / "compiled").write_text(str(os.getpid()))
            (folder / "binary").touch()


@pytest.fixture
def two(tmp_path, monkeypatch):
    """A process that compiles until `go_on` is set, one that is not started, their messages, the event."""
    monkeypatch.setattr(turns, "QUIET_S", 0.1)
    said, compiling, go_on = parallel.SimpleQueue(), parallel.Event(), parallel.Event()
    first = parallel.Process(target=compile_into, args=(tmp_path, said, compiling, go_on))
    second = parallel.Process(target=compile_into, args=(tmp_path, said))
    first.start()
    assert compiling.wait(60)
    yield first, second, said, go_on
    for process in (first, second):
        if process.pid:
            process.kill()
            process.join()


def test_the_second_process_compiles_nothing_and_names_the_one_it_waits_for(two, tmp_path):
    first, second, said, go_on = two
    second.start()
    pid, line = said.get()
    assert pid == second.pid and f"process {first.pid}" in line and "17 kernels" in line
    assert not (tmp_path / "compiled").exists() and second.is_alive()
    go_on.set()
    assert said.get()[1].startswith("... waited ")
    second.join(60)
    assert (tmp_path / "compiled").read_text() == str(first.pid)


def test_nobody_waits_for_a_process_that_was_killed(two, tmp_path):
    first, second, said, _ = two
    second.start()
    said.get()
    os.kill(first.pid, signal.SIGKILL)
    second.join(60)
    assert second.exitcode == 0
    assert (tmp_path / "compiled").read_text() == str(second.pid)


def test_nobody_waits_for_ever_for_one_that_hangs(two, tmp_path):
    lines, begin = [], time.monotonic()
    with turns.one_process_at_a_time(tmp_path, "code", "17 kernels", lines.append, longest=0.5):
        assert 0.5 < time.monotonic() - begin < 30
    assert two[0].is_alive() and lines[-1].endswith("so this process compiles 17 kernels too")


def test_a_folder_without_locks_or_rights_stops_nobody(tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError("no locks available")

    (tmp_path / "file").touch()
    entered = []
    for folder in (tmp_path / "file" / "no folder", tmp_path):
        with turns.one_process_at_a_time(folder, "code", "1 kernel"):
            entered.append(folder)
        monkeypatch.setattr(turns.fcntl, "flock", no_locks)
    assert len(entered) == 2
