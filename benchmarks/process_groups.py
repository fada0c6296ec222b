"""What scripts that start groups of processes need: to end one with all that it has started, and to read from its logs how far it came."""

import ast
import contextlib
import os
import re
import signal
import socket
import time
from pathlib import Path

#: a line with which an error ends, of any process
_ERROR = re.compile(r"^(?:\[?rank\d+\]?: ?|\(.*?\) )*(?:ERROR .*\] )?[\w.]*(?:Error|Exception|Interrupt|Exit)(?::|$)")


def end(pid: int) -> None:
    """A process, its group and all that they have started: torch's launcher gives each of its processes a session of its own."""
    import psutil  # which accelerate needs

    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=10)  # the next mode needs their memory


def ask_where(folder: Path) -> None:
    """Every process of a mode writes down where each of its threads is."""
    for path in folder.glob("[0-9]*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGUSR1)
    time.sleep(1)


def said_in(log: Path) -> list[str]:
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if line.strip() and "<frozen importlib" not in line]


def steps_of(log: Path) -> list[dict[str, float]]:
    """What step_speed.py has printed of the steps so far, of all processes."""
    found = [
        line.partition(": {")[2] for line in log.read_text(errors="replace").splitlines() if line.startswith("step ")
    ]
    steps = []
    for numbers in found:
        with contextlib.suppress(SyntaxError, ValueError):  # a line that is not whole yet
            steps.append({phase: round(seconds, 4) for phase, seconds in ast.literal_eval("{" + numbers).items()})
    return steps


def errors_of(lines: list[str]) -> list[str]:
    """Those with which an error ends."""
    return [line for line in lines if _ERROR.match(line)]


def free_ports(count: int) -> list[int]:
    """As many ports of this host as nobody listens on, all different. They are let go again: until who asked listens on them, another run can be
    told the same ones, if seldom, since the system hands out any of thousands."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()
