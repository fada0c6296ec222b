"""Tiny trainers on a CPU, and comparisons of what they trained. Their fixture is `make_trainer` (conftest.py)."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from qerl_trl import NVFP4Config, QeRLConfig


def settings(tmp_path: Path, config=QeRLConfig, **kwargs):
    defaults = {
        "output_dir": str(tmp_path / "run"), "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True,
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "max_steps": 2,
        "save_strategy": "no", "logging_steps": 1, "gradient_checkpointing": False, "learning_rate": 1e-3,
        "aqn_num_stages": 2, "model_init_kwargs": {"dtype": "float32"}, "seed": 3,
    }  # fmt: skip
    return config(**{**defaults, **kwargs})


def float32_base(folder):
    """The NVFP4 base of a folder, computing in float32."""
    config = NVFP4Config(compute_dtype="float32")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


def frozen_of(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
