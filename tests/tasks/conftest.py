"""A folder with a task's data, rewards, tools and environment."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from qerl_trl.tasks.task import Task

OWN = '''
from helper import SCORE

def shouted(completions, **kwargs):
    return [SCORE * float(c[0]["content"].isupper()) for c in completions]

def rows():
    train = [{"question": f"q{i}", "solution": i} for i in range(8)]
    return {"train": train, "test": [{"question": "t", "solution": 9}]}

def turned(row):
    return {"prompt": "turned " + row["text"], "answer": row["label"]}

def same_colour(answer, reference):
    return answer[0] == reference[0]

def one_of(answer, reference):
    return answer in reference

def look(where: str) -> str:
    """
    Looks.

    Args:
        where: a place.
    """
    return where

class World:
    def reset(self, **row):
        return None

    def get_reward(self):
        return 1.0
'''


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Not the working directory: names are looked up next to the YAML file too."""
    place = tmp_path / "task"
    place.mkdir()
    (place / "own.py").write_text(OWN)
    (place / "helper.py").write_text("SCORE = 2\n")
    for split, count in (("train", 10), ("test", 3)):
        lines = (json.dumps({"text": f"{split} {i}", "label": i}) for i in range(count))
        (place / f"{split}.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    return place


@pytest.fixture
def read(folder) -> Callable[..., Task]:
    """`read(**fields)`: the task of a YAML file in `folder`."""

    def from_yaml(**fields) -> Task:
        (folder / "my_words.yaml").write_text(yaml.safe_dump(fields))
        return Task.read(folder / "my_words.yaml")

    return from_yaml
