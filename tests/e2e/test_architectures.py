"""Every architecture, every cell, against the table of the documentation; training on pictures."""

import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import CONFIG_MAPPING, Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil

from qerl_trl import QeRLConfig, QeRLGRPOTrainer
from qerl_trl.nvfp4.architectures import ROWS
from tests import architectures
from tests.tiny_models import make_tiny_tokenizer


def test_the_table_has_every_architecture():
    assert list(architectures.recorded()["architectures"]) == list(architectures.ALL)
    assert not [name for name in ROWS if name not in CONFIG_MAPPING]


@pytest.mark.parametrize("name", architectures.ALL)
def test_the_table_is_true(name):
    recorded = architectures.recorded()["architectures"][name]
    assert architectures.cells(name) == {cell: recorded[cell] for cell in architectures.CELLS if cell in recorded}


def trainer_of(folder, processor, data) -> QeRLGRPOTrainer:
    args = QeRLConfig(
        output_dir=str(folder / "run"), use_cpu=True, bf16=False, report_to="none", max_steps=2, num_generations=4,
        per_device_train_batch_size=4, max_completion_length=4, learning_rate=1e-3, aqn_num_stages=2,
        save_strategy="no",
    )  # fmt: skip
    return QeRLGRPOTrainer(
        model=str(folder / "model"),
        processing_class=processor,
        reward_funcs=lambda completions, **kwargs: [float(i % 4) for i, _ in enumerate(completions)],
        args=args,
        train_dataset=Dataset.from_dict(data),
    )


def test_a_model_with_a_vision_tower_trains_on_text(tiny_tokenizer, tmp_path):
    """transformers has no AutoModelForCausalLM of it."""
    architectures.dense_model("mistral3").save_pretrained(tmp_path / "model")
    trainer = trainer_of(tmp_path, tiny_tokenizer, {"prompt": ["one", "two"]})
    trainer.train()
    moved = [key for key, tensor in trainer.model.named_parameters() if "lora_B" in key and tensor.any()]
    assert moved and not [key for key in moved if "vision" in key or "visual" in key]


#: a message is a text, or a list of parts; a picture is one token
SEEING_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def seeing_processor(tokenizer):
    """Qwen2.5-VL's for pictures only: its constructor needs torchvision, for videos."""
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


def test_training_on_pictures_does_not_change_the_tower(tmp_path):
    tokenizer = make_tiny_tokenizer()
    tokens = {name: f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end")}
    tokenizer.add_tokens(list(tokens.values()), special_tokens=True)
    tokenizer.chat_template = SEEING_TEMPLATE
    model = architectures.dense_model("qwen2_5_vl")
    for name, token in tokens.items():
        setattr(model.config, f"{name.removesuffix('_pad')}_token_id", tokenizer.convert_tokens_to_ids(token))
    model.save_pretrained(tmp_path / "model")
    prompts = [[{"role": "user", "content": text}] for text in ("what", "colour")]
    pictures = [Image.new("RGB", (28, 28), "red"), Image.new("RGB", (56, 28), "blue")]
    trainer = trainer_of(tmp_path, seeing_processor(tokenizer), {"prompt": prompts, "image": pictures})
    seen = []
    tower = next(module for name, module in trainer.model.named_modules() if name.endswith("visual"))
    tower.register_forward_hook(lambda module, args, output: seen.append(module.training))
    before = {name: tensor.clone() for name, tensor in tower.named_parameters()}
    trainer.train()
    assert True in seen  # in updates, not only in rollouts
    assert before and all(torch.equal(tensor, before[name]) for name, tensor in tower.named_parameters())
    assert all(tensor.any() for name, tensor in trainer.model.named_parameters() if "lora_B" in name)
