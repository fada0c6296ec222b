"""A base has one fingerprint for any source, device and dtype, with an adapter or without."""

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from qerl_trl import NVFP4Config
from qerl_trl.checkpoint.fingerprint import base_revision, base_sha256
from qerl_trl.model.loading import begin_loaded
from qerl_trl.model.lora import register_nvfp4_lora
from qerl_trl.nvfp4.config import from_pretrained
from qerl_trl.publish.quantize import quantize_folder
from tests.faults.tiny_runs import in_hub_cache


@pytest.fixture
def load(tiny_model_dir):
    def load(folder=None, dtype="bfloat16", **options):
        config = NVFP4Config(compute_dtype=dtype, **options)
        return from_pretrained(folder or tiny_model_dir("qwen2"), config, dtype=getattr(torch, dtype))

    return load


def test_the_same_from_every_source(load, tiny_model_dir, tmp_path):
    quantize_folder(str(tiny_model_dir("qwen2")), tmp_path / "packed")
    load().save_pretrained(tmp_path / "saved")
    prints = [load(), load(dtype="float32"), load(tmp_path / "packed"), load(tmp_path / "saved", dtype="float32")]
    assert len({base_sha256(model) for model in prints}) == 1


LORAS = {
    "plain": {"target_modules": "all-linear"},
    "dora and norms": {"target_modules": ["q_proj"], "use_dora": True, "modules_to_save": ["input_layernorm"]},
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
}


@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)
def test_an_adapter_is_not_part_of_it(load, lora):
    model = load()
    bare = base_sha256(model)
    adapted = get_peft_model(model, register_nvfp4_lora(LoraConfig(task_type="CAUSAL_LM", **lora)))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    assert base_sha256(adapted) == bare


def test_the_commit_is_that_of_the_files(load, tiny_model_dir, tmp_path, monkeypatch):
    """Also with releases of transformers that do not record it; `None` if it is unknown."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    first, second, name = "a" * 40, "b" * 40, "someone/base"

    def revision_of(model, **source):
        begin_loaded(model, **source)
        return base_revision(model)

    in_hub_cache(tmp_path, name, first, tiny_model_dir("qwen2"))
    assert revision_of(AutoModelForCausalLM.from_pretrained(name)) == first
    assert revision_of(load(tiny_model_dir("qwen2"))) is None
    in_hub_cache(tmp_path, name, second, tiny_model_dir("qwen2"))
    assert revision_of(load(name)) == second
    assert revision_of(from_pretrained(name, NVFP4Config(), revision=first)) == first
    assert revision_of(AutoModelForCausalLM.from_pretrained(name, revision=first), revision=first) == first


def _flip(tensor):
    tensor.view(torch.uint8).view(-1)[-1] ^= 1


def _swap_rows(tensor):
    tensor[[0, 1]] = tensor[[1, 0]].clone()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.layers.1.mlp.down_proj.weight_packed", _flip),
        ("model.layers.1.mlp.down_proj.weight_packed", _swap_rows),
        ("model.layers.0.self_attn.q_proj.weight_scale", _flip),
        ("model.layers.0.self_attn.o_proj.weight_global_scale", _flip),
        ("model.norm.weight", _flip),
    ],
)
def test_every_change_makes_another_base(load, name, change):
    model = load()
    before = base_sha256(model)
    with torch.no_grad():
        change(model.get_parameter(name).data)
    assert base_sha256(model) != before


def test_another_rule_format_or_order_makes_another_base(load, tiny_model_dir):
    reversed_layers = load()
    reversed_layers.model.layers = nn.ModuleList(reversed(reversed_layers.model.layers))
    models = [load(), load(scale_rule="four_over_six"), load(modules_to_not_convert=["lm_head", "down_proj"])]
    models += [AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2")), reversed_layers]
    assert len({base_sha256(model) for model in models}) == 5


def test_a_known_value():
    """The same on every device and in every release."""
    module = nn.ModuleDict({"a": nn.Linear(3, 2, bias=False), "b": nn.LayerNorm(2)})
    with torch.no_grad():
        module["a"].weight.copy_(torch.arange(6.0).view(2, 3))
    known = "3259ee1e95b514f2852c41ee85b1c01950dd2037883eba30aaf03ba523030d6b"
    assert base_sha256(module) == base_sha256(module.bfloat16()) == known
    assert base_sha256(nn.Linear(2, 2, device="meta")) is None  # part of a sharded model


@pytest.mark.gpu
def test_a_gpu_finds_the_same_in_a_few_launches(load):
    """Packed, floats of every dtype, odd sizes, views, single scales."""
    model = load()
    odd = (torch.randn(3), torch.randn(9, 8)[:, ::2], torch.arange(5), torch.randn(7).half(), torch.tensor(2.0))
    model.extra = nn.ParameterList(nn.Parameter(tensor, requires_grad=False) for tensor in odd)
    before = base_sha256(model)
    model.to("cuda")
    assert base_sha256(model) == before
    model.extra[0].data[2] += 1
    assert base_sha256(model) != before
