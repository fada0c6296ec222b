"""docs/source/your_task.md is walked as it is written, from an empty folder to a published adapter, with fewer steps."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.test_main import call
from tests.publish.test_hub import server  # noqa: F401  (a fixture)

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "source" / "your_task.md").read_text()
SMALL = "--max_steps 2 --save_steps 2 --per_device_train_batch_size 16 --eval_problems 6 --lora_r 4"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.split("## What a task can say")[0], re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_nothing_to_a_published_adapter(server, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    data, commands = blocks("bash")
    (rewards,), (task,) = blocks("python"), blocks("yaml")
    script = data.replace("python -", f"{shlex.quote(sys.executable)} -")
    subprocess.run(["bash", "-e", "-c", script], check=True)
    (tmp_path / "rewards.py").write_text(rewards)
    (tmp_path / "words.yaml").write_text(task)
    words = [line.replace("<user>", "tester").split() for line in commands.strip().splitlines()]
    assert [line[:2] for line in words] == [["qerl-trl", verb] for verb in ("train", "eval", "merge", "push", "push")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    train = [sys.executable, "-m", "qerl_trl.cli.main", *words[0][1:], *SMALL.split()]
    done = subprocess.run(train, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "runs" / "words" / "results.json").read_text())
    assert results["task"] == yaml.safe_load(task)["name"] and results["after"]["total"] == 6
    assert any("rewards/letters_in_place/mean" in entry for entry in results["log_history"])

    code, out, err = call(*words[1][1:], "--limit", 6, "--json")
    assert code == 0, err
    measured = json.loads(out)
    assert (measured["task"], measured["total"]) == (results["task"], 6)
    assert measured["correct"] == results["after"]["correct"]  # the same problems, greedily
    for line in words[2:]:
        code, _, err = call(*line[1:])
        assert code == 0, err
    assert server.repos["tester/words"]["private"] is True
    published = server.text("tester/words")
    assert json.loads(published["adapter_config.json"])["base_model_name_or_path"] == "tester/words-base"
    assert "held-out accuracy" in published["README.md"]
    assert str(tmp_path) not in "".join(text for name, text in published.items() if name.endswith((".md", ".json")))
