"""Processes of one run that know of each other's end: a connection to each, beside those of gloo and NCCL.

A process that raises, is killed or loses its machine leaves the others in a collective that nobody will complete: NCCL waits for ten
minutes, gloo for thirty, and neither tells the cause. Here every process holds one TCP connection to process 0, with a thread that listens:

    process 1 raises    -> "failed" and its error, to 0, which passes it on       at once
    process 1 is killed -> its system closes the connection                       at once
    its machine is gone -> no answer to the system's own probes (keep-alive)      within 30 s

Nothing is sent while all is well, so a process that computes for an hour, with Python's lock held, is not taken for dead. Who hears of an
end prints the cause and gives its own work `GRACE` seconds to notice; after that the process ends, with exit code 1. Work is what lies in
`with working():`; whoever catches the error of a training and goes on is left alone. So is a process that comes to its end by itself, unless it
has not begun what the others are in: where only the main process trains, the others are not waited for.
"""

import atexit
import contextlib
import json
import logging
import math
import os
import platform
import secrets
import selectors
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from accelerate.utils import broadcast_object_list, gather_object

from . import redaction

logger = logging.getLogger(__name__)

#: seconds that a process has to come out of its work by itself, once another one has ended
GRACE = 20.0
#: seconds without an answer of the other side's system before its machine counts as gone
_IDLE, _BETWEEN, _PROBES = 10, 5, 4
#: bytes of one message, and characters of an error in it
_LONGEST, _EXCERPT = 16_384, 2_000
#: digits of a process's number in its greeting
_RANK = 8
#: seconds between two looks at what was heard
_AGAIN = 0.05
#: seconds for a connection to be made
_CONNECT = 20.0

#: the work that is never one process's alone
_OF_ALL = "run"

_watch: "Watch | None" = None
_started = False
#: how deep this process is in `working`
_depth = 0


class Ended(NamedTuple):
    """What is known of the first process that did not come to its end.

    said: its error; None: it ended without a word. work: number of the work that it failed in; infinite where it is gone. of: that work's name.
    missing: it came to its end by itself, before that work.
    """

    rank: int
    said: str | None
    work: float = math.inf
    of: str = ""
    missing: bool = False

    def before(self, work: float, of: str) -> bool:
        """Whether it is of another work than this one, or of an earlier one of the name: all that wait for it have left that by now."""
        return self.work != math.inf and (self.of != of or self.work < work)


@contextlib.contextmanager
def working(name: str = _OF_ALL) -> Iterator[None]:
    """Around what all processes do together, also as a decorator. An error that leaves it ends those that are in the same work. May be nested.

    Args:
        name: works are counted by their names, so that one of them may be done by a single process alone.
    """
    global _depth
    _depth += 1
    try:
        if _depth == 1 and _watch is not None:
            _watch.enter(name)
        yield
    except BaseException as error:
        if _depth == 1 and _watch is not None:
            _watch.failed(error)
        raise
    finally:
        _depth -= 1
        if _depth == 0 and _watch is not None:
            _watch.leave()


