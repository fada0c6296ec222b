"""How an update reaches a rollout server: its layout as bytes, memory in `/dev/shm`, and one HTTP body between hosts.

On one host the trainer writes into a file in `/dev/shm` that the server's workers map. Between hosts it sends the same bytes as one HTTP body
to a listener in the server's API process, which writes them into such a file there. vLLM's own port takes a second for 160 MB.
"""

import contextlib
import functools
import hashlib
import hmac
import json
import mmap
import os
import re
import secrets
import socket
import ssl
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate

import torch

from .wire import AdapterTensors

#: environment variables: the secret that server and trainer share, and the port for updates between hosts (any free one by default)
SECRET, PORT = "QERL_SERVER_SECRET", "QERL_SERVER_DATA_PORT"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: bytes that are summed into one number of an update's checksum
_BLOCK = 2**16


def secret() -> str:
    """The secret of this process, sent as a bearer token.

    Raises:
        `RuntimeError`: there is none; says how to make one.
    """
    value = os.environ.get(SECRET, "").strip()
    if not value:
        raise RuntimeError(
            f"{SECRET} is not set, so anybody could change what the server computes. Set the same value for the server and the trainer:\n"
            f"""export {SECRET}=$(python3 -c "import secrets; print(secrets.token_hex(32))")"""
        )
    return value


def bearer(secret: str) -> str:
    """The `Authorization` header of a request."""
    return f"Bearer {secret}"


def is_allowed(header: str | None, secret: str) -> bool:
    """Whether a request with this `Authorization` header comes from the trainer."""
    return hmac.compare_digest((header or "").encode(), bearer(secret).encode())


