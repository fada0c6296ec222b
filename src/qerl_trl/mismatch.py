"""How far apart the policy that sampled and the policy that is trained are, per generated token.

Shapes: B sequences, T tokens of a completion.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from .noise.callback import AQNCallback
from .upstream import OnlineTrainer

if TYPE_CHECKING:
    from .config import QeRLConfig

#: sequences of a rollout on which the mismatch is estimated when generation returns no log-probabilities
_SAMPLE = 8


class Mismatch(NamedTuple):
    """`kl`: KL(rollout || trainer) in nats per token. `truncated_fraction`: share of importance ratios that TRL cut off."""

    kl: float
    truncated_fraction: float | None


@torch.no_grad()
def measure(trainer: OnlineTrainer, aqn: AQNCallback | None, rollout: dict[str, Any]) -> Mismatch | None:
    """Compare the log-probabilities of a rollout (TRL's dictionary of a generated batch), over all processes.

    With vLLM both are at hand. transformers generation returns none, so with noise in the rollout only they are computed on the
    first few sequences, clean and noisy (of text: pictures are not fed again). `None`: the two policies are the same.
    """
    mask = rollout["completion_mask"].bool()
    if "tool_mask" in rollout:
        mask &= rollout["tool_mask"].bool()
    sampled, trained = rollout.get("sampling_per_token_logps"), rollout.get("old_per_token_logps")
    if sampled is None or trained is None:
        if aqn is None or aqn.scope != "rollout" or aqn.sigma == 0 or "pixel_values" in rollout:
            return None
        count = min(_SAMPLE, len(mask))
        mask = mask[:count]
        trained = _logps(trainer, rollout, count)
        with aqn.noisy():
            sampled = _logps(trainer, rollout, count)
    kl = _mean_over_processes(trainer, kl_per_token(trained, sampled, mask))
    ratio, cut = rollout.get("importance_sampling_ratio"), None
    if ratio is not None:
        args = cast("QeRLConfig", trainer.args)  # RLOO has no such correction and returns no ratio
        low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
        mode = args.vllm_importance_sampling_mode
        cut = _mean_over_processes(trainer, truncated_fraction(ratio, mask, mode, low, high))
    return Mismatch(kl, cut)


def kl_per_token(trained: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """KL(sampled || trained) from log-probabilities (B, T) of sampled tokens: the mean of exp(d) - 1 - d, d = log(trained / sampled)."""
    d = (trained - sampled).float()[mask]
    d = d[~d.isnan()]  # vLLM could not score the token
    return (torch.expm1(d) - d).mean() if d.numel() else d.new_zeros(())


def truncated_fraction(
    ratio: torch.Tensor, mask: torch.Tensor, mode: str, low: float | None, high: float | None
) -> torch.Tensor:
    """Share of importance ratios, (B, T) or one per sequence (B, 1), that TRL's correction `mode` clipped or dropped."""
    cut = ratio == 0  # how the mask modes mark it
    if mode.endswith("truncate"):
        cut = (ratio <= (-math.inf if low is None else low)) | (ratio >= (math.inf if high is None else high))
    cut = cut[mask] if cut.shape == mask.shape else cut.flatten()
    return cut.float().mean() if cut.numel() else cut.new_zeros((), dtype=torch.float32)


def _mean_over_processes(trainer: OnlineTrainer, value: torch.Tensor) -> float:
    return trainer.accelerator.gather(value).mean().item()


def _logps(trainer: OnlineTrainer, rollout: dict[str, Any], count: int) -> torch.Tensor:
    """Log-probabilities (count, T) of the first completions under the model as it is now."""
    ids = torch.cat([rollout["prompt_ids"][:count], rollout["completion_ids"][:count]], dim=1)
    mask = torch.cat([rollout["prompt_mask"][:count], rollout["completion_mask"][:count]], dim=1)
    length = rollout["completion_ids"].size(1)
    # as many at a time as TRL takes: logits of long completions over a large vocabulary are gigabytes per sequence
    batch_size = trainer.args.per_device_train_batch_size
    return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length, batch_size=batch_size)[0]
