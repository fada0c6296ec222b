"""How large a disturbance has to be for the check at start to tell a right engine from a wrong one, and what engine and trainer compute under it.

A disturbance (probe.py's adapter, its noise) has a size, and an effect that grows with it: how far it moves the trainer's log-probabilities. The
smallest size with enough effect is taken, since a larger one moves the model to where a rounding counts for more.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from accelerate.utils import gather_object

from .engine import Completion

#: what models of 7B mostly need: it is tried first
LIKELY = 0.2


class Compared(NamedTuple):
    """What the engine sampled under a disturbance of this size, the mean difference of its log-probabilities from the trainer's, and the effect, in nats."""

    completions: list[Completion]
    difference: float
    effect: float
    size: float


def compared(
    sizes: Sequence[float],
    sample: Callable[[float], list[Completion]],
    score: Callable[..., torch.Tensor],
    base: list[Completion],
    clean: torch.Tensor,
    enough: float,
) -> Compared:
    """Engine and trainer under the smallest of `sizes` whose effect is enough (`smallest`). One forward says effect and difference of the likely size;
    where another one is taken, the engine samples once more.

    Args:
        sizes: ascending, `LIKELY` among them.
        sample: what the engine samples under a size.
        score: the trainer's log-probabilities, under a size, of lists of completions.
        base, clean: completions that the trainer gives the log-probabilities `clean` without any of it.
    """
    assert LIKELY in sizes
    completions = sample(LIKELY)
    moved, scored = score(LIKELY, base, completions).chunk(2)

    def effect_of(size: float) -> float:
        return mean_difference(clean, moved if size == LIKELY else score(size, base))

    size, effect = smallest(sizes, effect_of, enough)
    if size != LIKELY:
        completions = sample(size)
        scored = score(size, completions)
    return Compared(completions, mean_difference(scored, logps_of(completions)), effect, size)


def smallest(sizes: Sequence[float], effect_of: Callable[[float], float], enough: float) -> tuple[float, float]:
    """The smallest of ascending `sizes` whose effect, which grows with it, is enough, or else the largest; and its effect. Looked for from
    `LIKELY` on, and a smaller one is tried only where it would be enough if the effect were proportional; so mostly one is tried."""
    at = sizes.index(LIKELY)
    effect = effect_of(sizes[at])
    step = -1 if effect >= enough else 1
    while 0 <= at + step < len(sizes):
        if step < 0 and effect * sizes[at - 1] / sizes[at] < enough:
            break
        other = effect_of(sizes[at + step])
        if step < 0 and other < enough:
            break
        at, effect = at + step, other
        if step > 0 and other >= enough:
            break
    return sizes[at], effect


def logps_of(completions: list[Completion]) -> torch.Tensor:
    return torch.tensor([completion.logps for completion in completions])


def mean_difference(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest of all processes', so that all of them judge alike: a forward of sharded weights needs every one."""
    return torch.tensor(gather_object([(mine - theirs.to(mine.device)).abs().mean().item()])).max().item()
