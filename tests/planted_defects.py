"""Fifty defects planted in the package, drawn by seed: which of them do the tests find?

    python -m tests.planted_defects draw                      # once, before anything is changed: writes planted_defects.json
    python -m tests.planted_defects run --commit X [NUMBER..] # each in a worktree of X; the result goes into the same file

A defect is known by its function and its line, so that it is found again after the file has moved; "now": what its line became.
"found": by commit, the test that fails with the defect and passes without it.
"""

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DRAWN = Path(__file__).with_suffix(".json")
SEED, COUNT = 47, 50
#: the replacement of an operator, by kind
SWAPS = {
    "comparison": {
        " < ": " <= ",
        " <= ": " < ",
        " > ": " >= ",
        " >= ": " > ",
        " == ": " != ",
        " != ": " == ",
        " not in ": " in ",
    },
    "arithmetic": {" + ": " - ", " - ": " + ", " * ": " + ", " // ": " * "},
    "logic": {" and ": " or ", " or ": " and ", "not ": ""},
    "constant": {"True": "False", "False": "True", " 0": " 1", "[0]": "[-1]", "[-1]": "[0]"},
}
KINDS = [*SWAPS, "call left out"]
#: files that were to be deleted when the defects were drawn
DYING = (
    "alike beside channel completions ended errors forward garbage headers in_step isolation overlap packed plots processes read_back reuse shards "
    "signature sums transfers verify watch while_training"
).split()


def _sites(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """(kind, function, line, the line with the defect) of every place in a file that a defect can be planted in."""
    lines = path.read_text().splitlines()
    for function in [node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.FunctionDef)]:
        for node in ast.walk(function):
            at = getattr(node, "lineno", 0)
            if not at or node is function or getattr(node, "end_lineno", at) != at or lines.count(lines[at - 1]) > 1:
                continue
            line = lines[at - 1]
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "logger" not in line:
                yield "call left out", function.name, line, line[: len(line) - len(line.lstrip())] + "pass"
            kind = {ast.Compare: "comparison", ast.BinOp: "arithmetic", ast.BoolOp: "logic", ast.Constant: "constant"}
            kind = kind.get(type(node), "logic" if isinstance(node, ast.UnaryOp) else "")
            for old, new in SWAPS.get(kind, {}).items():
                text = line[node.col_offset : node.end_col_offset] if kind != "constant" else line
                planted = line.replace(text, text.replace(old, new))
                if text.count(old) == 1 and not re.search(r"""["'#]|strict=""", text) and _parses(planted):
                    yield kind, function.name, line, planted


def _parses(line: str) -> bool:
    """Also the head of a block, or a line of a longer expression: what cannot be read is no defect that a test has to find."""
    line = line.strip()
    for text in (
        line,
        f"{line} pass",
        f"if True: pass\n{line} pass",
        f"({line})",
        f"[0 {line}]",
        f"try: pass\n{line} pass",
    ):
        try:
            ast.parse(text)
            return True
        except SyntaxError:
            continue
    return False


def draw() -> list[dict]:
    """As many of each kind, in files drawn one after the other so that no file has two before all have one."""
    generator, drawn = random.Random(SEED), []
    files = sorted(path for path in (ROOT / "src/qerl_trl").rglob("*.py") if path.stem not in DYING)
    generator.shuffle(files)
    for path in files:
        kind = KINDS[len(drawn) % len(KINDS)]
        sites = sorted({site for site in _sites(path) if site[0] == kind})
        if sites and len(drawn) < COUNT:
            _, function, line, planted = generator.choice(sites)
            file = str(path.relative_to(ROOT))
            drawn.append({"file": file, "kind": kind, "function": function, "line": line, "planted": planted})
    return drawn


def plant(root: Path, defect: dict) -> bool:
    """Whether its line, or what became of it, is there, in a function of that name; then it is replaced."""
    for path in sorted((root / "src/qerl_trl").rglob("*.py")):
        text = path.read_text()
        for form in (defect, defect | defect.get("now", {})):
            end = text.find(f"{form['line']}\n") + len(form["line"])
            if end >= len(form["line"]) and f"def {form['function']}(" in text[:end]:
                path.write_text(text.replace(f"{form['line']}\n", f"{form['planted']}\n", 1))
                return True
    return False


def write(defects: list[dict]) -> None:
    DRAWN.write_text("[\n" + ",\n".join(map(json.dumps, defects)) + "\n]\n")


def _first_failure(folder: str, tests: list[str]) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": f"{folder}/src:{folder}/kernels/torch-ext"}
    lines = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout.splitlines()
    return next((line.split(" ", 1)[1].partition(" - ")[0] for line in lines if re.match("FAILED |ERROR ", line)), None)


def run(commit: str, numbers: list[int], tests: list[str]) -> None:
    for number in numbers:
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
            write(defects)
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["draw", "run"])
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="in this order, until the first that fails")
    given = parser.parse_args()
    if given.what == "draw":
        write(draw())
    else:
        run(given.commit, given.numbers or list(range(COUNT)), given.tests)
