"""Two passes instead of three: what the update computes of its own log-probabilities equals what TRL computes of an extra forward's."""

import copy
import itertools
import math
import tempfile

import pytest
import torch
from trl import GRPOTrainer

from qerl_trl import QeRLRLOOTrainer
from qerl_trl.rollout import mismatch
from qerl_trl.update import one_pass
from tests.trainers import LORA, adapter_of, assert_identical, logged
from tests.update.test_packing import LOSSES

#: SGD with a step of 1, so that the adapter moves by its gradient; four micro-batches per update
NOISE = {
    "aqn_schedule": "constant", "aqn_sigma_start": 0.3, "max_steps": 2, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 1e9,
    "lr_scheduler_type": "constant", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_generations": 4,
}  # fmt: skip
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
#: seconds, and what is no number of the update
TIMES = ("seconds/", "memory/", "step_time", "train_", "total_flos")


@pytest.fixture
def missing(monkeypatch):
    """Let the engine miss the log-probability of each completion's second token."""
    logps = mismatch._behaviour_logps

    def some(*args):
        return [[math.nan if place == 1 else value for place, value in enumerate(row)] for row in logps(*args)]

    monkeypatch.setattr(mismatch, "_behaviour_logps", some)


def forwards(trainer) -> list[bool]:
    """Whether with gradients, of each forward pass over the model."""
    calls: list[bool] = []
    trainer.model.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    return calls


def trained(trainer) -> dict:
    """Its training logs, its adapter, and what was computed."""
    calls = forwards(trainer)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    logs = [{k: v for k, v in entry.items() if not k.startswith(TIMES)} for entry in logs]
    return {"logs": logs, "adapter": adapter_of(trainer), "calls": calls}


def compare(make, monkeypatch, **options) -> tuple[dict, dict]:
    """The same run by TRL's own extra forward and by the update's own, which must agree to rounding."""
    own = trained(make(**options))
    with monkeypatch.context() as patch:
        patch.setattr(one_pass.OnePass, "holds", property(lambda self: False))
        trl = trained(make(**options))
    assert own["calls"].count(False) < trl["calls"].count(False)
    for ours, theirs in zip(own["logs"], trl["logs"], strict=True):
        assert ours.keys() == theirs.keys()
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-5)
    for name, value in trl["adapter"].items():
        torch.testing.assert_close(own["adapter"][name], value, rtol=1e-3, atol=1e-6)
    return own, trl


@pytest.mark.parametrize(
    ("loss_type", "mode", "bounds"),
    [(loss, "token_truncate", (None, 1.02)) for loss in LOSSES] + [("dapo", mode, (0.97, 1.03)) for mode in MODES],
    ids=lambda value: str(value),
)
def test_equals_trls_extra_forward(make_trainer, monkeypatch, missing, loss_type, mode, bounds):
    options = {
        "loss_type": loss_type, "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": bounds[0], "vllm_importance_sampling_clip_max": bounds[1],
    }  # fmt: skip
    if loss_type == "luspo":
        options["importance_sampling_level"] = "sequence"
    monkeypatch.setattr(mismatch, "_MISSING", 0.5)  # one token in six has none here
    own, trl = compare(make_trainer, monkeypatch, **NOISE, **options)
    first = own["logs"][0]
    assert first["sampling/sampling_logp_difference/max"] > 0.01 and first["rollout/mismatch_kl"] > 0
    assert first["rollout/nan_logps"] == 8 and 0 < first["rollout/truncated_fraction"] <= 1
    assert own["calls"].count(True) == trl["calls"].count(True) == 8
    # in both steps the old log-probabilities of four micro-batches
    assert trl["calls"].count(False) - own["calls"].count(False) == 8


