"""Parts of an update, and their limits."""

import pytest

from qerl_trl.rollout.transfers import EXPIRY, Transfers
from qerl_trl.rollout.wire import CHUNK

FULL = bytes(CHUNK)


def test_parts_come_back_in_order_whatever_the_order_they_came_in():
    transfers = Transfers()
    assert transfers.receive("t", 1, b"abc") == 3 and transfers.receive("t", 0, FULL) == CHUNK + 3
    assert transfers.take("t", CHUNK + 3) == [FULL, b"abc"]
    with pytest.raises(ValueError, match=r"incomplete \(0 of"):
        transfers.take("t", CHUNK + 3)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(0, FULL), (0, FULL)], "came twice"),
        ([(0, b"")], "none or more than"),
        ([(0, FULL + b"x")], f"more than {CHUNK} bytes"),
        ([(0, "text")], f"more than {CHUNK} bytes"),
        ([(0, FULL), (1, FULL)], "the most that adapter and norms of this engine can have"),
        ([(7, b"x")], "the most that adapter and norms of this engine can have"),
        ([(-1, b"x")], "the most that adapter and norms of this engine can have"),
    ],
)
def test_a_wrong_part_is_refused_and_nothing_kept(parts, message):
    transfers = Transfers(limit=CHUNK + 100)
    for index, part in parts[:-1]:
        transfers.receive("t", index, part)
    with pytest.raises(ValueError, match=message):
        transfers.receive("t", *parts[-1])
    assert transfers._parts == {} and transfers.receive("another", 0, b"abc") == 3


@pytest.mark.parametrize(
    ("parts", "size"), [([(1, b"abc")], 3), ([(0, b"abc"), (1, FULL)], CHUNK + 3), ([(0, FULL)], 5)]
)
def test_an_update_with_a_gap_is_no_update(parts, size):
    transfers = Transfers()
    for index, part in parts:
        transfers.receive("t", index, part)
    with pytest.raises(ValueError, match="arrived incomplete"):
        transfers.take("t", size)
    assert transfers._parts == {}


def test_an_update_is_not_ended_by_another_until_it_is_given_up():
    now = [0.0]
    transfers = Transfers(clock=lambda: now[0])
    transfers.receive("t", 0, FULL)
    with pytest.raises(ValueError, match="let one trainer alone use the server"):
        transfers.receive("other", 0, b"abc")
    assert transfers.receive("t", 1, b"abc") == CHUNK + 3
    now[0] += EXPIRY + 1
    assert transfers.receive("other", 0, b"abc") == 3
    with pytest.raises(ValueError, match="incomplete"):
        transfers.take("t", CHUNK + 3)
