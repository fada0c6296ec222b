"""Mismatch of the sampling and the trained policy per generated token, and its limits.

With p the trained policy, q the sampling policy, and r = p / q of a sampled token:

- the mean of r - 1 - log r estimates KL(q || p): zero for equal policies, raised by noise, rounding or a stale adapter;
- the mean of r is 1 for any p, noisy or rounded, if the tokens were drawn from q. Its logarithm, the *gap*, reveals
  wrong log-probabilities (shifted, other temperature or tokens); a constant error of 0.3 nats is a KL of only 0.04.
  If sampling leaves tokens out (`top_p` and others), the mean is p's mass on the rest, within [`gap_bounds`], as is r
  for equal policies: only r > 1 shows a difference, and nothing does if the sampler reweighs tokens ([`sampler`]);
- the mean of -log q is the entropy of the sampling policy.

Shapes: B sequences, T tokens of a completion.
"""

import math
from typing import Any, Literal, NamedTuple, cast

import torch
from transformers.utils import logging
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad

from ..config import QeRLConfig
from ..noise.callback import AQNCallback
from ..support.trl import OnlineTrainer
from ..update.one_pass import TOP_IDS, TOP_LOGPS

logger = logging.get_logger(__name__)
Sampler = Literal["all", "top_p", "some", "reweighed"]
#: sequences per rollout for an estimate, if log-probabilities are computed only for it
_SAMPLE = 8
#: allowed share of tokens without a finite log-probability in a rollout
_MISSING = 0.01
#: `generation_kwargs` with no effect on probabilities, and those that only leave tokens out
_NEUTRAL = {
    "max_tokens", "max_new_tokens", "stop", "stop_token_ids", "eos_token_id", "ignore_eos",
    "include_stop_str_in_output", "seed", "n", "temperature", "do_sample", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "repetition_detection",
}  # fmt: skip
_LEAVE_OUT = {"top_k", "top_p", "min_p", "min_tokens", "allowed_token_ids", "bad_words", "structured_outputs"}


class Mismatch(NamedTuple):
    """Statistics of one rollout's log-probabilities, logged as `rollout/...`; `None` if unknown.

    `mismatch_kl`: KL(rollout || trainer), nats per token; `kl_above`: its part on tokens with r > 1. `logp_gap`: see
    the module; `logp_gap_error`: its standard error. `entropy`: of the sampling policy, nats per token. `nan_logps`:
    tokens without a finite log-probability. `truncated_fraction`: share of importance ratios cut off by TRL.
    """

    mismatch_kl: float | None
    logp_gap: float | None
    logp_gap_error: float | None
    entropy: float
    nan_logps: int
    truncated_fraction: float | None = None
    kl_above: float = 0.0


@torch.no_grad()
def measure(trainer: OnlineTrainer, aqn: AQNCallback | None, rollout: dict[str, Any]) -> Mismatch | None:
    """Compare the log-probabilities of a rollout (TRL's dictionary of a generated batch), over all processes.

    Uses the whole rollout if it has those of both policies. RLOO keeps none per token: under noise in the rollout only,
    the first few text-only sequences are scored, clean and noisy. Returns `None` if the policies are the same.
    """
    mask = rollout["completion_mask"].bool()
    if "tool_mask" in rollout:
        mask &= rollout["tool_mask"].bool()
    sampled, trained = rollout.get("sampling_per_token_logps"), rollout.get("old_per_token_logps")
    if sampled is None and trainer.args.use_vllm:
        sampled = logps_of_engine(trainer, mask)
    if sampled is None or trained is None:
        if aqn is not None and aqn.scope == "rollout" and aqn.sigma > 0 and "pixel_values" not in rollout:
            count = min(_SAMPLE, len(mask))
            mask, trained = mask[:count], _logps(trainer, rollout, count)
            if sampled is None:
                with aqn.noisy():
                    sampled = _logps(trainer, rollout, count)
            sampled = sampled[:count]
        elif sampled is None or not trainer.args.use_vllm:  # TRL uses a rollout function's only with vLLM
            return None
    found = of_logps(trainer, trained, sampled, mask)
    ratio = rollout.get("importance_sampling_ratio")
    if ratio is not None:
        args = cast(QeRLConfig, trainer.args)  # RLOO has no such correction and returns no ratio
        low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
        cut = truncated_fraction(ratio, mask, args.vllm_importance_sampling_mode, low, high)
        found = found._replace(truncated_fraction=trainer.accelerator.gather(cut).mean().item())
    return found


