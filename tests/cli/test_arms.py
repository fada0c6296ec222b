"""Arms x seeds: a folder each, finished runs stay, failed ones go on, and the table is paired by seed."""

import json
import subprocess
import sys

import pytest

from qerl_trl.cli import train as cli_arms
from qerl_trl.config import BASE_FORMATS
from qerl_trl.support import recipes
from qerl_trl.tasks import arms as comparison
from tests.faults.tiny_runs import call

#: stands in for examples/grpo_gsm8k.py: what it writes depends on arm and seed; it fails where there is a file `broken-<folder>`
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
    monkeypatch.setattr(cli_arms, "examples_folder", lambda: examples)
    monkeypatch.setattr(recipes, "examples_folder", lambda: examples)
    return lambda *words: call("arms", "small", "--output_dir", tmp_path / "arms", *words)


def starts(folder):
    return {path.parent.name: len(path.read_text()) for path in sorted(folder.glob("*/starts"))}


def test_each_run_has_a_folder_and_the_table_is_paired(arms, tmp_path):
    code, out, _ = arms("--arms", "nvfp4", "bf16", "nvfp4-no-noise", "--seeds", 1, 3, "--jobs", 2)
    assert code == 0
    folders = ("bf16-1", "bf16-3", "nvfp4-1", "nvfp4-3", "nvfp4-no-noise-1", "nvfp4-no-noise-3")
    assert starts(tmp_path / "arms") == dict.fromkeys(folders, 1)
    lines = out.splitlines()
    assert lines[0] == "| seed | nvfp4 | bf16 | nvfp4-no-noise | bf16 - nvfp4 | nvfp4-no-noise - nvfp4 |"
    assert lines[2] == "| 1 | 20.0 -> 81.0 | 20.0 -> 71.0 | 20.0 -> 80.0 | -10.0 | -1.0 |"
    assert lines[3] == "| 3 | 20.0 -> 83.0 | 20.0 -> 73.0 | 20.0 -> 80.0 | -10.0 | -3.0 |"
    # of two values 2 apart the standard error is 1
    assert lines[4] == (
        "| mean | 20.0 -> 82.0 +- 1.0 | 20.0 -> 72.0 +- 1.0 | 20.0 -> 80.0 +- 0.0 | -10.0 +- 0.0 | -2.0 +- 1.0 |"
    )
    assert "5 steps" in lines[6] and "100 problems" in lines[6]
    assert (tmp_path / "arms/arms.md").read_text() == out
    found = json.loads((tmp_path / "arms/arms.json").read_text())
    assert found["differences"]["nvfp4-no-noise"]["after"]["by_seed"] == pytest.approx({"1": -0.01, "3": -0.03})
    assert found["accuracy"]["bf16"]["gain"]["mean"] == pytest.approx(0.52)


def test_it_goes_on_where_it_stopped(arms, tmp_path):
    words = ("--arms", "nvfp4", "bf16", "--seeds", 1)
    (tmp_path / "arms").mkdir()
    (tmp_path / "arms/broken-bf16-1").touch()
    code, out, said = arms(*words)
    assert code == 1
    assert "1 of 2 runs failed: bf16 with seed 1 ended with exit code 1 (the engine died)" in said
    assert "Start the same command again" in said
    assert "| 1 | 20.0 -> 81.0 |  |  |" in out
    (tmp_path / "arms/broken-bf16-1").unlink()
    code, out, said = arms(*words)
    assert code == 0 and "nvfp4, seed 1: has ended already" in said
    assert "| 1 | 20.0 -> 81.0 | 20.0 -> 71.0 | -10.0 |" in out
    assert starts(tmp_path / "arms") == {"bf16-1": 2, "nvfp4-1": 1}
    # with other options every run is asked again, and says itself whether that can be
    assert arms(*words, "--max_steps", 9)[0] == 0
    assert starts(tmp_path / "arms") == {"bf16-1": 3, "nvfp4-1": 2}


def test_runs_that_cannot_be_compared_are_refused(arms, tmp_path):
    assert arms("--arms", "nvfp4", "--seeds", 1)[0] == 0
    results = tmp_path / "arms/nvfp4-1/results.json"
    content = json.loads(results.read_text())
    results.write_text(json.dumps({**content, "steps": 4}))
    code, _, said = arms("--arms", "nvfp4", "bf16", "--seeds", 1)
    assert code == 2 and "steps: 4, 5" in said and "another --output_dir" in said
    for arm, grader in (("nvfp4", "math"), ("bf16", "exact")):
        way = {"measured_by": {"grader": grader}, "arm": {"base_format": arm, "aqn": True}}
        (tmp_path / f"arms/{arm}-1/results.json").write_text(json.dumps({**content, **way}))
    code, _, said = arms("--arms", "nvfp4", "bf16", "--seeds", 1)
    assert code == 2 and "grader: 'math', 'exact'" in said and "nvfp4-1 and bf16-1" in said and "steps" not in said


def test_runs_start_as_the_accelerate_file_says(arms, tmp_path, monkeypatch):
    """`train` took the file, and `arms` gave it to the script, which has no such option."""
    (tmp_path / "two.yaml").write_text("num_processes: 2\n")
    commands = []

    def launch(command, log):
        commands.append(command)
        log.write_text("not started")
        return 1

    monkeypatch.setattr(cli_arms, "launch", launch)
    words = ("--arms", "bf16", "--seeds", 1, "--accelerate_config", tmp_path / "two.yaml")
    for more in ([], ["--num_processes", "3"]):
        assert arms(*words, *more)[0] == 1
        command = commands.pop()
        script = next(i for i, word in enumerate(command) if word.endswith("grpo_gsm8k.py"))
        expected = ["-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "two.yaml"), *more]
        assert command[1:script] == expected and "--accelerate_config" not in command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--arms", "int8"), "no such arm. Choose from nvfp4, nvfp4-no-noise, bf16"),
        (("--arms", "bf16", "--seed", "4"), "--seed cannot be one for all runs"),
        (("--arms", "bf16", "--aqn=false"), "--aqn=false cannot be one for all runs"),
        (("--arms", "bf16", "--base-format", "nf4"), "--base-format cannot be one for all runs"),
        (("--arms", "bf16", "--accelerate-config", "absent"), "--accelerate_config absent is no file"),
    ],
    ids="unknown seed arm hyphens accelerate".split(),
)
def test_what_cannot_work_is_refused_before_any_run(words, said, arms, tmp_path):
    code, _, message = arms(*words)
    assert code == 2 and said in message
    assert not (tmp_path / "arms").exists()


def test_every_base_format_is_an_arm():
    assert {options["base_format"] for options in comparison.ARMS.values()} == set(BASE_FORMATS)


def test_comparing_loads_no_torch():
    code = "import qerl_trl.tasks.arms, sys; print([m for m in ('torch', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
