"""`NVFP4Config` through transformers' own `from_pretrained` and `save_pretrained`, and checkpoints of other tools."""

import copy
import itertools
import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BitsAndBytesConfig,
    MixtralConfig,
    MixtralForCausalLM,
)

from qerl_trl.nvfp4 import quantizer
from qerl_trl.nvfp4.architectures import DECODER
from qerl_trl.nvfp4.config import NVFP4Config, from_pretrained, load_config, pretrained_kwargs
from qerl_trl.nvfp4.format import MIN_BLOCK_SCALE, SCALE_RULES, dequantize, quantize
from qerl_trl.nvfp4.fused import fuse_storage
from qerl_trl.nvfp4.linear import NVFP4Linear
from tests.tiny_models import FAMILIES

IDS = torch.arange(24).reshape(2, 12) % 300
LAYOUT_NAMES = ["compressed-tensors", "modelopt"]


@pytest.mark.parametrize("dtype", [torch.float32, "float32", None])
def test_a_dequantized_model_has_one_dtype(tiny_model_dir, dtype):
    model = from_pretrained(tiny_model_dir("qwen2")).dequantize(dtype)
    assert {p.dtype for p in model.parameters()} == {torch.float32 if dtype else torch.bfloat16}
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()


@pytest.fixture(scope="module")
def quantized(tiny_model_dir):
    """A tiny Qwen2 in NVFP4. Read-only."""
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"), quantization_config=NVFP4Config())


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def same_state(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in a)


def nvfp4_layers(model) -> dict[str, NVFP4Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, NVFP4Linear)}


def assert_fused(model) -> None:
    """q/k/v and gate/up: one storage each, in order, one global scale."""
    groups = 0
    for parent in model.modules():
        for group in DECODER.groups:
            layers = [getattr(parent, name, None) for name in group]
            if not all(isinstance(layer, NVFP4Linear) for layer in layers):
                continue
            groups += 1
            assert len({bytes(layer.weight_global_scale.tolist()) for layer in layers}) == 1
            for attribute in ("weight_packed", "weight_scale"):
                parts = [getattr(layer, attribute) for layer in layers]
                assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
                for before, after in itertools.pairwise(parts):
                    assert after.data_ptr() == before.data_ptr() + before.numel()
    assert groups == 2 * model.config.num_hidden_layers


# --- dense checkpoints


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_quantizes_saves_and_opens_in_stock_transformers(family, tiny_model_dir, tmp_path):
    model, info = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir(family), quantization_config=NVFP4Config(), output_loading_info=True
    )
    assert not any(info.values()), info
    assert not any(p.is_meta for p in model.parameters())
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert set(linears) - set(nvfp4_layers(model)) == {"lm_head"}
    if family != "phi3":  # its projections are fused already
        assert_fused(model)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(stock.hf_quantizer).__name__ == "CompressedTensorsHfQuantizer"
    assert torch.equal(logits(stock), expected)
    ours = from_pretrained(tmp_path)
    assert same_state(ours, model)
    assert torch.equal(logits(ours), expected)


def test_weights_are_the_reference_quantization_of_the_checkpoint(tiny_model_dir):
    """Before fusing, each layer is `quantize` of its tensor; fusing only moves scales, which changes no value here."""
    dense = load_file(tiny_model_dir("qwen2") / "model.safetensors")
    for rule in SCALE_RULES:
        model = AutoModelForCausalLM.from_pretrained(
            tiny_model_dir("qwen2"), quantization_config=NVFP4Config(scale_rule=rule)
        )
        for name, layer in nvfp4_layers(model).items():
            reference = quantize(dense[f"{name}.weight"], rule)
            assert torch.equal(layer.dequantize(), dequantize(*reference)), name
            if name.endswith(("o_proj", "down_proj")):
                assert all(torch.equal(a, b) for a, b in zip(layer.nvfp4, reference, strict=True))


