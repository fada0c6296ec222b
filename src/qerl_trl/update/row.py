"""A padded batch of prompts and completions as one row of tokens without padding, and the way back.

    padded    . . p p p | a a a a a .       one prompt, two completions
              . . p p p | b b b . . .

    row       p p p a a a a | p b b         positions 0 1 2 3 4 5 6 | 2 3 4
    keys      p p p a a a a | p p p b b     the second segment reads the first one's prompt
    labels    - - a a a a a | b b b         the next token; `-`: not requested

Equal prompts are computed once: the first completion (the longest) has the whole prompt, each further one only the
prompt's last token, to predict its first token. It shares the keys of the prompt's other tokens, and the entropy after
the prompt: equal sequences have equal entropies to the bit (`top_entropy_quantile` relies on that). The last token of
a completion predicts nothing and is left out, as are sequences without labels. A segment of zeros pads
the row, and its keys, to a multiple of [`MULTIPLE`].
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import MULTIPLE
from .attention import Segments

_IGNORED = -100


@dataclass(frozen=True)
class Sequence:
    """One line of a padded batch: token ids of `prompt` and `completion` (int64), the completion's `columns` in it."""

    line: int
    prompt: np.ndarray
    completion: np.ndarray
    columns: np.ndarray
    key: bytes  # equal for equal prompts

    @property
    def tokens(self) -> int:
        """Tokens to compute if it computes its prompt."""
        return len(self.prompt) + max(len(self.completion) - 1, 0)

    @property
    def further(self) -> int:
        """Tokens to compute if it shares a prompt."""
        return max(len(self.completion), 1)


def sequences(input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int) -> list[Sequence]:
    """Read the lines of a batch, on the host.

    Args:
        input_ids, attention_mask: (B, W), prompts padded left, completions right.
        logits_to_keep: number of columns of the completions.
    """
    tokens, seen = input_ids.cpu().numpy(), attention_mask.cpu().numpy().astype(bool)
    begin = tokens.shape[1] - logits_to_keep
    found = []
    for line in range(len(tokens)):
        prompt = tokens[line, :begin][seen[line, :begin]]
        columns = seen[line, begin:].nonzero()[0]
        found.append(Sequence(line, prompt, tokens[line, begin + columns], columns, prompt.tobytes()))
    return found


def rows(
    batch: list[Sequence], limit: int | None = None, count: int | None = None, share: bool = True
) -> list[list[Sequence]]:
    """Divide sequences into rows, equal prompts next to each other, the longest of them first.

    Args:
        limit: tokens to compute per row (longer sequences get one each). count: sequences per row. `None`: one row.
        share: [`build`] computes equal prompts once.
    """
    groups: dict[bytes, list[Sequence]] = {}
    for sequence in batch:
        groups.setdefault(sequence.key, []).append(sequence)
    filled: list[list[Sequence]] = [[]]
    tokens = 0
    for group in groups.values():
        for sequence in sorted(group, key=lambda s: (-len(s.completion), s.line)):
            row = filled[-1]
            shared = share and bool(row) and row[-1].key == sequence.key
            more = sequence.further if shared else sequence.tokens
            if row and ((limit is not None and tokens + more > limit) or (count is not None and len(row) == count)):
                filled.append([])
                tokens, more = 0, sequence.tokens
            filled[-1].append(sequence)
            tokens += more
    return filled


@dataclass(frozen=True)
class Row:
    """A model's inputs, (1, T) each, and the place of each of the N labels' results in the (B, L) batch."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    shift_labels: torch.Tensor
    segments: Segments
    scored: torch.Tensor  # (N,) int64, places in the row
    measured: torch.Tensor  # (N,) int64, the same for entropies
    destination: torch.Tensor  # (N,) int64, places in the flattened batch

    def inputs(self) -> dict[str, Any]:
        tokens = {"input_ids": self.input_ids, "position_ids": self.position_ids, "shift_labels": self.shift_labels}
        return tokens | self.segments._asdict()


def build(chosen: list[Sequence], width: int, device: torch.device, *, share: bool = True, whole: bool = False) -> Row:
    """Lay out sequences in the order of [`rows`].

    Args:
        width: L, columns of the completions in the padded batch.
        share: compute equal prompts once.
        whole: keep last tokens, add no padding: for counts of tokens (the load balance of experts). Not with `share`.
    """
    assert not (share and whole)
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    keys: list[np.ndarray] = []
    starts_q, starts_k = [0], [0]
    before, first = None, 0
    again: dict[int, int] = {}  # recomputed last prompt token -> its first copy

    def segment(mine: np.ndarray, place: int, asked: np.ndarray, read: np.ndarray) -> None:
        """Add tokens `mine` from position `place`, the last ones predicting `asked`, after the shared keys `read`."""
        begin, count = starts_q[-1], len(mine)
        tokens.append(mine)
        positions.append(np.arange(place, place + count))
        labels.append(np.concatenate([np.full(count - len(asked), _IGNORED), asked]))
        keys.extend([read, np.arange(begin, begin + count)])
        starts_q.append(begin + count)
        starts_k.append(starts_k[-1] + len(read) + count)

    for sequence in chosen:
        last = len(sequence.prompt) - 1
        fed = sequence.completion if whole else sequence.completion[:-1]
        asked = np.append(sequence.completion, _IGNORED) if whole else sequence.completion
        if share and sequence.key == before:
            if len(asked):
                again[starts_q[-1]] = first + last
            segment(np.concatenate([sequence.prompt[last:], fed]), last, asked, np.arange(first, first + last))
        else:
            before, first = sequence.key, starts_q[-1]
            segment(np.concatenate([sequence.prompt, fed]), 0, asked, np.arange(0))
    if not whole:
        rest, more = (MULTIPLE - starts[-1] % MULTIPLE for starts in (starts_q, starts_k))
        if more < rest:
            more += MULTIPLE
        segment(np.zeros(rest, np.int64), 0, np.arange(0), np.full(more - rest, starts_q[-1]))

    def put(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    label = np.concatenate(labels)
    scored = (label != _IGNORED).nonzero()[0]
    measured = scored.copy()
    measured[np.searchsorted(scored, [*again])] = [*again.values()]
    cu_q, cu_k = (put(np.array(starts, np.int32)) for starts in (starts_q, starts_k))
    max_q, max_k = (-(-int(np.diff(starts).max()) // MULTIPLE) * MULTIPLE for starts in (starts_q, starts_k))
    segments = Segments(cu_q, cu_k, max_q, max_k, put(np.concatenate(keys)) if share and len(chosen) > 1 else None)
    ids, places, shifted = (put(values)[None] for values in (np.concatenate(tokens), np.concatenate(positions), label))
    destination = np.concatenate([sequence.line * width + sequence.columns for sequence in chosen])
    return Row(ids, places, shifted, segments, put(scored), put(measured), put(destination))
