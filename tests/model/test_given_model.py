"""The trainer's `model`: an adapter of transformers, a folder below the home folder, an adapter's folder."""

import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qerl_trl import Script, load_adapter
from tests.trainers import float32_base

IDS = torch.arange(5, 45)[None]


def config_of(**lora) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **lora})


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(IDS).logits


@pytest.fixture
def trainer_of(make_trainer):
    def make(model, **options):
        return make_trainer(
            model, **{"base_format": "bf16", "peft_config": None, "max_steps": 1, "aqn": False} | options
        )

    return make


@pytest.fixture(scope="module")
def make_adapter(tiny_model_dir, tmp_path_factory):
    """`make_adapter(**lora)`: the folder of an adapter with an effect."""

    def make(**lora) -> Path:
        folder = tmp_path_factory.mktemp("adapter")
        base = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"), dtype=torch.float32)
        torch.manual_seed(0)
        adapted = get_peft_model(base, config_of(**lora))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(folder)
        return folder

    return make


def loaded(folder, base_format="bf16"):
    if base_format == "nvfp4":
        return float32_base(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize(("base_format", "several"), [("bf16", True), ("nvfp4", False)])
def test_an_adapter_of_transformers_is_trained_further(
    base_format, several, make_adapter, trainer_of, tiny_model_dir, tmp_path, caplog
):
    folder = make_adapter()
    model = loaded(tiny_model_dir("qwen2") if several else folder, base_format)
    if several:
        model.add_adapter(config_of(target_modules=["v_proj"]), adapter_name="first")
        model.load_adapter(str(folder), adapter_name="second", is_trainable=True)
        model.set_adapter("second")
    expected = logits(model)
    options = {"base_format": base_format, "learning_rate": 1e-4, "beta": 0.1, "model_init_kwargs": None}
    trainer = trainer_of(model, **options)
    policy = trainer.accelerator.unwrap_model(trainer.model)
    assert isinstance(policy, PeftModel) and torch.equal(logits(policy), expected)
    trainer.train()
    trainer.save_model()
    then, now = (load_file(place / "adapter_model.safetensors") for place in (folder, tmp_path / "run"))
    assert then.keys() == now.keys()
    assert 0 < max(float((then[name] - now[name]).abs().max()) for name in then) < 1e-3
    assert ("The model's other adapters are removed: ['first']" in caplog.text) == several
    assert trainer.save_merged(tmp_path / "merged", dtype="float32")["dtype"] == "float32"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(again), logits(policy), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("lora", "options", "words"),
    [
        ({"use_dora": True}, {}, r"use_dora, which transformers does not load.*PeftModel\.from_pretrained"),
        ({}, {"base_format": "full"}, "base_format='full' trains every weight, but an adapter was passed too"),
        ({}, {"peft_config": config_of()}, "You passed a `PeftModel` instance together with a `peft_config`"),
    ],
    ids=["dora", "full", "another"],
)
def test_an_adapter_of_transformers_may_be_refused(lora, options, words, make_adapter, trainer_of):
    model = loaded(make_adapter(**lora))
    with pytest.raises(ValueError, match=words):
        trainer_of(model, **options)


def test_a_path_below_the_home_folder(trainer_of, tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").symlink_to(tiny_model_dir("qwen2"))
    script = Script.parse(argv=["--model_name_or_path", "~/x", "--output_dir", "~/run", "--task", "letters"])
    assert script.model_args.model_name_or_path == str(tmp_path / "x")
    assert trainer_of("~/x").model.config._name_or_path == str(tmp_path / "x")


def test_an_adapters_folder_is_refused_with_the_way_to_train_it(
    make_adapter, trainer_of, tiny_model_dir, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = make_adapter()
    (tmp_path / "adapter").symlink_to(folder)
    for name in (str(folder), "~/adapter"):
        with pytest.raises(ValueError, match=rf"{re.escape(name)} is an adapter's folder.*qerl_trl\.load_adapter\("):
            trainer_of(name)
    model = load_adapter(loaded(tiny_model_dir("qwen2")), str(folder), is_trainable=True)  # as the message says
    trainer_of(model, model_init_kwargs=None)
