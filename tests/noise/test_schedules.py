"""Noise schedules: the paper's numbers, the shapes, and the entropy controller."""

import itertools
import math

import pytest

from qerl_trl.noise.schedules import (
    SCHEDULES,
    ConstantSchedule,
    EntropyTargetSchedule,
    ExponentialSchedule,
    make_schedule,
)

STAGED = ("exponential", "linear", "cosine", "logarithmic")


def stage_values(schedule, total=100):
    return [schedule.sigma(stage * total // schedule.num_stages, total) for stage in range(schedule.num_stages)]


def test_exponential_is_the_released_script():
    # start * (end / start) ** (arange(K - 1) / (K - 2)) after one silent stage
    released = [0.0] + [1e-2 * (1e-4 / 1e-2) ** (i / 8) for i in range(9)]
    assert stage_values(ExponentialSchedule(1e-2, 1e-4, 10)) == pytest.approx(released, rel=1e-12)


@pytest.mark.parametrize("name", STAGED)
def test_stage_0_is_silent_then_start_to_end_never_rising(name):
    values = stage_values(make_schedule(name, 1e-2, 5e-4, 10))
    assert values[0] == 0.0
    assert values[1] == pytest.approx(1e-2)
    assert values[-1] == pytest.approx(5e-4)
    assert all(a > b for a, b in itertools.pairwise(values[1:]))


def test_middle_of_each_shape():
    # 12 stages: 11 noisy ones, stage 6 is exactly half way
    middle = {name: stage_values(make_schedule(name, 1.0, 0.01, 12))[6] for name in STAGED}
    assert middle["exponential"] == pytest.approx(0.1)
    assert middle["linear"] == pytest.approx(0.505)
    assert middle["cosine"] == pytest.approx(0.505)
    assert middle["logarithmic"] == pytest.approx(1 - 0.99 * math.log(6) / math.log(11))


@pytest.mark.parametrize("total", [1, 7, 10, 1000])
@pytest.mark.parametrize("name", STAGED)
def test_any_run_length(name, total):
    schedule = make_schedule(name, 1e-2, 5e-4, 10)
    sigmas = [schedule.sigma(step, total) for step in range(total + 3)]
    assert sigmas[0] == 0.0
    assert all(0 <= sigma <= 1e-2 for sigma in sigmas)
    assert sigmas[total] == sigmas[-1] == pytest.approx(5e-4)


def test_special_cases():
    assert all(stage_values(make_schedule(name, 1e-2, 5e-4, 2)) == [0.0, pytest.approx(1e-2)] for name in STAGED)
    assert {ConstantSchedule(3e-3).sigma(step, 50) for step in range(50)} == {3e-3}, "no silent stage"
    without_noise = (make_schedule(name, 0.0, 0.0) for name in SCHEDULES if name != "entropy_target")
    assert all(set(stage_values(schedule)) == {0.0} for schedule in without_noise)


def entropies(*values):
    return [{"step": i + 1, "loss": 0.0, "rollout/entropy": value} for i, value in enumerate(values)]


def test_entropy_target_pushes_against_the_error():
    schedule = make_schedule("entropy_target", 1e-2, 1e-4, entropy_target=1.0)
    assert schedule.sigma(0, 100) == pytest.approx(1e-3)  # geometric mean
    low, high = entropies(0.9, 0.9), entropies(1.1, 1.1)
    assert schedule.sigma(2, 100, low) == pytest.approx(1e-3 * math.exp(0.06))
    assert schedule.sigma(2, 100, high) == pytest.approx(1e-3 * math.exp(-0.06))
    assert schedule.sigma(50, 100, entropies(*[0.0] * 50)) == pytest.approx(1e-2)
    assert schedule.sigma(50, 100, entropies(*[9.0] * 50)) == pytest.approx(1e-4)


def test_entropy_target_holds_a_policy_at_the_target():
    """Closed loop on a policy whose entropy falls with time and rises with ln(sigma)."""
    schedule = EntropyTargetSchedule(1e-1, 1e-4, target=1.0)
    history = []
    for step in range(200):
        sigma = schedule.sigma(step, 200, history)
        history.append({"step": step + 1, "rollout/entropy": 1.0 - 0.002 * step + 0.1 * math.log(sigma / 3e-3)})
    assert all(abs(entry["rollout/entropy"] - 1.0) < 0.1 for entry in history[50:])
