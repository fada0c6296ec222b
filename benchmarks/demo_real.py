"""`make demo-real`: a real model, SmolLM2-135M-Instruct, learns products of two digits on a CPU.

    python benchmarks/demo_real.py [--gguf FILE] [--record]

At its end it says how much of the gain only repairs the rounding to 4 bits: the untrained bf16 model is measured, too.
The model is from a package (examples/assets/real_model.py); from the Hub it is `qerl-trl train --config smollm2`.
"""

import argparse
import json
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

import about  # noqa: E402
from examples.assets import real_model  # noqa: E402

from qerl_trl.support.recipes import config_file, contents  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "demo_real.json"
RUN = ROOT / "runs" / "products"  # output_dir of examples/configs/smollm2.yaml
#: of what a step logs
CURVES = ("step", "reward", "entropy", "aqn/")


def started(*words: str) -> None:
    """Run one command of the package, after showing it."""
    print(f"\n$ python {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)


def table(record: dict[str, Any]) -> str:
    """Untrained in bf16 and in NVFP4, and trained; what of the gain is repair."""
    bf16, before, after = (record[name]["accuracy"] for name in ("untrained_bf16", "untrained_nvfp4", "trained_nvfp4"))
    repair = max(min(after, bf16) - before, 0)
    shown = {"bf16, untrained": bf16, "NVFP4, untrained": before, f"NVFP4, after {record['run']['steps']} steps": after}
    rows = [
        f"| SmolLM2-135M-Instruct, {record['run']['task']} | held out, of {record['trained_nvfp4']['total']} |",
        "|---|---:|",
    ]
    rows += [f"| {name} | {100 * value:.1f} % |" for name, value in shown.items()]
    return (
        "\n".join(rows)
        + f"\n\nOf the gain of {100 * (after - before):.1f} points, {100 * repair:.1f} repair what the rounding to 4 "
        f"bits lost, and {100 * (after - before - repair):.1f} go beyond the untrained bf16 model."
    )


def page() -> str:
    """What the documentation shows of the record."""
    if not RESULT.is_file():
        return "No whole run is recorded yet."
    record, source = json.loads(RESULT.read_text()), RESULT.relative_to(ROOT)
    return (
        f"{table(record)} {record['run']['device']}, {record['cpu_seconds'] / 60:.0f} minutes of one core; one seed; commit "
        f"{record['commit'][:7]}, [{source.name}]({source}), by `{record['command']}`."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="Instead of the package's file.")
    parser.add_argument("--record", action="store_true", help=f"Write {RESULT.relative_to(ROOT)}.")
    args = parser.parse_args()
    if RESULT.is_file():
        known = json.loads(RESULT.read_text())
        print(
            f"This takes about {known['cpu_seconds'] / 60:.0f} minutes of one core ({known['run']['device']}).",
            flush=True,
        )
    begun, gguf = time.monotonic(), args.gguf or real_model.gguf_file()
    model = str(real_model.folder_of(gguf))
    untrained = RUN.with_name("products-bf16.json")
    untrained.parent.mkdir(exist_ok=True)
    longest = contents(config_file("smollm2"))["max_completion_length"]
    task = ("--task", "products", "--max-new-tokens", str(longest))
    started("-m", "qerl_trl.cli.main", "eval", model, *task, "--output", str(untrained))
    started("examples/grpo_gsm8k.py", "--config", "smollm2", "--model_name_or_path", model)
    run, bf16 = json.loads((RUN / "results.json").read_text()), json.loads(untrained.read_text())
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    record = {
        "command": "make demo-real",
        "commit": about.commit(),
        "gguf": {"file": gguf.name, "sha256": real_model.sha256(gguf)},
        "seconds": time.monotonic() - begun,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "untrained_bf16": {name: bf16[name] for name in ("correct", "total", "accuracy", "interval95")},
        "untrained_nvfp4": run["before"],
        "trained_nvfp4": run["after"],
        "run": {
            name: run[name]
            for name in ("task", "steps", "train_seconds", "seed", "decoding", "arm", "device", "versions")
        },
    }
    record["run"]["log_history"] = [
        {name: value for name, value in entry.items() if name.startswith(CURVES)} for entry in run["log_history"]
    ]
    print(f"\n{table(record)}")
    if args.record:
        RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
