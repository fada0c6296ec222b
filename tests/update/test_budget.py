"""Several micro-batches in one pass over the model: the same losses and gradients in fewer passes, and nothing lost."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qerl_trl import QeRLRLOOTrainer
from qerl_trl.update import attention
from qerl_trl.update import compiled_layers as regional
from qerl_trl.update.batches import TokenBudget
from qerl_trl.update.compiled_layers import compile_layers
from tests.trainers import adapter_of, assert_identical, logged
from tests.update.test_packing import LOSSES, ON_GPU, counted, make  # noqa: F401

RUN = {"max_steps": 2, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 4, "optim": "sgd"}
RUN |= {"learning_rate": 0.5}


def planned_for(trainer, completion_length):
    """As if completions of that length had been planned for: those of the run are shorter."""
    work = dataclasses.replace(trainer.memory_plan.work, completion_length=completion_length)
    trainer.memory_plan = dataclasses.replace(trainer.memory_plan, work=work)
    return trainer


def both(make, **options):  # noqa: F811
    """The same run with a pass per micro-batch and with as few as a large plan allows, and the passes of each."""
    runs = []
    for length in (1, 500):
        trainer = planned_for(make(**{**RUN, **options}), length)
        seen = counted(trainer, updates_only=True)
        trainer.train()
        runs.append((trainer, seen))
    return runs


def assert_the_same(runs):
    (alone, _), (together, _) = runs
    for entry, other in zip(alone.state.log_history, together.state.log_history, strict=True):
        assert entry.keys() == other.keys()
        for key in entry:
            if key.startswith(
                ("loss", "grad_norm", "reward", "entropy", "kl", "clip_ratio", "sampling/", "policy_loss")
            ):
                assert other[key] == pytest.approx(entry[key], rel=1e-3, abs=1e-5), key
    for name, value in adapter_of(together).items():
        torch.testing.assert_close(value, adapter_of(alone)[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss(make, loss_type):  # noqa: F811
    runs = both(make, loss_type=loss_type)
    assert_the_same(runs)
    assert len(runs[0][1]) == 8 and len(runs[1][1]) == 2  # two steps of four micro-batches


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.1},
        {"top_entropy_quantile": 0.5},
        {"entropy_coef": 0.1},
        {"use_adaptive_entropy": True, "entropy_coef": 0.1},
        {"importance_sampling_level": "sequence"},
        {"steps_per_generation": 8, "max_steps": 4},
        {"num_iterations": 2, "max_steps": 4},
        {"gradient_checkpointing": True},
        {"aqn": True, "aqn_sigma_start": 0.05},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_option(make, options):  # noqa: F811
    runs = both(make, **options)
    assert_the_same(runs)
    assert len(runs[1][1]) == len(runs[0][1]) / 4


def test_rloo(make):  # noqa: F811
    runs = both(make, trainer_class=QeRLRLOOTrainer)
    assert_the_same(runs)
    assert (len(runs[0][1]), len(runs[1][1])) == (8, 2)


def test_resume_is_bit_exact(make):  # noqa: F811
    options = {**RUN, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = planned_for(make(**options), 500)
    whole.train()
    resumed = planned_for(make(**{**options, "output_dir": whole.args.output_dir}), 500)
    seen = counted(resumed, updates_only=True)
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-2")
    assert len(seen) == 2
    assert_identical(adapter_of(resumed), adapter_of(whole))


def masked(q, k, v, cu_q, cu_k, longest_q, longest_k, scaling=None, window=None):
    """`attention.reference` in shapes that do not depend on the segments, so that it compiles, as the GPU's function does."""
    (of_q, left_q), (of_k, left_k) = (_places(*sides) for sides in ((q, cu_q), (k, cu_k)))
    mask = (of_q[:, None] == of_k) & (left_k >= left_q[:, None])
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)


