"""Processes of one run that were not started alike: all end before anything is trained, and say what differs, where, and what to do."""

import logging
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from qerl_trl import checkpoint, in_step, report, watch
from qerl_trl.publish import hub, writer
from tests.faults.tiny_runs import PROMPTS, TinyRuns, spread_reward, tiny_runs  # noqa: F401
from tests.ranks import on_ranks
from tests.tiny_models import make_tiny_model

QUICK = {"save_strategy": "no", "aqn": False}
OTHERS = Dataset.from_dict({"prompt": [f"say {word} " for word in ("red", "blue", "big", "far")] * 4})


def second_reward(completions, **kwargs):
    return [float(len(text)) for text in completions]


def rewritten():
    def spread_reward(completions, **kwargs):
        return [float(sum(text.encode()) % 5) for text in completions]

    return spread_reward


def bound(value):
    def spread_reward(completions, **kwargs):
        return [float(sum(text.encode()) % 7) for text in completions] if value else []

    return spread_reward


def built(tiny_runs, folder, **options):  # noqa: F811
    """One process's trainer; its warnings are in what the process printed."""
    torch.set_num_threads(1)
    in_step.logger.addHandler(logging.StreamHandler(sys.stderr))
    return tiny_runs.trainer(folder, **{**QUICK, **options})


def trained(tiny_runs, folder, **options):  # noqa: F811
    """One process's training; the sum of its adapter."""
    trainer = built(tiny_runs, folder, **options)
    trainer.train()
    return float(sum(p.detach().double().abs().sum() for p in trainer.model.parameters() if p.requires_grad))


