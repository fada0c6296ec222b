"""The three small examples on a CPU: as scripts they run a few steps, as YAML they are the same task, and the games have rules."""

import argparse
import importlib
import json
import os
import re
import runpy
import sys
from math import prod
from pathlib import Path

import pytest
import yaml

from qerl_trl.tasks.grading import function_named
from qerl_trl.tasks.task import Task
from tests.faults.tiny_runs import call
from tests.warm import run_cold

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("letters", "tool_call", "grid_game")
SMALL = "--max_steps 2 --save_steps 2 --per_device_train_batch_size 16 --eval_problems 4 --lora_r 4"


def of(name: str, attribute: str):
    return function_named(f"{name}.py:{attribute}", "test", [EXAMPLES])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_two_steps(name, warm_training, tmp_path):
    command = [str(EXAMPLES / f"{name}.py"), *SMALL.split(), "--output_dir", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    if name == NAMES[0]:  # from nothing, as a user starts it
        done = run_cold([sys.executable, *command], tmp_path, environment)
    else:
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


@pytest.mark.parametrize("name", ["tool_call", "grid_game"])
def test_half_a_conversation_is_not_graded(name):
    code, _, err = call("eval", EXAMPLES / "assets" / "tiny-tasks", "--task", name)
    assert code == 2 and "tools, an environment" in err and "training loop" in err


def test_letters_in_place():
    reward = of("letters", "letters_in_place")
    texts = ["ABC", " ABC ", "ABD", "AB", "ABCDEF", ""]
    assert reward([[{"content": t}] for t in texts], ["ABC"] * 6) == pytest.approx([1, 1, 2 / 3, 2 / 3, 0.5, 0])


def test_what_is_asked_of_the_tool_is_held_out():
    questions, price = of("tool_call", "questions"), of("tool_call", "price")
    rows = questions()
    items = {side: {word for row in rows[side] for word in row["prompt"].split() if word.isupper()} for side in rows}
    assert not items["train"] & items["test"]
    row = next(row for row in rows["test"] if "together" in row["prompt"])
    first, second = (word for word in row["prompt"].split() if word.isupper())
    assert price(first) + price(second) == int(row["answer"])


@pytest.fixture
def learning(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES.parent / "benchmarks"))
    return importlib.import_module("learning")


def test_the_documentation_shows_what_was_measured(learning):
    measured = json.loads(learning.EXAMPLES_RESULT.read_text())
    assert learning.examples_table(measured) in (EXAMPLES / "assets" / "README.md").read_text()
    assert tuple(measured["runs"]) == NAMES
    for run in measured["runs"].values():
        assert run["difference"]["interval95"][0] > 0 and run["after"]["total"] >= 200


def test_one_example_measured_again_leaves_what_is_known_of_the_others(tmp_path, monkeypatch, learning):
    known = {"runs": {"letters": {"steps": 60, "commit": "then"}, "tool_call": {"steps": 16, "commit": "then"}}}
    (tmp_path / "measured.json").write_text(json.dumps(known))
    (tmp_path / "runs" / "tool_call").mkdir(parents=True)
    accuracy = {"accuracy": 0.5, "total": 4}
    results = dict.fromkeys(learning.KEPT) | {
        "before": accuracy,
        "after": accuracy,
        "difference": {"value": 0.0, "interval95": [-0.1, 0.1]},
        "steps": 8,
        "train_seconds": 1.0,
        "command": f"accelerate launch tool_call.py --output_dir {tmp_path}/tool_call",
        "settings": {},
        "log_history": [{"reward": 0.25}, {"loss": 1.0}, {"reward": 0.75}],
    }
    (tmp_path / "runs" / "tool_call" / "results.json").write_text(json.dumps(results))
    stand_ins = {
        "EXAMPLES_RESULT": tmp_path / "measured.json",
        "ROOT": tmp_path,
        "started": lambda *words, **more: None,
    }
    stand_ins["examples_table"] = lambda content: ""  # the old rows here have no accuracy
    for name, instead in stand_ins.items():
        monkeypatch.setattr(learning, name, instead)
    learning.examples(argparse.Namespace(only=["tool_call"], note="busy"))
    letters, again = json.loads((tmp_path / "measured.json").read_text())["runs"].values()
    assert letters == known["runs"]["letters"], "as it was, with its own commit"
    assert again["steps"] == 8 and again["reward"]["first"] == 0.5
    assert again["machine"].endswith("; busy") and again["commit"] not in ("", "then")
    assert again["command"] == "python tool_call.py --output_dir tool_call"


