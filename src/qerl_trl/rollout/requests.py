"""What is asked of an engine: looked at before it is asked."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..processes import gathered
from .arms import asked_together
from .engine import RolloutError

if TYPE_CHECKING:
    from .generation import QeRLVLLMGeneration

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


def check_shares(generation: "QeRLVLLMGeneration", count: int) -> None:
    """Where one engine answers all processes in one call of TRL's `generate`, which deals its completions out by each one's own number of prompts:
    whether that number is the same in all. Only a rollout function can make it another; collective where there is one.

    Raises:
        [`RolloutError`]: it is not; in every process.
    """
    several = generation.accelerator.num_processes > 1 and asked_together(generation.trainer.args)
    if not several or getattr(generation.trainer, "rollout_func", None) is None:
        return
    group = generation.tp_group if generation.mode == "colocate" else None  # of this engine alone
    counts = gathered(count, group)
    if len(set(counts)) > 1:
        raise RolloutError(
            f"The processes asked `generate` for different numbers of prompts, {', '.join(map(str, counts))}: TRL would deal the completions of one "
            "engine out as if all had asked for as many, to other prompts. Ask `complete` instead, which takes any number, or give each process as many."
        )
