"""benchmarks/models.py: random models with the shapes of real ones."""

import importlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from qerl_trl.nvfp4.config import NVFP4Config, from_pretrained
from qerl_trl.nvfp4.linear import NVFP4Linear
from tests.shapes import NEWER

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def models(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("models")


@pytest.mark.parametrize("recipe", ["qwen3-8b", "gemma3-12b", "qwen3.5-9b"])
def test_a_written_model_has_the_format_of_the_hub(models, recipe, tmp_path):
    size = f"tiny-{recipe}"
    models.write_checkpoint(size, tmp_path / "dense", "cpu")
    config = models.RECIPES[size]
    auto = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    model, info = auto.from_pretrained(tmp_path / "dense", output_loading_info=True)
    assert not any(info.values()), info
    assert type(model.config) is type(NEWER[recipe][0]) and model.config.architectures == [type(model).__name__]
    model.save_pretrained(tmp_path / "again")
    names = [set(load_file(tmp_path / folder / "model.safetensors")) for folder in ("dense", "again")]
    assert names[0] == names[1]
    text = "Natalia sold 48 clips."
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dense")
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    models.write_checkpoint(size, tmp_path / "packed", "cpu", packed=True)
    for quantized in (
        from_pretrained(tmp_path / "dense", NVFP4Config(), model_class=auto),
        from_pretrained(tmp_path / "packed", model_class=auto),
    ):
        layers = [name for name, layer in quantized.named_modules() if isinstance(layer, NVFP4Linear)]
        assert layers and not [name for name in layers if "vis" in name]
        assert torch.isfinite(quantized(input_ids=torch.arange(3, 19)[None]).logits).all()
