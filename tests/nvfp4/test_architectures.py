"""The table of architectures against the classes of transformers and vLLM that it describes."""

import importlib
import re

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from qerl_trl.model.lora import keep_to_the_decoder
from qerl_trl.nvfp4.architectures import DECODER, ROUTERS, TOWERS, unadapted_by_default
from qerl_trl.nvfp4.checkpoints import matches_any, pattern_of
from tests.tiny_models import FAMILIES, make_tiny_config

VLLM_MODULES = {"gemma3": "gemma3"} | {family: family for family in FAMILIES}


def leaves(family: str) -> set[str]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_tiny_config(family))
    return {name.rpartition(".")[2] for name, module in model.named_modules() if type(module) is nn.Linear}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_groups_are_whole_or_absent_and_the_head_is_known(family):
    found = leaves(family)
    assert DECODER.heads[0] in found
    for group in DECODER.groups:
        assert set(group) <= found if family != "phi3" else not set(group) & found


@pytest.mark.parametrize("family", list(FAMILIES))
def test_groups_are_what_vllm_fuses(family):
    pytest.importorskip("vllm")
    module = importlib.import_module(f"vllm.model_executor.models.{VLLM_MODULES[family]}")
    (cls,) = (value for name, value in vars(module).items() if name.lower() == f"{family}forcausallm")
    packed = cls.packed_modules_mapping
    if family == "phi3":
        assert all(parts == [fused] for fused, parts in packed.items())
    else:
        assert {name: tuple(parts) for name, parts in packed.items()} == dict(DECODER.fused)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("model.visual.blocks.0.mlp.down_proj", True),
        ("vision_tower", True),
        ("model.layers.0.mlp.gate", True),
        ("model.layers.0.mlp.gate_proj", False),
        ("model.layers.0.self_attn.q_proj", False),
        ("model.language_model.layers.0.mlp.up_proj", False),
    ],
)
def test_towers_and_routers_by_name(name, meant):
    names = (*TOWERS, *ROUTERS)
    assert matches_any(name, names) is meant is (re.fullmatch(pattern_of(names), name) is not None)


def test_what_an_adapter_leaves_out():
    assert unadapted_by_default(make_tiny_config("qwen2")) == ()
    assert set(unadapted_by_default(CONFIG_MAPPING["llava"]())) == set(TOWERS)
    assert set(unadapted_by_default(CONFIG_MAPPING["mixtral"]())) == set(ROUTERS)


def test_the_users_own_targets_hold():
    config = CONFIG_MAPPING["llava"]()
    assert keep_to_the_decoder(LoraConfig(target_modules="all-linear"), config).exclude_modules is not None
    for chosen in (
        LoraConfig(target_modules=["q_proj"]),
        LoraConfig(target_modules="all-linear", exclude_modules=["x"]),
    ):
        assert keep_to_the_decoder(chosen, config) is chosen
