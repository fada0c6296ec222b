"""Completions dealt to micro-batches, and several micro-batches in one pass with the same losses and gradients."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qerl_trl import QeRLRLOOTrainer
from qerl_trl.update import attention, compiled_layers
from qerl_trl.update.batches import TokenBudget, assign, deal
from tests.faults.tiny_runs import logged
from tests.update.models import adapter_of, assert_identical, forwards_of


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_every_completion_is_dealt_once(size, count, data):
    total = size * count
    prompts = [(n,) * 3 for n in data.draw(st.lists(st.integers(0, 4), min_size=total, max_size=total))]
    lengths = data.draw(st.lists(st.integers(0, 50), min_size=total, max_size=total))
    dealt = assign(prompts, lengths, size)
    assert [len(lines) for lines in dealt] == [size] * count
    assert sorted(line for lines in dealt for line in lines) == list(range(total))
    assert dealt == assign(prompts, lengths, size)


def micro_batches(count, size):
    def one(start):
        line = torch.arange(start, start + size)
        return {
            "prompt_ids": line[:, None] % 3,
            "prompt_mask": torch.ones_like(line)[:, None],
            "completion_mask": torch.ones(size, 2).long(),
            "advantages": line.float(),
            "names": [str(int(n)) for n in line],
            "num_items_in_batch": torch.tensor(7),
        }

    return [one(index * size) for index in range(count)]


@pytest.mark.parametrize("per_step", [1, 2, 4, 8])
def test_a_completion_stays_in_its_optimizer_step(per_step):
    before = micro_batches(4, 3)
    after = deal(before, per_step)
    window = min(per_step, 4)
    for start in range(0, 4, window):
        steps = (torch.cat([b["advantages"] for b in some[start : start + window]]) for some in (before, after))
        assert torch.equal(*(lines.sort().values for lines in steps))
    for batch in after:
        assert [float(name) for name in batch["names"]] == batch["advantages"].tolist()
        assert batch["num_items_in_batch"] == 7
    moved = [not torch.equal(a["advantages"], b["advantages"]) for a, b in zip(before, after, strict=True)]
    assert any(moved) == (per_step > 1)


@pytest.mark.parametrize(("per_step", "more"), [(3, {}), (4, {"num_images": [1] * 3})], ids=["unaligned", "pictures"])
def test_unaligned_steps_and_pictures_are_not_dealt(per_step, more):
    before = [batch | more for batch in micro_batches(4, 3)]
    assert deal(before, per_step) is before


RUN = {"max_steps": 2, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 4, "optim": "sgd"}
RUN |= {"learning_rate": 0.5}
COMPARED = ("loss", "grad_norm", "reward", "entropy", "kl", "clip_ratio", "sampling/", "policy_loss")


def planned_for(trainer, completion_length):
    """As if completions of that length had been planned for: those of the run are shorter."""
    work = dataclasses.replace(trainer.memory_plan.work, completion_length=completion_length)
    trainer.memory_plan = dataclasses.replace(trainer.memory_plan, work=work)
    return trainer


def both(make, **options):
    """(trainer, forwards) of one run, with a pass per micro-batch and with joint passes."""
    runs = []
    for length in (1, 500):
        trainer = planned_for(make(**RUN | options), length)
        seen = forwards_of(trainer)
        trainer.train()
        runs.append((trainer, seen))
    return runs


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo", "beta": 0.1},
        {"loss_type": "bnpo"},
        {"top_entropy_quantile": 0.5},
        {"use_adaptive_entropy": True, "entropy_coef": 0.1},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"steps_per_generation": 8, "max_steps": 4},
        {"num_iterations": 2, "max_steps": 4},
        {"gradient_checkpointing": True, "aqn": True, "aqn_sigma_start": 0.05},
        {"trainer_class": QeRLRLOOTrainer},
    ],
    ids="-".join,
)
def test_joint_passes_give_the_same_run(make, options):
    (alone, one_each), (together, joint) = both(make, **options)
    assert len(joint) == len(one_each) / 4
    for entry, other in zip(alone.state.log_history, together.state.log_history, strict=True):
        assert entry.keys() == other.keys()
        expected = {key: value for key, value in entry.items() if key.startswith(COMPARED)}
        assert {key: other[key] for key in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)
    for name, value in adapter_of(together).items():
        torch.testing.assert_close(value, adapter_of(alone)[name], rtol=1e-3, atol=1e-5)


def compiling_reference(q, k, v, cu_q, cu_k, longest_q, longest_k, scaling=None, window=None):
    """`attention.reference` in shapes independent of the segments, so that it compiles, as the GPU's kernel does."""

    def places(rows, starts):
        """Segment of each row, and the number of rows left in it."""
        index = torch.arange(rows.shape[0])
        segment = torch.bucketize(index, starts[1:].long(), right=True)
        return segment, starts.long()[segment + 1] - index

    (of_q, left_q), (of_k, left_k) = places(q, cu_q), places(k, cu_k)
    mask = (of_q[:, None] == of_k) & (left_k >= left_q[:, None])
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)


