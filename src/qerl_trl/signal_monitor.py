"""Whether a run still has something to learn from: rewards, advantages and entropy of its rollouts."""

import logging
import math

import torch

from .upstream import OnlineTrainer

logger = logging.getLogger(__name__)


class SignalMonitor:
    """Watches what a run logs for states in which it goes on but learns nothing. Warns; stops a run only when nothing is graded any more.

    Args:
        zero_advantage_patience: rollouts in a row without any non-zero advantage before a warning.
    """

    #: entropy below this share of its first logged value counts as collapsed
    COLLAPSE = 0.01

    def __init__(self, zero_advantage_patience: int):
        self.zero_advantage_patience = zero_advantage_patience
        self._rollouts_without_advantage = 0
        self._rollouts_without_reward = 0
        self._rollouts_without_use = 0
        self._first_entropy: float | None = None
        self._collapse_reported = False

    def scored(self, trainer: OnlineTrainer, rewards: torch.Tensor) -> None:
        """Report the rollout that was just scored: [`advantages`] and [`rewards`]."""
        self.advantages(used(trainer, rewards), trainer._metrics["train"]["reward"][-1], trainer.state.global_step)
        self.rewards(trainer, rewards)

    def advantages(self, used: bool, reward: float, step: int) -> None:
        """Report one rollout: whether it was [`used`], and the mean reward."""
        if used:
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

    def rewards(self, trainer: OnlineTrainer, rewards: torch.Tensor) -> None:
        """Report what the functions gave for the rollout that was just scored.

        Args:
            rewards: (completions of all processes, functions), NaN where a function does not apply.

        Raises:
            `RuntimeError`: no completion got any reward in `zero_advantage_patience` rollouts in a row.
        """
        step, names = trainer.state.global_step, ", ".join(map(repr, trainer.reward_func_names))
        if bool(torch.isnan(rewards).all()):
            self._rollouts_without_reward += 1
            text = (
                f"Every reward of the rollout at step {step} is None: no function of {names} applied to any of its {len(rewards)} "
                "completions, so nothing is learned from it. Return a number where a function applies (0.0 for a wrong answer); None "
                "is for completions that it does not grade."
            )
            if self._rollouts_without_reward >= self.zero_advantage_patience:
                raise RuntimeError(f"{text} It was so in {self._rollouts_without_reward} rollouts in a row.")
            if self._rollouts_without_reward == 1:
                logger.warning(text)
            return
        self._rollouts_without_reward = 0
        cause = None if _any_advantage(trainer, rewards) else _why_no_advantage(trainer, rewards)
        self._rollouts_without_use = 0 if cause is None else self._rollouts_without_use + 1
        if (
            cause is not None
            and self._rollouts_without_use % self.zero_advantage_patience == 1 % self.zero_advantage_patience
        ):
            logger.warning("Every advantage is zero at step %d although rewards differ: %s", step, cause)

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


def used(trainer: OnlineTrainer, rewards: torch.Tensor) -> bool:
    """Whether the rollout just scored has an advantage that is no rounding: of eight rewards of 0.1 the mean is another number in float32, and what is
    left of each is divided by nearly nothing. With RLOO's penalty equal rewards are told apart by it.

    Args:
        rewards: (completions of all processes, functions), NaN where a function does not apply.
    """
    penalized = trainer._name == "QeRL-RLOO" and bool(trainer.args.beta)
    total, generations = _total(trainer, rewards), trainer.num_generations
    told_apart = penalized or _spread(total, generations) or _spread(rewards, generations)
    return told_apart and _any_advantage(trainer, rewards)


def _any_advantage(trainer: OnlineTrainer, rewards: torch.Tensor) -> bool:
    return any(list(trainer._logs["advantages"])[-len(rewards) :])


def _total(trainer: OnlineTrainer, rewards: torch.Tensor) -> torch.Tensor:
    """(completions, 1), NaN where no function applies."""
    weighted = (rewards * trainer.reward_weights.to(rewards.device)).nansum(dim=1, keepdim=True)
    return weighted.masked_fill(torch.isnan(rewards).all(1, keepdim=True), math.nan)


def _spread(values: torch.Tensor, generations: int) -> bool:
    """Whether values of a group differ, in any column of (completions, columns)."""
    groups = values.view(-1, generations, values.shape[1])
    low = groups.nan_to_num(nan=math.inf, posinf=math.inf).amin(dim=1)
    high = groups.nan_to_num(nan=-math.inf, neginf=-math.inf).amax(dim=1)
    return bool((high > low).any())


def _why_no_advantage(trainer: OnlineTrainer, rewards: torch.Tensor) -> str | None:
    """`None` where every group's rewards are equal, which is no fault of the arithmetic."""
    total = _total(trainer, rewards)
    if _spread(total, trainer.num_generations):
        low, high = (f(total[~torch.isnan(total)]).item() for f in (torch.amin, torch.amax))
        return (
            f"they lie between {low:.9g} and {high:.9g}, and their statistics lose the difference in float32. Subtract what they have in "
            "common, and scale the rewards to about 1."
        )
    if _spread(rewards, trainer.num_generations):
        return f"reward_weights={trainer.reward_weights.tolist()} cancel them. Choose weights of which the sum still tells completions apart."
    return None
