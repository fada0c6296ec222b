"""Settings that cannot work together: refused before anything is trained."""

import copy
import json
import shutil

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

from qerl_trl import QeRLConfig
from tests.faults.catalog import fault, raises


def lora(**options):
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **options})


@pytest.fixture
def make(tiny_runs, tmp_path):
    """`make(peft_config, **options)`: a trainer."""
    return lambda peft_config=None, **options: tiny_runs.trainer(tmp_path / "run", peft_config=peft_config, **options)


@fault("R3.base_of_another_arm")
@pytest.mark.parametrize("base_format", ["nvfp4", "bf16", "full"])
def test_a_base_that_bitsandbytes_quantized_is_refused(make, tiny_model_dir, base_format, tmp_path):
    folder = shutil.copytree(tiny_model_dir("qwen2"), tmp_path / "quantized")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (folder / "config.json").write_text(json.dumps(config))
    with raises(ValueError, str(folder), "bitsandbytes", "unquantized model"):
        make(lora(), model=str(folder), base_format=base_format)


@fault("R3.base_of_another_arm")
@pytest.mark.parametrize(
    ("base_format", "layout"), [("bf16", "compressed-tensors"), ("nf4", "modelopt"), ("full", "modelopt")]
)
def test_an_nvfp4_base_is_refused_before_it_is_loaded(make, packed_model_dir, base_format, layout, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    folder = str(packed_model_dir(layout))
    with raises(ValueError, f"base_format='{base_format}'", folder, "base_format='nvfp4'"):
        make(lora(), model=folder, base_format=base_format)


@fault("R3.tied_head_target")
@pytest.mark.parametrize(
    ("base_format", "targets"),
    [("nvfp4", ["q_proj", "lm_head"]), ("bf16", r".*(q_proj|lm_head)"), ("nvfp4", r".*(q_proj|embed_tokens)")],
)
def test_an_adapter_on_the_head_or_on_embeddings_tied_to_it_is_refused(make, base_format, targets):
    with raises(ValueError, "target", "head", "Remove" if "lm_head" in str(targets) else "Leave the embeddings out"):
        make(lora(target_modules=targets), base_format=base_format)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(
            {"target_modules": ["no_such_layer"]},
            ("no_such_layer", "not found", "check the target modules"),
            marks=fault("R3.no_lora_match"),
        ),
        pytest.param({"r": 0}, ("value passed is 0", "positive integer"), marks=fault("R3.bad_rank")),
        pytest.param({"lora_alpha": 0}, ("lora_alpha is 0", "Check"), marks=fault("R3.bad_rank")),
    ],
    ids=["no layer", "rank", "alpha"],
)
def test_an_adapter_that_trains_nothing_is_refused(make, options, words):
    with raises(ValueError, *words):
        make(lora(**options))


@pytest.mark.vllm
@fault("R3.adapter_kind_with_vllm")
@pytest.mark.parametrize(
    ("base_format", "options", "word"),
    [
        ("nvfp4", {"use_dora": True}, "use_dora"),
        ("nvfp4", {"bias": "all"}, "bias='all'"),
        ("bf16", {"target_parameters": ["model.layers.0.mlp.up_proj.weight"]}, "target_parameters"),
        ("nvfp4", {"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
    ],
)
def test_an_adapter_that_the_engine_does_not_compute_is_refused(engine_trainer, base_format, options, word):
    with raises(ValueError, word, "use_vllm=False"):
        engine_trainer(peft_config=lora(**options), base_format=base_format)


@fault("R3.no_noise_match")
def test_a_model_without_a_norm_for_the_noise_is_refused(make, tmp_path):
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model("olmo2", **sizes, **heads, eos_token_id=1, pad_token_id=0, bos_token_id=None)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "olmo2")
    with raises(ValueError, "Olmo2", "no norm that feeds a linear layer", "aqn=False"):
        make(lora(), model=str(tmp_path / "olmo2"), base_format="bf16")


@fault("R3.bad_schedule")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"aqn_schedule": "quadratic"}, ("'quadratic'", "'exponential'")),
        ({"aqn_sigma_start": -1.0}, ("sigma_start=-1.0", "finite sigmas >= 0")),
        ({"aqn_sigma_end": 0.0}, ("sigma_end=0", "Pass a small positive sigma_end")),
        ({"aqn_sigma_end": float("nan")}, ("sigma_end=nan", "finite")),
        ({"aqn_num_stages": 1}, ("num_stages=1", "2")),
        ({"aqn_schedule": "entropy_target"}, ("entropy_target=None", "nats per token")),
        ({"aqn_entropy_target": 1.0}, ("entropy_target=1.0", "schedule='entropy_target'")),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(tmp_path, options, words):
    with raises(ValueError, *words):
        QeRLConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **options)
    if "quadratic" not in options.values():
        QeRLConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options, aqn=False)  # an arm of the same file


@fault("R3.prompt_longer_than_model")
@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        (150, {}, ("the longest has 600 tokens", "the model takes 512", "Filter them out")),
        (127, {"max_completion_length": 5}, ("508 tokens", "takes 512", "lower max_completion_length")),
    ],
)
def test_prompts_beyond_the_model_are_refused_at_start(words, options, said, tiny_runs, tmp_path):
    data = Dataset.from_dict({"prompt": ["say one ", "say " * words]})  # one token per byte
    with raises(ValueError, "1 of 2 prompts", *said):
        tiny_runs.trainer(tmp_path, dataset=data, **options)


@fault("R3.prompt_longer_than_model")
def test_tokens_that_the_model_lacks(tiny_runs, tmp_path, monkeypatch):
    """On a GPU this would end in an assertion of the device."""
    tokenizer = copy.deepcopy(tiny_runs.tokenizer)
    tokenizer.add_tokens([f"<extra{number}>" for number in range(200)])
    monkeypatch.setattr(tiny_runs, "tokenizer", tokenizer)
    data = Dataset.from_dict({"prompt": ["say one ", "<extra199> say "]})
    with raises(ValueError, f"the token {len(tokenizer) - 1}", "knows 320 tokens", "the model's own tokenizer"):
        tiny_runs.trainer(tmp_path / "run", dataset=data)
