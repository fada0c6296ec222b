"""Validation: whatever is wrong with a checkpoint folder is a `ValueError` that names the file and the tensor."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from qerl_trl.nvfp4 import checkpoints, headers
from qerl_trl.nvfp4.checkpoints import LAYOUTS, name_matches, parse_quantization_config
from qerl_trl.nvfp4.headers import check_headers, check_scales, packed_modules, read_headers

N, K = 8, 64
MODULE = "model.layers.0.mlp.down_proj"


def good_tensors(layout: str) -> dict[str, torch.Tensor]:
    """One packed module, with a bias, an activation scale and an all-zero block whose scale is zero."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0x08, 0x7F, (N, K // 16), dtype=torch.uint8, generator=generator)
    packed[2, :8], scale[2, 0] = 0x80, 0  # codes 0 and 8: plus and minus zero
    names = LAYOUTS[layout]
    tensors = {
        names.packed: packed,
        names.block_scale: scale.view(torch.float8_e4m3fn),
        names.global_scale: torch.tensor([3000.0]) if layout == "compressed-tensors" else torch.tensor(1 / 3000.0),
        "bias": torch.zeros(N, dtype=torch.bfloat16),
        "input_scale": torch.tensor(0.01),
    }
    return {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}


def check(folder, layout: str, tensors: dict[str, torch.Tensor], modules=None, dense=()) -> None:
    save_file(tensors, folder / "model.safetensors")
    modules = {MODULE: nn.Linear(K, N, device="meta")} if modules is None else modules
    headers = read_headers([folder / "model.safetensors"])
    names = LAYOUTS[layout]
    for name in check_headers(headers, names, modules, dense):
        scales = (tensors[f"{name}.{part}"] for part in names.tensors[1:])
        check_scales(name, *scales, names, str(folder / "model.safetensors"))


@pytest.fixture(params=list(LAYOUTS))
def layout(request):
    return request.param


def test_a_good_checkpoint_passes(tmp_path, layout):
    check(tmp_path, layout, good_tensors(layout))


def edit(part: str, change):
    """Damage one tensor: `part` is packed, block_scale or global_scale."""

    def apply(tensors: dict, layout: str) -> str:
        name = f"{MODULE}.{getattr(LAYOUTS[layout], part)}"
        tensors[name] = change(tensors[name].clone())
        return name

    return apply


def remove(part: str):
    def apply(tensors: dict, layout: str) -> str:
        name = f"{MODULE}.{getattr(LAYOUTS[layout], part)}"
        del tensors[name]
        return name

    return apply


def add(name: str):
    def apply(tensors: dict, layout: str) -> str:
        tensors[f"{MODULE}.{name}"] = torch.zeros(1)
        return f"{MODULE}.{name}"

    return apply


def set_scale(value: int):
    def change(scale: torch.Tensor) -> torch.Tensor:
        scale.view(torch.uint8)[5, 3] = value
        return scale

    return edit("block_scale", change)