def test_forward_equals_the_dequantized_model(quantized):
    dense = copy.deepcopy(quantized).dequantize(torch.bfloat16)
    assert not nvfp4_layers(dense) and not hasattr(dense, "hf_quantizer")
    assert torch.equal(logits(dense), logits(quantized))


@pytest.mark.parametrize("device_map", [None, "cpu", {"": "cpu"}, "auto"], ids=str)
def test_device_maps(device_map, tiny_model_dir, quantized):
    if device_map == "auto" and torch.cuda.is_available():
        pytest.skip("auto means the GPU here")
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir("qwen2"), quantization_config=NVFP4Config(), device_map=device_map
    )
    assert same_state(model, quantized)


def test_offloading_is_refused(tiny_model_dir):
    with pytest.raises(ValueError, match="cannot be offloaded"):
        AutoModelForCausalLM.from_pretrained(
            tiny_model_dir("qwen2"),
            quantization_config=NVFP4Config(),
            device_map={"model.embed_tokens": "cpu", "model": "disk", "lm_head": "cpu"},
        )


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float32", torch.float16], ids=str)
def test_compute_dtype_is_the_model_dtype(compute_dtype, tiny_model_dir):
    config = NVFP4Config(compute_dtype=compute_dtype)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"), quantization_config=config, dtype="auto")
    assert model.dtype == config.torch_dtype == model.model.embed_tokens.weight.dtype
    assert {layer.compute_dtype for layer in nvfp4_layers(model).values()} == {config.torch_dtype}
    assert logits(model).dtype == config.torch_dtype


def test_layers_are_frozen_and_in_the_mode_of_the_model(quantized):
    assert not any(p.requires_grad for layer in nvfp4_layers(quantized).values() for p in layer.parameters())
    assert not any(layer.training for layer in nvfp4_layers(quantized).values())


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        (["down_proj"], {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}),
        (["model.layers.1.mlp"], {f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")}),
        (["*.0.self_attn.[qo]_proj"], {"model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"}),
        (["re:.*v_proj"], {"model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj"}),
    ],
    ids=["part", "name", "glob", "regex"],
)
def test_modules_to_not_convert(entries, kept, tiny_model_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir("qwen2"), quantization_config=NVFP4Config(modules_to_not_convert=entries)
    )
    assert {name for name, module in model.named_modules() if type(module) is nn.Linear} == kept | {"lm_head"}
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert set(written["ignore"]) == kept | {"lm_head"}
    assert same_state(from_pretrained(tmp_path), model)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)), logits(model))


def test_layer_one_is_not_layer_eleven(tiny_model_dir):
    folder = tiny_model_dir("qwen2", num_hidden_layers=12)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=NVFP4Config(modules_to_not_convert=["model.layers.1"])
    )
    dense = {
        name.split(".")[2] for name, module in model.named_modules() if type(module) is nn.Linear and "layers" in name
    }
    assert dense == {"1"}


def test_an_entry_that_matches_nothing_is_warned_about(tiny_model_dir, caplog):
    own_logger = logging.getLogger("qerl_trl.nvfp4.config")
    own_logger.addHandler(caplog.handler)
    AutoModelForCausalLM.from_pretrained(
        tiny_model_dir("qwen2"), quantization_config=NVFP4Config(modules_to_not_convert=["down_projj"])
    )
    own_logger.removeHandler(caplog.handler)
    assert "'down_projj' matches no module of Qwen2ForCausalLM" in caplog.text


# --- storage


def test_fused_storage_survives_deepcopy_and_casts(quantized):
    assert_fused(quantized)
    twin = copy.deepcopy(quantized)
    assert_fused(twin.to(torch.bfloat16).to("cpu"))
    assert same_state(twin, quantized)
    assert fuse_storage(twin) == 4


