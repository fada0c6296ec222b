"""Tables of speed and memory: steps, updates, rollouts, starts, plans, cards, several GPUs."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import evidence
import rollout as engines
from common import RESULTS, ROOT

CONFIGS = ROOT / "examples/configs"
ROLLOUT = RESULTS / "rollout_h200.json"
PLAN = RESULTS / "memory_h200.json"
UPDATE = RESULTS / "update_h200.json"
START = RESULTS / "start_h200.json"
STEP = RESULTS / "step_h200.json"
SEVERAL = RESULTS / "multi_gpu_h200x2.json"
FP8 = ("update_w4a8_h200", "learning_w4a8_h200", "fp8_h200", "demo_real", "demo_real_w4a8")
W4A8 = [RESULTS / f"{name}.json" for name in FP8]
#: other engines: name in the record -> name in a table
OTHERS = {"stock-merged": "merged bf16", "stock-lora": "bf16 with vLLM's LoRA slots"}
#: layouts of several GPUs: name in the record -> name in a table
LAYOUTS = {
    "one": "one GPU",
    "dp": "data parallel",
    "server": "a server on the second GPU",
    "fsdp2": "FSDP 2",
    "tp2": "one engine of two shards",
    "fsdp2-tp2": "FSDP 2, one engine of two shards",
    "zero2": "DeepSpeed ZeRO-2",
    "dp4": "data parallel on four GPUs",
    "one-of-64": "one GPU, 64 completions",
    "dp-of-64": "data parallel, 64 completions each",
    "fsdp2-70b": "FSDP 2, 70B",
}


def table(heads: Iterable[str], rows: Iterable[Iterable[str]], left: int = 1) -> str:
    """A Markdown table; all columns after the first `left` are aligned to the right."""
    heads = list(heads)
    lines = [" | ".join(heads), "|".join(["---"] * left + ["---:"] * (len(heads) - left))]
    return "\n".join(
        f"| {line} |" if i != 1 else f"|{line}|" for i, line in enumerate([*lines, *map(" | ".join, rows)])
    )


def measured_by(path: Path, device: str, commits: Iterable[str], **versions: str) -> str:
    """Source of a table: device, package versions, commits, link to the file."""
    packages = [f"{name} {version}" for name, version in versions.items()]
    short = ", ".join(dict.fromkeys(commit[:7] for commit in commits))
    return ", ".join([device, *packages, f"commit {short}", f"[{path.name}]({path.relative_to(ROOT)})"])


def not_alone(rows: Iterable[dict[str, Any]]) -> str:
    """Rows measured while other GPUs of the machine were busy, which costs host time."""
    shared = "; ".join(f"{row['name']}, beside {row['beside']}" for row in rows if "beside" in row)
    return f" Not alone on their machine: {shared}." if shared else ""


def plan() -> str:
    """Planned and measured peaks of memory."""
    record = json.loads(PLAN.read_text())
    measured = [row for row in record["memory"] if "measured_gib" in row]
    rows = []
    for row in sorted(measured, key=lambda row: row["measured_gib"]):
        work, kept = row["workload"], row["workload"].get("kept_layers", 0)
        name = f"{row['shape'].upper()}{', bf16' if work['base_format'] == 'bf16' else ''}"
        name += f", {work['batch']} x {work['prompt_length']} + {work['completion_length']} tokens"
        name += ", sleeps" if work["sleep"] else ", transformers generates" if work["rollout"] == "transformers" else ""
        name += f", {kept} layers keep activations" if kept else ""
        name += ", nothing recomputed" if not kept and not work["gradient_checkpointing"] else ""
        name += "" if work["compiled"] else ", not compiled"
        rows.append([name, f"{row['planned_gib']:.1f}", f"{row['measured_gib']:.1f}", f"{100 * row['error']:.1f} %"])
    commits = [row.get("commit", record["commit"]) for row in measured]
    return (
        table(["workload", "planned, GiB", "measured, GiB", "planned above"], rows)
        + "\n\nWhole training steps with a rollout each, random weights, rank-32 LoRA; measured by NVML, CUDA context "
        + f"included. {measured_by(PLAN, record['device'], commits)}."
    )


def update() -> str:
    """Forward and backward of a micro-batch, ours and stock."""
    record = json.loads(UPDATE.read_text())
    whole, unsloth = (record["other_runs"][name] for name in ("torch_compile", "unsloth"))
    names = {
        "stock": "bf16, TRL and PEFT as they come",
        "bf16-compiled-fused": "bf16, ours",
        "nvfp4": "NVFP4, PEFT in eager mode",
        "nvfp4-compiled-fused": "NVFP4, ours",
    }
    found = {name: record["cases"][case] for case, name in names.items()}
    found["bf16, TRL with torch_compile"] = whole["cases"]["stock-torch-compile"]
    for case, name in {"bf16": "bf16, Unsloth", "4bit": "NF4, Unsloth"}.items():
        modes = {mode: row for mode, row in unsloth["cases"][case].items() if "seconds" in row}
        found[name] = {what: {m: row[what] for m, row in modes.items()} for what in ("seconds", "peak_gib")}
    rows = []
    for name, case in found.items():
        cells = [name]
        for mode in ("checkpointed", "plain"):
            timed = mode in case["seconds"]
            cells += [f"{case['seconds'][mode]:.3f}", f"{case['peak_gib'][mode]:.1f}"] if timed else ["", ""]
        rows.append([*cells, f"{case['seconds']['forward']:.3f}" if "forward" in case["seconds"] else ""])
    ways = [head for way in ("recomputing every layer, s", "keeping activations, s") for head in (way, "peak, GiB")]
    heads = ["base", *ways, "forward alone, s"]
    return (
        table(heads, rows)
        + f"\n\nForward and backward of {record['sequences']} x {record['tokens_each']} tokens of the "
        f"{record['size'].upper()} shape, rank-32 LoRA, adapter without dropout. torch_compile (commit "
        f"{whole['commit'][:7]}): its first call took "
        f"{whole['cases']['stock-torch-compile']['first_s']['checkpointed']:.0f} s. Unsloth "
        f"{unsloth['versions']['unsloth']} with trl {unsloth['versions']['trl']} (commit {unsloth['commit'][:7]}): "
        "cross entropy in place of GRPO's log-probabilities. "
        + f"{measured_by(UPDATE, record['device'], [record['commit']], torch=record['versions']['torch'])}."
    )


def start() -> str:
    """Seconds from the start of a process to its first sampled token."""
    record = json.loads(START.read_text())
    names = {"ours": "QeRL trainer, quantized while it loads", "vllm": "vLLM alone, bf16"}
    rows = []
    for run in record["runs"]:
        engine = next(value for name, value in run["parts"].items() if name.strip() == "LLM(...)")
        seconds = (run["parts"]["imports"], engine, run["first_token_s"])
        rows.append([names[run["case"]], run["state"], *(f"{value:.0f}" for value in seconds)])
    ratios = ", ".join(f"{ratio:.2f} times {names[case]}" for case, ratio in record["warm_first_token_against"].items())
    return (
        table(["", "caches", "imports, s", "engine, s", "first token, s"], rows, left=2)
        + f"\n\nWith warm caches our first token takes {ratios}. {record['shape'].upper()} shape. "
        + f"{measured_by(START, record['machine'], [record['commit']], vLLM=record['versions']['vllm'])}."
    )


def step() -> str:
    """Complete GRPO steps."""
    rows = []
    measured = sorted(steps().values(), key=lambda row: row["name"].partition("-")[2])
    for row in measured:
        who, _, workload = row["name"].partition("-")
        seconds = [f"{row['median'][name]:.{digits}f}" for name, digits in
                   {"step": 2, "rollout": 2, "sync": 3, "update_and_scoring": 2}.items()]  # fmt: skip
        planned = f"{row['planned_gib']:.1f}" if "planned_gib" in row else ""
        name = "stock TRL" if who == "stock" else "ours"
        rows.append([workload, name, *seconds, f"{row['measured_gib']:.1f}", planned])
    first, commits = measured[0], [row["commit"] for row in measured]
    versions = {"torch": first["versions"]["torch"], "vLLM": first["versions"]["vllm"]}
    heads = ["workload", "", "step, s", "rollout, s", "sync, s", "update, s", "peak, GiB", "planned, GiB"]
    return (
        table(heads, rows, left=2)
        + "\n\nOurs on the NVFP4 base, stock TRL with bf16 LoRA, each with its defaults. `ragged`: completions of "
        "lognormal lengths (mean 250, up to 1024), filled in after a short rollout, so only its update says something. "
        "`48gib`: on a GPU of that size; `26gib`: and with what `qerl-trl plan` proposes there (micro-batches of one, "
        "8-bit AdamW, a KV cache that sleeps during updates). Rows of different commits are of different sessions, "
        f"whose machines differ by up to a tenth.{not_alone(measured)} "
        + f"{measured_by(STEP, first['device'], commits, **versions)}."
    )


def rollout() -> str:
    """Tokens per second of our engine, and relative to the other engines; prefill separately."""
    record = json.loads(ROLLOUT.read_text())
    speed, ratios, cases = record["tokens_per_s"], record["ratios"], record["cases"]
    models = engines.by_model(name.split(":")[1] for name in speed if name.startswith("ours:"))
    tables = [_by_sequences("Ours, tokens per second", {size: speed[f"ours:{size}"] for size in models}, ".0f")]
    for other, words in OTHERS.items():
        found = {size: ratios[key] for size in models if (key := f"ours:{size} over {other}:{size}") in ratios}
        tables.append(_by_sequences(f"Ours / {words}", found, ".2f"))
    prefills = {}
    for size in models:
        of_engines = [cases.get(f"{engine}:{size}", {}) for engine in ("ours", *OTHERS)]
        one_run = [case.get("prefill_s", {}) if case.get("run") == of_engines[0]["run"] else {} for case in of_engines]
        prefills[size] = [f"{each['64']:.2f}" if each else "" for each in one_run]
    heads = [f"Prefill of 64 x {engines.PROMPT} tokens, s", "ours", *OTHERS.values()]
    tables.append(table(heads, [[engines.label(size), *row] for size, row in prefills.items() if any(row)]))
    measured: dict[str, list[str]] = {}
    for name, case in cases.items():
        run, label = record["runs"][case["run"]], engines.label(name.split(":")[1])
        names = {"torch": "torch", "triton": "triton", "vllm": "vLLM"}
        versions = [f"{shown} {run['versions'][key]}" for key, shown in names.items()]
        which = measured.setdefault(", ".join([run["device"], *versions, f"commit {run['commit'][:7]}"]), [])
        which += [label] if label not in which else []
    left: dict[str, list[str]] = {}
    for name, case in cases.items():
        for batch, why in case.get("left_out", {}).items():
            left.setdefault(why, []).append(f"{name} at {batch}")
    notes = [f"{record['what'][0].upper()}{record['what'][1:]}."]
    notes += [f"{', '.join(labels)}: {where}." for where, labels in measured.items()]
    notes += [f"Left out, because {why}: {', '.join(batches)}." for why, batches in left.items()]
    return "\n\n".join([*tables, " ".join([*notes, f"[{ROLLOUT.name}]({ROLLOUT.relative_to(ROOT)})."])])


def _by_sequences(title: str, rows: dict[str, dict[str, float]], form: str) -> str:
    """A row per model, a column per batch size."""
    counts = sorted({int(count) for row in rows.values() for count in row})
    cells = [[f"{row[str(n)]:{form}}" if str(n) in row else "" for n in counts] for row in rows.values()]
    names = [f"{title}, at", *map(str, counts[:-1]), f"{counts[-1]} sequences"]
    return table(names, [[engines.label(size), *row] for size, row in zip(rows, cells, strict=True)])


def cards() -> str:
    """Cards in the headers of the shipped configurations, with completions at a time."""
    recipes: dict[str, list[tuple[str, int]]] = {}
    for path in CONFIGS.glob("*.yaml"):
        found = re.search(r"Starts on a card of (\d+ GB \(.*?\)): (\d+) completions in (\d+) waves?", path.read_text())
        if found:
            recipes.setdefault(found[1], []).append((path.stem, -(-int(found[2]) // int(found[3]))))

    rows = []
    for card, named in sorted(recipes.items(), key=lambda item: int(item[0].split()[0])):
        named.sort(
            key=lambda of: (not of[0].startswith("qwen"), of[0].split("-")[0], int(re.findall(r"(\d+)b", of[0])[0]))
        )
        rows.append([card, ", ".join(f"[`{name}`](examples/configs/{name}.yaml) ({count})" for name, count in named)])
    errors = [100 * row["error"] for row in json.loads(PLAN.read_text())["memory"] if "measured_gib" in row]
    return table(["card", "recipes that start there (completions of full length at a time)"], rows, left=2) + (
        f"\n\nBy the memory plan, which was {min(errors):.0f} to {max(errors):.0f} % above [{len(errors)} measured "
        "workloads](docs/source/benchmarks.md#training) on an H200. 7B also ran on an H100 as a card of 24 GiB; no "
        "other card was there."
    )


def steps() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(STEP.read_text())["step"] if "median" in row}


def speed() -> str:
    """The README's three figures."""
    rows = steps()
    ours, stock, small = rows["ours-7b-64x512"], rows["stock-7b-64x512"], rows["ours-32b-8x512-26gib"]
    seconds, theirs = ours["median"]["step"], stock["median"]["step"]
    fewer, more = rows["ours-7b-8x512"]["measured_gib"], rows["stock-7b-8x512"]["measured_gib"]
    return (
        f"- **Speed**: a GRPO step of 7B, 64 completions of 512 tokens, takes {seconds:.1f} s; stock TRL with bf16 "
        f"LoRA takes {theirs:.1f} s.\n"
        f"- **Memory**: 7B with 8 completions takes {fewer:.0f} GiB, stock TRL {more:.0f}; 32B trains in "
        f"{small['measured_gib']:.0f} GiB.\n"
        f"- **One copy** of the 4-bit weights serves trainer and vLLM: a sync takes "
        f"{1000 * ours['median']['sync']:.0f} ms, stock TRL's {1000 * stock['median']['sync']:.0f}.\n\n"
        f"{ours['device']}, random weights. [All tables, losses included](docs/source/benchmarks.md)."
    )


