"""Checkpoints as ModelOpt and llm-compressor write them: read to the bit, or refused with the reason.

The bytes come from compressed-tensors' own compressor (`write_packed_checkpoint`) or from `quantize`; scales of
activations and of the KV cache, dense attention and configurations are in the tools' on-disk form.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from qerl_trl.nvfp4.config import from_pretrained
from qerl_trl.nvfp4.format import dequantize, quantize
from qerl_trl.nvfp4.linear import NVFP4Linear
from tests.architectures import TEXT, TINY_TEXT
from tests.tiny_models import make_tiny_model

State = dict[str, torch.Tensor]


def packed(weight: torch.Tensor, name: str) -> State:
    """A weight as ModelOpt stores it in NVFP4."""
    made = quantize(weight)
    scales = {"weight_scale": made.block_scale.view(torch.float8_e4m3fn), "input_scale": torch.tensor(0.01)}
    scales |= {"weight": made.packed, "weight_scale_2": 1 / made.global_scale.reshape(())}
    return {f"{name}.{part}": tensor for part, tensor in scales.items()}


def in_fp8(weight: torch.Tensor, name: str, largest: float = 400.0) -> State:
    """A weight as ModelOpt stores it in FP8, with one scale."""
    scale = weight.float().abs().max() / largest
    return {f"{name}.weight_scale": scale, f"{name}.weight": (weight.float() / scale).to(torch.float8_e4m3fn)}


def weight_on_disk(state: State, name: str) -> torch.Tensor:
    """(N, K) in bf16, by the formula of `format.py` from the bytes on disk."""
    if f"{name}.weight_scale_2" in state:
        stored, global_scale = state[f"{name}.weight"], 1.0 / state[f"{name}.weight_scale_2"]
    elif f"{name}.weight_packed" in state:
        stored, global_scale = state[f"{name}.weight_packed"], state[f"{name}.weight_global_scale"]
    elif state[f"{name}.weight"].dtype == torch.float8_e4m3fn:
        return (state[f"{name}.weight"].double() * state[f"{name}.weight_scale"].double()).bfloat16()
    else:
        return state[f"{name}.weight"]
    return dequantize(stored, state[f"{name}.weight_scale"], global_scale, torch.bfloat16)


# --- models with a tower ---

_TOWER = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 14, "num_hidden_layers": 1}
_QWEN_TOWER = _TOWER | {"depth": 1, "num_heads": 2, "out_hidden_size": 256, "num_position_embeddings": 16}
_GEMMA_TOWER = _TOWER | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
_LAYER = "model.language_model.layers"
_ATTENTION = [f"{_LAYER}.0.linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")]
_ATTENTION += [f"{_LAYER}.1.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
_MLP = [f"{_LAYER}.{layer}.mlp.{name}" for layer in (0, 1) for name in ("gate_proj", "up_proj", "down_proj")]
_LEFT_OUT = ["model.embed_vision*", f"{_LAYER}.0.self_attn*", f"{_LAYER}.1.self_attn*", "model.vision_tower*"]


def nvfp4(*ignore: str) -> dict:
    """ModelOpt's configuration with attention left out."""
    weights = {"num_bits": 4, "type": "float", "group_size": 16}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    ignored = [*ignore, *_LEFT_OUT]
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": groups, "ignore": ignored}


def mixed(four: list[str]) -> dict:
    """ModelOpt's mixed precision: attention in FP8, `four` in NVFP4."""
    layers = {name: {"quant_algo": "FP8"} for name in _ATTENTION}
    layers |= {name: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in four}
    weights = {"dynamic": False, "type": "float"}
    groups = {"group_0": {"weights": weights | {"num_bits": 8}, "targets": _ATTENTION}}
    groups |= {"group_1": {"weights": weights | {"num_bits": 4, "group_size": 16}, "targets": four}}
    method = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    return {**method, "config_groups": groups, "quantized_layers": layers, "ignore": ["mtp*"]}


WITH_HEAD = [*_MLP, "lm_head"]
#: name -> (model_type, layers in FP8, layers in NVFP4, quantization config)
FORMS: dict[str, tuple[str, list[str], list[str], dict]] = {
    "attention left out": ("gemma4", [], _MLP, nvfp4("lm_head")),
    "mixed": ("qwen3_5", _ATTENTION, _MLP, mixed(_MLP)),
    "mixed, packed head": ("qwen3_5", _ATTENTION, WITH_HEAD, mixed(WITH_HEAD)),
    "packed head that is not named": ("gemma4", [], WITH_HEAD, nvfp4()),
}


def write(folder: Path, model_type: str, eight: list[str], four: list[str], quantization: dict) -> State:
    """A tiny model of that architecture, stored as the configuration says; returns the tensors."""
    text, tower = TEXT["qwen3_5_text"], _QWEN_TOWER
    if model_type == "gemma4":
        text, tower = TEXT["gemma4_text"] | {"hidden_size_per_layer_input": 0}, _GEMMA_TOWER
    config = CONFIG_MAPPING[model_type](text_config=TINY_TEXT | text, vision_config=tower, dtype="bfloat16")
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for name in four:
        state |= packed(state.get(f"{name}.weight", torch.randn(320, 128, dtype=torch.bfloat16)), name)
    for name in eight:
        state |= in_fp8(state[f"{name}.weight"], name)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    return state


