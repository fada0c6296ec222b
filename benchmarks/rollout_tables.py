"""Tables of `rollout.py`'s file, in Markdown."""

import json
from pathlib import Path
from typing import Any

import rollout as engines

ROOT = Path(__file__).resolve().parents[1]
ROLLOUT = ROOT / "benchmarks/results/rollout_speed_h200.json"
#: runs whose engines of ours took steps of 4096 tokens too
SMALL_STEPS = ROOT / "benchmarks/results/rollout_speed_h200_4096.json"
#: former runs with the larger steps
BEFORE = ROOT / "benchmarks/results/rollout_speed_h200_before.json"
#: the engines that ours is compared with, by their names in the record
OTHERS = {"stock-merged": "merged bf16", "stock-lora": "bf16 with vLLM's LoRA slots"}


def rollout(path: Path = ROLLOUT) -> str:
    """vLLM tokens per second of ours, and relative to merged bf16 and to bf16 with vLLM's LoRA slots: a row per model that was measured. How
    long the prompts take alone."""
    record = json.loads(path.read_text())
    speed, ratios = record["tokens_per_s"], record["ratios"]
    models = engines.by_model(name.split(":")[1] for name in speed if name.startswith("ours:"))
    ours = {size: speed[f"ours:{size}"] for size in models}
    tables = [_by_sequences("Ours, tokens per second", ours, ".0f")]
    for other, words in OTHERS.items():
        found = {size: ratios.get(f"ours:{size} over {other}:{size}") for size in models}
        tables.append(
            _by_sequences(f"Ours / {words}", {size: row for size, row in found.items() if row is not None}, ".2f")
        )
    tables.append(_prefills(record["cases"], models))
    left: dict[str, list[str]] = {}
    measured: dict[str, list[str]] = {}
    later = []
    for name, case in record["cases"].items():
        size = name.split(":")[1]
        for batch, why in case.get("left_out", {}).items():
            left.setdefault(why, []).append(f"{name} at {batch}")
        beside = [one for key, one in record["cases"].items() if key.endswith(f":{size}") and one["run"] == case["run"]]
        if case.get("stage", 0) > min(one.get("stage", 0) for one in beside):
            later.append(name)
        run = record["runs"][case["run"]]
        found = run["versions"]
        versions = {"torch": found["torch"], "triton": found["triton"], "vLLM": found["vllm"]}
        packages = [f"{package} {version}" for package, version in versions.items()]
        where = ", ".join([run["device"], *packages, f"commit {run['commit'][:7]}", run["order"]])
        which = measured.setdefault(where, [])
        which += [engines.label(size)] if engines.label(size) not in which else []
    notes = [f"{', '.join(names)}: {where}." for where, names in measured.items()]
    notes += _step_tokens(record["cases"])
    notes += [f"Built when other engines of the model had ended: {', '.join(later)}."] if later else []
    notes += [f"Left out, because {why}: {', '.join(names)}." for why, names in left.items()]
    notes += _unsteady(record["cases"])
    what = f"{record['what'][0].upper()}{record['what'][1:]}."
    if path == ROLLOUT:
        tables.append(not_measured(record, models))
    return "\n\n".join([*filter(None, tables), " ".join([what, *notes, f"[{path.name}]({path.relative_to(ROOT)})."])])


#: sequences at which every model would be measured
SEQUENCES = (8, 32, 64, 128, 256, 512)


def not_measured(record: dict[str, Any], models: list[str]) -> str:
    """Which numbers of sequences and which engines the tables have not, by model."""
    sequences: dict[int, list[str]] = {}
    for size in models:
        for count in SEQUENCES:
            if str(count) not in record["tokens_per_s"][f"ours:{size}"]:
                sequences.setdefault(count, []).append(engines.label(size))
    said = [f"{count} sequences of {_names(names, models)}" for count, names in sorted(sequences.items())]
    for other, words in OTHERS.items():
        without = [engines.label(size) for size in models if f"{other}:{size}" not in record["cases"]]
        said += [f"{words} for {_names(without, models)}"] if without else []
    return f"Not measured, because the time on the GPU went elsewhere: {'; '.join(said)}." if said else ""


def _names(names: list[str], models: list[str]) -> str:
    return "any model" if len(names) == len(models) else ", ".join(names)


