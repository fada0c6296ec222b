"""Agreement of the processes of one run: settings at the start, requests after a step, bits on resuming."""

import shutil

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from qerl_trl.checkpoint import seal
from tests.faults.tiny_runs import TinyRuns
from tests.ranks import on_ranks
from tests.tiny_models import make_tiny_model


def built(tiny_runs, folder, **options):
    torch.set_num_threads(1)
    return tiny_runs.trainer(folder, **{"save_strategy": "no", "aqn": False, **options})


def trained(tiny_runs, folder, **options):
    """One process's training; the sum of its adapter."""
    trainer = built(tiny_runs, folder, **options)
    trainer.train()
    return float(sum(p.detach().double().abs().sum() for p in trainer.model.parameters() if p.requires_grad))


@pytest.fixture(scope="module")
def older(tiny_runs, tmp_path_factory):
    """Runs with an older copy of the model."""
    model = make_tiny_model("qwen2")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    model.save_pretrained(folder := tmp_path_factory.mktemp("older"))
    return TinyRuns(folder, tiny_runs.tokenizer)


#: options of the second process -> the setting that both processes name
DIFFERENT = {
    "data": ({"dataset": Dataset.from_dict({"prompt": ["say red ", "say blue "] * 8})}, "dataset_sha256: "),
    "optimizer": ({"weight_decay": 0.5}, "weight_decay: None and 0.5"),
    "base": (None, "base_sha256: "),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_difference_is_named_in_every_process(what, tiny_runs, older, tmp_path):
    other, named = DIFFERENT[what]

    def work(rank):
        return trained(older if rank and what == "base" else tiny_runs, tmp_path, **((rank and other) or {}))

    for outcome in on_ranks(2, work):
        assert "Process 0 and process 1 do not run the same training" in outcome.answer and outcome.code == 0, outcome
        assert named in outcome.answer and "Start every process with the same script" in outcome.answer


def test_settings_of_one_process_may_differ(tiny_runs, tmp_path):
    """Logging, and the name of the folder with the same base."""
    copied = shutil.copytree(tiny_runs.model, tmp_path / "copy")
    own = {"run_name": "second", "disable_tqdm": False, "logging_nan_inf_filter": False, "dataloader_num_workers": 1}

    def work(rank):
        runs = TinyRuns(copied, tiny_runs.tokenizer) if rank else tiny_runs
        return trained(runs, tmp_path / "run", **(own if rank else {}))

    first, second = on_ranks(2, work)
    assert isinstance(first.answer, float) and first.answer == second.answer, first


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_on_one_machine_only_is_named(tiny_runs, tmp_path):
    """Both machines name the same folder, each on its own disk, and only the first one has the checkpoint."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    on_ranks(2, lambda rank: trained(tiny_runs, tmp_path / "0", **saving))
    assert seal.problems(tmp_path / "0/checkpoint-2") == []

    def work(rank):
        trainer = built(tiny_runs, tmp_path / str(rank), **saving, max_steps=4)
        trainer.train(resume_from_checkpoint=trainer.to_resume())

    first, second = on_ranks(2, work)
    assert "resumes from: 'checkpoint-2' and None" in first.answer
    assert "an output_dir that all of them see" in first.answer and "resumes from: 'checkpoint-2'" in second.answer
    for outcome in on_ranks(2, lambda rank: trained(tiny_runs, tmp_path / "0", **saving, seed=3)):
        assert "seed: 42 then, 3 now" in outcome.answer and "do not run the same" not in outcome.answer


@pytest.mark.parametrize("base_format", ["nvfp4", "full"])
def test_three_processes_resume_bit_for_bit(base_format, tiny_runs, tmp_path):
    """With three numbers the order of a sum decides. DDP may rebuild its buckets after its first step, and the first
    step after a resume would sum in another order."""
    options = {"save_strategy": "steps", "save_steps": 2, "gradient_checkpointing": True, "base_format": base_format}
    through, resumed = tmp_path / "through", tmp_path / "resumed"

    def run(folder, **resume):
        def work(rank):
            built(tiny_runs, folder, max_steps=4, **options).train(**resume)

        assert [outcome.answer for outcome in on_ranks(3, work)] == [None] * 3

    run(through)
    shutil.copytree(through / "checkpoint-2", resumed / "checkpoint-2")
    run(resumed, resume_from_checkpoint=True)
    (weights,) = (through / "checkpoint-4").glob("*model.safetensors")
    assert weights.read_bytes() == (resumed / "checkpoint-4" / weights.name).read_bytes()


# --- after a step -----------------------------------------------------------------------------------------------------


class Asks(TrainerCallback):
    """In one process, after the second step."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name

    def on_step_end(self, args, state, control, **kwargs):
        if self.rank == 1 and state.global_step == 2:
            setattr(control, self.name, True)


@pytest.mark.parametrize("name", ["should_training_stop", "should_save"])
def test_a_request_of_one_process_applies_to_all(name, tiny_runs, tmp_path):

    def work(rank):
        trainer = built(tiny_runs, tmp_path / "run", max_steps=4, logging_steps=1)
        trainer.add_callback(Asks(rank, name))
        trainer.train()
        return trainer.state.global_step

    first, second = on_ranks(2, work)
    assert first.answer == second.answer == (2 if name == "should_training_stop" else 4), first
    assert (seal.last_checkpoint(tmp_path / "run") is not None) == (name == "should_save")