def of_logps(
    trainer: OnlineTrainer, trained: torch.Tensor | None, sampled: torch.Tensor, mask: torch.Tensor
) -> Mismatch:
    """Compute the [`Mismatch`] from log-probabilities (B, T) of sampled tokens, over all processes."""
    known = mask & sampled.isfinite()
    logps = sampled.double().where(known, 0.0)
    d = (trained.double() - logps).where(known, 0.0) if trained is not None else torch.zeros_like(logps)
    ratio = d.exp().where(known, 0.0)
    counts = [known.sum().double(), mask.sum().double()]
    apart = d.expm1() - d
    sums = torch.stack(
        [*counts, logps.sum(), apart.sum(), apart.where(d > 0, 0.0).sum(), ratio.sum(), ratio.square().sum()]
    )
    total, asked, log_q, divergence, above, first, second = trainer.accelerator.gather(sums).view(-1, 7).sum(0).tolist()
    missing = asked - total
    if missing > _MISSING * asked:
        raise RuntimeError(
            f"The engine returned no finite log-probability for {int(missing)} of the {int(asked)} tokens of a "
            "rollout, so the update could not be corrected. Restart the engine and resume from the last checkpoint."
        )
    total = max(total, 1.0)
    entropy, mean = -log_q / total, first / total
    if trained is None or missing == asked:
        return Mismatch(None, None, None, entropy, int(missing))
    if not first:  # every ratio is 0: the policies share no token, or the trainer overflowed
        return Mismatch(divergence / total, -math.inf, 0.0, entropy, int(missing))
    error = math.sqrt(max(second / total - mean * mean, 0.0) / total) / mean
    return Mismatch(divergence / total, math.log(mean), error, entropy, int(missing), kl_above=above / total)


def truncated_fraction(
    ratio: torch.Tensor, mask: torch.Tensor, mode: str, low: float | None, high: float | None
) -> torch.Tensor:
    """Share of importance ratios, (B, T) or one per sequence (B, 1), clipped or dropped by TRL's correction `mode`."""
    cut = ratio == 0  # set by the mask modes
    if mode.endswith("truncate"):
        cut = (ratio <= (-math.inf if low is None else low)) | (ratio >= (math.inf if high is None else high))
    cut = cut[mask] if cut.shape == mask.shape else cut.flatten()
    return cut.float().mean() if cut.numel() else cut.new_zeros((), dtype=torch.float32)


def _logps(trainer: OnlineTrainer, rollout: dict[str, Any], count: int) -> torch.Tensor:
    """Compute log-probabilities (count, T) of the first completions under the current model."""
    ids = torch.cat([rollout["prompt_ids"][:count], rollout["completion_ids"][:count]], dim=1)
    mask = torch.cat([rollout["prompt_mask"][:count], rollout["completion_mask"][:count]], dim=1)
    length = rollout["completion_ids"].size(1)
    # batches as in TRL (no logits: its head works in chunks of tokens and vocabulary)
    batch_size = trainer.args.per_device_train_batch_size
    return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length, batch_size=batch_size)[0]


