"""Warnings of a run without a learning signal, from metrics as TRL logs them."""

import json
import logging
import types
from pathlib import Path

import pytest

from qerl_trl.checks.learning import SignalMonitor

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def monitor(caplog):
    caplog.set_level(logging.WARNING)
    return SignalMonitor(zero_advantage_patience=10)


def entropies(monitor, values, each=1):
    """As TRL logs them, every `each` steps."""
    state = types.SimpleNamespace(log_history=[], global_step=0)
    for value in values:
        state.global_step += each
        monitor.entropy(value, state)
        state.log_history.append({"entropy": value, "step": state.global_step})


def only_message(caplog):
    (message,) = caplog.messages
    assert len(message) <= 200
    return message


@pytest.mark.parametrize(("groups", "rollouts"), [(32, 3), (1, 10)])
def test_groups_of_equal_rewards_warn_once(monitor, caplog, groups, rollouts):
    """One group without variance is common where rewards are 0 and 1; twelve in a row are not."""
    for used, count in ((False, rollouts - 1), (True, 1), (False, rollouts - 1)):
        for step in range(count):
            monitor.advantages(used, 0.5, step, groups)
    assert not caplog.records
    for step in (7, 8, 9):
        monitor.advantages(False, 0.25, step, groups)
    assert f"last {rollouts} rollouts (mean reward 0.25 at step 7)" in only_message(caplog)


@pytest.mark.parametrize(
    ("values", "each"),
    [([1.54, 1.2, 0.8, 0.5, *[0.29] * 9], 1), ([1.0, 0.009, 0.009, 0.009, 0.009, 0.009], 1), ([1.54, 0.29, 0.28], 10)],
)
def test_low_entropy_warns_once(monitor, caplog, values, each):
    entropies(monitor, values, each)
    assert "for 5 steps" in only_message(caplog) or each > 1
    assert f"below 0.25 of its start ({values[0]:.3g})" in caplog.text


def test_recorded_healthy_runs_do_not_warn(monitor, caplog):
    """Of the embedded model, in which single steps are below a tenth."""
    runs = [run["curves"]["entropy"] for run in json.loads((RESULTS / "embedded_arms.json").read_text())["runs"]]
    demos = [run["log_history"] for run in json.loads((RESULTS / "demo.json").read_text())["runs"]]
    runs += [[entry["entropy"] for entry in log if "entropy" in entry] for log in demos]
    for values in runs:
        entropies(SignalMonitor(10), values)
    assert len(runs) == 15 and min(min(values) / values[0] for values in runs) < 0.25 and not caplog.records


MASK = {"mask_truncated_completions": True}


@pytest.mark.parametrize(
    ("ratios", "length", "given", "warned"),
    [
        ([0.84] * 5, 320.0, {}, "84% of the completions at step 2 have no end within max_completion_length=320"),
        ([1.0] * 5, 40.0, MASK, "at step 0"),  # TRL trains on a loss of 0 then
        ([0.6, 0.7, 0.4, 0.6, 0.7], 320.0, {}, None),  # by chance
        ([1.0] * 5, 40.0, {}, None),  # a stop string or a rollout function ended them
    ],
    ids=["clipped", "masked", "chance", "stop"],
)
def test_clipped_completions_warn_once(monitor, caplog, ratios, length, given, warned):
    plain = {"max_completion_length": 320, "mask_truncated_completions": False, "generation_kwargs": None}
    for step, ratio in enumerate(ratios):
        monitor.clipped(ratio, length, step, types.SimpleNamespace(**plain | given))
    if warned is None:
        assert not caplog.records
    else:
        assert warned in only_message(caplog)
        assert ("mask_truncated_completions leaves no loss" in caplog.text) is (given == MASK)