#: what the second process has otherwise -> words that every process says
DIFFERENT = {
    "data": ({"dataset": OTHERS}, ("training data: ", " in process 0, ", " in process 1")),
    "rows": ({"dataset": PROMPTS.select(range(8))}, ("rows of training data: 16 in process 0, 8 in process 1",)),
    "seed": ({"seed": 7}, ("seed: 42 in process 0, 7 in process 1", "None needs a seed of its own")),
    "noise": ({"aqn": True}, ("aqn: false in process 0, true in process 1",)),
    "learning rate": ({"learning_rate": 2e-3}, ("learning_rate: 0.001 in process 0, 0.002 in process 1",)),
    "weight decay": ({"weight_decay": 0.5}, ("weight_decay: not set in process 0, 0.5 in process 1",)),
    "batch": (
        {"per_device_train_batch_size": 8},
        ("per_device_train_batch_size: 4 in process 0, 8 in process 1",),
    ),
    "steps": ({"max_steps": 3}, ("max_steps: 2 in process 0, 3 in process 1",)),
    "saves": ({"save_strategy": "steps"}, ("save_strategy",)),
    "rewards": ({"reward": [spread_reward, second_reward]}, ('rewards: ["spread_reward"] in process 0',)),
    "source": ({"reward": rewritten()}, ("source of spread_reward: ",)),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs_is_named_in_every_process(what, tiny_runs, tmp_path):  # noqa: F811
    other, words = DIFFERENT[what]
    outcomes = on_ranks(2, lambda rank: trained(tiny_runs, tmp_path / "run", **(other if rank else {})))
    for outcome in outcomes:
        assert outcome.code == 0 and "ValueError: The 2 processes of this run are not parts" in outcome.answer, outcome
        for word in (*words, "nothing was trained", "Start all of them with the same script"):
            assert word in outcome.answer
        assert not any(name in outcome.answer for name in ("settings_sha256", "killed", "noise of this rollout"))


def test_other_packages_are_named(tiny_runs, tmp_path):  # noqa: F811
    def work(rank):
        if rank:
            found = report.versions()
            report.versions = lambda: {**found, "trl": "0.0.1"}
        return trained(tiny_runs, tmp_path / "run")

    for outcome in on_ranks(2, work):
        assert "versions.trl: " in outcome.answer and "0.0.1 in process 1" in outcome.answer


def test_another_base_is_named(tiny_runs, tmp_path):  # noqa: F811
    """A copy of the model on one machine is an older one."""
    model = make_tiny_model("qwen2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "up_proj" in name:
                parameter.mul_(1.5)
    model.save_pretrained(tmp_path / "older")
    older = TinyRuns(tmp_path / "older", tiny_runs.tokenizer)

    for outcome in on_ranks(2, lambda rank: trained(older if rank else tiny_runs, tmp_path / "run")):
        for word in (
            "ValueError",
            "not loaded the same base",
            "in process 1",
            str(tmp_path / "older"),
            "the same copy",
        ):
            assert word in outcome.answer


def test_what_belongs_to_a_process_may_differ(tiny_runs, tmp_path):  # noqa: F811
    """Where it logs, what it shows, the name of the folder with the same base, the device that a reward computes on."""
    copied = shutil.copytree(tiny_runs.model, tmp_path / "copy")
    own = {"run_name": "second", "disable_tqdm": False, "logging_nan_inf_filter": False, "dataloader_num_workers": 1}

    def work(rank):
        runs = TinyRuns(copied, tiny_runs.tokenizer) if rank else tiny_runs
        return trained(runs, tmp_path / "run", **(own if rank else {}), reward=bound(f"cpu:{rank}"))

    first, second = on_ranks(2, work)
    assert isinstance(first.answer, float) and first.answer == second.answer, first
    assert "other values are bound to it" in first.stderr and "spread_reward" in first.stderr
    assert "other values are bound to it" not in second.stderr


# --- folders that are not shared ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["as found", "True"])
def test_a_state_that_one_machine_has_is_named(how, tiny_runs, tmp_path):  # noqa: F811
    """Both machines name the same folder, each on a disk of its own, and only the first one has the checkpoint."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    on_ranks(2, lambda rank: trained(tiny_runs, tmp_path / "0", **saving))
    assert checkpoint.problems(tmp_path / "0/checkpoint-2") == []

    def work(rank):
        trainer = built(tiny_runs, tmp_path / str(rank), **saving, max_steps=4)
        trainer.train(resume_from_checkpoint=trainer.to_resume() if how == "as found" else True)

    for outcome in on_ranks(2, work):
        for word in (
            "ValueError",
            "step 2, checkpoint-2",
            "the beginning in process 1",
            "file system that all machines",
        ):
            assert word in outcome.answer
        assert ("process 1 refuses: resume_from_checkpoint=True" in outcome.answer) == (how == "True")


def test_a_checkpoint_without_the_random_state_of_a_process_is_not_sealed(tiny_runs, tmp_path):  # noqa: F811
    def work(rank):
        in_step._SEEN, watch.GRACE = 0.0, 2.0
        trained(tiny_runs, tmp_path / str(rank), save_strategy="steps", save_steps=1)

    first, second = on_ranks(2, work)
    for word in (
        "RuntimeError",
        "no rng_state_1.pth",
        "not sealed",
        "file system that all machines",
        "save_only_model",
    ):
        assert word in first.answer
    assert "output_dir=" in first.stderr and "of process 1 is another folder" in first.stderr  # at the start
    assert "no rng_state_1.pth" in f"{second.answer}{second.stderr}"
    assert checkpoint.last_checkpoint(tmp_path / "0") is None


def test_what_all_refuse_is_said_as_by_one(tiny_runs, tmp_path):  # noqa: F811
    saving = {"save_strategy": "steps"}
    on_ranks(2, lambda rank: trained(tiny_runs, tmp_path / "run", **saving))
    for outcome in on_ranks(2, lambda rank: trained(tiny_runs, tmp_path / "run", **saving, seed=3)):
        assert "seed: 42 then, 3 now" in outcome.answer and "processes of this run" not in outcome.answer


# --- after a step ---------------------------------------------------------------------------------------------------------------------


class Asks(TrainerCallback):
    """In one process, at one event after the second step."""

    def __init__(self, rank: int, name: str, event: str) -> None:
        def ask(args, state, control, **kwargs):
            if rank == 1 and state.global_step == 2:
                setattr(control, name, True)
                if event != "on_log":
                    self.trainer.log({"of_one_process": 1.0})  # the others do not wait for it

        setattr(self, event, ask)


class Evaluates(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = state.global_step % 2 == 0


@pytest.mark.parametrize(
    ("event", "name"),
    [
        ("on_step_end", "should_training_stop"),
        ("on_step_end", "should_save"),
        ("on_log", "should_training_stop"),
        ("on_log", "should_save"),
        ("on_log", "should_evaluate"),
        ("on_evaluate", "should_save"),
        ("on_evaluate", "should_training_stop"),
        ("on_save", "should_training_stop"),
    ],
)
def test_what_one_process_asks_for_all_do(event, name, tiny_runs, tmp_path):  # noqa: F811
    """Whichever callback asks: those of logs, evaluations and saves are called after the step's."""

    def work(rank):
        save_every = {"on_save": {"save_strategy": "steps", "save_steps": 1}}
        trainer = built(tiny_runs, tmp_path / "run", max_steps=4, logging_steps=1, **save_every.get(event, {}))
        trainer.eval_dataset = PROMPTS.select(range(4))
        if event == "on_evaluate":
            trainer.add_callback(Evaluates())
        trainer.add_callback(asks := Asks(rank, name, event))
        asks.trainer = trainer
        trainer.train()
        return trainer.state.global_step, sum("eval_loss" in log for log in trainer.state.log_history)

    first, second = on_ranks(2, work)
    steps = 2 if name == "should_training_stop" else 4
    evaluated = {"should_evaluate": 1}.get(name, steps // 2 if event == "on_evaluate" else 0)
    assert first.answer == second.answer == (steps, evaluated), first
    assert "Process 1 asked for" in first.stderr and "at step 2" in first.stderr
    saved = name == "should_save" or event == "on_save"
    assert (checkpoint.last_checkpoint(tmp_path / "run") is not None) == saved


def test_one_process_asks_nobody(tiny_runs, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(in_step, "gather_object", None)
    assert tiny_runs.command(tmp_path, **QUICK).state.global_step == 2


# --- after the training ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["save_model", "save_adapter", "save_base", "evaluate", "push_to_hub", "upload"])
def test_who_fails_after_the_training_ends_the_others_with_the_cause(method, tiny_runs, tmp_path):  # noqa: F811
    """The first process fails and ends; the second one waits for it in the next thing that all do."""

    def work(rank):
        watch.GRACE = 2.0
        trainer = built(tiny_runs, tmp_path / "run", max_steps=1)
        trainer.eval_dataset = PROMPTS.select(range(4))
        trainer.train()
        calls = {
            "save_model": trainer.save_model,
            "save_adapter": partial(trainer.save_adapter, tmp_path / "adapter"),
            "save_base": partial(trainer.save_base, tmp_path / "base"),
            "evaluate": trainer.evaluate,
            "push_to_hub": partial(trainer.push_to_hub, base_model="someone/base"),
            "upload": partial(trainer.push_to_hub, base_model="someone/base"),
        }
        if rank == 0:
            broken = "prediction_step" if method == "evaluate" else "save_pretrained"
            where = trainer if method == "evaluate" else trainer.accelerator.unwrap_model(trainer.model)
            if method == "save_base":
                where, broken = writer, "write_shards"
            if method == "upload":
                where, broken = hub, "push_folder"
            setattr(where, broken, full)
        try:
            calls[method]()
            trainer.save_adapter(tmp_path / "then")
        except (OSError, hub.HubError):
            os._exit(3)  # as a script that ends by it
        return "saved"

    def full(*args, **kwargs):
        raise (hub.HubError if method == "upload" else OSError)("the disk is on fire")

    first, second = on_ranks(2, work)
    assert first.code == 3
    said = f"{second.answer} {second.stderr}"
    assert "Process 0" in said and "the disk is on fire" in said, second
    assert "killed" not in said


def test_a_failing_save_of_one_that_is_caught_ends_nobody(tiny_runs, tmp_path):  # noqa: F811
    """Also where only the main process saves: works are counted by name."""

    def work(rank):
        watch.GRACE = 0.5
        trainer = built(tiny_runs, tmp_path / "run", max_steps=1)
        trainer.train()
        for _ in range(2 if rank == 0 else 0):
            trainer.save_model(tmp_path / "mine")
        try:
            if rank == 0:
                trainer.save_model(Path(os.devnull, "no folder"))
        except OSError:
            pass
        trainer.save_adapter(tmp_path / "adapter")
        trainer.train()
        return trainer.state.global_step

    assert [outcome.answer for outcome in on_ranks(2, work)] == [1, 1]


# --- bit for bit ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base_format", ["nvfp4", "full"])
def test_three_processes_go_on_bit_for_bit(base_format, tiny_runs, tmp_path):  # noqa: F811
    """Of three numbers the order of a sum decides. DDP lays its buckets out anew after its first step where it need not look for weights without
    a gradient, and the first step of a resumed run would sum in another order than the same step of the run that went through."""
    options = {"save_strategy": "steps", "save_steps": 2, "gradient_checkpointing": True, "base_format": base_format}
    through, resumed = tmp_path / "through", tmp_path / "resumed"

    def work(rank):
        built(tiny_runs, through, max_steps=4, **options).train()

    def again(rank):
        built(tiny_runs, resumed, max_steps=4, **options).train(resume_from_checkpoint=True)

    assert [outcome.answer for outcome in on_ranks(3, work)] == [None] * 3
    shutil.copytree(through / "checkpoint-2", resumed / "checkpoint-2")
    assert [outcome.answer for outcome in on_ranks(3, again)] == [None] * 3
    (weights,) = (through / "checkpoint-4").glob("*model.safetensors")
    assert weights.read_bytes() == (resumed / "checkpoint-4" / weights.name).read_bytes()
