"""Shared code of the benchmarks: head of a record, processes, rollout servers."""

import contextlib
import gc
import hashlib
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
#: environment of a process with an engine
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_FLASHINFER_SAMPLER": "0", "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip
# --- the head of a record -------------------------------------------------------------------------


def command() -> str:
    """Command line of this process, with absolute paths reduced to file names."""
    script, *words = sys.argv
    names = [Path(word).name if Path(word).is_absolute() else word for word in words]
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *names])


def commit(said: str | None = None) -> str | None:
    """Commit of the code: the option `said`, BENCH_COMMIT, or git's; None if unknown."""
    if known := said or os.environ.get("BENCH_COMMIT"):
        return known
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None


def machine(device: str) -> str | None:
    """Digest of the machine's GPUs (eight hex digits); None on a CPU."""
    if device.partition(":")[0] != "cuda":
        return None
    asked = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    gpus = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    return hashlib.sha256(" ".join(sorted(gpus)).encode()).hexdigest()[:8]


def head(device: str, said: str | None = None) -> dict[str, Any]:
    """First fields of a record: `command`, `commit`, `device`, `machine`, `versions`."""
    import torch

    from qerl_trl.checkpoint.records import device_name, versions

    return {
        "command": command(),
        "commit": commit(said),
        "device": device_name(torch.device(device)),
        "machine": machine(device),
        "versions": versions(),
    }


def save(record: Any, path: Path | None, compact: bool = False) -> None:
    """Write the record atomically; nothing without a path. `compact`: one line per field."""
    if path is not None:
        partial, text = path.with_name(f"{path.name}.{os.getpid()}"), json.dumps(record, indent=1)
        if compact:
            lines = [f" {json.dumps(name)}: {json.dumps(record[name], separators=(',', ':'))}" for name in record]
            text = "{\n" + ",\n".join(lines) + "\n}"
        partial.write_text(text + "\n")
        partial.replace(path)


class Garbage:
    """Seconds spent in Python's garbage collector since `seconds` was set to 0."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0
        gc.callbacks.append(self)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began


# --- processes ------------------------------------------------------------------------------------


def give(row: dict[str, Any]) -> None:
    """Print the row and exit a worker of `results_of` at once: vLLM's own shutdown can hang."""
    print("\nRESULT " + json.dumps(row), flush=True)
    os._exit(0)


def results_of(
    waiting: list[Any],
    start: Callable[[Any], tuple[list[str], dict[str, str]]],
    may: Callable[[Any, list[Any]], bool] = lambda name, running: not running,
    limit: float = math.inf,
    total: float = math.inf,
    last: float = 0.0,
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Run one process per name; yield (name, row) as they end. A failed row has `failed` and `last_lines`.

    Args:
        waiting: names; more may be added during the run.
        start: command and additional environment of a name.
        may: whether a name may start next to the running ones.
        limit: seconds per process. total: for all; none starts in the `last` of them.
    """
    running: dict[Any, tuple[subprocess.Popen, Path, float]] = {}
    logs, begun = Path(tempfile.mkdtemp()), time.monotonic()
    while waiting or running:
        for name in list(waiting):
            if time.monotonic() - begun < total - last and may(name, list(running)):
                waiting.remove(name)
                words, environment = start(name)
                log = logs / f"{len(list(logs.iterdir()))}.log"
                with log.open("w") as file:
                    process = subprocess.Popen(
                        words, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment
                    )
                running[name] = process, log, time.monotonic()
        for name, (process, log, since) in list(running.items()):
            now = time.monotonic()
            late = now - since > limit or now - begun > total
            if process.poll() is None and late:
                process.kill()
                process.wait()
            if process.poll() is None:
                continue
            del running[name]
            lines = log.read_text(errors="replace").splitlines()
            found = next((line for line in lines if line.startswith("RESULT ")), None)
            if found:
                row = json.loads(found.removeprefix("RESULT "))
            else:
                why = "time" if late else [line for line in lines if "Error" in line][-3:] or f"code {process.poll()}"
                row = {"failed": why, "last_lines": [line[:600] for line in lines[-25:]]}
            yield name, row | {"seconds_in_all": round(now - since, 1)}
        if waiting and not running and time.monotonic() - begun >= total - last:
            yield from ((name, {"failed": "time", "last_lines": []}) for name in waiting)
            return
        time.sleep(0.3)


def end(pid: int) -> None:
    """Kill a process, its group and all descendants: torch's launcher gives each process its own session."""
    import psutil  # a dependency of accelerate

    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=10)  # the next run needs their memory


#: running processes of `watched`
RUNNING: set[int] = set()
#: milestone of a run -> text of its log line
MARKS = {"ready_s": "  versions", "evaluated_s": "Held-out accuracy before", "trained_s": "Held-out accuracy, greedy"}


