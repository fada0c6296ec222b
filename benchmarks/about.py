"""What a file of results says of the run that made it: the command, the commit of the code, the device, whose it is, and versions."""

import hashlib
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def command() -> str:
    """The command line of this process; files and folders of this machine by their names alone."""
    script, *words = sys.argv
    names = [Path(word).name if Path(word).is_absolute() else word for word in words]
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *names])


def commit(said: str | None = None) -> str | None:
    """Of the code that runs: what was said (an option, or BENCH_COMMIT where there is no git), else git's; None where nobody knows."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return (
        said
        or os.environ.get("BENCH_COMMIT")
        or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        or None
    )


def machine(device: str) -> str | None:
    """Eight hex digits, the same for all runs on one machine, whichever of its GPUs they see; None without any."""
    if device.partition(":")[0] != "cuda":
        return None
    import pynvml

    pynvml.nvmlInit()
    gpus = [
        pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))
        for index in range(pynvml.nvmlDeviceGetCount())
    ]
    return hashlib.sha256(" ".join(sorted(map(str, gpus))).encode()).hexdigest()[:8]


def head(device: str, said: str | None = None, times: int = 1) -> dict[str, Any]:
    """The first fields of a record: `command`, `commit` (`said`: as there), `device` (so many of them), `machine` and `versions`."""
    import torch

    from qerl_trl.checkpoint.records import device_name, versions

    several = f" x {times}" if times > 1 else ""
    return {
        "command": command(),
        "commit": commit(said),
        "device": device_name(torch.device(device)) + several,
        "machine": machine(device),
        "versions": versions(),
    }
