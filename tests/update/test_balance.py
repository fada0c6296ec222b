"""Completions dealt to micro-batches: nobody is lost, prompts stay together, tokens are evened out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl_trl.update.batches import assign, deal


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_everyone_is_dealt_once(size, count, data):
    total = size * count
    prompts = [(n,) * 3 for n in data.draw(st.lists(st.integers(0, 4), min_size=total, max_size=total))]
    lengths = data.draw(st.lists(st.integers(0, 50), min_size=total, max_size=total))
    dealt = assign(prompts, lengths, size)
    assert [len(lines) for lines in dealt] == [size] * count
    assert sorted(line for lines in dealt for line in lines) == list(range(total))
    assert dealt == assign(prompts, lengths, size)


def tokens(lines, prompts, lengths):
    return sum(len(prompt) for prompt in {prompts[line] for line in lines}) + sum(lengths[line] for line in lines)


@pytest.mark.parametrize("size", [4, 8, 16], ids=["half-a-group", "a-group", "two-groups"])
def test_prompts_stay_together_and_tokens_are_even(size):
    generator = torch.Generator().manual_seed(0)
    prompts = [(n,) * 40 for n in range(8) for _ in range(8)]
    lengths = torch.randn(64, generator=generator).mul(0.9).exp().mul(100).int().tolist()
    order = torch.randperm(64, generator=generator).tolist()
    prompts, lengths = [prompts[i] for i in order], [lengths[i] for i in order]
    dealt = assign(prompts, lengths, size)
    for lines in dealt:
        assert len({prompts[line] for line in lines}) == max(size // 8, 1)
    loads = [tokens(lines, prompts, lengths) for lines in dealt]
    assert loads == sorted(loads, reverse=True)
    if size == 4:  # each group's two halves, the longest completion aside
        by_prompt: dict = {}
        for lines in dealt:
            by_prompt.setdefault(prompts[lines[0]], []).append(lines)
        for a, b in by_prompt.values():
            longest = max(lengths[line] for line in a + b)
            assert abs(sum(lengths[x] for x in a) - sum(lengths[x] for x in b)) <= longest


def micro_batches(count, size):
    line = torch.arange(count * size)
    whole = {
        "prompt_ids": line[:, None] % 3,
        "prompt_mask": torch.ones_like(line)[:, None],
        "completion_mask": torch.ones(len(line), 2).long(),
        "advantages": line.float(),
        "names": [str(int(n)) for n in line],
        "num_items_in_batch": torch.tensor(7),
    }
    return [
        {k: v[i * size : (i + 1) * size] if isinstance(v, list) or v.ndim else v for k, v in whole.items()}
        for i in range(count)
    ]


@pytest.mark.parametrize("per_step", [1, 2, 4, 8])
def test_a_completion_stays_in_its_optimizer_step(per_step):
    before = micro_batches(4, 3)
    after = deal(before, per_step)
    window = min(per_step, 4)
    for start in range(0, 4, window):
        lines = [
            sorted(v for b in some[start : start + window] for v in b["advantages"].tolist())
            for some in (before, after)
        ]
        assert lines[0] == lines[1]
    for batch in after:
        assert [float(name) for name in batch["names"]] == batch["advantages"].tolist()
        assert batch["num_items_in_batch"] == 7
    assert (per_step > 1) == any(
        not torch.equal(a["advantages"], b["advantages"]) for a, b in zip(before, after, strict=True)
    )


def test_another_rhythm_and_pictures_are_left_alone():
    before = micro_batches(4, 3)
    assert deal(before, 3) is before
    pictures = [batch | {"num_images": [1] * 3} for batch in before]
    assert deal(pictures, 4) is pictures
