"""The tables of tables.py about speed and memory."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rollout
import step_profile
from rollout_tables import ROLLOUT, ROOT

CONFIGS = ROOT / "examples/configs"
TRAINING = ROOT / "benchmarks/results/train_step_h200.json"
PLAN = ROOT / "benchmarks/results/memory_h200.json"
UPDATE = ROOT / "benchmarks/results/update_speed_h200.json"
TORCH_COMPILE = ROOT / "benchmarks/results/update_torch_compile_h200.json"
UNSLOTH = ROOT / "benchmarks/results/unsloth_h200.json"
START = ROOT / "benchmarks/results/start_time_h200.json"
STEP = ROOT / "benchmarks/results/step_h200.json"
CHECKS = ROOT / "benchmarks/results/checks_h200.json"
CHECKS_AGAIN = ROOT / "benchmarks/results/checks_again_h200.json"
#: on a machine whose other GPU had another job, which took host time
CHECKS_BESIDE = ROOT / "benchmarks/results/checks_beside_h200.json"
#: with `--pairs`, alone
CHECKS_PAIRED = ROOT / "benchmarks/results/checks_paired_h200.json"
#: the same on another card: the first engine on that machine, and the second
CHECKS_H100 = ROOT / "benchmarks/results/checks_h100.json"
NEIGHBOURS = ROOT / "benchmarks/results/neighbours_h200.json"


def measured_by(path: Path, device: str, commits: Iterable[str], **versions: str) -> str:
    """What the note below a table of measurements ends with: the device, versions of packages, the commits, and a link to the file."""
    packages = [f"{name} {version}" for name, version in versions.items()]
    short = ", ".join(dict.fromkeys(commit[:7] for commit in commits))
    return ", ".join([device, *packages, f"commit {short}", f"[{path.name}]({path.relative_to(ROOT)})"])


def with_another(row: dict[str, Any]) -> str:
    """What ran on the machine's other GPUs meanwhile, which takes host time; nothing where it was alone."""
    return f", beside {row['beside']}" if "beside" in row else ""


def training() -> str:
    """One optimizer step of LoRA on each base, and what `qerl-trl plan` predicts."""
    record = json.loads(TRAINING.read_text())
    names = {"bf16": "bf16", "nvfp4": "NVFP4 (ours)", "nf4": "NF4 (bitsandbytes)"}
    rows = ["| base | step, s | weights, GiB | peak, GiB |", "|---|---:|---:|---:|"]
    rows += [
        f"| {names[run['kind']]} | {run['step_s']:.2f} | {run['weights_GiB']:.1f} | {run['peak_GiB']:.1f} |"
        for run in record["runs"]
    ]
    return (
        "\n".join(rows)
        + f"\n\nBefore the update was made faster: one training step of the {record['size'].upper()} shape, {record['batch']} x {record['tokens']} tokens, rank-32 LoRA, gradient "
        f"checkpointing. {measured_by(TRAINING, record['device'], [record['commit']], torch=record['versions']['torch'])}."
    )


def plan() -> str:
    """The planned peak of memory beside the measured one."""
    record = json.loads(PLAN.read_text())
    measured = [row for row in record["memory"] if "measured_gib" in row]
    rows = ["| workload | planned, GiB | measured, GiB | planned above |", "|---|---:|---:|---:|"]
    for row in sorted(measured, key=lambda row: row["measured_gib"]):
        work, size = row["workload"], row["shape"].upper()
        each = f"{work['batch']} x {work['prompt_length']} + {work['completion_length']} tokens"
        base = {"nvfp4": "", "bf16": ", bf16"}[work["base_format"]]
        how = ", sleeps" if work["sleep"] else ", transformers generates" if work["rollout"] == "transformers" else ""
        kept = work.get("kept_layers", 0)
        how += (
            f", {kept} layers keep activations"
            if kept
            else ", nothing recomputed"
            if not work["gradient_checkpointing"]
            else ""
        )
        how += "" if work["compiled"] else ", not compiled"
        rows.append(
            f"| {size}{base}, {each}{how} | {row['planned_gib']:.1f} | {row['measured_gib']:.1f} | {100 * row['error']:.1f} % |"
        )
    commits = [row.get("commit", record["commit"]) for row in measured]
    again = {row["name"] for row in measured}
    missed = "".join(
        f" {row['name']} took {-100 * row['error']:.1f} % more than planned at {row['commit']}: at its start, probably because blocks that fusing the engine's layers "
        "freed stayed in torch's allocator, and less in training, where what a layer holds that recomputes inside was not counted. The blocks are given back "
        "since, and the plan counts the layers; not measured again."
        for row in record["before"]
        if row["error"] < 0 and row["name"] not in again
    )
    return (
        "\n".join(rows)
        + f"\n\nWhole training steps with a rollout each, random weights, rank-32 LoRA; measured by NVML, CUDA context included. "
        f"{measured_by(PLAN, record['device'], commits)}." + missed
    )


