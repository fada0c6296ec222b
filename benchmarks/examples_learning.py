"""What the three small examples learn on a CPU, from their own results.json.

    python benchmarks/examples_learning.py                       # trains all three; minutes each on two idle cores
    python benchmarks/examples_learning.py --only grid_game      # trains this one; what is known of the others stays
    python benchmarks/examples_learning.py --collect runs        # only reads runs/letters, runs/tool_call, runs/grid_game

Writes benchmarks/results/examples_cpu.json: of each run the accuracy on held-out problems before and after, command, commit,
machine and versions. `--conditions` says what else the machine did: the seconds are worth nothing without it.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "examples_cpu.json"
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


def commit() -> str:
    """Of this tree, with a plus where it has changes that are not committed."""
    commands = (["git", "rev-parse", "--short", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    head, changes = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for command in commands
    )
    return head + ("+" if changes else "")


def table(content: dict) -> str:
    """What the documentation shows of it."""
    rows = [
        "| example | held out | solved before | after | difference (95 %, paired) | steps | training, s | machine | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, run in content["runs"].items():
        before, after = (f"{100 * run[when]['accuracy']:.1f} %" for when in ("before", "after"))
        low, high = (f"{100 * bound:+.1f}" for bound in run["difference"]["interval95"])
        gain = f"{100 * run['difference']['value']:+.1f} ({low} to {high})"
        rows.append(
            f"| `{name}` | {run['after']['total']} | {before} | {after} | {gain} | {run['steps']} | {run['train_seconds']:.0f} "
            f"| {run['machine']} | {run['commit']} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=EXAMPLES, default=EXAMPLES, help="Which of them.")
    parser.add_argument("--collect", type=Path, help="Folder with the runs, which are not started again.")
    parser.add_argument("--conditions", default="", help="What else ran on the machine, in words.")
    args = parser.parse_args()
    folder = args.collect or ROOT / "runs"
    content = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    runs = content.get("runs", {})
    for name in args.only:
        words = [f"examples/{name}.py", "--output_dir", str(folder / name)]
        if args.collect is None:
            environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
            subprocess.run([sys.executable, *words], check=True, cwd=ROOT, env=environment)
        run = record(json.loads((folder / name / "results.json").read_text()))
        machine = f"{platform.machine()} CPU, {os.cpu_count()} cores"
        options = run["command"].split()[2:]  # without the paths of this machine
        run["command"] = "python " + " ".join(Path(word).name if "/" in word else word for word in options)
        run["machine"] = machine + (f"; {args.conditions}" if args.conditions else "")
        run["commit"] = commit()
        runs[name] = run
    content = {
        "command": "python benchmarks/examples_learning.py",
        "runs": {name: runs[name] for name in EXAMPLES if name in runs},
    }
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    print(table(content))


if __name__ == "__main__":
    main()
