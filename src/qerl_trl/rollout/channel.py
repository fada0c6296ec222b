"""The way of an update between two hosts: TCP connections of the trainer to a server's first rank, and what goes over them.

Requests would take an update too (transfers.py), but their bytes pass through the server's event loop, and through its messages to the engine, at
a fraction of a network's speed. Here the trainer writes into memory of the rank that listens; its other ranks have it open too
(shared_memory.py), so an update travels once whatever their number. Nothing here is encrypted.

    worker   -> 32 random bytes                                         K = HMAC(secret, name of the memory, both ends' random bytes)
    trainer  -> 32 random bytes, HMAC(K, "trainer")                     the worker drops who cannot say this
    worker   -> HMAC(K, "worker")                                       and so does the trainer
    trainer  -> offset, length, sha256, HMAC(K, number, these), bytes   for each part, on whichever of the `LANES` connections is free
    trainer  -> 0, 0, ..., HMAC(K, number, these)                       the end of an update, on each
    worker   -> HMAC(K, number, "done")                                 all before it is written

Every connection has another K, and every message a number, so that nothing recorded is worth anything. Only bytes that the trainer announced are
written; once all connections have said "done" nobody writes until the trainer announces more. What the engine then loads has to have
the mark that came in a signed request (layout.py). The worker listens until all connections are made, and then no longer.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from .shared_memory import SharedMemory

logger = logging.getLogger(__name__)

#: environment variable of the server: the port where it listens, for a firewall or a container; else any free one
PORT = "QERL_SERVER_DATA_PORT"
#: connections; what each sends is hashed at both ends, which takes as long as the network
LANES = 4
#: bytes of a part
PART = 4 * 2**20
#: seconds for a connection, for both ends to show that they know the secret, for a part or an answer, and until nobody is awaited any more
CONNECT, GREETING, STALL, AWAITED = 3.0, 5.0, 20.0, 20.0
#: connections that have not yet shown it; beyond these the oldest is dropped
STRANGERS = 16
_RANDOM, _TAG = 32, 32
_HEAD = struct.Struct("!QQ32s")


def _digest(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"\n".join((b"qerl-trl data", *parts)), "sha256")


def _read(sock: socket.socket, buffer: memoryview | bytearray, seconds: float | None) -> None:
    """Fill `buffer` within so many seconds; None: whenever it comes.

    Raises:
        `OSError`: the other end closed, or took longer.
    """
    view, got = memoryview(buffer), 0
    end = None if seconds is None else time.monotonic() + seconds
    while got < len(view):
        left = 0.0 if end is None else max(end - time.monotonic(), 1e-3)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(left), int(left % 1 * 1e6)))
        try:
            # the kernel waits for all of it: Python would, for every packet, wait for a lock that the engine's thread holds
            found = sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            found = -1
        if found == 0:
            raise ConnectionResetError("the other end closed the connection")
        got += max(found, 0)
        if got < len(view) and end is not None and time.monotonic() >= end:
            raise TimeoutError(f"{len(view) - got} of {len(view)} bytes did not come within {seconds:g} s")


def _wake(sock: socket.socket) -> None:
    """Who waits for it, at either end, sees it closed."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _end(sock: socket.socket) -> None:
    _wake(sock)
    sock.close()


