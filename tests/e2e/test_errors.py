"""What a command, or a script that trains, ends with: a message where that is all one needs, else a traceback."""

import os
import shutil
from pathlib import Path

import pytest

from qerl_trl.cli import main as cli
from qerl_trl.cli import main as errors
from qerl_trl.support.recipes import contents

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "examples/grpo_gsm8k.py"
OURS, LIBRARY = "qerl_trl.some", "trl.some"
CASES = {
    "what we refuse": ([OURS], "raise ValueError('x')", 2),
    "our state": ([OURS], "raise RuntimeError('x')", 1),
    "a library lacks something": ([OURS, LIBRARY], "raise ImportError('x')", 1),
    "a file that is not there": ([OURS], "open('absent')", 1),
    "another": ([OURS], "{}['x']", None),
    "an invariant": ([OURS], "assert False", None),
    "a library fails": ([OURS, LIBRARY], "raise RuntimeError('x')", None),
    "a reward": ([OURS, "rewards"], "raise ValueError('x')", None),
    "Ctrl-C": ([OURS, LIBRARY], "raise KeyboardInterrupt", 130),
}


def raised(modules: list[str], statement: str) -> BaseException:
    """What comes of a statement in the last of `modules`, each of which calls the next."""
    call = None
    for name in reversed(modules):
        inside = {"__name__": name, "following": call}
        exec(f"def call():\n    {statement if call is None else 'following()'}\n", inside)
        call = inside["call"]
    with pytest.raises(BaseException) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(("modules", "statement", "expected"), CASES.values(), ids=CASES)
def test_whose_error_it_is(modules, statement, expected):
    assert errors.exit_code(raised(modules, statement)) == expected


def test_a_command_shows_the_traceback_of_a_bug(monkeypatch):
    """`merge` ended with torch's message about two shapes, and nothing said of what."""
    bug = raised([OURS, "torch"], "import torch; torch.ones(2) @ torch.ones(3)")

    def app() -> None:
        raise bug

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(RuntimeError, match="size") as ended:
        cli.main()
    assert ended.value is bug


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--aqn_sigma_start", "-1"],
            "sigma_start=-1.0, sigma_end=0.0005, num_stages=10 is no noise schedule. Pass finite sigmas >= 0",
        ),
        (["--learning_rate", "much"], "argument --learning_rate/--learning-rate: invalid float value: 'much'"),
        (["--learning_rat", "1"], "--learning_rat: no option of a run"),
        (["--num_generations", "1"], "at least 2 generations"),
        (["--model_name_or_path", "./typo"], "./typo is neither a folder here nor a Hub id (user/name)."),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_run_that_cannot_work_ends_with_what_is_wrong(words, message, warm_training, tmp_path):
    """The last line of a script's traceback, not two hundred lines of usage."""
    command = [EXAMPLE, "--config", "embedded", "--output_dir", str(tmp_path), *words]
    done = warm_training.run(command, ROOT, dict(os.environ))
    assert done.returncode == 1
    assert message in done.stderr.strip().splitlines()[-1] and "usage" not in done.stderr


@pytest.mark.parametrize(
    ("file", "message"),
    [(None, "has neither config.json nor adapter_config.json"), ("tokenizer*", "makes no tokens of a text")],
    ids=["config", "tokenizer"],
)
def test_a_model_folder_that_lacks_files_is_named(file, message, warm_training, tmp_path):
    """An empty one ended with the tokenizers library's advice, without its name; one without a tokenizer with an IndexError in generate."""
    folder = tmp_path / "model"
    folder.mkdir() if file is None else shutil.copytree(
        ROOT / "examples/assets/tiny-qwen2", folder, ignore=shutil.ignore_patterns(file)
    )
    command = [EXAMPLE, "--config", "embedded", "--output_dir", str(tmp_path), "--model_name_or_path", str(folder)]
    done = warm_training.run(command, ROOT, dict(os.environ))
    assert done.returncode == 1 and str(folder) in done.stderr and message in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [1", "is no YAML of a run or a task: while parsing"),
        ("a: b: c", "is no YAML of a run or a task: mapping values"),
        ("- a", "is no YAML of a run or a task: it has no fields"),
    ],
)
def test_a_recipe_that_cannot_be_read(content, message, warm_training, tmp_path):
    (tmp_path / "run.yaml").write_text(content)
    for option in ("--config", "--task"):
        done = warm_training.run([EXAMPLE, option, str(tmp_path / "run.yaml")], ROOT, dict(os.environ))
        assert done.returncode == 1 and f"{tmp_path}/run.yaml {message}" in done.stderr
        assert "Write one `name: value` on each line" in done.stderr


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ("seed: 1\nlearning_rate: 1.0e-6\nseed: 2", "seed twice, in lines 1 and 3"),
        ("options: {a: 1, a: 2}", "a twice, in lines 1 and 1"),
    ],
    ids=["apart", "inside"],
)
def test_what_a_recipe_says_twice_is_named(content, where, warm_training, tmp_path):
    """YAML's reader takes the last one."""
    (tmp_path / "run.yaml").write_text(content)
    for option in ("--config", "--task"):
        done = warm_training.run([EXAMPLE, option, str(tmp_path / "run.yaml")], ROOT, dict(os.environ))
        assert done.returncode == 1 and f"{tmp_path}/run.yaml says {where}" in done.stderr
    (tmp_path / "run.yaml").write_text("a: &a {seed: 1}\nb: {<<: *a, seed: 2}")
    assert contents(tmp_path / "run.yaml")["b"] == {"seed": 2}
