"""Updates on their way to a worker over the network: their parts, within limits of size and time."""

import time
from collections.abc import Callable

from .wire import CHUNK, MAX_TRANSFER

#: seconds without a part after which an update is given up
EXPIRY = 60


class Transfers:
    """One update at a time.

    Args:
        limit: bytes of the largest update that the engine could take.
        clock: seconds, from any moment on.
    """

    def __init__(self, limit: int = MAX_TRANSFER, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self._clock = min(limit, MAX_TRANSFER), clock
        self._name: str | None = None
        self._parts: dict[int, bytes] = {}
        self._last = 0.0

    def receive(self, name: str, index: int, part: bytes) -> int:
        """Keep part number `index` of the update `name`. Parts travel side by side, so they come in any order; each but the last has
        `CHUNK` bytes.

        Returns:
            Bytes so far.

        Raises:
            `ValueError`: a part too many, too large or twice, or another update is on its way. A refused update is forgotten.
        """
        if self._name is not None and self._clock() - self._last > EXPIRY:
            self._drop()
        if self._name not in (None, name):
            raise ValueError(
                f"Another update is on its way to this engine, so {name!r} cannot begin: let one trainer alone use the server, or "
                f"wait {EXPIRY} s until the other one is given up."
            )
        try:
            self._check(name, index, part)
        except ValueError:
            self._drop()
            raise
        self._name, self._parts[index], self._last = name, part, self._clock()
        return self._bytes()

    def _check(self, name: str, index: int, part: bytes) -> None:
        if type(part) is not bytes or not part or len(part) > CHUNK:
            raise ValueError(
                f"Part {index} of transfer {name!r} has none or more than {CHUNK} bytes: send it in smaller parts."
            )
        if index in self._parts:
            raise ValueError(f"Part {index} of transfer {name!r} came twice: start again.")
        if index < 0 or self._bytes() + len(part) > self.limit or index * CHUNK + len(part) > self.limit:
            raise ValueError(
                f"Transfer {name!r} has more than {self.limit} bytes, the most that adapter and norms of this engine can have. Start the "
                "server for this trainer's adapter, with the command that the trainer prints."
            )

    def take(self, name: str, size: int) -> list[bytes]:
        """The parts of the whole update `name`, in order; it is forgotten here.

        Raises:
            `ValueError`: they are not `size` bytes without a gap.
        """
        parts = self._parts if name == self._name else {}
        if name == self._name:
            self._drop()
        ordered = [parts[index] for index in sorted(parts)]
        gaps = sorted(parts) != list(range(len(parts))) or any(len(part) != CHUNK for part in ordered[:-1])
        if gaps or sum(map(len, ordered)) != size:
            raise ValueError(
                f"Transfer {name!r} arrived incomplete ({sum(map(len, ordered))} of {size} bytes, given up after {EXPIRY} s?): send it again."
            )
        return ordered

    def _bytes(self) -> int:
        return sum(map(len, self._parts.values()))

    def _drop(self) -> None:
        self._name, self._parts = None, {}
