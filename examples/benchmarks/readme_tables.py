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
CONFIGS = ROOT / "examples/configs"
ROLLOUT = ROOT / "examples/benchmarks/results/rollout_speed_h200.json"
KERNELS = ROOT / "kernels/benchmarks/results/h200.json"
TRAINING = ROOT / "examples/benchmarks/results/train_step_h200.json"
PLAN = ROOT / "examples/benchmarks/results/memory_h200.json"


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
    plans = [row for row in plan["memory"] if "measured_gib" in row]
    sizes = sorted({row["shape"] for row in plans}, key=lambda size: int(size[:-1]))
    return (
        "\n".join(rows)
        + f"\n\nOne training step of the {record['size'].upper()} shape, {record['batch']} x {record['tokens']} tokens, rank-32 LoRA, gradient "
        f"checkpointing. {record['device']}, torch {record['versions']['torch']}, commit {record['commit'][:7]}, [{source.name}]({source}). "
        f"The plan of memory is 0 to 10 % above what a run takes of the GPU in {len(plans)} workloads of {', '.join(s.upper() for s in sizes)} "
        f"([{PLAN.name}]({PLAN.relative_to(ROOT)}); one of its constants was set by these runs)."
    )


def rollout() -> str:
    """vLLM tokens per second: ours against bf16 with vLLM's LoRA slots and against merged bf16."""
    record = json.loads(ROLLOUT.read_text())
    speed = record["tokens_per_s"]
    sizes = [name.split(":")[1] for name in speed if name.startswith("ours:")]
    others = {"stock-merged": "merged bf16", "stock-lora": "bf16 + LoRA"}
    columns = [(size, other) for size in sizes for other in others if f"{other}:{size}" in speed]
    head = ["sequences", *(f"{size.upper()}: ours" for size in sizes)]
    head += [f"{size.upper()}: ours / {others[other]}" for size, other in columns]
    rows = [f"| {' | '.join(head)} |", "|" + "---:|" * len(head)]
    for count in speed[f"ours:{sizes[0]}"]:
        cells = [f"{speed[f'ours:{size}'][count]:.0f}" if count in speed[f"ours:{size}"] else "" for size in sizes]
        for size, other in columns:
            ratio = record["ratios"][f"ours:{size} over {other}:{size}"].get(count)
            cells.append("" if ratio is None else f"{ratio:.2f}")
        rows.append(f"| {count} | {' | '.join(cells)} |")
    source = ROLLOUT.relative_to(ROOT)
    versions = record["versions"]
    return (
        "\n".join(rows)
        + f"\n\n{record['what'][0].upper()}{record['what'][1:]}. {record['device']}, torch {versions['torch']}, triton "
        f"{versions['triton']}, vLLM {versions['vllm']}, commit {record['commit'][:7]}, [{source.name}]({source})."
    )


def cards() -> str:
    """Each shipped configuration with the card that its header names, which tests/test_configs.py computes."""
    rows = ["| model | planned for a card of | command |", "|---|---|---|"]
    for path in sorted(CONFIGS.glob("qwen*.yaml"), key=lambda p: int(re.findall(r"(\d+)b", p.stem)[0])):
        text = path.read_text()
        model = re.search(r"^model_name_or_path: (\S+)", text, re.MULTILINE)
        card = re.search(r"Starts on a card of (\d+) GB", text)
        if model is None or card is None:
            raise ValueError(f"{path} names no model, or no card in its header.")
        command = f"accelerate launch examples/grpo_gsm8k.py --config {path.relative_to(ROOT)}"
        rows.append(f"| {model[1]} | {card[1]} GB | `{command}` |")
    return "\n".join(rows) + (
        "\n\nMore memory runs more completions at a time; the first lines of each file say how many. The cards come from the memory plan, which "
        "is compared with runs on an H200 below; no other card was there to run them on."
    )


TABLES: dict[str, Callable[[], str]] = {
    "cards": cards,
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
