#!/usr/bin/env python3
"""Milliseconds of the checks in CONTRIBUTING.md's table, and the command of a healthy run that reached each.

    python benchmarks/checks.py            # quantize, plan, train, resume, eval and merge SmolLM2-135M on the CPU
    python benchmarks/checks.py --table    # only write the table's columns, from the record

Commands run under cProfile. `ms`: time in the whole function, in the command where it took longest. This is an upper
bound, since many functions also do the work. "-": not called by any command.
"""

import argparse
import ast
import json
import os
import pstats
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
from common import RESULTS, ROOT

sys.path.append(str(ROOT))
OUT = RESULTS / "checks_cpu.json"
PAGE, PACKAGE = ROOT / "CONTRIBUTING.md", ROOT / "src/qerl_trl"
#: sitecustomize.py of the profiled commands
PROFILED = """
import atexit, cProfile, os, sys
if os.environ.get("PROFILE_INTO"):
    profile = cProfile.Profile()
    atexit.register(lambda: (profile.disable(), profile.dump_stats(f"{os.environ['PROFILE_INTO']}.{os.getpid()}")))
    profile.enable()
"""
RUN = {
    "max_steps": 2, "save_steps": 1, "save_total_limit": 2, "num_generations": 8, "per_device_train_batch_size": 16,
    "eval_problems": 4, "use_vllm": "true", "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.05,
    "vllm_max_model_length": 128, "vllm_engine_kwargs": '{"enforce_eager": true, "num_gpu_blocks_override": 256}',
}  # fmt: skip


def commands(model: str, folder: Path) -> dict[str, list[str]]:
    tool, run = ["-m", "qerl_trl.cli.main"], str(folder / "run")
    options = [word for name, value in RUN.items() for word in (f"--{name}", str(value))]
    script, options = "examples/grpo_gsm8k.py", ["--model_name_or_path", model, "--output_dir", run, *options]
    train = [script, "--config", "smollm2", *options]
    return {
        "plan": [*tool, "plan", model, "--card", "cpu", "--prompt-length", "64", "--completion-length", "16"],
        "quantize": [*tool, "quantize", model, str(folder / "nvfp4")],
        "train": train,
        "resume": [*train, "--resume_from_checkpoint", f"{run}/checkpoint-1"],
        "eval": [*tool, "eval", run, "--task", "products", "--limit", "2", "--output", str(folder / "eval.json")],
        "merge": [*tool, "merge", run, str(folder / "merged")],
        "export": [*tool, "merge", run, str(folder / "base"), "--as", "base"],
    }


def functions() -> dict[tuple[str, int], str]:
    """(file, line) -> name of the function in the table."""
    found: dict[tuple[str, int], str] = {}

    def walk(node: ast.AST, name: str, file: Path) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}"
                for line in (child.lineno, *(decorator.lineno for decorator in child.decorator_list)):
                    found[str(file), line] = inner
            walk(child, inner, file)

    for file in PACKAGE.rglob("*.py"):
        walk(ast.parse(file.read_text()), ".".join(file.relative_to(PACKAGE).with_suffix("").parts), file)
    return found


def measure() -> dict[str, Any]:
    from examples.assets import real_model

    names, found = functions(), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        (folder / "sitecustomize.py").write_text(PROFILED)
        path = f"{folder}:{ROOT / 'src'}:{ROOT / 'kernels/torch-ext'}"
        for name, command in commands(str(real_model.folder_of(real_model.gguf_file())), folder).items():
            into = folder / name
            environment = os.environ | common.ENVIRONMENT | {"PYTHONPATH": path, "PROFILE_INTO": str(into)}
            print(name, flush=True)
            subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True)
            for stats in folder.glob(f"{name}.*"):
                if stats.suffix.lstrip(".").isdigit():
                    for (file, line, _), (_, _, _, seconds, _) in pstats.Stats(str(stats)).stats.items():
                        if (file, line) in names:
                            row = found.setdefault(names[file, line], {"ms": 0.0, "in": []})
                            row["ms"] = max(row["ms"], round(1000 * seconds, 2))
                            row["in"] += [name] if name not in row["in"] else []
    return common.head("cpu") | {"checks": dict(sorted(found.items()))}


def write(checks: dict[str, dict[str, Any]]) -> None:
    """Write the last two columns of the table."""

    def row(line: re.Match[str]) -> str:
        cells = line[0].strip("|").split("|")[:4]
        name = cells[0].strip().strip("`")
        module, _, function = name.rpartition(".")  # a row may omit the class of a method
        of_it = [key for key in checks if key.startswith(f"{module}.") and key.endswith(f".{function}")]
        one = checks.get(name) or (checks[of_it[0]] if of_it else None)
        last = ("ms", "healthy run") if name == "check" else (f"{one['ms']:.1f}", one["in"][0]) if one else ("-", "-")
        last = ("---:", "---") if name.startswith("---") else last
        return f"|{'|'.join(cells)}|{'|'.join(f' {cell} ' if '---' not in cell else cell for cell in last)}|"

    head, mark, rest = PAGE.read_text().partition("| check | ")
    table, blank, after = rest.partition("\n\n")
    PAGE.write_text(head + re.sub(r"^\|.*$", row, mark + table, flags=re.M) + blank + after)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    if not parser.parse_args().table:
        common.save(measure(), OUT)
    write(json.loads(OUT.read_text())["checks"])
