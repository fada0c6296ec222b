"""The embedded example in four arms, several seeds each: {bf16, NVFP4} x {AQN off, on}, with LoRA in all of them.

    python examples/benchmarks/embedded_arms.py run --seeds 0 1 2 --jobs 2     # CPU only; writes the JSON below
    python examples/benchmarks/embedded_arms.py table                          # prints the README's table from it

Every run is `examples/grpo_gsm8k.py` as a user starts it, in a process of its own with two threads. The seed decides the
adapter's initial values, the order of problems, sampling and noise; the pretrained model is the same.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results" / "embedded_arms.json"
ARMS = {
    "NVFP4 + AQN": {"base_format": "nvfp4", "aqn": "true"},
    "NVFP4": {"base_format": "nvfp4", "aqn": "false"},
    "bf16 + AQN": {"base_format": "bf16", "aqn": "true"},
    "bf16": {"base_format": "bf16", "aqn": "false"},
}


def run_one(arm: str, seed: int, scratch: Path, threads: int) -> dict:
    """Train one arm with one seed; returns what the example wrote, with the log reduced to a few curves."""
    output = scratch / f"{arm.replace(' + ', '-').lower()}-{seed}"
    options = {"output_dir": output, "seed": seed, "data_seed": seed, **ARMS[arm]}
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "1",
        "--num_machines",
        "1",
    ]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", str(threads)]
    command += [str(ROOT / "examples/grpo_gsm8k.py"), "--config", str(ROOT / "examples/configs/embedded.yaml")]
    command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with open(scratch / f"{output.name}.log", "w") as log:
        subprocess.run(command, check=True, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
    result = json.loads((output / "results.json").read_text())
    history = [entry for entry in result.pop("log_history") if "entropy" in entry]
    curves = {
        "reward": "rewards/correctness_reward/mean",
        "entropy": "entropy",
        "sigma": "aqn/sigma",
        "kl": "rollout/mismatch_kl",
    }
    result["curves"] = {name: [round(entry.get(key, 0.0), 6) for entry in history] for name, key in curves.items()}
    result.pop("command")
    return {"arm_name": arm, **result}


def run(args: argparse.Namespace) -> None:
    args.scratch.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    record = {
        "command": "python examples/benchmarks/embedded_arms.py " + " ".join(sys.argv[1:]),
        "commit": commit.stdout.strip() or args.commit,
        "threads_a_run": args.threads,
        "runs_at_a_time": args.jobs,
        "runs": [],
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(run_one, arm, seed, args.scratch, args.threads) for seed in args.seeds for arm in ARMS]
        for future in as_completed(futures):  # written as they finish: nothing is lost when the machine goes away
            record["runs"].append(future.result())
            args.output.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


def table(record: dict) -> str:
    """Markdown: one row an arm, held-out greedy accuracy in percent, mean and every seed."""
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
    runner.add_argument("--threads", type=int, default=2, help="CPU threads a run")
    runner.add_argument("--scratch", type=Path, default=ROOT / "runs" / "arms")
    runner.add_argument("--output", type=Path, default=RESULTS)
    runner.add_argument("--commit", default="unknown", help="recorded where the tree is not a git checkout")
    commands.add_parser("table").add_argument("--input", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.action == "run":
        run(args)
    else:
        print(table(json.loads(args.input.read_text())))


if __name__ == "__main__":
    main()
