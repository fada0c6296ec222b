"""Keep the processes of one run in agreement.

If one fails or is killed, the launcher (torchrun's agent, started by `accelerate launch`) ends the others.
"""

import functools
import math
import os
import re
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather, gather_object
from transformers import TrainerControl, TrainingArguments

from . import secrets

_T = TypeVar("_T")

#: seconds that a collective may take beyond the longest work of one process alone
_LATER = 600

#: recorded settings that may differ between processes: paths, and digests of functions that refer to a device
_OF_A_PROCESS = "model base_revision settings_sha256 options rewards_sha256 rollouts_sha256".split()
#: flags of `TrainerControl` that a callback may set
_REQUESTS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


def patience(timeout: int, *limits: float | None) -> int:
    """Choose `ddp_timeout` in seconds, if left at transformers' default: above all `limits` of one process alone."""
    known = [limit for limit in limits if isinstance(limit, int | float) and math.isfinite(limit)]
    if timeout != TrainingArguments.ddp_timeout or not known:
        return timeout
    return max(timeout, math.ceil(max(known)) + _LATER)


def keep_buckets(args: TrainingArguments) -> None:
    """Enable DDP's search for weights without a gradient: otherwise it rebuilds its buckets after its first step, and a
    resumed run of three or more processes sums in another order. Reentrant checkpointing fails with it."""
    options = args.gradient_checkpointing_kwargs
    reentrant = isinstance(options, dict) and options.get("use_reentrant")
    if args.world_size > 1 and args.ddp_find_unused_parameters is None and not reentrant:
        args.ddp_find_unused_parameters = True


@functools.cache
def load_to_numbered_cpus() -> None:
    """Let torch load to "cpu:0" and "cpu:1", which `Trainer` requests on resume: accelerate names the CPU so in several
    processes (huggingface/transformers#22273)."""

    def load(storage: Any, location: str) -> Any:
        return storage if re.fullmatch(r"cpu:\d+", location) else None

    torch.serialization.register_package(100, lambda storage: None, load)  # tried after torch's own


def gathered(value: _T, group: "torch.distributed.ProcessGroup | None" = None) -> list[_T]:
    """Gather `value` from each process of `group` (default: all), in rank order. Collective."""
    every: list[Any] = [None] * torch.distributed.get_world_size(group=group)
    torch.distributed.all_gather_object(every, value, group=group)
    return every


def settled_together(
    accelerator: Accelerator, settle: Callable[[], str | None], settings: Callable[[], Mapping[str, Any]]
) -> str | None:
    """Call `settle()`, check that `settings()` agree in all processes, and return the checkpoint to resume from.

    Raises:
        `ValueError`: `settle()` refused the checkpoint, or processes differ in settings, data or checkpoints.
    """
    if accelerator.num_processes == 1:
        return settle()
    resume, refusal = None, None
    try:
        resume = settle()
    except ValueError as error:
        refusal = error
    recorded = settings()
    own = {name: value for name, value in recorded.items() if name not in _OF_A_PROCESS} | recorded.get("options", {})
    own |= {"resumes from": resume and Path(resume).name, "refuses": refusal is not None}
    every = gather_object([own])
    if refusal is not None:
        raise refusal
    for rank, other in enumerate(every):
        if differ := [name for name in sorted({*every[0], *other}) if every[0].get(name) != other.get(name)]:
            shown = "; ".join(
                f"{n}: {reprlib.repr(every[0].get(n))} and {reprlib.repr(other.get(n))}" for n in differ[:4]
            )
            raise ValueError(
                f"Process 0 and process {rank} do not run the same training ({secrets.redact(shown)}). Start every "
                "process with the same script, arguments, data and packages, and an output_dir that all of them see."
            )
    return resume


def share_requests(accelerator: Accelerator, control: TrainerControl) -> None:
    """Apply what one process's callbacks request (a save, a stop) to all, or the others would wait in a collective."""
    if accelerator.num_processes > 1:
        own = torch.tensor([[int(getattr(control, name)) for name in _REQUESTS]])
        every = accelerator.gather(own.to(accelerator.device))
        for name, wanted in zip(_REQUESTS, every.any(dim=0).tolist(), strict=True):
            setattr(control, name, wanted)


def rewards_of_all(
    accelerator: Accelerator, calculate: Callable[[], torch.Tensor], rows: int, functions: int
) -> torch.Tensor:
    """Gather rewards as TRL does, and raise one process's error in all, so that all save the last step. Collective.

    Args:
        calculate: computes this process's rewards, (rows, functions), and gathers them.
    """
    failed = None
    try:
        rewards = calculate()
    except Exception as error:
        failed = error
        rewards = gather(torch.zeros(rows, functions, device=accelerator.device))  # the others wait here
    texts = gather_object([failed and secrets.redact(f"{type(failed).__name__}: {failed}")])
    for rank, text in enumerate(texts):
        if text is not None:
            raise failed or RuntimeError(f"Process {rank} of {len(texts)} failed: {text}")
    return rewards


def fsdp_version(args: Any) -> int | None:
    """Return the FSDP version by a run's arguments or the environment of `accelerate launch`; None without FSDP."""
    said = (args.fsdp_plugin_args or {}).get("fsdp_version")
    if said is None and os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
        return int(os.environ.get("FSDP_VERSION", "1"))
    return said
