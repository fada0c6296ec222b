"""Trainer and engine read the same quantization configuration the same way: which layers are packed, and what is
refused.

The trainer is asked through its transformers quantizer on a model without weights, the engine through
`get_quant_method`, layer by layer
and without an engine being started.
"""

import functools
import inspect
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.utils import WeightsMapper

import qerl_nvfp4
from qerl_nvfp4 import linear as real_linear
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
QWEN_VL = WeightsMapper(
    orig_to_new_prefix={
        "model.language_model.": "language_model.model.",
        "model.visual.": "visual.",
        "lm_head.": "language_model.lm_head.",
        "model.": "language_model.model.",
    }
)


# ------------------------------------------------------------------------------------------------------------- the two
# sides


@functools.cache
def meta_model(kind: str):
    """A model without weights: 12 layers, so that layer 1 is not layer 11."""
    with torch.device("meta"):
        if kind == "renamed":  # a text model inside another: vLLM renames its modules
            text = make_tiny_config("qwen2").to_dict() | {
                "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}
            }
            vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
            return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))
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
    """What `get_quant_method` looks at."""

    def __init__(self, columns: int):
        torch.nn.Module.__init__(self)
        self.input_size = columns


@pytest.fixture(scope="module", autouse=True)
def engine_config():
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def vllm_names(name: str, renamed: bool) -> str:
    """transformers' layer -> vLLM's, which may fuse it and may call it otherwise."""
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
        built.apply_vllm_mapper(QWEN_VL)
    return built


def assert_they_agree(config: dict, kind: str = "plain") -> None:
    model, renamed = meta_model(kind), kind == "renamed"
    trainer = in_the_trainer(config, model)
    try:
        engine = engine_side(config, renamed)
    except ValueError as error:
        assert trainer == str(error), "only the engine refuses, or in other words"
        return
    fused: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and "visual" not in name:
            fused.setdefault(vllm_names(name, renamed), []).append(name)
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


# ------------------------------------------------------------------------------------------------------------- named
# cases


def compressed_tensors(ignore=("lm_head",), **changes) -> dict:
    config = checkpoints.compressed_tensors_config(list(ignore))
    weights = {key[8:]: changes.pop(key) for key in list(changes) if key.startswith("weights_")}
    config["config_groups"]["group_0"]["weights"] |= weights
    config["config_groups"]["group_0"]["targets"] = changes.pop("targets", ["Linear"])
    return config | changes


W4A4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "dynamic": "local"}
ACTIVATIONS_ONLY = compressed_tensors()
ACTIVATIONS_ONLY["config_groups"]["group_0"] |= {"weights": None, "input_activations": W4A4}
MIXED = compressed_tensors()
MIXED["config_groups"]["group_1"] = {"format": "float-quantized", "targets": ["Linear"], "weights": {"num_bits": 8}}


@pytest.mark.parametrize(
    "config",
    [
        compressed_tensors(transform_config={"config_groups": {"R1": {}}}),
        compressed_tensors(weights_group_size=32),
        ACTIVATIONS_ONLY,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        MIXED,
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "gptq", "bits": 4},
    ],
    ids=["rotated", "blocks of 32", "activations only", "modelopt blocks of 32", "mixed", "fp8", "gptq"],
)
def test_what_the_trainer_refuses_the_engine_refuses_in_the_same_words(config):
    assert isinstance(in_the_trainer(config, meta_model("plain")), str)
    assert_they_agree(config)


# ----------------------------------------------------------------------------------------------------------- any
# configuration

LINEARS = [
    name
    for kind in ("plain", "renamed")
    for name, module in meta_model(kind).named_modules()
    if type(module) is torch.nn.Linear and "visual" not in name
]


@st.composite
def entries(draw) -> str:
    """What stands on ignore lists: names, parts of names, shell patterns, regular expressions, and mistakes."""
    name = draw(st.sampled_from(LINEARS))
    parts = name.split(".")
    start = draw(st.integers(0, len(parts) - 1))
    end = draw(st.integers(start + 1, len(parts)))
    part = ".".join(parts[start:end])
    position = draw(st.integers(0, len(name) - 1))
    return draw(
        st.sampled_from(
            [
                name, part, part, f"*{part}", f"*.{part}", f"*.{part}.*", f"{part}*",
                name[:position] + "?" + name[position + 1 :],
                name[:position] + "*", name.replace("0", "[0-1]"), f"re:{part}", f"re:.*{part}$", f"re:.*{part}.*",
                f"re:^{part}",
                "re:.*layers\\.(0|11)\\..*", "lm_head", "Linear", draw(st.sampled_from(["*", "", "no.such.layer"])),
            ]
        )
    )  # fmt: skip


def mostly(value, *others):
    """`value` nineteen times in twenty: with a dozen such choices half of the configurations are valid."""
    return st.sampled_from([value] * 19 * len(others) + list(others))


def ignore_lists():
    return st.one_of(*[st.lists(entries(), max_size=3)] * 8, st.none(), st.just("lm_head"))


