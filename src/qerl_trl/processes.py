"""A run of several processes, one of which has ended: the others say so, instead of showing what their connection made of it."""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainingArguments

from . import watch

#: of gloo and NCCL, when the other side of a connection is gone
_LOST = re.compile(
    r"Connection (?:closed|reset) by|Broken pipe|ncclRemoteError|ncclSystemError|Timed out waiting|Watchdog caught collective"
)


#: seconds until it is known which process ended, once a connection to one is gone
_KNOWN = 5.0


def start_watch(args: TrainingArguments) -> None:
    """From here on each process of the run is told when another one ends ([`watch`]). Collective."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        watch.start(args.process_index, args.world_size)


@functools.cache
def load_to_numbered_cpus() -> None:
    """Let torch load an optimizer's state to "cpu:0" or "cpu:1", as accelerate names the CPU of a process of several: `Trainer` asks for that
    when it resumes (huggingface/transformers#22273), and torch knows the place "cpu" only."""

    def load(storage: Any, location: str) -> Any:
        return storage if re.fullmatch(r"cpu:\d+", location) else None

    torch.serialization.register_package(100, lambda storage: None, load)  # asked after torch's own


@contextmanager
def naming_the_lost_one(trainer: Any) -> Iterator[None]:
    """Around a training.

    Raises:
        `RuntimeError`: in place of an error of the connection between processes.
    """
    try:
        yield
    except RuntimeError as error:
        if trainer.accelerator.num_processes == 1 or not _LOST.search(str(error)):
            raise
        here, saved = watch.current(), trainer._saved
        ended = here.wait(_KNOWN) if here is not None else None
        cause = "The cause stands in the other one's output: look for the first error there."
        if here is not None and ended is not None:
            cause = here.describe(ended)
        raise RuntimeError(
            f"Process {trainer.accelerator.process_index} of {trainer.accelerator.num_processes} has lost another one at step "
            f"{trainer.state.global_step} ({str(error).strip().splitlines()[0][:200]}). {cause} "
            + (
                f"The last whole checkpoint is {saved}: once the cause is gone, the same command with as many processes goes on from it."
                if saved
                else "No checkpoint was written yet, so the run starts over."
            )
        ) from error
