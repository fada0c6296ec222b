"""Memory, disk, signals: the run ends with a message that says what to change, and the same command goes on as if nothing had been."""

import dataclasses
import importlib.util
import multiprocessing
import os
import resource
import shutil
import signal
import time
import types
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from qerl_trl.checkpoint import seal
from qerl_trl.cli import main as errors
from qerl_trl.memory.formulas import predicted_bytes, shape_of
from qerl_trl.memory.of_trainer import OutOfMemory
from qerl_trl.memory.plan import Gpu, plan_run, relief
from qerl_trl.memory.workload import Workload
from qerl_trl.rollout.engine import RolloutError
from tests.ranks import on_ranks
from tests.shapes import SEVEN_B

from .catalog import fault, told
from .stand_in import StandIn, make_trainer  # noqa: F401
from .tiny_runs import WEIGHTS, AfterTheFirstStep, Interrupted, contents, interrupting, spread_reward, tiny_runs  # noqa: F401

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 30.00 KiB. GPU 0 has a total capacity of 79.10 GiB of which 2 MiB is free."
)
#: a whole run of two steps would take the place of each test's own
STEPS = {"max_steps": 2, "save_steps": 1}


@pytest.fixture(scope="module")
def whole(tiny_runs, tmp_path_factory):  # noqa: F811
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    tiny_runs.command(folder, **STEPS)
    return folder


