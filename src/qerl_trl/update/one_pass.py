"""Two passes over the model per update, forward and backward: the update's own forward gives the old log-probabilities.

With pi the trained policy, mu the sampling policy and pi_old the trained one at sampling time, TRL's loss needs pi /
pi_old and, to correct for the engine (or for noise, `rollout/mismatch.py`), pi_old / mu. If all completions of a
rollout are used within one optimizer step, pi_old is pi: without vLLM TRL then takes `per_token_logps.detach()`, with
vLLM it computes pi_old in a separate forward, for pi_old / mu alone (RLOO: always). [`OnePass`] drops that forward;
its dropout mask differs from the update's anyway. While TRL scores a rollout it gets NaN, counted as a token without
a log-probability; in the loss, once the update's forward has log pi, the ratio replaces it.

[`ScoreCentering`] adds a term to the loss.
Shapes: B sequences, T tokens of a completion, P processes, K recorded tokens per position.
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
#: fields of a batch, (B, T, K): the sampling policy's most likely tokens at each position, and their log-probabilities
TOP_IDS, TOP_LOGPS = "sampler_top_ids", "sampler_top_logps"
#: least mass outside of these tokens, as in NeMo-RL; least log-probability: exp(80) is finite in float32
_LEAST_TAIL, _LEAST = 1e-6, -80.0


class Correction(NamedTuple):
    """TRL's `vllm_importance_sampling_*`: the mode, and the bounds of the ratio (`None`: none)."""

    mode: str
    low: float | None
    high: float | None

    @classmethod
    def of(cls, trainer: Any) -> "Correction":
        if not trainer.vllm_importance_sampling_correction:
            return cls("token_truncate", 1.0, 1.0)
        low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
        return cls(trainer.vllm_importance_sampling_mode, low, high)


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
        batch[_RATIO] = importance_ratio(trained, batch[_SAMPLED], mask, Correction.of(trainer))
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


def centering_term(trained: torch.Tensor, sampled: torch.Tensor, correction: Correction) -> torch.Tensor:
    """Compute the sum over the recorded tokens H of sg(q w(p / q) - alpha p) log p, (B, T); see [`ScoreCentering`].

    Args:
        trained, sampled: log p, with gradient, and log q (B, T, K) of the tokens H; a position with NaN counts as 0.
        correction: the importance weight w, per token.
    """
    known = trained.detach(), sampled.clamp(min=_LEAST)
    tails = [(1 - logps.exp().sum(-1, keepdim=True)).clamp(min=_LEAST_TAIL).log() for logps in known]
    p, q = (torch.cat(pair, dim=-1) for pair in zip(known, tails, strict=True))  # the tail as one more token
    mass = q.exp() * importance_ratio(p, q, torch.ones_like(q), correction)
    alpha = mass[..., -1:] / p[..., -1:].exp()
    coefficients = mass[..., :-1] - alpha * p[..., :-1].exp()
    return (coefficients.nan_to_num(nan=0.0) * trained).sum(-1)


class ScoreCentering:
    """Adds score centering (arXiv 2609.20807) to TRL's loss, if a batch has the sampling policy's top tokens.

    The gradient at a position, expected over tokens drawn from q, has a part E_q[A] E_q[w grad log p] without
    information on rewards, not 0 if the trained p is not q. The term subtracts E_q[w grad log p] from each token's:

        loss = TRL's loss + A sum_H sg(q w(p / q) - alpha p) log p       per token, with advantage A
        alpha = rho w(1 / rho),  rho = (1 - sum_H q) / (1 - sum_H p)

    H are the K most likely tokens of q. Outside of H, q is taken for rho p; the sum of p grad log p over all tokens is
    0, so that part is a term on H. w is TRL's importance weight, cut off or masked per token; without correction 1. In
    later updates of a rollout p is the current policy; PPO's clipping does not enter the term.

    Source: the paper's Eq. 7 to 14 as in NeMo-RL (`compute_score_centering_term`), torchtitan (`ScoreCenteringLoss`)
    and verl (`score_centering_correction`).
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.count: int = vars(trainer.args).get("score_centering_top_k") or 0  # K; 0: off
        self._ids: torch.Tensor | None = None  # of a loss, until it has log-probabilities
        self._trained = torch.empty(0)

    def logps(self, compute: Callable[..., tuple], *args: Any, **kwargs: Any) -> tuple:
        """Stand in for `Packing.logps`, the original `compute`: in a loss, keep the log-probabilities of its tokens."""
        ids, self._ids = self._ids, None
        if ids is None:
            return compute(*args, **kwargs)
        found, *rest = compute(*args, top_ids=ids, **kwargs)
        self._trained = found[..., 1:]
        return found[..., 0], *rest

    def loss(self, compute: Callable[[dict[str, Any]], torch.Tensor], batch: dict[str, Any]) -> torch.Tensor:
        """Return TRL's loss of a micro-batch (`compute`), with the term added."""
        if TOP_IDS not in batch:
            return compute(batch)
        trainer, sampled, mask = self._trainer, batch[TOP_LOGPS], batch["completion_mask"]
        self._ids = batch[TOP_IDS]
        loss = compute(batch)
        mass = (sampled.exp().nan_to_num().sum(-1) * mask).sum() / mask.sum().clamp(min=1.0)
        trainer._metrics["train"]["score_centering/head_mass"].append(trainer.accelerator.gather(mass).nanmean().item())
        trained, self._trained = self._trained, torch.empty(0)
        term = batch["advantages"].view(len(mask), -1) * centering_term(trained, sampled, Correction.of(trainer))
        return loss + self._mean(term, mask, batch)

    def _mean(self, values: torch.Tensor, mask: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        """Return the mean of values per token as TRL's loss takes it. Source: TRL 1.16, `GRPOTrainer._compute_loss`."""
        trainer = self._trainer
        parts = trainer.accelerator.num_processes * trainer.args.steps_per_generation
        counts = {
            "grpo": mask.sum(-1, keepdim=True).clamp(min=1.0) * len(mask),
            "bnpo": mask.sum().clamp(min=1.0),
            "dr_grpo": len(mask) * trainer.max_completion_length,
            "dapo": batch["num_items_in_batch"].clamp(min=1.0) / parts,
        }
        return (values * mask / counts[trainer.loss_type]).sum() / trainer.current_gradient_accumulation_steps
