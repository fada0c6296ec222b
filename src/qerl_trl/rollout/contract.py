"""What has to be true of every rollout: what the engine computed with, and what a rollout function returned."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..noise.hooks import NoiseDraw
from .engine import Contents, RolloutError

_SYNC = "Only the trainer may write into the engine. If nobody else does, report it"


def check_contents(contents: Contents, put: str | None, draw: NoiseDraw | None) -> None:
    """Whether the engine computes with what the trainer put there last.

    Args:
        put: fingerprint of the weights, as the trainer put them.
        draw: of the noise, `None` if the trainer never set any.

    Raises:
        [`RolloutError`]: stale or damaged weights, or other noise.
    """
    if contents.received != put:
        raise RolloutError(
            f"The engine does not hold the trainer's latest weights (it has update {contents.received}, not {put}), so the rollout came from a "
            f"stale policy. {_SYNC}."
        )
    sigma, wanted = (0.0 if noise is None else noise.sigma for noise in (contents.draw, draw))
    if (sigma or wanted) and contents.draw != draw:
        left = "noise was left on" if not wanted else "its noise is missing" if not sigma else "it has another noise"
        raise RolloutError(
            f"The engine's norms carry {_noise(contents.draw)} and should carry {_noise(draw)}: {left}. {_SYNC}."
        )
    if contents.damaged:
        raise RolloutError(
            f"The engine no longer holds what was put into it, in {len(contents.damaged)} tensors ({', '.join(contents.damaged[:4])}): the copy was "
            f"lost or made by half. {_SYNC}."
        )


def _noise(draw: NoiseDraw | None) -> str:
    if draw is None or draw.sigma == 0:
        return "no noise"
    return f"sigma {draw.sigma:g} of step {draw.step}, generation {draw.generation}"


def checked_rollout_func(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`function`, with a check of what it returns: a completion per prompt, and one log-probability per token.

    TRL broadcasts vLLM's lists of candidates into a third dimension, and the correction becomes one number of all pairs of tokens.
    """

    @functools.wraps(function)
    def checked(prompts: list, trainer: Any) -> dict[str, Any]:
        output = function(prompts, trainer)
        if not isinstance(output, dict) or "completion_ids" not in output:  # TRL names missing keys
            return output
        tokens, logps = output["completion_ids"], output.get("logprobs")
        if len(tokens) != len(prompts) or (logps is not None and len(logps) != len(prompts)):
            came = f"{len(tokens)} completions" + ("" if logps is None else f" and log-probabilities of {len(logps)}")
            raise RolloutError(
                f"rollout_func returned {came} for {len(prompts)} prompts. Return one completion per prompt."
            )
        for number, ids in enumerate(tokens):
            shape = (len(ids),) if logps is None else tuple(np.shape(logps[number]))
            if len(ids) == 0 or shape != (len(ids),):
                raise RolloutError(
                    f"Completion {number} of {len(tokens)} from rollout_func has {len(ids)} tokens and log-probabilities of shape {shape}. Return at "
                    "least one token, and one number per token: of vLLM's lists the first, value[0]."
                )
        return output

    return checked
