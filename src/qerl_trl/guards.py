"""Checks with teeth: what would silently stop learning, or damage weights, becomes an error or a warning by name and value.

Errors come before any weight is changed. TRL's own meaning of a reward that is `None` or NaN (this function does not
apply to this completion) is kept.
"""

import functools
import logging
import math
import numbers
from collections.abc import Callable

import torch
from torch import nn
from trl.trainer.utils import is_async_callable

logger = logging.getLogger(__name__)


def checked_reward(function: Callable, name: str) -> Callable:
    """Wrap a reward function (plain or async) so that its return value is checked before TRL builds a tensor of it.

    Raises (when called):
        `TypeError`: a reward is not a number or `None`.
        `ValueError`: wrong number of rewards, or an infinite one.
    """
    if is_async_callable(function):

        @functools.wraps(function)
        async def checked(*args, completions, **kwargs):
            return check_rewards(await function(*args, completions=completions, **kwargs), name, completions)

    else:

        @functools.wraps(function)
        def checked(*args, completions, **kwargs):
            return check_rewards(function(*args, completions=completions, **kwargs), name, completions)

    return checked


def check_rewards(rewards, name: str, completions: list) -> list[float | None]:
    """Validate what a reward function returned and give it back as floats (or `None`), one per completion."""
    try:
        rewards = list(rewards)
    except TypeError as error:
        raise TypeError(
            f"Reward function {name!r} returned {rewards!r}. It must return a list with one number (or None) per completion."
        ) from error
    if len(rewards) != len(completions):
        raise ValueError(
            f"Reward function {name!r} returned {len(rewards)} rewards for {len(completions)} completions. It must return "
            "exactly one per completion, None where it does not apply."
        )
    checked = []
    for index, reward in enumerate(rewards):
        if not isinstance(reward, numbers.Number) and math.prod(getattr(reward, "shape", (0,))) == 1:
            reward = reward.item()  # one number as a tensor or array
        if reward is not None and not isinstance(reward, numbers.Real):
            raise TypeError(
                f"Reward function {name!r} returned {reward!r} ({type(reward).__name__}) for completion {index}: "
                f"{_excerpt(completions[index])}. A reward is a number, or None where the function does not apply."
            )
        if reward is not None and math.isinf(reward):
            raise ValueError(
                f"Reward function {name!r} returned {reward} for completion {index}: {_excerpt(completions[index])}. One "
                "infinite reward makes every advantage of its group NaN. Clip the reward, or return None where it is undefined."
            )
        checked.append(None if reward is None else float(reward))
    return checked


def check_reward_tensor(rewards: torch.Tensor, names: list[str]) -> None:
    """The same for rewards that came from a reward model.

    Args:
        rewards: (completions, functions), float32, NaN where a function does not apply.

    Raises:
        `ValueError`: an infinite entry.
    """
    infinite = torch.isinf(rewards).nonzero()
    if len(infinite):
        row, column = infinite[0].tolist()
        raise ValueError(
            f"Reward {names[column]!r} is {rewards[row, column].item()} for completion {row} of the gathered batch. One infinite "
            "reward makes every advantage of its group NaN; clip the reward model's output."
        )


def check_loss(loss: torch.Tensor, step: int) -> None:
    """Raise `RuntimeError` if the loss of this micro-batch is not finite. Called before the optimizer can use it."""
    if not torch.isfinite(loss).all():
        raise RuntimeError(
            f"The loss is {loss.detach().float().mean().item()} at step {step}. No weight was changed by it. Usual causes: a "
            "learning rate that is too high (see grad_norm in the log), extreme rewards with scale_rewards='none', or fp16."
        )


def check_gradients(model: nn.Module, step: int) -> None:
    """Raise `RuntimeError` naming the first trainable parameter whose gradient is not finite. One fused norm, one sync."""
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    if not named or bool(torch.isfinite(torch.nn.utils.get_total_norm([grad for _, grad in named]))):
        return
    finite = torch.tensor([bool(torch.isfinite(grad).all()) for _, grad in named])
    if bool(finite.all()):  # every entry is finite, only the norm overflowed; clipping copes with that
        return
    index = int((~finite).nonzero()[0])
    name, grad = named[index]
    bad = int((~torch.isfinite(grad)).sum())
    raise RuntimeError(
        f"The gradient of {name} is not finite at step {step}: {bad} of {grad.numel()} entries; {int((~finite).sum())} of "
        f"{len(named)} parameters are affected. The optimizer step was not taken, so no weight was damaged. Resume from the last "
        "checkpoint with a lower learning rate, or look at the rewards and completions of this step."
    )


class SignalMonitor:
    """Watches what a run logs for states in which it goes on but learns nothing. Warns; never stops a run.

    Args:
        zero_advantage_patience: rollouts in a row without any non-zero advantage before a warning.
        mismatch_threshold: KL(rollout || trainer) in nats per token above which to warn, `None` for never.
    """

    #: entropy below this share of its first logged value counts as collapsed
    COLLAPSE = 0.01

    def __init__(self, zero_advantage_patience: int, mismatch_threshold: float | None):
        self.zero_advantage_patience = zero_advantage_patience
        self.mismatch_threshold = mismatch_threshold
        self._rollouts_without_advantage = 0
        self._first_entropy: float | None = None
        self._collapse_reported = False

    def advantages(self, fraction_of_groups_without_spread: float, reward: float, step: int) -> None:
        """Report one rollout: share of groups whose rewards were all equal, and the mean reward."""
        if fraction_of_groups_without_spread < 1.0:
            self._rollouts_without_advantage = 0
            return
        self._rollouts_without_advantage += 1
        if self._rollouts_without_advantage % self.zero_advantage_patience == 0:
            logger.warning(
                "Every completion of a group got the same reward in the last %d rollouts (mean reward %.4g at step %d), so every "
                "advantage and the policy gradient were zero. The task is solved, too hard, or the reward does not tell "
                "completions apart; look at the completions (log_completions=True).",
                self._rollouts_without_advantage,
                reward,
                step,
            )

    def mismatch(self, kl: float, step: int) -> None:
        """Report the estimated KL between the policy that sampled and the policy that is trained."""
        if self.mismatch_threshold is not None and kl > self.mismatch_threshold:
            logger.warning(
                "Rollout and trainer disagree: KL of about %.4g nats per token at step %d (threshold %.4g). With noise, lower "
                "aqn_sigma_start or use aqn_scope='policy'; without, the engine may hold a stale adapter.",
                kl,
                step,
                self.mismatch_threshold,
            )

    def entropy(self, value: float, step: int) -> None:
        """Report the policy's entropy, nats per token."""
        if self._first_entropy is None:
            self._first_entropy = value
        elif value < self.COLLAPSE * self._first_entropy and not self._collapse_reported:
            self._collapse_reported = True
            logger.warning(
                "Entropy collapsed to %.3g nats per token at step %d (it began at %.3g): completions of a group are nearly equal "
                "and exploration is over. Lower the learning rate, raise temperature or noise, or stop here.",
                value,
                step,
                self._first_entropy,
            )


def _excerpt(completion) -> str:
    text = completion if isinstance(completion, str) else completion[-1].get("content", completion)
    text = str(text)
    return repr(text if len(text) <= 120 else text[:117] + "...")