def w4a8() -> str:
    """Speed and learning in FP8 next to w4a16."""
    update, learned, fp8, *demos = (json.loads(path.read_text()) for path in W4A8)
    both, runs = {"w4a16": "", "w4a8": "-w4a8"}, learned["runs"]
    cases = [update["cases"][f"nvfp4-compiled-fused{end}"]["seconds"] for end in both.values()]
    passes = f"forward and backward of 7B, {update['sequences']} x {update['tokens_each']} tokens, "
    ways = {"checkpointed": "recomputing, s", "plain": "keeping activations, s"}
    rows = [[passes + words, *(f"{case[way]:.2f}" for case in cases)] for way, words in ways.items()]
    whole = [steps()[f"ours-7b-64x512{end}"]["median"]["step"] for end in both.values()]
    rows.append(["step of 7B, 64 x 512 tokens, s", *(f"{seconds:.2f}" for seconds in whole)])
    for model in sorted({run["model"] for run in runs}):
        of = [[run for run in runs if (run["model"], run["compute"]) == (model, kind)] for kind in both]
        name = f"{model.rpartition('/')[2]}, gsm_symbolic, {of[0][0]['steps']} updates: "
        ends = [", ".join(f"{100 * run['after']['accuracy']:.1f}" for run in seeds) for seeds in of]
        kls = [max(max(run["curves"]["mismatch_kl"]) for run in seeds) for seeds in of]
        rows += [[name + "%, by seed", *ends], [name + "largest mismatch KL, nats", *(f"{kl:.4f}" for kl in kls)]]
    ends = [[f"{100 * demo[f'{when}_nvfp4']['accuracy']:.1f}" for when in ("untrained", "trained")] for demo in demos]
    rows.append(["SmolLM2-135M-Instruct, `make demo-real` on a CPU, %", *map(" -> ".join, ends)])
    cosines = [row["w4a8 from w4a16"]["cosine"] for name, row in fp8["gradients"].items() if "random" not in name]
    links = ", ".join(f"[{path.name}]({path.relative_to(ROOT)})" for path in (STEP, *W4A8))
    gradient = f"The adapter's gradient has a cosine of {min(cosines):.3f} to {max(cosines):.3f} with w4a16's."
    return table([update["device"], *both], rows) + f"\n\n{gradient} Sources: {links}."


