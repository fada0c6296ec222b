"""Checks of rewards and gradients before any weight changes; in whole runs: tests/faults/test_r5_rewards.py."""

import asyncio
import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from qerl_trl.checks import rewards as checks

TEXTS = ["one", "two", "three"]


def returning(value):
    def my_reward(completions, **kwargs):
        return value

    return checks.checked_reward(my_reward, "my_reward")


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0.5, True], [1.0, 0.5, 1.0]),
        ([None, math.nan, 2], [None, pytest.approx(math.nan, nan_ok=True), 2.0]),
        (np.array([0.0, 1.0, 2.0]), [0.0, 1.0, 2.0]),
        (torch.tensor([0.0, 1.0, 2.0]), [0.0, 1.0, 2.0]),
        ((0, 1, 2), [0.0, 1.0, 2.0]),
    ],
    ids=["numbers", "none and nan", "numpy", "torch", "tuple"],
)
def test_good_rewards_pass_as_floats(rewards, expected):
    assert returning(rewards)(completions=TEXTS) == expected


def test_conversations_async_and_partial_functions():
    with pytest.raises(ValueError, match="hello"):
        checks.check_rewards([math.inf], "f", [[{"role": "assistant", "content": "hello"}]])

    async def slow(completions, **kwargs):
        return [math.inf] * len(completions)

    checked = checks.checked_reward(slow, "slow")
    assert asyncio.iscoroutinefunction(checked) and checked.__name__ == "slow"
    with pytest.raises(ValueError, match="slow"):
        asyncio.run(checked(completions=TEXTS))

    def weighted(completions, weight, **kwargs):
        return [weight] * len(completions)

    assert checks.checked_reward(functools.partial(weighted, weight=2), "weighted")(completions=TEXTS) == [2.0] * 3


def test_rewards_of_models_and_weights():
    checks.check_reward_tensor(torch.tensor([[1.0, float("nan")]]), ["a", "b"])
    for rewards, weights in (([[1.0, 2.0], [0.0, math.inf]], None), ([[1.0, 2.0]], torch.tensor([1.0, math.inf]))):
        with pytest.raises(ValueError, match="'b' is inf in magnitude"):
            checks.check_reward_tensor(torch.tensor(rewards), ["a", "b"], weights)


def test_gradients():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"No trained parameter got a gradient at step 0.*disable_adapter_layers"):
        checks.check_gradients(model, 0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e18)
    checks.check_gradients(model, 0)
    weight = model[1].weight
    for bad, said in ((math.nan, "is not finite in 1 of 4 parameters"), (3e19, "has a norm that overflows")):
        weight.grad[0, 1] = bad  # clipping would make zeros of 3e19
        for optimizer in (None, torch.optim.SGD(model.parameters())):
            with pytest.raises(RuntimeError, match=rf"{said}.* at step 5, e\.g\. in 1\.weight"):
                checks.check_gradients(model, 5, optimizer)


@pytest.mark.parametrize("norm", [-1, math.nan, 1e20])
def test_a_bad_step_of_deepspeed_ends_the_run(norm):
    state = {"mixed_precision": "bf16", "optimizer_step_was_skipped": False, "sync_gradients": True}
    with pytest.raises(RuntimeError, match=r"at step 4.*may have been taken.*Resume"):
        checks.check_step_taken(SimpleNamespace(**state), SimpleNamespace(get_global_grad_norm=lambda: norm), 4)
    for sound in (None, torch.tensor(2.0)):  # none before its first step
        checks.check_step_taken(SimpleNamespace(**state), SimpleNamespace(get_global_grad_norm=lambda g=sound: g), 4)
