"""Checks of rewards, losses and gradients before any weight changes.

As in TRL, a reward of `None` or NaN means: the function does not apply to this completion.
"""

import asyncio
import functools
import logging
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers.trainer_utils import has_length
from trl.trainer.utils import is_async_callable

from ..rollout.engine import largest_magnitude, not_finite
from ..support.names import local_tensor
from ..support.phases import deadline

logger = logging.getLogger(__name__)

#: larger rewards overflow a batch's statistics (sums of squares in float32)
LARGEST_REWARD = 1e16
#: the square of a larger gradient overflows in Adam's float32 state: the weight would never move again
LARGEST_GRADIENT = math.sqrt(torch.finfo(torch.float32).max)
#: seconds by which a block's time limit exceeds the limit of the functions in it
_GRACE = 5.0


class RewardTimeout(RuntimeError):
    """A reward function exceeded `reward_timeout`."""


def check_steps(args: Any, dataset: Any) -> None:
    """Raise `ValueError` if training would take no step: TRL would save an untrained adapter."""
    prompts, why = args.generation_batch_size // args.num_generations, None
    if has_length(dataset) and len(dataset) < prompts:
        why = (
            f"{len(dataset)} training problems are fewer than the {prompts} prompts of a rollout "
            f"(generation_batch_size={args.generation_batch_size} / num_generations={args.num_generations}). Add "
            "problems, or lower per_device_train_batch_size"
        )
    elif args.max_steps == 0 or (args.max_steps < 0 and args.num_train_epochs <= 0):
        why = f"max_steps={args.max_steps}, num_train_epochs={args.num_train_epochs:g}. Pass one above 0"
    if why:
        raise ValueError(f"No step would be taken: {why}.")


def checked_rewards(functions: list[Any], names: list[str], limit: float | None) -> list[Any]:
    """Wrap every reward function with [`checked_reward`]; reward models pass unchanged."""
    named = zip(functions, names, strict=True)
    return [each if isinstance(each, nn.Module) else checked_reward(each, name, limit) for each, name in named]


def reward_limit(functions: list[Any], names: list[str], limit: float | None) -> AbstractContextManager[None]:
    """Limit the time of all rewards of a batch: an async function that never yields would outlive its own limit."""
    waits = [name for each, name in zip(functions, names, strict=True) if is_async_callable(each)]
    seconds = limit * len(functions) + _GRACE if limit and waits else None
    return deadline(seconds, lambda: _late(" or ".join(map(repr, waits)), limit))


def checked_reward(function: Callable, name: str, timeout: float | None = None) -> Callable:
    """Wrap a reward function (plain or async) to check its result before TRL builds a tensor.

    Args:
        timeout: seconds per call, `None` for no limit.

    Raises (when called):
        `TypeError`: a reward is not a number or `None`.
        `ValueError`: wrong number of rewards, or an infinite or too large one.
        `RuntimeError`: the function raised, or ([`RewardTimeout`]) did not return in time.
    """
    warned: list[int] = []

    def verified(rewards: Any, passed: dict[str, Any]) -> list[float | None]:
        per_completion = next((passed[key] for key in ("completions", "prompts") if key in passed), None)
        checked = check_rewards(rewards, name, per_completion)
        nan = next((i for i, reward in enumerate(checked) if reward is not None and math.isnan(reward)), None)
        if nan is not None and not warned:
            warned.append(nan)
            logger.warning(
                f"Reward function {name!r} returned NaN for completion {nan}, which counts as None. Return "
                "None where the function does not apply, and look for a 0/0 where it does."
            )
        return checked

    if is_async_callable(function):

        @functools.wraps(function)
        async def checked(*args, **kwargs):
            async def named():
                try:
                    return _computed(await function(*args, **kwargs))
                except (Exception, SystemExit) as error:  # SystemExit: from a completion's code run by a grader
                    raise _raised(name, error) from error

            try:
                rewards = await asyncio.wait_for(named(), timeout or None)
            except TimeoutError:
                raise _late(repr(name), timeout) from None
            return verified(rewards, kwargs)

    else:

        @functools.wraps(function)
        def checked(*args, **kwargs):
            try:
                with deadline(timeout, lambda: _late(repr(name), timeout)):
                    rewards = _computed(function(*args, **kwargs))
            except RewardTimeout:
                raise
            except (Exception, SystemExit) as error:
                raise _raised(name, error) from error
            return verified(rewards, kwargs)

    return checked


