"""SIGKILL one of two processes of a training at random moments: do all end, with the cause, and does the same command go on bit for bit?

    python benchmarks/kill_a_rank.py --output benchmarks/results/kill_a_rank_cpu.json     # the embedded default, on a CPU

One run is started again and again with the same command, and a random process of it is killed at a random moment; at last it may end, and its
adapter is compared, byte for byte, with that of a twin whom nobody disturbed. Two ways of starting take turns: torchrun, whose agent also ends
what is left, from the first import on; and plain processes, which nobody watches, from the moment on at which the trainer is built.

A row: {launcher, killed: the rank, at: newest checkpoint at that moment, seconds: from the kill until no process is left, code: exit codes of
the others, cause: whether what they (or the agent) said names the death of the one that was killed}.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import about

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {
    "max_steps": 72, "save_steps": 1, "per_device_train_batch_size": 16, "max_completion_length": 24, "eval_problems": 8,
    "aqn_num_stages": 4, "lora_r": 4, "use_cpu": "true",
}  # fmt: skip
#: a process has to be gone after this many seconds
LIMIT = 60.0
#: what names the death: our own words, and the agent's
CAUSE = re.compile(
    r"Process (\d) of 2 [^\n]*ended without a word|rank\s*:\s*(\d)[^\n]*\n(?:[^\n]*\n){0,3}?[^\n]*Signal 9"
)


def start(folder: Path, log: Path, launcher: str) -> list[subprocess.Popen]:
    """The same training, by torchrun (its agent) or as two plain processes."""
    script = ["examples/grpo_gsm8k.py", "--output_dir", str(folder)]
    script += [text for name, value in SETTINGS.items() for text in (f"--{name}", str(value))]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    environment["PYTHONUNBUFFERED"] = "1"
    log.write_text("")

    def popen(command: list[str], more: dict[str, str]) -> subprocess.Popen:
        with log.open("a") as to:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment | more, stdout=to, stderr=subprocess.STDOUT, start_new_session=True
            )

    if launcher == "torchrun":
        agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        return [popen([*agent, *script], {})]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [popen([sys.executable, *script], {**common, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]


def ranks(started: list[subprocess.Popen]) -> list[int]:
    """Process ids of the two ranks; fewer while the agent has not started them."""
    if len(started) == 2:
        return [process.pid for process in started]
    children = Path(f"/proc/{started[0].pid}/task/{started[0].pid}/children")
    found = {}
    for pid in children.read_text().split() if children.exists() else []:
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {int(v.removeprefix(b"RANK=")): int(pid) for v in variables if v.startswith(b"RANK=")}
    return [found[rank] for rank in sorted(found)]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def newest(folder: Path) -> int:
    steps = [p.parent.name.removeprefix("checkpoint-") for p in folder.glob("checkpoint-*/qerl_manifest.json")]
    return max(map(int, steps), default=0)


def wait_until(condition: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def end(started: list[subprocess.Popen]) -> None:
    """Whatever is left of their sessions."""
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def kill_once(folder: Path, log: Path, launcher: str, moments: random.Random) -> dict[str, Any]:
    began, before = time.monotonic(), newest(folder)
    started = start(folder, log, launcher)
    # whatever comes next: a few steps of training, with their saves; with an agent every third time already the start
    starting = launcher == "torchrun" and moments.random() < 1 / 3
    steps, more = (0, moments.uniform(1, 15)) if starting else (moments.randint(1, 2), moments.uniform(0, 2))
    wait_until(lambda: len(ranks(started)) == 2, 60)
    if not starting:
        wait_until(lambda: newest(folder) >= before + steps or started[0].poll() is not None, 300)
    time.sleep(more)
    pids = ranks(started)
    if len(pids) < 2 or newest(folder) >= SETTINGS["max_steps"]:
        end(started)
        raise RuntimeError(
            f"The run was over after {newest(folder)} steps, before it was killed; its last words: {log.read_text()[-2000:]}"
        )
    rank = moments.randrange(2)
    os.kill(pids[rank], signal.SIGKILL)
    killed = time.monotonic()
    started[0].poll()
    gone = wait_until(lambda: [p.poll() for p in started] and not any(map(alive, pids)), LIMIT)
    row: dict[str, Any] = {"launcher": launcher, "killed": rank, "at": newest(folder), "while_starting": starting}
    row["seconds"] = round(time.monotonic() - killed, 1) if gone else None
    if gone:
        for process in started:
            process.wait()
    end(started)
    said = log.read_text()
    row["code"] = [process.returncode for process in started]
    row["cause"] = any(int(a or b) == rank for a, b in CAUSE.findall(said))
    row["since_start"] = round(killed - began, 1)
    return row


def finish(folder: Path, log: Path) -> str:
    """Let it end; the adapter's SHA-256."""
    (agent,) = start(folder, log, "torchrun")
    if agent.wait() != 0:
        raise RuntimeError(f"The run in {folder} did not end well; its last words: {log.read_text()[-2000:]}")
    return hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    from qerl_trl.checkpoint import records

    record: dict[str, Any] = {
        "command": about.command(),
        "commit": about.commit(),
        "versions": records.versions(),
        "device": f"CPU, {os.cpu_count()} cores, shared",
        "settings": SETTINGS,
        "kills": [],
    }
    moments = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        folder = Path(scratch) / "run"
        for number in range(options.kills):
            record["kills"].append(kill_once(folder, log, ("torchrun", "none")[number % 2], moments))
            print(json.dumps(record["kills"][-1]), flush=True)
            if options.output is not None:
                options.output.write_text(json.dumps(record, indent=1) + "\n")
        record["resumed_at"] = newest(folder)
        disturbed, twin = finish(folder, log), finish(Path(scratch) / "twin", log)
    record["same_adapter"] = disturbed == twin
    record["adapter_sha256"] = disturbed
    seconds = [row["seconds"] for row in record["kills"]]
    record["slowest_end_s"] = None if None in seconds else max(seconds)
    record["causes_named"] = sum(row["cause"] for row in record["kills"])
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: record[k] for k in ("same_adapter", "slowest_end_s", "causes_named", "resumed_at")}))


if __name__ == "__main__":
    main()
