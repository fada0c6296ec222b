"""Every architecture through every cell, against the table that the documentation shows."""

import pytest
from datasets import Dataset

from qerl_trl import QeRLConfig, QeRLGRPOTrainer
from qerl_trl.nvfp4.architectures import ROWS
from tests import architectures


def test_the_table_is_of_this_list():
    assert list(architectures.recorded()["architectures"]) == list(architectures.ALL)
    assert len(architectures.ALL) >= 24


@pytest.mark.parametrize("name", architectures.ALL)
def test_the_table_is_true(name):
    recorded = architectures.recorded()["architectures"][name]
    assert architectures.cells(name) == {cell: recorded[cell] for cell in architectures.CELLS if cell in recorded}


def test_rows_are_of_models_that_transformers_has():
    from transformers import CONFIG_MAPPING

    assert not [name for name in ROWS if name not in CONFIG_MAPPING]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "mistral3"])
def test_a_trainer_takes_a_model_that_sees_pictures(name, tiny_tokenizer, tmp_path):
    """It was refused while its memory was planned: transformers has no AutoModelForCausalLM of it."""
    architectures.dense_model(name).save_pretrained(tmp_path / "model")
    args = QeRLConfig(
        output_dir=str(tmp_path / "run"), use_cpu=True, bf16=False, report_to="none", max_steps=1, num_generations=4,
        per_device_train_batch_size=4, max_completion_length=4, learning_rate=1e-3,
    )  # fmt: skip
    trainer = QeRLGRPOTrainer(
        model=str(tmp_path / "model"),
        processing_class=tiny_tokenizer,
        reward_funcs=lambda completions, **kwargs: [float(i % 4) for i, _ in enumerate(completions)],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["one", "two"]}),
    )
    trainer.train()
    moved = [key for key, tensor in trainer.model.named_parameters() if "lora_B" in key and tensor.any()]
    assert moved and not [key for key in moved if "vision" in key or "visual" in key]