class _Lane:
    """One connection, between two ends that have shown each other the secret."""

    def __init__(self, sock: socket.socket, key: bytes) -> None:
        self.sock, self._key, self._number = sock, key, 0
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_NODELAY", 1), ("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(STALL), 0))

    def _tag(self, what: bytes) -> bytes:
        return _digest(self._key, self._number.to_bytes(8, "big"), what)

    def send(self, data: memoryview, starts: Iterator[int]) -> None:
        """Parts of `data` as long as there are `starts`, which other lanes take from too; then the end, and wait for "done".

        Raises:
            `OSError`: the connection broke, or the other end says something else.
        """
        try:
            for start in starts:
                part = data[start : start + PART]
                self._announce(_HEAD.pack(start, len(part), hashlib.sha256(part).digest()))
                self.sock.sendall(part)
            self._announce(_HEAD.pack(0, 0, b""))
        except BlockingIOError as error:
            raise TimeoutError(f"the server took nothing for {STALL:g} s") from error
        _read(self.sock, answer := bytearray(_TAG), STALL)
        if not hmac.compare_digest(answer, self._tag(b"done")):
            raise ConnectionError("what answered was not the server")

    def _announce(self, head: bytes) -> None:
        self._number += 1
        self.sock.sendall(head + self._tag(head))

    def receive(self, memory: memoryview) -> None:
        """Write into `memory` what is announced, up to the end of an update.

        Raises:
            `OSError`: the connection broke; what came was not the trainer's, was changed on its way, or lies beyond the memory.
        """
        announced = bytearray(_HEAD.size + _TAG)
        while True:
            _read(self.sock, announced, None)
            head, self._number = bytes(announced[: _HEAD.size]), self._number + 1
            if not hmac.compare_digest(announced[_HEAD.size :], self._tag(head)):
                raise ConnectionError("what came was not the trainer's")
            start, length, digest = _HEAD.unpack(head)
            if length == 0:
                return
            if length > PART or start + length > len(memory):
                raise ConnectionError(f"{length} bytes at {start} were announced, for a memory of {len(memory)}")
            part = memory[start : start + length]
            _read(self.sock, part, STALL)
            if not hmac.compare_digest(hashlib.sha256(part).digest(), digest):
                raise ConnectionError(f"{length} bytes at {start} were changed on their way")

    def done(self) -> None:
        """Tell the trainer that the update is written."""
        self.sock.sendall(self._tag(b"done"))


class Channel:
    """The trainer's half: `LANES` connections.

    Args:
        host, port: where the worker listens.
        secret: the server's.
        name: of its memory.

    Raises:
        `OSError`: nobody listens there, or not who knows the secret.
    """

    def __init__(self, host: str, port: int, secret: bytes, name: str) -> None:
        self._lanes: list[_Lane] = []
        try:
            for _ in range(LANES):
                self._lanes.append(self._connect(host, port, secret, name))
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _connect(host: str, port: int, secret: bytes, name: str) -> _Lane:
        sock = socket.create_connection((host, port), CONNECT)
        try:
            sock.settimeout(None)
            _read(sock, theirs := bytearray(_RANDOM), GREETING)
            ours = secrets.token_bytes(_RANDOM)
            key = _digest(secret, name.encode(), bytes(theirs), ours)
            sock.sendall(ours + _digest(key, b"trainer"))
            _read(sock, proof := bytearray(_TAG), GREETING)
            if not hmac.compare_digest(proof, _digest(key, b"worker")):
                raise ConnectionError(f"what listens at {host}:{port} does not know the secret")
            return _Lane(sock, key)
        except BaseException:
            _end(sock)
            raise

    def send(self, data: memoryview) -> None:
        """Write an update (bytes, as many as the worker's memory has) there; returns when all of it is written.

        Raises:
            `OSError`: a connection broke; all are closed then.
        """
        starts = iter(range(0, len(data), PART))  # the next one is taken in one step of the interpreter
        errors: list[OSError] = []

        def send(lane: _Lane) -> None:
            try:
                lane.send(data, starts)
            except OSError as error:
                errors.append(error)
                self.close()  # so that the others do not go on

        with ThreadPoolExecutor(max_workers=LANES) as pool:
            list(pool.map(send, self._lanes))
        if errors:
            raise errors[0]

    def close(self) -> None:
        for lane in self._lanes:
            _end(lane.sock)