def _computed(rewards: Any) -> Any:
    """Consume a generator or a `map` here, inside the time limit of the call."""
    # a time limit cannot interrupt `list`
    return [reward for reward in rewards] if isinstance(rewards, Iterator) else rewards  # noqa: C416


def _late(names: str, timeout: float | None) -> RewardTimeout:
    return RewardTimeout(
        f"Reward function {names} did not return within reward_timeout={timeout:g} s. Give its calls a time limit, or "
        "raise reward_timeout (None for no limit), and resume from the last checkpoint."
    )


def _raised(name: str, error: Exception | SystemExit) -> RuntimeError:
    text = (
        f"Reward function {name!r} raised {type(error).__name__}{f': {error}' if str(error) else ''}. Let it return "
        "None for a completion that it cannot grade, and resume from the last checkpoint (resume_from_checkpoint=True)."
    )
    if isinstance(error, SystemExit):
        text += " Code that it ran called exit(): run code of a model in a process of its own."
    if "main thread" in str(error):
        text += " Graders that set alarms work in the main thread only: turn their time limits off."
    return RuntimeError(text)


def _refuse_if_large(reward: float, what: str) -> None:
    if abs(reward) > LARGEST_REWARD:
        raise ValueError(
            f"{what}. Infinite rewards, and those beyond {LARGEST_REWARD:g} in float32, make every advantage of a "
            "group NaN. Clip the reward, scale the reward to about 1, or return None where it is undefined."
        )


def check_rewards(rewards: Any, name: str, completions: Sequence | None) -> list[float | None]:
    """Validate a function's rewards: one float or `None` per completion, otherwise an error.

    Args:
        completions: the graded completions; `None` if the function got no argument with one entry per completion.
    """
    unordered = isinstance(rewards, Mapping | Set | str | bytes) or hasattr(rewards, "columns")  # a data frame
    try:
        listed = None if unordered else list(rewards)
    except TypeError:
        listed = None
    if listed is None:
        raise TypeError(
            f"Reward function {name!r} returned {repr(rewards)[:60]} ({type(rewards).__name__}). It must return a list "
            "with one number (or None) per completion, in their order."
        )
    if completions is None:
        completions = [""] * len(listed)
    if len(listed) != len(completions):
        raise ValueError(
            f"Reward function {name!r} returned {len(listed)} rewards for {len(completions)} completions. It must "
            "return exactly one per completion, None where it does not apply."
        )
    said = f"Reward function {name!r} returned"
    return [_number(reward, said, f"completion {i}: {_excerpt(completions[i])}") for i, reward in enumerate(listed)]


def _number(reward: Any, said: str, completion: str) -> float | None:
    if not isinstance(reward, numbers.Number) and math.prod(getattr(reward, "shape", (0,))) == 1:
        reward = reward.item()  # a tensor or array with one number
    if reward is None:
        return None
    if not isinstance(reward, numbers.Real):
        raise TypeError(
            f"{said} {reward!r} ({type(reward).__name__}) for {completion}. A reward is a number, or None where the "
            "function does not apply."
        )
    try:
        value = float(reward)
    except OverflowError:  # a huge int or fraction
        value = math.inf
    _refuse_if_large(value, f"{said} {value if math.isinf(value) else reward} for {completion}")
    return value


def check_reward_tensor(rewards: torch.Tensor, names: list[str], weights: torch.Tensor | None = None) -> None:
    """Check all rewards, those of reward models included, times their weights.

    Args:
        rewards: (completions, functions), float32, NaN if a function does not apply.
        weights: (functions).
    """
    weights = torch.ones(len(names)) if weights is None else weights
    weighted = (rewards * weights.to(rewards.device)).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    largest = weighted.abs().amax(dim=0).tolist()
    for name, weight, value in zip(names, weights.tolist(), largest, strict=True):
        _refuse_if_large(value, f"Reward {name!r} is {value:g} in magnitude, its weight of {weight:g} included")


