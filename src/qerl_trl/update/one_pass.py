"""Two passes over the model per update, forward and backward: the update's own forward gives the old log-probabilities.

With pi the trained policy, mu the sampling policy and pi_old the trained one at sampling time, TRL's loss needs pi /
pi_old and, to correct for the engine (or for noise, `rollout/mismatch.py`), pi_old / mu. If all completions of a
rollout are used within one optimizer step, pi_old is pi: without vLLM TRL then takes `per_token_logps.detach()`, with
vLLM it computes pi_old in a separate forward, for pi_old / mu alone (RLOO: always). [`OnePass`] drops that forward;
its dropout mask differs from the update's anyway. While TRL scores a rollout it gets NaN, counted as a token without
a log-probability; in the loss, once the update's forward has log pi, the ratio replaces it.

Shapes: B sequences, T tokens of a completion, P processes.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

#: TRL's metrics of a rollout's ratios -> reduction over processes
_LOGGED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sampling/sampling_logp_difference/mean": torch.mean,
    "sampling/sampling_logp_difference/max": torch.max,
    "sampling/importance_sampling_ratio/min": torch.min,
    "sampling/importance_sampling_ratio/mean": torch.mean,
    "sampling/importance_sampling_ratio/max": torch.max,
}
_RATIO, _OLD, _SAMPLED = "importance_sampling_ratio", "old_per_token_logps", "sampling_per_token_logps"
#: fields of a micro-batch kept until its rollout is measured
_MEASURED = ("completion_mask", "tool_mask", _OLD, _SAMPLED, _RATIO)


class Correction(NamedTuple):
    """TRL's `vllm_importance_sampling_*`: the mode, and the bounds of the ratio (`None`: none)."""

    mode: str
    low: float | None
    high: float | None


def importance_ratio(
    trained: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor, correction: Correction
) -> torch.Tensor:
    """Compute pi_old / mu as in TRL's loss, (B, T), or per sequence (B, 1), clipped or zeroed beyond the bounds.

    Args:
        trained, sampled: log-probabilities (B, T) of the sampled tokens under pi_old and mu; NaN: no difference.
        mask: (B, T), 1 at sampled tokens.

    Source: TRL 1.16, `GRPOTrainer._generate_and_score_completions`; compared in `tests/update/test_one_pass.py`.
    """
    level, _, how = correction.mode.partition("_")
    difference = torch.nan_to_num((trained - sampled) * mask, nan=0.0)
    ratio = (difference.sum(-1, keepdim=True) if level == "sequence" else difference).exp()
    low = -math.inf if correction.low is None else correction.low
    high = math.inf if correction.high is None else correction.high
    return ratio.clamp(low, high) if how == "truncate" else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


