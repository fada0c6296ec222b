"""A piece of memory that trainer and server have in common where both run on one host: an update is written once and read once.

A file in `/dev/shm` that only this user may open, with a name nobody can guess, which it loses once both have it open: whichever way they end, a
SIGKILL included, nothing of it is left. Pinned, so that a GPU copies it at the speed of its bus. Python's `multiprocessing.shared_memory` would
remove it when *either* process ends.
"""

import contextlib
import hashlib
import mmap
import os
import re
import secrets
import stat
import weakref

import torch

from .layout import as_tensor

_FOLDER = "/dev/shm"
_NAME = re.compile(r"qerl-[0-9a-f]{32}", re.ASCII)
#: bytes at the start by which the other end shows that it sees this very piece
_PROOF = 32


class SharedMemory:
    """`data` is uint8 (size,), in both processes. [`create`] on the trainer's side, [`open`] on the server's."""

    def __init__(self, name: str, descriptor: int, size: int, device: torch.device, owner: bool) -> None:
        self.name, self.size = name, size
        self._map = mmap.mmap(descriptor, size)
        os.close(descriptor)
        self.data = as_tensor(self._map)
        self.pinned = device.type == "cuda" and _pin(self.data)
        path = f"{_FOLDER}/{name}" if owner else None
        self.close = weakref.finalize(self, _release, self.data.data_ptr() if self.pinned else None, path)

    @classmethod
    def create(cls, size: int, device: torch.device) -> "SharedMemory":
        """A new piece for a trainer on `device`.

        Raises:
            `OSError`: this system has no `/dev/shm`, or too little of it is left.
        """
        name = f"qerl-{secrets.token_hex(16)}"
        descriptor = os.open(f"{_FOLDER}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a file that is only as long as this would end the process later
        except OSError:
            os.close(descriptor)
            os.unlink(f"{_FOLDER}/{name}")
            raise
        piece = cls(name, descriptor, size, device, owner=True)
        piece.data[:_PROOF] = torch.frombuffer(bytearray(secrets.token_bytes(_PROOF)), dtype=torch.uint8)
        return piece

    @classmethod
    def open(cls, name: str, size: int, device: torch.device) -> "SharedMemory":
        """The piece that a trainer on this host made.

        Raises:
            `ValueError`: there is none of this name, size and user.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no name of a shared piece of memory.")
        try:
            descriptor = os.open(f"{_FOLDER}/{name}", os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise ValueError(f"No memory {name!r} is shared with this host: {error}") from error
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != size:
            os.close(descriptor)
            raise ValueError(f"The memory {name!r} is another user's or has another size than {size} bytes.")
        return cls(name, descriptor, size, device, owner=False)

    def forget_name(self) -> None:
        """Nobody else can open it from here on; whoever has it open keeps it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{_FOLDER}/{self.name}")

    def proof(self) -> str:
        """What only who sees this piece can say."""
        return hashlib.sha256(self.data[:_PROOF].numpy().tobytes()).hexdigest()


def _pin(data: torch.Tensor) -> bool:
    runtime = torch.cuda.cudart()
    pinned = int(runtime.cudaHostRegister(data.data_ptr(), data.numel(), 0)) == 0
    if not pinned:  # CUDA keeps the error for whoever launches a kernel next
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
    return pinned


def _release(pinned: int | None, path: str | None) -> None:
    if pinned is not None:
        with contextlib.suppress(Exception):  # the driver may be gone at the end of the process
            torch.cuda.cudart().cudaHostUnregister(pinned)
    if path is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
