"""Completions on their way from a server, as arrays in one field of vLLM's JSON answer.

vLLM's own form has four texts and numbers per token. For 64 completions of 512 tokens they take a few tenths of a second to be built, written,
read and taken apart, while the GPU waits; the arrays take a few milliseconds. A client asks for them by a header (`HEADER`), and a server
that does not know it, or cannot put an answer so, answers as ever (vllm/completions.py has one end, client.py the other).

| in the field | what |
|---|---|
| `prompt_lengths`, `lengths` | tokens of each prompt and of each completion; all completions of a prompt come before those of the next |
| `prompts`, `tokens` | token ids one after the other, int32, little-endian, base64 |
| `logps` | log-probability of each of `tokens` in nats, float32 (as vLLM computes them, NaN included), the same way |
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from .engine import Completion

#: header of a request whose answer may be packed, with the form's version as its value
HEADER, VERSION = "X-Qerl-Completions", "packed-1"
#: field of an answer that is
FIELD = "qerl_packed"
_IDS, _LOGPS = "<i4", "<f4"


def pack(prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> dict[str, Any]:
    """The field of an answer, ready for JSON."""
    return {
        "prompt_lengths": [len(ids) for ids in prompts],
        "lengths": [len(completion.tokens) for completion in completions],
        "prompts": _written(prompts, _IDS),
        "tokens": _written((completion.tokens for completion in completions), _IDS),
        "logps": _written((completion.logps for completion in completions), _LOGPS),
    }


def unpack(field: Mapping[str, Any]) -> tuple[list[list[int]], list[Completion]]:
    """What was packed: prompts, and completions.

    Raises:
        `ValueError`, `KeyError`, `TypeError`: it is nothing that was packed.
    """
    prompts = _read(field["prompts"], _IDS, field["prompt_lengths"])
    tokens = _read(field["tokens"], _IDS, field["lengths"])
    logps = _read(field["logps"], _LOGPS, field["lengths"])
    if len(tokens) % max(1, len(prompts)):
        raise ValueError(f"{len(tokens)} completions of {len(prompts)} prompts")
    return prompts, [Completion(*pair) for pair in zip(tokens, logps, strict=True)]


def _written(rows: Iterable[Sequence[Any]], dtype: str) -> str:
    return base64.b64encode(b"".join(np.asarray(row, dtype).tobytes() for row in rows)).decode()


def _read(text: str, dtype: str, lengths: Sequence[int]) -> list[list[Any]]:
    values = np.frombuffer(base64.b64decode(text, validate=True), dtype).tolist()
    ends = [0, *accumulate(lengths)]
    if ends[-1] != len(values) or min(lengths, default=0) < 0:
        raise ValueError(f"{len(values)} values for lengths of {ends[-1]} in all")
    return [values[start:end] for start, end in pairwise(ends)]
