"""A run of several processes, one of which has ended: the others say so, instead of showing what their connection made of it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: of gloo and NCCL, when the other side of a connection is gone
_LOST = re.compile(
    r"Connection (?:closed|reset) by|Broken pipe|ncclRemoteError|ncclSystemError|Timed out waiting|Watchdog caught collective"
)


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
        saved = trainer._saved
        raise RuntimeError(
            f"Process {trainer.accelerator.process_index} of {trainer.accelerator.num_processes} has lost another one at step "
            f"{trainer.state.global_step} ({str(error).strip().splitlines()[0][:200]}). The cause stands in the other one's output: look for the "
            f"first error there. "
            + (
                f"The last whole checkpoint is {saved}: once the cause is gone, the same command with as many processes goes on from it."
                if saved
                else "No checkpoint was written yet, so the run starts over."
            )
        ) from error
