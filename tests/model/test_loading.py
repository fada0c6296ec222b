"""Models that come ready: adapters that transformers loaded or added are trained on or refused, folders are found."""

import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qerl_trl import NVFP4Config, QeRLConfig, QeRLGRPOTrainer, QeRLRLOOConfig, QeRLRLOOTrainer, Script, load_adapter
from qerl_trl.memory.workload import workload_of_file

PROMPTS = Dataset.from_dict({"prompt": [f"say {word}" for word in ("one", "two", "six", "ten")] * 4})
IDS = torch.arange(5, 45)[None]


def spread_reward(completions, **kwargs):
    return [float(sum(text.encode()) % 7) for text in completions]


def trainer_of(model, folder, tiny_tokenizer, kinds=(QeRLGRPOTrainer, QeRLConfig), peft_config=None, **options):
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "base_format": "bf16",
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 4,
        "max_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "aqn": False,
    }
    args = kinds[1](**settings | options)
    return kinds[0](
        model, spread_reward, args, train_dataset=PROMPTS, processing_class=tiny_tokenizer, peft_config=peft_config
    )


def config_of(**lora) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **lora})


@pytest.fixture(scope="module")
def make_adapter(tiny_model_dir, tmp_path_factory):
    """`make_adapter(seed, **lora)`: the folder of an adapter that does something."""

    def make(seed: int = 0, **lora) -> Path:
        folder = tmp_path_factory.mktemp("adapter")
        base = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"), dtype=torch.float32)
        torch.manual_seed(seed)
        adapted = get_peft_model(base, config_of(**lora))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        adapted.save_pretrained(folder)
        return folder

    return make


def loaded(folder, base_format="bf16"):
    options = {"quantization_config": NVFP4Config(compute_dtype=torch.float32)} if base_format == "nvfp4" else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def by_adding(folder, base_format, model_dir):
    """The same adapter, next to another one, by `load_adapter` of transformers."""
    model = loaded(model_dir, base_format)
    model.add_adapter(config_of(target_modules=["v_proj"]), adapter_name="first")
    model.load_adapter(str(folder), adapter_name="second", is_trainable=True)
    model.set_adapter("second")
    return model


@pytest.mark.parametrize(
    "kinds", [(QeRLGRPOTrainer, QeRLConfig), (QeRLRLOOTrainer, QeRLRLOOConfig)], ids=["grpo", "rloo"]
)
@pytest.mark.parametrize("base_format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("several", [False, True])
def test_an_adapter_of_transformers_is_trained_on(
    kinds, base_format, several, make_adapter, tiny_model_dir, tiny_tokenizer, tmp_path, caplog
):
    folder = make_adapter()
    model = by_adding(folder, base_format, tiny_model_dir("qwen2")) if several else loaded(folder, base_format)
    with torch.no_grad():
        expected = model(IDS).logits
    trainer = trainer_of(
        model, tmp_path / "run", tiny_tokenizer, kinds, base_format=base_format, learning_rate=1e-4, beta=0.1
    )
    policy = trainer.accelerator.unwrap_model(trainer.model)
    with torch.no_grad():
        assert isinstance(policy, PeftModel) and torch.equal(policy.eval()(IDS).logits, expected)
    trainer.train()
    trainer.save_model()
    then, now = (load_file(place / "adapter_model.safetensors") for place in (folder, tmp_path / "run"))
    assert then.keys() == now.keys()
    change = max(float((then[name] - now[name]).abs().max()) for name in then)
    assert 0 < change < 1e-3, "it begins at what was trained, and goes on from there"
    assert ("The model's other adapters are removed: ['first']" in caplog.text) == several
    merged = trainer.save_merged(tmp_path / "merged", dtype="float32")
    assert merged["dtype"] == "float32"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, policy.eval()(IDS).logits, rtol=0, atol=2e-5)


def test_a_new_adapter_of_transformers_is_trained(tiny_model_dir, tiny_tokenizer, tmp_path):
    model = loaded(tiny_model_dir("qwen2"))
    model.add_adapter(config_of(r=2))
    trainer = trainer_of(model, tmp_path, tiny_tokenizer)
    assert trainer.model.peft_config["default"].r == 2
    trainer.train()


def test_what_pissa_made_of_the_base_is_not_made_again(make_adapter, tiny_tokenizer, tmp_path):
    model = loaded(make_adapter(init_lora_weights="pissa"))
    with torch.no_grad():
        expected = model(IDS).logits
    policy = trainer_of(model, tmp_path, tiny_tokenizer).model
    with torch.no_grad():
        assert torch.equal(policy.eval()(IDS).logits, expected)
    assert policy.peft_config["default"].init_lora_weights == "pissa"


@pytest.mark.parametrize(
    ("lora", "options", "words"),
    [
        ({"use_dora": True}, {}, r"use_dora, which transformers does not load.*PeftModel\.from_pretrained"),
        ({"modules_to_save": ["input_layernorm"]}, {}, "modules_to_save, which transformers does not load"),
        ({"trainable_token_indices": [3]}, {}, "trainable_token_indices, which transformers does not load"),
        ({}, {"base_format": "full"}, "base_format='full' trains every weight, but an adapter was passed too"),
        ({}, {"peft_config": config_of()}, "You passed a `PeftModel` instance together with a `peft_config`"),
    ],
    ids=["dora", "modules", "tokens", "full", "another"],
)
def test_an_adapter_of_transformers_that_cannot_be_trained_on_is_refused(
    lora, options, words, make_adapter, tiny_tokenizer, tmp_path
):
    model = loaded(make_adapter(**lora))
    with pytest.raises(ValueError, match=words):
        trainer_of(model, tmp_path, tiny_tokenizer, **options)


def test_a_home_folder_is_found(tiny_model_dir, tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models/x").symlink_to(tiny_model_dir("qwen2"))
    trainer = trainer_of("~/models/x", tmp_path / "run", tiny_tokenizer)
    assert trainer.model.config._name_or_path == str(tmp_path / "models/x")


@pytest.mark.parametrize("base_format", ["nvfp4", "full"])
def test_a_home_folder_in_a_recipe_is_found(base_format, tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").symlink_to(tiny_model_dir("qwen2"))
    recipe = tmp_path / "run.yaml"
    recipe.write_text(
        f"model_name_or_path: ~/x\noutput_dir: ~/run\nbase_format: {base_format}\nreport_to: none\nuse_cpu: true\nbf16: false\n"
    )
    assert workload_of_file(recipe, 100)[0] == str(tmp_path / "x")
    script = Script.parse(argv=["--config", str(recipe), "--task", "letters"])
    assert script.model_args.model_name_or_path == str(tmp_path / "x")


@pytest.mark.parametrize("name", ["{}", "~/adapter"])
def test_the_folder_of_an_adapter_is_named_with_the_way_to_train_it(
    name, make_adapter, tiny_model_dir, tiny_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = make_adapter()
    (tmp_path / "adapter").symlink_to(folder)
    name = name.format(folder)
    with pytest.raises(
        ValueError, match=rf"{re.escape(name)} is an adapter's folder.*qerl_trl\.load_adapter\("
    ) as said:
        trainer_of(name, tmp_path / "run", tiny_tokenizer)
    assert len(str(said.value).replace(name, "")) <= 200
    model = load_adapter(loaded(tiny_model_dir("qwen2")), str(folder), is_trainable=True)  # as the message says
    trainer_of(model, tmp_path / "run", tiny_tokenizer)
