"""What a run records of itself."""

import copy
import dataclasses
import json
import shutil

import pytest
from datasets import Dataset, Features, Image, Value
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qerl_trl import QeRLConfig, QeRLRLOOConfig, QeRLRLOOTrainer, from_pretrained
from qerl_trl.checkpoint import settings as identity
from qerl_trl.checkpoint.fingerprint import base_config
from qerl_trl.publish.quantize import quantize_folder
from tests.trainers import PROMPTS


def test_every_recorded_name_is_an_argument_and_has_a_type():
    arguments = {field.name for config in (QeRLConfig, QeRLRLOOConfig) for field in dataclasses.fields(config)}
    computed = {"world_size"}  # a property of TrainingArguments
    assert set(identity.RecordedArguments.__annotations__) - computed <= arguments
    assert set(identity.RecordedArguments.__annotations__) <= set(identity.RunSettings.__annotations__)


def test_settings_of_a_run(make_trainer, tiny_model_dir):
    found = identity.run_settings(make_trainer(seed=7))
    assert set(found) <= set(identity.RunSettings.__annotations__)
    assert (found["trainer"], found["seed"], found["base_format"], found["dtype"]) == ("GRPO", 7, "nvfp4", "float32")
    assert found["model"] == str(tiny_model_dir("qwen2"))
    assert len(found["base_sha256"]) == 64 and "base_revision" not in found  # it came from a folder
    assert found["lora"]["r"] == 4 and any(name.endswith("q_proj") for name in found["lora"]["targets"])
    assert found["loss_type"] == "dapo"
    assert "aqn_entropy_target" not in found  # was not set
    assert identity.run_settings(make_trainer(trainer_class=QeRLRLOOTrainer))["trainer"] == "RLOO"


def test_a_user_s_trainer_keeps_its_name(make_trainer):
    class Mine(QeRLRLOOTrainer):
        _name = "Mine"

    assert identity.run_settings(make_trainer(trainer_class=Mine))["trainer"] == "Mine"


