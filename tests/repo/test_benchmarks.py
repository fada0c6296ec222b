"""benchmarks/models.py: random models with the shapes of real ones."""

import importlib
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from qerl_trl.memory.formulas import shape_of
from qerl_trl.nvfp4.config import NVFP4Config, from_pretrained
from qerl_trl.nvfp4.linear import NVFP4Linear
from tests.shapes import NEWER

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: one recipe of each family
FAMILIES = ("qwen3-8b", "llama3.1-8b", "gemma3-12b", "mistral-small-24b", "qwen3.5-9b")


@pytest.fixture
def models(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("models")


@pytest.mark.parametrize(
    ("size", "billions"),
    [("0.5b", 0.49), ("7b", 7.61), ("32b", 32.76), ("llama-3-8b", 8.03), ("qwen3-8b", 8.19)],
)
def test_a_shape_has_as_many_parameters_as_its_models_card(models, size, billions):
    shape = shape_of(models.folder(size))
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=0.011)
    assert set(shape.linears) == set(models.linear_shapes(size).values())
    assert models.kv_bytes(size) == 2 * 2 * shape.layers * shape.kv_width
    assert shape.head_norms == (size == "qwen3-8b")


@pytest.mark.parametrize("size", ["7b", "llama-3-8b", "qwen3-8b"])
def test_trainer_and_engines_build_from_one_configuration(models, monkeypatch, tmp_path, size):
    """Also where heads are wider together than the hidden states."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
    small |= {"head_dim": 32} if "head_dim" in models.CONFIGS[size] else {}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(models.CONFIGS, size, models.CONFIGS[size] | small)
    model = models.packed_model(size, "cpu")
    of_engines = AutoConfig.from_pretrained(model.name_or_path)
    assert type(model.config) is type(of_engines) and model.config.rope_parameters == of_engines.rope_parameters
    differ = {k for k, v in of_engines.to_dict().items() if model.config.to_dict().get(k) != v}
    assert differ <= {"_name_or_path", "architectures", "dtype"}, differ
    packed = {name for name, layer in model.named_modules() if isinstance(layer, NVFP4Linear)}
    assert {name.split(".", 3)[3] for name in packed} == models.linear_shapes(size).keys()
    for name, (n, k) in models.linear_shapes(size).items():
        layer = model.get_submodule(f"model.layers.1.{name}")
        assert (layer.out_features, layer.in_features) == (n, k)
        assert (layer.bias is not None) == (size == "7b" and name.split(".")[1][0] in "qkv")
    assert torch.isfinite(model(input_ids=torch.arange(8)[None]).logits).all()


@pytest.mark.parametrize("recipe", FAMILIES)
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
