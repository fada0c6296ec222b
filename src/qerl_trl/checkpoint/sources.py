"""Reward functions, and what else makes completions: recorded by name and by a digest of their source. A difference on resume is a warning."""

import functools
import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ..support.trl import OnlineTrainer


def rewards_of(trainer: OnlineTrainer) -> Iterator[tuple[str, Any]]:
    yield from zip(trainer.reward_func_names, trainer.reward_funcs, strict=True)


def rollouts_of(trainer: OnlineTrainer) -> Iterator[tuple[str, Any]]:
    """Name and function of what makes completions next to the model (TRL's `GRPOTrainer`)."""
    if (function := getattr(trainer, "rollout_func", None)) is not None:
        yield "rollout_func", function
    for name, factory in (getattr(trainer, "environment_factories", None) or {}).items():
        yield f"environment{'' if name is None else f' {name}'}", factory
    for tool in getattr(trainer, "tools", None) or []:
        yield f"tool {getattr(tool, '__name__', type(tool).__name__)}", tool


def digests(named: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Name -> digest of the source, of those that have one; a second function of the same name has its number behind it."""
    found: dict[str, str] = {}
    seen: dict[str, int] = {}
    for name, function in named:
        seen[name] = seen.get(name, 0) + 1
        if (digest := source_sha256(function)) is not None:
            found[name if seen[name] == 1 else f"{name} ({seen[name]})"] = digest
    return found


def source_sha256(function: Any) -> str | None:
    """Digest of `inspect.getsource`, of an object that is called of its class; `None` for a model and where there is no source."""
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    if isinstance(function, nn.Module):
        return None
    is_written = inspect.isroutine(function) or inspect.isclass(function)
    try:
        return sha256(inspect.getsource(function if is_written else type(function)))
    except (OSError, TypeError):  # typed in a prompt, or built in
        return None


def sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
