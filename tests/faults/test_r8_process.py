"""Memory, disk, signals: the run ends with a message that names what to change, and the same command goes on."""

import dataclasses
import importlib.util
import math
import multiprocessing
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

from qerl_trl.checkpoint import seal
from qerl_trl.cli import main as errors
from tests.faults.catalog import fault, raises
from tests.faults.tiny_runs import WEIGHTS, AfterStep, contents, interrupting
from tests.ranks import on_ranks

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 30.00 KiB. GPU 0 has a total capacity of 79.10 GiB."


def check_resumed(tiny_runs, run: Path, finished: Path) -> None:
    """Once the cause is gone, the same command resumes from the first step and ends with the same bytes."""
    assert seal.last_checkpoint(run) == str(run / "checkpoint-1")
    saved = contents(run / "checkpoint-1")
    tiny_runs.command(run)
    assert contents(run / "checkpoint-1") == saved
    assert (run / WEIGHTS).read_bytes() == (finished / WEIGHTS).read_bytes()


def trainer_with(tiny_runs, run, step, action, **options):
    trainer = tiny_runs.trainer(run, **options)
    trainer.add_callback(AfterStep(step, action))
    return trainer


# --- what a callback does ---


@pytest.mark.parametrize("without_optimizer", [False, True])
def test_ctrl_c_names_the_checkpoint_and_how_to_resume(without_optimizer, tiny_runs, tmp_path):
    def interrupt(model):
        raise KeyboardInterrupt

    trainer = trainer_with(tiny_runs, tmp_path / "run", 2, interrupt, save_only_model=without_optimizer)
    with pytest.raises(KeyboardInterrupt) as ended:
        trainer.train()
    said = "\n".join(ended.value.__notes__)
    assert "at step 2 of 2" in said and str(tmp_path / "run" / "checkpoint-1") in said
    assert ("checkpoint-1, without an optimizer" in said) is without_optimizer
    assert ("the same command resumes" in said) is not without_optimizer
    assert errors.exit_code(ended.value) == 130


# --- memory ---


@fault("R8.out_of_memory", recovered=True)
@pytest.mark.parametrize("where", ["an update", "a rollout", "the rewards"])
def test_out_of_memory_in_a_step(where, tiny_runs, finished, tmp_path):
    def fail(*_):
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    def in_the_second_step(model):
        hook = lambda *_: fail() if torch.is_grad_enabled() is (where == "an update") else None  # noqa: E731
        if where != "the rewards":
            model.get_base_model().model.layers[0].register_forward_hook(hook)

    run, reward = tmp_path / "run", interrupting(2 if where == "the rewards" else 0, by=fail)
    trainer = trainer_with(tiny_runs, run, 1, in_the_second_step, reward=reward)
    trainer.memory_plan = dataclasses.replace(trainer.memory_plan, gpu=None)
    remedy = {
        "an update": ["per_device_train_batch_size: 2 (gradient_accumulation_steps: 2)", "allow_other_settings: true"],
        "a rollout": ["max_completion_length", "use_vllm=True"],
        "the rewards": ["run them on another GPU"],
    }[where]
    words = (f"Out of memory in {where} at step 1", "30.00 KiB", *remedy, str(run / "checkpoint-1"))
    with raises(torch.OutOfMemoryError, *words):
        trainer.train()
    check_resumed(tiny_runs, run, finished)


@fault("R8.out_of_memory")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="the check before it wants vLLM")
@pytest.mark.parametrize(
    "text", [OUT_OF_MEMORY, "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."]
)
def test_out_of_memory_when_the_engine_starts(text, tiny_runs, tmp_path, monkeypatch):
    from qerl_trl.rollout.generation import QeRLVLLMGeneration

    def fail(self):
        plan = self.trainer.memory_plan
        self.trainer.memory_plan = dataclasses.replace(plan, kv_bytes=20 * 2**30, kv_least=2**30)  # as on a GPU
        raise (torch.OutOfMemoryError if text is OUT_OF_MEMORY else ValueError)(text)

    monkeypatch.setattr(QeRLVLLMGeneration, "_in_process", fail)
    with raises(torch.OutOfMemoryError, "when the engine started", text[:20], "kv_cache_memory_bytes"):
        tiny_runs.trainer(tmp_path / "run", use_vllm=True, vllm_mode="colocate")
    with raises(torch.OutOfMemoryError, "when the engine started", "Leave vllm_gpu_memory_utilization=0.9 out"):
        tiny_runs.trainer(tmp_path / "run", use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.9)


