"""A tiny model in NVFP4, and folders to damage."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qerl_trl.nvfp4.config import NVFP4Config


@pytest.fixture(scope="package")
def quantized(tiny_model_dir):
    """A tiny Qwen2 in NVFP4. Read-only."""
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"), quantization_config=NVFP4Config())


@pytest.fixture
def edited(tmp_path) -> Callable[..., Path]:
    """`edited(folder, change)`: a copy of a checkpoint folder, its tensors changed in place by `change`."""

    def edit(folder: Path, change: Callable[[dict], object]) -> Path:
        copy = shutil.copytree(folder, tmp_path / "edited")
        tensors = load_file(copy / "model.safetensors")
        change(tensors)
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        return copy

    return edit
