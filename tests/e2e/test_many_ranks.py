"""Several processes: the embedded default learns the same on 1, 2 and 4; the end of one ends the others."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trl.trainer import grpo_trainer

from qerl_trl import QeRLGRPOTrainer
from qerl_trl.tasks.script import Script
from tests.ranks import on_ranks

#: as in the paper: batch and updates of a rollout are set, each process's accumulation follows
SETTINGS = {
    "generation_batch_size": 16, "updates_per_rollout": 2, "per_device_train_batch_size": 2, "num_generations": 4,
    "max_completion_length": 4, "max_steps": 4, "aqn_num_stages": 2, "save_strategy": "no", "disable_tqdm": True,
    "lora_dropout": 0.0,
}  # fmt: skip
#: keys of a log about learning
LEARNING = {"loss", "grad_norm", "entropy", "reward", "reward_std", "aqn/sigma", "aqn/sigma_effective"}
LEARNING |= {"rollout/mismatch_kl"}


def digits(completions, **kwargs):
    """Share of digits: short completions differ in it."""
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [sum(c.isdigit() for c in text) / (len(text) + 1) for text in texts]


def sampled(trainer: QeRLGRPOTrainer):
    """Sampling like `generate`'s, noise included, with random numbers by prompt, step and place in the group instead of
    by process."""

    @torch.no_grad()
    def generate(prompt_ids, images, fields, num_generations):
        numbers, model = [], trainer.accelerator.unwrap_model(trainer.model)
        for place, prompt in enumerate(prompt_ids):
            key = repr((prompt, place % trainer.args.num_generations, trainer.state.global_step))
            seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest())
            generator = torch.Generator().manual_seed(seed)
            numbers.append(torch.rand(SETTINGS["max_completion_length"], 1, generator=generator))
        longest = max(map(len, prompt_ids))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompt_ids])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompt_ids])
        for drawn in torch.stack(numbers, dim=1):
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1]
            cumulated = logits.softmax(-1).cumsum(-1)
            ids = torch.cat([ids, torch.searchsorted(cumulated, drawn * cumulated[:, -1:])], dim=1)
            mask = torch.cat([mask, torch.ones_like(drawn, dtype=mask.dtype)], dim=1)
        return ids[:, longest:].tolist(), None

    return generate


def dealt(batch: dict) -> dict:
    """Instead of TRL's shuffle by process: each update gets as many completions of every group."""
    count, group = len(batch["completion_ids"]), SETTINGS["num_generations"]
    order = torch.arange(count).view(-1, group).T.flatten()
    return {
        name: value[order] if isinstance(value, torch.Tensor) and value.ndim else value for name, value in batch.items()
    }


def train(ranks: int, folder) -> list[dict]:
    """One of `ranks` processes: the log of each step. The adapter is saved in `folder`."""
    torch.set_num_threads(1)
    grpo_trainer.shuffle_sequence_dict = dealt
    words = [text for name, value in SETTINGS.items() for text in (f"--{name}", str(value))]
    script = Script.parse(argv=[*words, "--config", "examples/configs/embedded.yaml", "--output_dir", str(folder)])
    arguments = {**script.trainer_arguments(), "reward_funcs": digits}
    arguments["args"].reward_weights = None
    trainer = QeRLGRPOTrainer(**arguments)
    trainer._generate_single_turn = sampled(trainer)
    trainer.train()
    trainer.save_model()
    assert trainer.args.gradient_accumulation_steps == 4 // ranks
    return [{k: v for k, v in entry.items() if k in LEARNING} for entry in trainer.state.log_history if "loss" in entry]


def learned(ranks: int, folder) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """The log and the adapter."""
    outcomes = on_ranks(ranks, lambda rank: train(ranks, folder), timeout=120)
    for outcome in outcomes:
        assert outcome.answer == outcomes[0].answer and isinstance(outcome.answer, list), outcome
    return outcomes[0].answer, load_file(folder / "adapter_model.safetensors")


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Distance of two adapters, relative to the learned part of the first (`lora_B` starts at 0)."""
    between = sum((other[name] - one[name]).square().sum() for name in one) ** 0.5
    return float(between / sum(value.square().sum() for name, value in one.items() if "lora_B" in name) ** 0.5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return learned(1, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_processes_learn_the_same(ranks, alone, tmp_path):
    one, many = alone, learned(ranks, tmp_path)
    assert len(many[0]) == SETTINGS["max_steps"] and any(entry.get("aqn/sigma") for entry in many[0])
    for step, (expected, found) in enumerate(zip(one[0], many[0], strict=True)):
        assert found == pytest.approx(expected, rel=2e-4, abs=2e-6), f"step {step}"
    assert apart(one[1], many[1]) < 5e-4


#: the first process hangs, and does not notice the end of the second
DYING = """
import os, signal, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
open(f"{sys.argv[1]}/{rank}", "w").write(str(os.getpid()))
dist.barrier()
if rank == 0:
    time.sleep(300)
open(f"{sys.argv[1]}/end", "w").write(str(time.time()))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_launcher_ends_all_when_one_is_killed(tmp_path):
    """By torchrun's agent, with the shipped configuration."""
    (tmp_path / "dying.py").write_text(DYING)
    config = Path(__file__).parents[2] / "examples" / "accelerate" / "data_parallel_2.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(config)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launch, str(tmp_path / "dying.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    took = time.time() - float((tmp_path / "end").read_text())
    assert done.returncode not in (0, None) and took < 20, done.stderr
    assert "exitcode  : -9" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "0").read_text()), 0)