# --- disk ---


@fault("R8.disk_full", recovered=True)
@pytest.mark.parametrize("limit", [10_000, 30_000], ids=["in the weights", "in the optimizer"])
def test_disk_full(limit, tiny_runs, finished, tmp_path):
    """A limit on the size of files makes the file system refuse a write, as a full one does."""
    run = tmp_path / "run"

    def full(model):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    def train(rank):
        trainer = trainer_with(tiny_runs, run, 2, full)
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        trainer.train()

    (outcome,) = on_ranks(1, train)
    words = ("no room to write step 2", str(run), "save_total_limit=1", "Free space", "same command")
    assert not [word for word in words if word not in outcome.answer], outcome
    assert not (run / "checkpoint-2").exists()
    check_resumed(tiny_runs, run, finished)


# --- signals ---


@fault("R8.sigterm", recovered=True)
def test_sigterm(tiny_runs, finished, tmp_path, capfd):
    """A scheduler ends a run at its time limit."""

    def terminate():
        os.kill(os.getpid(), signal.SIGTERM)

    run = tmp_path / "run"
    process = multiprocessing.get_context("fork").Process(
        target=lambda: tiny_runs.trainer(run, reward=interrupting(2, by=terminate)).train()
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGTERM
    said = capfd.readouterr().err
    assert said.count("SIGTERM at step 1 of 2") == 1
    assert said.count(f"last whole checkpoint is {run / 'checkpoint-1'}: the same command resumes from it") == 1
    check_resumed(tiny_runs, run, finished)
    assert f"{run} resumes at step 1 of 2" in capfd.readouterr().out


# --- several processes ---


def two_processes(tiny_runs, run: Path, fails: bool = False) -> list[str | None]:
    """Train with gloo; the reward of the second step `fails` in the second process. Returns what each raised."""

    def work(rank):
        reward = interrupting(2 if fails and rank == 1 else 0, by=KeyError)
        tiny_runs.command(run, reward=reward, max_steps=2, save_steps=2)

    return [outcome.answer for outcome in on_ranks(2, work)]


@fault("R8.rank_fails", recovered=True)
def test_the_reward_of_one_of_two_processes_fails(tiny_runs, tmp_path):
    """No save was due: both save the last step, and the same command resumes from it."""
    run = tmp_path / "run"
    other, failed = two_processes(tiny_runs, run, fails=True)
    for word in ("Reward function 'spread_reward' raised KeyError", "resume"):
        assert word in failed and word in other
    assert "Process 1 of 2 failed" in other
    assert seal.problems(run / "checkpoint-1") == []
    assert {f"rng_state_{rank}.pth" for rank in range(2)} <= seal.sealed_files(run / "checkpoint-1")
    saved = contents(run / "checkpoint-1")
    shutil.copytree(run, alone := tmp_path / "alone")
    batch = {"per_device_train_batch_size": 8, "max_steps": 2, "save_steps": 2}  # as large as that of both
    with raises(ValueError, "world_size: 2 then, 1 now", "draw other numbers", "allow_other_settings"):
        tiny_runs.command(alone, **batch)
    assert tiny_runs.command(alone, **batch, allow_other_settings=True).state.global_step == 2
    assert two_processes(tiny_runs, run) == [None, None]
    assert contents(run / "checkpoint-1") == saved
    assert two_processes(tiny_runs, tmp_path / "whole") == [None, None]
    assert (run / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


@fault("R8.rank_fails")
def test_the_loss_of_one_of_two_processes_is_not_a_number(tiny_runs, tmp_path):
    """Before any of them takes the step."""
    run = tmp_path / "run"

    def work(rank):
        trainer = tiny_runs.trainer(run)
        compute = trainer._compute_loss

        def wrong(*args):
            return compute(*args) * (math.nan if rank and trainer.state.global_step else 1)

        trainer._compute_loss = wrong
        trainer.train()

    other, failed = (outcome.answer for outcome in on_ranks(2, work))
    assert "RuntimeError: The loss is nan at step 1" in failed
    assert "The gradient is not finite" in other and "at step 1" in other
    assert seal.last_checkpoint(run) == str(run / "checkpoint-1")