def test_fuse_storage_twice_changes_nothing(quantized):
    twin = copy.deepcopy(quantized)
    before = {name: layer.weight_packed.data_ptr() for name, layer in nvfp4_layers(twin).items()}
    fuse_storage(twin)
    assert before == {name: layer.weight_packed.data_ptr() for name, layer in nvfp4_layers(twin).items()}


def make_group(scales: list[float]) -> nn.Module:
    """Something with q_proj, k_proj, v_proj whose weights have these magnitudes."""
    attention = nn.Module()
    generator = torch.Generator().manual_seed(0)
    for name, scale, rows in zip(DECODER.groups[0], scales, (32, 16, 16), strict=True):
        linear = nn.Linear(64, rows, bias=False)
        linear.weight.data = torch.randn(rows, 64, generator=generator) * scale
        linear.weight.data[0, :16] = 0
        setattr(attention, name, NVFP4Linear.from_linear(linear))
    return attention


def test_sharing_a_global_scale_over_a_large_gap_is_exact():
    model = make_group([1.0, 0.01, 2.0**-10])
    before = [getattr(model, name).dequantize(torch.float32) for name in DECODER.groups[0]]
    assert fuse_storage(model) == 1
    for name, expected in zip(DECODER.groups[0], before, strict=True):
        assert torch.equal(getattr(model, name).dequantize(torch.float32), expected)


def test_blocks_too_small_for_the_shared_scale_are_rounded_not_blown_up():
    """2^-16 times smaller: some block scales would fall below 2^-6. Their values must stay within half a step of 2^-6 / g."""
    model = make_group([1.0, 2.0**-16, 1.0])
    before = model.k_proj.dequantize(torch.float32)
    fuse_storage(model)
    after = model.k_proj.dequantize(torch.float32)
    assert not torch.equal(after, before)
    unit = MIN_BLOCK_SCALE / model.k_proj.global_scale
    assert ((after - before).abs() <= unit).all()
    assert (after - before).abs().max() / before.abs().max() < 0.2


# --- checkpoints of other tools


@pytest.mark.parametrize("shared", [True, False], ids=["shared scales", "own scales"])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_a_foreign_checkpoint_keeps_its_bytes(layout, shared, packed_model_dir):
    folder = packed_model_dir(layout, shared_scales=shared)
    model, info = from_pretrained(folder, output_loading_info=True)
    assert not any(value for key, value in info.items() if key != "unexpected_keys"), info
    assert not info["unexpected_keys"]
    stored = load_file(packed_model_dir("compressed-tensors", shared_scales=shared) / "model.safetensors")
    for name, layer in nvfp4_layers(model).items():
        assert torch.equal(layer.weight_packed, stored[f"{name}.weight_packed"])
        assert torch.equal(layer.weight_scale, stored[f"{name}.weight_scale"].view(torch.uint8))
        torch.testing.assert_close(layer.global_scale, stored[f"{name}.weight_global_scale"], rtol=1.2e-7, atol=0)
    assert len(nvfp4_layers(model)) == 14


@pytest.mark.parametrize("shared", [True, False], ids=["shared scales", "own scales"])
def test_a_compressed_tensors_checkpoint_gives_the_logits_of_the_stock_path(shared, packed_model_dir):
    folder = packed_model_dir("compressed-tensors", shared_scales=shared)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = from_pretrained(folder)
    assert torch.equal(logits(model), logits(stock))
    for name, layer in nvfp4_layers(model).items():  # the stock path has decompressed itself at its first forward
        assert torch.equal(layer.dequantize(), stock.get_submodule(name).weight), name


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_fused_layers_of_a_foreign_checkpoint_share_storage(layout, packed_model_dir):
    assert_fused(from_pretrained(packed_model_dir(layout)))


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_saving_a_foreign_checkpoint_writes_compressed_tensors(layout, packed_model_dir, tmp_path):
    model = from_pretrained(packed_model_dir(layout))
    model.save_pretrained(tmp_path)
    assert (
        json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"]
        == "compressed-tensors"
    )
    assert same_state(from_pretrained(tmp_path), model)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)), logits(model))


