"""The end of a command or a training script: its message, or a traceback."""

import os
import runpy
import shutil
from pathlib import Path

import pytest

from qerl_trl.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "examples/grpo_gsm8k.py"
OURS, LIBRARY = "qerl_trl.some", "trl.some"
CASES = {
    "bad input": ([OURS], "raise ValueError('x')", 2),
    "a package is missing": ([OURS, LIBRARY], "raise ImportError('x')", 1),
    "a bug": ([OURS], "{}['x']", None),
    "a library fails": ([OURS, LIBRARY], "raise RuntimeError('x')", None),
    "a reward": ([OURS, "rewards"], "raise ValueError('x')", None),
    "Ctrl-C": ([OURS, LIBRARY], "raise KeyboardInterrupt", 130),
}


def raised(modules: list[str], statement: str) -> BaseException:
    """The error of a statement in the last of `modules`; each calls the next."""
    call = None
    for name in reversed(modules):
        inside = {"__name__": name, "following": call}
        exec(f"def call():\n    {statement if call is None else 'following()'}\n", inside)
        call = inside["call"]
    with pytest.raises(BaseException) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(("modules", "statement", "expected"), CASES.values(), ids=CASES)
def test_exit_code(modules, statement, expected):
    assert cli.exit_code(raised(modules, statement)) == expected


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / EXAMPLE))["main"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--aqn_sigma_start", "-1"],
            "sigma_start=-1.0, sigma_end=0.0005, num_stages=10 is no noise schedule. Pass finite",
        ),
        (["--learning_rat", "1"], "--learning_rat: unknown option in"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_impossible_run_is_refused(words, message, example, tmp_path):
    with pytest.raises((ValueError, OSError)) as caught:
        example(["--config", "embedded", "--output_dir", str(tmp_path), *words])
    assert message in str(caught.value)


def test_a_script_ends_with_the_message_alone(warm_training, tmp_path):
    """The last line of its traceback, not two hundred lines of usage."""
    words = ["--config", "embedded", "--output_dir", str(tmp_path), "--learning_rate", "much"]
    done = warm_training.run([EXAMPLE, *words], ROOT, dict(os.environ))
    message = "argument --learning_rate/--learning-rate: invalid float value: 'much'"
    assert done.returncode == 1
    assert message in done.stderr.strip().splitlines()[-1] and "usage" not in done.stderr


@pytest.mark.parametrize(
    ("file", "message"),
    [("*", "has neither config.json nor adapter_config.json"), ("tokenizer*", "makes no tokens of a text")],
    ids=["config", "tokenizer"],
)
def test_a_model_folder_with_missing_files_is_named(file, message, example, tmp_path):
    tiny = ROOT / "examples/assets/tiny-qwen2"
    folder = shutil.copytree(tiny, tmp_path / "model", ignore=shutil.ignore_patterns(file))
    with pytest.raises((ValueError, OSError)) as caught:
        example(["--config", "embedded", "--output_dir", str(tmp_path), "--model_name_or_path", str(folder)])
    assert str(folder) in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [1", "is no YAML of a run or a task: while parsing"),
        ("- a", "is no YAML of a run or a task: it has no fields. Write one `name: value` on each line"),
        ("seed: 1\nlearning_rate: 1.0e-6\nseed: 2", "sets seed twice, in lines 1 and 3"),
    ],
    ids=["open", "list", "twice"],
)
def test_an_unreadable_recipe_or_task_is_named(content, message, example, tmp_path):
    (tmp_path / "run.yaml").write_text(content)
    for option in ("--config", "--task"):
        with pytest.raises(ValueError) as caught:
            example([option, str(tmp_path / "run.yaml"), "--output_dir", str(tmp_path / "run")])
        assert f"{tmp_path}/run.yaml {message}" in str(caught.value)