def _places(rows, starts):
    """Of each row its segment, and how many rows of that are left."""
    index = torch.arange(rows.shape[0], device=rows.device)
    segment = torch.bucketize(index, starts[1:].long(), right=True)
    return segment, starts.long()[segment + 1] - index


def test_resume_is_bit_exact_with_all_of_it_together(make, monkeypatch):  # noqa: F811
    """An NVFP4 base, packed rows, several micro-batches per pass, compiled layers that recompute inside, noise in the rollout, and no extra
    forward for the old log-probabilities that its correction needs."""
    options = {**RUN, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "learning_rate": 1e-3}
    options |= {"base_format": "nvfp4", "compile_layers": True, "gradient_checkpointing": True}
    options |= {"aqn": True, "aqn_sigma_start": 0.1}
    monkeypatch.setattr(attention, "reference", masked)
    monkeypatch.setattr(regional, "compile_layers", partial(compile_layers, backend="eager"))

    def trained(checkpoint=None, **changed):
        torch._dynamo.reset()
        trainer = planned_for(make(**options, **changed), 45)
        seen, calls = counted(trainer, updates_only=True), []
        layers = trainer._compiled.forwards
        for forward in layers:
            forward.module.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
        trainer.train(resume_from_checkpoint=checkpoint)
        steps = 1 if checkpoint else 2
        assert trainer._packing.on and trainer._passes.holds and logged(trainer, "aqn/sigma")[-1] > 0
        assert steps < len(seen) < 4 * steps, "several passes, of several micro-batches"
        assert [forward.recomputes for forward in layers] == [True, True, False] and not trainer._compiled.failed
        assert calls.count(True) == len(layers) * len(seen), "no layer's call is repeated"
        return trainer

    whole = trained()
    resumed = trained(f"{whole.args.output_dir}/checkpoint-1", output_dir=whole.args.output_dir)
    for key in ("loss", "grad_norm", "reward", "rollout/mismatch_kl"):
        assert logged(resumed, key)[-1] == logged(whole, key)[-1], key
    assert_identical(adapter_of(resumed), adapter_of(whole))


def test_no_pass_has_more_tokens_than_were_planned(make):  # noqa: F811
    trainer = planned_for(make(**RUN), 30)
    seen = counted(trainer, updates_only=True)
    trainer.train()
    assert 2 < len(seen) < 8
    assert max(tokens for _, tokens in seen) <= dataclasses.replace(trainer.memory_plan.work, packed=True).tokens


def test_the_plan_of_a_real_run_bounds_it(make):  # noqa: F811
    """Completions of the greatest length: a micro-batch each, as planned."""
    trainer = make(**RUN, generation_kwargs={"min_new_tokens": 12})
    seen = counted(trainer, updates_only=True)
    trainer.train()
    assert max(tokens for _, tokens in seen) <= dataclasses.replace(trainer.memory_plan.work, packed=True).tokens


def test_a_shorter_step_at_the_end_of_an_epoch_is_computed_one_by_one(make):  # noqa: F811
    trainer = planned_for(make(**RUN), 500)
    trainer._packing.budget._is_short_step = lambda: True
    seen = counted(trainer, updates_only=True)
    trainer.train()
    assert len(seen) == 8


def test_a_loss_without_gradient_at_the_end_of_a_group_is_refused(make):  # noqa: F811
    trainer = planned_for(make(**RUN), 500)
    compute, calls = trainer._compute_loss, []

    def detached(model, inputs):
        loss = compute(model, inputs)
        calls.append(loss)
        parameter = next(p for p in model.parameters() if p.requires_grad)
        return loss if len(calls) < 4 else loss.detach() + 0.0 * parameter.sum()

    trainer._compute_loss = detached
    before = adapter_of(trainer)
    with pytest.raises(RuntimeError, match="Micro-batches 0 to 3 are computed in one pass"):
        trainer.train()
    assert_identical(adapter_of(trainer), before)


