"""Quantization configurations of other tools, and the names in their lists."""

import pytest

from qerl_trl.nvfp4 import checkpoints
from qerl_trl.nvfp4.checkpoints import name_matches, parse_quantization_config

MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
SIDECAR = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
W4A4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "dynamic": "local"}


def compressed(group_name: str = "group_0", weights=None, group=None, **changes) -> dict:
    """compressed-tensors' configuration with other `weights` or other settings of a group."""
    config = checkpoints.compressed_tensors_config(["lm_head"])
    groups = config["config_groups"]
    groups["group_0"]["weights"] |= weights or {}
    groups[group_name] = groups["group_0"] | (group or {})
    return config | changes


def mixed(**layers):
    """ModelOpt's description of layers in several algorithms."""
    named = {name: {"quant_algo": algorithm} for name, algorithm in layers.items()}
    return MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": named}


MIXED = mixed(q_proj="NVFP4", k_proj="W4A16_NVFP4", o_proj="FP8")


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (compressed(), "compressed-tensors"),
        (compressed(group={"input_activations": W4A4}), "compressed-tensors"),
        (compressed("group_1", group={"targets": ["re:.*mlp.*"]}), "compressed-tensors"),
        (compressed(kv_cache_scheme={"num_bits": 8, "type": "float"}), "compressed-tensors"),
        (MODELOPT, "modelopt"),
        (SIDECAR, "modelopt"),
        (MODELOPT | {"quant_algo": "W4A16_NVFP4"}, "modelopt"),
        (MIXED, "modelopt"),
    ],
    ids="ct,ct W4A4,ct two groups,ct kv cache,modelopt,modelopt sidecar,modelopt weight-only,modelopt mixed".split(","),
)
def test_configurations_of_plain_nvfp4_weights(config, layout):
    source = parse_quantization_config(config, "config.json")
    assert (source.layout, source.ignore) == (layout, ("lm_head",))


def test_layers_of_a_mixed_checkpoint():
    source = parse_quantization_config(MIXED, "config.json")
    names = [f"model.layers.0.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "o_proj", "v_proj")]
    assert [source.is_quantized(name, 64) for name in names] == [True, True, False, False]
    assert [source.is_fp8(name) for name in names] == [False, False, True, False]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq' is not an NVFP4 checkpoint"),
        (compressed(weights={"num_bits": 8}), "'num_bits': 8"),
        (compressed(weights={"type": "int"}), "'type': 'int'"),
        (compressed(weights={"group_size": 32}), "'group_size': 32"),
        (compressed(weights={"symmetric": False}), "'symmetric': False"),
        (compressed("group_1", group={"format": "float-quantized"}), "'group_1' has format='float-quantized'"),
        (compressed(group={"weights": None, "input_activations": W4A4}), "'num_bits': None"),
        (compressed(transform_config={"config_groups": {"R1": {}}}), "untransformed"),
        (mixed(q_proj="NVFP4", lm_head="FP8"), "'lm_head' has quant_algo='FP8'.*with a dense head"),
        (mixed(q_proj="NVFP4", o_proj="MXFP8"), "'o_proj' has quant_algo='MXFP8'"),
        (MODELOPT | {"quant_algo": "FP8"}, "quant_algo='FP8'"),
        (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, "quant_algo='NVFP4_AWQ'"),
        (MODELOPT | {"group_size": 32}, "group_size=32"),
        (MODELOPT | {"config_groups": {"g": {"weights": {"num_bits": 8}}}}, "num_bits=8"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_configurations_that_are_refused(config, message):
    with pytest.raises(ValueError, match=f"some/config.json.*{message}"):
        parse_quantization_config(config, "some/config.json")


def test_compressed_tensors_understands_the_configuration_we_write():
    quantization = pytest.importorskip("compressed_tensors.quantization")
    parsed = quantization.QuantizationConfig.model_validate(checkpoints.compressed_tensors_config(["lm_head"]))
    group = parsed.config_groups["group_0"]
    assert (group.weights.num_bits, group.weights.group_size, group.input_activations) == (4, 16, None)
    assert parsed.quantization_status == "compressed" and parsed.ignore == ["lm_head"]


@pytest.mark.parametrize(
    ("name", "entry", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1.mlp.up_proj", "model.layers.1", True),
        ("model.layers.11.mlp.up_proj", "model.layers.1", False),
        ("model.layers.11.mlp.up_proj", "layers.1", False),
        ("model.layers.1.mlp.gate_proj", "mlp.gate", False),
        ("model.layers.1.mlp.gate", "mlp.gate", True),
        ("model.layers.1.mlp.down_proj", "proj", False),
        ("model.layers.1.mlp.down_proj", "*.down_proj", True),
        ("model.layers.1.mlp.down_proj", "model.layers.[0-1].*", True),
        ("model.layers.11.mlp.down_proj", "model.layers.[0-1].*", False),
        ("model.layers.1.mlp.down_proj", "re:.*down", True),
        ("model.layers.1.mlp.down_proj", "re:down", False),
    ],
)
def test_names_match_at_component_boundaries(name, entry, expected):
    assert name_matches(name, entry) is expected