def pictures() -> dict[str, str]:
    """File name -> SVG: seconds and memory of whole steps, light and dark; rollouts of 7B."""
    rows, speed = steps(), json.loads(ROLLOUT.read_text())["tokens_per_s"]
    names = {"ours:7b": "qerl-trl", "stock-merged:7b": "merged bf16", "stock-lora:7b": "bf16, LoRA slots"}
    lines = {words: [(float(count), value) for count, value in speed[name].items()] for name, words in names.items()}

    def row(shown: str, name: str) -> tuple[str, float | None, float | None]:
        found = rows.get(name)
        return (shown, found["median"]["step"], found["measured_gib"]) if found else (shown, None, None)

    groups = {
        "7B, 8 x 512 tokens": [row("qerl-trl", "ours-7b-8x512"), row("TRL, bf16 LoRA", "stock-7b-8x512")],
        "7B, 64 x 512 tokens": [
            row("qerl-trl", "ours-7b-64x512"), row("qerl-trl, limited to 40 GiB", "ours-7b-64x512-40gib"),
            row("TRL, bf16 LoRA", "stock-7b-64x512")],
        "32B, 8 x 512 tokens": [
            row("qerl-trl, limited to 48 GiB", "ours-32b-8x512-48gib"),
            row("qerl-trl, limited to 26 GiB", "ours-32b-8x512-26gib"), row("TRL, bf16 LoRA", "stock-32b-8x512")],
    }  # fmt: skip
    heads = ["seconds per GRPO step", "peak memory, GiB"]
    found = {f"step_time{'_dark' * dark}.svg": evidence.bars_svg(groups, heads, dark) for dark in (False, True)}
    return found | {"rollout_speed.svg": evidence.lines_svg(lines, "sequences", "tokens per second, 7B, H200")}


