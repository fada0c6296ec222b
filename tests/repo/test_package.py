"""The package as a whole: lazy names, declared dependencies, no side effects on other packages."""

import ast
import importlib.metadata
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import qerl_trl

ROOT = Path(__file__).resolve().parents[2]


def test_public_names_are_sorted_and_resolve():
    assert qerl_trl.__all__ == sorted(qerl_trl.__all__)
    for name in qerl_trl.__all__:
        assert getattr(qerl_trl, name) is not None
    assert not hasattr(qerl_trl, "NoSuchThing")


def test_the_wheel_plans_and_trains_in_an_empty_folder(tmp_path):
    site, pip = tmp_path / "site", [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", site, *tmp_path.glob("*.whl")], check=True)
    folders = re.findall(r'_named\(name, "(\w+)"', (ROOT / "src/qerl_trl/support/recipes.py").read_text())
    assert folders and all((site / "qerl_trl/examples" / folder).is_dir() for folder in folders)
    options = "--max_steps 1 --eval_problems 4 --per_device_train_batch_size 16".split()
    for words in (["plan", "--config", "qwen3-8b"], ["train", "--config", "embedded", *options]):
        environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, site / "bin/qerl-trl", *words], check=True, cwd=tmp_path, env=environment)
    assert (tmp_path / "runs/embedded/adapter_model.safetensors").is_file()


def test_every_import_is_of_a_declared_dependency():
    """An indirect one may disappear: huggingface_hub 2 brings httpx2 instead of httpx."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    declared = {canonicalize_name(Requirement(text).name) for text in requirements}
    modules = {"qerl_trl", "qerl_nvfp4", *sys.stdlib_module_names}
    for file in sorted((ROOT / "src" / "qerl_trl").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for module in {name.partition(".")[0] for name in names} - modules:
                # a module of the same name as its distribution need not be installed here
                brought_by = {module, *importlib.metadata.packages_distributions().get(module, ())}
                assert {canonicalize_name(name) for name in brought_by} & declared, f"{file.name} imports {module}"
                modules.add(module)


def test_an_unused_import_changes_nothing():
    """The import registers and rebinds nothing in transformers or TRL; building a trainer only meanwhile."""
    code = """
from transformers.quantizers import auto
import trl.trainer.grpo_trainer as grpo
def state():
    return dict(auto.AUTO_QUANTIZER_MAPPING), dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING), dict(vars(grpo))
before = state()
import qerl_trl
print(state() == before)
mixin = qerl_trl.QeRLGRPOTrainer.__new__(qerl_trl.QeRLGRPOTrainer)
from qerl_trl.run.base import own_vllm_generation
with own_vllm_generation(mixin):
    print(grpo.VLLMGeneration is before[2]["VLLMGeneration"])
print(grpo.VLLMGeneration is before[2]["VLLMGeneration"])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False", "True"]