class MismatchWatch:
    """Measures and logs the mismatch of each rollout, warns above a threshold, and stops the run if it persists.

    A KL above the threshold warns; above `STOP` times the threshold in `PERSISTENT` rollouts in a row it ends the run.
    A KL without noise and the gap should be zero, so their limits are `STOP` times lower. A gap counts only beyond
    `CERTAIN` standard errors.

    Args:
        threshold: KL in nats per token; `None` turns off warnings and stops.
        coarse: activations are rounded to FP8 (`compute="w4a8"`). Engine and trainer then round small differences to
            other values, ten times the KL of W4A16, so without noise the threshold is the limit too.
    """

    STOP = 10
    PERSISTENT = 3
    CERTAIN = 5

    def __init__(self, threshold: float | None, coarse: bool = False) -> None:
        self.threshold, self.coarse = threshold, coarse
        self._beyond = {"kl": 0, "gap": 0}

    def rollout(self, trainer: OnlineTrainer, aqn: AQNCallback | None, rollout: dict[str, Any]) -> None:
        """Measure one rollout, TRL's dictionary of a generated batch; in evaluation only one by vLLM, without noise."""
        training = trainer.model.training
        found = measure(trainer, aqn if training else None, rollout)
        if found is None:
            return
        for name, value in found._asdict().items():
            if value is not None and name not in ("logp_gap_error", "kl_above"):
                trainer._metrics["train" if training else "eval"][f"rollout/{name}"].append(value)
        noisy = training and aqn is not None and aqn.scope == "rollout" and aqn.sigma > 0
        bounds = gap_bounds(trainer.args, same=not noisy)
        # scores of transformers' rollouts ignore left-out tokens
        sampled_from = sampler(trainer.args) if trainer.args.use_vllm else "all"
        expected = aqn.expected_kl if noisy and aqn is not None else 0.0
        self.judge(found, trainer.state.global_step, noisy, bounds, sampled_from, expected)

    def judge(
        self,
        found: Mismatch,
        step: int,
        noisy: bool,
        bounds: tuple[float, float] = (0, 0),
        sampled_from: Sampler = "all",
        expected: float = 0.0,
    ) -> None:
        """Warn, or raise `RuntimeError` for a persistent mismatch.

        Args:
            noisy: only the rollout had noise, so a KL is expected.
            bounds: lowest and highest gap of right log-probabilities.
            expected: KL of the noise, measured before training; added to the threshold.
        """
        if self.threshold is None or found.mismatch_kl is None:
            return
        assert found.logp_gap is not None and found.logp_gap_error is not None
        low, high = bounds
        beyond = max(found.logp_gap - high, low - found.logp_gap)
        limit = self.threshold / self.STOP
        right = "1" if low == high == 0 else f"from exp({low:.4g}) to exp({high:.4g}), as tokens are left out"
        self._limit(
            "gap",
            0.0 if beyond <= self.CERTAIN * found.logp_gap_error else beyond,
            limit,
            "The rollout's log-probabilities are not those its tokens were drawn with: the mean importance ratio is "
            f"exp({found.logp_gap:.4g}) at step {step}, and should be {right} (rollout/logp_gap, limit {limit:.4g}).",
            "Check temperature, --logprobs-mode processed_logprobs and what rollout_func returns.",
        )
        if sampled_from == "reweighed":
            return
        limit = self.threshold + expected if noisy or self.coarse else self.threshold / self.STOP
        kl, about = (found.mismatch_kl, "about") if sampled_from == "all" else (found.kl_above, "at least")
        why = "under noise" if noisy else "although both should be the same policy"
        self._limit(
            "kl",
            kl,
            limit,
            f"Rollout and trainer disagree: KL of {about} {kl:.4g} nats per token at step {step}, {why} "
            f"(limit {limit:.4g}).",
            "Lower aqn_sigma_start, or use aqn_scope='policy'."
            if noisy
            else "The engine may hold a stale adapter or noise: restart it, or pass use_vllm=False.",
        )

    def _limit(self, kind: str, value: float, limit: float, what: str, remedy: str) -> None:
        beyond = not value <= self.STOP * limit  # NaN is beyond
        self._beyond[kind] = self._beyond[kind] + 1 if beyond else 0
        if self._beyond[kind] >= self.PERSISTENT:
            raise RuntimeError(
                f"{what} It was over {self.STOP} times this limit in {self.PERSISTENT} rollouts in a row. {remedy} "
                "Then resume, or raise rollout_mismatch_threshold (None: no limit)."
            )
        if not value <= limit:
            logger.warning("%s %s", what, remedy)


def sampler(args: Any) -> Sampler:
    """Classify what a rollout samples from: "all" tokens, those left by "top_p", "some" left by other filters, or
    "reweighed" ones (penalties, biases, unknown options)."""
    given = {name for name, value in (args.generation_kwargs or {}).items() if value is not None} - _NEUTRAL
    if given - _LEAVE_OUT or args.repetition_penalty not in (None, 1.0):
        return "reweighed"
    if given or args.top_k not in (None, 0, -1) or args.min_p or args.vllm_structured_outputs_regex:
        return "some"
    return "all" if args.top_p in (None, 1.0) else "top_p"


def gap_bounds(args: Any, same: bool) -> tuple[float, float]:
    """Return the lowest and highest gap of right log-probabilities.

    With K the allowed tokens and vLLM's q, zero outside of K and renormalised inside, the mean of p / q is p(K): at
    most 1 for any filter (`top_p` and others, penalties, grammars). `top_p` alone keeps at least its mass of the
    sampling policy, and so of an equal p; `top_k` keeps any. Transformers' rollouts are scored unfiltered: p(K) / q(K).

    Args:
        same: the sampling policy is the trained one, before tokens are left out.
    """
    sampled_from = sampler(args)
    if sampled_from == "all":
        return 0.0, 0.0
    least = math.log(args.top_p) if sampled_from == "top_p" else -math.inf
    return least if same else -math.inf, 0.0 if args.use_vllm else -least


