"""The table of architectures against the classes of transformers and vLLM that it describes."""

import importlib
import re

import pytest
from peft import LoraConfig
from transformers import CONFIG_MAPPING

from qerl_trl.model.lora import keep_to_the_decoder
from qerl_trl.nvfp4.architectures import DECODER, ROUTERS, TOWERS, unadapted_by_default
from qerl_trl.nvfp4.checkpoints import matches_any, pattern_of
from tests.tiny_models import FAMILIES, make_tiny_config


@pytest.mark.parametrize("family", list(FAMILIES))
def test_groups_are_the_fused_layers_of_vllm(family):
    pytest.importorskip("vllm")
    module = importlib.import_module(f"vllm.model_executor.models.{family}")
    (cls,) = (value for name, value in vars(module).items() if name.lower() == f"{family}forcausallm")
    packed = cls.packed_modules_mapping
    if family == "phi3":
        assert all(parts == [fused] for fused, parts in packed.items())
    else:
        assert {name: tuple(parts) for name, parts in packed.items()} == dict(DECODER.fused)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.visual.blocks.0.mlp.down_proj", True),
        ("vision_tower", True),
        ("model.layers.0.mlp.gate", True),
        ("model.layers.0.mlp.gate_proj", False),
        ("model.language_model.layers.0.mlp.up_proj", False),
    ],
)
def test_towers_and_routers_by_name(name, expected):
    names = (*TOWERS, *ROUTERS)
    assert matches_any(name, names) is expected is (re.fullmatch(pattern_of(names), name) is not None)


def test_linears_without_an_adapter_unless_the_user_names_targets():
    assert unadapted_by_default(make_tiny_config("qwen2")) == ()
    assert set(unadapted_by_default(CONFIG_MAPPING["mixtral"]())) == set(ROUTERS)
    llava = CONFIG_MAPPING["llava"]()
    assert set(unadapted_by_default(llava)) == set(TOWERS)
    assert keep_to_the_decoder(LoraConfig(target_modules="all-linear"), llava).exclude_modules is not None
    for options in ({"target_modules": ["q_proj"]}, {"target_modules": "all-linear", "exclude_modules": ["x"]}):
        chosen = LoraConfig(**options)
        assert keep_to_the_decoder(chosen, llava) is chosen
