"""Safetensors written tensor by tensor, in any order, resumable.

A checkpoint of any size is described by *jobs*: what tensors a job will give (names, dtypes, shapes) is known before their values are.
So every file's header is written first and each tensor goes straight to its place in the file, from any thread and in any order, and no
more than the tensors being worked on is ever in memory. A shard gets its final name when it is complete; a killed run continues with the
shards that are missing.
"""

import ctypes
import functools
import hashlib
import io
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import checkpoint
from ..nvfp4.headers import DTYPES, check_finite
from ..nvfp4.layouts import TensorSpec
from ..nvfp4.shards import INDEX_NAME
from .records import Note

#: default size of a shard: small enough that a killed run loses little, and that hashing the last one takes little
MAX_SHARD_BYTES = 1_000_000_000
_HASHED_AT_ONCE = 1 << 20
#: shards that several workers write side by side: a disk may well be faster than one core hashes
_SIDE_BY_SIDE = 3
#: the kernel is told to start writing back at once what is written in pieces of at least this size
_WRITTEN_BACK_AT_ONCE = 1 << 20
NOTES_SUFFIX = ".notes.json"
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Job(NamedTuple):
    """Tensors that are made together. `make` yields them in the order of `specs`, each whole or in slices of its first dimension (a slice
    may be overwritten when the next is asked for); `note` may be filled by it (JSON) and is kept."""

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
    """Write the tensors of `jobs` as `model*.safetensors` with their index; shards that are already there are kept. A tensor that is not
    finite throughout is not written.

    Args:
        folder: existing folder, from [`staging.staging`] if an interrupted run shall be continued.
        metadata: goes into each file's header, beside `format: pt`.
        max_shard_bytes: a job is never split, so a shard may exceed this by its largest job.
        workers: jobs worked on at a time, as threads.
        progress: called with the number of bytes written, after each tensor or slice.

    Returns:
        The jobs' notes, those of shards that an earlier run wrote included.
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
        checkpoint.write_json_atomically(folder / INDEX_NAME, index)
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
    """Do the shards' jobs, `workers` at a time and across shards: some are flushed while the next ones are written."""
    if workers == 1:
        for shard in missing:
            for job in shard.jobs:
                shard.run(job)
        return
    missing = sorted(missing, key=lambda shard: max(job.nbytes for job in shard.jobs))
    batches = [missing[i : i + _SIDE_BY_SIDE] for i in range(0, len(missing), _SIDE_BY_SIDE)]
    batches.reverse()  # what one thread is long at shall not come last
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(
            lambda item: item[0].run(item[1]), (item for batch in batches for item in _interleaved(batch))
        ):
            pass


def _interleaved(shards: "list[_Shard]") -> "list[tuple[_Shard, Job]]":
    """The shards' jobs in an order in which all of them are complete at about the same time."""
    places = []
    for shard in shards:
        ends = list(itertools.accumulate(job.nbytes for job in shard.jobs))
        for job, end in zip(shard.jobs, ends, strict=True):
            places.append(((end - job.nbytes) / max(ends[-1], 1), shard, job))
    return [(shard, job) for _, shard, job in sorted(places, key=lambda place: place[0])]


class _Shard:
    """A file being written: opened by its first job, published by its last."""

    def __init__(self, path: Path, jobs: list[Job], metadata: dict[str, str], progress: Callable[[int], None] | None):
        self.path, self.jobs, self.progress = path, jobs, progress
        self._temporary = path.with_name(f".{path.name}.tmp")
        # in the order of writing, so that hashing can follow it. Readers view the file's bytes as the tensor's dtype: what would leave its
        # successor at an odd place comes last, wider dtypes first, and every tensor is aligned
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
        self._opened: tuple[io.FileIO, _Digest] | None = None

    def run(self, job: Job) -> None:
        """Make the job's tensors and write each to its place; the last job to end publishes the file."""
        file, digest = self._open()
        made = iter(job.make())
        for spec in job.specs:
            start = position = self._offsets[spec.name]
            end = start + spec.nbytes
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
            digest.add(start, end)
        next(made, None)  # lets a generator finish
        digest.follow()
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._publish(file, digest)

    def _open(self) -> "tuple[io.FileIO, _Digest]":
        with self._lock:
            if self._opened is None:
                file = open(self._temporary, "w+b", buffering=0)  # noqa: SIM115  closed by the last job
                file.write(self._head)
                file.truncate(self._size)
                digest = _Digest(file.fileno(), self._size)
                digest.add(0, len(self._head))
                self._opened = file, digest
            return self._opened

    def _publish(self, file: io.FileIO, digest: "_Digest") -> None:
        with file:
            os.fsync(file.fileno())
            sha256 = digest.hexdigest()
        described = {"notes": [job.note for job in self.jobs if job.note], "sha256": sha256}
        checkpoint.write_json_atomically(_notes_file(self.path), described)
        os.replace(self._temporary, self.path)


class _Digest:
    """SHA-256 of a file that several threads write: follows the bytes that are there without a gap, read back from the page cache."""

    def __init__(self, descriptor: int, size: int):
        self._descriptor, self._size = descriptor, size
        self._sha256 = hashlib.sha256()
        self._hashed = self._contiguous = 0
        self._ends: dict[int, int] = {}
        self._busy = False
        self._changed = threading.Condition()

    def add(self, start: int, end: int) -> None:
        """The bytes from `start` to `end` are written."""
        with self._changed:
            if start != end:
                self._ends[start] = end
            while self._contiguous in self._ends:
                self._contiguous = self._ends.pop(self._contiguous)

    def follow(self) -> None:
        """Hash what there is, unless another thread is at it."""
        with self._changed:
            if self._busy:
                return
            self._busy = True
        piece = memoryview(bytearray(_HASHED_AT_ONCE))
        while True:
            with self._changed:  # nothing is added between looking for more and leaving
                size = min(self._contiguous - self._hashed, len(piece))
                self._busy = size > 0
                if not size:
                    self._changed.notify_all()
                    return
            try:
                size = os.preadv(self._descriptor, [piece[:size]], self._hashed)
                self._sha256.update(piece[:size])
                self._hashed += size
            except BaseException:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
                raise

    def hexdigest(self) -> str:
        """Of the whole file, when every byte was added and followed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)
        assert self._hashed == self._size
        return self._sha256.hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to be read or written in place."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's stubs on Python 3.11


def _write_at(descriptor: int, offset: int, tensor: torch.Tensor) -> None:
    if not tensor.numel():
        return
    data = bytes_of(tensor.detach().contiguous().cpu())
    start, size = offset, len(data)
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
    if size >= _WRITTEN_BACK_AT_ONCE:
        _start_writing_back(descriptor, start, size)


@functools.cache
def _sync_file_range() -> Callable | None:
    return getattr(ctypes.CDLL(None), "sync_file_range", None)


def _start_writing_back(descriptor: int, offset: int, size: int) -> None:
    """Have the disk begin with these bytes now and not at the file's fsync (Linux; elsewhere nothing happens)."""
    sync_file_range = _sync_file_range()
    if sync_file_range is not None:
        start_writing = 2  # SYNC_FILE_RANGE_WRITE
        sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(size), ctypes.c_uint(start_writing))
