"""What has to be the same in all processes of a run, and is not: each value once, with the processes that have it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import redaction

#: characters of a value, and lines, that are shown
_LONGEST, _LINES = 120, 12
_DIGEST = 12
_NOT_SET = "not set"


def apart(values: Sequence[Any]) -> str | None:
    """In words, who has which value, where it is not the same in all processes.

    Args:
        values: JSON, by the number of the process; `None`: it has none.
    """
    having: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        having.setdefault(json.dumps(value, sort_keys=True, default=str), []).append(rank)
    if len(having) == 1:
        return None
    return ", ".join(f"{_shown(values[ranks[0]])} in {_processes(ranks)}" for ranks in having.values())


def lines(records: Sequence[Mapping[str, Any]], called: Mapping[str, str] | None = None) -> list[str]:
    """ "name: who has what", for each entry that differs; of dictionaries inside, for each of theirs.

    Args:
        records: of each process.
        called: other words for a name, or for the part of it before a point.
    """
    flat = [dict(_flat(record)) for record in records]
    found = []
    for name in sorted({name for record in flat for name in record}):
        if (said := apart([record.get(name) for record in flat])) is not None:
            first, _, rest = name.partition(".")
            words = (called or {}).get(first)
            found.append(f"{name if words is None else f'{words} {rest}'.strip()}: {said}")
    return found if len(found) <= _LINES else [*found[:_LINES], f"and {len(found) - _LINES} more"]


def _flat(record: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _shown(value: Any) -> str:
    if value is None:
        return _NOT_SET
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if len(text) == 64 and set(text) <= set("0123456789abcdef"):
        return text[:_DIGEST]
    return redaction.redact(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}...")


def _processes(ranks: list[int]) -> str:
    return f"process {ranks[0]}" if len(ranks) == 1 else f"processes {', '.join(map(str, ranks))}"
