"""`NVFP4Config` through transformers' own `from_pretrained` and `save_pretrained`, and checkpoints of other tools."""

import copy
import ctypes
import gc
import json
import threading
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, MixtralConfig, MixtralForCausalLM

from qerl_trl.nvfp4 import quantizer
from qerl_trl.nvfp4.config import NVFP4Config, from_pretrained, pretrained_kwargs
from qerl_trl.nvfp4.format import SCALE_RULES, dequantize, quantize
from tests.nvfp4.models import LAYOUT_NAMES, assert_fused, dense_layers, logits, nvfp4_layers, same_state, stock_logits
from tests.tiny_models import FAMILIES

Q = "model.layers.1.self_attn.q_proj"


def load(folder, config=None, **options):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config or NVFP4Config(), **options)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_quantizes_saves_and_opens_in_stock_transformers(family, tiny_model_dir, tmp_path):
    model, info = load(tiny_model_dir(family), output_loading_info=True)
    assert not any(info.values()), info
    packed = nvfp4_layers(model)
    assert dense_layers(model) == {"lm_head"} and not any(p.is_meta for p in model.parameters())
    assert not any(layer.training or p.requires_grad for layer in packed.values() for p in layer.parameters())
    if family != "phi3":  # its projections are fused already
        assert_fused(model)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(stock.hf_quantizer).__name__ == "CompressedTensorsHfQuantizer"
    assert torch.equal(logits(stock), expected)
    ours = from_pretrained(tmp_path)
    assert same_state(ours, model) and torch.equal(logits(ours), expected)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_weights_are_the_reference_quantization_of_the_checkpoint(rule, tiny_model_dir):
    """Before fusing, each layer is `quantize` of its tensor; fusing only moves scales, which changes no value here."""
    dense = load_file(tiny_model_dir("qwen2") / "model.safetensors")
    for name, layer in nvfp4_layers(load(tiny_model_dir("qwen2"), NVFP4Config(scale_rule=rule))).items():
        reference = quantize(dense[f"{name}.weight"], rule)
        assert torch.equal(layer.dequantize(), dequantize(*reference)), name
        if name.endswith(("o_proj", "down_proj")):
            assert all(torch.equal(a, b) for a, b in zip(layer.nvfp4, reference, strict=True))


@pytest.mark.parametrize("dtype", ["float32", None])
def test_a_dequantized_model_has_one_dtype_and_the_same_logits(quantized, dtype):
    dense = copy.deepcopy(quantized).dequantize(dtype)
    assert not nvfp4_layers(dense) and not hasattr(dense, "hf_quantizer")
    assert {p.dtype for p in dense.parameters()} == {torch.float32 if dtype else torch.bfloat16}
    tolerance = {"rtol": 0, "atol": 0} if dtype is None else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(logits(dense).bfloat16(), logits(quantized), **tolerance)


def test_device_maps(tiny_model_dir, quantized):
    assert same_state(load(tiny_model_dir("qwen2"), device_map={"": "cpu"}), quantized)
    places = {"model.embed_tokens": "cpu", "model": "disk", "lm_head": "cpu"}
    with pytest.raises(ValueError, match="cannot be offloaded"):
        load(tiny_model_dir("qwen2"), device_map=places)


@pytest.mark.parametrize("compute_dtype", ["float32", torch.float16], ids=str)
def test_compute_dtype_is_the_model_dtype(compute_dtype, tiny_model_dir):
    config = NVFP4Config(compute_dtype=compute_dtype)
    model = load(tiny_model_dir("qwen2"), config, dtype="auto")
    assert model.dtype == config.torch_dtype == model.model.embed_tokens.weight.dtype
    assert {layer.compute_dtype for layer in nvfp4_layers(model).values()} == {config.torch_dtype}
    assert logits(model).dtype == config.torch_dtype


