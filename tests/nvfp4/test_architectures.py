"""The table of architectures against the classes of transformers and vLLM that it describes."""

import importlib

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qerl_trl.nvfp4.architectures import DECODER
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
