"""What the processes of one run agree on: settings at the start, requests after a step, and bits on resuming."""

import shutil

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from qerl_trl.checkpoint import seal, settings
from tests.faults.tiny_runs import PROMPTS, TinyRuns, spread_reward
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


def built(tiny_runs, folder, **options):
    torch.set_num_threads(1)
    return tiny_runs.trainer(folder, **{**QUICK, **options})


def trained(tiny_runs, folder, **options):
    """One process's training; the sum of its adapter."""
    trainer = built(tiny_runs, folder, **options)
    trainer.train()
    return float(sum(p.detach().double().abs().sum() for p in trainer.model.parameters() if p.requires_grad))


#: what the second process has otherwise -> the setting that every process names
DIFFERENT = {
    "data": ({"dataset": OTHERS}, "dataset_sha256: "),
    "seed": ({"seed": 7}, "seed: 42 and 7"),
    "noise": ({"aqn": True}, "aqn: False and True"),
    "weight decay": ({"weight_decay": 0.5}, "weight_decay: None and 0.5"),
    "steps": ({"max_steps": 3}, "max_steps: 2 and 3"),
    "rewards": ({"reward": [spread_reward, second_reward]}, "rewards: ["),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs_is_named_in_every_process(what, tiny_runs, tmp_path):
    other, named = DIFFERENT[what]
    for outcome in on_ranks(2, lambda rank: trained(tiny_runs, tmp_path / "run", **(other if rank else {}))):
        assert (
            outcome.code == 0 and "ValueError: Process 0 and process 1 do not run the same training" in outcome.answer
        ), outcome
        assert named in outcome.answer and "Start every process with the same script" in outcome.answer


def test_other_packages_are_named(tiny_runs, tmp_path):
    def work(rank):
        if rank:
            found = settings.versions()
            settings.versions = lambda: {**found, "trl": "0.0.1"}
        return trained(tiny_runs, tmp_path / "run")

    for outcome in on_ranks(2, work):
        assert "versions: " in outcome.answer and "same script, arguments, data and packages" in outcome.answer


def test_another_base_is_named(tiny_runs, tmp_path):
    """A copy of the model on one machine is an older one."""
    model = make_tiny_model("qwen2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "up_proj" in name:
                parameter.mul_(1.5)
    model.save_pretrained(tmp_path / "older")
    older = TinyRuns(tmp_path / "older", tiny_runs.tokenizer)

    for outcome in on_ranks(2, lambda rank: trained(older if rank else tiny_runs, tmp_path / "run")):
        for word in ("ValueError", "base_sha256: ", "same script, arguments, data and packages"):
            assert word in outcome.answer


def test_what_belongs_to_a_process_may_differ(tiny_runs, tmp_path):
    """Where it logs, what it shows, the name of the folder with the same base, the device that a reward computes on."""
    copied = shutil.copytree(tiny_runs.model, tmp_path / "copy")
    own = {"run_name": "second", "disable_tqdm": False, "logging_nan_inf_filter": False, "dataloader_num_workers": 1}

    def work(rank):
        runs = TinyRuns(copied, tiny_runs.tokenizer) if rank else tiny_runs
        return trained(runs, tmp_path / "run", **(own if rank else {}), reward=bound(f"cpu:{rank}"))

    first, second = on_ranks(2, work)
    assert isinstance(first.answer, float) and first.answer == second.answer, first


# --- folders that are not shared ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["as found", "True"])
def test_a_state_that_one_machine_has_is_named(how, tiny_runs, tmp_path):
    """Both machines name the same folder, each on a disk of its own, and only the first one has the checkpoint."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    on_ranks(2, lambda rank: trained(tiny_runs, tmp_path / "0", **saving))
    assert seal.problems(tmp_path / "0/checkpoint-2") == []

    def work(rank):
        trainer = built(tiny_runs, tmp_path / str(rank), **saving, max_steps=4)
        trainer.train(resume_from_checkpoint=trainer.to_resume() if how == "as found" else True)

    first, second = on_ranks(2, work)
    assert (
        "resumes from: 'checkpoint-2' and None" in first.answer and "an output_dir that all of them see" in first.answer
    )
    assert ("resume_from_checkpoint=True" if how == "True" else "resumes from: 'checkpoint-2'") in second.answer


def test_what_all_refuse_is_said_as_by_one(tiny_runs, tmp_path):
    saving = {"save_strategy": "steps"}
    on_ranks(2, lambda rank: trained(tiny_runs, tmp_path / "run", **saving))
    for outcome in on_ranks(2, lambda rank: trained(tiny_runs, tmp_path / "run", **saving, seed=3)):
        assert "seed: 42 then, 3 now" in outcome.answer and "do not run the same" not in outcome.answer


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
        ("on_evaluate", "should_training_stop"),
        ("on_save", "should_training_stop"),
    ],
)
def test_what_one_process_asks_for_all_do(event, name, tiny_runs, tmp_path):
    """A save after the step, an end at any of its events."""

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
    evaluated = steps // 2 if event == "on_evaluate" else 0
    assert first.answer == second.answer == (steps, evaluated), first
    saved = name == "should_save" or event == "on_save"
    assert (seal.last_checkpoint(tmp_path / "run") is not None) == saved


# --- bit for bit ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base_format", ["nvfp4", "full"])
def test_three_processes_go_on_bit_for_bit(base_format, tiny_runs, tmp_path):
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
