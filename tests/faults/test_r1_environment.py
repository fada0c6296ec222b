"""A machine on which a run cannot work, refused before a model is loaded."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers.training_args

from qerl_trl import QeRLConfig, QeRLGRPOTrainer
from qerl_trl.checks import environment
from qerl_trl.rollout.vllm import plugin
from tests.faults.catalog import fault, raises

TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040)."


def trainer_with(tmp_path, **options):
    """A trainer of a missing model: the refusals here come before a model is loaded."""
    config = QeRLConfig(str(tmp_path), report_to="none", **{"use_cpu": True, "bf16": False, **options})
    return QeRLGRPOTrainer("nobody/nothing", lambda **_: [], config, None)


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(transformers.training_args, "is_torch_bf16_gpu_available", lambda: False)


@pytest.fixture
def gpu_of(monkeypatch):
    """`gpu_of(capability)`: a GPU as PyTorch would describe it."""

    def describe(capability):
        answers = {"is_available": True, "get_device_name": "A GPU", "current_device": 0}
        answers["get_device_capability"] = capability
        for name, value in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)

    return describe


def test_no_cuda(no_cuda, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with raises(ValueError, "no CUDA GPU", "qerl-trl doctor", "use_cpu=True"):
        QeRLConfig(str(tmp_path))


def test_driver_old(no_cuda, tmp_path, monkeypatch):
    def init():
        raise RuntimeError(f"{TOO_OLD} Please update.\nmore")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    with raises(RuntimeError, torch.__version__, TOO_OLD, "update the driver"):
        trainer_with(tmp_path, use_cpu=False)


def test_gpu_architecture(gpu_of, tmp_path):
    gpu_of((7, 5))
    config = QeRLConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    config.use_cpu = False
    with raises(RuntimeError, "A GPU", "7.5", "Ampere"):
        environment.check(config)
    gpu_of((8, 6))
    assert not any(problem.fatal for problem in environment.gpu())


@fault("R1.vllm_missing")
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_vllm_missing(monkeypatch, tmp_path, mode):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else real(name, *a))
    with raises(ImportError, "vLLM is not installed", "use_vllm=False", "pip install 'qerl-trl[vllm]'"):
        trainer_with(tmp_path, use_vllm=True, vllm_mode=mode)


@fault("R1.vllm_version")
@pytest.mark.parametrize("version", ["0.20.2", "0.25.0"])
def test_vllm_version(monkeypatch, version):
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(plugin, "installed_version", lambda: version)
    tested = f"{plugin.OLDEST_VLLM} to {plugin.NEWEST_VLLM}"
    with raises(ImportError, f"vLLM {version}", tested, "pip install 'qerl-trl[vllm]'"):
        plugin.check_vllm()


@pytest.fixture
def broken_vllm(tmp_path, monkeypatch):
    """Folder with a vLLM that was compiled for another PyTorch."""
    (tmp_path / "vllm").mkdir()
    text = "raise ImportError('vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda')"
    (tmp_path / "vllm" / "__init__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(plugin, "check_vllm", lambda *_: None)
    return tmp_path


@fault("R1.vllm_abi")
def test_doctor_imports_vllm(broken_vllm):
    (problem,) = environment.vllm_problems()
    assert problem.fatal and "undefined symbol" in problem.what and "vLLM" in problem.what
    assert "pip install --force-reinstall vllm" in problem.remedy


@fault("R1.vllm_abi")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="TRL imports a vLLM that is installed")
def test_a_broken_vllm_is_named_where_trl_imports_it(broken_vllm):
    done = subprocess.run([sys.executable, "-c", "import qerl_trl.trainer"], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: vLLM") and "undefined symbol" in last
    assert torch.__version__.split("+")[0] in last and "pip install --force-reinstall vllm" in last


@fault("R8.disk_full")
def test_disk_too_small_for_the_run(monkeypatch, tmp_path):
    free, total = int(2.5e9), 2**40
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(total, total - free, free))
    folder = Path(tmp_path) / "not" / "there"
    assert environment.disk(folder, int(1e9)) == []
    (problem,) = environment.disk(folder, int(3e9))
    assert problem.fatal and "2.5 GB free" in problem.what and "Free space" in problem.remedy