def goes_on(tiny_runs, run: Path, whole: Path) -> bool:  # noqa: F811
    """Whether the same command, once the cause is gone, goes on from the first step and ends with the same bytes."""
    assert seal.last_checkpoint(run) == str(run / "checkpoint-1")
    saved = contents(run / "checkpoint-1")
    tiny_runs.command(run, **STEPS)
    assert contents(run / "checkpoint-1") == saved
    return (run / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


# --- what a callback does --------------------------------------------------------------------------------------------------------------


def test_ctrl_c_says_how_to_go_on(tiny_runs, tmp_path):  # noqa: F811
    """It ended in a traceback of the bar's or torch's, which says neither that a checkpoint is there nor that the same command takes it."""

    class Interrupts(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise KeyboardInterrupt

    trainer = tiny_runs.trainer(tmp_path / "run", **STEPS)
    trainer.add_callback(Interrupts())
    with pytest.raises(KeyboardInterrupt) as ended:
        trainer.train()
    said = "\n".join(ended.value.__notes__)
    for word in (
        "at step 2 of 2",
        str(tmp_path / "run" / "checkpoint-1"),
        "the same command goes on",
    ):
        assert word in said
    assert errors.exit_code(ended.value) == 130


def test_ctrl_c_promises_nothing_that_is_refused(tiny_runs, tmp_path):  # noqa: F811
    class Interrupts(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise KeyboardInterrupt

    trainer = tiny_runs.trainer(tmp_path / "run", save_only_model=True, **STEPS)
    trainer.add_callback(Interrupts())
    with pytest.raises(KeyboardInterrupt) as ended:
        trainer.train()
    said = "\n".join(ended.value.__notes__)
    assert "checkpoint-1, without an optimizer" in said and "goes on from it" not in said.replace(
        "no run goes on from it", ""
    )


def test_an_adapter_that_is_switched_off_is_not_trained(tiny_runs, tmp_path):  # noqa: F811
    class LooksAtTheBase(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            model.disable_adapter_layers()

    trainer = tiny_runs.trainer(tmp_path / "run", gradient_checkpointing=True, **STEPS)
    trainer.add_callback(LooksAtTheBase())
    with told(RuntimeError, "No trained parameter got a gradient at step 1", "switched off", "resume"):
        trainer.train()


# --- memory ------------------------------------------------------------------------------------------------------------------------


@fault("R8.out_of_memory_in_step", recovered=True)
@pytest.mark.parametrize("where", ["an update", "a rollout", "the rewards"])
def test_out_of_memory_in_a_step(where, tiny_runs, whole, tmp_path):  # noqa: F811
    def fail(*_):
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    class InTheSecondStep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            hook = lambda *_: fail() if torch.is_grad_enabled() is (where == "an update") else None  # noqa: E731
            if where != "the rewards":
                trainer.model.get_base_model().model.layers[0].register_forward_hook(hook)

    run = tmp_path / "run"
    trainer = tiny_runs.trainer(run, reward=interrupting(2 if where == "the rewards" else 0, by=fail), **STEPS)
    trainer.add_callback(InTheSecondStep())
    # the machine has more than the model takes
    trainer.memory_plan = dataclasses.replace(trainer.memory_plan, gpu=None)
    remedy = {
        "an update": ["per_device_train_batch_size: 2 (gradient_accumulation_steps: 2)", "allow_other_settings: true"],
        "a rollout": ["max_completion_length", "use_vllm=True"],
        "the rewards": ["run them on another GPU"],
    }[where]
    with told(
        torch.OutOfMemoryError, f"Out of memory in {where} at step 1", "30.00 KiB", *remedy, str(run / "checkpoint-1")
    ):
        trainer.train()
    assert goes_on(tiny_runs, run, whole)


@fault("R8.out_of_memory_at_start")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="the check before it wants vLLM")
@pytest.mark.parametrize(
    "text", [OUT_OF_MEMORY, "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."]
)
def test_out_of_memory_when_the_engine_starts(text, tiny_runs, tmp_path, monkeypatch):  # noqa: F811
    from qerl_trl.rollout.generation import QeRLVLLMGeneration

    def fail(self):
        plan = self.trainer.memory_plan
        self.trainer.memory_plan = dataclasses.replace(plan, kv_bytes=20 * 2**30, kv_least=2**30)  # as on a GPU
        raise (torch.OutOfMemoryError if text is OUT_OF_MEMORY else ValueError)(text)

    monkeypatch.setattr(QeRLVLLMGeneration, "_in_process", fail)
    with told(torch.OutOfMemoryError, "when the engine started", text[:20], "kv_cache_memory_bytes"):
        tiny_runs.trainer(tmp_path / "run", use_vllm=True, vllm_mode="colocate")
    with told(torch.OutOfMemoryError, "when the engine started", "Leave vllm_gpu_memory_utilization=0.9 out"):
        tiny_runs.trainer(tmp_path / "run", use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.9)


@fault("R8.out_of_memory_at_start", recovered=True)
def test_out_of_memory_while_the_model_is_loaded(tiny_runs, whole, tmp_path, monkeypatch):  # noqa: F811
    """Of a run that goes on: another process has its memory now, and later no more."""
    from qerl_trl.nvfp4 import quantizer

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        tiny_runs.trainer(run, reward=interrupting(2), **STEPS).train()
    before = contents(run)
    with monkeypatch.context() as short:
        short.setattr(quantizer.NVFP4HfQuantizer, "_process_model_before_weight_loading", fail)
        with told(torch.OutOfMemoryError, "while the model was loaded", "larger GPU", "qerl-trl plan"):
            tiny_runs.command(run, **STEPS)
    assert contents(run) == before
    assert goes_on(tiny_runs, run, whole)


@fault("R8.out_of_memory_at_start", recovered=True)
@pytest.mark.vllm
def test_a_run_goes_on_after_its_engine_had_no_memory(make_trainer, tmp_path):  # noqa: F811
    """The engine is the stand-in, which draws its own numbers: the run goes on from the step that was done, to the last."""

    def command(*callbacks, engine=StandIn):
        trainer = make_trainer(engine=engine, save_strategy="steps", save_steps=1)
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=trainer.to_resume())
        return trainer.state.global_step

    class Short(StandIn):
        def __init__(self, policy):
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        command(AfterTheFirstStep())
    before, saved = contents(run), contents(run / "checkpoint-1")
    with told(torch.OutOfMemoryError, "when the engine started", "30.00 KiB"):
        command(engine=Short)
    assert contents(run) == before and seal.last_checkpoint(run) == str(run / "checkpoint-1")
    assert command() == 2
    assert contents(run / "checkpoint-1") == saved  # it went on from there


def test_what_is_proposed_frees_what_was_missing():
    """By the same sums as the plan, and never by giving the KV cache what became free."""
    work = Workload(batch=8, completions=64, rollout="colocate")
    shape, gib = shape_of(SEVEN_B), 2**30
    plan = plan_run(shape, work, Gpu.of_gib(24))

    model = predicted_bytes(shape, work)
    assert relief(plan, shape, model, "update", gib) == ("vllm_enable_sleep_mode: true",)
    asleep = plan_run(shape, Workload(batch=8, completions=64, rollout="colocate", sleep=True), Gpu.of_gib(24))
    assert relief(asleep, shape, model, "update", gib)[0].startswith("per_device_train_batch_size")
    assert relief(asleep, shape, model, "update", 2**50) == ()


# --- disk --------------------------------------------------------------------------------------------------------------------------


@fault("R8.disk_full", recovered=True)
@pytest.mark.parametrize("limit", [10_000, 30_000], ids=["in the weights", "in the optimizer"])
def test_disk_full(limit, tiny_runs, whole, tmp_path):  # noqa: F811
    """A limit on the size of files makes the file system refuse a write, as a full one does."""
    run, (here, there) = tmp_path / "run", multiprocessing.Pipe()

    class Full(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    def child():
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        trainer = tiny_runs.trainer(run, **STEPS)
        trainer.add_callback(Full())
        try:
            trainer.train()
        except OSError as error:
            there.send((str(error), sorted(os.listdir(run))))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert here.poll(), "it did not say so"
    text, left = here.recv()
    for word in (
        "no room to write step 2",
        str(run),
        "save_total_limit=1",
        "Free space",
        str(run / "checkpoint-1"),
        "same command",
    ):
        assert word in text
    assert "checkpoint-2" not in left
    assert goes_on(tiny_runs, run, whole)


# --- signals -----------------------------------------------------------------------------------------------------------------------


@fault("R8.sigterm", recovered=True)
def test_sigterm(tiny_runs, whole, tmp_path, capfd):  # noqa: F811
    """As a scheduler ends a run whose time is up."""

    def terminate():
        os.kill(os.getpid(), signal.SIGTERM)

    run = tmp_path / "run"
    process = multiprocessing.get_context("fork").Process(
        target=lambda: tiny_runs.trainer(run, reward=interrupting(2, by=terminate), **STEPS).train()
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGTERM
    said = capfd.readouterr().err
    for word in (
        "SIGTERM at step 1 of 2",
        f"The last whole checkpoint is {run / 'checkpoint-1'}: the same command goes on from it",
    ):
        assert said.count(word) == 1
    assert goes_on(tiny_runs, run, whole)
    assert f"{run} goes on at step 1 of 2" in capfd.readouterr().out


def test_sigterm_is_left_to_who_handles_it(tiny_runs, tmp_path, capfd):  # noqa: F811
    """A script's own handler stays; a process forked in a training ends as ever and says nothing of the run; afterwards all is as before."""
    seen: list[int] = []

    def reward(completions, **kwargs):
        if before_it is signal.SIG_DFL:
            forked = multiprocessing.get_context("fork")
            running = (
                forked.Event()
            )  # what arrives while a fork is under way is lost: Python forgets the signals of its parent there
            child = forked.Process(target=lambda: (running.set(), time.sleep(60)))
            child.start()
            running.wait(60)
            child.terminate()
            child.join(60)
            seen.append(child.exitcode)
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        return spread_reward(completions)

    for name, before_it in (("ours", signal.SIG_DFL), ("own", lambda *_: seen.append(1))):
        outside = signal.signal(signal.SIGTERM, before_it)
        try:
            tiny_runs.trainer(tmp_path / name, reward=reward, max_steps=1, save_strategy="no").train()
            assert signal.getsignal(signal.SIGTERM) is before_it
        finally:
            signal.signal(signal.SIGTERM, outside)
    assert seen == [-signal.SIGTERM, 1]
    assert "SIGTERM at step" not in capfd.readouterr().err


# --- several processes -------------------------------------------------------------------------------------------------------------


def two_processes(tiny_runs, run: Path, fails: bool = False) -> list[str | None]:  # noqa: F811
    """One training of two processes with gloo; the reward of the second step `fails` in the second one. What each raised."""

    def work(rank):
        reward = interrupting(2 if fails and rank == 1 else 0, by=KeyError)
        tiny_runs.command(run, reward=reward, max_steps=2, save_steps=2)

    return [outcome.answer for outcome in on_ranks(2, work)]


@fault("R8.rank_fails", recovered=True)
def test_the_reward_of_one_of_two_processes_fails(tiny_runs, tmp_path):  # noqa: F811
    """No save was due: both save the step that has ended, and the same command goes on from there."""
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
    with told(ValueError, "world_size: 2 then, 1 now", "draw other numbers", "allow_other_settings"):
        tiny_runs.command(alone, **batch)
    assert tiny_runs.command(alone, **batch, allow_other_settings=True).state.global_step == 2
    assert two_processes(tiny_runs, run) == [None, None]
    assert contents(run / "checkpoint-1") == saved  # it went on from there
    assert two_processes(tiny_runs, tmp_path / "whole") == [None, None]
    assert (run / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


@fault("R8.rank_fails")
@pytest.mark.parametrize("how", ["its loss is not a number", "it raises"])
def test_one_of_two_processes_fails_in_an_update(how, tiny_runs, tmp_path):  # noqa: F811
    """Before any of them takes the step."""
    run = tmp_path / "run"

    def work(rank):
        trainer = tiny_runs.trainer(run, **STEPS)
        compute = trainer._compute_loss

        def wrong(*args):
            loss = compute(*args)
            if rank == 0 or trainer.state.global_step == 0:
                return loss
            if how == "it raises":
                raise KeyError("by itself")
            return loss * float("nan")

        trainer._compute_loss = wrong
        trainer.train()

    other, failed = (outcome.answer for outcome in on_ranks(2, work))
    if how == "it raises":
        assert "by itself" in failed and isinstance(other, str)  # gloo's error, if the launcher has not ended it
    else:
        assert "RuntimeError: The loss is nan at step 1" in failed
        assert "The gradient is not finite" in other and "at step 1" in other
    assert seal.last_checkpoint(run) == str(run / "checkpoint-1")


@fault("R8.out_of_memory_in_step")
def test_an_engine_that_runs_out_says_what_it_may_have():
    """It is reported as any failed rollout is, and keeps its kind."""
    work = Workload(batch=8, completions=64, rollout="colocate")
    trainer = types.SimpleNamespace(memory_plan=plan_run(shape_of(SEVEN_B), work, Gpu.of_gib(80)))
    had = trainer.memory_plan.kv_bytes
    error = RolloutError("The rollout failed in vLLM: CUDA out of memory. Tried to allocate 1.00 GiB.")
    with told(RolloutError, "failed in vLLM", "Tried to allocate 1.00 GiB", "kv_cache_memory_bytes", f"(it had {had})"):
        OutOfMemory(trainer).explain(error, RolloutError)
