"""Folders that are published whole or not at all, and not made twice.

Everything is written into `.<name>.partial` next to the destination, the manifest last; then it is renamed to the destination.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checkpoint import seal
from .write import NOTES_SUFFIX

_RECORD_NAME = ".record.json"


def require_apart(source: str | os.PathLike, destination: str | os.PathLike) -> None:
    """Refuse a destination in whose place what it is made from would be removed: with `overwrite`, a run with all its checkpoints.

    Raises:
        `ValueError`: `destination` is `source`, or holds it, by whatever path.
    """
    read, written = Path(source).resolve(), Path(destination).resolve()
    if read.is_dir() and read.is_relative_to(written):
        raise ValueError(
            f"{destination} is, or holds, {source}, from which it would be made and which would be removed in its place. Name another folder."
        )


def require_room(destination: str | os.PathLike, overwrite: bool) -> None:
    """
    Raises:
        `ValueError`: something else is there that may not be replaced; or, with `overwrite`, it is more than one export.
    """
    destination = Path(destination).absolute()
    taken = destination.is_file() or (destination.is_dir() and any(destination.iterdir()))
    if not taken:
        return
    if not overwrite:
        raise ValueError(
            f"{destination} already exists and is not empty. Choose another folder, or allow it to be replaced (overwrite=True, --overwrite)."
        )
    found = [*seal.of_a_run(destination), *(path.parent.name for path in destination.glob("*/*.safetensors"))]
    found += [".git"] if (destination / ".git").exists() else []
    if found:
        raise ValueError(
            f"{destination} holds more than an export ({', '.join(found[:5])}), and all of it would be removed in its place. Name a folder for "
            "this export alone."
        )


def is_complete(destination: str | os.PathLike, run: Mapping[str, Any]) -> bool:
    """Whether `destination` is a sealed folder that `run` describes exactly: the same command already finished."""
    same = seal.recorded_run(destination) == _as_json(run)
    return same and not seal.problems(destination) and not seal.added(destination)


@contextmanager
def staging(
    destination: str | os.PathLike, run: Mapping[str, Any], overwrite: bool = False, resumable: bool = False
) -> Iterator[Path]:
    """Yield a folder to fill; when the block ends well, seal it and make it `destination`.

    Args:
        run: JSON description of what is made from what. Becomes the manifest's `run`.
        resumable: an interrupted run with the same description is continued in its folder; else it is discarded.
        overwrite: replace an existing destination. Otherwise only an empty folder may be there.

    Raises:
        `ValueError`: as [`require_room`]. `RuntimeError`: another process is writing it.
    """
    destination = Path(destination).absolute()
    require_room(destination, overwrite)
    partial = destination.with_name(f".{destination.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with open(partial / _RECORD_NAME, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(
                f"Another process is writing {destination} (in {partial}). Wait for it or end it, or choose another folder."
            ) from error
        record = json.dumps(_as_json(run))
        if not resumable or (partial / _RECORD_NAME).read_text() != record:
            for path in set(partial.iterdir()) - {partial / _RECORD_NAME}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            lock.truncate(0)
            lock.write(record)
            lock.flush()
        yield partial
        hashed = {
            path.name[1:].removesuffix(NOTES_SUFFIX): json.loads(path.read_text())["sha256"]
            for path in partial.glob(f".*{NOTES_SUFFIX}")
        }
        for path in partial.glob(".*"):
            path.unlink()  # the record, notes of finished shards, temporary files of a killed run
        seal.seal(partial, run, hashed)
        _replace(partial, destination)


def _as_json(run: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(run))


def _replace(new: Path, destination: Path) -> None:
    """Make the folder `new` the folder `destination`; the old one is removed afterwards."""
    old = destination.with_name(f".{destination.name}.old")
    seal.discard(old)
    if destination.exists():
        os.rename(destination, old)
    os.rename(new, destination)
    seal.discard(old) if old.is_dir() else old.unlink(missing_ok=True)