def test_a_loss_of_other_tokens_is_refused(make):  # noqa: F811
    trainer = planned_for(make(**RUN), 500)
    compute, calls = trainer._compute_loss, []

    def changed(model, inputs):
        calls.append(0)
        if len(calls) == 2:
            inputs = {**inputs, "completion_ids": inputs["completion_ids"].roll(1, 0)}
        return compute(model, inputs)

    trainer._compute_loss = changed
    with pytest.raises(RuntimeError, match="are not of its log-probabilities"):
        trainer.train()


def test_a_loss_that_always_takes_other_tokens_is_left_alone(make):  # noqa: F811
    trainer = planned_for(make(**RUN), 500)
    compute, seen = trainer._compute_loss, counted(trainer, updates_only=True)
    trainer._compute_loss = lambda model, inputs: compute(
        model, {**inputs, "completion_ids": inputs["completion_ids"].flip(0)}
    )
    trainer.train()
    assert len(seen) == 8


# --- groups ------------------------------------------------------------------------------------------------------------


def batch(prompt, *lengths):
    """Completions of `lengths` tokens after a prompt of ten equal tokens."""
    ids = torch.ones(len(lengths), 64, dtype=torch.long)
    mask = torch.tensor([[1] * length + [0] * (64 - length) for length in lengths])
    return {
        "prompt_ids": torch.full((len(lengths), 10), prompt),
        "prompt_mask": torch.ones(len(lengths), 10, dtype=torch.long),
        "completion_ids": ids,
        "completion_mask": mask,
    }


def budget_of(tokens, per_step, processes=1, others=()):
    def gather(mine):
        return torch.cat([mine, *[torch.tensor(other)[None] for other in others]])

    accelerator = SimpleNamespace(num_processes=processes, gather=gather, device="cpu")
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


def test_no_group_crosses_an_optimizer_step():
    budget = budget_of(10**6, 2)
    budget.plan([batch(1, 5, 5)] * 6, share=True, free=True)
    assert budget._groups == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5)]
    budget = budget_of(10**6, 4)
    budget.plan([batch(1, 5, 5)] * 6, share=True, free=True)  # another rhythm than the rollouts'
    assert budget._groups == [(index, index) for index in range(6)]


def test_processes_form_the_same_groups_and_leave_the_last_alone():
    mine, other = [batch(1, 5, 5)] * 4, [[64, 64], [640, 640], [64, 64], [64, 64]]
    budget = budget_of(256, 4, processes=2, others=[other])
    budget.plan(mine, share=True, free=True)
    assert budget._groups == [(0, 0), (1, 1), (2, 2), (3, 3)]
    budget = budget_of(256, 4, processes=2, others=[[[64, 64]] * 4])
    budget.plan(mine, share=True, free=True)
    assert budget._groups == [(0, 2), (0, 2), (0, 2), (3, 3)]


def test_pictures_and_deepspeed_have_a_pass_each():
    budget = budget_of(10**6, 4)
    budget.plan([{**batch(1, 5), "pixel_values": torch.zeros(1)}] * 4, share=True, free=True)
    assert budget._groups == [(index, index) for index in range(4)]
    trainer = SimpleNamespace(memory_plan=object(), is_deepspeed_enabled=True)
    assert TokenBudget(trainer)._limits() is None


# --- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("gradient_checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("base_format", ["bf16", "nvfp4"])
def test_compiled_layers_in_bfloat16(make, base_format, gradient_checkpointing):  # noqa: F811
    options = {"base_format": base_format, "gradient_checkpointing": gradient_checkpointing, "max_steps": 1, **ON_GPU}
    (alone, one_each), (together, joint) = both(make, compile_layers=True, **options)
    assert (len(one_each), len(joint)) == (4, 1)
    assert logged(alone, "reward") == logged(together, "reward")  # the same completions
    start = adapter_of(make(**{**RUN, **options}))
    for name, value in adapter_of(alone).items():
        moved = (value - start[name]).norm()
        assert moved > 0 and (adapter_of(together)[name] - value).norm() < 0.1 * moved, name
