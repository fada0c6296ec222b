"""Checkpoints that others published, by their configurations: read to the bit, or refused at the start with a true reason.

published/*.json has what NVIDIA and Red Hat wrote into config.json (or hf_quant_config.json), as kept in the public repository
ai-dynamo/aiconfigurator, `model_configs/`. Every key is theirs; lists with a name for each layer are cut to the two layers of the tiny models
here. Which checkpoints are downloaded most cannot be told from here: these are of the models that both publish in NVFP4, one of each form.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from qerl_trl.nvfp4.config import from_pretrained
from qerl_trl.nvfp4.format import dequantize, quantize
from qerl_trl.nvfp4.layouts import parse_quantization_config
from qerl_trl.nvfp4.linear import NVFP4Linear
from tests.architectures import TEXT, TINY_TEXT, config_of

PUBLISHED = {path.stem: json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("published/*.json"))}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 14, "num_hidden_layers": 1}
_QWEN_TOWER = _TOWER | {"depth": 1, "num_heads": 2, "out_hidden_size": 256, "num_position_embeddings": 16}
#: model_type of a wrapper -> (text, tower)
WRAPPERS = {
    "gemma4": (
        TEXT["gemma4_text"] | {"hidden_size_per_layer_input": 0},
        _TOWER | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "qwen3_5": (TEXT["qwen3_5_text"], _QWEN_TOWER),
    "qwen3_5_moe": (TEXT["qwen3_next"], _QWEN_TOWER),
}
HEAD = "the output head 'lm_head' is NVFP4; qerl_trl reads dense heads only"
REFUSED = {
    "Qwen3.6-27B-NVFP4": HEAD,
    "Qwen3.6-35B-A3B-NVFP4": HEAD,
    "Qwen3-235B-A22B-NVFP4": "mixture-of-experts tensors.*packed in this checkpoint.*Start from the unquantized model",
    "DeepSeek-V4-Flash-NVFP4-FP8": r"'group_0' has format='float-quantized'.*mixed precision is not supported",
}
READ = {"Gemma-4-31B-IT-NVFP4", "Qwen3.6-27B-NVFP4, head dense"}


def entry(name: str) -> dict[str, Any]:
    """As published; with ", head dense" the same checkpoint whose output head was left dense."""
    name, _, change = name.partition(", ")
    found: dict[str, Any] = copy.deepcopy(PUBLISHED[name])
    if change:
        del found["quantization_config"]["quantized_layers"]["lm_head"]
        found["quantization_config"]["config_groups"]["group_1"]["targets"].remove("lm_head")
    return found


def algorithm(quantization: dict[str, Any], name: str) -> str | None:
    """What the configuration says of a linear layer, read here by the words of ModelOpt's own documentation, not by this package."""
    if "quantized_layers" in quantization:
        return quantization["quantized_layers"].get(name, {}).get("quant_algo")
    inner = quantization.get("quantization", quantization)
    ignored = inner.get("ignore") or inner.get("exclude_modules")
    left_out = any(name == entry or (entry.endswith("*") and name.startswith(entry[:-1])) for entry in ignored)
    return None if left_out else inner["quant_algo"]


def write(folder: Path, published: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A tiny model of that architecture, stored as the configuration says; returns the tensors."""
    model_type, quantization = published["model_type"], published["quantization_config"]
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
    if published["file"] == "config.json":
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    else:
        (folder / published["file"]).write_text(json.dumps(quantization))
    return state


def test_five_are_published_and_each_is_read_or_refused():
    assert len(PUBLISHED) == 5
    assert set(PUBLISHED) == {name for name in (*REFUSED, *READ) if "," not in name}
    assert len({found["repository"] for found in PUBLISHED.values()}) == 5


@pytest.mark.parametrize("name", sorted(READ))
def test_every_weight_is_that_of_the_file(name, tmp_path):
    published = entry(name)
    state = write(tmp_path, published)
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
            assert eight == (algorithm(published["quantization_config"], linear) == "FP8")
            expected = (stored.double() * scale.double()).bfloat16() if eight else stored
            assert torch.equal(module.weight.detach(), expected), linear


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_with_the_true_reason(name, tmp_path):
    published = entry(name)
    if (
        published["model_type"] not in CONFIG_MAPPING or "DeepSeek" in name
    ):  # its names are vLLM's, which transformers' class has not
        with pytest.raises(ValueError, match=REFUSED[name]):
            parse_quantization_config(published["quantization_config"], "config.json")
        return
    write(tmp_path, published)
    auto = AutoModelForImageTextToText if published["model_type"] in WRAPPERS else AutoModelForCausalLM
    with pytest.raises(ValueError, match=REFUSED[name]):
        from_pretrained(tmp_path, model_class=auto)


def test_a_packed_head_that_is_not_named_is_refused_too(tmp_path):
    """As in exports whose exclude list has the head that was packed all the same."""
    published = entry("Gemma-4-31B-IT-NVFP4")
    published["quantization_config"]["ignore"].remove("lm_head")
    write(tmp_path, published)
    state = load_file(tmp_path / "model.safetensors")
    head = quantize(torch.randn(320, 128, dtype=torch.bfloat16))
    state |= {"lm_head.weight": head.packed, "lm_head.weight_scale": head.block_scale.view(torch.float8_e4m3fn)}
    state["lm_head.weight_scale_2"] = 1 / head.global_scale.reshape(())
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=HEAD):
        from_pretrained(tmp_path, model_class=AutoModelForImageTextToText)
