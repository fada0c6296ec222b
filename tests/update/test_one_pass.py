"""The update's own log-probabilities as the old ones, compared with those of TRL's extra forward."""

import dataclasses
import math

import pytest
import torch
from trl import GRPOTrainer

from qerl_trl import QeRLRLOOTrainer
from qerl_trl.rollout import mismatch
from qerl_trl.update import one_pass
from tests.faults.tiny_runs import logged
from tests.update.models import LORA, LOSSES, PROMPTS, adapter_of

#: SGD with a step of 1, so that the adapter moves by its gradient; four micro-batches per update
NOISE = {
    "base_format": "nvfp4", "padding_free": None, "aqn": True, "aqn_schedule": "constant", "aqn_sigma_start": 0.3,
    "max_completion_length": 6, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 1e9,
    "lr_scheduler_type": "constant", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
}  # fmt: skip
ONE_STEP = NOISE | {"max_steps": 1}
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
#: of times and sizes, which differ
UNCOMPARED = ("seconds/", "memory/", "step_time", "train_", "total_flos")


@pytest.fixture
def missing(monkeypatch):
    """The engine has no log-probability of each completion's second token."""
    logps = mismatch._behaviour_logps

    def some(*args):
        return [[math.nan if place == 1 else value for place, value in enumerate(row)] for row in logps(*args)]

    monkeypatch.setattr(mismatch, "_behaviour_logps", some)
    monkeypatch.setattr(mismatch, "_MISSING", 0.5)  # one token in six


def trained(trainer) -> tuple[list[dict], dict, list[bool]]:
    """Its training logs, its adapter, and for each forward whether it had gradients."""
    calls: list[bool] = []
    trainer.model.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    logs = [{k: v for k, v in entry.items() if not k.startswith(UNCOMPARED)} for entry in logs]
    return logs, adapter_of(trainer), calls


def compare(make, monkeypatch, rollout_func=None, **options) -> tuple[list[dict], list[bool], list[bool]]:
    """The same run by TRL's extra forward and without it: the logs, and the forwards of each."""

    def run():
        trainer = make(**options)
        trainer.rollout_func = rollout_func
        return trained(trainer)

    logs, adapter, calls = run()
    with monkeypatch.context() as patch:
        patch.setattr(one_pass.OnePass, "holds", property(lambda self: False))
        logs_of_trl, adapter_of_trl, calls_of_trl = run()
    assert calls.count(False) < calls_of_trl.count(False)
    for ours, theirs in zip(logs, logs_of_trl, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-5)
    for name, value in adapter_of_trl.items():
        torch.testing.assert_close(adapter[name], value, rtol=1e-3, atol=1e-6)
    return logs, calls, calls_of_trl


@pytest.mark.parametrize(
    ("loss_type", "mode", "bounds"),
    [(loss, "token_truncate", (None, 1.02)) for loss in LOSSES] + [("dapo", mode, (0.97, 1.03)) for mode in MODES],
    ids=str,
)
def test_equals_trls_extra_forward(make, monkeypatch, missing, loss_type, mode, bounds):
    options = {"loss_type": loss_type, "vllm_importance_sampling_mode": mode}
    options |= {
        f"vllm_importance_sampling_clip_{side}": bound for side, bound in zip(("min", "max"), bounds, strict=True)
    }
    if loss_type == "luspo":
        options["importance_sampling_level"] = "sequence"
    logs, calls, calls_of_trl = compare(make, monkeypatch, **NOISE, **options)
    assert logs[0]["sampling/sampling_logp_difference/max"] > 0.01 and logs[0]["rollout/mismatch_kl"] > 0
    assert logs[0]["rollout/nan_logps"] == 8 and 0 < logs[0]["rollout/truncated_fraction"] <= 1
    assert calls.count(True) == calls_of_trl.count(True) == 8
    assert calls_of_trl.count(False) - calls.count(False) == 8, "in both steps, of four micro-batches"


@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_generation": 2},
        {"steps_per_generation": 2, "num_iterations": 2},
        {"beta": 0.1},
        {"padding_free": True},
        {"trainer_class": QeRLRLOOTrainer, "beta": 0.0},
    ],
    ids="-".join,
)
def test_a_rollout_within_one_step_has_no_extra_forward(make, monkeypatch, options):
    compare(make, monkeypatch, **ONE_STEP | options)


@pytest.mark.parametrize(
    ("options", "computed"),
    [
        ({"num_iterations": 2, "max_steps": 2}, True),
        ({"steps_per_generation": 8, "max_steps": 2}, True),
        ({"aqn_sigma_start": 0.0, "aqn_sigma_end": 0.0}, False),
        ({"vllm_importance_sampling_correction": False}, False),
    ],
    ids=["two-updates", "rollout-of-two-updates", "no-noise", "off"],
)
def test_otherwise_old_log_probabilities_are_trls(make, monkeypatch, options, computed):
    """TRL needs them for a second update; with one and nothing to correct it computes none."""
    seen: list[bool] = []
    loss = GRPOTrainer._compute_loss

    def watching(trainer, model, batch):
        seen.append(batch.get("old_per_token_logps") is not None)
        return loss(trainer, model, batch)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", watching)
    make(**ONE_STEP | options).train()
    assert set(seen) == {computed}


