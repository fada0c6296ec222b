"""Folders that are published whole or not at all, and not made twice.

Everything is written into `.<name>.partial` beside the destination, the manifest last, and one rename (an exchange, when something is
being replaced) makes it the destination: at every moment that is the old folder or the new one.
"""

import ctypes
import fcntl
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from .. import checkpoint
from .writer import NOTES_SUFFIX

logger = logging.getLogger(__name__)

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


def require_room(destination: str | os.PathLike, overwrite: bool, kinds: Collection[str] = ()) -> None:
    """
    Args:
        kinds: what is to be written is of one of these. An export of such a kind may be it already.

    Raises:
        `ValueError`: something else is there, and nobody allowed to replace it.
    """
    destination = Path(destination).absolute()
    taken = destination.is_file() or (destination.is_dir() and any(destination.iterdir()))
    if overwrite or not taken or checkpoint.recorded_run(destination).get("kind") in kinds:
        return
    raise ValueError(
        f"{destination} already exists and is not empty. Choose another folder, or allow it to be replaced (overwrite=True, "
        "--overwrite): the old content stays until the new one is complete."
    )


def is_complete(destination: str | os.PathLike, run: Mapping[str, Any]) -> bool:
    """Whether `destination` is a sealed folder that `run` describes exactly: the same command already finished."""
    destination = Path(destination).absolute()
    if checkpoint.recorded_run(destination) != _as_json(run) or checkpoint.problems(destination):
        return False
    if checkpoint.added(destination):
        return False
    leftover = destination.with_name(f".{destination.name}.partial")
    if leftover.is_dir():  # killed after the exchange, before the replaced folder was removed
        # or another process fills it, to replace this one, or has just done so
        with suppress(BlockingIOError, FileNotFoundError), _locked(leftover):
            shutil.rmtree(leftover)
    return True


def card_again(destination: str | os.PathLike, card: Callable[[Path], None]) -> None:
    """Of a folder that is complete, write the card anew where it would say something else now (figures that came since, other data). Nothing else in
    there changes, sealed or not, and at every moment it is complete: the card is unsealed, replaced, and sealed again.

    Args:
        card: writes its files into the folder that it is given.
    """
    destination = Path(destination).absolute()
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder, f".{destination.name}.partial")
        new.mkdir()
        card(new)
        content = {path.name: path.read_bytes() for path in new.iterdir()}
    descriptor = os.open(destination, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # another process that does the same
        manifest = checkpoint.read_manifest(destination)
        hashed = {name: file["sha256"] for name, file in manifest["files"].items() if name not in content}
        if content.keys() <= manifest["files"].keys() and all(
            _holds(destination / n, data) for n, data in content.items()
        ):
            return
        checkpoint.seal(destination, manifest["run"], hashed, names=hashed)
        for name, data in content.items():
            beside = destination / f".{name}.new"
            beside.write_bytes(data)
            os.replace(beside, destination / name)
        checkpoint.seal(destination, manifest["run"], hashed, names=[*hashed, *content])
    except OSError as error:
        logger.warning(
            "The card in %s stays as it was, with what was known then: it cannot be written anew (%s).",
            destination,
            error,
        )
    finally:
        os.close(descriptor)


def _holds(file: Path, data: bytes) -> bool:
    return file.is_file() and file.read_bytes() == data


@contextmanager
def staging(destination: str | os.PathLike, run: Mapping[str, Any], overwrite: bool = False) -> Iterator[Path]:
    """Yield a folder to fill; when the block ends well, seal it and make it `destination`.

    Args:
        run: JSON description of what is made from what. Becomes the manifest's `run`; an interrupted run with the same description is
            continued in its folder, with another one it is discarded.
        overwrite: replace an existing destination. Otherwise only an empty folder may be there.

    Raises:
        `ValueError`: the destination exists, or is no single export but a run or a folder of models. `RuntimeError`: another process is writing it.
    """
    destination = Path(destination).absolute()
    require_room(destination, overwrite)
    _require_replaceable(destination)
    partial = destination.with_name(f".{destination.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(_locked(partial))
        except BlockingIOError as error:
            raise RuntimeError(
                f"Another process is writing {destination} (it works in {partial}). Wait for it or end it, then run the same command again, which goes on where it stopped; or choose another folder."
            ) from error
        begun = partial / _RECORD_NAME
        if not begun.is_file() or json.loads(begun.read_text()) != _as_json(run):
            _empty(partial)
            checkpoint.write_json_atomically(begun, run)
        yield partial
        hashed = {
            path.name[1:].removesuffix(NOTES_SUFFIX): json.loads(path.read_text())["sha256"]
            for path in partial.glob(f".*{NOTES_SUFFIX}")
        }
        for path in partial.iterdir():
            if path.name.startswith("."):
                path.unlink()  # the record, notes of finished shards, temporary files of a killed run
        checkpoint.seal(partial, run, hashed)
        _replace(partial, destination)


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Inside, no other process writes into the folder.

    Raises:
        `BlockingIOError`: one does.
    """
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however that ends
        yield
    finally:
        os.close(descriptor)


def _require_replaceable(destination: Path) -> None:
    """What is replaced is removed whole, so it has to be one export (or files beside each other): no run, and no folder of other models.

    Raises:
        `ValueError`: says what is in there.
    """
    if not destination.is_dir():
        return
    sealed = checkpoint.sealed_files(destination)
    found = [*checkpoint.of_a_run(destination), *(".git" for _ in destination.glob(".git"))]
    models = (
        file
        for name in ("config.json", "adapter_config.json", "*.safetensors")
        for file in destination.glob(f"*/{name}")
    )
    found += sorted(
        {file.parent.name for file in models if str(file.relative_to(destination)) not in sealed} - {*found}
    )
    if found:
        raise ValueError(
            f"{destination} holds more than an export ({', '.join(found[:5])}{', ...' if found[5:] else ''}), and all of it would be removed in its "
            "place. Name a folder for this export alone."
        )


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _as_json(run: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(run))


def _replace(new: Path, destination: Path) -> None:
    """Make the folder `new` the folder `destination`; an older one is removed afterwards."""
    if not destination.exists():
        os.rename(new, destination)
        return
    if destination.is_dir() and not any(destination.iterdir()):
        os.rename(new, destination)  # POSIX: replaces an empty folder
        return
    if not _exchange(new, destination):
        old = destination.with_name(f".{destination.name}.old")
        checkpoint.discard(old)
        os.rename(destination, old)
        os.rename(new, destination)
        new = old
    shutil.rmtree(new) if new.is_dir() else new.unlink()  # after the exchange it is the older one


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step (Linux renameat2); False where the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    at_fdcwd, rename_exchange = -100, 2
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return (
        renameat2 is not None
        and renameat2(at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange) == 0
    )