def watched(
    command: list[str],
    environment: dict[str, str],
    limit: float,
    look: Callable[[str, float], Any] = lambda line, seconds: None,
) -> tuple[int, list[str], dict[str, float]]:
    """Run a process for at most `limit` seconds; return exit code, lines, and seconds at each of `MARKS`.

    `look` is called with each line and its time in seconds.
    """
    started, marks, lines = time.perf_counter(), dict[str, float](), list[str]()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,  # so that the launcher's children end too
    )  # fmt: skip
    RUNNING.add(process.pid)
    timer = threading.Timer(limit, end, (process.pid,))
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip())
        seconds = round(time.perf_counter() - started, 1)
        look(line, seconds)
        for mark in (mark for mark, text in MARKS.items() if text in line):
            marks.setdefault(mark, seconds)
    code = process.wait()
    timer.cancel()
    RUNNING.discard(process.pid)
    return code, lines, marks


def end_all(*_: Any) -> None:
    """Signal handler: end all started processes."""
    for pid in list(RUNNING):
        end(pid)
    os._exit(1)


def words(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def launched(command: list[str]) -> list[str]:
    """A user's `accelerate launch ...`, with this Python."""
    return [sys.executable, "-m", "accelerate.commands.launch", *command[2:]]


#: share of a GPU for all runs on it
SHARE = 0.8


def share_of_card(parallel: int, place: Path, less: float = 0, gpu: int = 0) -> dict[str, str]:
    """Environment of one of `parallel` runs on a GPU (shown_card.py), `less` GiB for others; `place`: its folder."""
    import pynvml

    pynvml.nvmlInit()
    total = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu)).total / 2**30
    gib = total * SHARE / parallel - less
    return {"CUDA_VISIBLE_DEVICES": str(gpu), "CARD_GIB": f"{gib:.1f}", "PEAK_FILE": str(place / "peak")}


class Launcher:
    """Runs the shipped commands from a checkout, with shown_card.py and `more` as sitecustomize.py."""

    def __init__(self, work: Path, timeout: float, more: str = "") -> None:
        self.work, self.timeout = work.resolve(), timeout
        site = self.work / "site"
        # a checkout lacks the entry point of the vLLM plugin
        info = site / "qerl_trl-0.1.0.dev0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (site / "sitecustomize.py").write_text(Path(__file__).with_name("shown_card.py").read_text() + more)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: qerl-trl\nVersion: 0.1.0.dev0\n")
        plugin = "[vllm.general_plugins]\nqerl_nvfp4 = qerl_trl.rollout.vllm.plugin:register\n"
        (info / "entry_points.txt").write_text(plugin)
        given = [Path(path).resolve() for path in os.environ.get("PYTHONPATH", "").split(":") if path]
        self.elsewhere = ":".join(str(path) for path in given if not path.is_relative_to(ROOT))
        self.path = f"{site}:{ROOT / 'src'}:{ROOT / 'kernels/torch-ext'}:{self.elsewhere}"
        self.names = dict.fromkeys([sys.prefix, *filter(None, self.elsewhere.split(":"))], "PYTHON")
        self.names |= {str(self.work): "WORK", str(ROOT): "."}

    def limit(self) -> float:
        """Seconds of the next command."""
        return self.timeout

    def clean(self, text: str) -> str:
        """Text without local folders."""
        for path in sorted(self.names, key=len, reverse=True):
            text = text.replace(path, self.names[path])
        return text

    def call(
        self, command: list[str], look: Callable[[str, float], Any] = lambda line, seconds: None, **environment: str
    ) -> tuple[int, list[str], dict[str, float]]:
        """`watched` with this path; drops progress bars."""
        own = {"PYTHONPATH": self.path, "PYTHONUNBUFFERED": "1", "MASTER_PORT": str(free_ports(1)[0])}
        code, lines, marks = watched(command, os.environ | ENVIRONMENT | own | environment, self.limit(), look)
        return code, [self.clean(line) for line in lines if not re.search(r"\d+%\|", line)], marks


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


# --- rollout servers ------------------------------------------------------------------------------


def start(command: list[str], gpu: str | None, log: Path, **more: str) -> tuple[subprocess.Popen, str]:
    """Start a server on a free port and this GPU, in a new process group. `more`: environment variables."""
    (port,) = free_ports(1)
    environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}) | more
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port)], env=environment, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    return process, f"http://127.0.0.1:{port}"


def wait(process: subprocess.Popen, url: str, log: Path, seconds: float) -> None:
    """Wait for the server; RuntimeError if it does not answer."""
    import requests

    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(requests.RequestException):  # not listening yet
            if requests.get(url + "/health", timeout=2).status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"The server did not start:\n{log.read_text()[-4000:]}")
