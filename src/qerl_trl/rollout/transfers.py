"""Updates on their way to a worker: their parts, within limits of size and time."""

import base64
import binascii
import hashlib
import time
from collections.abc import Callable

from .wire import CHUNK, MAX_TRANSFER

#: seconds without a part after which an update is given up
EXPIRY = 60
_ENCODED = 4 * -(-CHUNK // 3)


class Transfers:
    """One update at a time.

    Args:
        limit: bytes of the largest update that the engine could take.
        clock: seconds, from any moment on.
    """

    def __init__(self, limit: int = MAX_TRANSFER, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self._clock = min(limit, MAX_TRANSFER), clock
        self._name: str | None = None
        self._data = bytearray()
        self._last = 0.0

    def receive(self, name: str, index: int, part: str) -> int:
        """Keep part number `index` (base64) of the update `name`; parts arrive in order, all but the last of `CHUNK` bytes.

        Returns:
            Bytes so far.

        Raises:
            `ValueError`: out of order, too large, not base64, or another update is on its way. A refused update is forgotten.
        """
        if self._name is not None and self._clock() - self._last > EXPIRY:
            self._drop()
        if index == 0:
            if self._name not in (None, name):
                raise ValueError(
                    f"Another update is on its way to this engine, so {name!r} cannot begin: let one trainer alone use the server, or "
                    f"wait {EXPIRY} s until the other one is given up."
                )
            self._drop()
            self._name = name
        elif name != self._name:
            raise ValueError(
                f"Part {index} of the unknown transfer {name!r} (given up after {EXPIRY} s?): start again with part 0."
            )
        try:
            self._data += self._checked(name, index, part)
        except ValueError:
            self._drop()
            raise
        self._last = self._clock()
        return len(self._data)

    def _checked(self, name: str, index: int, part: str) -> bytes:
        due, rest = divmod(len(self._data), CHUNK)
        if rest:
            raise ValueError(
                f"Part {index} of transfer {name!r} came after a part of fewer than {CHUNK} bytes, which is the last: start again with "
                "part 0."
            )
        if index != due:
            raise ValueError(
                f"Part {index} of transfer {name!r} came when part {due} was due: start again with part 0."
            )
        if len(part) > _ENCODED:
            raise ValueError(
                f"Part {index} of transfer {name!r} has more than {CHUNK} bytes: send it in smaller parts."
            )
        try:
            data = base64.b64decode(part, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"Part {index} of transfer {name!r} is not base64: {error}") from error
        if len(self._data) + len(data) > self.limit:
            raise ValueError(
                f"Transfer {name!r} has more than {self.limit} bytes, the most that adapter and norms of this engine can have. Start the "
                "server for this trainer's adapter, with the command that the trainer prints."
            )
        return data

    def take(self, name: str, digest: str) -> bytes:
        """The whole update `name`, which is forgotten here.

        Raises:
            `ValueError`: it is not what has this sha256.
        """
        data = bytes(self._data) if name == self._name else b""
        if name == self._name:
            self._drop()
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError(f"Transfer {name!r} arrived damaged or incomplete ({len(data)} bytes): send it again.")
        return data

    def _drop(self) -> None:
        self._name, self._data = None, bytearray()
