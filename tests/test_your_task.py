"""docs/source/your_task.md is walked as it is written, from an empty folder to a published adapter in plain PEFT, with fewer steps."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import yaml

from qerl_trl.publish.load import load_policy
from tests.hub_server import StandInHub

ROOT = Path(__file__).resolve().parents[1]
SMALL = "--max_steps 2 --save_steps 2 --per_device_train_batch_size 16 --eval_problems 6 --lora_r 4 --use_cpu true"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("your_task", ROOT / "benchmarks" / "your_task.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_block_of_the_page_is_a_step(script):
    """Nothing of the section is left out, and what sets up the environment is what `make demo` does."""
    page = script.PAGE.read_text()
    section = page.split("## From nothing")[1].split("\n## ")[0]
    todo = script.steps(page)
    assert len([file for file, _ in todo if file]) == section.count("```python") + section.count("```yaml")
    words = [text.split()[0] for file, text in todo if not file]
    assert words[:4] == ["git", "make", "source", "mkdir"] and words[-2:] == ["pip", "python"]
    assert words.count("qerl-trl") == section.count("\nqerl-trl ")
    assert "\ninstall: $(VENV)/.base\n" in (ROOT / "Makefile").read_text()


def test_commands_are_read_as_a_shell_reads_them(script):
    block = "a \\\n  b\npython - <<'END'\nx\n\ny\nEND\nc\n"
    assert script.commands(block) == ["a \\\n  b", "python - <<'END'\nx\n\ny\nEND", "c"]


#: what the page's load.py has to end with: the policy as stock PEFT loaded it, in a process without this package
LOGITS = """
import sys, torch
assert "qerl_trl" not in sys.modules
with torch.no_grad():
    print(model.float()(**tokens).logits[0, -1].tolist())
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_from_nothing_to_a_published_adapter(script, tmp_path):
    """The environment is this one, so that the page's own (git, make, source, pip) is left out."""
    todo = [
        (
            file,
            f"{text} {SMALL}"
            if " train " in text
            else f"{text} --limit 6 --output runs/words/eval-words.json"
            if " eval " in text
            else text,
        )
        for file, text in script.steps(script.PAGE.read_text())
        if file or text.split()[0] not in ("git", "make", "source", "pip")
    ]
    todo = [(file, text + LOGITS if file == "load.py" else text) for file, text in todo]
    assert todo[-1] == ("", "python load.py")
    folder, tools = tmp_path / "walk", tmp_path / "bin"
    folder.mkdir()
    tools.mkdir()
    packages = os.pathsep.join(map(str, (ROOT / "src", ROOT / "kernels" / "torch-ext")))
    for name, before, arguments in (
        ("python", "", ""),  # nothing of ours on its path
        ("qerl-trl", f"PYTHONPATH='{packages}' ", "-m qerl_trl.cli.main"),
    ):
        (tools / name).write_text(f'#!/bin/sh\n{before}exec "{sys.executable}" {arguments} "$@"\n')
        (tools / name).chmod(0o755)
    server = StandInHub()
    environment = script.with_hub(server, tmp_path / "cache")
    environment |= {"PATH": f"{tools}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    timed = script.walk(folder, todo, environment, tmp_path / "log")
    server.close()
    assert all(each["seconds"] >= 0 for each in timed) and timed[-1]["said"]

    task = yaml.safe_load((folder / "words.yaml").read_text())
    results = json.loads((folder / "runs" / "words" / "results.json").read_text())
    assert results["task"] == task["name"] and results["after"]["total"] == 6
    assert any("rewards/letters_in_place/mean" in entry for entry in results["log_history"])
    measured = json.loads((folder / "runs" / "words" / "eval-words.json").read_text())
    assert (measured["task"], measured["total"]) == (results["task"], 6)
    assert measured["correct"] == results["after"]["correct"]  # the same problems, greedily

    assert all(repo["private"] for repo in server.repos.values()) and len(server.repos) == 2
    published = server.text("tester/words")
    assert json.loads(published["adapter_config.json"])["base_model_name_or_path"] == "tester/words-base"
    assert "held-out accuracy" in published["README.md"]
    assert "CompressedTensorsConfig(dequantize=True)" in published["README.md"]
    assert str(tmp_path) not in "".join(text for name, text in published.items() if name.endswith((".md", ".json")))

    # what stock PEFT loaded is the policy that was trained
    policy = load_policy(folder / "runs" / "words")
    asked = [{"role": "user", "content": "Backwards: KLARINET"}]
    tokens = policy.tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        ours = policy.model(**tokens).logits[0, -1]
    torch.testing.assert_close(torch.tensor(json.loads(timed[-1]["said"][-1])), ours, rtol=1e-4, atol=1e-4)
