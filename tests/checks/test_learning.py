"""What a run that goes wrong says, once each: from metrics as TRL logs them."""

import json
import logging
import types
from pathlib import Path

import pytest

from qerl_trl.checks.learning import SignalMonitor

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


@pytest.fixture
def monitor(caplog):
    caplog.set_level(logging.WARNING)
    return SignalMonitor(zero_advantage_patience=10)


def arguments(**given):
    plain = {"max_completion_length": 320, "mask_truncated_completions": False, "generation_kwargs": None}
    return types.SimpleNamespace(**plain | given)


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


@pytest.mark.parametrize(("groups", "rollouts"), [(32, 3), (4, 3), (3, 4), (1, 10)])
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


@pytest.mark.parametrize("ratio", [0.84, 1.0])
def test_clipped_completions_warn_once(monitor, caplog, ratio):
    for step in range(5):
        monitor.clipped(ratio, 300.0, step, arguments(max_completion_length=300))
    message = only_message(caplog)
    assert f"{ratio:.0%} of the completions at step 2" in message and "max_completion_length=300 (limit 50%" in message


@pytest.mark.parametrize(
    ("ratio", "length", "given"),
    [
        (0.477, 250.0, {}),
        (1.0, 40.0, {}),  # a stop string or a rollout function ended them
        (1.0, 320.0, {"generation_kwargs": {"ignore_eos": True}}),
    ],
    ids=["healthy", "stop", "fixed"],
)
def test_completions_that_end_otherwise_are_not_clipped(monitor, caplog, ratio, length, given):
    for step in range(5):
        monitor.clipped(ratio, length, step, arguments(**given))
    assert not caplog.records


def test_one_rollout_beyond_a_limit_is_chance(monitor, caplog):
    for step, ratio in enumerate([0.6, 0.7, 0.4, 0.6, 0.7]):
        monitor.clipped(ratio, 320.0, step, arguments())
    assert not caplog.records


def test_a_rollout_that_is_masked_as_a_whole_warns_at_once(monitor, caplog):
    """TRL trains on a loss of 0 then."""
    for step in range(5):
        monitor.clipped(1.0, 40.0, step, arguments(mask_truncated_completions=True))
    assert "at step 0" in only_message(caplog) and "mask_truncated_completions leaves no loss" in caplog.text