def multi_gpu() -> str:
    """Steps in every layout, ours and stock TRL's, with the memory of the fullest GPU."""
    record = [row for row in json.loads(SEVERAL.read_text())["multi_gpu"] if "median" in row]
    rows, found, shown = {row["name"]: row for row in record}, [], []
    for layout, words in LAYOUTS.items():
        ours, stock = rows[f"ours-{layout}"], rows.get(f"stock-{layout}")
        shown += [row for row in (ours, stock) if row is not None]
        cells = [f"{ours['median'][part]:.2f}" for part in ("step", "rollout", "sync")]
        cells += [f"{ours['sequences_per_second']:.1f}", f"{ours['planned_gib']:.1f}", f"{max(ours['gib']):.1f}"]
        other_machine = stock is not None and stock.get("machine") != ours.get("machine")
        theirs = ["", ""]
        if stock is not None:
            times = ours["sequences_per_second"] / stock["sequences_per_second"]
            theirs = [f"{stock['median']['step']:.2f}{'*' * other_machine}", f"{times:.2f}"]
        found.append([words, *cells, *theirs])
    heads = ["layout", "step, s", "rollout, s", "sync, s", "sequences/s", "planned, GiB", "measured, GiB"]
    heads += ["stock TRL: step, s", "ours / stock"]
    cold = {name: rows[f"ours-{name}-1.5b-cold"]["start"] for name in ("one", "dp")}
    return (
        table(heads, found)
        + "\n\n7B, completions of 512 tokens, 8 per process where nothing else is said; stock TRL with bf16 LoRA; "
        "memory of the trainers' fullest GPU. *: on another machine of the same kind. Nothing compiled before, 1.5B: "
        f"one process is ready after {cold['one']:.0f} s, two after {cold['dp']:.0f}.{not_alone(shown)} "
        + f"{measured_by(SEVERAL, rows['ours-dp']['device'], [row['commit'] for row in shown])}."
    )
