"""Real pretrained models in every arm: trained with the shipped command, merged, pushed and loaded by stock libraries.

    python examples/benchmarks/real_models.py --task TASK.yaml --model Qwen/Qwen2.5-Coder-0.5B-Instruct FOLDER SHA256
    ... --model NAME FOLDER SHA256 --model NAME FOLDER SHA256     # two; SHA256 of the GGUF that FOLDER was made from
    ... --runs nvfp4 bf16+noise server                            # only these; other rows of the file stay
    ... --extra --optim adamw_torch                               # further options of every run; comes last
    python examples/benchmarks/real_models.py --table             # the file as Markdown
    python examples/benchmarks/real_models.py --cpu --work /tmp/real --out /tmp/real.json    # embedded model, two steps

A run is `accelerate launch examples/grpo_gsm8k.py --config examples/configs/qwen2.5-3b.yaml`, the recipe unedited;
model, task, arm, lengths, batch and learning rate are on the command line. `--parallel` runs share the GPU: each sees a
card of its share (shown_card.py). Run `server` trains through a server on the same GPU, started with the command that
the trainer prints. Merges, pushes and reloads are in real_models_products.py; those of the first model are made while
the second one trains. A row is written after its training and again after its products, and the last 200 lines of its
output go to a log next to the file.

`ready_s` (model and engine), `evaluated_s` (accuracy before training) and `first_step_s` are seconds since the process
started. `warnings`: everything at WARNING and above, verbatim, each once (kept_warnings.py).
"""

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(HERE), str(ROOT)]

from real_models_run import RECIPE, RUNS, SETTINGS, Bench, Run, words  # noqa: E402
from watched import RUNNING  # noqa: E402

from qerl_trl.tasks.arms import ARMS  # noqa: E402

NEVER_4_BIT = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; of models that were never 4-bit and that nobody has run here, the command."""
    head = [
        "model",
        "arm",
        "rollouts",
        "start, s",
        "step, s",
        "accuracy, %",
        "mismatch KL, at most",
        "warnings",
        "reloads that agree",
        "command",
    ]
    lines: list[list[Any]] = [head, ["---"] * len(head)]
    for row in rows:
        reloads = [each["agrees"] for each in row.get("products", {}).values() if "agrees" in each]
        change = " -> ".join(f"{100 * row[when]['accuracy']:.1f}" for when in ("before", "after") if row.get(when))
        mismatch, said = max(row.get("curves", {}).get("mismatch_kl") or [0.0]), len(row.get("warnings", []))
        measured = [
            row.get("first_step_s"),
            row.get("seconds_per_step"),
            change,
            mismatch,
            said,
            f"{sum(reloads)} of {len(reloads)}",
        ]
        lines.append([row["model"], row["arm"], row["placement"], *measured, f"`{row.get('command', '-')}`"])
    for model in NEVER_4_BIT:
        for arm, library_arm, placement in RUNS.values():
            given = words({"model_name_or_path": model} | ARMS[library_arm] | SETTINGS)
            given += ["--vllm_mode", placement] if placement == "server" else []
            command = shlex.join(["accelerate", "launch", "examples/grpo_gsm8k.py", "--config", RECIPE, *given])
            lines.append([model, arm, placement, *"------", f"`{command}`"])
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs=3, action="append", metavar=("NAME", "FOLDER", "SHA256"), default=[])
    parser.add_argument("--task", help="YAML file of the task.")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--out", type=Path, default=HERE / "results/real_models_h200.json")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "real_models")
    parser.add_argument(
        "--parallel", type=int, help="Runs on the GPU at a time. Default: as many as --runs; 1 on a CPU."
    )
    parser.add_argument("--timeout", type=float, default=420.0, help="Seconds that one command may take.")
    parser.add_argument("--limit", type=float, default=420.0, help="Seconds after which no further run starts.")
    parser.add_argument("--cpu", action="store_true", help="The embedded model, two steps.")
    parser.add_argument("--table", action="store_true", help="Only print the file as Markdown.")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="Further options of every run.")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.out.read_text())["runs"] if options.out.is_file() else []))
        return
    if options.cpu:
        options.model, options.task = (
            [("tester/tiny-qwen2", str(ROOT / "examples/assets/tiny-qwen2"), "")],
            "arithmetic",
        )
    elif not options.model or not options.task:
        parser.error("--model and --task are needed, or --cpu or --table.")
    else:
        options.model = [(name, str(Path(folder).resolve()), gguf) for name, folder, gguf in options.model]
        options.task = str(Path(options.task).resolve())
    options.parallel = options.parallel or (1 if options.cpu else len(options.runs))
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "" if options.cpu else "0")
    os.environ.setdefault("QERL_SERVER_SECRET", os.urandom(32).hex())
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it is compiled by nvcc at its first use

    def stop(*_: object) -> None:
        for group in list(RUNNING):
            os.killpg(group, signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    bench, begun = Bench(options), time.perf_counter()
    runs = [Run(bench, model, run) for model in options.model for run in options.runs]
    runs.sort(key=lambda run: run.placement != "server")  # the longest first
    with ThreadPoolExecutor(options.parallel) as making, ThreadPoolExecutor(options.parallel) as training:

        def start(run: Run) -> Any:
            if time.perf_counter() - begun > options.limit:
                return None
            run.train()
            return making.submit(run.make)

        started = [training.submit(start, run) for run in runs]
        print(bench.head["device"], bench.head["commit"], flush=True)
        for run, future in zip(runs, started, strict=True):
            made = None if future.exception() else future.result()
            if error := future.exception() or (made and made.exception()):
                run.row["error"] = f"{type(error).__name__}: {bench.clean(str(error))}"
                bench.keep(run.row)
    done = [f"{run.name} {run.run}" for run in runs if run.row["passed"]]
    print(f"{len(done)} of {len(runs)} passed, {time.perf_counter() - begun:.0f} s")
    sys.exit(len(done) < len(runs))


if __name__ == "__main__":
    main()