def update() -> str:
    """Forward and backward of a micro-batch, ours and stock."""
    record = json.loads(UPDATE.read_text())
    whole, unsloth = json.loads(TORCH_COMPILE.read_text()), json.loads(UNSLOTH.read_text())
    names = {
        "stock": "bf16, TRL and PEFT as they come",
        "bf16-compiled-fused": "bf16, ours",
        "nvfp4": "NVFP4, PEFT in eager mode",
        "nvfp4-compiled-fused": "NVFP4, ours",
    }
    found = {
        name: (record["cases"][case]["seconds"], record["cases"][case]["peak_gib"]) for case, name in names.items()
    }
    compiled = whole["cases"]["stock-torch-compile"]
    found["bf16, TRL with torch_compile"] = compiled["seconds"], compiled["peak_gib"]
    for case, name in {"bf16": "bf16, Unsloth", "4bit": "NF4, Unsloth"}.items():
        rows_of = {mode: row for mode, row in unsloth["cases"][case].items() if "seconds" in row}
        found[name] = tuple({m: row[what] for m, row in rows_of.items()} for what in ("seconds", "peak_gib"))
    rows = [
        "| base | recomputing every layer, s | peak, GiB | keeping activations, s | peak, GiB | forward alone, s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, (seconds, peak) in found.items():
        cells = []
        for mode in ("checkpointed", "plain"):
            cells += [f"{seconds[mode]:.3f}", f"{peak[mode]:.1f}"] if mode in seconds else ["", ""]
        forward = f"{seconds['forward']:.3f}" if "forward" in seconds else ""
        rows.append(f"| {name} | {' | '.join(cells)} | {forward} |")
    first = compiled["first_s"]["checkpointed"]
    return (
        "\n".join(rows)
        + f"\n\nForward and backward of {record['sequences']} x {record['tokens_each']} tokens of the {record['size'].upper()} shape, rank-32 LoRA, "
        f"adapter without dropout. {measured_by(UPDATE, record['device'], [record['commit']], torch=record['versions']['torch'])}. "
        f"torch_compile: {measured_by(TORCH_COMPILE, whole['device'], [whole['commit']])}, its first call took {first:.0f} s. "
        f"Unsloth {unsloth['versions']['unsloth']} with trl {unsloth['versions']['trl']}, cross entropy in place of GRPO's log-probabilities: "
        f"{measured_by(UNSLOTH, unsloth['device'], [unsloth['commit']])}."
    )


def start() -> str:
    """Seconds from the start of a process to its first sampled token."""
    record = json.loads(START.read_text())
    names = {
        "ours": "QeRL trainer, quantized while it loads",
        "vllm": "vLLM alone, bf16",
    }
    rows = ["| | caches | imports, s | engine, s | first token, s |", "|---|---|---:|---:|---:|"]
    for run in record["runs"]:
        parts = run["parts"]
        engine = next(value for name, value in parts.items() if name.strip() == "LLM(...)")
        rows.append(
            f"| {names[run['case']]} | {run['state']} | {parts['imports']:.0f} | {engine:.0f} | {run['first_token_s']:.0f} |"
        )
    ratios = ", ".join(f"{ratio:.2f} times {names[case]}" for case, ratio in record["warm_first_token_against"].items())
    return (
        "\n".join(rows) + f"\n\nWith warm caches our first token takes {ratios}. {record['shape'].upper()} shape. "
        f"{measured_by(START, record['machine'], [record['commit']], vLLM=record['versions']['vllm'])}."
    )


def checks() -> str:
    """What is spent on checks, in a step and at start."""
    paths = (CHECKS, CHECKS_AGAIN, CHECKS_BESIDE, CHECKS_PAIRED, CHECKS_H100)
    records = {path: json.loads(path.read_text()) for path in paths}
    rows = [
        "| model, completions per step | GPU | step, s | checks, ms | of the step | checks at start, s | of these settings and environment, s | the others, s | commit |",
        "|---|---|" + "---:|" * 6 + "---|",
    ]
    for path, record in records.items():
        card = record["gpu"].split()[1]
        beside = ", another job beside" if path == CHECKS_BESIDE else ""
        for row in record["checks"]:
            environment = row["at_start_s"]["start: settings and environment"]
            rows.append(
                f"| {row['size'].upper()}, {row['completions']} x 512{beside} | {card} | {row['step_s']:.2f} | {row['checks_ms_per_step']:.1f} | {row['checks_percent']:.2f} % "
                f"| {row['checks_at_start_s']:.2f} | {environment:.2f} | {row['checks_at_start_s'] - environment:.2f} | {record['commit'][:7]} |"
            )
    last = records[CHECKS_H100]["checks"][-1]
    dearest = sorted(last["per_step_ms"].items(), key=lambda item: -item[1])
    named = ", ".join(f"{name} {took:.1f}" for name, took in dearest if name not in ("sync: weights", "sync: noise"))
    sources = "; ".join(
        measured_by(path, record["gpu"], [record["commit"]], vLLM=record["versions"]["vllm"])
        for path, record in records.items()
    )
    turns = "".join(
        f" Steps of {row['size'].upper()}, {row['completions']} x 512, with and without all checks in turns ({row['paired']['pairs']} pairs, commit {record['commit'][:7]}): "
        f"{row['paired']['difference_ms']:.1f} ms (standard error {row['paired']['standard_error_ms']:.1f}), with the probe's share {row['paired']['percent']:.2f} % of a step."
        for record in records.values()
        for row in record["checks"]
        if "paired" in row
    )
    return (
        "\n".join(rows)
        + f"\n\nMilliseconds in a step of the last line: {named}.{turns} One probe between steps takes {last['one_probe_between_steps_ms']:.0f}, "
        f"every {last['steps_per_probe']} steps. {sources}."
    )


def neighbours() -> str:
    """Norms, SwiGLU and rotary embedding: eager, compiled alone, and liger-kernel's."""
    record = json.loads(NEIGHBOURS.read_text())
    ways = ("eager", "compiled", "liger")
    rows = [
        "| operator, forward and backward | eager, us | compiled alone, us | liger-kernel, us |",
        "|---|" + "---:|" * 3,
    ]
    for name, row in record["operators"].items():
        rows.append(f"| {name} | " + " | ".join(f"{row[way]['us']:.0f}" for way in ways) + " |")
    rows.append("| all layers, ms | " + " | ".join(f"{record['ms_per_pass'][way]:.1f}" for way in ways) + " |")
    versions = {"torch": record["versions"]["torch"], "liger-kernel": record["versions"]["liger-kernel"]}
    return (
        "\n".join(rows) + f"\n\n{record['size'].upper()}, {record['tokens']} tokens, bf16. "
        f"{measured_by(NEIGHBOURS, record['device'], [record['commit']], **versions)}."
    )


def step() -> str:
    """Whole GRPO steps."""
    record = json.loads(STEP.read_text())
    rows = [
        "| workload | | step, s | rollout, s | sync, s | update, s | peak, GiB | planned, GiB |",
        "|---|---|" + "---:|" * 6,
    ]
    measured = sorted((row for row in record["step"] if "median" in row), key=lambda row: row["name"].partition("-")[2])
    for row in measured:
        who, _, workload = row["name"].partition("-")
        m = row["median"]
        planned = f"{row['planned_gib']:.1f}" if "planned_gib" in row else ""
        rows.append(
            f"| {workload} | {'stock TRL' if who == 'stock' else 'ours'} | {m['step']:.2f} | {m['rollout']:.2f} | {m['sync']:.3f} | {m['update_and_scoring']:.2f} | "
            f"{row['measured_gib']:.1f} | {planned} |"
        )
    first = measured[0]
    versions = {"torch": first["versions"]["torch"], "vLLM": first["versions"]["vllm"]}
    compiled = any(row["name"].endswith("-compile") for row in measured)
    whole = " `compile`: with its own torch_compile=True, the whole model." if compiled else ""
    shared = "; ".join(row["name"].partition("-")[2] + with_another(row) for row in measured if "beside" in row)
    whole += f" Not alone on their machine: {shared}." if shared else ""
    return (
        "\n".join(rows)
        + f"\n\nOurs on the NVFP4 base, stock TRL with bf16 LoRA, each with its defaults. `ragged`: completions of lognormal lengths (mean 250, up to 1024), filled in after a short "
        f"rollout, so only its update says something. `48gib`: on a GPU of that size; `26gib`: and with what `qerl-trl plan` proposes there (micro-batches of one, 8-bit "
        f"AdamW, a KV cache that sleeps during updates); `micro8`: in micro-batches of 8. Rows of different commits are of different sessions, whose machines differ by up to a tenth.{whole} {measured_by(STEP, first['device'], [row['commit'] for row in measured], **versions)}."
    )


#: what was aimed at: in words, (at least, hoped for), in seconds; ragged: times stock TRL's update
AIMS = {
    "checkpointed": ("7B forward + backward, 8 x 768, recomputing every layer", 0.45, 0.38),
    "plain": ("the same, keeping activations", 0.33, 0.27),
    "7b-64x512": ("7B step, 64 x 512", 6.0, 5.0),
    "7b-8x512": ("7B step, 8 x 512", 2.2, 1.9),
    "32b-8x512-48gib": ("32B step, 8 x 512, 48 GiB", 7.0, 5.5),
    "7b-ragged": ("ragged completions, update, times stock TRL's speed", 2.5, 3.5),
    "noise": ("7B, noise of all norms, ms", 3.0, 1.0),
}


def aims() -> str:
    """Aims of the training step, what was measured, and what takes the time."""
    update, record = json.loads(UPDATE.read_text()), json.loads(STEP.read_text())
    steps = {row["name"]: row for row in record["step"]}
    traces = {row["name"]: row["profile"].get("phases", {}) for row in record["profiles"]}
    checks = next(row for row in json.loads(CHECKS_PAIRED.read_text())["checks"] if row["size"] == "7b")
    rows = ["| | at least | hoped for | measured | reached | what takes the time |", "|---|---:|---:|---:|---|---|"]
    for name, (words, least, hoped) in AIMS.items():
        if name in ("checkpointed", "plain"):
            found, part = update["cases"]["nvfp4-compiled-fused"]["seconds"][name], update["profile"][name]
            kinds = {
                "cuBLAS's matrix products": "nvjet",
                "attention": "cudnn",
                "decoding weights": "dequantize",
                "what inductor fused": "triton",
            }
            sums = {
                kind: sum(kernel["ms"] for kernel in part["top"] if kernel["kernel"].startswith(begins))
                for kind, begins in kinds.items()
            }
            shares = ", ".join(f"{kind} {milliseconds:.0f}" for kind, milliseconds in sums.items())
            why = f"{shares} of the {part['kernels_ms']:.0f} ms of all kernels"
        elif name == "noise":
            found, why = checks["noise_sync_ms"], "not profiled"
            if "sync_noise" in (phases := traces.get("ours-7b-8x512", {})):
                why = step_profile.bound(phases["sync_noise"])
        elif name == "7b-ragged":
            found = (
                steps["stock-7b-ragged"]["median"]["update_and_scoring"]
                / steps["ours-7b-ragged"]["median"]["update_and_scoring"]
            )
            why = ""
        else:
            median = steps[f"ours-{name}"]["median"]
            found = median["step"]
            phases = traces.get(f"ours-{name}")
            parts = step_profile.bound(phases["step"]) if phases else "the parts were not profiled by kernel"
            why = f"rollout {median['rollout'] / found:.0%}, update {median['update_and_scoring'] / found:.0%}; {parts}"
        better = found >= hoped, found >= least
        if name != "7b-ragged":
            better = found <= hoped, found <= least
        reached = "hoped for" if better[0] else "at least" if better[1] else "no"
        rows.append(f"| {words} | {least:g} | {hoped:g} | {found:.3g} | {reached} | {'' if better[0] else why} |")
    files = ", ".join(f"[{path.name}]({path.relative_to(ROOT)})" for path in (UPDATE, STEP, CHECKS_PAIRED))
    traced = step_profile.table(record["profiles"])
    return (
        "\n".join(rows) + f"\n\nSeconds where nothing else is said. From {files}." + ("\n\n" + traced if traced else "")
    )


def rollout_speeds() -> tuple[dict[str, dict[int, float]], str]:
    """Tokens per second of a rollout on an H200, by the model (of Qwen2.5 the size alone) and the sequences at a time: of a rollout alone where that
    was measured, else of whole steps. And which are of what, in words."""
    steps = {
        row["size"]: {row["batch"]: row["batch"] * row["new"] / row["median"]["rollout"]}
        for row in json.loads(STEP.read_text())["step"]
        if row["who"] == "ours" and not row["ragged"]
    }
    alone = {}
    for case, found in json.loads(ROLLOUT.read_text())["tokens_per_s"].items():
        who, _, size = case.partition(":")
        if who == "ours":
            alone[size] = {int(count): found[count] for count in (min(found, key=int), "128") if count in found}
    ways = {"alone": alone, "in a whole step": steps.keys() - alone.keys()}
    named = (
        f"{', '.join(size.upper() if size[0].isdigit() else rollout.label(size) for size in rollout.by_model(sizes))} {way}"
        for way, sizes in ways.items()
        if sizes
    )
    return steps | alone, ", ".join(named)


def cards() -> str:
    """The cards that the headers of the shipped configurations name, with what runs on each at a time, which tests/test_configs.py computes, and
    the speed of those that were measured."""
    (speeds, ways), mark = rollout_speeds(), "qwen2.5-"
    recipes: dict[str, list[tuple[str, int]]] = {}
    for path in CONFIGS.glob("*.yaml"):
        found = re.search(r"Starts on a card of (\d+ GB \(.*?\)): (\d+) completions in (\d+) waves?", path.read_text())
        if found:
            recipes.setdefault(found[1], []).append((path.stem, -(-int(found[2]) // int(found[3]))))
    rows = [
        "| card | recipes that start there (in brackets: how many completions of full length it generates at a time) | tokens/s |",
        "|---|---|---|",
    ]
    for card, named in sorted(recipes.items(), key=lambda item: int(item[0].split()[0])):
        named.sort(
            key=lambda one: (not one[0].startswith("qwen"), one[0].split("-")[0], int(re.findall(r"(\d+)b", one[0])[0]))
        )
        measured = []
        for name, _ in named:
            speed = speeds.get(name.removeprefix(mark), {})
            measured += (
                [f"`{name}`: " + ", ".join(f"{value:.0f} at {count}" for count, value in speed.items())]
                if speed
                else []
            )
        links = (f"[`{name}`](examples/configs/{name}.yaml) ({count})" for name, count in named)
        rows.append(f"| {card} | {', '.join(links)} | {'; '.join(measured) or '-'} |")
    errors = [100 * row["error"] for row in json.loads(PLAN.read_text())["memory"] if "measured_gib" in row]
    return "\n".join(rows) + (
        f"\n\nPlanned, by a memory plan that was {min(errors):.0f} to {max(errors):.0f} % above [{len(errors)} measured workloads](docs/source/benchmarks.md#training) "
        "on an H200; more memory runs more at a time. Tokens/s: rollouts in vLLM on that H200, so many completions at a time "
        f"({ways}); `-` was not measured. 7B also ran on an H100 as a card of 24 GiB; no other card was there."
    )


def speed() -> str:
    """The README's sentence on speed and memory."""
    rollouts, updates = json.loads(ROLLOUT.read_text()), json.loads(UPDATE.read_text())
    ratios, taken = rollouts["ratios"]["ours:7b over stock-merged:7b"], rollouts["tokens_per_s"]["ours:7b"]
    at = ", ".join(f"{taken[count]:.0f} ({ratio:.2f}) at {count}" for count, ratio in ratios.items())
    ours, stock = updates["cases"]["nvfp4-compiled-fused"], updates["cases"]["stock"]
    device = rollouts["runs"][rollouts["cases"]["ours:7b"]["run"]]["device"]
    tokens = f"{updates['sequences']} x {updates['tokens_each']}"
    return (
        f"Rollouts of 7B, in tokens per second (relative to merged bf16, which is what TRL rolls out): {at} sequences. Forward and backward of "
        f"{tokens} tokens take {ours['seconds']['checkpointed']:.2f} s where memory is short and {ours['seconds']['plain']:.2f} s where it is not (TRL "
        f"with bf16 LoRA: {stock['seconds']['checkpointed']:.2f} and {stock['seconds']['plain']:.2f} s), in {ours['peak_gib']['checkpointed']:.0f} and "
        f"{ours['peak_gib']['plain']:.0f} GiB ({stock['peak_gib']['checkpointed']:.0f} and {stock['peak_gib']['plain']:.0f}). {device}, random weights; all "
        "tables, losses included: [speed and memory](docs/source/benchmarks.md)."
    )
