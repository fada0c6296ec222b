"""Trainers whose updates are compared, and the state of torch that they need."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from qerl_trl import QeRLConfig, QeRLGRPOTrainer, QeRLRLOOConfig
from tests.faults.tiny_runs import spread_reward
from tests.tiny_models import make_tiny_model
from tests.update.models import LORA, PROMPTS, randomize

DEFAULTS = {
    "base_format": "bf16", "aqn": False, "padding_free": True, "use_cpu": True, "bf16": False,
    "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 12, "max_steps": 2,
    "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    "gradient_checkpointing": False, "seed": 3, "model_init_kwargs": {"dtype": "float32"},
}  # fmt: skip


@pytest.fixture(scope="module")
def make(tmp_path_factory, tiny_tokenizer):
    """`make(family="qwen2", **arguments)`: a trainer in float32 that packs, with a random adapter."""
    folders = {}

    def build(
        family="qwen2", trainer_class=QeRLGRPOTrainer, model=None, peft_config=LORA, eval_dataset=None, **arguments
    ):
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            # a sliding window shorter than the sequences
            window = {"sliding_window": 8} if family in ("mistral", "gemma2", "gemma3") else {}
            make_tiny_model(family, dtype=torch.float32, **window).save_pretrained(folders[family])
        config = QeRLConfig if trainer_class is QeRLGRPOTrainer else QeRLRLOOConfig
        arguments = DEFAULTS | {"output_dir": str(tmp_path_factory.mktemp("run"))} | arguments
        trainer = trainer_class(
            str(model or folders[family]),
            spread_reward,
            config(**arguments),
            PROMPTS,
            eval_dataset=eval_dataset,
            processing_class=tiny_tokenizer,
            peft_config=copy.deepcopy(peft_config),
        )
        randomize(trainer.model, seed=0, only="lora_B")
        return trainer

    return build


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def one_process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