def test_what_is_looked_up_counts():
    def said(*items):
        calls = [{"function": {"name": "price", "arguments": {"item": item}}} for item in items]
        return [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "3"}]

    completions = [said("A", "B"), said("A"), said("A", "A"), said("C"), [{"role": "assistant", "content": "#### 3"}]]
    assert of("tool_call", "looked_up")(completions, items=[["A", "B"]] * 5) == [1, 0.5, 0.5, 0, 0]


def test_the_game():
    game = of("grid_game", "Treasure")()
    seen = game.reset(treasure=[2, 0], pit=[1, 1], prompt="")
    assert seen == " Treasure: 2 right. Pit: 1 down, 1 right."
    assert game.move("up") == "Treasure: 1 down, 2 right. Pit: 2 down, 1 right."
    assert game.move("left") == "Treasure: 1 down, 3 right. Pit: 2 down, 2 right."
    assert [game.move(way) for way in ("down", "right", "right")][-1] == "Treasure: 1 right. Pit: 1 down."
    assert game.get_reward() == 0 and not game.over
    assert game.move("right") == "You found it." and game.get_reward() == 1
    assert game.move("left") == "The game is over." and game.get_reward() == 1
    game.reset(treasure=[0, -2], pit=[0, -1])
    assert not game.over and game.get_reward() == 0, "a game starts anew"
    assert game.move("up") == "You fell." and game.get_reward() == 0
    assert game.move("up") == "The game is over." and game.get_reward() == 0, "not through the pit"


def test_no_position_of_a_held_out_game_is_met_in_training():
    games, game = of("grid_game", "games")(), of("grid_game", "Treasure")()

    def apart(treasure, pit) -> tuple[int, int]:
        return pit[0] - treasure[0], pit[1] - treasure[1]

    sides = {side: {apart(row["treasure"], row["pit"]) for row in rows} for side, rows in games.items()}
    assert len(games["test"]) >= 200 and not sides["train"] & sides["test"]
    for row in games["test"][::20]:  # and no step changes what sets them apart
        game.reset(**row)
        for direction in ("up", "right", "right", "down", "left"):
            game.move(direction)
            assert apart(game.treasure, game.pit) == apart(row["treasure"], row["pit"])


def test_each_game_can_be_won_within_the_turns_of_the_recipe(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "assets")
    games, path, game = of("grid_game", "games")(), of("assets/pretrain_tasks", "path"), of("grid_game", "Treasure")()
    turns = yaml.safe_load((EXAMPLES / "configs" / "grid_game.yaml").read_text())["max_tool_calling_iterations"]
    for row in games["train"] + games["test"]:
        walk = path(row["treasure"], row["pit"])
        game.reset(**row)
        assert [game.move(direction) for direction in walk][-1] == "You found it." and len(walk) <= turns


def test_no_product_is_on_both_sides_in_another_order():
    rows = of("products", "products")()
    factors = {split: {tuple(sorted(re.findall(r"\d", row["prompt"])[:2])) for row in rows[split]} for split in rows}
    assert (len(rows["train"]), len(rows["test"])) == (41, 40) and not factors["train"] & factors["test"]
    assert all(prod(map(int, re.findall(r"\d", row["prompt"])[:2])) == int(row["answer"]) for row in rows["test"])


@pytest.mark.parametrize(
    ("said", "right"), [("28", True), ("7 * 4 = 28.", True), ("128", False), ("7 * 4 is 27\n28", False), ("", False)]
)
def test_a_product_is_the_last_number_of_the_first_line(said, right):
    assert of("products", "last_number")(said, "28") is right
    assert of("products", "right")([[{"content": said}]], ["28"]) == [float(right)]
