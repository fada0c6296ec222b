"""Warnings about rollouts without a learning signal: their rewards, advantages and entropy."""

import logging
import math
from collections import Counter
from typing import Any, ClassVar

import torch
from transformers import TrainerState

from ..support.trl import OnlineTrainer

logger = logging.getLogger(__name__)


class SignalMonitor:
    """Warn when a run learns nothing; end it only if no completion is graded any more.

    Args:
        zero_advantage_patience: consecutive rollouts without any reward before the run ends.
    """

    #: kind -> limit, and rollouts in a row (entropy: steps) beyond it before a warning. Clipped: share of completions;
    #: entropy: share of its first value; flat: total number of groups with equal rewards in these rollouts
    LIMITS: ClassVar[dict[str, tuple[float, int]]] = {"clipped": (0.5, 3), "entropy": (0.25, 5), "flat": (12, 3)}

    def __init__(self, zero_advantage_patience: int):
        self.zero_advantage_patience = zero_advantage_patience
        self._streaks: Counter[str] = Counter()
        self._reported: set[str] = set()
        self._rollouts_without_reward = 0

    def _watch(self, kind: str, beyond: bool, text: str, count: int = 1, needed: int | None = None) -> None:
        """Warn once per run after `needed` times `beyond` in a row. `text` may contain `{streak}`."""
        self._streaks[kind] = self._streaks[kind] + count if beyond else 0
        if self._streaks[kind] >= (needed or self.LIMITS[kind][1]) and kind not in self._reported:
            self._reported.add(kind)
            logger.warning(text.format(streak=self._streaks[kind]))

    def scored(self, trainer: OnlineTrainer, rewards: torch.Tensor) -> None:
        """Report a scored rollout to [`clipped`], [`advantages`] and [`rewards`]."""
        metrics, step = trainer._metrics["train"], trainer.state.global_step
        ratio, length = (metrics[f"completions/{name}"][-1] for name in ("clipped_ratio", "mean_length"))
        self.clipped(ratio, length, step, trainer.args)
        groups = len(rewards) // trainer.num_generations
        self.advantages(_differ(trainer, rewards), metrics["reward"][-1], step, groups)
        self.rewards(trainer, rewards)

    def clipped(self, ratio: float, length: float, step: int, args: Any) -> None:
        """Report the share of completions without an end token, and their mean length: less than
        `max_completion_length` if a stop string or a rollout function ended them."""
        limit, most = self.LIMITS["clipped"][0], args.max_completion_length
        masked = ratio == 1 and args.mask_truncated_completions
        cut = ratio > limit and length >= ratio * most and not (args.generation_kwargs or {}).get("ignore_eos")
        effect = "mask_truncated_completions leaves no loss" if masked else "their answers are missing"
        text = (
            f"{ratio:.0%} of the completions at step {step} have no end within max_completion_length={most} "
            f"(limit {limit:.0%}, {{streak}} in a row): {effect}. Raise it, or ask for shorter answers."
        )
        self._watch("clipped", masked or cut, text, needed=1 if masked else None)

    def advantages(self, used: bool, reward: float, step: int, groups: int) -> None:
        """Report one rollout: if rewards differ within a group, the mean reward, and the number of groups."""
        most, least = int(self.LIMITS["flat"][0]), self.LIMITS["flat"][1]
        text = (
            f"Every completion of a group got the same reward in the last {{streak}} rollouts (mean reward "
            f"{reward:.4g} at step {step}): nothing is learned. Look at completions (log_completions=True) and rewards."
        )
        self._watch("flat", not used, text, needed=min(self.zero_advantage_patience, max(least, -(-most // groups))))

    def rewards(self, trainer: OnlineTrainer, rewards: torch.Tensor) -> None:
        """Report the rewards of a rollout: (completions of all processes, functions), NaN if a function does not apply.

        Raises:
            `RuntimeError`: no completion got any reward in `zero_advantage_patience` rollouts in a row.
        """
        if not bool(torch.isnan(rewards).all()):
            self._rollouts_without_reward = 0
            return
        self._rollouts_without_reward += 1
        text = (
            f"Every reward of the rollout at step {trainer.state.global_step} is None: no function of "
            f"{', '.join(map(repr, trainer.reward_func_names))} applied to any of its {len(rewards)} completions. "
            "Return a number where a function applies (0.0 for a wrong answer)."
        )
        if self._rollouts_without_reward >= self.zero_advantage_patience:
            raise RuntimeError(f"{text} This happened in {self._rollouts_without_reward} rollouts in a row.")
        self._watch("nothing", True, text, needed=1)

    def entropy(self, value: float, state: TrainerState) -> None:
        """Report the policy's entropy, nats per token: the mean of the steps since the last log."""
        logged = [entry for entry in state.log_history if "entropy" in entry]
        if not logged:
            return
        limit, first = self.LIMITS["entropy"][0], logged[0]["entropy"]
        text = (
            f"Entropy is {value:.3g} nats per token at step {state.global_step}, for {{streak}} steps below {limit:g} "
            f"of its start ({first:.3g}): completions become equal. Unless the task is solved, lower learning_rate or "
            "raise temperature."
        )
        self._watch("entropy", value < limit * first, text, state.global_step - int(logged[-1]["step"]))


def _differ(trainer: OnlineTrainer, rewards: torch.Tensor) -> bool:
    """True if any advantage is nonzero and rewards, (completions, functions), differ within a group or RLOO has a KL
    penalty.
    """
    if not any(list(trainer._logs["advantages"])[-len(rewards) :]):
        return False
    if trainer._name == "QeRL-RLOO" and trainer.args.beta:
        return True
    weighted = (rewards * trainer.reward_weights.to(rewards.device)).nansum(dim=1)
    groups = weighted.masked_fill(torch.isnan(rewards).all(1), math.nan).view(-1, trainer.num_generations)
    low, high = groups.nan_to_num(nan=math.inf).amin(dim=1), groups.nan_to_num(nan=-math.inf).amax(dim=1)
    return bool((high > low).any())
