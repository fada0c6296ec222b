import pytest

from qerl_trl.support import phases


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now[0])
    return now


def test_an_inner_phase_is_not_counted_twice(clock):
    timer = phases.PhaseTimer("rollout", "update")
    with timer.phase("update"):
        clock[0] += 1
        with timer.phase("rollout"):
            clock[0] += 10
        clock[0] += 2
    assert timer.take() == {"rollout": 10.0, "update": 3.0}
    assert timer.take() == {"rollout": 0.0, "update": 0.0}


def test_evaluation_does_not_count_and_a_failed_phase_does(clock):
    timer = phases.PhaseTimer("rollout")
    with timer.phase("rollout", counts=False):
        clock[0] += 5
    with pytest.raises(KeyError), timer.phase("rollout"):
        clock[0] += 1
        raise KeyError
    assert timer.take() == {"rollout": 1.0}
