import logging

import pytest

from qerl_trl.signal_monitor import SignalMonitor


@pytest.fixture
def monitor(caplog):
    caplog.set_level(logging.WARNING)
    return SignalMonitor(zero_advantage_patience=3)


def test_zero_advantage_warns_after_patience_only(monitor, caplog):
    for step in range(2):
        monitor.advantages(False, 0.5, step)
    monitor.advantages(True, 0.5, 2)
    for step in range(2):
        monitor.advantages(False, 0.5, step)
    assert not caplog.records
    monitor.advantages(False, 0.25, 7)
    assert "last 3 rollouts (mean reward 0.25 at step 7)" in caplog.text


def test_entropy_collapse_warns_once(monitor, caplog):
    for value in (1.0, 0.5, 0.02, 0.009, 0.008):
        monitor.entropy(value, 4)
    assert len(caplog.records) == 1
    assert "0.009" in caplog.text
