"""Checkpoints and configurations as ModelOpt and llm-compressor write them: read to the bit, or refused at the start
with a true reason.

The bytes come from compressed-tensors' own compressor (`write_packed_checkpoint`) or from `quantize`; what the tools
add to them (activation and
KV cache scales, dense attention) and the configurations are in their on-disk form.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from qerl_trl.nvfp4.checkpoints import parse_quantization_config
from qerl_trl.nvfp4.config import from_pretrained
from qerl_trl.nvfp4.format import dequantize, quantize
from qerl_trl.nvfp4.linear import NVFP4Linear
from tests.architectures import TEXT, TINY_TEXT, config_of
from tests.tiny_models import make_tiny_model

_TOWER = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 14, "num_hidden_layers": 1}
_QWEN_TOWER = _TOWER | {"depth": 1, "num_heads": 2, "out_hidden_size": 256, "num_position_embeddings": 16}
#: model_type of a wrapper -> (text, tower)
WRAPPERS = {
    "gemma4": (
        TEXT["gemma4_text"] | {"hidden_size_per_layer_input": 0},
        _TOWER | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "qwen3_5": (TEXT["qwen3_5_text"], _QWEN_TOWER),
}
_LAYER = "model.language_model.layers"
_ATTENTION = [f"{_LAYER}.0.linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")]
_ATTENTION += [f"{_LAYER}.1.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
_MLP = [f"{_LAYER}.{layer}.mlp.{name}" for layer in (0, 1) for name in ("gate_proj", "up_proj", "down_proj")]
_LEFT_OUT = [
    "lm_head",
    "model.embed_vision*",
    f"{_LAYER}.0.self_attn*",
    f"{_LAYER}.1.self_attn*",
    "model.vision_tower*",
]
_FLOAT = {"type": "float", "symmetric": True}


def modelopt(algorithm: str, groups: list[dict], **more: Any) -> dict[str, Any]:
    config_groups = {f"group_{number}": group for number, group in enumerate(groups)}
    return {"quant_method": "modelopt", "quant_algo": algorithm, "config_groups": config_groups, **more}


def mixed(eight: list[str], four: list[str]) -> dict[str, Any]:
    """ModelOpt's mixed precision: layers in FP8, and layers in NVFP4."""
    layers = {name: {"quant_algo": "FP8"} for name in eight}
    layers |= {name: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in four}
    weights = {"dynamic": False, "type": "float"}
    groups = [
        {"weights": weights | {"num_bits": 8}, "targets": eight},
        {"weights": weights | {"num_bits": 4, "group_size": 16}, "targets": four},
    ]
    return modelopt("MIXED_PRECISION", groups, quantized_layers=layers, ignore=["mtp*"])


#: name -> (model_type, file, quantization config)
FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "attention left out": (
        "gemma4",
        "config.json",
        modelopt(
            "NVFP4",
            [{"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}],
            ignore=_LEFT_OUT,
        ),
    ),
    "mixed": ("qwen3_5", "config.json", mixed(_ATTENTION, _MLP)),
    "mixed, packed head": ("qwen3_5", "config.json", mixed(_ATTENTION, [*_MLP, "lm_head"])),
    "packed experts": (
        "qwen3_moe",
        "hf_quant_config.json",
        {
            "producer": {"name": "modelopt", "version": "0"},
            "quantization": {
                "quant_algo": "NVFP4",
                "group_size": 16,
                "exclude_modules": ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"],
            },
        },
    ),
}
TWO_FORMATS = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "group_0": {"format": "float-quantized", "targets": ["re:.*attn.*"], "weights": _FLOAT | {"num_bits": 8}},
        "group_1": {
            "format": "nvfp4-pack-quantized",
            "targets": ["re:.*ffn.*"],
            "weights": _FLOAT | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
        },
    },
    "ignore": [],
}
HEAD = (
    "the output head 'lm_head' is NVFP4; log-probabilities need it dense|'lm_head' has quant_algo=.* with a dense head"
)
REFUSED = {
    "mixed, packed head": HEAD,
    "packed experts": "has experts .*nor reads packed.*Start from the unquantized model",
}
READ = ["attention left out", "mixed"]


def algorithm(quantization: dict[str, Any], name: str) -> str | None:
    """What the configuration says of a linear layer, read here by the words of ModelOpt's own documentation, not by
    this package."""
    if "quantized_layers" in quantization:
        return quantization["quantized_layers"].get(name, {}).get("quant_algo")
    inner = quantization.get("quantization", quantization)
    ignored = inner.get("ignore") or inner.get("exclude_modules")
    left_out = any(name == entry or (entry.endswith("*") and name.startswith(entry[:-1])) for entry in ignored)
    return None if left_out else inner["quant_algo"]