def _prefills(cases: dict[str, dict[str, Any]], models: list[str]) -> str:
    """A row per model: seconds until every sequence has one token, of the engines of one run."""

    def of(engine: str, size: str) -> dict[str, float]:
        case = cases.get(f"{engine}:{size}", {})
        return case.get("prefill_s", {}) if case.get("run") == cases[f"ours:{size}"]["run"] else {}

    found = {size: {engine: of(engine, size) for engine in ("ours", *OTHERS)} for size in models}
    found = {size: row for size, row in found.items() if any(row.values())}
    counts = {count for row in found.values() for of_engine in row.values() for count in of_engine}
    if not counts:
        return ""
    (count,) = counts  # rollout.PREFILL
    prompt = engines.PROMPT
    table = [
        f"| Prefill of {count} x {prompt} tokens, s | ours | {' | '.join(OTHERS.values())} |",
        "|---|---:|---:|---:|",
    ]
    for size, row in found.items():
        cells = [f"{of_engine[count]:.2f}" if of_engine else "" for of_engine in row.values()]
        table.append(f"| {engines.label(size)} | {' | '.join(cells)} |")
    return "\n".join(table)


def small_steps() -> str:
    return rollout(SMALL_STEPS)


def before() -> str:
    """What models of which there is a newer run were then, in a sentence for each."""
    record = json.loads(BEFORE.read_text())
    said = []
    for name, ratios in record["ratios"].items():
        ours, _, other = name.partition(" over ")
        size, engine = ours.split(":")[1], other.split(":")[0]
        commit = record["runs"][record["cases"][ours]["run"]]["commit"][:7]
        found = ", ".join(f"{ratio:.2f} at {count}" for count, ratio in ratios.items())
        tokens = ", ".join(f"{record['tokens_per_s'][ours][count]:.0f}" for count in ratios)
        said.append(
            f"{engines.label(size)} was {found} sequences times {OTHERS[engine]} (ours {tokens} tokens per second, {commit})"
        )
    where = f"[{BEFORE.name}]({BEFORE.relative_to(ROOT)})"
    return f"Before, on other machines of the same kind: {'; '.join(said)}; {where}."


def _step_tokens(cases: dict[str, dict[str, Any]]) -> list[str]:
    """What is to be said of the tokens that a step may process, where engines of one model differ in them."""
    notes: dict[str, list[str]] = {}
    for name, case in cases.items():
        engine, _, size = name.partition(":")
        found = {cases[f"{other}:{size}"].get("step_tokens") for other in OTHERS if f"{other}:{size}" in cases}
        if engine == "ours" and found and None not in found and found != {case.get("step_tokens")}:
            others = ", ".join(map(str, sorted(found)))
            said = f"A step of ours may process {case['step_tokens']} tokens, of the others {others}, which is TRL's"
            notes.setdefault(said, []).append(engines.label(size))
    return [f"{said}: {', '.join(sizes)}." for said, sizes in notes.items()]


#: how much faster the fastest of a case's repeats may be than its slowest before that is said
STEADY = 1.1


def _unsteady(cases: dict[str, dict[str, Any]]) -> list[str]:
    """What is to be said of repeats that differ: their values, and the ratio between the fastest of each engine."""
    notes = []
    for name, case in cases.items():
        ours = cases[f"ours:{name.partition(':')[2]}"]["tokens_per_s"]
        for batch, values in case["tokens_per_s"].items():
            if max(values) > STEADY * min(values):
                least = (
                    ""
                    if name.startswith("ours:")
                    else f"; fastest against fastest, ours is {max(ours[batch]) / max(values):.2f} times as fast"
                )
                notes.append(
                    f"The repeats of {name} at {batch} differ: {', '.join(f'{value:.0f}' for value in values)}{least}."
                )
    return notes


def _by_sequences(title: str, rows: dict[str, dict[str, float]], form: str) -> str:
    """A row per model, a column per number of sequences; nothing where nothing was measured."""
    counts = sorted({int(count) for row in rows.values() for count in row})
    if not counts:
        return ""
    table = [f"| {title}, at | {' | '.join(map(str, counts))} sequences |", "|---|" + "---:|" * len(counts)]
    for size, row in rows.items():
        cells = [f"{row[str(count)]:{form}}" if str(count) in row else "" for count in counts]
        table.append(f"| {engines.label(size)} | {' | '.join(cells)} |")
    return "\n".join(table)


#: times the speed of another engine, by number of sequences
WANTED = {
    ("7b", "stock-merged"): {8: 1.6, 64: 1.25, 128: 1.05, 256: 1.0},
    ("32b", "stock-lora"): {8: 2.4, 64: 1.6, 128: 1.45},
}


def wanted() -> str:
    """Of each aim whether it was reached."""
    ratios = json.loads(ROLLOUT.read_text())["ratios"]
    said = []
    for (size, other), aims in WANTED.items():
        found = ratios[f"ours:{size} over {other}:{size}"]
        cells = [
            f"{found[str(count)]:.3f} at {count} ({aim:g}: {'reached' if found[str(count)] >= aim else 'missed'})"
            for count, aim in aims.items()
        ]
        said.append(f"Times {OTHERS[other]}, {engines.label(size)}, wanted in brackets: {', '.join(cells)}.")
    return " ".join(said)
