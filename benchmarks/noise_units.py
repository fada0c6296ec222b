#!/usr/bin/env python3
"""KL of the noise in three units of sigma, of an untrained policy: measured at start, and in its rollouts.

python benchmarks/noise_units.py NAME --config smollm2 [options of every run]     # results/noise_units/NAME.json
"""

import json
import os
import re
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
from common import RESULTS

FOLDER = RESULTS / "noise_units"
UNITS: dict[str, dict[str, Any]] = {
    "absolute 0.01": {"aqn_sigma_start": 0.01},
    "relative 0.03": {"aqn_scale": "relative", "aqn_sigma_start": 0.03},
    "relative, target KL 0.05": {"aqn_scale": "relative", "aqn_target_kl": 0.05},
}
FIXED = {"aqn_schedule": "constant", "learning_rate": 0, "max_steps": 3, "eval_problems": 8, "save_strategy": "no"}
KEYS = {"expected": "aqn/expected_kl", "measured": "rollout/mismatch_kl", "share": "aqn/share", "sigma": "aqn/sigma"}


def run(units: dict[str, Any], more: list[str], folder: str) -> dict[str, Any]:
    options = {**FIXED, **units, "output_dir": folder}
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "examples/grpo_gsm8k.py", *given, *more]
    code, lines, _ = common.watched(command, {**os.environ, **common.ENVIRONMENT}, 900)
    if code:
        return {"exit_code": code, "last_lines": lines[-25:]}
    history = json.loads(Path(folder, "results.json").read_text())["log_history"]
    logged = {name: [entry[key] for entry in history if key in entry] for name, key in KEYS.items()}
    named = re.findall(r"(\d+) % of it from (\S+?)(?=,|$)", "\n".join(lines), re.MULTILINE)
    warned = [
        line[:300] for line in lines if "nats per token" in line and ("moves the policy" in line or "disagree" in line)
    ]
    return {
        "exit_code": 0,
        "options": shlex.join(given),
        **logged,
        "named": dict(map(reversed, named)),
        "warned": warned,
    }


def markdown() -> str:
    """The table of docs/source/noise.md."""
    lines = ["| model | setting | % of a norm's rms, median | KL at start | KL in rollouts | norms over 20 % of it |"]
    lines += ["|---|---|---:|---:|---:|---|"]
    records = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
    for name, record in records.items():
        for units, row in record["runs"].items():
            share, expected, measured = (statistics.mean(row[key]) for key in ("share", "expected", "measured"))
            named = ", ".join(f"`{norm.removeprefix('model.')}` {share} %" for norm, share in row["named"].items())
            warned = " (warned)" if row["warned"] else ""
            lines.append(
                f"| {name} | {units} | {100 * share:.2g} | {expected:.2g} | {measured:.2g}{warned} | {named} |"
            )
    places = "; ".join(f"{name}: {record['device']}, commit {record['commit'][:7]}" for name, record in records.items())
    return "\n".join(lines) + f"\n\nNats per token, untrained policies, three rollouts each. {places}."


if __name__ == "__main__":
    name, *more = sys.argv[1:]
    record = common.head("cpu" if "--use_cpu" in more else "cuda")
    record["runs"] = {}
    for units, options in UNITS.items():
        with tempfile.TemporaryDirectory() as folder:
            record["runs"][units] = run(options, more, folder)
        print(name, units, json.dumps(record["runs"][units])[:300], flush=True)
        common.save(record, FOLDER / f"{name}.json")