@dataclass(frozen=True)
class UpdateLayout:
    """The tensors of an update in order: (kind, name, dtype, shape) each; float32 before 16 bits, so that all are aligned.

    Args:
        entries: kind is "a" (r, K), "b" (N, r) or "norm" (K,); dtype a name of `torch`'s.
    """

    entries: tuple[tuple[str, str, str, tuple[int, ...]], ...]

    @classmethod
    def of(
        cls, adapter: Mapping[str, AdapterTensors], norms: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> "UpdateLayout":
        """For this adapter in `dtype`, and these norms in float32."""
        name = str(dtype).removeprefix("torch.")
        found = [("norm", key, "float32", tuple(weight.shape)) for key, weight in norms.items()]
        for half in "ab":
            found += [(half, key, name, tuple(getattr(t, half).shape)) for key, t in adapter.items()]
        return cls(tuple(found))

    @cached_property
    def text(self) -> str:
        """JSON, for `parse`."""
        return json.dumps(self.entries)

    @classmethod
    @functools.lru_cache(maxsize=1)
    def parse(cls, text: str) -> "UpdateLayout":
        """The layout of this `text`. Updates of one trainer have the same layout, so it is parsed once."""
        return cls(tuple((kind, name, dtype, tuple(shape)) for kind, name, dtype, shape in json.loads(text)))

    @cached_property
    def _sizes(self) -> list[int]:
        return [torch.Size(shape).numel() * _DTYPES[dtype].itemsize for _, _, dtype, shape in self.entries]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of an update: its tensors, and zeros up to a whole block."""
        return -(-sum(self._sizes) // _BLOCK) * _BLOCK

    @cached_property
    def _latest(self) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """The latest buffer and its views, hundreds, which every update in the same buffer needs."""
        return []

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a buffer: uint8 (nbytes,), whose bytes they share."""
        if not (self._latest and self._latest[0][0] is flat):
            starts = accumulate(self._sizes, initial=0)
            self._latest[:] = [(flat, [
                flat[start : start + size].view(_DTYPES[dtype]).view(shape)
                for start, size, (_, _, dtype, shape) in zip(starts, self._sizes, self.entries, strict=False)
            ])]  # fmt: skip
        return self._latest[0][1]

    @torch.no_grad()
    def pack(
        self, adapter: Mapping[str, AdapterTensors], norms: Mapping[str, torch.Tensor], flat: torch.Tensor
    ) -> None:
        """Write an update into `flat`, uint8 (nbytes,) on the tensors' device; alpha/r goes into b, in float32."""
        scaled = [t.b.float() for t in adapter.values()]
        if scaled:
            scaled = list(torch._foreach_mul(scaled, [t.scaling for t in adapter.values()]))
        sources = [*norms.values(), *(t.a for t in adapter.values()), *scaled]
        if sources:
            torch._foreach_copy_(self.views(flat), [source.detach() for source in sources])

    def unpack(self, flat: torch.Tensor) -> tuple[dict[str, AdapterTensors], dict[str, torch.Tensor]]:
        """Adapter and norms in `flat`, whose bytes they share."""
        parts: dict[str, dict[str, torch.Tensor]] = {"norm": {}, "a": {}, "b": {}}
        for (kind, name, _, _), tensor in zip(self.entries, self.views(flat), strict=True):
            parts[kind][name] = tensor
        return {name: AdapterTensors(a, parts["b"][name], 1.0) for name, a in parts["a"].items()}, parts["norm"]


def checksum_of(flat: torch.Tensor) -> str:
    """Changes with any of these bytes (uint8, whole blocks). Waits for the device."""
    sums = flat.view(torch.int64).view(-1, _BLOCK // 8).sum(1) if flat.numel() else flat.long()
    return hashlib.blake2b(sums.cpu().numpy().tobytes(), digest_size=16).hexdigest()


class SharedMemory:
    """A file in `/dev/shm` that only this user may open, mapped as `data`, uint8 (size,), and pinned for a GPU.

    Python's `multiprocessing.shared_memory` would remove it when either process ends.

    Args:
        name: of memory that another process made; new memory under a random name by default.

    Raises:
        `OSError`, `ValueError`: there is no such memory here, or too little of it is left.
    """

    def __init__(self, size: int, device: torch.device, name: str | None = None) -> None:
        self.size, self.name = size, name or f"qerl-{secrets.token_hex(16)}"
        descriptor = os.open(_path(self.name), os.O_RDWR | (0 if name else os.O_CREAT | os.O_EXCL), 0o600)
        try:
            if name is None:
                weakref.finalize(self, _unlink, self.name)
                os.posix_fallocate(descriptor, 0, size)  # too little memory would end the process later
            self.data = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        finally:
            os.close(descriptor)
        self.pinned = device.type == "cuda" and _pin(self.data)
        if self.pinned:
            weakref.finalize(self, _unpin, self.data)

    def unlink(self) -> None:
        """Remove the file; processes that have mapped it keep the memory, and a SIGKILL leaves nothing behind."""
        _unlink(self.name)

    @staticmethod
    def is_here(name: str) -> bool:
        """Whether this process can open the memory."""
        return bool(name) and os.access(_path(name), os.R_OK | os.W_OK)


def _path(name: str) -> str:
    if not re.fullmatch(r"qerl-[0-9a-f]{32}", name):
        raise ValueError(f"{name[:80]!r} is not the name of an update's memory.")
    return f"/dev/shm/{name}"


def _unlink(name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_path(name))


def _pin(data: torch.Tensor) -> bool:
    pinned = int(torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0)) == 0
    if not pinned:  # CUDA keeps the error for the next kernel launch
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
    return pinned


def _unpin(data: torch.Tensor) -> None:
    with contextlib.suppress(Exception):  # the driver may be gone at the end of the process
        torch.cuda.cudart().cudaHostUnregister(data.data_ptr())


class Receiver(ThreadingHTTPServer):
    """Takes updates from a trainer on another host, as the body of a PUT, and answers with the name of the memory that holds it.

    Args:
        host: address to listen on.
        certificate, key: files for TLS, if the server has it.

    Raises:
        `OSError`: the port in the environment's `PORT` is taken.
    """

    def __init__(self, host: str, secret: str, certificate: str | None = None, key: str | None = None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, int(os.environ.get(PORT) or 0)), _Upload)
        if certificate:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(certificate, key)
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.secret = secret
        self.memory: SharedMemory | None = None
        threading.Thread(target=self.serve_forever, name="qerl-receiver", daemon=True).start()


class _Upload(BaseHTTPRequestHandler):
    server: Receiver
    timeout = 60

    def do_PUT(self) -> None:
        if not is_allowed(self.headers.get("Authorization"), self.server.secret):
            return self.send_error(401)
        size, memory = int(self.headers["Content-Length"]), self.server.memory
        if memory is None or memory.size != size:
            memory = self.server.memory = SharedMemory(size, torch.device("cpu"))
        if self.rfile.readinto(memory.data.numpy().data) == size:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(memory.name.encode())

    def log_message(self, *args: object) -> None:
        """Nothing: one line per update would fill the log."""
