"""A run of several processes, one of which has ended: the others say so, instead of showing what their connection made of it."""

import functools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch
from accelerate.utils import gather_object
from transformers import TrainingArguments
from trl.trainer.utils import is_async_callable

from . import redaction, watch

#: of gloo and NCCL, when the other side of a connection is gone
_LOST = re.compile(
    r"Connection (?:closed|reset) by|Broken pipe|ncclRemoteError|ncclSystemError|Timed out waiting|Watchdog caught collective"
)
_P = ParamSpec("_P")
_T = TypeVar("_T")
#: seconds that a collective waits beyond the longest of what a process may do alone meanwhile
_LATER = 600
#: seconds until it is known which process ended, once a connection to one is gone
_KNOWN = 5.0


def patience(timeout: int, *limits: float | None) -> int:
    """`ddp_timeout`, in seconds. Processes that wait for one whose rollout or reward may take an hour must not give up after half of it, with an
    error of NCCL's that names neither; so transformers' default grows with the `limits` of these. Another value is the user's."""
    known = [limit for limit in limits if isinstance(limit, int | float) and math.isfinite(limit)]
    if timeout != TrainingArguments.ddp_timeout or not known:
        return timeout
    return max(timeout, math.ceil(max(known)) + _LATER)


def start_watch(args: TrainingArguments) -> None:
    """From here on each process of the run is told when another one ends ([`watch`]). Collective."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        watch.start(args.process_index, args.world_size)
        _keep_buckets(args)


def _keep_buckets(args: TrainingArguments) -> None:
    """DDP looks for weights without a gradient unless the arguments say otherwise, as it does for a PeftModel anyway. Where it does not, it lays
    its buckets out anew after its first step. Of three processes and more the sum of an entry depends on its place there, so a resumed run,
    whose first step is a later one, would not go on bit for bit. Reentrant checkpointing fails with it."""
    options = args.gradient_checkpointing_kwargs
    reentrant = isinstance(options, dict) and options.get("use_reentrant")
    if args.ddp_find_unused_parameters is None and not reentrant:
        args.ddp_find_unused_parameters = True


@functools.cache
def load_to_numbered_cpus() -> None:
    """Let torch load an optimizer's state to "cpu:0" or "cpu:1", as accelerate names the CPU of a process of several: `Trainer` asks for that
    when it resumes (huggingface/transformers#22273), and torch knows the place "cpu" only."""

    def load(storage: Any, location: str) -> Any:
        return storage if re.fullmatch(r"cpu:\d+", location) else None

    torch.serialization.register_package(100, lambda storage: None, load)  # asked after torch's own


def gathered(value: _T, group: "torch.distributed.ProcessGroup | None" = None) -> list[_T]:
    """What each process of `group` gives, in the order of their ranks there; None: all processes of the run. Collective."""
    every: list[Any] = [None] * torch.distributed.get_world_size(group=group)
    torch.distributed.all_gather_object(every, value, group=group)
    return every


def together(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """A method of a trainer that every process calls: an error that leaves it ends those that are in it too, and who has lost another process
    there says which, and why."""

    @functools.wraps(method)
    def named(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with watch.working(method.__name__), naming_the_lost_one(args[0]):
            return method(*args, **kwargs)

    return named


class Errors:
    """Errors of functions that each process calls with its own data, kept until all processes have come to the same place: whoever raised
    at once would leave the others in the next collective, and nobody could save anything any more."""

    def __init__(self) -> None:
        self._own: Exception | None = None

    def keep(self, function: Callable[..., list]) -> Callable[..., list]:
        """`function` (plain or async; it returns one number per completion), which gives zeros where it raises."""

        def zeros(error: Exception, passed: dict[str, Any]) -> list[float]:
            self._own = self._own or error
            return [0.0] * len(passed["completions"])

        @functools.wraps(function)
        async def keeping_async(*args: Any, **kwargs: Any) -> list:
            try:
                return await cast(Any, function(*args, **kwargs))
            except Exception as error:
                return zeros(error, kwargs)

        @functools.wraps(function)
        def keeping(*args: Any, **kwargs: Any) -> list:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                return zeros(error, kwargs)

        return cast(Any, keeping_async) if is_async_callable(function) else keeping

    def raise_everywhere(self) -> None:
        """Collective. Where a process has an error, it raises it, and the others raise that it has."""
        own, self._own = self._own, None
        everyone = gather_object([None if own is None else redaction.redact(f"{type(own).__name__}: {own}")])
        if own is not None:
            raise own
        for rank, text in enumerate(everyone):
            if text is not None:
                raise RuntimeError(f"Process {rank} of {len(everyone)} failed, and all end with it: {text}")


class LostProcess(RuntimeError):
    """Another process of the run is gone; in place of an error of the connection to it."""


@contextmanager
def naming_the_lost_one(trainer: Any) -> Iterator[None]:
    """Around what all processes do together. May be nested.

    Raises:
        `LostProcess`: in place of an error of the connection between processes.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LostProcess) or trainer.accelerator.num_processes == 1 or not _LOST.search(str(error)):
            raise
        here, saved = watch.current(), trainer._saved
        ended = here.wait(_KNOWN) if here is not None else None
        cause = "The cause stands in the other one's output: look for the first error there."
        if here is not None and ended is not None:
            cause = here.describe(ended)
        raise LostProcess(
            f"Process {trainer.accelerator.process_index} of {trainer.accelerator.num_processes} has lost another one at step "
            f"{trainer.state.global_step} ({str(error).strip().splitlines()[0][:200]}). {cause} "
            + (
                f"The last whole checkpoint is {saved}: once the cause is gone, the same command with as many processes goes on from it."
                if saved
                else "No checkpoint was written yet, so the run starts over."
            )
        ) from error
