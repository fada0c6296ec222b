"""Settings that cannot work together: refused in words, before anything is trained."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

from qerl_trl import QeRLConfig
from tests.faults.catalog import fault, told
from tests.faults.test_s_rollout import make_trainer as make_engine_trainer  # noqa: F401  (a fixture)
from tests.test_trainer import make_trainer  # noqa: F401  (a fixture)


def lora(**options):
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **options})


@pytest.fixture
def quantized(tiny_model_dir, tmp_path):
    """A folder whose config.json says how its weights are quantized."""

    def write(**quantization):
        folder = tmp_path / "quantized"
        shutil.copytree(tiny_model_dir("qwen2"), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
        return str(folder)

    return write


@fault("R3.bitsandbytes_base")
@pytest.mark.parametrize("base_format", ["nvfp4", "bf16", "full"])
def test_a_base_that_bitsandbytes_quantized_is_refused_by_the_other_arms(make_trainer, quantized, base_format):  # noqa: F811
    folder = quantized(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
    peft_config = None if base_format == "full" else lora()
    with told(ValueError, folder, "bitsandbytes", "unquantized model"):
        make_trainer(model=folder, base_format=base_format, peft_config=peft_config)


@fault("S.packed_base_in_another_arm")
@pytest.mark.parametrize("base_format", ["bf16", "nf4", "full"])
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_an_nvfp4_base_is_refused_by_the_other_arms_before_it_is_loaded(
    make_trainer,  # noqa: F811
    packed_model_dir,
    base_format,
    layout,
    monkeypatch,
):
    """At 843f908 an AttributeError after the model was loaded."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    peft_config = None if base_format == "full" else lora()
    with told(ValueError, f"base_format='{base_format}'", str(packed_model_dir(layout)), "base_format='nvfp4'"):
        make_trainer(model=str(packed_model_dir(layout)), base_format=base_format, peft_config=peft_config)


@fault("R3.tied_head_target")
@fault("R3.embedding_target")
@pytest.mark.parametrize("base_format", ["nvfp4", "bf16"])
@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], r".*(q_proj|lm_head)", r".*(q_proj|embed_tokens)"])
def test_an_adapter_on_the_head_or_on_embeddings_tied_to_it_is_refused(make_trainer, base_format, targets):  # noqa: F811
    with told(ValueError, "target", "head", "Remove" if "lm_head" in str(targets) else "Leave the embeddings out"):
        make_trainer(base_format=base_format, peft_config=lora(target_modules=targets))


@fault("R3.no_lora_match")
def test_an_adapter_that_matches_no_layer_is_refused(make_trainer):  # noqa: F811
    with told(ValueError, "no_such_layer", "not found", "check the target modules"):
        make_trainer(peft_config=lora(target_modules=["no_such_layer"]))


@fault("R3.bad_rank")
@pytest.mark.parametrize("base_format", ["nvfp4", "bf16"])
@pytest.mark.parametrize("options", [{"r": 0}, {"rank_pattern": {"q_proj": 0}}], ids=["all", "of a layer"])
def test_a_rank_that_trains_nothing_is_refused_by_peft(make_trainer, base_format, options):  # noqa: F811
    with told(ValueError, "value passed is 0", "should be a positive integer"):
        make_trainer(base_format=base_format, peft_config=lora(**options))


@fault("R3.bad_rank")
def test_an_alpha_that_trains_nothing_is_refused(make_trainer):  # noqa: F811
    with told(ValueError, "lora_alpha is 0", "Check"):
        make_trainer(peft_config=lora(lora_alpha=0))


@pytest.mark.vllm
@fault("R3.adapter_kind_with_vllm")
@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"target_parameters": ["model.layers.0.mlp.up_proj.weight"]}, "target_parameters"),
    ],
)
def test_an_adapter_that_the_engine_does_not_compute_is_refused(make_engine_trainer, options, word):  # noqa: F811
    base_format = "bf16" if {"target_parameters", "init_lora_weights"} & set(options) else "nvfp4"
    with told(ValueError, word, "plain LoRA", "use_vllm=False"):
        make_engine_trainer(peft_config=lora(**options), base_format=base_format)


@fault("R3.no_noise_match")
def test_a_model_without_a_norm_for_the_noise_is_refused(make_trainer, tmp_path):  # noqa: F811
    config = AutoConfig.for_model(
        "olmo2", vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "olmo2")
    with told(ValueError, "Olmo2", "no norm whose output feeds a linear layer", "aqn=False"):
        make_trainer(model=str(tmp_path / "olmo2"), base_format="bf16", peft_config=lora())


@fault("R3.bad_schedule")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"aqn_schedule": "quadratic"}, ("'quadratic'", "'exponential'")),
        ({"aqn_num_stages": 1}, ("num_stages=1", "an integer >= 2 of stages")),
        ({"aqn_sigma_start": -1.0}, ("sigma_start=-1.0", "finite sigmas >= 0")),
        ({"aqn_sigma_end": 0.0}, ("sigma_end=0", "Pass a small positive sigma_end")),
        ({"aqn_schedule": "entropy_target"}, ("entropy_target=None", "nats per token")),
        ({"aqn_entropy_target": 1.0}, ("entropy_target=1.0", "schedule='entropy_target'")),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(tmp_path, options, words):
    with told(ValueError, *words):
        QeRLConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **options)
