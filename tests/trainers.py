"""Tiny trainers on a CPU, and comparisons of what they trained. Their fixture is `make_trainer` (conftest.py)."""

from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from qerl_trl import NVFP4Config, QeRLConfig

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
PROMPTS = Dataset.from_dict({"prompt": [f"say {word} " for word in ("one", "two", "six", "ten")] * 4})


def spread_reward(completions, **kwargs):
    """Differs between completions, so that every step has a gradient."""
    return [float(sum(text.encode()) % 7) for text in completions]


def settings(tmp_path: Path, config=QeRLConfig, **kwargs):
    defaults = {
        "output_dir": str(tmp_path / "run"),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 3,
        "aqn_num_stages": 2,
        "model_init_kwargs": {"dtype": "float32"},
    }
    return config(**{**defaults, **kwargs})


def float32_base(folder):
    """The NVFP4 base of a folder, computing in float32."""
    config = NVFP4Config(compute_dtype="float32")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


def adapter_of(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name}


def frozen_of(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}


def assert_identical(left: dict, right: dict):
    assert left.keys() == right.keys()
    assert not [name for name in left if not torch.equal(left[name], right[name])]


def logged(trainer, key: str) -> list:
    return [entry[key] for entry in trainer.state.log_history if key in entry]
