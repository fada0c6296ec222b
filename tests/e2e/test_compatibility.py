"""Other code with a packed model, as in docs/source/models.md."""

import datasets
import peft
import pytest
import torch
import trl
from transformers import AutoModelForSequenceClassification

from qerl_trl import NVFP4Config, from_pretrained

LORA = {"r": 4, "target_modules": "all-linear"}
OPTIONS = {"max_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "use_cpu": True, "bf16": False}
OPTIONS |= {"report_to": [], "save_strategy": "no", "max_length": 32}
PAIRS = datasets.Dataset.from_dict({"prompt": ["a", "b"], "chosen": ["yes", "yes"], "rejected": ["no", "no"]})


@pytest.fixture
def base(tiny_model_dir, tiny_tokenizer, tmp_path):
    """Folder of an NVFP4 base with its tokenizer, as it is saved."""
    folder = tmp_path / "base"
    from_pretrained(tiny_model_dir("qwen2"), NVFP4Config()).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def test_pefts_preparation_leaves_checkpointing_off(base):
    model = peft.prepare_model_for_kbit_training(from_pretrained(base))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.model.norm.weight.dtype == torch.float32 and not model.is_gradient_checkpointing
    model.gradient_checkpointing_enable()  # as a trainer does with gradient_checkpointing=True
    assert model.is_gradient_checkpointing


def stock_trainer(kind, model, tokenizer, folder):
    args = getattr(trl, f"{kind}Config")(output_dir=str(folder), **OPTIONS)
    head = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]} if kind == "Reward" else {}
    data = datasets.Dataset.from_dict({"text": ["one two", "two three"]}) if kind == "SFT" else PAIRS
    given = {"args": args, "train_dataset": data, "processing_class": tokenizer}
    return getattr(trl, f"{kind}Trainer")(model, **given, peft_config=peft.LoraConfig(**LORA, **head))


@pytest.mark.parametrize("trainer", ["SFT", "DPO", "Reward"])
def test_stock_trainers_train_an_adapter_on_a_loaded_base(trainer, base, tiny_tokenizer, tmp_path):
    kind = {"model_class": AutoModelForSequenceClassification, "num_labels": 1} if trainer == "Reward" else {}
    model = from_pretrained(base, **kind)
    packed = {n: p.clone() for n, p in model.named_parameters() if n.endswith("weight_packed")}
    trainer = stock_trainer(trainer, model, tiny_tokenizer, tmp_path / "out")
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert any("lora_B" in name for name in before)
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert all(not torch.equal(after[name], value) for name, value in before.items() if "lora_B" in name)
    stored = {name.replace(".base_layer", ""): value for name, value in model.named_parameters()}
    assert packed and all(torch.equal(stored[name], value) for name, value in packed.items())
