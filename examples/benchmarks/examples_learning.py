"""What the three small examples learn on a CPU, from their own results.json.

    python examples/benchmarks/examples_learning.py                       # trains all three; minutes each on two idle cores
    python examples/benchmarks/examples_learning.py --collect runs        # only reads runs/letters, runs/tool_call, runs/grid_game

Writes examples/benchmarks/results/examples_cpu.json: accuracy on held-out problems before and after, command, machine, versions.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "examples" / "benchmarks" / "results" / "examples_cpu.json"
EXAMPLES = ("letters", "tool_call", "grid_game")
KEPT = (
    "task",
    "before",
    "after",
    "difference",
    "decoding",
    "steps",
    "train_seconds",
    "seed",
    "arm",
    "versions",
    "command",
)


def record(results: dict) -> dict:
    """Of a run's results.json, with the mean reward of its first and last five steps."""
    rewards = [entry["reward"] for entry in results["log_history"] if "reward" in entry]
    ends = {"first": rewards[:5], "last": rewards[-5:]}
    return {
        **{name: results[name] for name in KEPT},
        "reward": {name: sum(values) / len(values) for name, values in ends.items()},
        "settings": {
            name: results["settings"].get(name)
            for name in ("learning_rate", "num_generations", "max_completion_length", "aqn_sigma_start")
        },
    }


def table(content: dict) -> str:
    """What the documentation shows of it."""
    rows = ["| example | held out, before | after | steps | training, s |", "|---|---|---|---|---|"]
    for name, run in content["runs"].items():
        before, after = (f"{100 * run[when]['accuracy']:.1f} %" for when in ("before", "after"))
        rows.append(f"| {name} | {before} | {after} | {run['steps']} | {run['train_seconds']:.0f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", type=Path, help="Folder with the runs, which are not started again.")
    parser.add_argument("--conditions", default="", help="What else ran on the machine, in words.")
    args = parser.parse_args()
    folder = args.collect or ROOT / "runs"
    for name in EXAMPLES if args.collect is None else ():
        command = [sys.executable, f"examples/{name}.py", "--output_dir", str(folder / name)]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    runs = {
        name: record(json.loads(file.read_text()))
        for name in EXAMPLES
        if (file := folder / name / "results.json").is_file()
    }
    for run in runs.values():  # no path of this machine
        run["command"] = "python " + " ".join(
            Path(word).name if "/" in word else word for word in run["command"].split()[2:]
        )
    content = {
        "command": "python examples/benchmarks/examples_learning.py",
        "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores"
        + (f"; {args.conditions}" if args.conditions else ""),
        "runs": runs,
    }
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    print(table(content))


if __name__ == "__main__":
    main()