@pytest.mark.parametrize("name", ["attention left out", "mixed"])
def test_every_weight_is_that_of_the_file(name, tmp_path):
    state = write(tmp_path, *FORMS[name])
    model = from_pretrained(tmp_path, model_class=AutoModelForImageTextToText)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, NVFP4Linear))}
    assert {name for name, module in linears.items() if isinstance(module, NVFP4Linear)} == set(_MLP)
    for linear, module in linears.items():
        if f"{linear}.weight" in state:
            assert torch.equal(module.weight.detach() + 0, weight_on_disk(state, linear)), linear
        else:
            assert linear == "lm_head" and model.config.get_text_config().tie_word_embeddings


@pytest.mark.parametrize("name", ["mixed, packed head", "packed head that is not named"])
def test_a_packed_head_is_refused_with_the_reason(name, tmp_path):
    write(tmp_path, *FORMS[name])
    reason = "head 'lm_head' is NVFP4; log-probabilities need it dense|'lm_head' has quant_algo=.* with a dense head"
    with pytest.raises(ValueError, match=reason):
        from_pretrained(tmp_path, model_class=AutoModelForImageTextToText)


# --- checkpoints of a plain model ---

_LINEARS = [name for name, module in make_tiny_model("qwen2").named_modules() if isinstance(module, torch.nn.Linear)]
LINEARS = [name for name in _LINEARS if name != "lm_head"]
_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def nothing(state: State, quantization: dict) -> None:
    pass


def four_bit_activations(state: State, quantization: dict) -> None:
    state |= {f"{name}.input_global_scale": torch.tensor([312.0]) for name in LINEARS}
    weights = quantization["config_groups"]["group_0"]["weights"]
    quantization["config_groups"]["group_0"]["input_activations"] = weights | {"dynamic": "local"}


def llm_compressor_kv(state: State, quantization: dict) -> None:
    quantization["kv_cache_scheme"] = _FP8
    for layer in range(2):
        state |= {f"model.layers.{layer}.self_attn.{x}_scale": torch.tensor([0.02]) for x in "kv"}


def modelopt_kv(state: State, quantization: dict) -> None:
    quantization["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    for layer in range(2):
        state |= {f"model.layers.{layer}.self_attn.{x}_proj.{x}_scale": torch.tensor(0.02) for x in "kv"}


def weight_only(state: State, quantization: dict) -> None:
    quantization["quant_algo"] = "W4A16_NVFP4"
    del quantization["config_groups"]["group_0"]["input_activations"]
    for name in LINEARS:
        del state[f"{name}.input_scale"]


def attention_in_fp8(state: State, quantization: dict) -> None:
    """ModelOpt's AutoQuantize: attention FP8, with one scale per layer."""
    quantization["quant_algo"] = "MIXED_PRECISION"
    del quantization["config_groups"]
    layers = quantization["quantized_layers"] = {}
    for number, name in enumerate(LINEARS):
        layers[name] = {"quant_algo": "NVFP4", "group_size": 16}
        if "self_attn" in name:
            layers[name] = {"quant_algo": "FP8"}
            del state[f"{name}.weight_scale_2"]
            state |= in_fp8(make_tiny_model("qwen2").get_submodule(name).weight.detach(), name, 400 + number)


#: the tool's name of the form -> (layout, change of the plain form)
CHECKPOINTS: dict[str, tuple[str, Callable[[State, dict], None]]] = {
    "llm-compressor NVFP4A16": ("compressed-tensors", nothing),
    "llm-compressor NVFP4": ("compressed-tensors", four_bit_activations),
    "llm-compressor NVFP4A16, FP8 KV cache": ("compressed-tensors", llm_compressor_kv),
    "ModelOpt NVFP4": ("modelopt", nothing),
    "ModelOpt W4A16_NVFP4": ("modelopt", weight_only),
    "ModelOpt NVFP4, FP8 KV cache": ("modelopt", modelopt_kv),
    "ModelOpt MIXED_PRECISION, NVFP4 and FP8": ("modelopt", attention_in_fp8),
}


def written(folder: Path, source: Path, change: Callable[[State, dict], None]) -> State:
    """The folder `source` with `change`; returns its tensors."""
    state = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    change(state, config["quantization_config"])
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return state


#: trained with an adapter too
TRAINED = ("llm-compressor NVFP4", "ModelOpt MIXED_PRECISION, NVFP4 and FP8")


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_of_the_tools_is_read_to_the_bit_and_trained_on(name, packed_model_dir, tiny_runs, tmp_path):
    layout, change = CHECKPOINTS[name]
    state = written(tmp_path / "model", packed_model_dir(layout), change)
    model = from_pretrained(tmp_path / "model")
    for linear in LINEARS:
        module = model.get_submodule(linear)
        stays_dense = change is attention_in_fp8 and "self_attn" in linear
        assert isinstance(module, NVFP4Linear) is not stays_dense
        assert torch.equal(module.weight.detach() + 0, weight_on_disk(state, linear)), linear
    if name in TRAINED:
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        options = {"max_steps": 1, "model_init_kwargs": None, "save_strategy": "no"}
        trainer = tiny_runs.trainer(tmp_path / "run", model=str(tmp_path / "model"), peft_config=lora, **options)
        before = {key: p.detach().clone() for key, p in trainer.model.named_parameters()}
        trainer.train()
        moved = {key for key, p in trainer.model.named_parameters() if not torch.equal(p, before[key])}
        assert sum("lora_B" in key for key in moved) == len(LINEARS) and all("lora_" in key for key in moved)
