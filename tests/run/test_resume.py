"""Checkpoints of a run: written between rollouts, sealed, resumed bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import TrainerCallback

from qerl_trl import last_checkpoint
from qerl_trl.checkpoint import seal
from qerl_trl.checkpoint.seal import MANIFEST_NAME, order_of
from qerl_trl.model.lora import register_nvfp4_lora
from tests.faults.tiny_runs import PROMPTS, logged
from tests.trainers import float32_base
from tests.update.models import LORA, adapter_of, assert_identical

STEPS = {"save_strategy": "steps", "save_steps": 2}
CASES = {
    "plain": {},
    "accumulation-and-later-epoch": {"gradient_accumulation_steps": 2},  # 4 steps an epoch
    "inside-later-epoch": {"gradient_accumulation_steps": 4},  # 2 steps an epoch
    "policy-scope": {"aqn_scope": "policy", "aqn_scale": "relative", "aqn_target_kl": 0.05},
    "w4a8": {"compute": "w4a8"},
    "two-iterations": {"num_iterations": 2},
    "entropy-target": {"aqn_schedule": "entropy_target", "aqn_entropy_target": 5.0},
}


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in (folder / "run").glob("checkpoint-*"))


@pytest.mark.parametrize("case", CASES)
def test_resume_continues_the_same_trajectory(make_trainer, tmp_path, case):
    options = {"max_steps": 6, "aqn_sigma_start": 0.1, **STEPS, **CASES[case]}
    whole = make_trainer(**options)
    whole.train()
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoint-6")
    assert last_checkpoint(run) == str(run / "checkpoint-4")
    resumed = make_trainer(**options)
    resumed.train(resume_from_checkpoint=True)
    assert_identical(adapter_of(resumed), adapter_of(whole))
    assert resumed.state.global_step == 6
    saved = load_file(run / "checkpoint-6" / "adapter_model.safetensors")
    assert len(saved) == len(adapter_of(whole))


def test_resume_of_a_peft_model_with_its_reference(make_trainer, tiny_model_dir, tmp_path):
    """With beta > 0 TRL keeps the given adapter as a second one, "ref": both come back."""

    def trained_before():
        torch.manual_seed(0)
        model = get_peft_model(float32_base(tiny_model_dir("qwen2")), register_nvfp4_lora(LORA))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        return model

    options = {"peft_config": None, "model_init_kwargs": None, "beta": 0.1, "max_steps": 4, **STEPS}
    whole = make_trainer(model=trained_before(), **options)
    whole.train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    resumed = make_trainer(model=trained_before(), **options)
    resumed.train(resume_from_checkpoint=True)
    assert sum(".ref." in name for name in adapter_of(whole)) == len(adapter_of(whole)) / 2
    assert_identical(adapter_of(resumed), adapter_of(whole))
    assert logged(resumed, "kl") == logged(whole, "kl")


def test_a_named_damaged_checkpoint_is_refused(make_trainer, tmp_path):
    make_trainer(**STEPS).train()
    weights = tmp_path / "run" / "checkpoint-2" / "optimizer.pt"
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"optimizer\.pt has"):
        make_trainer(**STEPS).train(resume_from_checkpoint=str(weights.parent))
    with pytest.raises(ValueError, match="finds no whole checkpoint"):
        make_trainer(**STEPS).train(resume_from_checkpoint=True)


def test_a_longer_run_resumes_and_other_settings_only_if_allowed(make_trainer, tmp_path, caplog):
    make_trainer(**STEPS).train()
    other = {**STEPS, "aqn_seed": 9, "max_steps": 4}
    with pytest.raises(ValueError, match=r"aqn_seed: 3 then, 9 now.*another output_dir.*allow_other_settings"):
        make_trainer(**other).train(resume_from_checkpoint=True)
    make_trainer(**other, allow_other_settings=True).train(resume_from_checkpoint=True)
    assert "aqn_seed: 3 then, 9 now" in caplog.text and "max_steps: 2 then, 4 now" in caplog.text
    run = json.loads((tmp_path / "run" / "checkpoint-4" / MANIFEST_NAME).read_text())["run"]
    assert run["changed"] == ["aqn_seed: 3 then, 9 now"]
    with pytest.raises(ValueError, match=r"belongs to a run with other settings.*aqn_seed: 9 then, 3 now"):
        make_trainer(**STEPS, allow_other_settings=True).train()  # a fresh start in another run's folder


def test_evaluations_do_not_change_the_trajectory(make_trainer, tmp_path):
    """An epoch's last checkpoint is written before its evaluation, which samples from the same generator."""
    options = {"max_steps": 10, **STEPS, "save_steps": 8, "eval_dataset": PROMPTS.select(range(4))}
    whole = make_trainer(**options, eval_strategy="epoch")
    whole.train()
    assert next(entry["step"] for entry in whole.state.log_history if "eval_loss" in entry) == 8, "8 steps an epoch"
    for then in ({"eval_strategy": "epoch"}, {"eval_strategy": "no"}, {"eval_strategy": "steps", "eval_steps": 1}):
        shutil.rmtree(tmp_path / "run" / "checkpoint-10")
        resumed = make_trainer(**options, **then)
        resumed.train(resume_from_checkpoint=True)
        assert_identical(adapter_of(resumed), adapter_of(whole))


EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_") and "train" not in name]
SAVE, STOP = "should_save", "should_training_stop"


@pytest.mark.parametrize(
    ("options", "events", "asked", "saved", "steps"),
    [
        ({**STEPS, "max_steps": 7}, [], [], [3, 6, 7], 7),
        ({"max_steps": 4}, ["on_step_end"], [SAVE], [3], 4),
        ({}, ["on_step_end"], [SAVE, STOP], [3], 3),
        ({}, ["on_step_end"], [STOP], [], 1),
        ({**STEPS, "save_steps": 1}, EVENTS, [STOP], [3], 3),
    ],
    ids=["steps", "save", "save-and-stop", "stop-alone", "stop-in-every-event"],
)
def test_saves_wait_for_the_end_of_a_rollout(make_trainer, tmp_path, caplog, options, events, asked, saved, steps):
    """Also those requested by a callback added after construction; the end of a training waits with its save."""

    def ask(self, args, state, control, **kwargs):
        if state.global_step == 1 or (events is EVENTS and state.global_step > 1):
            for name in asked:
                setattr(control, name, True)

    trainer = make_trainer(**{"num_iterations": 3, "max_steps": 9, "logging_steps": 1} | options)
    trainer.add_callback(type("Asks", (TrainerCallback,), dict.fromkeys(events, ask))())
    trainer.train()
    assert (checkpoints(tmp_path), trainer.state.global_step) == (saved, steps)
    assert ("is written after the next step that ends a rollout" in caplog.text) is (saved != [])
    assert all(order_of(tmp_path / "run" / f"checkpoint-{step}") > 0 for step in saved)


@pytest.mark.parametrize("save_strategy", ["steps", "best"])
def test_the_best_checkpoint_is_one_that_was_evaluated_between_rollouts(make_trainer, tmp_path, save_strategy):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_num_tokens", "greater_is_better": False}
    options = {"num_iterations": 2, "max_steps": 4, "save_strategy": save_strategy, "save_steps": 1, **best}
    trainer = make_trainer(**options, eval_strategy="steps", eval_steps=1, eval_dataset=PROMPTS.select(range(4)))
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [2, 4]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-2")  # fewest tokens: the first
    saved = load_file(tmp_path / "run" / "checkpoint-2" / "adapter_model.safetensors")
    loaded = {name.replace(".default", ""): value for name, value in adapter_of(trainer).items()}
    assert_identical({name: saved[name] for name in loaded}, loaded)


def test_old_checkpoints_go_only_after_the_new_one_is_sealed(make_trainer, tmp_path, monkeypatch):
    sealed, present = seal.seal, []

    def watching(folder, settings, **order):
        present.append(checkpoints(tmp_path))
        sealed(folder, settings, **order)

    monkeypatch.setattr(seal, "seal", watching)
    make_trainer(max_steps=3, save_strategy="steps", save_steps=1, save_total_limit=1).train()
    assert present == [[1], [1, 2], [2, 3]] and checkpoints(tmp_path) == [3]
    arguments = torch.load(tmp_path / "run" / "checkpoint-3" / "training_args.bin", weights_only=False)
    assert arguments.save_total_limit == 1
