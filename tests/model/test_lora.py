import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from qerl_trl import NVFP4Config, NVFP4Linear, load_adapter
from qerl_trl.model.lora import (
    NVFP4LoraLinear,
    adapted_layers,
    check_adapter,
    prepare_trainable,
    register_nvfp4_lora,
    warn_of_dropout,
)
from tests.tiny_models import make_tiny_model

IDS = torch.randint(5, 300, (2, 12), generator=torch.Generator().manual_seed(0))


def quantized(tiny_model_dir, family="qwen2", **kwargs):
    return AutoModelForCausalLM.from_pretrained(
        tiny_model_dir(family), quantization_config=NVFP4Config(**kwargs), dtype=kwargs.get("compute_dtype", "bfloat16")
    )


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def adapted(model, **kwargs):
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **kwargs})
    torch.manual_seed(0)
    model = get_peft_model(model, register_nvfp4_lora(config))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


VARIANTS = {
    "lora": {},
    "rslora, targets": {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "dora": {"use_dora": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_those_of_the_dequantized_dense_model(tiny_model_dir, variant):
    packed = quantized(tiny_model_dir, compute_dtype="float32")
    dense = quantized(tiny_model_dir, compute_dtype="float32").dequantize()
    packed, dense = adapted(packed, **VARIANTS[variant]), adapted(dense, **VARIANTS[variant])
    for model in (packed, dense):
        model(input_ids=IDS, labels=IDS).loss.backward()
    grads = {name: p.grad for name, p in packed.named_parameters() if p.grad is not None}
    reference = {name: p.grad for name, p in dense.named_parameters() if p.grad is not None}
    assert grads.keys() == reference.keys()
    assert len(grads) >= 2 * 2 * 2
    for name, grad in grads.items():
        torch.testing.assert_close(grad, reference[name], rtol=1e-5, atol=1e-7)
        assert grad.abs().max() > 0, name


def test_all_linear_covers_every_projection_and_no_head(tiny_model_dir):
    model = adapted(quantized(tiny_model_dir))
    layers = adapted_layers(model)
    assert len(layers) == 2 * 7
    assert all(isinstance(layer, NVFP4LoraLinear) for layer in layers.values())
    assert not any("lm_head" in name for name in layers)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapter_folder_loads_in_plain_peft(tiny_model_dir, tmp_path, variant):
    model = adapted(quantized(tiny_model_dir), **VARIANTS[variant]).eval()
    model.save_pretrained(tmp_path)
    assert "custom" not in (tmp_path / "adapter_config.json").read_text()
    stock = PeftModel.from_pretrained(quantized(tiny_model_dir).dequantize(), tmp_path).eval()
    ours = load_adapter(quantized(tiny_model_dir), tmp_path).eval()
    assert torch.equal(logits(ours), logits(model)) and torch.equal(logits(stock), logits(model))


@pytest.mark.parametrize("variant", VARIANTS)
def test_merge_is_the_trained_policy_and_unmerge_is_exact(tiny_model_dir, variant):
    model = adapted(quantized(tiny_model_dir, compute_dtype="float32"), **VARIANTS[variant]).eval()
    before = logits(model)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    assert not any(isinstance(layer.get_base_layer(), NVFP4Linear) for layer in adapted_layers(model).values())
    model.unmerge_adapter()
    assert torch.equal(logits(model), before)
    assert all(isinstance(layer.get_base_layer(), NVFP4Linear) for layer in adapted_layers(model).values())


def test_merge_and_unload_gives_a_plain_dense_model(tiny_model_dir, tmp_path):
    model = adapted(quantized(tiny_model_dir, compute_dtype="float32")).eval()
    before = logits(model)
    merged = model.merge_and_unload()
    assert not any("packed" in name or "lora" in name for name in merged.state_dict())
    after = logits(merged)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match=r"model\.dequantize\(\) first"):
        merged.save_pretrained(tmp_path / "torn")
    merged.dequantize()
    merged.save_pretrained(tmp_path / "whole")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    assert torch.equal(logits(stock), after)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LoraConfig(init_lora_weights="pissa"), "pissa.*Name linear modules in target_modules"),
        (LoraConfig(target_modules=["q_proj", "lm_head"]), "lm_head"),
        (LoraConfig(target_parameters=["mlp.experts.gate_up_proj"]), "target_parameters"),
        (PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "PrefixTuningConfig"),
    ],
    ids=["pissa", "head", "bare-parameters", "prefix-tuning"],
)
def test_an_unsupported_adapter_is_refused_by_name(config, words):
    with pytest.raises(ValueError, match=words):
        register_nvfp4_lora(config)


def test_an_adapter_that_cannot_train_is_refused(tiny_model_dir, tmp_path):
    adapted(quantized(tiny_model_dir)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is_trainable=True"):
        check_adapter(load_adapter(quantized(tiny_model_dir), tmp_path))
    check_adapter(load_adapter(quantized(tiny_model_dir), tmp_path, is_trainable=True))


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_trainable_norms_are_float32_and_keep_the_stream_in_bf16(tiny_model_dir, family):
    model = adapted(quantized(tiny_model_dir, family), modules_to_save=["input_layernorm"])
    assert len(prepare_trainable(model)) == 2
    norms = {name: p for name, p in model.named_parameters() if "modules_to_save" in name}
    assert {p.dtype for p in norms.values()} == {torch.float32}
    out = model(input_ids=IDS, labels=IDS)
    assert out.logits.dtype == torch.bfloat16
    out.loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in norms.values())
    before = {name: p.detach().clone() for name, p in norms.items()}
    torch.optim.AdamW(norms.values(), lr=1e-5).step()
    for name, parameter in norms.items():
        assert (parameter != before[name]).float().mean() > 0.9, f"{name}: a step of 1e-5 must land"
    model.eval()
    assert model.generate(input_ids=IDS, max_new_tokens=3, do_sample=False).shape == (2, 15)  # outside autocast


@pytest.mark.parametrize(("options", "warned"), [({}, ""), ({"attention_dropout": 0.1}, "attention_dropout=0.1")])
def test_dropout_of_the_model_is_warned_of(options, warned, caplog):
    lora = LoraConfig(target_modules="all-linear", lora_dropout=0.05)  # the adapter's own is the user's choice
    warn_of_dropout(get_peft_model(make_tiny_model("qwen2", **options), lora))
    assert warned in caplog.text and bool(caplog.text) == bool(warned)
