"""What torch's allocator reserves for rows of changing lengths, computed from what it does with blocks, and against what was measured."""

import bisect
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qerl_trl.memory import formulas
from qerl_trl.memory.plan import GIB, plan_run
from qerl_trl.memory.workload import Workload
from qerl_trl.update import batches as balance
from qerl_trl.update.batches import LongestPass, TokenBudget, _sequences, _size
from tests.shapes import SEVEN_B
from tests.update.test_packing import make  # noqa: F401

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: `before`: of code without it
BEFORE = json.loads((BENCHMARKS / "results/step_h200.json").read_text())["before"]
MEASURED = next(row for row in BEFORE if row["name"] == "ours-7b-ragged")
MIB = 2**20


class Block:
    def __init__(self, size, before=None, after=None):
        self.size, self.before, self.after, self.used = size, before, after, False


class Allocator:
    """PyTorch's caching allocator for requests of more than a MiB (c10/cuda/CUDACachingAllocator.cpp): the smallest free block that is large
    enough, cut where more than a MiB is left over; or a new segment, in multiples of 2 MiB. Freed blocks are joined with free neighbours."""

    def __init__(self):
        self.free, self.reserved, self.allocated, self.most_reserved, self.most_allocated = [], 0, 0, 0, 0

    def take(self, size):
        size = -(-size // 512) * 512
        place = bisect.bisect_left(self.free, size, key=lambda block: block.size)
        if place < len(self.free):
            block = self.free.pop(place)
        else:
            block = Block(20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB)
            self.reserved += block.size
        if block.size - size > MIB:
            rest = Block(block.size - size, block, block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = size, rest
            bisect.insort(self.free, rest, key=lambda block: block.size)
        block.used = True
        self.allocated += block.size
        self.most_reserved = max(self.most_reserved, self.reserved)
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def give(self, *blocks):
        for block in blocks:
            block.used = False
            self.allocated -= block.size
            for other in (block.before, block.after):
                if other is None or other.used:
                    continue
                self.free.remove(other)
                block.size += other.size
                if other is block.before:
                    block.before = other.before
                    if other.before is not None:
                        other.before.after = block
                else:
                    block.after = other.after
                    if other.after is not None:
                        other.after.before = block
            bisect.insort(self.free, block, key=lambda block: block.size)

    def empty_cache(self):
        whole = [block for block in self.free if block.before is None and block.after is None]
        self.reserved -= sum(block.size for block in whole)
        self.free = [block for block in self.free if block not in whole]


def compute(memory, shape, tokens, completion, gradients):
    """One forward and backward of a packed row, all activations kept: what `formulas.layer_activation_bytes` counts, tensor by tensor."""
    take, give, bf16 = memory.take, memory.give, 2 * tokens
    hidden, mlp, lora = bf16 * shape.hidden, bf16 * shape.mlp, bf16 * 32
    attention = [bf16 * width for width in (shape.query_width, shape.kv_width, shape.kv_width, shape.query_width)]
    decoded = 2 * shape.hidden * shape.mlp
    kept = []
    for _ in range(shape.layers):
        mine = [take(hidden), *map(take, attention), *(take(lora) for _ in range(4)), take(hidden), take(hidden)]
        weight = take(2 * decoded)
        mine += [take(lora), take(lora), take(2 * mlp)]
        give(weight)
        mine += [take(mlp), take(lora)]
        weight, down = take(decoded), take(hidden)
        give(weight)
        mine.append(take(hidden))
        give(down)
        kept.append(mine)
    columns = 2 * shape.hidden * completion
    head = [take(columns), take(2 * columns), take(2 * 4096 * 32768)]
    gradient = take(hidden)
    give(*head)
    for mine in reversed(kept):
        weight, product = take(decoded), take(mlp)
        give(weight)
        both = take(2 * mlp)
        give(product)
        if len(gradients) < 7 * shape.layers:  # of the adapter's largest tensor; they stay until the optimizer's step
            gradients.append(take(4 * 32 * shape.mlp))
        weight, before = take(2 * decoded), take(hidden)
        give(weight, both, gradient, *mine)
        gradient = before
    give(gradient)


def rollouts(work):
    """(tokens, completion tokens) of each pass, per rollout of the measured run, as they are dealt and joined."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from step import ragged_lengths
    finally:
        sys.path.remove(str(BENCHMARKS))
    lengths, columns = ragged_lengths(work.completion_length), torch.arange(work.completion_length)
    trainer = SimpleNamespace(
        args=SimpleNamespace(gradient_accumulation_steps=work.accumulation), accelerator=SimpleNamespace(num_processes=1),
        memory_plan=SimpleNamespace(work=work), is_deepspeed_enabled=False,
    )  # fmt: skip
    prompt = torch.ones(work.batch, work.prompt_length, dtype=torch.long)
    for _ in MEASURED["steps"]:
        batches = []
        for index in range(work.accumulation):
            count = torch.tensor(list(itertools.islice(lengths, work.batch)))
            mask = (columns < count[:, None]).long()
            batches.append(
                {"prompt_ids": prompt * (5 + index), "prompt_mask": prompt, "completion_ids": mask, "completion_mask": mask}
            )  # fmt: skip
        budget = TokenBudget(trainer)
        dealt = budget.plan(balance.deal(batches, work.accumulation), share=True, free=True)
        passes = []
        for first, last in dict.fromkeys(budget._groups):
            group = dealt[first : last + 1]
            tokens = _size([line for batch in group for line in _sequences(batch)], True)[0]
            passes.append((tokens, sum(int(batch["completion_mask"].sum()) for batch in group)))
        yield passes


def run(monkeypatch, *, gives_back):
    """The allocator after the measured run's updates, and the bytes that stay beside them."""
    shape, work, memory = formulas.shape_of(SEVEN_B), Workload(**MEASURED["workload"]), Allocator()
    monkeypatch.setattr(torch.cuda, "empty_cache", memory.empty_cache)
    longest, counts = LongestPass(), []
    for passes in rollouts(work):
        counts.append(len(passes))
        gradients = []
        for tokens, completion in passes:
            if gives_back:
                longest.begin(tokens, torch.device("cuda"))
            compute(memory, shape, tokens, completion, gradients)
        memory.give(*gradients)
    assert counts == [step["passes"] for step in MEASURED["steps"]]
    stays = formulas.base_bytes(shape) + (4 + 8 + 2) * formulas.adapter_parameters(shape, 32)
    stays += formulas.engine_kv_bytes(shape, work, work.completions) + 2**29  # the engine's buffers inside of torch
    return memory, stays, plan_run(shape, work, None)


def test_without_it_the_allocator_does_what_was_measured(monkeypatch):
    memory, stays, plan = run(monkeypatch, gives_back=False)
    assert (memory.most_allocated + stays) / GIB == pytest.approx(MEASURED["allocated_gib"], rel=0.03)
    assert (memory.most_reserved + stays) / GIB == pytest.approx(MEASURED["reserved_gib"], rel=0.05)
    assert memory.most_reserved + stays > plan.peak


def test_with_it_pieces_stay_within_what_is_planned(monkeypatch):
    memory, stays, plan = run(monkeypatch, gives_back=True)
    share = memory.most_reserved / memory.most_allocated - 1
    assert share < formulas.ALLOCATOR_SLACK + formulas.KEPT_SLACK
    assert memory.most_reserved + stays + formulas.CONTEXT_BYTES < plan.peak


def test_only_a_longer_pass_with_gradients_begins_anew(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    longest = LongestPass()

    def empties(tokens, device="cuda"):
        emptied.clear()
        longest.begin(tokens, torch.device(device))
        return bool(emptied)

    assert empties(128) and not empties(128) and not empties(64) and empties(192)
    with torch.no_grad():
        assert not empties(256)
    assert empties(256) and not empties(512, "cpu")


@pytest.mark.parametrize("padding_free", [True, False])
def test_a_trainer_says_how_many_tokens_each_update_computes(make, padding_free):  # noqa: F811
    trainer = make(padding_free=padding_free, max_steps=1)
    assert trainer._packing.longest.tokens == 0  # its probes have no gradients
    computed = []

    def seen(model, args, kwargs):
        if torch.is_grad_enabled():
            computed.append(kwargs["input_ids"].numel())
            assert trainer._packing.longest.tokens == max(computed)

    trainer.model.register_forward_pre_hook(seen, with_kwargs=True)
    trainer.train()
    assert computed
