"""The example script as a user starts it: end to end, killed and started again, and in a control arm."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.warm import run_cold

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"]
LAUNCH += ["--mixed_precision", "no", "--dynamo_backend", "no"]
SMALL = {"max_steps": 6, "save_steps": 1, "per_device_train_batch_size": 16, "max_completion_length": 16}
SMALL |= {"eval_problems": 8, "aqn_num_stages": 3, "lora_r": 4}


def command(output: Path, **options) -> list[str]:
    options = {**SMALL, "output_dir": output, **options}
    return ["examples/grpo_gsm8k.py", *(str(part) for name, value in options.items() for part in (f"--{name}", value))]


def environment() -> dict:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def said_by(done) -> str:
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("example") / "run"
    return output, said_by(run_cold([*LAUNCH, *command(output)], ROOT, environment()))


@pytest.mark.slow
def test_says_what_it_does_and_leaves_everything_behind(finished):
    output, said = finished
    first = said.splitlines()[0]
    assert all(word in first for word in ("embedded.yaml", "no GPU was found", "--config"))
    words = ["versions", "device", "NVFP4 in", "trained", "optimizer", "noise", "exponential", "reference", "(95 %)"]
    words += ["Sampled before step 1 (correctness_reward "]
    for word in (*words, f"qerl-trl push adapter {output} <user>/<name> --base-model"):
        assert word in said, word
    results = json.loads((output / "results.json").read_text())
    assert results["before"]["total"] == results["after"]["total"] == 8
    low, high = results["after"]["interval95"]
    assert low <= results["after"]["accuracy"] <= high
    assert results["steps"] == 6
    assert sum(json.loads((output / "after.json").read_text())["correct"]) == results["after"]["correct"]
    assert (output / "adapter_config.json").is_file()
    sigma = [entry["aqn/sigma"] for entry in results["log_history"] if "aqn/sigma" in entry]
    assert sigma[0] == 0 and sigma[2] == pytest.approx(1e-2)


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_adapter(finished, warm_training, tmp_path):
    """SIGKILL while starting, generating, updating or saving: the same command, repeated, ends bit-identically."""
    twin, _ = finished
    output, moments, kills = tmp_path / "run", random.Random(0), 0
    for _ in range(3):
        with open(os.devnull, "w") as nowhere:
            process = warm_training.start(command(output), ROOT, environment(), nowhere, nowhere)
        deadline = time.time() + 120
        while process.poll() is None and time.time() < deadline and not any(output.glob("checkpoint-*")):
            time.sleep(0.02)
        time.sleep(moments.uniform(0.0, 1.0))  # anywhere in a step or in the next save
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills >= 2
    said_by(warm_training.run(command(output), ROOT, environment()))
    left, right = (load_file(folder / "adapter_model.safetensors") for folder in (output, twin))
    assert left.keys() == right.keys()
    assert all(left[name].equal(right[name]) for name in left)
    ours, theirs = (json.loads((folder / "results.json").read_text()) for folder in (output, twin))
    assert ours["after"] == theirs["after"]