DAMAGE = {
    "no codes": (remove("packed"), "missing"),
    "no block scales": (remove("block_scale"), "missing"),
    "no global scale": (remove("global_scale"), "missing"),
    "AWQ pre-scale": (add("pre_quant_scale"), "unexpected tensor"),
    "zero point": (add("weight_zero_point"), "unexpected tensor"),
    "codes int8": (edit("packed", lambda t: t.to(torch.int8)), r"is I8 .*; U8 .* belongs there"),
    "scales bf16": (edit("block_scale", lambda t: t.to(torch.bfloat16)), r"is BF16 .*; F8_E4M3 .* belongs there"),
    "scales e5m2": (edit("block_scale", lambda t: t.to(torch.float8_e5m2)), r"is F8_E5M2 .*; F8_E4M3 .* belongs there"),
    "global scale bf16": (
        edit("global_scale", lambda t: t.to(torch.bfloat16)),
        r"is BF16 .*; F32 of one number belongs there",
    ),
    "codes too narrow": (edit("packed", lambda t: t[:, :20].contiguous()), r"U8 \(8, 32\) belongs there"),
    "codes of another layer": (edit("packed", lambda t: t[:, :24].contiguous()), r"U8 \(8, 32\) belongs there"),
    "one row missing": (edit("block_scale", lambda t: t[:7].contiguous()), r"F8_E4M3 \(8, 4\) belongs there"),
    "two global scales": (edit("global_scale", lambda t: t.reshape(1).repeat(2)), "of one number belongs there"),
    "NaN block scale": (set_scale(0x7F), "1 of 32 values that are NaN"),
    "negative NaN block scale": (set_scale(0xFF), "1 of 32 values that are NaN"),
    "NaN global scale": (edit("global_scale", lambda t: t * math.nan), "is nan, which is no positive finite number"),
    "zero global scale": (edit("global_scale", lambda t: t * 0), "is 0, which is no positive"),
    "negative global scale": (edit("global_scale", lambda t: -t), "positive finite"),
    "infinite global scale": (edit("global_scale", lambda t: t / 0), "is inf"),
    "reciprocal global scale": (edit("global_scale", lambda t: 1 / t), "looks like the reciprocal"),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_damage_is_found_and_named(tmp_path, layout, damage):
    apply, message = DAMAGE[damage]
    tensors = good_tensors(layout)
    name = apply(tensors, layout)
    with pytest.raises(ValueError, match=message) as caught:
        check(tmp_path, layout, tensors)
    assert name in str(caught.value)
    assert str(tmp_path / "model.safetensors") in str(caught.value) or str(tmp_path) in str(caught.value)


def test_a_layer_of_another_shape_is_refused(tmp_path, layout):
    with pytest.raises(ValueError, match=r"\(8, 32\); U8 \(16, 32\) belongs there"):
        check(tmp_path, layout, good_tensors(layout), {MODULE: nn.Linear(K, 16, device="meta")})


def test_a_layer_that_the_file_does_not_have_is_refused(tmp_path, layout):
    other = "model.layers.1.mlp.down_proj"
    modules = {name: nn.Linear(K, N, device="meta") for name in (MODULE, other)}
    with pytest.raises(ValueError, match=rf"'{other}\.\w+' is missing"):
        check(tmp_path, layout, good_tensors(layout), modules)


def test_a_dense_layer_in_a_packed_checkpoint_is_refused(tmp_path, layout):
    """Mixed precision that the configuration does not mention."""
    other = "model.layers.1.mlp.down_proj"
    tensors = good_tensors(layout) | {f"{other}.weight": torch.zeros(N, K, dtype=torch.bfloat16)}
    modules = {name: nn.Linear(K, N, device="meta") for name in (MODULE, other)}
    with pytest.raises(ValueError, match=r"missing; it holds 'model.layers.1.mlp.down_proj.weight' as BF16"):
        check(tmp_path, layout, tensors, modules)


def test_a_packed_layer_on_the_ignore_list_is_refused(tmp_path, layout):
    with pytest.raises(ValueError, match="says that this module is not quantized"):
        check(tmp_path, layout, good_tensors(layout), {}, [MODULE])


def test_a_packed_layer_that_the_model_does_not_have_is_refused_unless_its_class_ignores_it(tmp_path, layout):
    with pytest.raises(ValueError, match="belongs to no linear of the model"):
        check(tmp_path, layout, good_tensors(layout), {})
    headers = read_headers([tmp_path / "model.safetensors"])
    assert check_headers(headers, LAYOUTS[layout], {}, (), [r"model\.layers\.0\."]) == {}


def test_many_problems_are_counted(tmp_path):
    modules = {name: nn.Linear(K, N, device="meta") for name in (MODULE, *(f"m.{i}" for i in range(20)))}
    with pytest.raises(ValueError, match="and 52 more problems"):
        check(tmp_path, "compressed-tensors", good_tensors("compressed-tensors"), modules, [])


def test_a_global_scale_below_one_is_no_reciprocal():
    """Weights above 2688 exist in no model, but our own quantizer handles them, and its folders must load again."""
    check_scales(
        MODULE, torch.ones(2).to(torch.float8_e4m3fn), torch.tensor([0.25]), LAYOUTS["compressed-tensors"], "file"
    )


# --- files


def test_pickled_weights_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"pytorch_model.bin: pickled weights.*safetensors"):
        read_headers([tmp_path / "pytorch_model.bin"])


