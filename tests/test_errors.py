"""What a command, or a script that trains, ends with: a message where that is all one needs, else a traceback."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from qerl_trl import errors
from qerl_trl.cli import main as cli
from qerl_trl.shipped import contents

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = "examples/grpo_gsm8k.py"
OURS, RUN, LIBRARY, USERS = "qerl_trl.some", "qerl_trl.tasks.run", "trl.some", "rewards"
CASES = {
    "what we refuse": ([OURS], "raise ValueError('x')", 2),
    "our state": ([RUN, OURS], "raise RuntimeError('x')", 1),
    "a library refuses what was asked for": ([OURS, LIBRARY], "raise ValueError('x')", 2),
    "a library lacks something": ([OURS, LIBRARY], "raise ImportError('x')", 1),
    "a file that is not there": ([OURS], "open('absent')", 1),
    "a bug of ours": ([OURS], "int('x')", None),
    "another": ([OURS], "{}['x']", None),
    "an invariant": ([OURS], "assert False", None),
    "torch's own": ([RUN, OURS], "import torch; torch.ones(2) @ torch.ones(3)", None),
    "a library fails at a state": ([OURS, LIBRARY], "raise RuntimeError('x')", None),
    "a library fails while training": ([RUN, LIBRARY], "raise ValueError('x')", None),
    "a disk is full while training": ([RUN, OURS], "open('absent')", None),
    "a reward": ([RUN, USERS], "raise ValueError('x')", None),
    "Ctrl-C": ([RUN, LIBRARY], "raise KeyboardInterrupt", 130),
    "a library in a reward": ([OURS, USERS, LIBRARY], "raise ValueError('x')", None),
}


def raised(folder: Path, modules: list[str], statement: str) -> BaseException:
    """What comes of a statement in the last of `modules`, each of which calls the next."""
    call = None
    for name in reversed(modules):
        library = Path(sysconfig.get_path("purelib")) / "trl"
        file = folder / f"{name}.py"
        file.write_text(f"def call():\n    {statement if call is None else 'following()'}\n")
        inside = {"__name__": name, "following": call}
        # a library's file is where libraries are; its lines are those of the file here
        exec(compile(file.read_text(), file, "exec"), inside)
        if name == LIBRARY:
            errors.linecache.cache[str(library / file.name)] = (1, None, file.read_text().splitlines(True), "")
            exec(compile(file.read_text(), library / file.name, "exec"), inside)
        call = inside["call"]
    with pytest.raises(BaseException) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(("modules", "statement", "expected"), CASES.values(), ids=CASES)
def test_whose_error_it_is(modules, statement, expected, tmp_path):
    assert errors.exit_code(raised(tmp_path, modules, statement)) == expected


def test_a_script_that_waits_for_itself_is_no_place_where_something_hung(tmp_path):
    """`python -m script` named the script's own last line, as of a reward that hangs."""
    (tmp_path / "waits.py").write_text(
        "import os, signal, threading\nfrom qerl_trl import errors\nerrors.tell_in_scripts()\n"
        "threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\nthreading.Event().wait(30)\n"
    )
    for words in (["waits.py"], ["-m", "waits"]):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.stderr.strip().splitlines()[-1] == "qerl-trl: Interrupted." and done.returncode == 130


def test_a_command_shows_the_traceback_of_a_bug(monkeypatch, tmp_path):
    """`merge` ended with torch's message about two shapes, and nothing said of what."""
    bug = raised(tmp_path, *CASES["torch's own"][:2])

    def app() -> None:
        raise bug

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(RuntimeError, match="size") as ended:
        cli.main()
    assert ended.value is bug


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--aqn_sigma_start", "-1"], "aqn_sigma_start=-1.0 is not a standard deviation. Pass a finite number >= 0."),
        (["--learning_rate", "much"], "argument --learning_rate/--learning-rate: invalid float value: 'much'"),
        (["--learning_rat", "1"], "--learning_rat: no option of a run"),
        (["--num_generations", "1"], "at least 2 generations"),
        (["--model_name_or_path", "./typo"], "./typo is neither a folder here nor a Hub id (user/name)."),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_run_that_cannot_work_ends_with_what_is_wrong(words, message, warm_training, tmp_path):
    """It ended with a traceback, or two hundred lines of usage, and exit code 1."""
    command = [EXAMPLE, "--config", "embedded", "--output_dir", str(tmp_path), *words]
    done = warm_training.run(command, ROOT, dict(os.environ))
    assert done.returncode == 2
    *before, told = done.stderr.strip().splitlines()
    assert told.startswith("qerl-trl: ") and message in told
    assert "Traceback" not in done.stderr and "usage" not in done.stderr and len(before) < 3


@pytest.mark.parametrize(
    ("file", "message"),
    [(None, "is no folder of a model: it has no config.json"), ("tokenizer*", "makes no tokens of a text")],
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
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert str(folder) in done.stderr and message in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [1", "is no YAML: while parsing"),
        ("a: b: c", "is no YAML: mapping values"),
        ("- a", "has no fields: it is a list"),
    ],
)
def test_a_recipe_that_cannot_be_read(content, message, warm_training, tmp_path):
    (tmp_path / "run.yaml").write_text(content)
    for option in ("--config", "--task"):
        done = warm_training.run([EXAMPLE, option, str(tmp_path / "run.yaml")], ROOT, dict(os.environ))
        assert done.returncode == 2 and f"qerl-trl: {tmp_path}/run.yaml {message}" in done.stderr
        assert "Write one `name: value` on each line" in done.stderr
        assert "Traceback" not in done.stderr


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
        assert done.returncode == 2 and f"qerl-trl: {tmp_path}/run.yaml says {where}" in done.stderr
        assert "Traceback" not in done.stderr
    (tmp_path / "run.yaml").write_text("a: &a {seed: 1}\nb: {<<: *a, seed: 2}")
    assert contents(tmp_path / "run.yaml")["b"] == {"seed": 2}


def test_the_traceback_of_a_task_of_ones_own_stays(warm_training, tmp_path):
    (tmp_path / "own.py").write_text("def reward(completions, **kwargs): ...\nint('a typo of mine')\n")
    (tmp_path / "task.yaml").write_text(f"dataset_name: {ROOT}/examples/assets\nreward_funcs: [own.py:reward]\n")
    words = ["--config", "embedded", "--task", str(tmp_path / "task.yaml"), "--output_dir", str(tmp_path / "run")]
    done = warm_training.run([EXAMPLE, *words], ROOT, dict(os.environ))
    assert done.returncode == 1 and "Traceback" in done.stderr and f'{tmp_path}/own.py", line 2' in done.stderr


ACCELERATE = (
    "accelerate.commands.launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "told"),
    [(ACCELERATE, "qerl-trl: "), ("torch.distributed.run --nproc_per_node 2", "of 2: ")],
    ids=["accelerate", "torchrun"],
)
def test_a_launcher_leaves_the_cause_to_be_seen(launcher, told, tmp_path):
    """Each process says which it is; the launcher adds its own words. A process group of torch's has a hook, too, which lost the message."""
    words = ["--config", "embedded", "--output_dir", str(tmp_path), "--aqn_sigma_start", "-1"]
    command = [sys.executable, "-m", *launcher.split(), EXAMPLE, *words]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}  # as docs/source/multi_gpu.md says
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"{told}aqn_sigma_start=-1.0 is not a standard deviation" in done.stderr
    assert "qerl_trl/config.py" not in done.stderr