def check_loss(loss: torch.Tensor, step: int) -> None:
    """Raise `RuntimeError` if the loss of a micro-batch is not finite, before the optimizer uses it."""
    if not torch.isfinite(loss).all():
        raise RuntimeError(
            f"The loss is {loss.detach().float().mean().item()} at step {step}. No weight was changed by it. Usual "
            "causes: a high learning rate (see grad_norm in the log), extreme rewards with scale_rewards='none'; fp16."
        )


def check_gradients(model: nn.Module, step: int, optimizer: Any = None) -> None:
    """Raise `RuntimeError` if no parameter has a gradient, or one (named) or their norm is not finite. One GPU sync.

    Args:
        optimizer: source of the parameters, if given; searching the model takes milliseconds.
    """
    groups = [{"params": model.parameters()}] if optimizer is None else optimizer.param_groups
    grads = [grad for group in groups for p in group["params"] if (grad := p.grad) is not None]
    if not grads:
        raise RuntimeError(
            f"No trained parameter got a gradient at step {step}: the adapter was disabled (disable_adapter_layers in "
            "a callback?) or has requires_grad=False. Enable it and resume from the last checkpoint."
        )
    magnitude = largest_magnitude(grads)  # the norm of n entries is at most sqrt(n) times this
    if magnitude is not None and magnitude * math.sqrt(sum(grad.numel() for grad in grads)) < LARGEST_GRADIENT:
        return
    if bool(torch.nn.utils.get_total_norm(grads) < LARGEST_GRADIENT):
        return
    named = [(float(p.grad.abs().max()), name) for name, p in model.named_parameters() if p.grad is not None]
    wrong = [name for size, name in named if not math.isfinite(size)]
    size, name = max((math.inf if math.isnan(size) else size, name) for size, name in named)
    what = (
        f"is not finite in {len(wrong)} of {len(named)} parameters"
        if wrong
        else f"has a norm that overflows ({size:.3g})"
    )
    raise RuntimeError(
        f"The gradient {what} at step {step}, e.g. in {wrong[0] if wrong else name}: large rewards with "
        "scale_rewards='none' (RLOO: normalize_advantages=False)? The step was not taken. Resume from the last "
        "checkpoint with a lower learning rate."
    )


def check_step_taken(accelerator: Accelerator, engine: Any, step: int) -> None:
    """[`check_gradients`] for DeepSpeed: its backward pass takes the step and keeps no gradients.

    DeepSpeed skips a step with gradients that are not finite (in fp16 to find its loss scale); with
    `check_grad_overflow: false` it checks none, and the norm after the step reveals them.
    """
    if accelerator.mixed_precision == "fp16" or not accelerator.sync_gradients:
        return
    norm = engine.get_global_grad_norm()
    finite = norm is None or 0 <= float(norm) < LARGEST_GRADIENT  # -1: not finite
    if accelerator.optimizer_step_was_skipped or not finite:
        taken = "was not taken" if accelerator.optimizer_step_was_skipped else "may have been taken"
        raise RuntimeError(
            f"The gradient norm is {norm} at step {step}: not finite, or its square overflows float32 in Adam. The "
            f"optimizer step {taken} and is not saved. Resume from the last checkpoint with a lower learning rate."
        )


def check_weights(model: nn.Module, step: int) -> None:
    """Raise `RuntimeError` naming the first trained parameter (or local shard) that is not finite. One GPU sync."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    parts = ((name, local_tensor(parameter)) for name, parameter in trained)
    if wrong := not_finite((name, part) for name, part in parts if part.numel()):
        raise RuntimeError(
            f"{len(wrong)} of {len(trained)} trained parameters are not finite after step {step}, e.g. {wrong[0]}: the "
            "optimizer's step overflowed. Nothing was written. Resume from the last checkpoint with a lower "
            "learning_rate."
        )


def _excerpt(completion) -> str:
    text = str(completion if isinstance(completion, str) else completion[-1].get("content", completion))
    return repr(text if len(text) <= 120 else text[:117] + "...")
