"""What has to be true of every rollout: what the engine computed with, and what came back."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..noise.hooks import NoiseDraw
from .engine import Contents, RolloutError

_SYNC = "Nobody but the trainer may write into the engine, and rollout functions not into the trainer's model; if nobody does, report it"


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
            f"The engine does not hold the trainer's latest weights: it took {_named(contents.received)} last, the trainer put {_named(put)}. "
            f"The rollout was sampled from a stale policy. {_SYNC}."
        )
    sigma, wanted = (0.0 if noise is None else noise.sigma for noise in (contents.draw, draw))
    if (sigma or wanted) and contents.draw != draw:
        left = "noise was left on" if not wanted else "its noise is missing" if not sigma else "it has another noise"
        raise RolloutError(
            f"The engine's norms carry {_noise(contents.draw)} and should carry {_noise(draw)}: {left}. Log-probabilities of this rollout belong "
            f"to another policy. {_SYNC}."
        )
    if contents.damaged:
        names = ", ".join(contents.damaged[:4]) + (
            f" and {len(contents.damaged) - 4} more" if len(contents.damaged) > 4 else ""
        )
        raise RolloutError(
            f"The engine no longer holds what was put into it, in {len(contents.damaged)} tensors: {names}. A copy was lost or made by half, or "
            f"memory was overwritten or not restored when the engine woke up. {_SYNC}, or set vllm_enable_sleep_mode=False."
        )


def _named(fingerprint: str | None) -> str:
    return "none" if fingerprint is None else f"update {fingerprint[:12]}"


def _noise(draw: NoiseDraw | None) -> str:
    if draw is None or draw.sigma == 0:
        return "no noise"
    return f"sigma {draw.sigma:g} of step {draw.step}, generation {draw.generation}"


def check_noise_acted(contents: Contents, draw: NoiseDraw | None, norms: int) -> None:
    """Whether anything was sampled under `draw`, which may be of the stage without noise: what would end the run once noise is due ends it
    before its first update.

    Raises:
        [`RolloutError`]: nothing was.
    """
    if draw is None or contents.sampled == draw:
        return
    drawn = f"Noise of sigma {draw.sigma:g} lay" if draw.sigma > 0 else "Noise is to come"
    raise RolloutError(
        f"{drawn} on {norms} norms of vLLM's model, and nothing was sampled under the draw of step {draw.step}: the "
        "completions of this rollout come from elsewhere (a rollout_func that asks another model or server?). Sample from "
        "trainer.vllm_generation (its `llm`, `generate` or `complete`), or train without noise: aqn=False."
    )


def check_completions(
    tokens: Sequence[Sequence[int]] | None,
    logps: Sequence[Sequence[Any]] | None,
    count: int,
    vocabulary: int,
    source: str,
) -> None:
    """Whether there is a completion for each of `count` prompts, of tokens of this vocabulary, with log-probabilities.

    Args:
        logps: per token a number, or TRL's list whose first is the sampled token's; `None` where the source gives none. Arrays and tensors (T,) do as
            well, and numpy's and torch's scalars.
        source: who made them, for the message.

    Raises:
        [`RolloutError`]: says of which completion what came back.
    """
    if tokens is None or len(tokens) != count:
        came = "nothing" if tokens is None else f"{len(tokens)} completions"
        raise RolloutError(f"{source} gave {came} for {count} prompts. {_ASK}.")
    if logps is not None and len(logps) != count:
        raise RolloutError(f"{source} gave log-probabilities of {len(logps)} completions for {count} prompts. {_ASK}.")
    for number, ids in enumerate(tokens):
        where = f"Completion {number} of {count} from {source}"
        if len(ids) == 0:
            raise RolloutError(
                f"{where} is empty: no token to train on. The prompt may fill the engine's whole context (raise vllm_max_model_length, or "
                "shorten prompts), or the engine has dropped the request (its log says why)."
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocabulary:
            raise RolloutError(
                f"{where} has token id {low if low < 0 else high}, and the model's vocabulary has {vocabulary}. The engine runs another "
                f"model or tokenizer, or its logits are not finite. {_ASK}."
            )
        if logps is None or _all_numbers(logps[number], len(ids)):
            continue
        shape = getattr(logps[number], "shape", None)
        if shape is not None and len(shape) != 1:
            part = {1: "values[0]", len(ids): "values[:, 0]"}.get(shape[0]) if len(shape) == 2 else None
            raise RolloutError(
                f"{where} has log-probabilities of shape {tuple(shape)} for {len(ids)} tokens. {_ONE_NUMBER}: return a list of {len(ids)} "
                f"numbers, or an array of shape ({len(ids)},){f', {part} of this one' if part else ''}."
            )
        values = [_plain(value) for value in _listed(logps[number])]
        if len(values) != len(ids):
            raise RolloutError(f"{where} has {len(ids)} tokens and {len(values)} log-probabilities. {_ASK}.")
        wrong = [(place, value) for place, value in enumerate(values) if not _is_finite(value)]
        # single tokens that the engine could not score are counted and told (mismatch.py); TRL leaves them uncorrected
        if len(wrong) == len(values) or not all(_is_unscored(value) for _, value in wrong):
            place, value = next(pair for pair in wrong if len(wrong) == len(values) or not _is_unscored(pair[1]))
            if value is not None and not isinstance(value, int | float):
                raise RolloutError(
                    f"{where} has the log-probability {value!r} at token {place}, which is no number. {_ASK}."
                )
            raise RolloutError(
                f"{where} has the log-probability {value!r} at token {place}, and {len(wrong)} of {len(ids)} are not finite: the engine's "
                f"logits are not. Weights or adapter may have overflowed (lower learning_rate, train in bf16, not fp16). {_ASK}."
            )


def checked_rollout_func(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`function`, and what it returns is looked at (`check_completions`) before TRL does."""

    @functools.wraps(function)
    def checked(prompts: list, trainer: Any) -> dict[str, Any]:
        output = function(prompts, trainer)
        if isinstance(output, dict) and "completion_ids" in output:  # TRL names missing keys
            vocabulary = trainer.accelerator.unwrap_model(trainer.model).config.get_text_config().vocab_size
            tokens, logps = output["completion_ids"], output.get("logprobs")
            check_completions(tokens, logps, len(prompts), vocabulary, "rollout_func")
            for number, values in enumerate(() if logps is None else logps):
                if not {list, tuple}.isdisjoint(map(type, values)):
                    raise RolloutError(
                        f"Completion {number} of {len(prompts)} from rollout_func has a list of log-probabilities for each token, as vLLM's engine "
                        f"gives them. {_ONE_NUMBER}: return value[0] of each (what trainer.vllm_generation.complete gives has that form)."
                    )
        return output

    return checked


_ASK = "Look at the engine's log and at rollout_func, if there is one"
_ONE_NUMBER = "TRL takes those of a rollout_func as one number per token, the sampled token's"


def _all_numbers(logps: Sequence[Any], count: int) -> bool:
    """Whether these are `count` finite numbers, or lists of one each; seen at once, and else one by one by who asks."""
    try:
        if set(map(type, logps)) == {list} and set(map(len, logps)) == {1}:
            logps = [*itertools.chain.from_iterable(logps)]  # numpy reads lists of lists one by one
        values = np.asarray(logps)
    except (TypeError, ValueError, RuntimeError):  # lists of several lengths, or beside numbers; tensors on a GPU
        return False
    return values.dtype.kind in "fi" and values.shape == (count,) and bool(np.isfinite(values).all())


def _listed(logps: Any) -> Sequence[Any]:
    """A completion's log-probabilities, an array's or a tensor's as Python's numbers."""
    return logps.tolist() if hasattr(logps, "tolist") else logps


def _plain(value: Any) -> Any:
    """What a token has, of TRL's list the first; numpy's and torch's scalars as Python's number."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return value.item() if getattr(value, "shape", None) == () else value


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_unscored(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
