"""The update's own log-probabilities as the old ones, compared with those of TRL's extra forward."""

import dataclasses
import itertools
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


@pytest.mark.parametrize(("low", "high"), [(None, None), (0.5, None), (0.5, 2.0)])
@pytest.mark.parametrize("mode", MODES)
def test_the_ratio_by_hand(mode, low, high):
    trained = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]])
    sampled = torch.tensor([[-1.5, math.nan, -2.0], [-1.0, -2.0, 5.0]])
    mask, e = torch.tensor([[1, 1, 1], [1, 1, 0]]), math.e
    expected = [[e**0.5, 1.0, 1 / e], [1.0, e, 1.0]] if mode.startswith("token") else [[e**-0.5], [e]]
    least, most = low or 0.0, high or math.inf
    for row, place in itertools.product(expected, range(len(expected[0]))):
        bounded = min(max(row[place], least), most)
        row[place] = bounded if mode.endswith("truncate") or bounded == row[place] else 0.0
    found = one_pass.importance_ratio(trained, sampled, mask, one_pass.Correction(mode, low, high))
    torch.testing.assert_close(found, torch.tensor(expected))
