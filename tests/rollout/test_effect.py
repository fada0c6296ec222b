"""The size of a disturbance that tells a right engine from a wrong one."""

import pytest
import torch

from qerl_trl.rollout import effect, probe
from qerl_trl.rollout.engine import Completion


@pytest.mark.parametrize("sizes", [probe._FRACTIONS, probe._SIGMAS], ids=["fractions", "sigmas"])
@pytest.mark.parametrize("enough", [0.0, 0.02, 0.07, 0.15, 0.2, 0.3, 0.8, 5.0])
def test_the_smallest_size_with_enough_effect_is_found_from_the_likely_one(sizes, enough):
    tried = []

    def effect_of(size: float) -> float:
        tried.append(size)
        return min(size, 0.9) * 1.01

    found, moved = effect.smallest(sizes, effect_of, enough)
    assert found == next((size for size in sizes if size * 1.01 >= enough), sizes[-1]) and moved == effect_of(found)
    tried.pop()
    assert tried[0] == effect.LIKELY and len(set(tried)) == len(tried)
    assert len(tried) == 1 or found != effect.LIKELY, "a model of 7B mostly takes that"


@pytest.mark.parametrize(("enough", "taken"), [(0.15, 0.2), (0.03, 0.05), (0.5, 0.8)])
def test_what_is_compared_is_what_was_sampled_under_the_size_that_is_taken(enough, taken):
    """The trainer moves what was sampled before by the size, and gives what was sampled under it 1 more; the engine says 0.25 more than that."""
    sampled, scored = [], []
    base = [Completion([0, 0], [0.0, 0.0])] * 3

    def sample(size: float) -> list[Completion]:
        sampled.append(size)
        return [Completion([1, 1], [size + 1.25, size + 1.25])] * 3

    def score(size: float, *lists: list[Completion]) -> torch.Tensor:
        scored.append((size, len(lists)))
        return torch.cat([torch.full((3, 2), size + (completions is not base)) for completions in lists])

    found = effect.compared(probe._FRACTIONS, sample, score, base, torch.zeros(3, 2), enough)
    assert found.size == taken and found.completions[0].logps[0] == taken + 1.25
    assert found.effect == pytest.approx(taken) and found.difference == pytest.approx(0.25)
    assert sampled == [effect.LIKELY] + [taken] * (taken != effect.LIKELY), (
        "one forward for both, and one more sampling where it is another"
    )
    assert scored[0] == (effect.LIKELY, 2) and (len(scored) == 1) == (taken == effect.LIKELY)
    assert scored[-1] == (taken, 2 if taken == effect.LIKELY else 1)
