"""Every architecture through every cell, against the table that the documentation shows."""

import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil

from qerl_trl import QeRLConfig, QeRLGRPOTrainer
from qerl_trl.nvfp4.architectures import ROWS
from tests import architectures
from tests.tiny_models import make_tiny_tokenizer


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


#: a message of text, or of parts of which a picture stands as one token
SEEING_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def seeing_processor(tokenizer):
    """Qwen2.5-VL's, of its parts for pictures: its constructor wants torchvision, for videos."""
    processor = Qwen2_5_VLProcessor.__new__(Qwen2_5_VLProcessor)
    processor.tokenizer, processor.video_processor, processor.chat_template = tokenizer, None, SEEING_TEMPLATE
    processor.image_processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56}, patch_size=14, merge_size=2, temporal_patch_size=2
    )
    for kind in ("image", "video"):
        token = f"<|{kind}_pad|>"
        setattr(processor, f"{kind}_token", token)
        setattr(processor, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(token))
    processor.image_ids = [processor.image_token_id]
    return processor


def test_a_wrapper_trains_on_pictures_and_its_tower_stays(tmp_path):
    tokenizer = make_tiny_tokenizer()
    tokens = {name: f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end")}
    tokenizer.add_tokens(list(tokens.values()), special_tokens=True)
    tokenizer.chat_template = SEEING_TEMPLATE
    model = architectures.dense_model("qwen2_5_vl")
    for name, token in tokens.items():
        setattr(model.config, f"{name.removesuffix('_pad')}_token_id", tokenizer.convert_tokens_to_ids(token))
    model.save_pretrained(tmp_path / "model")
    args = QeRLConfig(
        output_dir=str(tmp_path / "run"), use_cpu=True, bf16=False, report_to="none", max_steps=2, num_generations=4,
        per_device_train_batch_size=4, max_completion_length=4, learning_rate=1e-3, aqn_num_stages=2, save_strategy="no",
    )  # fmt: skip
    prompts = [[{"role": "user", "content": text}] for text in ("what", "colour")]
    pictures = [Image.new("RGB", (28, 28), "red"), Image.new("RGB", (56, 28), "blue")]
    trainer = QeRLGRPOTrainer(
        model=str(tmp_path / "model"),
        processing_class=seeing_processor(tokenizer),
        reward_funcs=lambda completions, **kwargs: [float(i % 4) for i, _ in enumerate(completions)],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts, "image": pictures}),
    )
    seen = []
    tower = next(module for name, module in trainer.model.named_modules() if name.endswith("visual"))
    tower.register_forward_hook(lambda module, args, output: seen.append(module.training))
    before = {name: tensor.clone() for name, tensor in tower.named_parameters()}
    trainer.train()
    assert True in seen  # in updates, not in rollouts alone
    assert before and all(torch.equal(tensor, before[name]) for name, tensor in tower.named_parameters())
    assert all(tensor.any() for name, tensor in trainer.model.named_parameters() if "lora_B" in name)
