"""Trainer and engine read the same quantization configuration alike: packed layers and refusals.

The trainer's side is its transformers quantizer on a model without weights, the engine's is `get_quant_method`.
"""

import functools
import inspect
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.utils import WeightsMapper

import qerl_nvfp4
from qerl_trl import NVFP4Config
from qerl_trl.nvfp4 import checkpoints
from qerl_trl.nvfp4.quantizer import NVFP4HfQuantizer
from qerl_trl.rollout.engine import WORKER_EXTENSION
from qerl_trl.rollout.vllm.linear import DenseMethod
from qerl_trl.rollout.vllm.quantization import QeRLQuantizationConfig
from tests.tiny_models import make_tiny_config

#: of vLLM's classes; tests/nvfp4/test_architectures.py compares it with them
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
#: of vLLM's Qwen2_5_VLForConditionalGeneration, whose module needs torchvision
PREFIXES = {"model.language_model.": "language_model.model.", "model.visual.": "visual."}
PREFIXES |= {"lm_head.": "language_model.lm_head.", "model.": "language_model.model."}


@functools.cache
def meta_model(kind: str):
    """A model without weights, of 12 layers: layer 1 is not layer 11. "renamed": vLLM renames its text model."""
    with torch.device("meta"):
        if kind == "renamed":
            rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}}
            vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
            config = {"text_config": make_tiny_config("qwen2").to_dict() | rope, "vision_config": vision}
            return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**config))
        odd = {"intermediate_size": 264} if kind == "odd" else {}
        return AutoModelForCausalLM.from_config(make_tiny_config("qwen2", num_hidden_layers=12, **odd))


def in_the_trainer(config: dict, model) -> dict[str, bool] | str:
    """Layer -> whether it is packed; or the refusal."""
    linears = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    try:
        quantizer = NVFP4HfQuantizer(NVFP4Config.from_checkpoint(config, "quantization_config"), pre_quantized=False)
        quantizer._process_model_before_weight_loading(model)
    except ValueError as error:
        if "is left to quantize" in str(error):
            return dict.fromkeys(linears, False)
        return str(error)
    return {name: name in quantizer._converted for name in linears}


class Linear(LinearBase):
    """Enough of a layer for `get_quant_method`."""

    def __init__(self, columns: int):
        torch.nn.Module.__init__(self)
        self.input_size = columns


@pytest.fixture(autouse=True)
def engine_config():
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def vllm_name(name: str, renamed: bool) -> str:
    """vLLM's name of transformers' layer, which it may fuse and rename."""
    parent, _, leaf = name.rpartition(".")
    leaf = next((fused for fused, parts in FUSED.items() if leaf in parts), leaf)
    name = f"{parent}.{leaf}" if parent else leaf
    if renamed:
        name = name.replace("model.language_model.", "language_model.model.", 1)
        name = "language_model.lm_head" if name == "lm_head" else name
    return name


def engine_side(config: dict | None, renamed: bool = False) -> QeRLQuantizationConfig:
    built = QeRLQuantizationConfig() if config is None else QeRLQuantizationConfig.from_config(config)
    built.packed_modules_mapping = FUSED
    if renamed:
        built.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix=PREFIXES))
    return built


def assert_they_agree(config: dict, kind: str = "plain") -> dict[str, bool] | str:
    """Layer by layer; returns the trainer's side."""
    model, renamed = meta_model(kind), kind == "renamed"
    trainer = in_the_trainer(config, model)
    try:
        engine = engine_side(config, renamed)
    except ValueError as error:
        assert trainer == str(error), "only the engine refuses, or in other words"
        return trainer
    fused: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and "visual" not in name:
            fused.setdefault(vllm_name(name, renamed), []).append(name)
    refusals = []
    for layer, shards in fused.items():
        columns = model.get_submodule(shards[0]).in_features
        try:
            method = engine.get_quant_method(Linear(columns), layer)
        except ValueError as error:
            if "Quantize all of them or none" in str(error) and not isinstance(trainer, str):
                assert len({trainer[shard] for shard in shards}) == 2, layer
            refusals.append(str(error))
            continue
        assert method.names == shards
        if not isinstance(trainer, str):
            assert [trainer[shard] for shard in shards] == [not isinstance(method, DenseMethod)] * len(shards), layer
    if isinstance(trainer, str):
        assert trainer in refusals, "only the trainer refuses, or in other words"
    else:
        assert all("Quantize all of them or none" in refusal for refusal in refusals)
    return trainer


