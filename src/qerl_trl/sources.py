"""What a trainer is given as functions and objects (rewards, tools, environments, a scheduler), known by how it is written and what it holds.

The source of a function has a digest, and so has everything that it holds beside it: the attributes of an object that is called, or of the one whose
method is, and lists, dictionaries and objects that are bound to it. Each is looked at once, when the trainer is built: what a function counts and
keeps while it is used is not what it was given with. Nothing here refuses a run, because an attribute may be another one in every
process (a time, a cache that was loaded): it is said by its name.
"""

import ast
import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from . import base_identity, redaction
from .upstream import OnlineTrainer

#: objects inside objects that are looked into
_DEPTH = 4
#: keys of a dictionary that may be names of something; of more, all are content
_NAMES = 100
#: of the digest of one attribute: enough to see that it is another one
_DIGITS = 16
#: of a scheduler, where it stands and not what it is
_PROGRESS = {"optimizer", "last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial"}


class Source(NamedTuple):
    """Digests of how something is written (or of a model's weights), `None` where nothing says it; and of what it holds, by name."""

    sha256: str | None
    held: dict[str, str]


class Sources:
    """[`Source`] of what a trainer was given, as it was when it was first asked for."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Source]] = {}

    @classmethod
    def of(cls, trainer: OnlineTrainer) -> "Sources":
        """Of the trainer's rewards and rollout functions as they are now."""
        sources = cls()
        for _, given in (*rewards_of(trainer), *rollouts_of(trainer)):
            sources[given]
        return sources

    def __getitem__(self, given: Any) -> Source:
        if id(given) not in self._known:
            found = Source(
                base_identity.base_sha256(given) if isinstance(given, nn.Module) else source_sha256(given),
                held_by(given),
            )
            self._known[id(given)] = (given, found)  # kept, so that nothing else gets its number
        return self._known[id(given)][1]

    def digests(self, named: Iterable[tuple[str, Any]]) -> dict[str, str]:
        """Name -> digest of the source, of those that have one."""
        return {name: found.sha256 for name, found in self._numbered(named) if found.sha256 is not None}

    def held(self, named: Iterable[tuple[str, Any]]) -> dict[str, dict[str, str]]:
        """Name -> what it holds, of those that hold something."""
        return {name: found.held for name, found in self._numbered(named) if found.held}

    def _numbered(self, named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Source]]:
        for name, given in _numbered(named):
            yield name, self[given]


def _numbered(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """A second one of a name has its number behind it."""
    seen: dict[str, int] = {}
    for name, given in named:
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name} ({seen[name]})", given


def as_written(trainer: OnlineTrainer) -> dict[str, str]:
    """Name -> digest of how each reward, and whatever else makes completions, is written (of a model its weights), whatever is bound to it."""
    found = {
        name: trainer.sources[given].sha256 if isinstance(given, nn.Module) else source_sha256(given, with_values=False)
        for name, given in _numbered([*rewards_of(trainer), *rollouts_of(trainer)])
    }
    return {name: digest for name, digest in found.items() if digest is not None}


def rewards_of(trainer: OnlineTrainer) -> Iterator[tuple[str, Any]]:
    yield from zip(trainer.reward_func_names, trainer.reward_funcs, strict=True)


def rollouts_of(trainer: OnlineTrainer) -> Iterator[tuple[str, Any]]:
    """Name and function of what makes completions beside the model (TRL's `GRPOTrainer`)."""
    if (function := getattr(trainer, "rollout_func", None)) is not None:
        yield "rollout_func", function
    for name, factory in (getattr(trainer, "environment_factories", None) or {}).items():
        yield f"environment{'' if name is None else f' {name}'}", factory
    for tool in getattr(trainer, "tools", None) or []:
        yield f"tool {getattr(tool, '__name__', type(tool).__name__)}", tool


# --- how it is written ------------------------------------------------------------------------------------------------------------


def source_sha256(function: Any, with_values: bool = True) -> str | None:
    """Of how a function (a reward, a transform) is written, comments, docstrings and line breaks apart, and of the numbers and texts that are bound to it; not
    of what it calls. `None` where nothing says it."""
    function, bound = _unwrapped(function)
    written = [plainly((each.name, each.value) if each.named else each.value) for each in (*bound, *_bound(function))]
    if isinstance(function, nn.Module):
        return None
    try:
        source = textwrap.dedent(inspect.getsource(function if inspect.isroutine(function) else type(function)))
    except (OSError, TypeError):  # typed in a prompt, or built in
        return None
    try:
        tree = ast.parse(source)
    except SyntaxError:
        pass  # a lambda in the middle of a call
    else:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(
                node, False
            ):
                node.body = node.body[1:] or [ast.Pass()]
        source = ast.unparse(tree)
    return sha256([source, *written] if written and with_values else source)


