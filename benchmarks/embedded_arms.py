"""The embedded example in four arms, several seeds each: {bf16, NVFP4} x {AQN off, on}, with LoRA in all of them.

    python benchmarks/embedded_arms.py run --seeds 0 1 2 --jobs 2     # CPU only; writes the JSON below
    python benchmarks/embedded_arms.py table                          # prints the README's table from it

The runs are those of `qerl-trl arms`, with two threads each; what is kept of them here is small enough to commit. The seed decides the
adapter's initial values, the order of problems, sampling and noise; the pretrained model is the same.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results" / "embedded_arms.json"
#: name in the table -> arm of `qerl-trl arms`
ARMS = {"NVFP4 + AQN": "nvfp4", "NVFP4": "nvfp4-no-noise", "bf16 + AQN": "bf16", "bf16": "bf16-no-noise"}
_CURVES = {
    "reward": "rewards/correctness_reward/mean",
    "entropy": "entropy",
    "sigma": "aqn/sigma",
    "kl": "rollout/mismatch_kl",
}


def kept(arm: str, folder: Path) -> dict:
    """What the example wrote, with the log reduced to a few curves."""
    result = json.loads((folder / "results.json").read_text())
    history = [entry for entry in result.pop("log_history") if "entropy" in entry]
    result["curves"] = {name: [round(entry.get(key, 0.0), 6) for entry in history] for name, key in _CURVES.items()}
    for name in ("command", "settings"):  # they name folders of this machine
        result.pop(name)
    return {"arm_name": arm, **result}


def run(args: argparse.Namespace, options: list[str]) -> None:
    threads = str(args.threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    seeds = [str(seed) for seed in args.seeds]
    command = [
        sys.executable,
        "-m",
        "qerl_trl.cli.main",
        "arms",
        "embedded",
        "--arms",
        *ARMS.values(),
        "--seeds",
        *seeds,
    ]
    command += ["--output_dir", str(args.scratch), "--jobs", str(args.jobs), *options]
    subprocess.run(command, check=True, env=environment, cwd=ROOT)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    record = {
        "command": "python benchmarks/embedded_arms.py " + " ".join(sys.argv[1:]),
        "commit": commit.stdout.strip() or args.commit,
        "threads_per_run": args.threads,
        "runs_at_a_time": args.jobs,
        "runs": [kept(name, args.scratch / f"{arm}-{seed}") for seed in seeds for name, arm in ARMS.items()],
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


def table(record: dict) -> str:
    """Markdown: one row per arm, held-out greedy accuracy in percent, mean and every seed."""
    rows = [
        "| arm | before | after: mean (seeds) | gain, points | entropy, start -> end | training, s |",
        "|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        runs = sorted((run for run in record["runs"] if run["arm_name"] == arm), key=lambda run: run["seed"])
        if not runs:
            continue
        after = [100 * run["after"]["accuracy"] for run in runs]
        gain = [100 * run["difference"]["value"] for run in runs]
        worst = min(run["difference"]["interval95"][0] for run in runs)
        tenth = max(1, len(runs[0]["curves"]["entropy"]) // 10)
        start = statistics.mean(statistics.mean(run["curves"]["entropy"][:tenth]) for run in runs)
        end = statistics.mean(statistics.mean(run["curves"]["entropy"][-tenth:]) for run in runs)
        rows.append(
            f"| {arm} | {100 * statistics.mean(run['before']['accuracy'] for run in runs):.1f} "
            f"| {statistics.mean(after):.1f} ({', '.join(f'{a:.1f}' for a in after)}) "
            f"| {statistics.mean(gain):+.1f}, sd {statistics.stdev(gain) if len(gain) > 1 else 0:.1f}, lowest 95 % bound "
            f"{100 * worst:+.1f} | {start:.3f} -> {end:.3f} | {statistics.mean(run['train_seconds'] for run in runs):.0f} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="action")
    runner = commands.add_parser("run")
    runner.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    runner.add_argument("--jobs", type=int, default=1, help="runs at a time")
    runner.add_argument("--threads", type=int, default=2, help="CPU threads per run")
    runner.add_argument("--scratch", type=Path, default=ROOT / "runs" / "arms")
    runner.add_argument("--output", type=Path, default=RESULTS)
    runner.add_argument("--commit", default="unknown", help="recorded where the tree is not a git checkout")
    commands.add_parser("table").add_argument("--input", type=Path, default=RESULTS)
    args, further = parser.parse_known_args()  # options of every run, as with `qerl-trl arms`
    if args.action == "run":
        run(args, further)
    else:
        print(table(json.loads(args.input.read_text())))


if __name__ == "__main__":
    main()