class Receiver:
    """The worker's half: memory as large as an update, for one trainer that may write there.

    Args:
        size: bytes.
        address: one of the loopback interface to listen on, or "" for all interfaces.
        secret: the server's.

    Raises:
        `OSError`: this host has no such memory, or the port is taken.
        `ValueError`: another address, or the environment's `PORT` is none.
    """

    def __init__(self, size: int, address: str, secret: bytes) -> None:
        if address and not ipaddress.ip_address(address).is_loopback:
            raise ValueError(f"A server listens on the loopback interface or on all of them, not on {address!r}.")
        self._secret = secret
        self._listener = _listen(address, _port())
        try:
            self._memory: SharedMemory | None = SharedMemory.create(size, torch.device("cpu"))
        except OSError:
            self._listener.close()
            raise
        #: what the trainer needs: where to connect, and what the other ranks can open
        self.port, self.name = self._listener.getsockname()[1], self._memory.name
        self._lock = threading.Lock()
        self._waiting: list[socket.socket] = []  # that have not shown that they know the secret
        self._lanes: list[_Lane] = []
        self._refused = self._admitted = 0
        self._listening = threading.Thread(target=self._listen, name="qerl-listener", daemon=True)
        self._listening.start()

    def _listen(self) -> None:
        end = time.monotonic() + AWAITED
        with contextlib.suppress(OSError):  # time is up, all lanes are there, or it was closed
            while (left := end - time.monotonic()) > 0:
                self._listener.settimeout(left)
                sock, _ = self._listener.accept()
                sock.settimeout(None)
                with self._lock:
                    self._waiting.append(sock)
                    oldest = self._waiting.pop(0) if len(self._waiting) > STRANGERS else None
                if oldest is not None:
                    _end(oldest)
                threading.Thread(target=self._serve, args=(sock,), name="qerl-receiver", daemon=True).start()
        self._listener.close()
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for sock in waiting:
            _end(sock)
        if self._refused:
            logger.warning(
                "%d connections to the port for updates were not the trainer's, and were closed.", self._refused
            )
        self._release()

    def _serve(self, sock: socket.socket) -> None:
        """Everything that one connection says."""
        lane = None
        try:
            lane = self._admit(sock)
            memory = self._memory
            assert memory is not None  # there is a lane
            view = memory.data.numpy().data
            while True:
                lane.receive(view)
                memory.forget_name()  # what has to open it has, before the first update ends
                lane.done()
        except OSError as error:
            if lane is not None:
                ended = isinstance(error, ConnectionResetError)
                logger.log(
                    logging.INFO if ended else logging.WARNING, "A connection for updates was closed: %s.", error
                )
        finally:
            _end(sock)
            with self._lock:
                self._refused += lane is None
                self._waiting = [other for other in self._waiting if other is not sock]
                self._lanes = [other for other in self._lanes if other.sock is not sock]
            self._release()

    def _admit(self, sock: socket.socket) -> _Lane:
        """Raises `OSError`: it is not the trainer's, or one too many."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(GREETING), 0))
        ours = secrets.token_bytes(_RANDOM)
        sock.sendall(ours)
        _read(sock, answer := bytearray(_RANDOM + _TAG), GREETING)
        key = _digest(self._secret, self.name.encode(), ours, bytes(answer[:_RANDOM]))
        if not hmac.compare_digest(answer[_RANDOM:], _digest(key, b"trainer")):
            raise ConnectionError("it does not know the secret")
        lane = _Lane(sock, key)
        with self._lock:
            if sock not in self._waiting:
                raise ConnectionError("it came too late")
            self._waiting.remove(sock)
            self._lanes.append(lane)
            self._admitted += 1
            all_there = self._admitted == LANES
        sock.sendall(_digest(key, b"worker"))
        if all_there:
            _wake(self._listener)
        return lane

    def _release(self) -> None:
        """The memory, once nobody listens and nobody is connected."""
        with self._lock:
            if self._memory is not None and not self._lanes and self._listener.fileno() < 0:
                self._memory.close()
                self._memory = None

    def close(self) -> None:
        """End all connections."""
        _wake(self._listener)
        with self._lock:
            for lane in self._lanes:
                _wake(lane.sock)
        self._listening.join(GREETING)  # then the port is free for the next one


def _port() -> int:
    value = os.environ.get(PORT, "").strip() or "0"
    if not value.isdecimal() or int(value) > 65535:
        raise ValueError(
            f"{PORT}={value!r} is no port: set a number up to 65535 in the server's environment, or nothing."
        )
    return int(value)


def _listen(address: str, port: int) -> socket.socket:
    if not address and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 is switched off
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)
