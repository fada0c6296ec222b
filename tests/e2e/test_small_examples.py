"""The small examples on a CPU: two steps of each script, the same task as YAML, rewards and games."""

import json
import os
import runpy
from pathlib import Path

import pytest

from qerl_trl.tasks.grading import function_named
from qerl_trl.tasks.task import Task

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("letters", "tool_call", "grid_game")
SMALL = "--max_steps 2 --save_steps 2 --per_device_train_batch_size 8 --num_generations 8 --eval_problems 4 --lora_r 4"


def of(name: str, attribute: str):
    return function_named(f"{name}.py:{attribute}", "test", [EXAMPLES])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_steps(name, warm_training, tmp_path):
    command = [str(EXAMPLES / f"{name}.py"), *SMALL.split(), "--output_dir", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = warm_training.run(command, tmp_path, environment)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["steps"] == 2 and results["after"]["total"] == 4
    assert results["decoding"].startswith("greedy" if name == "letters" else "sampled")
    logged = results["log_history"]
    if name != "letters":
        assert any(entry.get("tools/call_frequency", 0) > 0 for entry in logged), "the model calls its tools"
        assert all(entry.get("tools/failure_frequency", 0) < 0.9 for entry in logged)


@pytest.mark.parametrize("name", NAMES)
def test_python_and_yaml_are_the_same_task(name, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)  # as python does for a script that it runs
    task = runpy.run_path(str(EXAMPLES / f"{name}.py"))["TASK"]
    file = Task.read(EXAMPLES / "tasks" / f"{name}.yaml")
    for field in ("label", "grader", "answer_format", "solved_reward", "system_prompt"):
        assert getattr(task, field) == getattr(file, field)
    ours, theirs = task.for_trainer(), file.for_trainer()
    assert ours.keys() == theirs.keys()
    assert ours["eval_dataset"].to_list() == theirs["eval_dataset"].to_list()
    for arguments in (ours, theirs):
        arguments["names"] = [f.__name__ for f in (*arguments["reward_funcs"], *arguments.get("tools", ()))]
    assert ours["names"] == theirs["names"]


def test_the_game():
    game = of("grid_game", "Treasure")()
    assert game.reset(treasure=[2, 0], pit=[1, 1], prompt="") == " Treasure: 2 right. Pit: 1 down, 1 right."
    assert game.move("up") == "Treasure: 1 down, 2 right. Pit: 2 down, 1 right."
    assert [game.move(way) for way in ("left", "down", "right", "right")][-1] == "Treasure: 1 right. Pit: 1 down."
    assert game.get_reward() == 0 and not game.over
    assert game.move("right") == "You found it." and game.get_reward() == 1
    assert game.move("left") == "The game is over." and game.get_reward() == 1
    game.reset(treasure=[0, -2], pit=[0, -1])  # a new game
    assert not game.over and game.get_reward() == 0
    assert [game.move("up"), game.move("up")] == ["You fell.", "The game is over."] and game.get_reward() == 0