def test_resume_is_bit_exact_with_everything_on(make, monkeypatch):
    """NVFP4, packed rows, joint passes, compiled layers that recompute inside, noise, no extra forward."""
    options = RUN | {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "learning_rate": 1e-3}
    options |= {"base_format": "nvfp4", "compile_layers": True, "gradient_checkpointing": True}
    options |= {"aqn": True, "aqn_sigma_start": 0.1, "aqn_num_stages": 2}
    monkeypatch.setattr(attention, "reference", compiling_reference)
    eager = partial(compiled_layers.compile_layers, backend="eager")
    monkeypatch.setattr(compiled_layers, "compile_layers", eager)

    def trained(checkpoint=None, **changed):
        torch._dynamo.reset()
        trainer = planned_for(make(**options | changed), 45)
        seen, calls = forwards_of(trainer), []
        layers = trainer._compiled.forwards
        for forward in layers:
            forward.module.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
        trainer.train(resume_from_checkpoint=checkpoint)
        steps = 1 if checkpoint else 2
        assert trainer._packing.on and trainer._passes.holds and logged(trainer, "aqn/sigma")[-1] > 0
        assert steps < len(seen) < 4 * steps, "several passes of several micro-batches"
        assert [forward.recomputes for forward in layers] == [True, True, False] and not trainer._compiled.failed
        assert calls.count(True) == len(layers) * len(seen), "no layer's call is repeated"
        return trainer

    whole = trained()
    resumed = trained(f"{whole.args.output_dir}/checkpoint-1", output_dir=whole.args.output_dir)
    for key in ("loss", "grad_norm", "reward", "rollout/mismatch_kl"):
        assert logged(resumed, key)[-1] == logged(whole, key)[-1], key
    assert_identical(adapter_of(resumed), adapter_of(whole))


def test_no_pass_has_more_tokens_than_planned(make):
    trainer = planned_for(make(**RUN), 30)
    seen = forwards_of(trainer)
    trainer.train()
    assert 2 < len(seen) < 8, "several micro-batches per pass"
    assert max(tokens for _, tokens in seen) <= dataclasses.replace(trainer.memory_plan.work, packed=True).tokens


def test_a_short_step_at_the_end_of_an_epoch_has_no_joint_pass(make):
    trainer = planned_for(make(**RUN), 500)
    trainer._packing.budget._is_short_step = lambda: True
    seen = forwards_of(trainer)
    trainer.train()
    assert len(seen) == 8


@pytest.mark.parametrize(
    ("kind", "error"),
    [("detached", "Micro-batches 0 to 3 are computed in one pass"), ("other", "did not use its log-probabilities")],
)
def test_a_loss_without_the_joint_log_probabilities_is_refused(make, kind, error):
    trainer = planned_for(make(**RUN), 500)
    compute, calls, before = trainer._compute_loss, [], adapter_of(trainer)

    def changed(model, inputs):
        calls.append(1)
        if kind == "other" and len(calls) == 2:
            inputs = {**inputs, "completion_ids": inputs["completion_ids"].roll(1, 0)}
        loss = compute(model, inputs)
        if kind == "detached" and len(calls) == 4:
            return loss.detach() + 0.0 * next(p for p in model.parameters() if p.requires_grad).sum()
        return loss

    trainer._compute_loss = changed
    with pytest.raises(RuntimeError, match=error):
        trainer.train()
    assert_identical(adapter_of(trainer), before)


