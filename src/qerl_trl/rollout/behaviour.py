"""The behaviour policy, the one that sampled: its log-probabilities where transformers generated them under noise.

vLLM returns the log-probability of each token it samples, and TRL corrects the update by the ratio of the trained to the sampling policy
(`vllm_importance_sampling_*`). Of transformers' generation TRL takes sampling and trained policy to be the same, which noise in the rollout
makes untrue. [`with_logps`] fills the gap, [`corrected`] lets TRL's own correction see it: the same algorithm with both engines.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers.utils import logging
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad

from ..noise.callback import AQNCallback
from ..support.trl import OnlineTrainer

logger = logging.get_logger(__name__)

#: where TRL's `GRPOTrainer._generate` returns what it generated; RLOO returns three things and corrects for no engine
_LOGPS, _IMAGES, _COUNT = 4, 6, 8


def differs(aqn: AQNCallback | None) -> bool:
    """Whether transformers samples from another policy than the one that is trained: noise in the rollout only."""
    return aqn is not None and not aqn.engine and aqn.scope == "rollout" and aqn.sigma > 0


def with_logps(trainer: OnlineTrainer, aqn: AQNCallback | None, generated: tuple) -> tuple:
    """What TRL's `_generate` returned in training, with the log-probabilities of the noisy policy where it has none.

    Unchanged without noise, for vLLM and for RLOO. A rollout function's own log-probabilities are taken as they are.
    """
    if len(generated) != _COUNT or aqn is None or not differs(aqn):
        return generated
    if generated[_LOGPS] is not None:
        trainer.use_vllm = True  # from here to the end of the batch; `corrected` puts it back
        return generated
    if generated[_IMAGES] is not None:
        logger.warning_once(
            "The prompts hold pictures, so transformers' rollouts under noise are not importance-corrected. Use aqn_scope='policy' or use_vllm=True."
        )
        return generated
    with aqn.noisy():
        logps = _logps(trainer, generated[0], generated[1])
    trainer.use_vllm = True
    return (*generated[:_LOGPS], logps, *generated[_LOGPS + 1 :])


def warn_of_uncorrected_noise(trainer: OnlineTrainer, aqn: AQNCallback | None) -> None:
    """Warn before training if nothing corrects this trainer for noise in the rollout only."""
    if aqn is None or aqn.scope != "rollout":
        return
    if not hasattr(trainer, "vllm_importance_sampling_correction"):
        why = "has no importance sampling correction"
    elif not trainer.vllm_importance_sampling_correction:
        why = "has vllm_importance_sampling_correction=False"
    else:
        return
    logger.warning(
        "%s %s, so that with aqn_scope='rollout' it trains on noisy samples as if the clean policy had said it. Use aqn_scope='policy' or aqn=False.",
        type(trainer).__name__,
        why,
    )


@contextmanager
def corrected(trainer: OnlineTrainer, batch: Mapping[str, Any] | None = None) -> Iterator[None]:
    """In the block TRL corrects a `batch` that has importance ratios. It asks `use_vllm` whether to, which is as before afterwards."""
    before = trainer.use_vllm
    trainer.use_vllm = before or (batch is not None and "importance_sampling_ratio" in batch)
    try:
        yield
    finally:
        trainer.use_vllm = before


def logps_of_engine(trainer: OnlineTrainer, like: torch.Tensor) -> torch.Tensor | None:
    """Log-probabilities (B, T) that vLLM returned for the completions `like` of this rollout, where TRL's trainer (RLOO) drops them."""
    rows = getattr(getattr(trainer, "vllm_generation", None), "sampled_logps", None)
    if rows is None or len(rows) != len(like):
        return None
    logps = torch.zeros(like.shape, dtype=torch.float32)
    for line, row in zip(logps, rows, strict=True):
        line[: len(row)] = torch.tensor([float("nan") if value is None else value for value in row])
    return logps.to(like.device)


@torch.no_grad()
def _logps(trainer: OnlineTrainer, prompts: list[list[int]], completions: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of each completion's tokens under the model as it is now, in the batch that TRL makes of them."""
    device, padding = trainer.accelerator.device, trainer._tokenizer.pad_token_id
    multiple = trainer.pad_to_multiple_of

    def batch(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
        ids = [torch.tensor(row, dtype=torch.long) for row in rows]
        ones = [torch.ones_like(row) for row in ids]
        padded = pad(ids, padding_value=padding, padding_side=side, pad_to_multiple_of=multiple)
        return padded.to(device), pad(ones, padding_value=0, padding_side=side, pad_to_multiple_of=multiple).to(device)

    before, after = batch(prompts, "left"), batch(completions, "right")
    ids, mask = (torch.cat(pair, dim=1) for pair in zip(before, after, strict=True))
    # as many at a time as TRL takes (no logits: its head works in chunks of tokens and vocabulary)
    size = trainer.args.per_device_train_batch_size
    options: Any = trainer.args.gradient_checkpointing_kwargs
    with disable_gradient_checkpointing(trainer.model, options):
        logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, after[0].size(1), batch_size=size)[
            0
        ]
    return [row[: len(tokens)].tolist() for row, tokens in zip(logps.float().cpu(), completions, strict=True)]