def test_modules_to_not_convert(tiny_model_dir, tmp_path):
    kept = {f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")}
    kept |= {f"model.layers.{layer}.self_attn.v_proj" for layer in (0, 1)}
    entries = ["model.layers.1.mlp", "re:.*v_proj"]
    model = load(tiny_model_dir("qwen2"), NVFP4Config(modules_to_not_convert=entries))
    assert dense_layers(model) == kept | {"lm_head"}
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert set(written["ignore"]) == kept | {"lm_head"}
    assert same_state(from_pretrained(tmp_path), model)
    assert torch.equal(stock_logits(tmp_path), logits(model))


@pytest.mark.parametrize("shared", [True, False], ids=["shared scales", "own scales"])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_a_checkpoint_of_another_tool_keeps_its_bytes(layout, shared, packed_model_dir):
    model, info = from_pretrained(packed_model_dir(layout, shared_scales=shared), output_loading_info=True)
    assert not any(info.values()), info
    folder = packed_model_dir("compressed-tensors", shared_scales=shared)
    stored, layers = load_file(folder / "model.safetensors"), nvfp4_layers(model)
    assert len(layers) == 14
    for name, layer in layers.items():
        assert torch.equal(layer.weight_packed, stored[f"{name}.weight_packed"])
        assert torch.equal(layer.weight_scale, stored[f"{name}.weight_scale"].view(torch.uint8))
        torch.testing.assert_close(layer.global_scale, stored[f"{name}.weight_global_scale"], rtol=1.2e-7, atol=0)
    if shared:
        assert_fused(model)
    if layout == "compressed-tensors":
        stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        assert torch.equal(logits(model), logits(stock))
        for name, layer in layers.items():  # the stock path has decompressed itself at its first forward
            assert torch.equal(layer.dequantize(), stock.get_submodule(name).weight), name


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_saving_a_checkpoint_of_another_tool_writes_compressed_tensors(layout, packed_model_dir, tmp_path):
    model = from_pretrained(packed_model_dir(layout))
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "compressed-tensors"
    assert same_state(from_pretrained(tmp_path), model)
    assert torch.equal(stock_logits(tmp_path), logits(model))


def without_description(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_modelopt_export_described_by_its_sidecar_only(packed_model_dir, edited):
    folder = without_description(edited(packed_model_dir("modelopt"), lambda tensors: None))
    described = {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
    sidecar = {"producer": {"name": "modelopt"}, "quantization": described}
    (folder / "hf_quant_config.json").write_text(json.dumps(sidecar))
    assert same_state(from_pretrained(folder), from_pretrained(packed_model_dir("modelopt")))


def test_a_packed_folder_is_not_quantized_again(packed_model_dir, edited):
    """transformers does not know the method "modelopt": it ignores the configuration and asks us to quantize."""
    folder = packed_model_dir("modelopt")
    with pytest.raises(ValueError, match=r"quantized already, .*\*\*qerl_trl\.pretrained_kwargs\(model\)"):
        load(folder)
    assert nvfp4_layers(AutoModelForCausalLM.from_pretrained(folder, **pretrained_kwargs(folder)))
    lost = without_description(edited(packed_model_dir("compressed-tensors"), lambda tensors: None))
    with pytest.raises(ValueError, match=r"quantized already.*config\.json needs its quantization_config"):
        from_pretrained(lost)


def test_skipping_a_module_that_is_packed_on_disk_is_refused(packed_model_dir):
    with pytest.raises(ValueError, match=r"down_proj.*not quantized"):
        from_pretrained(packed_model_dir("compressed-tensors"), NVFP4Config(modules_to_not_convert=["down_proj"]))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("packed", lambda t: t[f"{Q}.weight_scale"].view(torch.uint8)[3].fill_(0x7F), f"'{Q}.weight_scale' has 8 of"),
        ("packed", lambda t: t.pop(f"{Q}.bias"), f"1 tensors of Qwen2ForCausalLM are missing .*'{Q}.bias'"),
        ("dense", lambda t: t.pop(f"{Q}.weight"), f"1 tensors of Qwen2ForCausalLM are missing .*'{Q}.weight'"),
        ("dense", lambda t: t[f"{Q}.weight"][3].fill_(torch.nan), rf"tensor '{Q}\.weight': .*nan"),
        ("dense", lambda t: t["model.norm.weight"][3].fill_(torch.nan), "'model.norm.weight' has 1 of 128 values"),
    ],
)
def test_a_damaged_folder_is_refused(kind, change, message, packed_model_dir, tiny_model_dir, edited):
    folder = edited(tiny_model_dir("qwen2") if kind == "dense" else packed_model_dir("compressed-tensors"), change)
    with pytest.raises(ValueError, match=message) as caught:
        from_pretrained(folder)
    assert str(folder) in str(caught.value)


def test_pickled_weights_are_refused(tiny_model_dir, edited):
    folder = edited(tiny_model_dir("qwen2"), lambda tensors: None)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: pickled weights.*safetensors"):
        from_pretrained(folder)


def test_a_classifier_on_a_packed_base_has_a_new_head(packed_model_dir):
    folder = packed_model_dir("compressed-tensors")
    options = pretrained_kwargs(folder)
    options["config"].num_labels = 3
    model = AutoModelForTokenClassification.from_pretrained(folder, **options)
    assert model.score.weight.shape == (3, 128) and type(model.score) is nn.Linear
    assert same_state(model.model, from_pretrained(folder).model)


def test_a_width_that_is_no_multiple_of_16_stays_dense(tiny_model_dir):
    model = from_pretrained(tiny_model_dir("qwen2", intermediate_size=264))
    assert {name.rpartition(".")[2] for name in dense_layers(model)} == {"down_proj", "lm_head"}


def test_experts_are_refused_by_name_and_can_be_skipped(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_local_experts": 2}
    config = MixtralConfig(**sizes, vocab_size=320, num_attention_heads=2, num_key_value_heads=2)
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    message = r"has experts \(e\.g\. 'model\.layers\.0\.mlp\.experts.*modules_to_not_convert=\['experts'\]"
    with pytest.raises(ValueError, match=f"{message}.*use_vllm=False"):
        from_pretrained(tmp_path)
    model = from_pretrained(tmp_path, NVFP4Config(modules_to_not_convert=["experts"]))
    assert nvfp4_layers(model)
    assert any(p.ndim == 3 and p.dtype == torch.bfloat16 for p in model.parameters())


def test_nothing_left_to_quantize_is_an_error(tiny_model_dir):
    with pytest.raises(ValueError, match=r"no nn\.Linear of Qwen2ForCausalLM is left"):
        from_pretrained(tiny_model_dir("qwen2"), NVFP4Config(modules_to_not_convert=["model"]))


def test_a_saved_folder_has_the_layout_of_compressed_tensors(quantized, tmp_path):
    before = copy.deepcopy(quantized)
    quantized.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        found = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        layout = {key: (value.get_dtype(), value.get_shape()) for key, value in found.items() if Q in key}
        assert file.metadata()["quantized_by"] == "qerl-trl"
    assert layout == {
        f"{Q}.weight_packed": ("U8", [128, 64]),
        f"{Q}.weight_scale": ("F8_E4M3", [128, 8]),
        f"{Q}.weight_global_scale": ("F32", [1]),
        f"{Q}.bias": ("BF16", [128]),
    }
    assert "lm_head.weight" not in found
    assert same_state(before, quantized)
    assert_fused(quantized)


def test_saving_in_several_shards(quantized, tmp_path):
    quantized.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same_state(from_pretrained(tmp_path), quantized)
    assert torch.equal(stock_logits(tmp_path), logits(quantized))


def test_saving_the_base_inside_an_adapter_is_refused(quantized, tmp_path):
    model = get_peft_model(copy.deepcopy(quantized), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(RuntimeError, match="inside an adapter"):
        model.get_base_model().save_pretrained(tmp_path)


def test_transformers_own_adapters_are_saved_alone(quantized, tmp_path):
    model = copy.deepcopy(quantized)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["adapter_model.safetensors"]
    again = copy.deepcopy(quantized)
    again.load_adapter(tmp_path)
    assert torch.equal(logits(again), logits(model))


def test_a_model_with_an_adapter_merged_in_part_is_not_saved_as_packed(quantized, tmp_path):
    model = get_peft_model(copy.deepcopy(quantized), LoraConfig(r=4, target_modules=["q_proj"])).merge_and_unload()
    with pytest.raises(RuntimeError, match=r"an adapter was merged \(2 layers.*model\.dequantize\(\) first"):
        model.save_pretrained(tmp_path)
    expected = logits(model)
    model.dequantize().save_pretrained(tmp_path)
    assert torch.equal(stock_logits(tmp_path), expected)


def test_loading_gives_no_warning(tiny_model_dir):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load(tiny_model_dir("qwen2"))


def test_a_rank_that_gets_its_weights_by_broadcast_reads_no_quantized_layer(tiny_model_dir, monkeypatch):
    """Under FSDP with `cpu_ram_efficient_loading`: the broadcast needs the same parameters in the same order."""
    whole = from_pretrained(tiny_model_dir("qwen2"))
    monkeypatch.setattr(quantizer, "left_to_the_first", lambda: True)
    monkeypatch.setattr(quantizer, "quantize", None)
    found = from_pretrained(tiny_model_dir("qwen2"))
    shapes = [[(k, v.shape, v.dtype) for k, v in model.state_dict().items()] for model in (found, whole)]
    assert shapes[0] == shapes[1]
    assert not any(layer.weight_packed.any() for layer in nvfp4_layers(found).values())
    with pytest.raises(RuntimeError, match="were not read: with fsdp_cpu_ram_efficient_loading only the first"):
        logits(found)


def anonymous_memory() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.usefixtures("quantized")  # which has imported everything
def test_the_dense_model_is_never_in_memory(tiny_model_dir):
    folder = tiny_model_dir("qwen2", hidden_size=896, intermediate_size=4864, num_hidden_layers=8)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else freed memory, still counted, would be reused
    before, seen, done = anonymous_memory(), [], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            seen.append(anonymous_memory() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    model = load(folder)
    done.set()
    watching.join()
    packed, dense = sum(p.nbytes for p in model.parameters()), (folder / "model.safetensors").stat().st_size
    assert 0.8 * packed < max(seen) < packed + 80e6 < dense, f"peak {max(seen) / 1e6:.0f} MB, packed {packed / 1e6:.0f}"


@pytest.mark.gpu
def test_cuda_loads_the_same_bytes(tiny_model_dir, quantized):
    model = load(tiny_model_dir("qwen2"), device_map="cuda")
    assert_fused(model)
    assert same_state(model.cpu(), quantized)
    assert_fused(model)
