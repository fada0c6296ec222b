"""Fifty defects planted in the package one at a time: which of them do the tests find?

    python -m tests.planted_defects [NUMBER ..] --commit X    # in a worktree of X; results into planted_defects.json

They were drawn by seed before the package was halved (see the first version of this file). A defect has a function and
a line, or in "now" its line of today. "found": by commit, the test that fails with the defect only.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DRAWN = Path(__file__).with_suffix(".json")


def plant(root: Path, defect: dict) -> bool:
    """Replaces its line, or what became of it, in a function of that name; False if it is not there."""
    for path in sorted((root / "src/qerl_trl").rglob("*.py")):
        text = path.read_text()
        for form in (defect, defect | defect.get("now", {})):
            end = text.find(f"{form['line']}\n") + len(form["line"])
            if end >= len(form["line"]) and f"def {form['function']}(" in text[:end]:
                path.write_text(text.replace(f"{form['line']}\n", f"{form['planted']}\n", 1))
                return True
    return False


def _first_failure(folder: str, tests: list[str]) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": f"{folder}/src:{folder}/kernels/torch-ext"}
    lines = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout.splitlines()
    return next((line.split(" ", 1)[1].partition(" - ")[0] for line in lines if re.match("FAILED |ERROR ", line)), None)


def run(commit: str, numbers: list[int], tests: list[str]) -> None:
    for number in numbers or range(len(json.loads(DRAWN.read_text()))):
        defects = json.loads(DRAWN.read_text())
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["git", "worktree", "add", "--detach", "-f", folder, commit], cwd=ROOT, check=True)
            found = "deleted"
            if plant(Path(folder), defects[number]):
                found = _first_failure(folder, tests) or f"not by {' '.join(tests)}"
                subprocess.run(["git", "checkout", "-q", "."], cwd=folder, check=True)
                if not found.startswith("not by ") and _first_failure(folder, [found]):
                    found = f"no answer: {found} fails without it too"
            defects[number].setdefault("found", {})[commit] = found
            DRAWN.write_text("[\n" + ",\n".join(map(json.dumps, defects)) + "\n]\n")
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="in this order, until the first that fails")
    given = parser.parse_args()
    run(given.commit, given.numbers, given.tests)
