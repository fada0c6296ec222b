"""Checkpoints as llm-compressor and ModelOpt write them: read to the bit, and trained on.

The bytes come from compressed-tensors' own compressor (`write_packed_checkpoint`); what the tools add to them (activation and KV cache scales,
attention that stays dense) and the configurations are in their on-disk form.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl_trl.nvfp4.config import from_pretrained
from qerl_trl.nvfp4.format import dequantize
from qerl_trl.nvfp4.linear import NVFP4Linear
from tests.test_trainer import LORA, adapter_of, frozen_of, make_trainer  # noqa: F401
from tests.tiny_models import make_tiny_model

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


def mixed(state: State, quantization: dict) -> None:
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
    "ModelOpt MIXED_PRECISION, NVFP4 and FP8": ("modelopt", mixed),
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


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_weight_is_that_of_the_file_and_a_step_trains_the_adapter(
    name,
    packed_model_dir,
    make_trainer,  # noqa: F811
    tmp_path,
):
    layout, change = CHECKPOINTS[name]
    state = written(tmp_path / "model", packed_model_dir(layout), change)
    model = from_pretrained(tmp_path / "model")
    for linear in LINEARS:
        module = model.get_submodule(linear)
        on_disk = weight_on_disk(state, linear)
        stays_dense = change in (mlp_only, mixed) and "self_attn" in linear
        assert isinstance(module, NVFP4Linear) is not stays_dense
        assert torch.equal(module.weight.detach() + 0, on_disk), linear
    trainer = make_trainer(model=str(tmp_path / "model"), max_steps=1, model_init_kwargs=None)
    frozen, adapter = frozen_of(trainer), adapter_of(trainer)
    trainer.train()
    for key, value in frozen_of(trainer).items():
        assert torch.equal(value, frozen[key]), key
    moved = [key for key, value in adapter_of(trainer).items() if not torch.equal(value, adapter[key])]
    assert sum("lora_B" in key for key in moved) == len(LINEARS)


FAULTS = {
    "another algorithm": (lambda s, q, n: q["quantized_layers"][n].update(quant_algo="W4A8_AWQ"), "W4A8_AWQ"),
    "no NVFP4 layer": (
        lambda s, q, n: q.update(quantized_layers={n: {"quant_algo": "FP8"}}),
        "no nn.Linear of .* is left to quantize",
    ),
    "no scale": (lambda s, q, n: s.pop(f"{n}.weight_scale"), r"q_proj.weight_scale' is missing"),
    "a scale per row": (
        lambda s, q, n: s.update({f"{n}.weight_scale": torch.ones(128, 1)}),
        "F32 of one number belongs there",
    ),
    "turned": (
        lambda s, q, n: s.update({f"{n}.weight": s[f"{n}.weight"].reshape(64, 256)}),
        r"is F8_E4M3 \(64, 256\); F8_E4M3 \(128, 128\) belongs there",
    ),
    "not FP8": (
        lambda s, q, n: s.update({f"{n}.weight": torch.zeros(128, 128)}),
        r"is F32 \(128, 128\); F8_E4M3 \(128, 128\) belongs there",
    ),
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
        mixed(state, quantization)
        change(state, quantization, LINEARS[0])

    written(tmp_path / "model", packed_model_dir("modelopt"), damaged)
    with pytest.raises(ValueError, match=said):
        from_pretrained(tmp_path / "model")
