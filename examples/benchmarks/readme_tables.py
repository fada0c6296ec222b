"""Write the README's tables from the committed measurements; `--check` only compares.

A table stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))

import embedded_arms  # noqa: E402

README = ROOT / "README.md"
ROLLOUT = ROOT / "examples/benchmarks/results/rollout_h200.json"
KERNELS = ROOT / "kernels/benchmarks/results/h200.json"
TRAINING = ROOT / "examples/benchmarks/results/train_step_h200.json"
PLAN = ROOT / "examples/benchmarks/results/plan_check_h200.json"


def embedded() -> str:
    record = json.loads(embedded_arms.RESULTS.read_text())
    first = record["runs"][0]
    source = embedded_arms.RESULTS.relative_to(ROOT)
    return (
        f"{embedded_arms.table(record)}\n\n{first['steps']} steps, {first['before']['total']} held-out problems, accuracy in percent; "
        f"{first['device']}, torch {first['versions']['torch']}, trl {first['versions']['trl']}; commit {record['commit']}, "
        f"[{source.name}]({source})."
    )


def kernels() -> str:
    """One decoder layer: ratios of cuBLAS bf16's time to Marlin's and to ours."""
    record = json.loads(KERNELS.read_text())
    rows = [
        "| tokens | 7B: Marlin | 7B: ours | ours + LoRA | 32B: Marlin | 32B: ours | ours + LoRA |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    sums = {(entry["model"], entry["M"]): entry for entry in record["sums"]}
    for tokens in sorted({tokens for _, tokens in sums}):
        cells = []
        for model in ("7B", "32B"):
            entry = sums[model, tokens]
            ratios = (entry["marlin_ratio"], entry["ratio"], entry["bf16_us"] / entry["ours_lora_us"])
            cells += [f"{ratio:.2f}" for ratio in ratios]
        rows.append(f"| {tokens} | {' | '.join(cells)} |")
    source = KERNELS.relative_to(ROOT)
    return (
        "\n".join(rows)
        + "\n\nSpeed relative to cuBLAS bf16 (above 1 is faster), summed over the four matrices of a Qwen2.5 decoder layer; "
        f"rank-{record['lora_rank']} adapter inside the kernel, against bf16 without one. {record['device']}, torch {record['torch']}, "
        f"triton {record['triton']}, commit {record['commit'][:7]}, [{source.name}]({source})."
    )


def training() -> str:
    """One optimizer step of LoRA on each base, and what `qerl-trl plan` predicts."""
    record = json.loads(TRAINING.read_text())
    names = {"bf16": "bf16", "nvfp4": "NVFP4 (ours)", "nf4": "NF4 (bitsandbytes)"}
    rows = ["| base | step, s | weights, GiB | peak, GiB |", "|---|---:|---:|---:|"]
    rows += [
        f"| {names[run['kind']]} | {run['step_s']:.2f} | {run['weights_GiB']:.1f} | {run['peak_GiB']:.1f} |"
        for run in record["runs"]
    ]
    source, plan = TRAINING.relative_to(ROOT), json.loads(PLAN.read_text())
    errors = [abs(row["error"]) for row in plan["memory"]]
    return (
        "\n".join(rows)
        + f"\n\nOne training step of the {record['size'].upper()} shape, {record['batch']} x {record['tokens']} tokens, rank-32 LoRA, gradient "
        f"checkpointing. {record['device']}, torch {record['versions']['torch']}, commit {record['commit'][:7]}, [{source.name}]({source}). "
        f"`qerl-trl plan` was within {100 * max(errors):.0f} % of the measured peak in {len(errors)} workloads of the 3B and 7B shapes "
        f"([{PLAN.name}]({PLAN.relative_to(ROOT)}))."
    )


def rollout() -> str:
    """vLLM tokens a second, ours against bf16 with vLLM's LoRA."""
    record = json.loads(ROLLOUT.read_text())
    speed = record["rollout_tokens_per_s"]
    rows = [
        "| sequences | 7B: bf16 + LoRA | 7B: ours | ratio | 32B: bf16 + LoRA | 32B: ours | ratio |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for count in speed["ours:7b"]:
        cells = []
        for model in ("7b", "32b"):
            stock, ours = speed[f"stock-lora:{model}"][count], speed[f"ours:{model}"][count]
            cells += [f"{stock:.0f}", f"{ours:.0f}", f"{ours / stock:.2f}"]
        rows.append(f"| {count} | {' | '.join(cells)} |")
    source = ROLLOUT.relative_to(ROOT)
    memory, sync = record["memory"]["32b"], record["sync"]
    return (
        "\n".join(rows)
        + f"\n\nTokens a second; {speed['what']}. Kernels at commit {record['kernels_commit'].split(' ')[0]}. {record['machine']}, "
        f"[{source.name}]({source}). Also in that file: trainer and engine together hold "
        f"{memory['trainer_and_engine_without_adapter_buffers']:.2f} GiB of base weights for 32B; one sync of a rank-32 adapter and all noisy "
        f"norms takes {sync['7b']['sync_ms_median']['both']:.0f} ms (7B) and {sync['32b']['sync_ms_median']['both']:.0f} ms (32B)."
    )


TABLES: dict[str, Callable[[], str]] = {
    "embedded_arms": embedded,
    "kernels": kernels,
    "rollout": rollout,
    "training": training,
}


def filled(text: str) -> str:
    """`text` with every known table replaced."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"README.md has no place for the table {name!r}: add its begin and end comments.")
        text = pattern.sub(lambda match, make=make: f"{match[1]}{make()}\n{match[2]}", text)
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    current = README.read_text()
    new = filled(current)
    if not check:
        README.write_text(new)
    elif new != current:
        sys.exit("README.md differs from the measurements; run python examples/benchmarks/readme_tables.py")
