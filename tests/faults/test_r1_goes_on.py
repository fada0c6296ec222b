"""A machine that is not right any more refuses a run that was begun, and leaves its folder as it is: once the machine is right again,
the same command goes on from there."""

import importlib
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers.training_args
from transformers import TrainerCallback

from qerl_trl.checkpoint import seal
from qerl_trl.checks import environment
from qerl_trl.rollout.vllm import plugin
from tests.faults.catalog import fault, told
from tests.faults.stand_in import make_trainer  # noqa: F401  (a fixture)
from tests.faults.tiny_runs import (  # noqa: F401
    WEIGHTS,
    AfterTheFirstStep,
    Interrupted,
    contents,
    interrupting,
    tiny_runs,
)

#: as on a GPU; a machine without one is said to have its bf16, and trains on the CPU
OPTIONS = {"use_cpu": False, "bf16": True}


# --- what a run without vLLM needs -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def right_machine():
    """Nothing is put on where there is a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(transformers.training_args, "is_torch_bf16_gpu_available", lambda: True)
        yield


@pytest.fixture(scope="module")
def on_the_machine(right_machine, tiny_runs, tmp_path_factory):  # noqa: F811
    """(begun, whole): a run that was interrupted after its first step, and one that was not."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.raises(Interrupted):
        tiny_runs.trainer(folder / "begun", reward=interrupting(2), **OPTIONS).train()
    tiny_runs.command(folder / "whole", **OPTIONS)
    return folder / "begun", folder / "whole"


def no_cuda(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(torch.version, "cuda", None)
    patch.setattr(transformers.training_args, "is_torch_bf16_gpu_available", lambda: False)


def old_driver(patch: pytest.MonkeyPatch) -> None:
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    no_cuda(patch)
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(torch.cuda, "init", init)


def old_gpu(patch: pytest.MonkeyPatch) -> None:
    look = environment.gpu

    def gpu():
        with pytest.MonkeyPatch.context() as described:  # to us only: PyTorch would start to use it
            described.setattr(torch.cuda, "is_available", lambda: True)
            described.setattr(torch.cuda, "get_device_name", lambda *_: "A GPU")
            described.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
            return look()

    patch.setattr(environment, "gpu", gpu)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(no_cuda, ["No CUDA GPU", "use_cpu=True"], marks=fault("R1.no_cuda", recovered=True)),
        pytest.param(old_driver, ["no CUDA GPU", "qerl-trl doctor"], marks=fault("R1.driver_old", recovered=True)),
        pytest.param(old_gpu, ["7.5", "Use a GPU"], marks=fault("R1.gpu_architecture", recovered=True)),
    ],
)
def test_a_run_goes_on(spoil, words, on_the_machine, tiny_runs, tmp_path):  # noqa: F811
    begun, whole = on_the_machine
    run = shutil.copytree(begun, tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch)
        with told((ValueError, RuntimeError), *words):
            tiny_runs.command(run, **OPTIONS)
    assert contents(run) == contents(begun)
    trainer = tiny_runs.command(run, **OPTIONS)
    assert contents(run / "checkpoint-1") == contents(begun / "checkpoint-1")  # it went on from there
    assert trainer.state.global_step == 2 and (run / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


# --- vLLM --------------------------------------------------------------------------------------------------------------------------


def no_vllm(patch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    patch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else real(name, *a))


def other_vllm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plugin, "installed_version", lambda: "0.20.2")


def broken_vllm(patch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def load(name, *package):
        if name == "vllm.entrypoints.llm":
            raise ImportError("vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda")
        return real(name, *package)

    patch.setattr(plugin.importlib, "import_module", load)


@pytest.fixture
def run_with_vllm(make_trainer, tmp_path) -> Callable[..., int]:  # noqa: F811
    """`run_with_vllm(*callbacks)`: the same command each time; the step it ends at."""

    def command(*callbacks: TrainerCallback) -> int:
        trainer = make_trainer(save_strategy="steps", save_steps=1, max_steps=2)
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=trainer.to_resume())
        return trainer.state.global_step

    return command


@pytest.mark.vllm
@fault("R1.vllm_missing", recovered=True)
@fault("R1.vllm_version", recovered=True)
@fault("R1.vllm_abi", recovered=True)
def test_a_run_with_vllm_goes_on(run_with_vllm, tmp_path):
    """The engine is the stand-in: what is refused is refused before an engine is built."""
    run = Path(tmp_path / "run")
    with pytest.raises(Interrupted):
        run_with_vllm(AfterTheFirstStep())
    assert seal.last_checkpoint(run) == str(run / "checkpoint-1")
    before, saved = contents(run), contents(run / "checkpoint-1")
    for spoil, words in (
        (no_vllm, ["vLLM is not installed", "pip install 'qerl-trl[vllm]'"]),
        (other_vllm, ["vLLM 0.20.2", "pip install 'qerl-trl[vllm]'"]),
        (broken_vllm, ["undefined symbol", "--force-reinstall"]),
    ):
        with pytest.MonkeyPatch.context() as patch:
            spoil(patch)
            with told(ImportError, *words):
                run_with_vllm()
        assert contents(run) == before
    assert run_with_vllm() == 2
    assert seal.problems(run / "checkpoint-2") == []
    assert contents(run / "checkpoint-1") == saved  # it went on from there
