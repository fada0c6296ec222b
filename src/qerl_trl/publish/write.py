"""Safetensors written tensor by tensor, in any order, resumable.

*Jobs* describe a checkpoint of any size: their tensors' names, dtypes and shapes are known before the values. So every
file's header is written first, and each tensor goes straight to its place in the file, from any thread and in any
order; memory has only the tensors being computed. A complete shard gets its final name; a killed run continues with the
missing shards.
"""

import fcntl
import hashlib
import io
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from ..checkpoint import seal
from ..checkpoint.records import Note
from ..nvfp4.checkpoints import TensorSpec
from ..nvfp4.headers import DTYPES, INDEX_NAME, check_finite

#: default shard size: small, so that a killed run loses little
MAX_SHARD_BYTES = 1_000_000_000
NOTES_SUFFIX = ".notes.json"
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Job(NamedTuple):
    """Tensors computed together. `make` yields them in the order of `specs`, whole or in slices of the first
    dimension (a slice may be overwritten by the next), and may fill `note` (JSON), kept with the shard."""

    specs: tuple[TensorSpec, ...]
    make: Callable[[], Iterable[torch.Tensor]]
    note: Note | None = None

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


def write_shards(
    folder: Path,
    jobs: list[Job],
    metadata: dict[str, str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> list[Note]:
    """Write the tensors of `jobs` as `model*.safetensors` with their index; finished shards are kept.

    Args:
        folder: existing folder; from [`staging`] to continue an interrupted run.
        metadata: for each file's header, besides `format: pt`.
        max_shard_bytes: a job is never split, so a shard may exceed this by its largest job.
        workers: number of threads, each with one job.
        progress: called with the number of bytes written, after each tensor or slice.

    Returns:
        The jobs' notes, including those of shards from an earlier run.
    """
    names = [spec.name for job in jobs for spec in job.specs]
    assert len(names) == len(set(names)), "a tensor would be written twice"
    shards = _group(jobs, max_shard_bytes)
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    missing = []
    for file, shard in zip(files, shards, strict=True):
        if (folder / file).is_file() and _notes_file(folder / file).is_file():
            if progress is not None:
                progress(sum(job.nbytes for job in shard))
        else:
            missing.append(_Shard(folder / file, shard, {**metadata, "format": "pt"}, progress))
    _run(missing, workers)
    notes: list[Note] = []
    for file in files:
        notes += json.loads(_notes_file(folder / file).read_text())["notes"]
    if len(files) > 1:
        weight_map = {
            spec.name: file for file, shard in zip(files, shards, strict=True) for job in shard for spec in job.specs
        }
        index = {"metadata": {"total_size": sum(job.nbytes for job in jobs)}, "weight_map": weight_map}
        seal.write_json_atomically(folder / INDEX_NAME, index)
    return notes


def _group(jobs: list[Job], max_shard_bytes: int) -> list[list[Job]]:
    shards: list[list[Job]] = [[]]
    size = 0
    for job in jobs:
        if shards[-1] and size + job.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(job)
        size += job.nbytes
    return shards


def _notes_file(shard: Path) -> Path:
    return shard.with_name(f".{shard.name}{NOTES_SUFFIX}")


def _run(missing: "list[_Shard]", workers: int) -> None:
    """Run the shards' jobs, `workers` at a time and across shards."""
    work = [(shard, job) for shard in missing for job in shard.jobs]
    if workers == 1:
        for shard, job in work:
            shard.run(job)
        return
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(lambda item: item[0].run(item[1]), work):
            pass


class _Shard:
    """A file being written: its first job opens it, its last gives it its final name."""

    def __init__(self, path: Path, jobs: list[Job], metadata: dict[str, str], progress: Callable[[int], None] | None):
        self.path, self.jobs, self.progress = path, jobs, progress
        self._temporary = path.with_name(f".{path.name}.tmp")
        # readers view the file's bytes as the tensor's dtype: sizes that misalign the next tensor come last, wider
        # dtypes first
        specs = sorted(
            (spec for job in jobs for spec in job.specs),
            key=lambda spec: -spec.dtype.itemsize if spec.nbytes % 8 else -8,
        )
        header: dict[str, Any] = {"__metadata__": metadata}
        position = 0
        for spec in specs:
            header[spec.name] = {
                "dtype": _DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [position, position + spec.nbytes],
            }
            position += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self._offsets = {spec.name: len(self._head) + header[spec.name]["data_offsets"][0] for spec in specs}
        self._size = len(self._head) + position
        self._lock = threading.Lock()
        self._left = len(jobs)
        self._file: io.FileIO | None = None

    def run(self, job: Job) -> None:
        """Compute the job's tensors and write each to its place; the last job to end publishes the file."""
        file = self._open()
        made = iter(job.make())
        for spec in job.specs:
            position = self._offsets[spec.name]
            end = position + spec.nbytes
            while True:
                tensor = next(made)
                assert (tensor.dtype, tensor.shape[1:]) == (spec.dtype, spec.shape[1:]), (spec, tensor.shape)
                assert position + tensor.nbytes <= end, (spec, tensor.shape)
                check_finite(spec.name, tensor, str(self.path.parent))
                _write_at(file.fileno(), position, tensor)
                position += tensor.nbytes
                if self.progress is not None:
                    self.progress(tensor.nbytes)
                del tensor
                if position == end:
                    break
        next(made, None)  # let the generator finish
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._publish(file)

    def _open(self) -> io.FileIO:
        with self._lock:
            if self._file is None:
                self._file = open(self._temporary, "w+b", buffering=0)  # noqa: SIM115  closed by the last job
                self._file.write(self._head)
                self._file.truncate(self._size)
            return self._file

    def _publish(self, file: io.FileIO) -> None:
        with file:
            os.fsync(file.fileno())
            file.seek(0)
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        described = {"notes": [job.note for job in self.jobs if job.note], "sha256": sha256}
        seal.write_json_atomically(_notes_file(self.path), described)
        os.replace(self._temporary, self.path)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, for reading or writing in place."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write_at(descriptor: int, offset: int, tensor: torch.Tensor) -> None:
    if not tensor.numel():
        return
    data = bytes_of(tensor.detach().contiguous().cpu())
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


# --- atomic publication of folders ------------------------------------------------------------------------------------

_RECORD_NAME = ".record.json"


def require_apart(source: str | os.PathLike, destination: str | os.PathLike) -> None:
    """Refuse a destination that is or contains its own source: `overwrite` would remove a run with its checkpoints."""
    read, written = Path(source).resolve(), Path(destination).resolve()
    if read.is_dir() and read.is_relative_to(written):
        raise ValueError(
            f"{destination} is, or contains, {source}: the source of this export would be removed. Name another folder."
        )


def require_room(destination: str | os.PathLike, overwrite: bool) -> None:
    """Refuse a destination with other content, or, with `overwrite`, with more than one export."""
    destination = Path(destination).absolute()
    taken = destination.is_file() or (destination.is_dir() and any(destination.iterdir()))
    if not taken:
        return
    found = [*seal.of_a_run(destination), *(path.parent.name for path in destination.glob("*/*.safetensors"))]
    found += [".git"] if (destination / ".git").exists() else []
    if not overwrite or found:
        what = f" and holds more than an export ({', '.join(found[:5])})" if found else ""
        remedy = "" if found else ", or replace it (overwrite=True, --overwrite)"
        raise ValueError(f"{destination} already exists{what}. Name another folder for this export{remedy}.")


def is_complete(destination: str | os.PathLike, run: Mapping[str, Any]) -> bool:
    """True if `destination` is sealed with exactly the description `run`: the same command already finished."""
    same = seal.recorded_run(destination) == _as_json(run)
    return same and not seal.problems(destination) and not seal.added(destination)


@contextmanager
def staging(
    destination: str | os.PathLike, run: Mapping[str, Any], overwrite: bool = False, resumable: bool = False
) -> Iterator[Path]:
    """Yield a folder to fill; on success, seal it and rename it to `destination`.

    Args:
        run: JSON description of sources and result. Becomes the manifest's `run`.
        resumable: continue an interrupted run with the same description in its folder; else discard it.
        overwrite: replace an existing destination. Otherwise only an empty folder is accepted.

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
                f"Another process is writing {destination} (in {partial}). Wait for it or end it, or choose another "
                "folder."
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
    """Rename the folder `new` to `destination`; the old one is removed afterwards."""
    old = destination.with_name(f".{destination.name}.old")
    seal.discard(old)
    if destination.exists():
        os.rename(destination, old)
    os.rename(new, destination)
    seal.discard(old) if old.is_dir() else old.unlink(missing_ok=True)


# --- models with custom code ------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)


def code_of(config: PretrainedConfig) -> dict[str, Any]:
    return getattr(config, "auto_map", None) or {}


def leave_code_out(config: Any) -> None:
    """Keep `config.save_pretrained` from copying the code and naming the copy instead of the repository."""
    config._auto_class = None


def naming_repository(entries: dict[str, Any], repo: str) -> dict[str, Any]:
    """Return an auto_map that names its files in the repository `repo`."""

    def of_repo(name: Any) -> Any:
        if isinstance(name, (list, tuple)):
            return [of_repo(part) for part in name]
        return name if not name or "--" in name else f"{repo}--{name}"

    return {role: of_repo(name) for role, name in entries.items()}


def warn_of_code(entries: dict[str, Any], folder: str | os.PathLike) -> None:
    """Warn that `folder` cannot be loaded without the files named by its auto_map."""
    parts = [
        part for name in entries.values() for part in (name if isinstance(name, (list, tuple)) else [name]) if part
    ]
    if files := sorted({f"{part.split('.')[0]}.py" for part in parts if "--" not in part}):
        logger.warning(
            "The code of this model (%s) is not exported, so %s cannot be loaded alone. Name the repository that has "
            "it in auto_map of the configuration (%s), or copy the files.",
            ", ".join(files),
            folder,
            naming_repository(entries, "user/name"),
        )