def copy_folder(source: Path, target: Path) -> Path:
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_modelopt_export_described_by_its_sidecar_only(packed_model_dir, tmp_path):
    folder = copy_folder(packed_model_dir("modelopt"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    sidecar = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    }
    (folder / "hf_quant_config.json").write_text(json.dumps(sidecar))
    assert same_state(from_pretrained(folder), from_pretrained(packed_model_dir("modelopt")))


def test_the_route_for_other_libraries(packed_model_dir, tiny_model_dir):
    """`pretrained_kwargs` says what to pass to any `from_pretrained`."""
    packed, dense = packed_model_dir("compressed-tensors"), tiny_model_dir("qwen2")
    assert set(pretrained_kwargs(packed)) == {"config"}
    assert set(pretrained_kwargs(dense)) == {"quantization_config"}
    for folder in (packed, dense):
        model = AutoModelForCausalLM.from_pretrained(
            folder, **pretrained_kwargs(folder, NVFP4Config(compute_dtype="float32"))
        )
        assert nvfp4_layers(model) and model.dtype == torch.float32
    config = load_config(packed)
    assert config.quantization_config["quant_method"] == "qerl_nvfp4"
    assert same_state(AutoModelForCausalLM.from_pretrained(packed, config=config), from_pretrained(packed))


def test_a_given_config_is_kept(packed_model_dir):
    config = AutoConfig.from_pretrained(packed_model_dir("modelopt"))
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1234.0}
    model = from_pretrained(packed_model_dir("modelopt"), config=config)
    assert nvfp4_layers(model) and model.config.rope_parameters["rope_theta"] == 1234.0


def test_another_librarys_config_is_refused(tiny_model_dir):
    with pytest.raises(ValueError, match=r"BitsAndBytesConfig; this function takes qerl_trl\.NVFP4Config"):
        from_pretrained(tiny_model_dir("qwen2"), BitsAndBytesConfig(load_in_4bit=True))


def test_skipping_a_module_that_is_packed_on_disk_is_refused(packed_model_dir):
    with pytest.raises(ValueError, match=r"down_proj.*not quantized"):
        from_pretrained(packed_model_dir("compressed-tensors"), NVFP4Config(modules_to_not_convert=["down_proj"]))


def damaged(packed_model_dir, tmp_path, change) -> Path:
    folder = copy_folder(packed_model_dir("compressed-tensors"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q}.weight_scale"), f"'{Q}.weight_scale' is missing"),
        (
            lambda t: t[f"{Q}.weight_scale"].view(torch.uint8)[3].fill_(0x7F),
            f"'{Q}.weight_scale' has 8 of 1024 values that are NaN",
        ),
        (lambda t: t[f"{Q}.weight_global_scale"].reciprocal_(), f"'{Q}.weight_global_scale'.*reciprocal"),
        (
            lambda t: t.update({f"{Q}.weight_packed": t[f"{Q}.weight_packed"][:64].clone()}),
            r"weight_packed' is U8 \(64, 64\)",
        ),
    ],
    ids=["missing", "NaN", "reciprocal", "shape"],
)
def test_a_damaged_folder_is_refused_by_from_pretrained(change, message, packed_model_dir, tmp_path):
    folder = damaged(packed_model_dir, tmp_path, change)
    with pytest.raises(ValueError, match=message) as caught:
        from_pretrained(folder)
    assert "model.safetensors" in str(caught.value)