class Watch:
    """One process's part of it.

    Args:
        rank: of this process.
        hosts: names of the machines of all processes.
        connections: to each other process from process 0; to process 0 from every other one.
    """

    def __init__(self, rank: int, hosts: list[str], connections: dict[int, socket.socket]) -> None:
        self.rank, self.hosts = rank, hosts
        self.ended: Ended | None = None
        self._heard = threading.Event()
        self._connections = connections
        self._done: dict[int, int] = {}  # how many works of all were begun by a process that came to its end
        self._begun: Counter[str] = Counter()  # works that were begun, by their names
        self._work = ""  # the latest of them
        self._inside = False
        self._ending = False
        self._lock, self._sending = threading.RLock(), threading.Lock()
        threading.Thread(target=self._listen, name="qerl-watch", daemon=True).start()

    # --- what this process does

    def enter(self, name: str = _OF_ALL) -> None:
        """It begins a work."""
        with self._lock:
            self._begun[name] += 1
            self._work, self._inside = name, True
            if self.ended is not None and self.ended.of == name and self._is_past(self.ended):
                self.ended = None
                self._heard.clear()
            self._miss()
            self._end_if_due()

    def _miss(self) -> None:
        """Look for a process that came to its end and has not begun this work, which is one of all."""
        work = self._begun[_OF_ALL]
        missing = [rank for rank, begun in self._done.items() if begun < work]
        if missing and self._inside and self._work == _OF_ALL and self.ended is None:
            self.ended = Ended(missing[0], None, work, _OF_ALL, missing=True)
            self._heard.set()

    def _is_past(self, ended: Ended) -> bool:
        return ended.before(self._begun[self._work], self._work)

    def leave(self) -> None:
        """It is out of its work."""
        with self._lock:
            self._inside = False

    def failed(self, error: BaseException) -> None:
        """It leaves its work by an error, and tells the others, unless that is what came of another one's end."""
        with self._lock:
            known, self._inside = self.ended, False
        if known is None:
            self._announce(error)

    def close(self) -> None:
        """At the end of this process: whatever it leaves undone is no one's loss, unless it ends by an error."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None and self.ended is None:
            self._announce(error)
        else:
            self._send({"done": self.rank, "begun": self._begun[_OF_ALL]}, self._connections)

    def _announce(self, error: BaseException) -> None:
        text = redaction.redact(f"{type(error).__name__}: {error}")[:_EXCERPT]
        self._send(
            {"failed": self.rank, "said": text, "work": self._begun[self._work], "of": self._work}, self._connections
        )

    # --- what it hears

    def wait(self, seconds: float) -> Ended | None:
        """Who ended, if that is known within so many seconds. An end that this process's work has nothing to do with is told after that time only."""
        until = time.monotonic() + seconds
        self._heard.wait(seconds)
        while self.ended is not None and self._inside and self._is_past(self.ended) and time.monotonic() < until:
            time.sleep(_AGAIN)
        return self.ended

    def describe(self, ended: Ended) -> str:
        who = f"Process {ended.rank} of {len(self.hosts)} ({self.hosts[ended.rank]})"
        if ended.missing:
            return (
                f"{who} came to its end without an error and has no part in this, in which every process has one. Build the trainer and call "
                "trainer.train() in every process, not only where is_main_process is true, and look for a sys.exit() or a return before it."
            )
        if ended.said is not None:
            return f"{who} failed: {ended.said}"
        return (
            f"{who} ended without a word, so the cause is not known here. See the end of its own output first: gloo and NCCL abort a process where "
            "collectives do not fit each other, and a library may crash. If nothing is there, it was killed (by you, by the scheduler, or by the "
            "system for want of memory: see the kernel's log, dmesg), or its machine is gone."
        )

    def _listen(self) -> None:
        read: dict[int, bytes] = dict.fromkeys(self._connections, b"")
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while read:
                for key, _ in selector.select():
                    rank, received = key.data, b""
                    with contextlib.suppress(OSError):  # reset, or no answer to the probes
                        received = self._connections[rank].recv(_LONGEST)
                    read[rank] += received
                    *lines, read[rank] = read[rank].split(b"\n")
                    for line in lines:
                        self._take(json.loads(line))
                    if not received:
                        selector.unregister(key.fileobj)
                        del read[rank]
                        if rank not in self._done:
                            self._take({"failed": rank, "said": None})

    def _take(self, message: dict[str, Any]) -> None:
        rank = message["done"] if "done" in message else message["failed"]
        if self.rank == 0:
            self._send(message, [other for other in self._connections if other != rank])
        if "done" in message:
            with self._lock:
                self._done[rank] = message["begun"]
                self._miss()
                self._end_if_due()
            return
        with self._lock:
            before, work, of = self.ended, message.get("work", math.inf), message.get("of", "")
            if before is None or before.before(work, of):
                said = message["said"] or (before.said if before is not None and before.rank == rank else None)
                self.ended = Ended(rank, said, work, of)
            self._heard.set()
            self._end_if_due()

    def _end_if_due(self) -> None:
        if self._inside and not self._ending and self.ended is not None and not self._is_past(self.ended):
            self._ending = True
            print(f"{self.describe(self.ended)} Process {self.rank} ends too.", file=sys.stderr, flush=True)
            threading.Thread(target=self._end, args=(self._begun.total(),), name="qerl-end", daemon=True).start()

    def _end(self, works: int) -> None:
        time.sleep(GRACE)
        with self._lock:
            self._ending = False
            if not self._inside or self._begun.total() != works:
                return
        # it hangs in what the other one was needed for
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _send(self, message: dict[str, Any], ranks: Any) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            for rank in ranks:
                with contextlib.suppress(OSError):  # it has ended
                    self._connections[rank].sendall(line)

    def _drop(self) -> None:
        for connection in self._connections.values():
            connection.close()


