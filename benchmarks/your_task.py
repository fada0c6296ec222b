"""Walk docs/source/your_task.md from an empty folder to a published adapter: its commands as they stand there, in order, each timed.

    python benchmarks/your_task.py --note "2 cores, shared with other jobs"     # writes results/your_task_cpu.json

Blocks of bash are run in one shell; a block of Python or YAML is saved under the last file name in backticks before it. The Hub is the
tests' stand-in on 127.0.0.1, and `git clone` takes this checkout. Any command that fails ends the walk.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT), str(ROOT / "src")]

import common  # noqa: E402
from tests.hub_server import TOKEN, StandInHub  # noqa: E402

PAGE = ROOT / "docs" / "source" / "your_task.md"
RESULTS = common.RESULTS / "your_task_cpu.json"
CLONED = "https://github.com/qerl-trl/qerl-trl"
USER = "tester"


def steps(page: str) -> list[tuple[str, str]]:
    """(file or "", text) in the order of the page: a file to save, or one command of a bash block."""
    section = page.split("## From nothing to a published adapter\n")[1].split("\n## ")[0].replace("<user>", USER)
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
    """Do it in `folder`; what each command took.

    Raises:
        `RuntimeError`: a command failed; with its last lines.
    """
    timed: list[dict] = []
    shell = subprocess.Popen(
        ["bash"],
        cwd=folder,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
    )
    assert shell.stdin is not None and shell.stdout is not None
    with shell:
        for file, text in todo:
            if file:
                (folder / file).write_text(text)
                continue
            begun, mark = time.monotonic(), f"ended {len(timed)}:"
            shell.stdin.write(f"{text}\necho '{mark}' $?\n")
            shell.stdin.flush()
            said: list[str] = []
            last = ""
            for last in shell.stdout:
                if mark in last:
                    break
                said.append(last)
            status = last.rpartition(mark)[2].strip() if mark in last else "the end of the shell"
            timed.append({"command": text.splitlines()[0], "seconds": round(time.monotonic() - begun, 1), "said": said})
            if status != "0":
                raise RuntimeError(f"`{text}` ended with {status}: {''.join(said[-20:])}{log.read_text()[-3000:]}")
        shell.stdin.close()
    return timed


def with_hub(server: StandInHub, cache: Path) -> dict[str, str]:
    """An environment in which the stand-in is the Hub, and nothing of this machine's is used: no cache, no token, no GPU."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON", "VIRTUAL"))},
        "HF_ENDPOINT": server.endpoint,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",  # the stand-in speaks LFS only
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--note", default="", help="about the machine, for the record")
    note = parser.parse_args().note
    commit = (common.commit() or "")[:7]  # now: what is cloned
    server = StandInHub()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "walk"
        folder.mkdir()
        environment = with_hub(server, Path(scratch) / "cache")
        environment |= {
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.{ROOT}.insteadOf",
            "GIT_CONFIG_VALUE_0": CLONED,
        }
        timed = walk(folder, steps(PAGE.read_text()), environment, Path(scratch) / "log")
        results = json.loads((folder / "runs" / "words" / "results.json").read_text())
    server.close()
    record = {
        "command": common.command(),
        "commit": commit,
        "device": results["device"],
        "note": note,
        "versions": results["versions"],
        "commands": [{key: each[key] for key in ("command", "seconds")} for each in timed],
        "seconds": round(sum(each["seconds"] for each in timed), 1),
        "steps": results["steps"],
        "train_seconds": results["train_seconds"],
        "before": results["before"],
        "after": results["after"],
        "published": {name: sorted(repo["files"]) for name, repo in server.repos.items()},
        "says": "".join(timed[-1]["said"]).strip(),
    }
    common.save(record, RESULTS)


if __name__ == "__main__":
    main()