def test_a_packed_folder_without_its_configuration_is_refused(packed_model_dir, tmp_path):
    folder = copy_folder(packed_model_dir("compressed-tensors"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantized already.*config\.json needs its quantization_config"):
        from_pretrained(folder)


@pytest.mark.parametrize("tensor", ["model.norm.weight", f"{Q}.bias"])
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_a_missing_tensor_is_an_error_not_random_numbers(kind, tensor, packed_model_dir, tiny_model_dir, tmp_path):
    folder = copy_folder(
        tiny_model_dir("qwen2") if kind == "dense" else packed_model_dir("compressed-tensors"), tmp_path
    )
    tensors = load_file(folder / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=rf"1 tensors of Qwen2ForCausalLM are missing in the checkpoint, e\.g\. '{tensor}'"
    ) as caught:
        from_pretrained(folder)
    assert str(folder) in str(caught.value)


def test_a_missing_dense_weight_is_an_error(tiny_model_dir, tmp_path):
    folder = copy_folder(tiny_model_dir("qwen2"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{Q}.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"'{Q}.weight'"):
        from_pretrained(folder)


def test_a_new_classification_head_may_be_missing(tiny_model_dir):
    model = from_pretrained(tiny_model_dir("qwen2"), model_class=AutoModelForSequenceClassification, num_labels=1)
    assert nvfp4_layers(model) and type(model.score) is nn.Linear


# --- what cannot be quantized


@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_a_classifier_on_a_packed_base_has_a_new_head(kind, packed_model_dir):
    folder = packed_model_dir("compressed-tensors")
    options = pretrained_kwargs(folder)
    options["config"].num_labels = 3
    model = kind.from_pretrained(folder, **options)
    base = from_pretrained(folder)
    assert model.score.weight.shape == (3, 128)
    name = "model.layers.0.self_attn.q_proj.weight_packed"
    assert torch.equal(model.get_parameter(name), base.get_parameter(name))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_settings_of_the_configuration_may_be_given_by_name(packed, tiny_model_dir, packed_model_dir):
    folder = packed_model_dir("compressed-tensors") if packed else tiny_model_dir("qwen2")
    kind = AutoModelForSequenceClassification
    model = from_pretrained(folder, model_class=kind, num_labels=3, rms_norm_eps=0.5)
    assert model.score.weight.shape == (3, 128)
    assert model.model.norm.variance_epsilon == 0.5 and nvfp4_layers(model)


def test_a_modelopt_folder_that_is_to_be_quantized_again_is_refused_with_the_way_that_works(packed_model_dir):
    """transformers knows no such method, ignores the folder's configuration, and asks us to quantize."""
    folder = packed_model_dir("modelopt")
    with pytest.raises(ValueError, match=r"quantized already, .*\*\*qerl_trl\.pretrained_kwargs\(model\)"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=NVFP4Config())
    assert isinstance(
        AutoModelForCausalLM.from_pretrained(folder, **pretrained_kwargs(folder)).model.layers[0].mlp.up_proj,
        NVFP4Linear,
    )


def test_nan_weights_are_refused_with_file_and_tensor(tiny_model_dir, tmp_path):
    folder = copy_folder(tiny_model_dir("qwen2"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{Q}.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"model\.safetensors: tensor '{Q}\.weight': .*nan"):
        from_pretrained(folder)


def test_pickled_weights_are_refused(tiny_model_dir, tmp_path):
    folder = copy_folder(tiny_model_dir("qwen2"), tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: pickled weights"):
        from_pretrained(folder)


def test_a_width_that_is_no_multiple_of_16_stays_dense(tiny_model_dir):
    model = from_pretrained(tiny_model_dir("qwen2", intermediate_size=264))
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear
    assert isinstance(model.model.layers[0].mlp.up_proj, NVFP4Linear)


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory):
    config = MixtralConfig(
        vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("moe")
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_experts_are_refused_by_name_and_can_be_skipped(moe_dir):
    with pytest.raises(ValueError, match=r"has experts \(e\.g\. 'model\.layers\.0\.mlp\.experts") as refusal:
        from_pretrained(moe_dir)
    for consequence in ("modules_to_not_convert=['experts']", "use_vllm=False"):
        assert consequence in str(refusal.value)
    model = from_pretrained(moe_dir, NVFP4Config(modules_to_not_convert=["experts"]))
    assert nvfp4_layers(model)
    assert any(p.ndim == 3 and p.dtype == torch.bfloat16 for p in model.parameters())


def test_nothing_left_to_quantize_is_an_error(tiny_model_dir):
    with pytest.raises(ValueError, match=r"no nn\.Linear of Qwen2ForCausalLM is left"):
        from_pretrained(tiny_model_dir("qwen2"), NVFP4Config(modules_to_not_convert=["model"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_rule": "best"}, "scale_rule='best'"),
        ({"modules_to_not_convert": "lm_head"}, "must be a list"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        NVFP4Config(**options)


# --- configuration objects


def test_options_round_trip():
    config = NVFP4Config("four_over_six", ["down_proj"], "float16")
    assert vars(NVFP4Config.from_dict(config.options())) == vars(config)
    assert eval(repr(config), {"NVFP4Config": NVFP4Config}).options() == config.options()


def test_what_is_serialized_is_compressed_tensors(quantized):
    """config.json must never carry a method that only this package knows."""
    written = json.loads(quantized.config.to_json_string())["quantization_config"]
    assert written["quant_method"] == "compressed-tensors" and written["ignore"] == ["lm_head"]


def test_our_method_does_not_touch_transformers_own():
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    assert AUTO_QUANTIZATION_CONFIG_MAPPING["qerl_nvfp4"] is NVFP4Config
    assert AUTO_QUANTIZATION_CONFIG_MAPPING.get("nvfp4") is not NVFP4Config


# --- saving


def test_a_saved_folder_has_the_layout_of_compressed_tensors(quantized, tmp_path):
    quantized.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        found = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        layout = {
            key.removeprefix(f"{Q}."): (value.get_dtype(), value.get_shape())
            for key, value in found.items()
            if Q in key
        }
        assert file.metadata()["quantized_by"] == "qerl-trl"
    assert layout == {
        "weight_packed": ("U8", [128, 64]),
        "weight_scale": ("F8_E4M3", [128, 8]),
        "weight_global_scale": ("F32", [1]),
        "bias": ("BF16", [128]),
    }
    assert "lm_head.weight" not in found


def test_saving_in_several_shards(quantized, tmp_path):
    quantized.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same_state(from_pretrained(tmp_path), quantized)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)), logits(quantized))


def test_saving_does_not_change_the_model(quantized, tmp_path):
    before = copy.deepcopy(quantized)
    quantized.save_pretrained(tmp_path)
    assert same_state(before, quantized)
    assert_fused(quantized)


def test_saving_the_base_inside_an_adapter_is_refused(quantized, tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(copy.deepcopy(quantized), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(RuntimeError, match="inside an adapter"):
        model.get_base_model().save_pretrained(tmp_path)


def test_loading_does_not_warn_about_our_own_doing(tiny_model_dir):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"), quantization_config=NVFP4Config())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_process_that_gets_its_weights_from_another_reads_no_quantized_layer(
    family, tiny_model_dir, packed_model_dir, tmp_path, monkeypatch, caplog
):
    """Under FSDP with `cpu_ram_efficient_loading`: what accelerate sends has to meet the same parameters in the same order."""
    whole = from_pretrained(tiny_model_dir(family))
    whole.save_pretrained(tmp_path)
    folders = [tiny_model_dir(family), str(tmp_path)]
    folders += [packed_model_dir(layout) for layout in LAYOUT_NAMES] if family == "qwen2" else []
    for folder in folders:
        caplog.clear()
        wanted = from_pretrained(folder).state_dict()
        said = caplog.messages
        caplog.clear()
        with monkeypatch.context() as patched:
            patched.setattr(quantizer, "left_to_the_first", lambda: True)
            patched.setattr(quantizer, "quantize", None)
            patched.setattr(quantizer._PackedPlaceholder, "to_nvfp4", None)
            found = from_pretrained(folder)
        assert caplog.messages == said and not any(p.requires_grad for _, p in nvfp4_parameters(found))
        state = found.state_dict()
        assert [(k, v.shape, v.dtype) for k, v in state.items()] == [(k, v.shape, v.dtype) for k, v in wanted.items()]
        packed = {name for name, _ in nvfp4_parameters(found)}
        for name, tensor in state.items():
            if name not in packed:
                assert torch.equal(tensor, wanted[name])
            elif name.endswith("weight_packed"):
                assert wanted[name].any() and not tensor.any()
        for model in (found, copy.deepcopy(found)):  # also where nobody sends them: of a second model of a run
            with pytest.raises(RuntimeError, match="were not read: with fsdp_cpu_ram_efficient_loading only the first"):
                logits(model)
        for name, _ in nvfp4_parameters(found):
            layer, _, part = name.rpartition(".")
            setattr(found.get_submodule(layer), part, nn.Parameter(wanted[name], requires_grad=False))
        assert torch.equal(logits(found), logits(from_pretrained(folder)))


def nvfp4_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    parts = ("weight_packed", "weight_scale", "weight_global_scale")
    return [(f"{name}.{part}", getattr(layer, part)) for name, layer in nvfp4_layers(model).items() for part in parts]


def test_a_plain_configuration_is_left_alone(tiny_model_dir):
    folder = tiny_model_dir("qwen2")
    assert load_config(folder).to_dict() == AutoConfig.from_pretrained(folder).to_dict()


def test_transformers_own_adapters_are_saved_alone(tiny_model_dir, tmp_path):
    model = from_pretrained(tiny_model_dir("qwen2"))
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    expected = model(torch.arange(8)[None]).logits
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["adapter_model.safetensors"]
    again = from_pretrained(tiny_model_dir("qwen2"))
    again.load_adapter(tmp_path)
    assert torch.equal(again(torch.arange(8)[None]).logits, expected)


def test_a_model_into_which_an_adapter_was_merged_in_part_is_not_saved_as_packed(tiny_model_dir, tmp_path):
    model = get_peft_model(
        from_pretrained(tiny_model_dir("qwen2")), LoraConfig(r=4, target_modules=["q_proj"])
    ).merge_and_unload()
    with pytest.raises(RuntimeError, match=r"an adapter was merged \(2 layers.*model\.dequantize\(\) first"):
        model.save_pretrained(tmp_path)
    expected = model(torch.arange(8)[None]).logits
    model.dequantize().save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(torch.arange(8)[None]).logits, expected)


# --- memory

def anonymous_memory() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_the_dense_model_is_never_in_memory(quantized, tmp_path):
    """Layers as wide as those of Qwen2.5-0.5B. `quantized` has imported everything."""
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 8}
    config = Qwen2Config(**sizes, vocab_size=320, num_attention_heads=14, num_key_value_heads=2)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Qwen2ForCausalLM(config).named_parameters()}
    block = torch.randn(1 << 20).bfloat16()
    tensors = {name: block.repeat(5)[: shape.numel()].view(shape).clone() for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    del tensors
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(tmp_path)
    gc.collect()
    before, seen, done = anonymous_memory(), [], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            seen.append(anonymous_memory() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    model = load(tmp_path)
    done.set()
    watching.join()
    packed, dense = (sum(p.nbytes for p in model.parameters()), 2 * sum(map(torch.Size.numel, shapes.values())))
    assert 0.8 * packed < max(seen) < packed + 80e6 < dense, f"peak {max(seen) / 1e6:.0f} MB, packed {packed / 1e6:.0f}"


@pytest.mark.gpu
def test_cuda_loads_the_same_bytes(tiny_model_dir, quantized):
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir("qwen2"), quantization_config=NVFP4Config(), device_map="cuda"
    )
    assert_fused(model)
    assert same_state(model.cpu(), quantized)
    assert_fused(model)
