"""Parts of an update, and their limits."""

import base64
import hashlib

import pytest

from qerl_trl.rollout.transfers import EXPIRY, Transfers
from qerl_trl.rollout.wire import CHUNK

FULL = base64.b64encode(bytes(CHUNK)).decode()
SMALL = base64.b64encode(b"abc").decode()


def test_parts_come_back_as_one():
    transfers = Transfers()
    assert transfers.receive("t", 0, FULL) == CHUNK and transfers.receive("t", 1, SMALL) == CHUNK + 3
    data = bytes(CHUNK) + b"abc"
    assert transfers.take("t", hashlib.sha256(data).hexdigest()) == data
    with pytest.raises(ValueError, match=r"incomplete \(0 bytes"):
        transfers.take("t", hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(1, SMALL)], "unknown transfer"),
        ([(0, SMALL), (1, SMALL)], "which is the last"),
        ([(0, FULL), (1, SMALL), (1, SMALL)], "which is the last"),
        ([(0, FULL), (2, SMALL)], "when part 1 was due"),
        ([(0, "no base64!")], "not base64"),
        ([(0, "日本")], "not base64"),
        ([(0, base64.b64encode(bytes(CHUNK + 3)).decode())], f"more than {CHUNK} bytes"),
        ([(0, FULL), (1, FULL)], "the most that adapter and norms of this engine can have"),
    ],
)
def test_a_wrong_part_is_refused_and_nothing_kept(parts, message):
    transfers = Transfers(limit=CHUNK + 100)
    for index, part in parts[:-1]:
        transfers.receive("t", index, part)
    with pytest.raises(ValueError, match=message):
        transfers.receive("t", *parts[-1])
    assert transfers._data == b"" and transfers.receive("another", 0, SMALL) == 3


def test_an_update_is_not_ended_by_another_until_it_is_given_up():
    now = [0.0]
    transfers = Transfers(clock=lambda: now[0])
    transfers.receive("t", 0, FULL)
    with pytest.raises(ValueError, match="let one trainer alone use the server"):
        transfers.receive("other", 0, SMALL)
    assert transfers.receive("t", 1, SMALL) == CHUNK + 3
    now[0] += EXPIRY + 1
    with pytest.raises(ValueError, match="given up"):
        transfers.receive("t", 2, SMALL)
    assert transfers.receive("other", 0, SMALL) == 3
