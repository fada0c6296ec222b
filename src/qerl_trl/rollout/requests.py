"""What is asked of an engine: looked at before it is asked."""

import logging
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)


def arguments(trainer: Any, mode: str | None, chosen: dict[str, Any]) -> dict[str, Any]:
    """vLLM's sampling arguments: the user's, the trainer's end tokens, and in process no text, which TRL does not read and which
    takes as long as a step of the GPU. With `stop` vLLM looks for words in it."""
    ends = {} if chosen.get("ignore_eos") else {"stop_token_ids": trainer.eos_token_ids}
    text = {} if chosen.get("stop") or mode != "colocate" else {"detokenize": False}
    return text | {name: value for name, value in chosen.items() if name != "eos_token_id"} | ends


def check_lengths(prompts: Sequence[Sequence[int]], max_tokens: int, limit: int | None) -> None:
    """Whether prompts and their completions fit an engine of `limit` tokens; a warning where only the completions may not.

    Raises:
        `ValueError`: a prompt does not.
    """
    longest = max(map(len, prompts), default=0)
    if limit is None or longest + max_tokens <= limit:
        return
    text = (
        f"The longest prompt has {longest} tokens; with {max_tokens} new ones that is beyond the engine's {limit}. Give "
        "the trainer these prompts as eval_dataset, so that the engine is built for them, or raise vllm_max_model_length."
    )
    if longest >= limit:
        raise ValueError(text)
    logger.warning("%s Completions that get there are cut off.", text)
