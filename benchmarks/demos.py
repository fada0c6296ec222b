"""Demonstrations on a CPU: the embedded model and a real one.

    python benchmarks/demos.py demo --seeds 43 44            # `make demo` and further seeds; ten minutes
    python benchmarks/demos.py demo --seeds 42 43 44 --compute w4a8
    python benchmarks/demos.py real [--record]               # `make demo-real`: a real model learns products

Each writes a file in results/ (`real` with --record). The seed sets adapter, order of problems, sampling and noise.
`demo` does not retrain a finished run. `--note`: the machine's other load. `real` also evaluates the untrained bf16
model; its weights come from a package (for the Hub's: `qerl-trl train --config smollm2`).
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

import common
from common import RESULTS, ROOT

sys.path.insert(0, str(ROOT))


def of_run(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def started(*words: str) -> None:
    print(f"\n$ python {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)


# --- the embedded default -------------------------------------------------------------------------

DEMO_RESULT = RESULTS / "demo.json"
DEMO = ROOT / "runs" / "embedded"  # output_dir of examples/configs/embedded.yaml
CONFIG = "examples/configs/embedded.yaml"
LAUNCH = (
    "accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no "
    "examples/grpo_gsm8k.py"
)


def curves(history: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    kept = ("step", "reward", "entropy", "aqn/", *names)
    return [{name: value for name, value in entry.items() if name.startswith(kept)} for entry in history]


def demo(args: argparse.Namespace) -> None:
    name, more = ("", []) if args.compute == "w4a16" else ("w4a8-", ["--compute", args.compute])
    folders = [] if more else [DEMO]
    if not more:
        subprocess.run(["make", "demo"], cwd=ROOT, check=True)
    for seed in args.seeds:
        folders.append(ROOT / "runs" / f"embedded-{name}{seed}")
        options = ["--config", CONFIG, "--seed", str(seed), "--output_dir", str(folders[-1].relative_to(ROOT)), *more]
        subprocess.run([*shlex.split(LAUNCH), *options], cwd=ROOT, check=True)
    out = RESULTS / f"demo{'_w4a8' * bool(more)}.json"
    common.save(demo_record(folders, (common.commit() or "unknown")[:7], args.note), out)


def demo_record(folders: list[Path], commit: str, note: str) -> dict[str, Any]:
    """Record of finished runs."""
    runs = [of_run(folder) for folder in folders]
    for folder, found in zip(folders, runs, strict=True):
        found["settings"]["model"] = found["settings"]["model"].removeprefix(f"{ROOT}/")
        found["log_history"] = curves(found["log_history"], "seconds/", "rollout/")
        if folder.name == DEMO.name:
            found["command"] = "make demo"
    what = "The embedded default" + (f" with {len(runs)} seeds" if len(runs) > 1 else "")
    return {"what": what, "commit": commit, "note": note, "runs": runs}


# --- a real model ---------------------------------------------------------------------------------

REAL_RESULT = RESULTS / "demo_real.json"
RUN = ROOT / "runs" / "products"  # output_dir of examples/configs/smollm2.yaml


def real_table(record: dict[str, Any]) -> str:
    """Accuracy untrained (bf16, NVFP4) and trained, and the part of the gain that repairs rounding."""
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


def real(args: argparse.Namespace) -> None:
    from examples.assets import real_model

    from qerl_trl.support.recipes import config_file, contents

    if REAL_RESULT.is_file():
        known = json.loads(REAL_RESULT.read_text())
        print(f"This takes about {known['cpu_seconds'] / 60:.0f} minutes of one core ({known['run']['device']}).")
    begun, commit, gguf = time.monotonic(), common.commit(), args.gguf or real_model.gguf_file()
    model, untrained = str(real_model.folder_of(gguf)), RUN.with_name("products-bf16.json")
    untrained.parent.mkdir(exist_ok=True)
    longest = contents(config_file("smollm2"))["max_completion_length"]
    task = ("--task", "products", "--max-new-tokens", str(longest))
    started("-m", "qerl_trl.cli.main", "eval", model, *task, "--output", str(untrained))
    started("examples/grpo_gsm8k.py", "--config", "smollm2", "--model_name_or_path", model, "--compute", args.compute)
    run, bf16 = of_run(RUN), json.loads(untrained.read_text())
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    of = ("task", "steps", "train_seconds", "seed", "decoding", "arm", "device", "versions")
    record = {
        "command": "make demo-real" if args.compute == "w4a16" else f"demos.py real --compute {args.compute}",
        "commit": commit, "compute": args.compute,
        "gguf": {"file": gguf.name, "sha256": real_model.sha256(gguf)},
        "seconds": time.monotonic() - begun, "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "untrained_bf16": {name: bf16[name] for name in ("correct", "total", "accuracy", "interval95")},
        "untrained_nvfp4": run["before"], "trained_nvfp4": run["after"],
        "run": {name: run[name] for name in of} | {"log_history": curves(run["log_history"])},
    }  # fmt: skip
    print(f"\n{real_table(record)}")
    common.save(record, RESULTS / f"demo_real{'_w4a8' * (args.compute == 'w4a8')}.json" if args.record else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="action")
    for function in (demo, real):
        commands.add_parser(function.__name__).set_defaults(run=function)
    add = {name: command.add_argument for name, command in commands.choices.items()}
    add["demo"]("--seeds", type=int, nargs="*", default=[43, 44], help="in addition to make demo's")
    for name in ("demo", "real"):
        add[name]("--compute", default="w4a16", choices=("w4a16", "w4a8"))
    add["demo"]("--note", default="", help="other load of the machine")
    add["real"]("--gguf", type=Path, help="Instead of the package's file.")
    add["real"]("--record", action="store_true", help=f"Write {REAL_RESULT.relative_to(ROOT)}.")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