def compressed_tensors(ignore=("lm_head",), group=None, **changes) -> dict:
    """The configuration of compressed-tensors; `group`: changes of its group of layers."""
    config = checkpoints.compressed_tensors_config(list(ignore))
    config["config_groups"]["group_0"] |= {"targets": ["Linear"], **(group or {})}
    return config | changes


def modelopt(**changes) -> dict:
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, **changes}


W4A4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "dynamic": "local"}
REFUSED = {
    "blocks of 32": compressed_tensors(group={"weights": W4A4 | {"group_size": 32}}),
    "another format": compressed_tensors(format="pack-quantized", group={"format": "pack-quantized"}),
    "modelopt AWQ": modelopt(quant_algo="NVFP4_AWQ"),
    "gptq": {"quant_method": "gptq", "bits": 4},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_trainer_and_engine_refuse_in_the_same_words(kind):
    assert isinstance(assert_they_agree(REFUSED[kind]), str)


NAMES = ("model.layers.1.mlp.down_proj", "model.layers.1", "down_proj", "*layers.1*", "layers.[0-1].mlp", "")
NAMES += ("re:.*down_proj$", "re:^model", "re:.*layers\\.(0|11)\\..*", "Linear", "visual")


@pytest.mark.parametrize("kind", ["plain", "renamed", "odd"])
@pytest.mark.parametrize("entry", NAMES)
def test_an_entry_of_a_list_means_the_same_layers(entry, kind):
    """On ignore lists of both tools, and as a target."""
    if kind == "renamed":
        entry = entry.replace("model.layers", "model.language_model.layers")
    for config in (
        compressed_tensors(ignore=["lm_head", entry]),
        compressed_tensors(group={"targets": [entry]}),
        modelopt(exclude_modules=["lm_head", entry]),
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "ignore": [entry]}},
    ):
        assert_they_agree(config, kind)


# --- options ---


def test_experts_are_refused_by_name():
    experts = type("RoutedExperts", (torch.nn.Module,), {})()
    with pytest.raises(ValueError, match=r"mlp\.experts is a mixture-of-experts layer.*use_vllm=False"):
        engine_side(None).get_quant_method(experts, "model.layers.0.mlp.experts")


def test_every_layer_of_the_batch_invariant_mode_has_it_or_is_refused(engine_config, monkeypatch):
    engine = engine_side(None)
    engine_config.additional_config = {"qerl": {"batch_invariant": True, "ignore": ["o_proj"]}}
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    packed = engine.get_quant_method(Linear(64), "model.layers.1.mlp.down_proj")
    dense = engine.get_quant_method(Linear(64), "model.layers.1.self_attn.o_proj")
    linear = mock.create_autospec(qerl_nvfp4.linear)
    monkeypatch.setattr(qerl_nvfp4, "linear", linear)
    weight = dict.fromkeys(("weight_packed", "weight_scale", "weight_global_scale", "adapter_a", "adapter_b"))
    packed.apply(SimpleNamespace(**weight, qerl_splits=[64]), torch.zeros(1, 64))
    given = inspect.signature(linear).bind(*linear.call_args.args).arguments
    assert given["batch_invariant"] is True
    with pytest.raises(ValueError, match=r"\['model.layers.1.self_attn.o_proj'\] are not NVFP4"):
        dense._common(SimpleNamespace(), 64, [64], torch.bfloat16)


def test_a_server_without_a_secret_ends_before_a_weight_is_read(engine_config, monkeypatch):
    monkeypatch.setattr(engine_config.parallel_config, "worker_extension_cls", WORKER_EXTENSION)
    monkeypatch.delenv("QERL_SERVER_SECRET", raising=False)
    with pytest.raises(RuntimeError, match="export QERL_SERVER_SECRET="):
        engine_side(None).get_quant_method(Linear(64), "model.layers.0.mlp.down_proj")
    monkeypatch.setenv("QERL_SERVER_SECRET", "0123456789abcdef")
    assert engine_side(None).get_quant_method(Linear(64), "model.layers.0.mlp.down_proj")
