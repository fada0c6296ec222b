import asyncio
import contextlib
import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from qerl_trl.checks import rewards as guards

TEXTS = ["one", "two", "three"]


def returning(value):
    def my_reward(completions, **kwargs):
        return value

    return guards.checked_reward(my_reward, "my_reward")


@pytest.mark.parametrize(
    "rewards",
    [[1, 0.5, True], [None, float("nan"), 2], np.array([0.0, 1.0, 2.0]), torch.tensor([0.0, 1.0, 2.0]), (0, 1, 2)],
    ids=["numbers", "none-and-nan", "numpy", "torch", "tuple"],
)
def test_good_rewards_pass_as_floats(rewards):
    out = returning(rewards)(completions=TEXTS)
    assert len(out) == 3
    for given, got in zip(list(rewards), out, strict=True):
        if given is None:
            assert got is None
        else:
            assert math.isnan(got) if math.isnan(float(given)) else got == float(given)


@pytest.mark.parametrize(
    ("rewards", "error", "words"),
    [
        ([0.0, float("inf"), 1.0], ValueError, ["my_reward", "inf", "completion 1", "two"]),
        ([0.0, 1.0, -math.inf], ValueError, ["my_reward", "-inf", "completion 2", "three"]),
        ([0.0, 1.0], ValueError, ["my_reward", "2 rewards for 3"]),
        ([0.0, "good", 1.0], TypeError, ["my_reward", "'good'", "completion 1"]),
        ([0.0, [1.0], 1.0], TypeError, ["my_reward", "list", "completion 1"]),
        (torch.ones(3, 2), TypeError, ["my_reward", "Tensor", "completion 0"]),
        (np.ones((3, 2)), TypeError, ["my_reward", "ndarray", "completion 0"]),
        (0.5, TypeError, ["my_reward", "0.5", "list"]),
        (None, TypeError, ["my_reward", "None"]),
    ],
    ids=["inf", "minus-inf", "short", "string", "nested", "two-columns", "two-columns-numpy", "scalar", "none"],
)
def test_bad_rewards_are_named_by_function_index_and_value(rewards, error, words):
    with pytest.raises(error) as info:
        returning(rewards)(completions=TEXTS)
    for word in words:
        assert word in str(info.value)


def test_conversational_completions_are_quoted():
    with pytest.raises(ValueError, match="hello"):
        guards.check_rewards([math.inf], "f", [[{"role": "assistant", "content": "hello"}]])


def test_async_rewards_stay_async():
    from trl.trainer.utils import get_callable_name, is_async_callable

    async def slow(completions, **kwargs):
        return [math.inf] * len(completions)

    checked = guards.checked_reward(slow, "slow")
    assert is_async_callable(checked)
    assert get_callable_name(checked) == "slow"
    with pytest.raises(ValueError, match="slow"):
        asyncio.run(checked(completions=TEXTS))


def test_partial_rewards_work():
    def weighted(completions, weight, **kwargs):
        return [weight] * len(completions)

    assert guards.checked_reward(functools.partial(weighted, weight=2), "weighted")(completions=TEXTS) == [2.0] * 3


def test_reward_model_output():
    guards.check_reward_tensor(torch.tensor([[1.0, float("nan")]]), ["a", "b"])
    with pytest.raises(ValueError, match="'b' is inf in magnitude"):
        guards.check_reward_tensor(torch.tensor([[1.0, 2.0], [0.0, math.inf]]), ["a", "b"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss(value):
    guards.check_loss(torch.tensor(1.0), 3)
    with pytest.raises(RuntimeError, match="step 3"):
        guards.check_loss(torch.tensor(value), 3)


def test_gradients_name_the_first_bad_parameter():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"No trained parameter got a gradient at step 0.*disable_adapter_layers"):
        guards.check_gradients(model, 0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    guards.check_gradients(model, 0)
    model[1].weight.grad[0, 1] = math.nan
    with pytest.raises(RuntimeError, match=r"not finite in 1 of 4 parameters at step 5, e\.g\. in 1\.weight"):
        guards.check_gradients(model, 5)
    with pytest.raises(RuntimeError, match=r"not finite in 1 of 4 parameters at step 5"):
        guards.check_gradients(model, 5, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("value", [1e19, 3e38])
def test_gradients_whose_squares_overflow(value):
    """Clipping would make zeros of them, and Adam's second moment would be infinite."""
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e18)
    guards.check_gradients(model, 0)
    model.weight.grad.fill_(value)
    with pytest.raises(RuntimeError, match=r"has a norm that overflows \(.*\) at step 2, e\.g\. in weight"):
        guards.check_gradients(model, 2)


@pytest.mark.parametrize(
    ("magnitude", "says"), [(0.5, None), (1e19, "norm that overflows"), (float("nan"), "not finite")]
)
def test_what_one_launch_finds_small_is_small_and_all_else_is_looked_at(monkeypatch, magnitude, says):
    model = torch.nn.Linear(4, 4)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e19 if magnitude > 1 else magnitude)
    monkeypatch.setattr(guards, "largest_magnitude", lambda grads: magnitude)
    with pytest.raises(RuntimeError, match=says) if says else contextlib.nullcontext():
        guards.check_gradients(model, 3)


def under_deepspeed(norm, skipped=False, precision="bf16", boundary=True):
    accelerator = SimpleNamespace(
        mixed_precision=precision, optimizer_step_was_skipped=skipped, sync_gradients=boundary
    )
    return accelerator, SimpleNamespace(get_global_grad_norm=lambda: norm)


@pytest.mark.parametrize("norm", [-1, math.nan, math.inf, torch.tensor(math.inf), 1e20])
def test_a_step_that_deepspeed_took_with_a_bad_gradient_ends_the_run(norm):
    with pytest.raises(
        RuntimeError, match=r"at step 4: not finite.*may have been taken.*Resume from the last checkpoint"
    ):
        guards.check_step_taken(*under_deepspeed(norm), 4)


def test_a_step_that_deepspeed_left_out_ends_the_run():
    with pytest.raises(RuntimeError, match=r"at step 4.*was not taken"):
        guards.check_step_taken(*under_deepspeed(1.0, skipped=True), 4)


@pytest.mark.parametrize(
    "sound",
    [
        under_deepspeed(0.3),
        under_deepspeed(torch.tensor(2.0)),
        under_deepspeed(None),  # before its first step
        under_deepspeed(-1, boundary=False),  # of the step before
        under_deepspeed(-1, skipped=True, precision="fp16"),  # it looks for its loss scale
    ],
)
def test_a_sound_step_under_deepspeed_goes_on(sound):
    guards.check_step_taken(*sound, 4)