def test_rloo_with_a_kl_penalty_needs_them_for_the_reward(make):
    assert not make(trainer_class=QeRLRLOOTrainer, **ONE_STEP, beta=0.1)._passes.holds


def test_tokens_of_tools_and_environments(make, monkeypatch):
    def rollout(prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        turns, _ = trainer._generate_single_turn(prompt_ids, None, {}, 4)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [[*turn, 7, 8] for turn in turns],
            "env_mask": [[1] * len(turn) + [0, 0] for turn in turns],
            "logprobs": None,
        }

    logs, *_ = compare(make, monkeypatch, rollout, **NOISE)
    assert logs[0]["sampling/importance_sampling_ratio/max"] > 1


def test_both_log_probabilities_have_one_dropout_mask(make):
    trainer = make(peft_config=dataclasses.replace(LORA, lora_dropout=0.5), **ONE_STEP, delta=1.0, epsilon=1e-6)
    trainer.train()
    assert logged(trainer, "clip_ratio/region_mean") == [0.0], "the ratio of new to old is exactly 1"


def test_evaluation_is_trls(make):
    trainer = make(eval_dataset=PROMPTS.select(range(4)), num_generations_eval=4, **ONE_STEP)
    assert math.isfinite(trainer.evaluate()["eval_loss"])


# --- score centering ---

WEIGHTS = [("token_truncate", 1.0, 1.0), ("token_truncate", 0.7, 1.2), ("token_truncate", None, 3.0)]
WEIGHTS = [one_pass.Correction(*given) for given in (*WEIGHTS, ("token_mask", 0.7, 1.5))]


@pytest.fixture
def policies() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (2, 3, 9) of the trained policy; log-probabilities of the sampling policy, whose order both have."""
    z, noise = torch.randn(2, 2, 3, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, order = (z + 0.5 * noise).log_softmax(-1).sort(descending=True)
    return z.gather(-1, order).requires_grad_(), q


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
@pytest.mark.parametrize("recorded", [9, 4])
def test_score_centering_subtracts_the_expected_score(policies, weight, recorded):
    """All tokens recorded, or four and a tail like the trained policy's: in expectation, the gradient is then zero."""
    z, q = policies
    p = z.log_softmax(-1)
    if recorded < 9:
        tail = p.detach()[..., recorded:].log_softmax(-1) + q[..., recorded:].logsumexp(-1, keepdim=True)
        q = torch.cat([q[..., :recorded], tail], -1)
    mass = q.exp() * one_pass.importance_ratio(p.detach(), q, torch.ones_like(q), weight)
    term = one_pass.centering_term(p[..., :recorded], q[..., :recorded], weight)
    (found,), (expected,) = (torch.autograd.grad(x.sum(), z, retain_graph=True) for x in (term, mass * p))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    alpha = mass[..., -1:] / p.detach()[..., -1:].exp() if recorded < 9 else 1.0
    value = ((mass - alpha * p.detach().exp()) * p)[..., :recorded].sum(-1)
    torch.testing.assert_close(term, value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_score_centering_at_the_edges(policies, weight):
    """Equal policies; a token that sampling left out; one without a log-probability."""
    p, q = policies[0].log_softmax(-1)[..., :4], policies[1].clone()[..., :4]
    assert one_pass.centering_term(p, p.detach(), weight).abs().max() < 1e-12
    q[0, 0, 3], q[1, 1, 2] = -math.inf, math.nan
    term, of_rare = (one_pass.centering_term(p.float(), each.float(), weight) for each in (q, q.clamp(min=-50.0)))
    torch.testing.assert_close(term, of_rare)
    assert term.isfinite().all() and term[1, 1] == 0


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
@pytest.mark.parametrize("way", ["packed", "padded", "compact"])
def test_log_probabilities_of_recorded_tokens(make, monkeypatch, family, way):
    """Values and gradients from all logits; gemma2 has a soft cap. On a GPU, TRL's head takes requested tokens only."""
    monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: way == "compact")
    trainer = make(family, padding_free=way == "packed", temperature=0.7)
    generator, mask = torch.Generator().manual_seed(1), torch.ones(4, 9, dtype=torch.long)
    ids, top = torch.randint(2, 258, (4, 9), generator=generator), torch.randint(258, (4, 5, 3), generator=generator)
    mask[1, 7:] = mask[2, :2] = mask[3, 6:] = 0
    weights, model, gradients = torch.randn(4, 5, 4, generator=generator) * mask[:, 4:, None], trainer.model, []
    logits = model(ids, attention_mask=mask).logits[:, 3:-1].float() / 0.7
    expected = logits.log_softmax(-1).gather(-1, torch.cat([ids[:, 4:, None], top], -1)) * mask[:, 4:, None]
    found = trainer._packing.logps(trainer._padded_logps, model, ids, mask, 5, top_ids=top)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for values in (found, expected):
        model.zero_grad()
        (values * weights).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
