"""Tiny trainings for the faults of a run: started as the example starts them, interrupted, started again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from qerl_trl import QeRLConfig, QeRLGRPOTrainer

PROMPTS = Dataset.from_dict({"prompt": [f"say {word} " for word in ("one", "two", "six", "ten")] * 4})
WEIGHTS = "adapter_model.safetensors"


def spread_reward(completions, **kwargs):
    """Differs between completions, so that every step has a gradient."""
    return [float(sum(text.encode()) % 7) for text in completions]


class Interrupted(BaseException):
    """What stops a run here; no error of the reward function, as a Ctrl-C is none."""


def interrupting(calls: int, reward=spread_reward, by=Interrupted):
    """`reward`, which calls `by` (an exception is raised) in its call number `calls`: in the middle of that rollout."""
    seen = []

    def spread_reward(completions, **kwargs):  # under the name that the run records
        seen.append(1)
        if len(seen) == calls:
            raise by()
        return reward(completions, **kwargs)

    return spread_reward


class AfterTheFirstStep(TrainerCallback):
    """Interrupts a run between its first two steps."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            raise Interrupted


def contents(folder: Path) -> dict[Path, bytes]:
    """What lies in a folder, but for the mark of the process that trains there."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".qerl_lock"}


class TinyRuns:
    """Builds trainers of a 2-layer model. `options` of one training are fields of `QeRLConfig`."""

    def __init__(self, model: Path, tokenizer: Any) -> None:
        self.model, self.tokenizer = str(model), tokenizer

    def trainer(
        self, folder: Path, reward=spread_reward, dataset=PROMPTS, rollout_func=None, **options: Any
    ) -> QeRLGRPOTrainer:
        defaults: dict[str, Any] = {
            "output_dir": str(folder),
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 4,
            "max_steps": 2,
            "save_strategy": "steps",
            "save_steps": 1,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "report_to": "none",
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "aqn_num_stages": 2,
            "model_init_kwargs": {"dtype": "float32"},
        }
        lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        return QeRLGRPOTrainer(
            self.model,
            reward,
            QeRLConfig(**{**defaults, **options}),
            dataset,
            processing_class=self.tokenizer,
            peft_config=None if options.get("base_format") == "full" else lora,
            rollout_func=rollout_func,
        )

    def command(self, folder: Path, **options: Any) -> QeRLGRPOTrainer:
        """What the same command does each time: go on where there is something to go on from, train, save."""
        trainer = self.trainer(folder, **options)
        trainer.train(resume_from_checkpoint=trainer.to_resume())
        trainer.save_model()
        return trainer


@pytest.fixture(scope="module")
def tiny_runs(tiny_model_dir, tiny_tokenizer):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # bit-identical across processes, and safe in a forked one
    yield TinyRuns(tiny_model_dir("qwen2"), tiny_tokenizer)
    torch.set_num_threads(threads)
