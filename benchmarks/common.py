"""Shared by the benchmarks: head of a record, processes, rollout servers."""

import ast
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
#: of every process with an engine in it
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_FLASHINFER_SAMPLER": "0", "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip
#: a line with which an error ends, of any process
_ERROR = re.compile(r"^(?:\[?rank\d+\]?: ?|\(.*?\) )*(?:ERROR .*\] )?[\w.]*(?:Error|Exception|Interrupt|Exit)(?::|$)")

# --- the head of a record -------------------------------------------------------------------------


def command() -> str:
    """Command line of this process, absolute paths reduced to their names."""
    script, *words = sys.argv
    names = [Path(word).name if Path(word).is_absolute() else word for word in words]
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *names])


def commit(said: str | None = None) -> str | None:
    """Commit of the code: the option `said`, else BENCH_COMMIT, else git's; None if unknown."""
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return (
        said
        or os.environ.get("BENCH_COMMIT")
        or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        or None
    )


def machine(device: str) -> str | None:
    """Digest of the machine's GPUs, eight hex digits; None on a CPU."""
    if device.partition(":")[0] != "cuda":
        return None
    import pynvml

    pynvml.nvmlInit()
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return hashlib.sha256(" ".join(sorted(str(pynvml.nvmlDeviceGetUUID(gpu)) for gpu in gpus)).encode()).hexdigest()[:8]


def head(device: str, said: str | None = None, times: int = 1) -> dict[str, Any]:
    """The first fields of a record: `command`, `commit`, `device` (and how many), `machine`, `versions`."""
    import torch

    from qerl_trl.checkpoint.records import device_name, versions

    return {
        "command": command(),
        "commit": commit(said),
        "device": device_name(torch.device(device)) + (f" x {times}" if times > 1 else ""),
        "machine": machine(device),
        "versions": versions(),
    }


def save(record: Any, path: Path | None) -> None:
    """Write the record in one move; nothing without a path."""
    if path is not None:
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(path)


class Garbage:
    """Seconds of Python's garbage collector since `seconds` was set to 0."""

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
    """End a worker of `results_of` with its row; vLLM's own shutdown can hang."""
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
    """Run a process for each name; yield (name, its row, or `failed` and `last_lines`) as they end.

    Args:
        waiting: names; more may be added meanwhile.
        start: command and additional environment of a name.
        may: whether a name may start next to the running ones.
        limit: seconds for one process. total: for all; none starts in the `last` of them.
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
    """Kill a process, its group and all descendants: torch's launcher gives each of its processes its own session."""
    import psutil  # which accelerate needs

    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=10)  # the next run needs their memory


#: processes of `watched` that still run
RUNNING: set[int] = set()
#: mark of a run -> text of the line at which it is reached
MARKS = {"ready_s": "  versions", "evaluated_s": "Held-out accuracy before", "trained_s": "Held-out accuracy, greedy"}


def watched(
    command: list[str],
    environment: dict[str, str],
    limit: float,
    look: Callable[[str, float], Any] = lambda line, seconds: None,
) -> tuple[int, list[str], dict[str, float]]:
    """Run a process for at most `limit` seconds: exit code, lines, and the second of each of `MARKS`.

    `look` gets each line as it comes, with its second.
    """
    started, marks, lines = time.perf_counter(), dict[str, float](), list[str]()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,  # a launcher's child, which is the run, ends with it
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
    """Signal handler: end everything that was started."""
    for pid in list(RUNNING):
        end(pid)
    os._exit(1)


def said_in(log: Path) -> list[str]:
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if line.strip() and "<frozen importlib" not in line]


def steps_of(log: Path) -> list[dict[str, float]]:
    """Steps that step.py has printed so far, of all processes."""
    steps = []
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("step "):
            with contextlib.suppress(SyntaxError, ValueError):  # a line that is not whole yet
                numbers = ast.literal_eval("{" + line.partition(": {")[2])
                steps.append({phase: round(seconds, 4) for phase, seconds in numbers.items()})
    return steps


def errors_of(lines: list[str]) -> list[str]:
    """Last lines of errors."""
    return [line for line in lines if _ERROR.match(line)]


def free_ports(count: int) -> list[int]:
    """Different ports of this host on which nobody listens."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


# --- rollout servers ------------------------------------------------------------------------------

#: sequences that a server has CUDA graphs for; by default a thousand, which takes longer to start
AT_A_TIME = 64


def start_server(spec: Any, gpu: str | None, log: Path, *more: str) -> tuple[subprocess.Popen, str]:
    """Start the server of `spec` with further options; its process and address."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    command += [*shlex.split(spec.serve_command())[2:], "--max-num-seqs", str(AT_A_TIME), *more]
    return start(command, gpu, log)


def start(command: list[str], gpu: str | None, log: Path, **more: str) -> tuple[subprocess.Popen, str]:
    """Start a server on a free port, in its own process group, on this GPU. `more`: of its environment."""
    (port,) = free_ports(1)
    environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}) | more
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port)], env=environment, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    return process, f"http://127.0.0.1:{port}"


def wait(process: subprocess.Popen, url: str, log: Path, seconds: float) -> None:
    """
    Raises:
        `RuntimeError`: the server does not answer.
    """
    import requests

    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(requests.RequestException):  # it does not listen yet
            if requests.get(url + "/health", timeout=2).status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"The server did not start:\n{log.read_text()[-4000:]}")


def spec_of(model: str, lora: Any, longest: int) -> Any:
    """EngineSpec of a trainer with this adapter on this checkpoint."""
    import torch
    from peft import get_peft_model

    from qerl_trl.model.lora import register_nvfp4_lora
    from qerl_trl.nvfp4.config import from_pretrained
    from qerl_trl.rollout.spec import EngineSpec

    base = from_pretrained(model, dtype=torch.bfloat16)
    return EngineSpec.of(get_peft_model(base, register_nvfp4_lora(lora)), max_model_len=longest)
