"""Every GPU recipe as shipped, but for `INSTEAD`: two steps on a CPU of a tiny model of its architecture.

One of them with vLLM: tests/e2e/engine/test_recipe.py.
"""

import json
import runpy
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests import architectures
from tests.repo.test_configs import CONFIGS, MODELS
from tests.shapes import tiny
from tests.tiny_models import make_tiny_tokenizer, randomize_vectors

EXAMPLES = CONFIGS.parent
#: options for a CPU without vLLM and network; a random model gets no reward of the recipe's own
INSTEAD = {
    "dataset_name": f"{__file__}:problems",
    "reward_funcs": f"{__file__}:varied_reward",
    "use_cpu": "true",
    "use_vllm": "false",
    "optim": "adamw_torch",  # bitsandbytes has no 8-bit optimizer for a CPU
    "generation_batch_size": "32",
    "max_completion_length": "8",
    "max_steps": "2",
    "eval_problems": "2",
    "report_to": "none",
}
#: sizes below those of architectures.py: products in bfloat16 are slow on most CPUs
SMALLER = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
SMALLER |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}


def problems() -> dict[str, list[dict[str, str]]]:
    """Short ones in GSM8K's format."""
    rows = [{"question": f"{n} + {n}?", "answer": f"#### {2 * n}"} for n in range(40)]
    return {"train": rows[:36], "test": rows[36:]}


def varied_reward(completions, **kwargs):
    """Differs between completions, so that every step has a gradient."""
    return [float(sum(messages[-1]["content"].encode()) % 7) for messages in completions]


def words(options: dict[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def write_tiny_model(recipe: str, folder: Path, **settings) -> str:
    """A model of the class that the recipe's model has on the Hub. `settings`: of its decoder's configuration."""
    config = MODELS[recipe]
    auto = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    has = architectures.TINY_TEXT | architectures.TEXT[config.get_text_config().model_type]
    config = tiny(config, **{name: value for name, value in SMALLER.items() if name in has} | settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.bfloat16)
        randomize_vectors(model)
    model.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def main():
    return runpy.run_path(str(EXAMPLES / "grpo_gsm8k.py"))["main"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", MODELS)
def test_two_steps(recipe, main, tmp_path):
    said = yaml.safe_load((CONFIGS / f"{recipe}.yaml").read_text())
    if "chat_template_kwargs" in said:
        said["chat_template_kwargs"] = json.loads(said["chat_template_kwargs"])
    run = tmp_path / "run"
    instead = INSTEAD | {"model_name_or_path": write_tiny_model(recipe, tmp_path / "model"), "output_dir": str(run)}
    instead |= {"generation_batch_size": "16", "max_completion_length": "4"}
    main(["--config", recipe, *words(instead)])

    results = json.loads((run / "results.json").read_text())
    assert (results["steps"], results["after"]["total"]) == (2, 2)
    steps = [entry for entry in results["log_history"] if "loss" in entry]
    assert len(steps) == 2 and all(0 < entry["grad_norm"] < float("inf") for entry in steps), steps
    assert steps[0]["num_tokens"] > 0
    arguments = torch.load(run / "training_args.bin", weights_only=False)
    kept = {name: value for name, value in said.items() if name not in instead and hasattr(arguments, name)}
    assert {name: getattr(arguments, name) for name in kept} == kept and len(kept) > 15
    adapter = load_file(run / "adapter_model.safetensors")
    moved = [name for name, tensor in adapter.items() if "lora_B" in name and tensor.any()]
    assert moved and len(moved) == sum("lora_B" in name for name in adapter)
    assert {tensor.shape[0] for name, tensor in adapter.items() if "lora_A" in name} == {said["lora_r"]}
    assert not [name for name in adapter if "visual" in name or "vision" in name]
