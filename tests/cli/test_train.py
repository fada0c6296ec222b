"""`qerl-trl train` starts the example; `qerl-trl arms` runs arms x seeds, resumes failed ones, and pairs the table."""

import json
import os
import sys
from pathlib import Path

import pytest

from qerl_trl.cli import train as command
from qerl_trl.support import recipes
from tests.faults.tiny_runs import call

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
#: instead of examples/grpo_gsm8k.py: its results depend on arm and seed; it fails if a file `broken-<folder>` exists
STAND_IN = """
import json, pathlib, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder, seed = pathlib.Path(given["--output_dir"]), int(given["--seed"])
folder.mkdir(exist_ok=True)
(folder / "starts").open("a").write("x")
if (folder.parent / f"broken-{folder.name}").is_file():
    sys.exit("the engine died")
solved = {"nvfp4": 80, "bf16": 70}[given["--base_format"]] + (seed if given["--aqn"] == "true" else 0)
share = lambda n: {"accuracy": n / 100, "total": 100, "correct": n, "interval95": [0, 1]}
results = {
    "before": share(20), "after": share(solved), "difference": {"value": (solved - 20) / 100, "interval95": [0, 1]},
    "steps": int(given.get("--max_steps", 5)), "train_seconds": 1.0, "seed": seed,
    "arm": {"base_format": given["--base_format"], "aqn": given["--aqn"] == "true"}, "measured_by": {},
}
(folder / "results.json").write_text(json.dumps(results))
"""


@pytest.fixture
def arms(tmp_path, monkeypatch):
    """`arms(*words)`: the command with the stand-in, into `tmp_path / "arms"`."""
    examples = tmp_path / "examples"
    (examples / "configs").mkdir(parents=True)
    (examples / "grpo_gsm8k.py").write_text(STAND_IN)
    (examples / "configs" / "small.yaml").write_text("max_steps: 5\n")
    monkeypatch.setattr(command, "examples_folder", lambda: examples)
    monkeypatch.setattr(recipes, "examples_folder", lambda: examples)
    return lambda *words: call("arms", "small", "--output_dir", tmp_path / "arms", *words)


def starts(folder):
    return {path.parent.name: len(path.read_text()) for path in sorted(folder.glob("*/starts"))}


def test_each_run_has_a_folder_and_the_table_is_paired(arms, tmp_path):
    code, out, _ = arms("--arms", "nvfp4", "bf16", "nvfp4-no-noise", "--seeds", 1, 3, "--jobs", 2)
    assert code == 0
    folders = ("bf16-1", "bf16-3", "nvfp4-1", "nvfp4-3", "nvfp4-no-noise-1", "nvfp4-no-noise-3")
    assert starts(tmp_path / "arms") == dict.fromkeys(folders, 1)
    # of two values 2 apart the standard error is 1
    assert out.splitlines()[4] == (
        "| mean | 20.0 -> 82.0 +- 1.0 | 20.0 -> 72.0 +- 1.0 | 20.0 -> 80.0 +- 0.0 | -10.0 +- 0.0 | -2.0 +- 1.0 |"
    )
    assert (tmp_path / "arms/arms.md").read_text() == out
    found = json.loads((tmp_path / "arms/arms.json").read_text())
    assert found["differences"]["nvfp4-no-noise"]["after"]["by_seed"] == pytest.approx({"1": -0.01, "3": -0.03})
    assert found["accuracy"]["bf16"]["gain"]["mean"] == pytest.approx(0.52)


def test_a_failed_run_is_started_again_and_a_finished_one_is_not(arms, tmp_path):
    words = ("--arms", "nvfp4", "bf16", "--seeds", 1)
    (tmp_path / "arms").mkdir()
    (tmp_path / "arms/broken-bf16-1").touch()
    code, out, err = arms(*words)
    assert code == 1
    assert "1 of 2 runs failed: bf16 with seed 1 ended with exit code 1 (the engine died)" in err
    assert "Start the same command again" in err
    assert "| 1 | 20.0 -> 81.0 |  |  |" in out
    (tmp_path / "arms/broken-bf16-1").unlink()
    code, out, err = arms(*words)
    assert code == 0 and "nvfp4, seed 1: has ended already" in err
    assert "| 1 | 20.0 -> 81.0 | 20.0 -> 71.0 | -10.0 |" in out
    assert starts(tmp_path / "arms") == {"bf16-1": 2, "nvfp4-1": 1}
    # with other options every run is started again
    assert arms(*words, "--max_steps", 9)[0] == 0
    assert starts(tmp_path / "arms") == {"bf16-1": 3, "nvfp4-1": 2}


def test_runs_that_cannot_be_compared_are_refused(arms, tmp_path):
    assert arms("--arms", "nvfp4", "--seeds", 1)[0] == 0
    results = tmp_path / "arms/nvfp4-1/results.json"
    content = json.loads(results.read_text())
    results.write_text(json.dumps({**content, "steps": 4}))
    code, _, err = arms("--arms", "nvfp4", "bf16", "--seeds", 1)
    assert code == 2 and "steps: 4, 5" in err and "another --output_dir" in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--arms", "int8"), "no such arm. Choose from nvfp4, nvfp4-no-noise, bf16"),
        (("--arms", "bf16", "--seed", "4"), "--seed cannot be the same for all runs"),
        (("--arms", "bf16", "--accelerate-config", "absent"), "--accelerate_config absent is no file"),
    ],
)
def test_invalid_options_are_refused_before_any_run(words, expected, arms, tmp_path):
    code, _, err = arms(*words)
    assert code == 2 and expected in err
    assert not (tmp_path / "arms").exists()


def test_train_runs_the_example(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    script, config = str(ROOT / "examples/grpo_gsm8k.py"), str(ROOT / "examples/configs/embedded.yaml")
    file, model = str(ROOT / "examples/accelerate/fsdp2_2.yaml"), ["--model_name_or_path", "a_b"]
    task, own = str(ROOT / "examples/tasks/own.yaml"), [sys.executable, script, "--dataset_name"]
    for words, expected in (
        (["--config", "embedded", "--aqn", "false"], [sys.executable, script, "--aqn", "false", "--config", config]),
        (["--num-processes", "2", *model], [*LAUNCH, "--num_processes", "2", script, *model]),
        (["--num_processes", "1"], [sys.executable, script]),
        (["--data", "d", "--reward", "r:f"], [*own, "d", "--reward_funcs", "r:f", "--task", task]),
        (
            ["--accelerate_config", "fsdp2_2", "--num_processes", "4"],
            [*LAUNCH, "--config_file", file, "--num_processes", "4", script],
        ),
    ):
        call("train", *words)
        assert started.pop() == expected
    assert "fsdp2_2, fsdp2_4" in call("train", "--accelerate_config", "fsdp9")[2]
    assert "--data replaces --task" in call("train", "--reward", "r.py:f")[2]
    assert "nope.py: there is no such file" in call("train", "--data", "user/set", "--reward", "nope.py:f")[2]
    code, _, err = call("train", "--config", "qwen-8b")
    assert code == 2 and "embedded" in err and "Did you mean qwen3-8b" in err


def test_progress_of_a_quick_command_leaves_a_log_alone(capsys):
    with command.progress_bar("quantizing") as progress:
        for _ in range(4):
            progress(1_000_000_000, 8_000_000_000)
    assert not capsys.readouterr().err.strip()
