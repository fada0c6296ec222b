"""Does GRPO through vLLM learn as GRPO through transformers does? The embedded example, several seeds of each, side by side.

    python rollout_learning.py --out FILE [--seeds 0 1 2] [-- --dtype bfloat16 ...]     # further options go to the example

Every run is `examples/grpo_gsm8k.py` with the embedded configuration, in a process of its own, all at once on one GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROLLOUTS = {
    "vllm": ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_gpu_memory_utilization", "0.06"],
    "transformers": ["--use_vllm", "false"],
}


def start(rollout: str, seed: int, folder: Path, options: list[str]) -> subprocess.Popen:
    output = folder / f"{rollout}-{seed}"
    command = [
        sys.executable,
        str(ROOT / "examples/grpo_gsm8k.py"),
        "--config",
        str(ROOT / "examples/configs/embedded.yaml"),
    ]
    command += ["--output_dir", str(output), "--seed", str(seed), "--data_seed", str(seed), "--save_strategy", "no"]
    environment = dict(os.environ, MASTER_PORT=str(29600 + seed))  # several engines on one machine
    with open(folder / f"{output.name}.log", "w") as log:
        return subprocess.Popen(
            [*command, *ROLLOUTS[rollout], *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
        )


def summary(rollout: str, seed: int, folder: Path) -> dict:
    output = folder / f"{rollout}-{seed}"
    if not (output / "results.json").exists():
        return {"rollout": rollout, "seed": seed, "failed": (folder / f"{output.name}.log").read_text()[-1500:]}
    result = json.loads((output / "results.json").read_text())
    history = [log for log in result.pop("log_history") if "entropy" in log]
    keys = {
        "reward": "rewards/correctness_reward/mean", "entropy": "entropy", "sigma": "aqn/sigma",
        "sigma_effective": "aqn/sigma_effective", "mismatch_kl": "rollout/mismatch_kl", "rollout_s": "seconds/rollout",
        "update_s": "seconds/update", "logp_difference": "sampling/sampling_logp_difference/mean",
    }  # fmt: skip
    curves = {name: [round(log[key], 5) for log in history if log.get(key) is not None] for name, key in keys.items()}
    return {
        "rollout": rollout,
        "seed": seed,
        "curves": curves,
        "result": {k: v for k, v in result.items() if k != "command"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rollouts", nargs="+", default=list(ROLLOUTS))
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--stagger", type=float, default=0, help="seconds between two starts")
    parser.add_argument("options", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    options = [option for option in args.options if option != "--"]
    folder = Path(tempfile.mkdtemp())
    runs = {}
    for seed in args.seeds:
        for rollout in args.rollouts:
            runs[rollout, seed] = start(rollout, seed, folder, options)
            time.sleep(args.stagger)  # an engine measures free memory while it starts, and minds others that do
    results = []
    for (rollout, seed), process in runs.items():
        try:
            process.wait(args.timeout)
        except subprocess.TimeoutExpired:
            process.kill()
        results.append(summary(rollout, seed, folder))
    args.out.write_text(json.dumps(results, indent=1))
    for result in results:
        if "failed" in result:
            print(result["rollout"], result["seed"], "FAILED", result["failed"][-700:], flush=True)
            continue
        reward = result["curves"]["reward"]
        ends = [sum(part) / len(part) for part in (reward[:5], reward[-5:]) if part]
        accuracy = {k: v for k, v in result["result"].items() if "accuracy" in k or "before" in k or "after" in k}
        print(
            result["rollout"],
            result["seed"],
            "reward first/last five",
            [round(e, 3) for e in ends],
            accuracy,
            flush=True,
        )


if __name__ == "__main__":
    main()