# --- connecting ---------------------------------------------------------------------------------------------------------------------


def start(rank: int, ranks: int) -> Watch | None:
    """The watch of this process, made at the first call, which every process makes. None where it has one process, or none can be had.

    Args:
        rank: of this process, of `ranks`.
    """
    global _watch, _started
    if ranks == 1 or _started:
        return _watch
    _started = True
    hosts = gather_object([platform.node()])
    one_host = len(set(hosts)) == 1
    listener = socket.create_server(("127.0.0.1" if one_host else "", 0), backlog=ranks) if rank == 0 else None
    host = "127.0.0.1" if one_host else os.environ.get("MASTER_ADDR") or hosts[0]
    token = secrets.token_hex(16)
    place = [(host, listener.getsockname()[1], token) if listener is not None else None]
    broadcast_object_list(place)
    assert place[0] is not None
    host, port, token = place[0]
    connections: dict[int, socket.socket] = {}
    if listener is None:
        try:
            connections[0] = _prepared(socket.create_connection((host, port), _CONNECT))
            connections[0].sendall(_greeting(token, rank))
        except OSError as error:
            logger.warning(
                "Process %d cannot reach process 0 at %s, port %d (%s): where another process ends, this one notices only when a collective "
                "of gloo or NCCL gives up, after minutes. Open the ports between the machines of this run.",
                rank,
                host,
                port,
                error,
            )
    reached = gather_object([rank in (0, *([rank] if connections else []))])
    if listener is not None:
        connections = _accepted(listener, token, sum(reached) - 1)
    _watch = Watch(rank, hosts, connections) if connections else None
    if _watch is not None:
        atexit.register(_watch.close)
        if _depth:
            _watch.enter()
    return _watch


def _accepted(listener: socket.socket, token: str, expected: int) -> dict[int, socket.socket]:
    """The connections of the processes that said they have one; whatever else knocks is not let in."""
    connections: dict[int, socket.socket] = {}
    with listener:
        listener.settimeout(_CONNECT)
        while len(connections) < expected:
            try:
                connection = _prepared(listener.accept()[0], _CONNECT)
                said = connection.recv(len(_greeting(token, 0)), socket.MSG_WAITALL)
            except OSError:
                break
            rank = int(said[-_RANK:]) if said[-_RANK:].isdigit() else 0
            if secrets.compare_digest(said, _greeting(token, rank)):
                connection.settimeout(None)
                connections[rank] = connection
            else:
                connection.close()
    return connections


def _greeting(token: str, rank: int) -> bytes:
    return f"{token}{rank:0{_RANK}}".encode()


def _prepared(connection: socket.socket, timeout: float | None = None) -> socket.socket:
    connection.settimeout(timeout)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", _IDLE), ("TCP_KEEPINTVL", _BETWEEN), ("TCP_KEEPCNT", _PROBES)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection


def current() -> Watch | None:
    """The watch of this process, if it has one."""
    return _watch


def _forget() -> None:
    """In a forked child, which would keep the connections open beyond its parent's death."""
    global _watch, _started, _depth
    if _watch is not None:
        atexit.unregister(_watch.close)
        _watch._drop()
    _watch, _started, _depth = None, False, 0


os.register_at_fork(after_in_child=_forget)
