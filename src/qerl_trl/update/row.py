"""A padded batch of prompts and completions as one row of tokens without padding, and the way back.

    padded    . . p p p | a a a a a .       one prompt, two completions
              . . p p p | b b b . . .

    row       p p p a a a a | p b b         positions 0 1 2 3 4 5 6 | 2 3 4
    keys      p p p a a a a | p p p b b     the second segment reads the first one's prompt
    labels    - - a a a a a | b b b         what follows the token; `-`: not asked

Equal prompts are computed once: the first completion (the longest) brings the whole prompt, each further one only the prompt's last token,
whose prediction is its own first token. The keys of the prompt's other tokens are the first one's. The last token of a completion predicts
nothing and is left out, and so is a sequence of which nothing is asked.

At the end stands a segment of zeros that brings the row to a multiple of [`MULTIPLE`] tokens, so that shapes repeat.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from .attention import Segments

#: tokens of a row
MULTIPLE = 64
_IGNORED = -100


@dataclass(frozen=True)
class Sequence:
    """One line of a padded batch: `line` of it, its `prompt` and `completion` as token ids, and the completion's `columns` in the batch."""

    line: int
    prompt: tuple[int, ...]
    completion: list[int]
    columns: list[int]

    @property
    def tokens(self) -> int:
        """Tokens to compute when nobody shares its prompt."""
        return len(self.prompt) + max(len(self.completion) - 1, 0)

    @property
    def further(self) -> int:
        """Tokens to compute when another one has brought its prompt."""
        return max(len(self.completion), 1)


def sequences(input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int) -> list[Sequence]:
    """The lines of a batch, read on the host.

    Args:
        input_ids, attention_mask: (B, W), prompts padded left, completions right. logits_to_keep: the last so many columns are completions.
    """
    ids, mask = input_ids.tolist(), attention_mask.tolist()
    begin = input_ids.shape[1] - logits_to_keep
    found = []
    for line, (tokens, here) in enumerate(zip(ids, mask, strict=True)):
        prompt = tuple(token for token, seen in zip(tokens[:begin], here[:begin], strict=True) if seen)
        columns = [column for column, seen in enumerate(here[begin:]) if seen]
        found.append(Sequence(line, prompt, [tokens[begin + column] for column in columns], columns))
    return found


def rows(
    batch: list[Sequence], limit: int | None = None, count: int | None = None, share: bool = True
) -> list[list[Sequence]]:
    """Sequences for one row each, equal prompts beside each other, the longest of them first.

    Args:
        limit: of the tokens to compute per row (a longer sequence has a row of its own). count: of sequences per row. `None`: all in one.
        share: whether [`build`] will compute equal prompts once.
    """
    groups: dict[tuple[int, ...], list[Sequence]] = {}
    for sequence in batch:
        groups.setdefault(sequence.prompt, []).append(sequence)
    filled: list[list[Sequence]] = [[]]
    tokens = 0
    for group in groups.values():
        for sequence in sorted(group, key=lambda s: (-len(s.completion), s.line)):
            row = filled[-1]
            shared = share and bool(row) and row[-1].prompt == sequence.prompt
            more = sequence.further if shared else sequence.tokens
            if row and ((limit is not None and tokens + more > limit) or (count is not None and len(row) == count)):
                filled.append([])
                tokens, more = 0, sequence.tokens
            filled[-1].append(sequence)
            tokens += more
    return filled


@dataclass(frozen=True)
class Row:
    """What a model is called with, (1, T) each, and where in the (B, L) batch the result of each of the N labels belongs."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    shift_labels: torch.Tensor
    segments: Segments
    scored: torch.Tensor  # (N,) int64, places in the row
    destination: torch.Tensor  # (N,) int64, places in the flattened batch

    def inputs(self) -> dict[str, Any]:
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "shift_labels": self.shift_labels,
            **self.segments._asdict(),
        }


def build(chosen: list[Sequence], width: int, device: torch.device, *, share: bool = True, whole: bool = False) -> Row:
    """Lay out sequences in the order of [`rows`].

    Args:
        width: L, columns of the completions in the padded batch.
        share: compute equal prompts once.
        whole: with the last tokens, and nothing added: for what counts tokens (the load balance of experts). Not with `share`.
    """
    assert not (share and whole)
    tokens: list[int] = []
    positions: list[int] = []
    labels: list[int] = []
    keys: list[int] = []
    starts_q, starts_k = [0], [0]
    destination: list[int] = []
    before, first = None, 0
    for sequence in chosen:
        fed = sequence.completion if whole else sequence.completion[:-1]
        prompt, begin = list(sequence.prompt), len(tokens)
        if share and sequence.prompt == before:
            skipped = len(prompt) - 1
            keys += range(first, first + skipped)
        else:
            skipped, before, first = 0, sequence.prompt, begin
        mine = [*prompt[skipped:], *fed]
        tokens += mine
        positions += range(skipped, skipped + len(mine))
        asked = [_IGNORED] * (len(prompt) - 1 - skipped) + sequence.completion
        labels += asked + [_IGNORED] * (len(mine) - len(asked))
        keys += range(begin, len(tokens))
        destination += [sequence.line * width + column for column in sequence.columns]
        starts_q.append(len(tokens))
        starts_k.append(len(keys))
    if not whole:
        rest = MULTIPLE - len(tokens) % MULTIPLE
        keys += range(len(tokens), len(tokens) + rest)
        tokens += [0] * rest
        positions += range(rest)
        labels += [_IGNORED] * rest
        starts_q.append(len(tokens))
        starts_k.append(len(keys))
    scored = [place for place, label in enumerate(labels) if label != _IGNORED]

    def longest(starts: list[int]) -> int:
        most = max(end - start for start, end in pairwise(starts))
        return -(-most // MULTIPLE) * MULTIPLE

    def put(values: list[int], dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    segments = Segments(
        put(starts_q, torch.int32),
        put(starts_k, torch.int32),
        longest(starts_q),
        longest(starts_k),
        put(keys) if len(keys) > len(tokens) else None,
    )
    return Row(put(tokens)[None], put(positions)[None], put(labels)[None], segments, put(scored), put(destination))