def batch(prompt, *lengths):
    """Completions of `lengths` tokens after a prompt of ten equal tokens."""
    return {
        "prompt_ids": torch.full((len(lengths), 10), prompt),
        "prompt_mask": torch.ones(len(lengths), 10, dtype=torch.long),
        "completion_ids": torch.ones(len(lengths), 64, dtype=torch.long),
        "completion_mask": (torch.arange(64) < torch.tensor(lengths)[:, None]).long(),
    }


def budget_of(tokens, per_step, other=None):
    """`other`: tokens and keys of each micro-batch of a second process."""

    def gather(mine):
        return torch.cat([mine, torch.tensor(other)[None]])

    accelerator = SimpleNamespace(num_processes=1 if other is None else 2, gather=gather, device="cpu")
    args = SimpleNamespace(gradient_accumulation_steps=per_step)
    budget = TokenBudget(SimpleNamespace(accelerator=accelerator, args=args))
    budget._limits = lambda: (tokens, 10 * tokens)
    return budget


def test_micro_batches_of_one_prompt_come_together_and_are_shared():
    batches = [batch(1, 50, 50), batch(2, 40, 40), batch(1, 30, 30), batch(2, 20, 20)]
    budget = budget_of(192, 4)
    order = budget.plan(batches, share=True, free=True)
    assert [b["prompt_ids"][0, 0].item() for b in order] == [1, 1, 2, 2]
    assert budget._groups == [(0, 1), (0, 1), (2, 3), (2, 3)]
    kept = budget.plan(batches, share=True, free=False)
    assert all(a is b for a, b in zip(kept, batches, strict=True))
    assert budget.plan(batches, share=False, free=True) and budget._groups == [(0, 0), (1, 2), (1, 2), (3, 3)]


ALONE = [(index, index) for index in range(6)]


@pytest.mark.parametrize(
    ("tokens", "per_step", "count", "other", "groups"),
    [
        (10**6, 2, 6, None, [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5)]),
        (10**6, 4, 6, None, ALONE),  # steps and rollouts do not align
        (256, 4, 4, [[64, 64], [640, 640], [64, 64], [64, 64]], ALONE[:4]),
        (256, 4, 4, [[64, 64]] * 4, [(0, 2), (0, 2), (0, 2), (3, 3)]),  # the last one exchanges gradients
    ],
    ids=["within-steps", "unaligned", "too-long-elsewhere", "two-processes"],
)
def test_groups_stay_in_a_step_and_are_those_of_all_processes(tokens, per_step, count, other, groups):
    budget = budget_of(tokens, per_step, other)
    budget.plan([batch(1, 5, 5)] * count, share=True, free=True)
    assert budget._groups == groups


def test_pictures_and_deepspeed_have_a_pass_each():
    budget = budget_of(10**6, 4)
    budget.plan([{**batch(1, 5), "pixel_values": torch.zeros(1)}] * 4, share=True, free=True)
    assert budget._groups == ALONE[:4]
    trainer = SimpleNamespace(memory_plan=object(), is_deepspeed_enabled=True)
    assert TokenBudget(trainer)._limits() is None


@pytest.mark.gpu
@pytest.mark.parametrize("gradient_checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("base_format", ["bf16", "nvfp4"])
def test_compiled_layers_in_bfloat16(make, base_format, gradient_checkpointing):
    options = {"base_format": base_format, "gradient_checkpointing": gradient_checkpointing, "max_steps": 1}
    options |= {"use_cpu": False, "bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}}
    (alone, one_each), (together, joint) = both(make, compile_layers=True, **options)
    assert (len(one_each), len(joint)) == (4, 1)
    assert logged(alone, "reward") == logged(together, "reward"), "the same completions"
    start = adapter_of(make(**RUN | options))
    for name, value in adapter_of(alone).items():
        moved = (value - start[name]).norm()
        assert moved > 0 and (adapter_of(together)[name] - value).norm() < 0.1 * moved, name
