"""Loaded before every other conftest: without a GPU, Triton's kernels run in its interpreter, set before its import.

The longest files come first, so that no worker (`make test`) is left alone with one at the end. Imported modules are no
garbage: accelerate collects at the start of each training, which would take half a second.
"""

import gc
import os
from pathlib import Path

import torch

ROOT = Path(__file__).parent
#: files of more than half a minute of a core, those with engines in processes of their own first
LONGEST = (
    "tests/e2e/engine/test_training.py",
    "tests/e2e/engine/test_weights.py",
    "tests/e2e/engine/test_two_processes.py",
    "tests/e2e/engine/test_server.py",
    "tests/e2e/engine/test_architectures.py",
    "tests/e2e/engine/test_compiled.py",
    "tests/e2e/engine/test_live.py",
    "tests/e2e/engine/test_recipe.py",
    "tests/e2e/engine/test_real_model.py",
    "kernels/tests/test_kernels_sm90.py",
    "kernels/tests/test_kernels_interpreter.py",
    "kernels/tests/test_kernels_precompile.py",
    "tests/faults/test_r4_rollout.py",
    "tests/e2e/test_example.py",
    "tests/e2e/test_small_examples.py",
    "tests/e2e/test_recipes.py",
    "tests/e2e/test_notebooks.py",
    "tests/update/test_compiled_layers.py",
    "tests/e2e/test_architectures.py",
    "tests/test_trainer.py",
    "tests/run/test_resume.py",
)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    place = {ROOT / name: number for number, name in enumerate(LONGEST)}
    assert all(path.is_file() for path in place), "conftest.py: a file in LONGEST is not there"
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
