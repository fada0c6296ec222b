"""Somebody between trainer and worker, who sees and may change what the trainer sends."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator


class Relay:
    """Listens on `port` and passes on to `target`.

    Args:
        change: (connection, bytes it has passed on so far, the next ones) -> what is passed on instead; None cuts the connection.
    """

    def __init__(self, target: int, change: Callable[[int, int, bytes], bytes | None]) -> None:
        self._target, self._change = target, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.recorded: list[bytearray] = []
        self.onward: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._target))
                self.recorded.append(bytearray())
                self.onward.append(far)
                threading.Thread(target=self._pass, args=(len(self.onward) - 1, near, far), daemon=True).start()
                threading.Thread(target=self._back, args=(far, near), daemon=True).start()

    def _pass(self, number: int, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(2**14):
                changed = self._change(number, len(self.recorded[number]), data)
                self.recorded[number] += data
                if changed is None:
                    break
                far.sendall(changed)
        self._cut(near, far)

    def _back(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(2**14):
                near.sendall(data)
        self._cut(near, far)

    @staticmethod
    def _cut(*socks: socket.socket) -> None:
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut(*self.onward)


@contextlib.contextmanager
def relayed(
    target: int, change: Callable[[int, int, bytes], bytes | None] = lambda number, passed, data: data
) -> Iterator[Relay]:
    relay = Relay(target, change)
    try:
        yield relay
    finally:
        relay.close()


def flipped(at: int) -> Callable[[int, int, bytes], bytes]:
    """`change` of a relay: one bit of each connection's byte number `at`."""

    def change(number: int, passed: int, data: bytes) -> bytes:
        if not passed <= at < passed + len(data):
            return data
        changed = bytearray(data)
        changed[at - passed] ^= 1
        return bytes(changed)

    return change
