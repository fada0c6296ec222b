"""What is sampled from is the model alone, not what its own generation_config.json adds to it.

`generate` fills whatever a call leaves open from that file (a repetition penalty, tokens that are suppressed, `min_p`). TRL computes
log-probabilities without any of it, and gives vLLM every parameter of its own, so rollouts by transformers would come from another policy
than the one that is trained.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import GenerationConfig
from transformers.utils import logging

from .names import unwrap

logger = logging.get_logger(__name__)

#: what of that file says nothing of the policy: which tokens end a text, and how it is computed
_KEPT = {
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "max_length", "use_cache", "cache_implementation", "cache_config",
    "disable_compile", "compile_config", "prefill_chunk_size", "transformers_version",
}  # fmt: skip
#: of the rest, what TRL's arguments always say
_SAID = {"do_sample", "temperature", "top_p", "top_k", "repetition_penalty"}


@contextmanager
def of_the_model_alone(model: nn.Module) -> Iterator[None]:
    """In the block `model.generate` takes from the model's generation configuration only what is no part of the policy. Says once what that leaves
    out."""
    inner = unwrap(model) if isinstance(model, nn.Module) else model
    holder: Any = inner.get_base_model() if isinstance(inner, PeftModel) else inner
    before: GenerationConfig | None = getattr(holder, "generation_config", None)
    if before is None:
        yield
        return
    plain, left = copy.deepcopy(before), []
    for name, value in before.to_diff_dict().items():
        if name not in _KEPT and not name.startswith(("_", "output_", "return_")) and value is not None:
            setattr(plain, name, None)
            left += [] if name in _SAID else [f"{name}={value}"]
    if left:
        logger.warning_once(
            "The model's generation_config.json sets %s, which would sample from another policy than the one that is trained, and which vLLM's "
            "rollouts do not know: it does not act here. To have it all the same: generation_kwargs.",
            ", ".join(left),
        )
    holder.generation_config = plain
    try:
        yield
    finally:
        holder.generation_config = before