class OnePass:
    """Provides a trainer's old log-probabilities: from TRL, or if equal from the update. Not in evaluation."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._skip = False
        #: whether TRL generates and scores a rollout now
        self.scoring = False
        #: the micro-batch in the loss, until it has its log-probabilities
        self._batch: dict[str, Any] | None = None
        self._seen: list[dict[str, torch.Tensor]] = []

    @property
    def holds(self) -> bool:
        """Whether the update's log-probabilities are the old ones: its rollout is used within one optimizer step (TRL's
        condition for not computing them without vLLM). RLOO with a KL penalty needs them earlier, for the reward."""
        trainer = self._trainer
        rollout = trainer.args.steps_per_generation * trainer.num_iterations
        penalty = not self._corrects and trainer.beta != 0.0
        return trainer.args.gradient_accumulation_steps % rollout == 0 and not penalty

    @property
    def _corrects(self) -> bool:
        return hasattr(self._trainer, "vllm_importance_sampling_correction")  # GRPO does, RLOO does not

    def generated(self) -> None:
        """Call at the end of `_generate`: the next requested log-probabilities are the old ones, if any."""
        trainer = self._trainer
        wanted = not self._corrects or (trainer.use_vllm and trainer.vllm_importance_sampling_correction)
        self._skip = trainer.model.training and wanted and self.holds

    def logps(
        self, compute: Callable[..., tuple], model: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple:
        """Stand in for TRL's `_get_per_token_logps_and_entropies`, the original `compute`."""
        if self._skip and self.scoring:
            self._skip = False
            tokens = kwargs["logits_to_keep"] if "logits_to_keep" in kwargs else args[1]
            return torch.full((len(input_ids), tokens), math.nan, device=input_ids.device), None, None
        found = compute(model, input_ids, *args, **kwargs)
        if self._batch is not None:
            batch, self._batch = self._batch, None
            self._correct(batch, found[0].detach())
        return found

    def scored(self, rollout: dict[str, Any]) -> None:
        """Call with TRL's scored rollout, before its split into micro-batches: measure the mismatch, or leave it for
        later."""
        trainer = self._trainer
        old = rollout.get(_OLD)
        self._seen = []
        if not (trainer.model.training and self.holds and _RATIO in rollout and old is not None):
            trainer._mismatch.rollout(trainer, trainer.aqn, rollout)
            return
        del rollout[_OLD]
        rollout[_RATIO].fill_(math.nan)  # unless replaced, the loss is NaN and the run ends
        metrics = trainer._metrics["train"]
        for name in _LOGGED:  # computed from NaN
            metrics[name].pop()
            if not metrics[name]:
                del metrics[name]

    @contextmanager
    def own(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Context manager around TRL's `_compute_loss`: yields a micro-batch's inputs, with any importance ratios.

        Raises:
            `RuntimeError`: rollout and trainer log-probabilities differ too much (`rollout/mismatch.py`); raised at the
                last micro-batch, before the optimizer step.
        """
        trainer, used = self._trainer, self._trainer.use_vllm
        unknown = "old_logps" in inputs or (_RATIO in inputs and _OLD not in inputs)
        if filled := trainer.model.training and self.holds and unknown:
            self._batch = inputs = dict(inputs)
        trainer.use_vllm = used or _RATIO in inputs  # TRL then corrects
        try:
            yield inputs
        finally:
            self._batch, trainer.use_vllm = None, used
        if filled and len(self._seen) == trainer.args.steps_per_generation:
            self._measure()

    def _correct(self, batch: dict[str, Any], trained: torch.Tensor) -> None:
        """Fill in a micro-batch's fields that depend on the old log-probabilities (B, T)."""
        trainer, mask = self._trainer, batch["completion_mask"]
        if not self._corrects:
            batch["old_logps"] = (trained * mask).sum(1)
            return
        mask = mask * batch.get("tool_mask", 1)
        low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
        correction = Correction(trainer.vllm_importance_sampling_mode, low, high)
        batch[_RATIO] = importance_ratio(trained, batch[_SAMPLED], mask, correction)
        if len(self._seen) < trainer.args.steps_per_generation:  # not a later iteration over the same rollout
            known = batch | {_OLD: trained}
            self._seen.append({name: known[name] for name in _MEASURED if name in known})

    def _measure(self) -> None:
        """Log TRL's metrics of a rollout's ratios, and check the mismatch, as in scoring."""
        trainer = self._trainer
        rollout = {name: torch.cat([batch[name] for batch in self._seen]) for name in self._seen[0]}
        self._seen = [{}] * (len(self._seen) + 1)  # measured
        for (name, join), value in zip(_LOGGED.items(), self._logged(rollout).unbind(1), strict=True):
            trainer._metrics["train"][name].append(join(value).item())
        with trainer.rescue.around(made=True):
            trainer._mismatch.rollout(trainer, trainer.aqn, rollout)

    def _logged(self, rollout: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return (P, 5): the values of `_LOGGED` on each process, 0 without sampled tokens."""
        ratio, mask = rollout[_RATIO], rollout["completion_mask"].bool()
        if "tool_mask" in rollout:
            mask = mask & rollout["tool_mask"].bool()
        difference = (rollout[_OLD] - rollout[_SAMPLED]).abs()
        difference = difference[mask & ~difference.isnan()]
        ratio = ratio[mask] if ratio.shape == mask.shape else ratio.flatten()
        nothing = ratio.new_zeros(1)
        difference, ratio = (values if values.numel() else nothing for values in (difference, ratio))
        stats = torch.stack([difference.mean(), difference.max(), ratio.min(), ratio.mean(), ratio.max()])
        return self._trainer.accelerator.gather(stats[None])