@st.composite
def compressed_tensors_configs(draw) -> dict:
    groups = {}
    for index in range(draw(mostly(1, 2, 0))):
        weights = {
            "num_bits": draw(mostly(4, 8)),
            "type": draw(mostly("float", "int")),
            "group_size": draw(mostly(16, 32, None)),
            "strategy": draw(mostly("tensor_group", "group", "channel")),
            "symmetric": draw(mostly(True, False)),
        }
        groups[f"group_{index}"] = {
            "weights": draw(mostly(weights, None)),
            "input_activations": draw(mostly(None, W4A4)),
            "format": draw(mostly("nvfp4-pack-quantized", None, "float-quantized")),
            "targets": draw(st.one_of(st.just(["Linear"]), st.lists(entries(), max_size=2), st.none())),
        }
    return {
        "quant_method": "compressed-tensors",
        "format": draw(mostly("nvfp4-pack-quantized", "pack-quantized", "mixed-precision", None)),
        "quantization_status": draw(mostly("compressed", None, "frozen", "initialized")),
        "transform_config": draw(mostly(None, {}, {"config_groups": {"R1": {}}})),
        "config_groups": draw(mostly(groups, None)),
        "ignore": draw(
            st.one_of(st.lists(entries(), max_size=4), st.none(), st.sampled_from([["lm_head"], "lm_head"]))
        ),
    }


@st.composite
def modelopt_configs(draw) -> dict:
    inner = {
        "quant_algo": draw(mostly("NVFP4", "W4A16_NVFP4", "FP8", "NVFP4_AWQ", "MIXED_PRECISION", None)),
        "group_size": draw(mostly(16, None, 32)),
        draw(st.sampled_from(["exclude_modules", "ignore"])): draw(
            st.one_of(st.lists(entries(), max_size=4), st.none())
        ),
    }
    if draw(st.booleans()):
        weights = {"num_bits": draw(mostly(4, 8)), "group_size": draw(mostly(16, 32))}
        group = {
            "weights": draw(mostly(weights, None)),
            "input_activations": draw(st.sampled_from([None, W4A4])),
            "targets": draw(st.one_of(st.just(["Linear"]), st.lists(entries(), max_size=2))),
        }
        inner["config_groups"] = {"group_0": group}
    if draw(st.booleans()):
        return {"producer": {"name": "modelopt"}, "quantization": inner}
    return {"quant_method": draw(mostly("modelopt", "gptq", None)), **inner}


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    config=st.one_of(compressed_tensors_configs(), modelopt_configs()),
    kind=st.sampled_from(["plain", "renamed", "odd"]),
)
def test_trainer_and_engine_agree_layer_by_layer(config, kind):
    assert_they_agree(config, kind)


# ------------------------------------------------------------------------------------------------------------- options


def test_a_dense_checkpoint_is_packed_but_for_the_head_and_the_option_ignore(engine_config):
    engine = engine_side(None)
    entry = ["model.layers.1"]
    engine_config.additional_config = {"qerl": {"ignore": entry}}
    model, converted = (
        meta_model("plain"),
        NVFP4Config(modules_to_not_convert=entry).linears_to_quantize(meta_model("plain")),
    )
    try:
        for name, module in model.named_modules():
            if type(module) is torch.nn.Linear and name.endswith(("o_proj", "down_proj", "lm_head")):
                method = engine.get_quant_method(Linear(module.in_features), name)
                assert (name in converted) is not isinstance(method, DenseMethod), name
    finally:
        engine_config.additional_config = {}


def test_experts_are_refused_by_name():
    experts = type("RoutedExperts", (torch.nn.Module,), {})()
    with pytest.raises(ValueError, match=r"mlp\.experts is a mixture-of-experts layer.*use_vllm=False"):
        engine_side(None).get_quant_method(experts, "model.layers.0.mlp.experts")


def test_the_batch_invariant_mode_is_vllms_own(engine_config, monkeypatch):
    """Where it is on, every layer keeps to it or is refused; rollout/server.py compares it."""
    engine = engine_side(None)
    engine_config.additional_config = {"qerl": {"batch_invariant": True, "ignore": ["o_proj"]}}
    try:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        packed, dense = (
            engine.get_quant_method(Linear(64), f"model.layers.1.{name}")
            for name in ("mlp.down_proj", "self_attn.o_proj")
        )
        calls = []
        monkeypatch.setattr(qerl_nvfp4, "linear", lambda *arguments: calls.append(arguments))
        weight = dict.fromkeys(("weight_packed", "weight_scale", "weight_global_scale", "adapter_a", "adapter_b"))
        packed.apply(SimpleNamespace(**weight, qerl_splits=[64]), torch.zeros(1, 64))
        names = list(inspect.signature(real_linear).parameters)
        assert dict(zip(names, calls[0], strict=True))["batch_invariant"] is True
        with pytest.raises(ValueError, match=r"\['model.layers.1.self_attn.o_proj'\] are not NVFP4"):
            dense._common(SimpleNamespace(), 64, [64], torch.bfloat16)
    finally:
        engine_config.additional_config = {}


def test_a_checkpoint_is_only_taken_over_when_asked():
    checkpoint = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    assert QeRLQuantizationConfig.override_quantization_method(checkpoint, None) is None
    assert QeRLQuantizationConfig.override_quantization_method(checkpoint, "fp8") is None
    assert QeRLQuantizationConfig.override_quantization_method(checkpoint, "qerl_nvfp4") == "qerl_nvfp4"


def test_a_server_without_a_secret_ends_before_a_weight_is_read(engine_config, monkeypatch):
    monkeypatch.setattr(engine_config.parallel_config, "worker_extension_cls", WORKER_EXTENSION)
    monkeypatch.delenv("QERL_SERVER_SECRET", raising=False)
    with pytest.raises(RuntimeError, match="export QERL_SERVER_SECRET="):
        engine_side(None).get_quant_method(Linear(64), "model.layers.0.mlp.down_proj")
    monkeypatch.setenv("QERL_SERVER_SECRET", "0123456789abcdef")
    assert engine_side(None).get_quant_method(Linear(64), "model.layers.0.mlp.down_proj")
