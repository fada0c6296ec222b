"""Scripts that start with everything imported: a server imports once, and each script runs in a fork of it.

Importing torch, transformers, TRL and vLLM takes ten seconds and more of a core. A fork is a process of its own, with
its own `__main__`, arguments, environment, folder and session. Variables read at an import are the server's.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: imports of a training script
TRAINING = ("qerl_trl.trainer", "qerl_trl.tasks.script", "qerl_trl.publish.export", "datasets")
#: most bytes of a request: its arguments and its environment
MOST = 2**18


class Process:
    """A started script, with as much of `subprocess.Popen` as the tests use. It leads its own session."""

    def __init__(self, pid: int, answer: socket.socket) -> None:
        self.pid, self.answer, self.returncode = pid, answer, None

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`; `RuntimeError` if the server is gone."""
        if self.returncode is None:
            self.answer.settimeout(timeout)
            try:
                code = self.answer.recv(16)
            except (TimeoutError, BlockingIOError) as error:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from error
            if not code:
                raise RuntimeError(f"The server of process {self.pid} is gone.")
            self.returncode = int(code)
            self.answer.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode


def _finished(start: Callable[[Any, Any], Any], command: Sequence[str], timeout: float | None) -> Any:
    """As `subprocess.run(..., capture_output=True, text=True)`; after `timeout` seconds the whole session is killed."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process, killed = start(out, err), ""
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            killed = f"\nkilled after {timeout} s"
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(list(command), process.returncode, out.read(), err.read() + killed)


def run_cold(
    command: Sequence[str], cwd: Path, environment: dict[str, str], timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """As `Warm.run`, for a command with its own imports."""
    given = {"cwd": cwd, "env": environment, "start_new_session": True}
    return _finished(lambda out, err: subprocess.Popen(command, stdout=out, stderr=err, **given), command, timeout)


class Warm:
    """A server with `modules` imported under `environment`, from the first script to `close`."""

    def __init__(self, modules: Sequence[str], environment: dict[str, str]) -> None:
        self.modules, self.environment = modules, environment
        self.control: socket.socket | None = None
        self.starting = threading.Lock()

    def _open(self) -> socket.socket:
        with self.starting:
            if self.control is None:
                self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self.said = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the server runs)
                command = [sys.executable, "-m", "tests.warm", str(theirs.fileno()), *self.modules]
                given = {"stdin": subprocess.DEVNULL, "stdout": self.said, "stderr": subprocess.STDOUT}
                given |= {"cwd": ROOT, "env": self.environment, "pass_fds": [theirs.fileno()]}
                with theirs:
                    self.server = subprocess.Popen(command, **given)
            return self.control

    def start(self, argv: Sequence[str], cwd: Path, environment: dict[str, str], stdout, stderr) -> Process:
        """Run the script `argv[0]` with open files. Raises `RuntimeError` if the server could not import a module."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # pid and exit code are two messages
        request = json.dumps({"argv": list(argv), "cwd": str(cwd), "environment": environment}).encode()
        assert len(request) <= MOST
        with there, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._open(), [request], [there.fileno(), stdout.fileno(), stderr.fileno()])
        try:
            return Process(int(here.recv(16)), here)
        except (ValueError, ConnectionResetError) as error:
            self.said.seek(0)
            said = self.said.read().decode(errors="replace")
            raise RuntimeError(f"The server ended with {self.server.wait()}:\n{said[-3000:]}") from error

    def run(
        self, argv: Sequence[str], cwd: Path, environment: dict[str, str], timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        return _finished(lambda out, err: self.start(argv, cwd, environment, out, err), argv, timeout)

    def close(self) -> None:
        if self.control is not None:
            self.control.close()
            self.server.wait()


def serve(control: socket.socket) -> tuple[dict, list[int]] | None:
    """Fork for each request. Returns the request and its files in each fork, None in the server at the end."""
    events, running = select.poll(), {}
    events.register(control, select.POLLIN)
    while True:
        for ready, _ in events.poll():
            if ready != control.fileno():
                pid, answer = running.pop(ready)
                events.unregister(ready)
                os.close(ready)
                with answer, contextlib.suppress(BrokenPipeError):
                    answer.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                continue
            request, files, *_ = socket.recv_fds(control, MOST, 3)
            if not request:
                return None
            pid = os.fork()
            if pid == 0:
                control.close()
                os.close(files[0])
                return json.loads(request), files[1:]
            for file in files[1:]:
                os.close(file)
            answer = socket.socket(fileno=files[0])
            answer.send(str(pid).encode())
            ended = os.pidfd_open(pid)
            running[ended] = pid, answer
            events.register(ended, select.POLLIN)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    del sys.path[0]  # the folder added by `python -m`
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    asked = serve(control)
    if asked is None:
        return
    request, files = asked
    os.setsid()
    for target, file in enumerate(files, start=1):
        os.dup2(file, target)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["argv"]
    script = Path(sys.argv[0]).resolve()
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
