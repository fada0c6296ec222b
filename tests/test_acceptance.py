"""What starts every recipe on a GPU knows every recipe, and writes models as they are published; the runs themselves need a GPU."""

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from qerl_trl.nvfp4.config import NVFP4Config, from_pretrained
from qerl_trl.nvfp4.linear import NVFP4Linear
from tests.shapes import NEWER
from tests.test_configs import CONFIGS, MODELS

sys.path.insert(0, str(CONFIGS.parents[1] / "benchmarks"))
import acceptance
import models

#: one of each family
FAMILIES = ("qwen3-8b", "llama3.1-8b", "gemma3-12b", "mistral-small-24b", "qwen3.5-9b")


def test_every_recipe_can_be_started_on_the_card_that_it_names():
    names = {acceptance.config_of(size) for size, arms in acceptance.CARDS.items() if arms.get("nvfp4")}
    assert names == {f"examples/configs/{recipe}.yaml" for recipe in MODELS}
    for size in NEWER:
        said = re.search(r"card of (\d+) GB", Path(acceptance.ROOT, acceptance.config_of(size)).read_text())
        assert acceptance.CARDS[size]["nvfp4"] == pytest.approx(int(said[1]) * 1e9 / 2**30, abs=0.01)
        assert acceptance.config_of(f"tiny-{size}") == acceptance.config_of(size)


@pytest.mark.parametrize("recipe", FAMILIES)
def test_a_written_model_is_what_its_users_download(recipe, tmp_path):
    size = f"tiny-{recipe}"
    models.write_checkpoint(size, tmp_path / "dense", "cpu")
    config = models.RECIPES[size]
    auto = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    model, info = auto.from_pretrained(tmp_path / "dense", output_loading_info=True)
    assert not any(info.values()), info
    assert type(model.config) is type(NEWER[recipe][0]) and model.config.architectures == [type(model).__name__]
    model.save_pretrained(tmp_path / "again")
    with (
        safe_open(tmp_path / "dense/model.safetensors", "pt") as ours,
        safe_open(tmp_path / "again/model.safetensors", "pt") as theirs,
    ):
        assert set(ours.keys()) == set(theirs.keys())
    text = "Natalia sold 48 clips."
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dense")
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    packed = from_pretrained(tmp_path / "dense", NVFP4Config(), model_class=auto)
    assert torch.isfinite(packed(input_ids=torch.arange(3, 19)[None]).logits).all()


@pytest.mark.parametrize("recipe", FAMILIES)
def test_a_model_written_packed_is_read_packed(recipe, tmp_path):
    models.write_checkpoint(f"tiny-{recipe}", tmp_path / "packed", "cpu", packed=True)
    config = models.RECIPES[f"tiny-{recipe}"]
    auto = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    model = from_pretrained(tmp_path / "packed", model_class=auto)
    layers = [name for name, layer in model.named_modules() if isinstance(layer, NVFP4Linear)]
    assert layers and not [name for name in layers if "vis" in name]
    assert torch.isfinite(model(input_ids=torch.arange(3, 19)[None]).logits).all()