@given(keep=st.floats(0, 0.999))
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path_factory, keep):
    folder = tmp_path_factory.mktemp("cut")
    whole, cut = folder / "whole.safetensors", folder / "cut.safetensors"
    save_file(good_tensors("compressed-tensors"), whole)
    content = whole.read_bytes()
    cut.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(ValueError, match=r"cut\.safetensors"):
        read_headers([cut])


@pytest.mark.parametrize("dtype", [d for d in headers.DTYPES.values() if d.is_floating_point], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_every_floating_dtype_is_looked_at(dtype, value):
    tensor = torch.full((3, 50), 100.0).to(dtype)
    headers.check_finite("x", tensor, "file")
    headers.check_finite("x", tensor[:0], "file")
    stored = torch.tensor(value).to(dtype)
    if math.isfinite(stored.float()):
        pytest.skip("the dtype has no such value")
    tensor.view(torch.uint8).view(3, -1)[1, : dtype.itemsize] = stored.view(1).view(torch.uint8)
    with pytest.raises(ValueError, match="file: tensor 'x' has 1 of 150 values that are NaN or infinite"):
        headers.check_finite("x", tensor, "file")


@pytest.mark.parametrize("layout_name", list(LAYOUTS))
@pytest.mark.parametrize("shared", [True, False], ids=["shared scales", "own scales"])
def test_what_compressed_tensors_writes_passes(packed_model_dir, layout_name, shared):
    """All-zero blocks included: it stores a scale of 0.125 there."""
    folder = packed_model_dir(layout_name, shared_scales=shared)
    headers, names = read_headers([folder / "model.safetensors"]), LAYOUTS[layout_name]
    packed = packed_modules(headers, names)
    assert len(packed) == 14
    state = load_file(folder / "model.safetensors")
    for name in packed:
        check_scales(name, *(state[f"{name}.{part}"] for part in names.tensors[1:]), names, "file")
    scale = state[f"{MODULE}.weight_scale"]
    assert (scale[0].float() == 0.125).all() and not state[f"{MODULE}.{names.packed}"][0].any()


# --- configurations


def compressed_tensors(**changes) -> dict:
    config = checkpoints.compressed_tensors_config(["lm_head"])
    weights = {key[8:]: changes.pop(key) for key in list(changes) if key.startswith("weights_")}
    config["config_groups"]["group_0"]["weights"] |= weights
    return config | changes


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
W4A4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "dynamic": "local"}


def with_group(name: str, **group) -> dict:
    config = compressed_tensors()
    config["config_groups"][name] = config["config_groups"]["group_0"] | group
    return config


def mixed(**layers):
    """ModelOpt's description of layers in several algorithms."""
    named = {name: {"quant_algo": algorithm} for name, algorithm in layers.items()}
    return MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": named}


@pytest.mark.parametrize(
    ("config", "layout_name"),
    [
        (compressed_tensors(), "compressed-tensors"),
        (with_group("group_0", input_activations=W4A4), "compressed-tensors"),
        (with_group("group_1", targets=["re:.*mlp.*"]), "compressed-tensors"),
        (compressed_tensors(kv_cache_scheme={"num_bits": 8, "type": "float"}), "compressed-tensors"),
        (MODELOPT, "modelopt"),
        (
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
            "modelopt",
        ),
        (MODELOPT | {"quant_algo": "W4A16_NVFP4"}, "modelopt"),
        (mixed(q_proj="NVFP4", k_proj="W4A16_NVFP4", o_proj="FP8"), "modelopt"),
    ],
    ids=[
        "ct",
        "ct W4A4",
        "ct two groups",
        "ct kv cache",
        "modelopt",
        "modelopt sidecar",
        "modelopt weight-only",
        "modelopt mixed",
    ],
)
def test_configurations_that_hold_plain_nvfp4_weights(config, layout_name):
    source = parse_quantization_config(config, "config.json")
    assert source.layout == layout_name
    assert source.ignore == ("lm_head",)


