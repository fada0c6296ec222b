"""Commands that a benchmark starts and watches; none of them outlives it."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: process groups of runs that have not ended; none outlives this script
RUNNING: set[int] = set()


def watched(
    command: list[str], env: dict[str, str], timeout: float, look: Callable[[str], None] = lambda line: None
) -> tuple[int, list[str]]:
    """Exit code and lines of a process in a group of its own, which ends after `timeout` seconds; `look` sees each line as it comes."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a launcher's child, which is the run, ends with it
    )
    RUNNING.add(process.pid)
    timer = threading.Timer(timeout, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip())
        look(line)
    code = process.wait()
    timer.cancel()
    RUNNING.discard(process.pid)
    return code, lines


def end(process: subprocess.Popen) -> None:
    """Of a process group of its own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    RUNNING.discard(process.pid)
