"""docs/source/your_task.md as it is written: from an empty folder to a published adapter in plain PEFT."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from qerl_trl.publish.load import load_policy
from tests.faults.tiny_runs import call
from tests.hub_server import TOKEN

PAGE = Path(__file__).resolve().parents[2] / "docs" / "source" / "your_task.md"
#: fewer steps and problems than on the page
SMALL = {
    "train": "--max_steps 2 --save_steps 2 --per_device_train_batch_size 16 --eval_problems 6 --lora_r 4",
    "eval": "--limit 6 --output runs/words/eval-words.json",
}
#: end of the page's load.py: the policy as stock PEFT loads it, in a process without this package
LOGITS = """
import sys, torch
assert "qerl_trl" not in sys.modules
with torch.no_grad():
    print(model.float()(**tokens).logits[0, -1].tolist())
"""


def steps(page: str) -> list[tuple[str, str]]:
    """(file or "", its content or one command) in the order of the page."""
    section = page.split("## From nothing to a published adapter\n")[1].split("\n## ")[0].replace("<user>", "tester")
    found = []
    for block in re.finditer(r"^```(bash|python|yaml)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE):
        if block[1] == "bash":
            commands = re.findall(r"^(.*<<'END'\n(?:.*\n)*?END|.+)$", block[2], re.MULTILINE)
            found += [("", command) for command in commands]
        else:
            found.append((re.findall(r"`([\w.]+\.(?:py|yaml))`", section[: block.start()])[-1], block[2]))
    return found


def run(command: str, environment: dict[str, str]) -> str:
    """A command of the page; its output. The environment of the tests is installed already."""
    program, *words = shlex.split(command, comments=True)
    if program in ("git", "make", "source", "pip"):
        return ""
    if program == "qerl-trl":
        code, out, err = call(*words, *shlex.split(SMALL.get(words[0], "")))
        assert code == 0, err
        return out
    assert program in ("python", "mkdir"), command
    shell = command.replace("python", shlex.quote(sys.executable), 1) if program == "python" else command
    done = subprocess.run(["bash", "-c", shell], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_from_nothing_to_a_published_adapter(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # training in this process
    monkeypatch.setattr(os, "execv", lambda _, words: runpy.run_path(words[1])["main"](words[2:]))
    monkeypatch.setattr(sys, "argv", ["grpo_gsm8k.py", "--task", "words.yaml"])  # recorded for eval
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    hub = {"HF_ENDPOINT": server.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    environment = kept | hub | {"HF_HOME": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    for file, text in steps(PAGE.read_text()):
        if file:
            Path(file).write_text(text + (LOGITS if file == "load.py" else ""))
        else:
            said = run(text, environment)
    folder = Path("runs/words")

    task, results = yaml.safe_load(Path("words.yaml").read_text()), json.loads((folder / "results.json").read_text())
    assert results["task"] == task["name"] and results["after"]["total"] == 6
    assert any("rewards/letters_in_place/mean" in entry for entry in results["log_history"])
    measured = json.loads((folder / "eval-words.json").read_text())
    assert (measured["task"], measured["total"]) == (results["task"], 6)
    assert measured["correct"] == results["after"]["correct"]  # the same problems, greedily

    assert all(repo["private"] for repo in server.repos.values()) and len(server.repos) == 2
    published = server.text("tester/words")
    assert json.loads(published["adapter_config.json"])["base_model_name_or_path"] == "tester/words-base"
    assert "held-out accuracy" in published["README.md"]
    assert "CompressedTensorsConfig(dequantize=True)" in published["README.md"]
    assert str(tmp_path) not in "".join(text for name, text in published.items() if name.endswith((".md", ".json")))

    # stock PEFT loaded the policy that was trained
    policy = load_policy(folder)
    asked = [{"role": "user", "content": "Backwards: KLARINET"}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    with torch.no_grad():
        ours = policy.model(**policy.tokenizer.apply_chat_template(asked, **options)).logits[0, -1]
    theirs = torch.tensor(json.loads(said.splitlines()[-1]))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
