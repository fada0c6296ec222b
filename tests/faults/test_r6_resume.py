"""A damaged checkpoint costs the steps since the one before, and an interrupted run ends as it would have without."""

import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from qerl_trl.checkpoint import seal
from qerl_trl.publish import export
from qerl_trl.publish.quantize import quantize_folder
from qerl_trl.run.resume import REFERENCE_NAME
from tests.faults.catalog import fault, raises
from tests.faults.tiny_runs import (
    PROMPTS,
    WEIGHTS,
    Interrupted,
    contents,
    edit,
    flip_a_bit,
    interrupting,
    poison,
    spread_reward,
)

STATE = "trainer_state.json"


def case(*values):
    """Parameters of one case, the last being its fault."""
    *values, name = values
    return pytest.param(*values, marks=fault(name, recovered=True))


# --- the newest checkpoint is damaged ---


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000])


def without(*names: str):
    return lambda folder: [(folder / name).unlink() for name in names]


def half(stored: dict) -> dict:
    return dict(sorted(stored.items())[::2])


HALF_WRITTEN = ("optimizer.pt", "scheduler.pt", "rng_state.pth", STATE, seal.MANIFEST_NAME)
DAMAGE = [
    case(cut, WEIGHTS, "R6.damaged"),
    case(lambda folder: flip_a_bit(folder / WEIGHTS), WEIGHTS, "R6.damaged"),
    case(without(WEIGHTS), WEIGHTS, "R6.damaged"),
    case(lambda folder: edit(folder / WEIGHTS, half), WEIGHTS, "R6.missing_tensors"),
    case(without("optimizer.pt"), "optimizer.pt is missing", "R6.missing_optimizer"),
    case(without(*HALF_WRITTEN), f"{seal.MANIFEST_NAME} is missing", "R6.half_written_folder"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGE)
def test_the_same_command_resumes_from_the_checkpoint_before(damage, named, tiny_runs, finished, tmp_path, caplog):
    run = tmp_path / "run"  # killed before its final adapter was written
    for step in (1, 2):
        shutil.copytree(finished / f"checkpoint-{step}", run / f"checkpoint-{step}")
    damage(run / "checkpoint-2")
    tiny_runs.command(run)
    assert "Skipping" in caplog.text and "checkpoint-2" in caplog.text and named in caplog.text
    assert "Looking for an older checkpoint" in caplog.text
    for written in (run, run / "checkpoint-2"):
        assert seal.problems(written) == []
        assert (written / WEIGHTS).read_bytes() == (finished / "checkpoint-2" / WEIGHTS).read_bytes()


@fault("R6.missing_optimizer", recovered=True)
def test_a_checkpoint_without_an_optimizer_is_not_resumed_unasked(finished, tiny_runs, tmp_path):
    """As save_only_model leaves it."""
    run = shutil.copytree(finished, tmp_path / "run")
    without("optimizer.pt", "scheduler.pt")(run / "checkpoint-2")
    sealed = seal.read_manifest(run / "checkpoint-2")
    seal.seal(run / "checkpoint-2", sealed["run"], order=sealed["order"])
    trainer = tiny_runs.trainer(run, max_steps=3)
    with raises(ValueError, "checkpoint-2 keeps no optimizer state", "another checkpoint", "allow_other_settings=True"):
        trainer.train(resume_from_checkpoint=trainer.to_resume())
    trainer.args.allow_other_settings = True
    trainer.train(resume_from_checkpoint=trainer.to_resume())
    assert trainer.state.global_step == 3
    assert seal.recorded_run(run / "checkpoint-3")["changed"] == ["optimizer: a new one from step 2 on"]


@fault("R6.missing_tensors")
@pytest.mark.parametrize(
    ("change", "words"), [(half, ("lacks", "whole checkpoint")), (poison, ("NaN or infinite", WEIGHTS))]
)
def test_the_tensors_of_a_checkpoint_without_a_seal_are_checked(change, words, finished, tiny_runs, tmp_path):
    """From another trainer, named explicitly; PEFT would fill missing tensors with random numbers."""
    foreign = shutil.copytree(finished / "checkpoint-1", tmp_path / "foreign")
    (foreign / seal.MANIFEST_NAME).unlink()
    edit(foreign / WEIGHTS, change)
    trainer = tiny_runs.trainer(tmp_path / "on")
    with raises(ValueError, str(foreign), *words):
        trainer.train(resume_from_checkpoint=str(foreign))
    assert trainer.state.global_step == 0


@fault("R6.missing_optimizer")
@pytest.mark.parametrize("sealed", [True, False], ids=["export", "without a seal"])
def test_an_adapter_is_no_checkpoint(sealed, tiny_runs, tmp_path):
    trainer = tiny_runs.trainer(tmp_path / "run")
    folder = str(tmp_path / "adapter")
    export.save_adapter(trainer, folder) if sealed else trainer.model.save_pretrained(folder)
    why = "is an export (adapter)" if sealed else f"has no {STATE}"
    with raises(ValueError, folder, why, "name a checkpoint-<step>", "load_adapter"):
        trainer.train(resume_from_checkpoint=folder)


# --- interrupted and started again ---


def check_announced(text: str, run: Path, newest: str, wanted: int) -> None:
    """A run has printed once from which checkpoint it resumes, and the alternative."""
    step = newest.removeprefix("checkpoint-")
    assert text.count("resumes at step") == 1
    for word in (f"{run} resumes at step {step} of {wanted} (epoch ", f"from {newest}", "choose another output_dir"):
        assert word in text


QUIET = {"aqn": False, "max_steps": 4}
LATER = {**QUIET, "gradient_accumulation_steps": 8, "save_steps": 3}  # two updates per epoch
# two updates share a rollout: a save between them waits for the second
INSIDE = {**QUIET, "steps_per_generation": 2, "max_steps": 6, "save_steps": 3}
INTERRUPTED = [
    case(INSIDE, 3, "checkpoint-4", "R6.resume_inside_buffer"),
    case({**QUIET, "num_iterations": 2}, 2, "checkpoint-2", "R6.resume_num_iterations"),
    case(LATER, 4, "checkpoint-3", "R6.resume"),
    case({"aqn_sigma_start": 0.5, "max_steps": 4}, 4, "checkpoint-3", "R6.resume_with_noise"),
]


@pytest.mark.parametrize(("options", "rollout", "newest"), INTERRUPTED)
def test_an_interrupted_run_ends_as_if_it_had_not_been(options, rollout, newest, tiny_runs, tmp_path, capsys, caplog):
    whole = tiny_runs.command(tmp_path / "whole", **options)
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        tiny_runs.command(run, reward=interrupting(rollout), **options)
    assert seal.last_checkpoint(run) == str(run / newest)
    assert "resumes at" not in capsys.readouterr().out  # of first starts
    resumed = tiny_runs.command(run, **options)
    check_announced(capsys.readouterr().out, run, newest, options["max_steps"])
    moved = "rollout (2 steps each): an exact resume starts between rollouts"
    assert (moved in caplog.text) is (options is INSIDE or "num_iterations" in options)
    assert (run / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()
    assert options is not LATER or resumed._resumed.epoch > 1
    assert "aqn" in options or any(entry.get("aqn/sigma") for entry in whole.state.log_history)


@fault("R6.resume_after_sigkill", recovered=True)
@pytest.mark.parametrize("moment", ["in a rollout", "in a save"])
def test_a_killed_run_ends_as_if_it_had_not_been(moment, tiny_runs, finished, tmp_path, capsys, caplog):
    run = tmp_path / "run"

    def killed():
        def kill(*args):
            os.kill(os.getpid(), signal.SIGKILL)

        if moment == "in a save":  # of the second checkpoint, before its seal
            seals, whole = [], seal.seal
            seal.seal = lambda *args, **named: kill() if seals else seals.append(whole(*args, **named))
        tiny_runs.trainer(run, reward=interrupting(2, by=kill) if moment == "in a rollout" else interrupting(0)).train()

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert seal.last_checkpoint(run) == str(run / "checkpoint-1")
    tiny_runs.command(run)
    check_announced(capsys.readouterr().out, run, "checkpoint-1", 2)
    half = "checkpoint-2: qerl_manifest.json is missing: the run was stopped before the folder was complete"
    assert (half in caplog.text) is (moment == "in a save")
    assert (run / WEIGHTS).read_bytes() == (finished / WEIGHTS).read_bytes()


@fault("R6.resume", recovered=True)
def test_a_moving_reference_is_resumed(tiny_runs, tmp_path, caplog):
    """With sync_ref_model TRL moves the reference towards the policy after each step."""

    def full(folder, reward=spread_reward):
        moving = {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
        return tiny_runs.trainer(folder, reward, base_format="full", aqn=False, learning_rate=1e-2, **moving)

    whole = full(tmp_path / "whole")
    whole.train()
    with pytest.raises(Interrupted):
        full(tmp_path / "run", interrupting(2)).train()
    shutil.copytree(tmp_path / "run/checkpoint-1", tmp_path / "without")
    second = full(tmp_path / "run")
    second.train(resume_from_checkpoint=True)
    for name in ("model", "ref_model"):
        pairs = zip(getattr(whole, name).named_parameters(), getattr(second, name).named_parameters(), strict=True)
        assert all(torch.equal(a, b) for (_, a), (_, b) in pairs), name
    (tmp_path / "without" / REFERENCE_NAME).unlink()
    seal.seal(tmp_path / "without", seal.recorded_run(tmp_path / "without"))
    full(tmp_path / "on").train(resume_from_checkpoint=str(tmp_path / "without"))
    assert f"without has no {REFERENCE_NAME}" in caplog.text


@fault("R6.finished_run_again", recovered=True)
def test_a_finished_run_stays_finished(tiny_runs, finished, tmp_path, caplog):
    run = shutil.copytree(finished, tmp_path / "run")
    for _ in range(2):
        assert tiny_runs.command(run).state.global_step == 2
        assert (run / WEIGHTS).read_bytes() == (finished / WEIGHTS).read_bytes()
    assert not (run / "checkpoint-3").exists()
    assert "2 of 2 steps are done. Nothing is trained." in caplog.text


class Decreasing(TrainerCallback):
    """The first checkpoint is the best one; then `action`."""

    def __init__(self, action):
        self.action = action

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_reward"] = -float(state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.action()


@fault("R6.finished_run_again")
@fault("R6.damaged", recovered=True)
@pytest.mark.parametrize("damaged", [False, True])
def test_the_best_weights_are_recorded_as_such(damaged, tiny_runs, tmp_path, caplog):
    """If the best checkpoint is damaged, the weights stay those of the last step."""
    run = tmp_path / "run"
    best = {"load_best_model_at_end": True, "metric_for_best_model": "reward", "greater_is_better": True}
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "given": {"eval_dataset": PROMPTS.select(range(4))}}
    trainer = tiny_runs.trainer(run, max_steps=3, **evaluated, **best)
    trainer.add_callback(Decreasing(lambda: damaged and flip_a_bit(run / "checkpoint-1" / WEIGHTS)))
    trainer.train()
    trainer.save_model()
    of = "checkpoint-3" if damaged else "checkpoint-1"
    assert (run / WEIGHTS).read_bytes() == (run / of / WEIGHTS).read_bytes()
    changed = None if damaged else ["weights: those of checkpoint-1 (load_best_model_at_end)"]
    assert seal.recorded_run(run).get("changed") == changed
    assert "changed" not in seal.recorded_run(run / "checkpoint-3")
    assert damaged is ("checkpoint-1 is damaged" in caplog.text and "last step's weights stay" in caplog.text)


# --- with other settings ---


def longer_reward(completions, **kwargs):
    return spread_reward(completions)


@pytest.fixture
def refused(tiny_runs, finished):
    """`refused(line, **other)`: the finished run's folder is refused to a command with other settings."""

    def check(line: str, **other) -> None:
        before = contents(finished)
        with raises(ValueError, str(finished), line, "another output_dir"):
            tiny_runs.command(finished, **{"max_steps": 3, **other})
        assert contents(finished) == before

    return check


OTHER = [
    pytest.param(
        {"dataset": PROMPTS.select(range(12))}, "dataset_sha256: the training", marks=fault("R6.resume_other_data")
    ),
    pytest.param(
        {"reward": longer_reward}, "rewards: ['spread_reward'] then, ['longer", marks=fault("R6.resume_other_data")
    ),
    pytest.param({"optim": "sgd"}, "optim: not set then, 'sgd' now", marks=fault("R6.resume_other_data")),
    pytest.param({"base_format": "bf16"}, "base_format: 'nvfp4' then, 'bf16' now", marks=fault("R6.arms_share_folder")),
    pytest.param({"aqn": False}, "aqn: True then, False now", marks=fault("R6.arms_share_folder")),
]


@pytest.mark.parametrize(("other", "line"), OTHER)
def test_other_data_rewards_and_arms_are_refused(other, line, refused):
    refused(line, **other)


# --- a folder belongs to one run ---


@fault("R6.two_runs_one_folder", recovered=True)
def test_a_second_process_is_refused_the_folder(tiny_runs, finished, tmp_path):
    """The first is in its second step, and is killed: then the folder is free."""
    parallel = multiprocessing.get_context("fork")
    training = parallel.Event()

    def wait():
        training.set()
        time.sleep(600)

    run = tmp_path / "run"
    first = parallel.Process(target=lambda: tiny_runs.trainer(run, reward=interrupting(2, by=wait)).train())
    first.start()
    try:
        assert training.wait(60)
        before = contents(run)
        with raises(RuntimeError, str(run), f"process {first.pid}", "Another run", "choose another output_dir"):
            tiny_runs.command(run)
        assert contents(run) == before and seal.last_checkpoint(run) == str(run / "checkpoint-1")
    finally:
        first.kill()
        first.join()
    tiny_runs.command(run)
    assert (run / WEIGHTS).read_bytes() == (finished / WEIGHTS).read_bytes()


@fault("R6.arms_share_folder", recovered=True)
def test_a_run_is_not_saved_over_another_ones_by_name(finished, tiny_runs, tmp_path):
    other = shutil.copytree(finished, tmp_path / "other")
    trainer = tiny_runs.trainer(tmp_path / "run", learning_rate=5e-2)
    export.save_adapter(trainer, tmp_path / "export")
    before = contents(tmp_path)
    with raises(ValueError, str(other), "learning_rate: 0.001 then, 0.05 now", "save_model('<folder>')"):
        trainer.save_model(str(other))
    with raises(ValueError, str(tmp_path / "export"), "holds an export (adapter)", "save_model('<folder>')"):
        trainer.save_model(tmp_path / "export")
    assert contents(tmp_path) == before
    for _ in range(2):
        trainer.save_model(tmp_path / "mine")


@fault("R7.folder_edited")
def test_an_export_does_not_take_the_place_of_a_run(finished, tiny_runs, tiny_model_dir, tmp_path):
    """`overwrite` would remove it with all its checkpoints."""
    folder = shutil.copytree(finished, tmp_path / "folder")
    before, found = contents(folder), "holds more than an export (checkpoint-1, checkpoint-2, trainer_state.json"
    with raises(ValueError, str(folder), found, "Name another folder"):
        export.save_adapter(tiny_runs.trainer(folder), folder, overwrite=True)
    with raises(ValueError, str(folder), found):
        quantize_folder(tiny_model_dir("qwen2"), folder, overwrite=True)
    assert contents(folder) == before