def other_reward(completions, **kwargs):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"learning_rate": 2e-3}, "learning_rate: 0.001 then, 0.002 now"),
        ({"optim": "sgd"}, "optim: not set then, 'sgd' now"),
        ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type: not set then, 'cosine' now"),
        ({"weight_decay": 0.1}, "weight_decay: not set then, 0.1 now"),
        ({"epsilon_high": 0.28}, "epsilon_high: not set then, 0.28 now"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs: not set then, {'x': 1} now"),
        ({"base_format": "bf16"}, "base_format: 'nvfp4' then, 'bf16' now"),
        ({"reward": other_reward}, "rewards: ['spread_reward'] then, ['other_reward'] now"),
        (
            {"peft_config": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", use_rslora=True)},
            "lora.options: not set then, {'use_rslora': True} now",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_decides_the_trajectory_refuses(make_trainer, changed, line):
    then = json.loads(json.dumps(identity.run_settings(make_trainer())))
    now = identity.run_settings(make_trainer(**changed))
    assert identity.differences(then, now) == ([line], [])
    assert then["settings_sha256"] != now["settings_sha256"]


def test_what_does_not_decide_it_is_no_difference(make_trainer, tmp_path):
    then = identity.run_settings(make_trainer())
    incidental = {
        "logging_steps": 5,
        "save_steps": 3,
        "output_dir": str(tmp_path / "x"),
        "rollout_timeout": 5.0,
        "run_name": "r",
    }
    now = identity.run_settings(
        make_trainer(**incidental, gradient_checkpointing=True, model_init_kwargs={"dtype": "float32", "token": "t"})
    )
    assert now == then
    longer = identity.run_settings(make_trainer(max_steps=9))
    assert identity.differences(then, longer) == ([], ["max_steps: 2 then, 9 now"])
    assert longer["settings_sha256"] == then["settings_sha256"]


def test_a_record_of_no_run_is_compared_in_what_it_has(make_trainer):
    now = identity.run_settings(make_trainer())
    assert identity.differences({"seed": 3, "model": now["model"]}, now) == ([], [])
    assert identity.differences({"seed": 4}, now) == (["seed: 4 then, 3 now"], [])


@pytest.mark.parametrize(
    ("free", "counts"),
    [
        ({"vllm_engine_kwargs": {"enforce_eager": True, "max_num_seqs": 4, "kv_cache_memory_bytes": 1}}, False),
        ({"vllm_engine_kwargs": {"enforce_eager": True, "kv_cache_dtype": "fp8"}}, True),
        ({"cache_implementation": "quantized"}, True),
    ],
    ids=str,
)
def test_what_makes_another_sampler_is_a_setting(make_trainer, free, counts):
    """Memory, placement and graphs of an engine are none."""
    then, now = identity.run_settings(make_trainer()), identity.run_settings(make_trainer(**free))
    found = identity.differences(then, now)
    assert not found.reported and len(found.refused) == counts
    if counts:
        assert "enforce_eager" not in found.refused[0] and found.refused[0].startswith(next(iter(free)))


def test_a_tokenizer_is_compared(make_trainer):
    then, trainer = json.loads(json.dumps(identity.run_settings(make_trainer()))), make_trainer()
    trainer.processing_class = copy.deepcopy(trainer.processing_class)
    trainer.processing_class.add_tokens(["<think>"])
    now = identity.run_settings(trainer)
    ((line,), _) = identity.differences(then, now)
    assert line.startswith("tokenizer_content_sha256: the tokenizer changed (vocabulary")
    trainer.processing_class.chat_template = "{{ messages[0].content }}"
    now = identity.run_settings(trainer)
    assert [line.split(":")[0] for line in identity.differences(then, now).refused] == ["tokenizer_content_sha256"]


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma3"])
def test_a_base_has_one_configuration_in_every_form(family, tiny_model_dir, tmp_path):
    folder = tiny_model_dir(family)
    quantize_folder(folder, tmp_path / "packed")
    found = base_config(AutoModelForCausalLM.from_pretrained(folder))
    assert found["num_hidden_layers"] == 2 and "hidden_act" not in found and "dtype" not in found
    assert found == base_config(from_pretrained(folder)) == base_config(from_pretrained(tmp_path / "packed"))


def test_the_base_is_known_by_its_content(make_trainer, tiny_model_dir, tmp_path):
    then = json.loads(json.dumps(identity.run_settings(make_trainer())))
    folder = tiny_model_dir("qwen2")
    moved = identity.run_settings(make_trainer(model=str(shutil.copytree(folder, tmp_path / "moved"))))
    assert identity.differences(then, moved) == ([], [f"model: '{folder}' then, '{tmp_path / 'moved'}' now"])
    assert moved["settings_sha256"] == then["settings_sha256"]
    changed = tmp_path / "moved" / "model.safetensors"
    tensors = load_file(changed)
    tensors["model.embed_tokens.weight"][7, 7] += 1
    save_file(tensors, changed, {"format": "pt"})
    now = identity.run_settings(make_trainer(model=str(tmp_path / "moved")))
    [line] = identity.differences(then, now).refused
    assert line.startswith("base_sha256: the base model has other weights (")
    assert now["settings_sha256"] != then["settings_sha256"]
    # the Hub's name of a commit says nothing that the weights do not; a sharded base has no fingerprint
    assert identity.differences({**then, "base_revision": "abc"}, moved).refused == []
    del now["base_sha256"]
    assert identity.differences(then, now).refused == [f"model: '{folder}' then, '{tmp_path / 'moved'}' now"]


def test_data_are_known_by_their_content(tmp_path):
    fingerprint = identity.dataset_sha256
    PROMPTS.to_json(tmp_path / "copy.jsonl")
    assert fingerprint(Dataset.from_json(str(tmp_path / "copy.jsonl"), cache_dir=str(tmp_path))) == fingerprint(PROMPTS)
    changed = [
        PROMPTS.select(range(15)),
        PROMPTS.add_column("answer", ["1"] * 16),
        PROMPTS.map(lambda row, i: {"prompt": row["prompt"] + "." * (i == 15)}, with_indices=True),
        PROMPTS.select(reversed(range(16))),
    ]
    assert len({fingerprint(data) for data in [PROMPTS, *changed]}) == 5
    assert fingerprint(PROMPTS.to_iterable_dataset()) is None
    pictures = Dataset.from_dict(
        {"prompt": ["a"], "image": [None]}, Features({"prompt": Value("string"), "image": Image()})
    )
    assert fingerprint(pictures) is not None