def options_of(**options):
    return NOISE | {"max_steps": 1} | options


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({"steps_per_generation": 2}, True),
        ({"steps_per_generation": 2, "num_iterations": 2}, True),
        ({"num_iterations": 2, "max_steps": 2}, False),
        ({"steps_per_generation": 8, "max_steps": 2}, False),
        ({"beta": 0.1}, True),
        ({"padding_free": True}, True),
        ({"aqn_sigma_start": 0.0, "aqn_sigma_end": 0.0}, None),
        ({"vllm_importance_sampling_correction": False}, None),
    ],
    ids=[
        "two-rollouts",
        "twice-in-one-step",
        "two-updates",
        "rollout-of-two-updates",
        "reference",
        "packed",
        "no-noise",
        "off",
    ],
)
def test_where_it_holds_and_where_trls_own_way_runs(make_trainer, monkeypatch, options, saved):
    if saved:
        compare(make_trainer, monkeypatch, **options_of(**options))
        return
    computed: list[torch.Tensor] = []
    loss = GRPOTrainer._compute_loss

    def watching(trainer, model, batch):
        computed.append(batch.get("old_per_token_logps"))
        return loss(trainer, model, batch)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", watching)
    trainer = make_trainer(**options_of(**options))
    trainer.train()
    # TRL needs them for the second update; with one update and nothing to correct it never asks
    assert all((old is not None) is (saved is False) for old in computed)


def test_tokens_of_tools_and_environments(make_trainer, monkeypatch):
    def rollout(prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        turns, _ = trainer._generate_single_turn(prompt_ids, None, {}, 4)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [[*turn, 7, 8] for turn in turns],
            "env_mask": [[1] * len(turn) + [0, 0] for turn in turns],
            "logprobs": None,
        }

    def make(**options):
        trainer = make_trainer(**options)
        trainer.rollout_func = rollout
        return trainer

    own, _ = compare(make, monkeypatch, **NOISE)
    assert own["logs"][0]["sampling/importance_sampling_ratio/max"] > 1


def test_rloo_takes_them_from_the_update_unless_the_reward_needs_them(make_trainer, monkeypatch):
    def make(**options):
        return make_trainer(trainer_class=QeRLRLOOTrainer, **options)

    compare(make, monkeypatch, **NOISE, beta=0.0)
    monkeypatch.undo()
    trainer = make(**options_of(beta=0.1))
    assert not trainer._passes.holds
    trainer.train()
    assert math.isfinite(logged(trainer, "loss")[0])


def test_dropout_draws_one_mask(make_trainer):
    peft_config = copy.deepcopy(LORA)
    peft_config.lora_dropout = 0.5
    trainer = make_trainer(peft_config=peft_config, **options_of(delta=1.0, epsilon=1e-6))
    trainer.train()
    assert logged(trainer, "clip_ratio/region_mean") == [0.0]  # the ratio of new to old is exactly 1


def test_a_mismatch_ends_the_run_before_the_optimizer_and_the_same_command_goes_on(make_trainer, monkeypatch):
    options = NOISE | {"max_steps": 3, "save_strategy": "steps", "save_steps": 100}
    whole = make_trainer(**options, output_dir=str(tempfile.mkdtemp()))
    whole.train()
    calls, logps = [], mismatch._behaviour_logps

    def lost(*args):
        calls.append(1)
        return [[math.nan] * 6] * 8 if len(calls) == 2 else logps(*args)

    monkeypatch.setattr(mismatch, "_behaviour_logps", lost)
    trainer = make_trainer(**options)
    with pytest.raises(RuntimeError, match="no finite log-probability for 48 of the 48 tokens") as raised:
        trainer.train()
    assert any("Step 1 is saved" in note for note in raised.value.__notes__)
    again = make_trainer(**options)
    again.train(resume_from_checkpoint=True)
    assert_identical(adapter_of(again), adapter_of(whole))


def test_evaluation_is_trls(make_trainer):
    from tests.trainers import PROMPTS

    trainer = make_trainer(eval_dataset=PROMPTS.select(range(4)), num_generations_eval=4, **options_of())
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def test_the_ratio_by_hand():
    trained = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]])
    sampled = torch.tensor([[-1.5, math.nan, -2.0], [-1.0, -2.0, 5.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    e = math.e
    for (level, how), (low, high) in itertools.product(
        itertools.product(("token", "sequence"), ("truncate", "mask")), [(None, None), (0.5, None), (0.5, 2.0)]
    ):
        expected = [[e**0.5, 1.0, 1 / e], [1.0, e, 1.0]] if level == "token" else [[e**-0.5], [e]]
        least, most = low or 0.0, high or math.inf
        if how == "truncate":
            expected = [[min(max(r, least), most) for r in row] for row in expected]
        else:
            expected = [[r if least <= r <= most else 0.0 for r in row] for row in expected]
        found = one_pass.importance_ratio(trained, sampled, mask, one_pass.Correction(f"{level}_{how}", low, high))
        torch.testing.assert_close(found, torch.tensor(expected))