def test_which_layer_of_a_mixed_checkpoint_is_what():
    source = parse_quantization_config(mixed(q_proj="NVFP4", k_proj="W4A16_NVFP4", o_proj="FP8"), "config.json")
    names = [f"model.layers.0.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "o_proj", "v_proj")]
    assert [source.is_quantized(name, 64) for name in names] == [True, True, False, False]
    assert [source.is_fp8(name) for name in names] == [False, False, True, False]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq' is not an NVFP4 checkpoint"),
        (compressed_tensors(weights_num_bits=8), "'num_bits': 8"),
        (compressed_tensors(weights_type="int"), "'type': 'int'"),
        (compressed_tensors(weights_group_size=32), "'group_size': 32"),
        (compressed_tensors(weights_symmetric=False), "'symmetric': False"),
        (with_group("group_1", format="float-quantized"), "'group_1' has format='float-quantized'"),
        (with_group("group_0", weights=None, input_activations=W4A4), "'num_bits': None"),
        (compressed_tensors(transform_config={"config_groups": {"R1": {}}}), "untransformed"),
        (mixed(q_proj="NVFP4", lm_head="FP8"), "'lm_head' has quant_algo='FP8'.*with a dense head"),
        (mixed(q_proj="NVFP4", o_proj="MXFP8"), "'o_proj' has quant_algo='MXFP8'"),
        (MODELOPT | {"quant_algo": "FP8"}, "quant_algo='FP8'"),
        (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, "quant_algo='NVFP4_AWQ'"),
        (MODELOPT | {"quant_algo": "NVFP4_SVD"}, "quant_algo='NVFP4_SVD'"),
        (MODELOPT | {"group_size": 32}, "group_size=32"),
        (MODELOPT | {"config_groups": {"g": {"weights": {"num_bits": 8}}}}, "num_bits=8"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_configurations_that_are_refused(config, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_quantization_config(config, "some/config.json")
    assert "some/config.json" in str(caught.value)


def test_the_configuration_we_write_is_what_compressed_tensors_understands():
    quantization = pytest.importorskip("compressed_tensors.quantization")
    parsed = quantization.QuantizationConfig.model_validate(checkpoints.compressed_tensors_config(["lm_head"]))
    group = parsed.config_groups["group_0"]
    assert (group.weights.num_bits, group.weights.group_size, group.input_activations) == (4, 16, None)
    assert parsed.quantization_status == "compressed" and parsed.ignore == ["lm_head"]


# --- names


@pytest.mark.parametrize(
    ("name", "entry", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1.mlp.up_proj", "model.layers.1", True),
        ("model.layers.11.mlp.up_proj", "model.layers.1", False),
        ("model.layers.11.mlp.up_proj", "layers.1", False),
        ("model.layers.1.mlp.gate_proj", "mlp.gate", False),
        ("model.layers.1.mlp.gate", "mlp.gate", True),
        ("model.layers.1.mlp.down_proj", "down_proj", True),
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


@given(st.lists(st.sampled_from(["a", "b", "1", "11", "ab"]), min_size=1, max_size=5), st.data())
def test_every_run_of_components_matches_and_nothing_else_does(parts, data):
    start = data.draw(st.integers(0, len(parts) - 1))
    end = data.draw(st.integers(start + 1, len(parts)))
    assert name_matches(".".join(parts), ".".join(parts[start:end]))
    entry = data.draw(st.lists(st.sampled_from(["a", "b", "1", "11", "ab"]), min_size=1, max_size=3))
    runs = [parts[i : i + len(entry)] for i in range(len(parts))]
    assert name_matches(".".join(parts), ".".join(entry)) == (entry in runs)
