"""Connections for updates: what arrives, and who gets nowhere."""

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from qerl_trl.rollout import channel
from qerl_trl.rollout.channel import LANES, STRANGERS, Channel, Receiver
from tests.rollout.relay import flipped, relayed

KEY = b"a secret of the tests, long enough"
PART = 2**16
SIZE = 21 * PART + 1000
#: bytes that a lane sends before its first part, and before that part's bytes
GREETED, ANNOUNCED = 64, 64 + 80


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(channel, "PART", PART)


@pytest.fixture
def receiver():
    made = Receiver(SIZE, "127.0.0.1", KEY)
    yield made
    made.close()
    until(lambda: made._memory is None)


def until(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def connected(receiver: Receiver, port: int | None = None, key: bytes = KEY) -> Channel:
    return Channel("127.0.0.1", port or receiver.port, key, receiver.name)


def held(receiver: Receiver) -> bytes:
    return receiver._memory.data.numpy().tobytes()


def closed(sock: socket.socket) -> bool:
    """Whether the other end has closed it."""
    sock.settimeout(5)
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def test_what_is_sent_is_there():
    receiver = Receiver(SIZE, "127.0.0.1", KEY)
    trainer = connected(receiver)
    file = Path("/dev/shm", receiver.name)
    assert file.exists()
    for _ in range(3):
        update = secrets.token_bytes(SIZE)
        trainer.send(memoryview(update))
        assert held(receiver) == update
        assert not file.exists()  # a SIGKILL leaves nothing behind
    with pytest.raises(ConnectionRefusedError):  # nobody is awaited any more
        until(lambda: socket.create_connection(("127.0.0.1", receiver.port)).close())
    trainer.close()
    until(lambda: receiver._memory is None)
    with pytest.raises(OSError):
        trainer.send(memoryview(update))


@pytest.mark.parametrize("address", ["", "127.0.0.1", "::1"])
def test_where_it_listens(address):
    try:
        receiver = Receiver(SIZE, address, KEY)
    except OSError:
        pytest.skip("no IPv6 here")
    trainer = Channel(address or "127.0.0.1", receiver.port, KEY, receiver.name)
    trainer.send(memoryview(update := os.urandom(SIZE)))
    assert held(receiver) == update
    trainer.close()


def test_a_port_of_ones_own(monkeypatch):
    first = Receiver(SIZE, "127.0.0.1", KEY)
    monkeypatch.setenv(channel.PORT, str(first.port))
    with pytest.raises(OSError, match="in use"):
        Receiver(SIZE, "127.0.0.1", KEY)
    trainer = connected(first)
    first.close()
    second = Receiver(SIZE, "127.0.0.1", KEY)  # as when another trainer begins, or this one anew
    assert second.port == first.port
    with pytest.raises(OSError):
        trainer.send(memoryview(bytes(SIZE)))
    again = connected(second)
    again.send(memoryview(update := os.urandom(SIZE)))
    assert held(second) == update
    again.close()
    for value in ("70000", "-1", "http"):
        monkeypatch.setenv(channel.PORT, value)
        with pytest.raises(ValueError, match=f"{channel.PORT}='{value}' is no port"):
            Receiver(SIZE, "127.0.0.1", KEY)


@pytest.mark.parametrize("address", ["10.0.0.1", "evil", "127.0.0.1; x"])
def test_an_address_elsewhere(address):
    with pytest.raises(ValueError):
        Receiver(SIZE, address, KEY)


def test_another_secret_gets_nowhere(receiver):
    before = held(receiver)
    with pytest.raises(OSError):
        connected(receiver, key=b"another secret, as long as it")
    assert held(receiver) == before
    connected(receiver).close()


@pytest.mark.parametrize("proof", [b"", bytes(32), b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(8)])
def test_nothing_is_sent_to_who_does_not_know_the_secret(proof):
    said = bytearray()

    def impostor() -> None:
        sock = listener.accept()[0]
        sock.sendall(bytes(32))
        said.extend(sock.recv(64, socket.MSG_WAITALL))
        sock.sendall(proof)
        sock.shutdown(socket.SHUT_WR)
        while more := sock.recv(4096):
            said.extend(more)
        sock.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(ConnectionError):
            Channel("127.0.0.1", listener.getsockname()[1], KEY, "qerl-x")
        thread.join(10)
    assert len(said) == GREETED and KEY not in said


def test_nobody_answers(monkeypatch):
    monkeypatch.setattr(channel, "GREETING", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError, match=r"within 0\.2 s"):
        Channel("127.0.0.1", listener.getsockname()[1], KEY, "qerl-x")


def test_what_was_recorded_is_worth_nothing(receiver):
    with relayed(receiver.port) as relay:
        lane = Channel._connect("127.0.0.1", relay.port, KEY, receiver.name)
        lane.send(memoryview(bytes([7]) * SIZE), iter(range(0, SIZE, PART)))
        (recorded,) = relay.recorded
        assert len(recorded) > SIZE and set(held(receiver)) == {7}
        receiver._memory.data.fill_(1)
        with socket.create_connection(("127.0.0.1", receiver.port)) as again:
            again.sendall(recorded[:GREETED])
            assert len(again.recv(64, socket.MSG_WAITALL)) == 32  # other random bytes, and no proof
        with contextlib.suppress(OSError):  # closed before it has all of it
            relay.onward[0].sendall(recorded[GREETED:])  # on the same connection
        assert closed(relay.onward[0]) and set(held(receiver)) == {1}
        until(lambda: not receiver._lanes)


@pytest.mark.parametrize("at", [0, 40, GREETED + 20, GREETED + 79, ANNOUNCED, ANNOUNCED + PART - 1], ids=str)
def test_a_bit_that_is_changed_ends_it(receiver, at):
    """Of the greeting, of an announcement, of what was announced. Never "done"."""
    with relayed(receiver.port, flipped(at)) as relay, pytest.raises(OSError):
        connected(receiver, relay.port).send(memoryview(os.urandom(SIZE)))
    until(lambda: not receiver._lanes)


@pytest.mark.parametrize("at", [GREETED + 10, ANNOUNCED + 100, ANNOUNCED + PART, ANNOUNCED + PART + 90], ids=str)
def test_an_update_that_is_cut_short(receiver, at):
    def cut(number: int, passed: int, data: bytes) -> bytes | None:
        return data if passed + len(data) < at else None

    with relayed(receiver.port, cut) as relay:
        trainer = connected(receiver, relay.port)
        with pytest.raises(OSError):
            trainer.send(memoryview(os.urandom(SIZE)))
    until(lambda: not receiver._lanes)


def test_nobody_writes_after_the_end(receiver):
    """What lies there is loaded then: not even for a moment."""
    memory = receiver._memory
    with relayed(receiver.port) as relay:
        connected(receiver, relay.port).send(memoryview(bytes([7]) * SIZE))
        for sock in relay.onward:
            with contextlib.suppress(OSError):  # closed before it has all of it
                sock.sendall(struct.pack("!QQ32s", 0, PART, bytes(32)) + bytes(32) + bytes(PART))
        until(lambda: not receiver._lanes)
        assert set(memory.data.tolist()) == {7}


@pytest.mark.parametrize(("start", "length"), [(SIZE, 1), (SIZE - 1, 2), (2**63, 5), (0, PART + 1)])
def test_only_the_memory_is_written(receiver, start, length):
    lane = Channel._connect("127.0.0.1", receiver.port, KEY, receiver.name)
    before = held(receiver)
    lane._announce(struct.pack("!QQ32s", start, length, bytes(32)))
    with contextlib.suppress(OSError):  # closed already
        lane.sock.sendall(bytes([7]))
    assert closed(lane.sock) and held(receiver) == before


def test_a_part_that_does_not_come(receiver, monkeypatch):
    monkeypatch.setattr(channel, "STALL", 0.2)
    lane = Channel._connect("127.0.0.1", receiver.port, KEY, receiver.name)
    lane._announce(struct.pack("!QQ32s", 0, PART, bytes(32)))
    lane.sock.sendall(b"some")
    assert closed(lane.sock)


def test_strangers_do_not_keep_the_trainer_out(receiver):
    """Some say nothing, some garbage; nothing is kept of it but so many open connections."""
    strangers = []
    threads = threading.active_count()
    for number in range(3 * STRANGERS):
        strangers.append(socket.create_connection(("127.0.0.1", receiver.port)))
        if number % 2:
            strangers[-1].sendall(os.urandom(4096))
        assert len(receiver._waiting) <= STRANGERS
    started = time.monotonic()
    trainer = connected(receiver)
    trainer.send(memoryview(update := os.urandom(SIZE)))
    assert time.monotonic() - started < 3 and held(receiver) == update
    assert all(closed(stranger) for stranger in strangers)  # once all lanes are there
    until(lambda: threading.active_count() <= threads + LANES)
    assert receiver._refused == len(strangers)
    trainer.close()
    for stranger in strangers:
        stranger.close()


def test_a_fifth_connection_is_one_too_many(receiver, monkeypatch):
    trainer = connected(receiver)
    until(lambda: not receiver._listening.is_alive())
    with pytest.raises(OSError):
        Channel._connect("127.0.0.1", receiver.port, KEY, receiver.name)
    trainer.close()


def test_nobody_comes(monkeypatch):
    monkeypatch.setattr(channel, "AWAITED", 0.2)
    receiver = Receiver(SIZE, "127.0.0.1", KEY)
    until(lambda: receiver._memory is None)
    assert not Path("/dev/shm", receiver.name).exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", receiver.port))


def test_a_trainer_that_hangs_up_leaves_nothing(receiver):
    trainer = connected(receiver)
    trainer.close()
    until(lambda: receiver._memory is None)
    assert not Path("/dev/shm", receiver.name).exists()
