"""docs/source/your_task.md is walked as it is written, from an empty folder to a published adapter in plain PEFT, with fewer steps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from qerl_trl.publish.load import load_policy
from tests.hub_server import TOKEN, StandInHub

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "source" / "your_task.md"
SMALL = "--max_steps 2 --save_steps 2 --per_device_train_batch_size 16 --eval_problems 6 --lora_r 4 --use_cpu true"


def steps(page: str) -> list[tuple[str, str]]:
    """(file or "", text) in the order of the page: a file to save, or one command of a bash block."""
    section = page.split("## From nothing to a published adapter\n")[1].split("\n## ")[0].replace("<user>", "tester")
    found, end = [], 0
    for block in re.finditer(r"^```(bash|python|yaml)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE):
        if block[1] == "bash":
            found += [("", command) for command in commands(block[2])]
        else:
            named = re.findall(r"`([\w.]+\.(?:py|yaml))`", section[end : block.start()])
            found.append((named[-1], block[2]))
        end = block.end()
    return found


def commands(block: str) -> list[str]:
    """Commands of a bash block, each with its continued lines or the text that it is given."""
    found: list[str] = []
    until = None
    for line in block.splitlines():
        if until or (found and found[-1].endswith("\\")):
            found[-1] += "\n" + line
            until = None if line == until else until
        elif line.strip():
            found.append(line)
            until = match[1] if (match := re.search(r"<<'(\w+)'$", line)) else None
    return found


def walk(folder: Path, todo: list[tuple[str, str]], environment: dict[str, str], log: Path) -> list[dict]:
    """Run the steps in `folder`; output of each command. Raises `RuntimeError` with the last lines of one that fails."""
    ran: list[dict] = []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log.open("w"), "text": True}
    shell = subprocess.Popen(["bash"], cwd=folder, env=environment, **pipes)
    assert shell.stdin is not None and shell.stdout is not None
    with shell:
        for file, text in todo:
            if file:
                (folder / file).write_text(text)
                continue
            mark = f"ended {len(ran)}:"
            shell.stdin.write(f"{text}\necho '{mark}' $?\n")
            shell.stdin.flush()
            said: list[str] = []
            last = ""
            for last in shell.stdout:
                if mark in last:
                    break
                said.append(last)
            status = last.rpartition(mark)[2].strip() if mark in last else "the end of the shell"
            ran.append({"command": text.splitlines()[0], "said": said})
            if status != "0":
                raise RuntimeError(f"`{text}` ended with {status}: {''.join(said[-20:])}{log.read_text()[-3000:]}")
        shell.stdin.close()
    return ran


def with_hub(server: StandInHub, cache: Path) -> dict[str, str]:
    """Environment with the stand-in as Hub, and without this machine's cache, token and GPU."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON", "VIRTUAL"))},
        "HF_ENDPOINT": server.endpoint,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",  # the stand-in speaks LFS only
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())),
    }


def test_every_block_of_the_page_is_a_step():
    """Nothing of the section is left out, and what sets up the environment is what `make demo` does."""
    page = PAGE.read_text()
    section = page.split("## From nothing")[1].split("\n## ")[0]
    todo = steps(page)
    assert len([file for file, _ in todo if file]) == section.count("```python") + section.count("```yaml")
    words = [text.split()[0] for file, text in todo if not file]
    assert words[:4] == ["git", "make", "source", "mkdir"] and words[-2:] == ["pip", "python"]
    assert words.count("qerl-trl") == section.count("\nqerl-trl ")
    assert "\ninstall: $(VENV)/.base\n" in (ROOT / "Makefile").read_text()


def test_commands_are_read_as_a_shell_reads_them():
    block = "a \\\n  b\npython - <<'END'\nx\n\ny\nEND\nc\n"
    assert commands(block) == ["a \\\n  b", "python - <<'END'\nx\n\ny\nEND", "c"]


#: what the page's load.py has to end with: the policy as stock PEFT loaded it, in a process without this package
LOGITS = """
import sys, torch
assert "qerl_trl" not in sys.modules
with torch.no_grad():
    print(model.float()(**tokens).logits[0, -1].tolist())
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_from_nothing_to_a_published_adapter(tmp_path):
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
        for file, text in steps(PAGE.read_text())
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
    environment = with_hub(server, tmp_path / "cache")
    environment |= {"PATH": f"{tools}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    ran = walk(folder, todo, environment, tmp_path / "log")
    server.close()

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
    torch.testing.assert_close(torch.tensor(json.loads(ran[-1]["said"][-1])), ours, rtol=1e-4, atol=1e-4)
