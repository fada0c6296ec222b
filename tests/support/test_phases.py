"""Durations of a step's phases."""

import pytest

from qerl_trl.support import phases


def test_nested_evaluation_and_failed_phases(monkeypatch):
    """An inner phase counts once, evaluation not at all, a failed phase as long as it ran."""
    now = [0.0]
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now[0])
    timer = phases.PhaseTimer("rollout", "update")
    with timer.phase("update"):
        now[0] += 1
        with timer.phase("rollout"):
            now[0] += 10
        now[0] += 2
    assert timer.take() == {"rollout": 10.0, "update": 3.0}
    with timer.phase("rollout", counts=False):
        now[0] += 5
    with pytest.raises(KeyError), timer.phase("rollout"):
        now[0] += 1
        raise KeyError
    assert timer.take() == {"rollout": 1.0, "update": 0.0}
