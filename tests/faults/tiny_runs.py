"""Tiny runs and policies to interrupt, resume, edit on disk and publish."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, TrainerCallback
from typer.testing import CliRunner

from qerl_trl import NVFP4Config, QeRLGRPOTrainer
from qerl_trl.cli import main as cli
from qerl_trl.model.lora import prepare_trainable, register_nvfp4_lora

PROMPTS = Dataset.from_dict({"prompt": [f"say {word} " for word in ("one", "two", "six", "ten")] * 4})
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
WEIGHTS = "adapter_model.safetensors"
FILE = "model.safetensors"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_gsm8k.py"


def spread_reward(completions, **kwargs):
    """Differs between completions, so that every step has a gradient."""
    return [float(sum(text.encode()) % 7) for text in completions]


class Interrupted(BaseException):
    """Stops a run without an error of the reward function, as Ctrl-C does."""


def interrupting(calls: int, reward=spread_reward, by=Interrupted):
    """`reward`, which calls (or raises) `by` in its call number `calls`, in the middle of that rollout."""
    seen = []

    def spread_reward(completions, **kwargs):  # under the name that the run records
        seen.append(1)
        if len(seen) == calls:
            raise by()
        return reward(completions, **kwargs)

    return spread_reward


class AfterStep(TrainerCallback):
    """`action(model)` at the end of a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            self.action(model)


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def contents(folder: Path) -> dict[Path, bytes]:
    """The files of a folder without the lock of a training process."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".qerl_lock"}


def edit(file: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """`change` the tensors of a file, in place or by returning others."""
    stored = load_file(file)
    made = change(stored)
    save_file(made if isinstance(made, dict) else stored, file, metadata={"format": "pt"})


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1000] ^= 4
    file.write_bytes(content)


def poison(tensors: dict[str, torch.Tensor], name: str = "") -> None:
    """NaN in the first tensor that has `name` in its own."""
    next(tensor for key, tensor in tensors.items() if name in key).view(-1)[0] = float("nan")


def in_hub_cache(cache: Path, name: str, commit: str, folder: Path) -> Path:
    """Put `name` into the Hub's cache, with `commit` as the newest; returns the snapshot's folder."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs/main").write_text(commit)
    return snapshot


def call(*words: object) -> tuple[int, str, str]:
    """A command in this process, with the error handling of `main`: exit code, stdout, stderr."""
    outcome = CliRunner().invoke(cli.app, [str(word) for word in words])
    error = outcome.exception
    if error is None or isinstance(error, SystemExit):
        return outcome.exit_code, outcome.stdout, outcome.stderr
    code = cli.exit_code(error)
    if code is None:
        raise error
    return code, outcome.stdout, outcome.stderr + str(error)


def fails(words: tuple, *command: object, code: int = 2) -> None:
    """The command ends with `code` and `words` on stderr."""
    found, _, err = call(*command)
    assert found == code and not [word for word in words if str(word) not in err], err


def works(*command: object) -> str:
    """The command succeeds; returns its stderr."""
    code, _, err = call(*command)
    assert code == 0, err
    return err


@torch.no_grad()
def make_policy(folder: Path, dtype: str = "float32", size: float = 0.05, base: str = "nvfp4", **lora: Any) -> Any:
    """A policy on the NVFP4 (or dense) base of `folder` that looks trained: its B and other trained weights moved."""
    quantization = {"quantization_config": NVFP4Config(compute_dtype=dtype)} if base == "nvfp4" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **quantization)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **lora})
    torch.manual_seed(0)
    policy = get_peft_model(model, register_nvfp4_lora(config))
    prepare_trainable(policy)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name or "modules_to_save" in name or "trainable_tokens" in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    return policy.eval()


class TinyRuns:
    """Builds trainers of a 2-layer model. `options` of one training are fields of `QeRLConfig`."""

    def __init__(self, model: Path, tokenizer: Any) -> None:
        self.model, self.tokenizer = str(model), tokenizer

    def trainer(
        self,
        folder: Path,
        reward=spread_reward,
        dataset=PROMPTS,
        model=None,
        peft_config=LORA,
        given=None,
        trainer_class=QeRLGRPOTrainer,
        **options: Any,
    ) -> QeRLGRPOTrainer:
        """`given`: further arguments of the trainer."""
        defaults: dict[str, Any] = {
            "output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True,
            "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4, "max_steps": 2,
            "save_strategy": "steps", "save_steps": 1, "logging_steps": 1, "gradient_checkpointing": False,
            "learning_rate": 1e-3, "aqn_num_stages": 2, "model_init_kwargs": {"dtype": "float32"},
        }  # fmt: skip
        return trainer_class(
            model or self.model,
            reward,
            trainer_class._config_class(**{**defaults, **options}),
            dataset,
            processing_class=self.tokenizer,
            peft_config=None if options.get("base_format") == "full" else peft_config,
            **given or {},
        )

    def command(self, folder: Path, **options: Any) -> QeRLGRPOTrainer:
        """The same command each time: resume if there is a checkpoint, train, save."""
        trainer = self.trainer(folder, **options)
        trainer.train(resume_from_checkpoint=trainer.to_resume())
        trainer.save_model()
        return trainer
