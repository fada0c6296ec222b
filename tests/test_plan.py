"""The memory plan against counts of real (tiny) models; the peaks are checked on a GPU by examples/benchmarks/plan_check.py."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import make_tiny_config
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.cache_utils import DynamicCache

from qerl_trl import NVFP4Config, plan
from qerl_trl.lora import register_nvfp4_lora
from qerl_trl.report import model_bytes

WORK = plan.Workload(batch=2, prompt_length=16, completion_length=32, completions=4, lora_rank=4)
SEVEN_B = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)

THREE_B = Qwen2Config(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=11008,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma3", "phi3"])
def test_static_parts_equal_a_built_model(tiny_model_dir, family):
    shape = plan.shape_of(tiny_model_dir(family))
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir(family), quantization_config=NVFP4Config(), dtype="bfloat16"
    )
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    sizes = model_bytes(get_peft_model(model, register_nvfp4_lora(lora)))
    assert plan.base_bytes(shape) == pytest.approx(sizes["base"], rel=1e-3)
    assert plan.adapter_parameters(shape, 4) == sizes["trained_parameters"]
    assert plan.adapter_bytes(shape, WORK)["optimizer"] == sizes["optimizer"]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_kv_cache_equals_a_filled_one(tiny_model_dir, family):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir(family), dtype=torch.bfloat16)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(3, 20, dtype=torch.long), past_key_values=cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert plan.kv_bytes(plan.shape_of(tiny_model_dir(family)), 3, 20) == held


def test_layer_activations_are_what_autograd_saves(tiny_model_dir):
    """Bytes that one decoder layer's graph keeps under bf16 autocast, counted by saved-tensor hooks."""
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir("llama"), quantization_config=NVFP4Config(), dtype="bfloat16"
    )
    model = get_peft_model(
        model, register_nvfp4_lora(LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    )
    frozen = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in frozen:
            saved[storage.data_ptr()] = storage
        return tensor

    def kept(layers):
        saved.clear()
        ids = torch.randint(5, 300, (WORK.batch, WORK.length))
        hidden = model.get_input_embeddings()(ids).requires_grad_()
        inner = model.get_base_model().model
        all_layers, inner.layers = inner.layers, inner.layers[:layers]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
            inner(inputs_embeds=hidden)
        inner.layers = all_layers
        return sum(storage.nbytes() for storage in saved.values())

    shape = plan.shape_of(tiny_model_dir("llama"))
    measured = kept(2) - kept(1)
    assert plan.layer_activation_bytes(shape, WORK) == pytest.approx(measured, rel=0.15)


def test_seven_billion_parameters():
    shape = plan.shape_of(SEVEN_B)
    assert shape.parameters == pytest.approx(7.6156e9, rel=1e-4)
    assert plan.base_bytes(shape) == pytest.approx(5.85e9, rel=0.01)
    assert plan.base_bytes(shape, "bf16") == pytest.approx(15.23e9, rel=0.01)
    assert plan.adapter_parameters(shape, 32) == 80740352


MEASURED = json.loads((Path(__file__).parents[1] / "examples/benchmarks/results/plan_check_h200.json").read_text())[
    "memory"
]


@pytest.mark.parametrize(
    "row",
    MEASURED,
    ids=lambda r: f"{r['shape']}-{r['phase']}-{r['workload']['batch']}x{r['workload']['completion_length']}",
)
def test_peaks_measured_on_a_gpu_are_predicted_within_ten_percent(row):
    shape = plan.shape_of({"7b": SEVEN_B, "3b": THREE_B}[row["shape"]])
    predicted = getattr(plan.predict(shape, plan.Workload(**row["workload"])), row["phase"])
    assert predicted / 2**30 == pytest.approx(row["measured_gib"], rel=0.1)


def test_more_of_anything_needs_more():
    shape = plan.shape_of(SEVEN_B)
    base = plan.predict(shape, WORK).total
    for change in (
        {"batch": 16},
        {"completion_length": 4096},
        {"lora_rank": 128},
        {"completions": 4096},
        {"base_format": "bf16"},
    ):
        assert plan.predict(shape, dataclasses.replace(WORK, **change)).total > base, change
    without = dataclasses.replace(WORK, batch=8, gradient_checkpointing=False)
    assert plan.predict(shape, without).total > plan.predict(shape, dataclasses.replace(WORK, batch=8)).total


def test_suggestion_is_the_largest_that_fits():
    shape = plan.shape_of(SEVEN_B)
    work = dataclasses.replace(WORK, batch=1, prompt_length=512, completion_length=4096, vllm=True, completions=64)
    suggested, predicted = plan.suggest(shape, work, 80)
    assert predicted.fits
    assert predicted.kv_sequences >= 16
    larger = plan.predict(shape, dataclasses.replace(suggested, batch=2 * suggested.batch), 80)
    assert not larger.fits or larger.kv_sequences < 16
    assert plan.suggest(shape, work, 8) is None
    with pytest.raises(ValueError, match="optimizer='lion'"):
        plan.predict(shape, dataclasses.replace(work, optimizer="lion"))


def test_reading_a_shape_needs_no_weights(tmp_path):
    make_tiny_config("llama").save_pretrained(tmp_path)
    assert plan.shape_of(tmp_path).layers == 2