class _Bound(NamedTuple):
    """A value that is bound to a function; whether the name is part of how it is written."""

    name: str
    value: Any
    named: bool


def _unwrapped(function: Any) -> tuple[Any, list[_Bound]]:
    """What is called in the end, and what was bound on the way there."""
    bound: list[_Bound] = []
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        if isinstance(function, functools.partial):
            bound += [_Bound(f"argument {number}", value, False) for number, value in enumerate(function.args)]
            bound += [_Bound(name, value, True) for name, value in sorted(function.keywords.items())]
            function = function.func
        else:
            function = function.__wrapped__
    return function, bound


def _bound(function: Any) -> list[_Bound]:
    """Defaults of its arguments, and what a function takes from the one that it was made in."""
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    found = [_Bound(f"default {number}", value, False) for number, value in enumerate(function.__defaults__ or ())]
    found += [_Bound(name, value, True) for name, value in sorted((function.__kwdefaults__ or {}).items())]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            found.append(_Bound(name, cell.cell_contents, True))
        except ValueError:  # nothing was put there yet
            found.append(_Bound(name, name, False))
    return found


def plainly(value: Any) -> Any:
    """Numbers and texts; of everything else the type."""
    if isinstance(value, tuple):
        return [plainly(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


def sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


# --- what it holds ----------------------------------------------------------------------------------------------------------------


def held_by(given: Any) -> dict[str, str]:
    """Name -> digest: the attributes of an object that is called, of the one whose method is, of a scheduler; and what is bound to a function and is
    neither a number nor a text. What has a secret's name is left out."""
    function, bound = _unwrapped(given)
    found = {each.name: each.value for each in (*bound, *_bound(function)) if plainly(each.value) is not each.value}
    if isinstance(function, nn.Module) or inspect.isclass(function):
        owner = None
    elif inspect.isroutine(function):
        owner = getattr(function, "__self__", None)
    else:
        owner = function
    if owner is not None and not inspect.isclass(owner) and not inspect.ismodule(owner):
        found |= _attributes(owner)
    return {name: sha256(_content(value))[:_DIGITS] for name, value in sorted(_public(found).items())}


def _public(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what has a secret's name: a key that was exchanged makes no other reward."""
    kept = redaction.cleaned(dict.fromkeys(values, ""), mask=None)
    return {name: value for name, value in values.items() if kept[name] is not None}


def _attributes(owner: Any) -> dict[str, Any]:
    slots = [name for each in type(owner).__mro__ for name in getattr(each, "__slots__", ()) if isinstance(name, str)]
    found = {name: getattr(owner, name) for name in slots if name != "__dict__" and hasattr(owner, name)}
    found |= getattr(owner, "__dict__", {})
    return {k: v for k, v in found.items() if k not in _PROGRESS} if isinstance(owner, LRScheduler) else found


def _content(value: Any, depth: int = 0) -> Any:
    """As JSON, the same in every process: of what libraries made (a client, a generator) the type alone."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, bytes | bytearray):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, PurePath | enum.Enum | np.generic):
        return str(value)
    kind = type(value).__name__
    if depth >= _DEPTH:
        return kind
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return [kind, str(value.dtype), *base_identity.row_of("", value)]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return [kind, str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, nn.Module):
        return [kind, base_identity.base_sha256(value)]
    if isinstance(value, Mapping):
        value = _public(value) if len(value) <= _NAMES else value
        items = ([str(key), _content(each, depth + 1)] for key, each in value.items())
        return [kind, sorted(items, key=lambda item: item[0])]
    if isinstance(value, set | frozenset):
        return [kind, sorted(sha256(_content(each, depth + 1)) for each in value)]
    if isinstance(value, list | tuple):
        return [kind, [_content(each, depth + 1) for each in value]]
    if inspect.isclass(value) or inspect.ismodule(value):
        return value.__name__
    if inspect.isroutine(value) or isinstance(value, functools.partial):
        return [kind, source_sha256(value)]
    if dataclasses.is_dataclass(value) or isinstance(value, LRScheduler) or _is_of_the_users(type(value)):
        return [kind, sorted([name, _content(each, depth + 1)] for name, each in _public(_attributes(value)).items())]
    return kind


def _is_of_the_users(kind: type) -> bool:
    """Whether a class is neither Python's, nor an installed package's, nor ours."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return False
    if file is None:
        return kind.__module__ == "__main__"  # a notebook
    installed = sysconfig.get_paths()
    return not any(
        Path(file).is_relative_to(installed[where]) for where in ("stdlib", "platstdlib", "purelib", "platlib")
    )