#: indices in the tuple of TRL's `GRPOTrainer._generate`, and its length; RLOO's has three items and no correction
_LOGPS, _IMAGES, _COUNT = 4, 6, 8


def with_logps(trainer: OnlineTrainer, aqn: AQNCallback | None, generated: tuple) -> tuple:
    """Add the noisy policy's log-probabilities to the tuple of TRL's `_generate` in training, if missing.

    Unchanged without noise, for vLLM and for RLOO. A rollout function's own log-probabilities are kept.
    """
    if len(generated) != _COUNT or aqn is None or aqn.engine or aqn.scope != "rollout" or not aqn.sigma > 0:
        return generated  # sampled from the trained policy
    if generated[_LOGPS] is not None:
        trainer.use_vllm = True  # makes TRL correct; the trainer restores it once the batch is scored
        return generated
    if generated[_IMAGES] is not None:
        logger.warning_once(
            "The prompts hold pictures, so transformers' rollouts under noise are not importance-corrected. Use "
            "aqn_scope='policy' or use_vllm=True."
        )
        return generated
    with aqn.noisy():
        logps = _behaviour_logps(trainer, generated[0], generated[1])
    trainer.use_vllm = True
    return (*generated[:_LOGPS], logps, *generated[_LOGPS + 1 :])


def warn_of_uncorrected_noise(trainer: OnlineTrainer, aqn: AQNCallback | None) -> None:
    """Warn before training if this trainer does not correct for noise in the rollout only."""
    if aqn is None or aqn.scope != "rollout" or vars(trainer.args).get("score_centering_top_k"):
        return
    if not hasattr(trainer, "vllm_importance_sampling_correction"):
        why = "has no importance sampling correction"
    elif not trainer.vllm_importance_sampling_correction:
        why = "has vllm_importance_sampling_correction=False"
    else:
        return
    logger.warning(
        "%s %s, so with aqn_scope='rollout' it trains on noisy samples as if the clean policy had drawn them. Use "
        "aqn_scope='policy' or aqn=False.",
        type(trainer).__name__,
        why,
    )


def logps_of_engine(trainer: OnlineTrainer, like: torch.Tensor) -> torch.Tensor | None:
    """Return vLLM's log-probabilities of this rollout, shaped as `like` (B, T): TRL's RLOO drops them."""
    rows = trainer.vllm_generation.sampled_logps
    if rows is None or len(rows) != len(like):
        return None
    logps = torch.zeros(like.shape, dtype=torch.float32)
    for line, row in zip(logps, rows, strict=True):
        line[: len(row)] = torch.tensor([float("nan") if value is None else value for value in row])
    return logps.to(like.device)


def top_of_engine(trainer: OnlineTrainer, count: int, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return vLLM's most likely tokens and their log-probabilities, (B, T, count) each, for completions (B, T)."""
    ids, logps = (torch.zeros((*like.shape, count), dtype=kind) for kind in (torch.long, torch.float32))
    for line, (tokens, values) in enumerate(trainer.vllm_generation.sampled_top):
        ids[line, : len(tokens)], logps[line, : len(tokens)] = torch.as_tensor(tokens), torch.as_tensor(values)
    return {TOP_IDS: ids.to(like.device), TOP_LOGPS: logps.to(like.device)}


@torch.no_grad()
def _behaviour_logps(
    trainer: OnlineTrainer, prompts: list[list[int]], completions: list[list[int]]
) -> list[list[float]]:
    """Compute log-probabilities of each completion's tokens under the current model, batched as by TRL."""
    device, padding = trainer.accelerator.device, trainer._tokenizer.pad_token_id
    multiple = trainer.pad_to_multiple_of

    def batch(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
        ids = [torch.tensor(row, dtype=torch.long) for row in rows]
        ones = [torch.ones_like(row) for row in ids]
        padded = pad(ids, padding_value=padding, padding_side=side, pad_to_multiple_of=multiple)
        return padded.to(device), pad(ones, padding_value=0, padding_side=side, pad_to_multiple_of=multiple).to(device)

    before, after = batch(prompts, "left"), batch(completions, "right")
    ids, mask = (torch.cat(pair, dim=1) for pair in zip(before, after, strict=True))
    # batches as in TRL (no logits: its head works in chunks of tokens and vocabulary)
    size = trainer.args.per_device_train_batch_size
    options: Any = trainer.args.gradient_checkpointing_kwargs
    with disable_gradient_checkpointing(trainer.model, options):
        scored = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, after[0].size(1), batch_size=size)
    logps = scored[0].float().cpu()
    return [row[: len(tokens)].tolist() for row, tokens in zip(logps, completions, strict=True)]
