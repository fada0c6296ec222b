"""Scripts that start with everything imported: a server imports once, and each script runs in a process that is forked from it.

Importing torch, transformers, TRL and vLLM takes ten seconds and more of a core, in every process anew. A forked process is as much one of its
own as any other: it has its own `__main__`, arguments, environment, folder and session, it can be killed, and it ends as an interpreter ends.
What a server cannot give is an environment that is read while a module is imported; that is the server's own.
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
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
#: what a training script imports sooner or later
TRAINING = ("qerl_trl.trainer", "qerl_trl.tasks.script", "qerl_trl.publish.export", "datasets")
#: bytes of a request at most: its arguments and its environment
MOST = 2**18


class Process:
    """A script that was started, as far as the tests use `subprocess.Popen`. It leads a session of its own."""

    def __init__(self, pid: int, answer: socket.socket) -> None:
        self.pid, self.answer, self.returncode = pid, answer, None

    def wait(self, timeout: float | None = None) -> int:
        """Raises: `subprocess.TimeoutExpired`; `RuntimeError` if the server is gone."""
        if self.returncode is None:
            self.answer.settimeout(timeout)
            try:
                said = self.answer.recv(16)
            except (TimeoutError, BlockingIOError) as error:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from error
            if not said:
                raise RuntimeError(f"The server of process {self.pid} is gone.")
            self.returncode = int(said)
            self.answer.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode


def finished(process: Any, files: Sequence[IO[str]], timeout: float | None) -> tuple[int, list[str]]:
    """The exit code, and what is in the files by then. After `timeout` seconds the process is killed with all that it started."""
    killed = ""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        killed = f"\nkilled after {timeout} s"
    for file in files:
        file.seek(0)
    *out, err = (file.read() for file in files)
    return process.returncode, [*out, err + killed]


def run_cold(
    command: Sequence[str], cwd: Path, environment: dict[str, str], timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """As `Warm.run`, for any command, which imports for itself."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=out, stderr=err, start_new_session=True)
        code, said = finished(process, (out, err), timeout)
        return subprocess.CompletedProcess(list(command), code, *said)


class Warm:
    """A server, which starts with the first script and ends with the process that made it.

    Args:
        modules: what it imports.
        environment: what is in its environment while it does.
    """

    def __init__(self, modules: Sequence[str], environment: dict[str, str]) -> None:
        self.modules, self.environment = modules, environment
        self.control: socket.socket | None = None
        self.starting = threading.Lock()

    def _open(self) -> socket.socket:
        with self.starting:
            if self.control is None:
                self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self.said = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the server runs)
                with theirs:
                    self.server = subprocess.Popen(
                        [sys.executable, "-m", "tests.warm", str(theirs.fileno()), *self.modules], pass_fds=[theirs.fileno()],
                        cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, stdout=self.said, stderr=subprocess.STDOUT,
                    )  # fmt: skip
            return self.control

    def start(self, argv: Sequence[str], cwd: Path, environment: dict[str, str], stdout, stderr) -> Process:
        """Runs a script.

        Args:
            argv: the script's path and its arguments.
            stdout, stderr: open files.

        Raises:
            `RuntimeError`: the server could not import what it should.
        """
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # pid and exit code stay two messages
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
        """As `subprocess.run(..., capture_output=True, text=True)`: after `timeout` seconds it is killed with all that it started."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            code, said = finished(self.start(argv, cwd, environment, out, err), (out, err), timeout)
            return subprocess.CompletedProcess(list(argv), code, *said)

    def close(self) -> None:
        if self.control is not None:
            self.control.close()
            self.server.wait()


def serve(control: socket.socket) -> tuple[dict, list[int]] | None:
    """Forks for each request. Returns in each forked process, what it shall run and its files; in the server when nobody is left to ask."""
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
    del sys.path[0]  # the folder that `python -m` adds; a script's own comes in its place
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