def write(folder: Path, model_type: str, file: str, quantization: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A tiny model of that architecture, stored as the configuration says; returns the tensors."""
    if model_type in WRAPPERS:
        text, tower = WRAPPERS[model_type]
        config = CONFIG_MAPPING[model_type](text_config=TINY_TEXT | text, vision_config=tower, dtype="bfloat16")
        cls = AutoModelForImageTextToText
    else:
        config, cls = config_of(model_type), AutoModelForCausalLM
    torch.manual_seed(0)
    cls.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for key in [key for key in state if key.endswith(".weight") and state[key].ndim == 2 and "embed" not in key]:
        name, weight = key.removesuffix(".weight"), state[key]
        kind = algorithm(quantization, name)
        if kind == "FP8":
            state[f"{name}.weight_scale"] = scale = weight.float().abs().max() / 400
            state[key] = (weight.float() / scale).to(torch.float8_e4m3fn)
        elif kind and not weight.shape[1] % 16:
            packed = quantize(weight)
            state[key] = packed.packed
            state[f"{name}.weight_scale"] = packed.block_scale.view(torch.float8_e4m3fn)
            state[f"{name}.weight_scale_2"] = 1 / packed.global_scale.reshape(())
            state[f"{name}.input_scale"] = torch.tensor(0.01)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    if file == "config.json":
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    else:
        (folder / file).write_text(json.dumps(quantization))
    return state


@pytest.mark.parametrize("name", READ)
def test_every_weight_is_that_of_the_file(name, tmp_path):
    state = write(tmp_path, *FORMS[name])
    model = from_pretrained(tmp_path, model_class=AutoModelForImageTextToText)
    packed = [linear for linear, module in model.named_modules() if isinstance(module, NVFP4Linear)]
    assert packed and all(".mlp." in linear and ".language_model." in linear for linear in packed)
    assert len(packed) == 6  # both layers' MLPs: attention is dense in one, FP8 in the other
    for linear, module in model.named_modules():
        if not isinstance(module, (nn.Linear, NVFP4Linear)):
            continue
        stored, scale = state.get(f"{linear}.weight"), state.get(f"{linear}.weight_scale")
        if stored is None:
            assert linear == "lm_head" and model.config.get_text_config().tie_word_embeddings
        elif isinstance(module, NVFP4Linear):
            expected = dequantize(stored, scale, 1 / state[f"{linear}.weight_scale_2"], torch.bfloat16)
            assert torch.equal(module.weight.detach() + 0, expected), linear
        else:
            eight = stored.dtype == torch.float8_e4m3fn
            assert eight == (algorithm(FORMS[name][2], linear) == "FP8")
            expected = (stored.double() * scale.double()).bfloat16() if eight else stored
            assert torch.equal(module.weight.detach(), expected), linear


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_with_the_true_reason(name, tmp_path):
    write(tmp_path, *FORMS[name])
    auto = AutoModelForImageTextToText if FORMS[name][0] in WRAPPERS else AutoModelForCausalLM
    with pytest.raises(ValueError, match=REFUSED[name]):
        from_pretrained(tmp_path, model_class=auto)


def test_groups_of_two_formats_are_refused():
    with pytest.raises(ValueError, match=r"'group_0' has format='float-quantized'.*in all groups"):
        parse_quantization_config(TWO_FORMATS, "config.json")


def test_a_packed_head_that_is_not_named_is_refused_too(tmp_path):
    """As in exports whose exclude list has the head that was packed all the same."""
    model_type, file, quantization = FORMS["attention left out"]
    ignore = [name for name in quantization["ignore"] if name != "lm_head"]
    write(tmp_path, model_type, file, quantization | {"ignore": ignore})
    state = load_file(tmp_path / "model.safetensors")
    head = quantize(torch.randn(320, 128, dtype=torch.bfloat16))
    state |= {"lm_head.weight": head.packed, "lm_head.weight_scale": head.block_scale.view(torch.float8_e4m3fn)}
    state["lm_head.weight_scale_2"] = 1 / head.global_scale.reshape(())
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=HEAD):
        from_pretrained(tmp_path, model_class=AutoModelForImageTextToText)


# --- checkpoints of a plain model ---

State = dict[str, torch.Tensor]
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


def mlp_only(state: State, quantization: dict) -> None:
    quantization["ignore"] += [f"model.layers.{layer}.self_attn*" for layer in range(2)]
    dense = make_tiny_model("qwen2").state_dict()
    for name in LINEARS:
        if "self_attn" in name:
            for part in ("weight_scale", "weight_scale_2", "input_scale"):
                del state[f"{name}.{part}"]
            state[f"{name}.weight"] = dense[f"{name}.weight"].contiguous()


def attention_in_fp8(state: State, quantization: dict) -> None:
    """ModelOpt's AutoQuantize: attention FP8, with one scale per layer."""
    quantization["quant_algo"] = "MIXED_PRECISION"
    del quantization["config_groups"]
    layers = quantization["quantized_layers"] = {}
    for number, name in enumerate(LINEARS):
        layers[name] = {"quant_algo": "NVFP4", "group_size": 16}
        if "self_attn" in name:
            layers[name] = {"quant_algo": "FP8"}
            weight = make_tiny_model("qwen2").get_submodule(name).weight.detach().float()
            del state[f"{name}.weight_scale_2"]
            state[f"{name}.weight_scale"] = scale = weight.abs().max() / (400 + number)
            state[f"{name}.weight"] = (weight / scale).to(torch.float8_e4m3fn)


#: what the tool calls it -> (layout, what differs from the plain form)
CHECKPOINTS: dict[str, tuple[str, Callable[[State, dict], None]]] = {
    "llm-compressor NVFP4A16": ("compressed-tensors", nothing),
    "llm-compressor NVFP4": ("compressed-tensors", four_bit_activations),
    "llm-compressor NVFP4A16, FP8 KV cache": ("compressed-tensors", llm_compressor_kv),
    "ModelOpt NVFP4": ("modelopt", nothing),
    "ModelOpt W4A16_NVFP4": ("modelopt", weight_only),
    "ModelOpt NVFP4, FP8 KV cache": ("modelopt", modelopt_kv),
    "ModelOpt NVFP4, MLP only": ("modelopt", mlp_only),
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


def weight_on_disk(state: State, name: str) -> torch.Tensor:
    """(N, K) in bf16, by the formula of `format.py` from the bytes on disk."""
    if f"{name}.weight_scale_2" in state:
        global_scale = 1.0 / state[f"{name}.weight_scale_2"]
        packed = state[f"{name}.weight"]
    elif f"{name}.weight_packed" in state:
        packed, global_scale = state[f"{name}.weight_packed"], state[f"{name}.weight_global_scale"]
    elif state[f"{name}.weight"].dtype == torch.float8_e4m3fn:
        return (state[f"{name}.weight"].double() * state[f"{name}.weight_scale"].double()).bfloat16()
    else:
        return state[f"{name}.weight"]
    return dequantize(packed, state[f"{name}.weight_scale"], global_scale, torch.bfloat16)


#: those of which an adapter is trained too
TRAINED = ("llm-compressor NVFP4", "ModelOpt MIXED_PRECISION, NVFP4 and FP8")


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_of_the_tools_is_read_to_the_bit_and_trained_on(name, packed_model_dir, tiny_runs, tmp_path):
    layout, change = CHECKPOINTS[name]
    state = written(tmp_path / "model", packed_model_dir(layout), change)
    model = from_pretrained(tmp_path / "model")
    for linear in LINEARS:
        module = model.get_submodule(linear)
        stays_dense = change in (mlp_only, attention_in_fp8) and "self_attn" in linear
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


FAULTS = {
    "another algorithm": (lambda s, q, n: q["quantized_layers"][n].update(quant_algo="W4A8_AWQ"), "W4A8_AWQ"),
    "no scale": (lambda s, q, n: s.pop(f"{n}.weight_scale"), r"q_proj.weight_scale' is missing"),
    "NaN": (
        lambda s, q, n: s.update({f"{n}.weight": torch.full((128, 128), float("nan")).to(torch.float8_e4m3fn)}),
        "q_proj.weight' has 16384 of 16384 values that are NaN",
    ),
    "FP8 and not said": (lambda s, q, n: q["quantized_layers"].pop(n), "says that this module is not quantized"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_mixed_precision_that_cannot_be_read_is_refused(fault, packed_model_dir, tmp_path):
    change, said = FAULTS[fault]

    def damaged(state: State, quantization: dict) -> None:
        attention_in_fp8(state, quantization)
        change(state, quantization, LINEARS[0])

    written(tmp_path / "model", packed_model_dir("modelopt"), damaged)
    with pytest.raises(ValueError, match=said):
        from_pretrained(tmp_path / "model")
