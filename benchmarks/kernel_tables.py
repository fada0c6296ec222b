"""Tables of the kernels: speed of a decoder layer's products relative to cuBLAS bf16."""

import hashlib
import json
from pathlib import Path
from typing import Any

from common import ROOT
from speed_tables import measured_by, table

from qerl_nvfp4 import bounds, cost, tune

RESULTS = ROOT / "kernels/benchmarks/results"
KERNELS = RESULTS / "h200.json"
EVERY_SIZE = RESULTS / "every_size_h200.json"
#: layers with the shipped kernels, per card; a model has all sizes or is absent
LAYERS = {name: RESULTS / f"layers_{name}.json" for name in ("h200", "h100", "w4a8_h200")}
FACTORS = ROOT / "kernels/torch-ext/qerl_nvfp4/configs/cost_model.json"
SHOWN = (8, 16, 24, 32, 48, 64, 72, 80, 96, 128, 144, 160, 192, 208, 256, 272, 320, 384, 448, 512)
CARD_SIZES = (32, 64, 128, 256)
MODELS = ("7B", "32B", "Llama-3-8B", "1.5B", "0.5B", "Qwen3-8B")


def kernels() -> str:
    """The four products of a decoder layer: microseconds, and speed relative to cuBLAS bf16 and Marlin."""
    record = json.loads(KERNELS.read_text())
    sums = {(entry["model"], entry["M"]): entry for entry in record["sums"]}
    columns = {"ours + LoRA": "ours_lora_us", "ours": "ours_us", "bf16": "bf16_us", "Marlin": "marlin_us"}
    heads = [f"{m}: {name}" if name == "ours + LoRA" else name for m in ("7B", "32B") for name in columns]
    times, ratios = [], []
    for tokens in sorted({tokens for _, tokens in sums}):
        entries = [sums[model, tokens] for model in ("7B", "32B")]
        found = [(entry[key], entry["bf16_us"] / entry[key]) for entry in entries for key in columns.values()]
        times.append([str(tokens), *(f"{us:.0f}" for us, _ in found)])
        ratios.append([str(tokens), *(f"{ratio:.2f}" for _, ratio in found if ratio != 1)])
    versions = {name: record[name] for name in ("torch", "triton")}
    return "\n\n".join(
        [
            table(["us, at tokens", *heads], times, left=0),
            table(["times bf16's speed, at tokens", *(head for head in heads if head != "bf16")], ratios, left=0),
            "Summed over the four matrices of a Qwen2.5 decoder layer; bf16 is cuBLAS's, and a ratio above 1 is "
            f"faster than it; rank-{record['lora_rank']} adapter inside the kernel, against bf16 without one. "
            f"{measured_by(KERNELS, record['device'], [record['commit']], **versions)}.",
        ]
    )


def humming() -> str:
    """Speed relative to humming-kernels (vLLM's kernels on Hopper since 0.32) on single matrices of 7B."""
    record = json.loads(KERNELS.read_text())
    run, rows = record.get("humming_run", record), record["humming"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    times = {(row["shape"], row["M"]): row["humming_us"] / row["ours_us"] for row in rows}
    sizes = dict.fromkeys(row["M"] for row in rows)
    versions = {name: run[name] for name in ("torch", "triton")}
    return (
        table(["tokens", *shapes], [[str(M), *(f"{times[shape, M]:.2f}" for shape in shapes)] for M in sizes], left=0)
        + f"\n\nHow many times as fast as humming-kernels {run['humming_kernels']}, by its own heuristic: without an "
        "adapter, which it has not; single launches with a cold cache, the time of launching left out. "
        f"{measured_by(KERNELS, run['device'], [run['commit']], **versions)}."
    )


def layers_of(path: Path) -> str:
    """Speed of a decoder layer, the minimum over all multiples of 8, and the runs behind it."""
    record = json.loads(path.read_text())
    layers = {(row["model"], row["M"]): row["ratio"] for row in record["layers"]}
    models = [name for name in MODELS if (name, SHOWN[0]) in layers]
    rows = [[str(M), *(f"{layers[model, M]:.2f}" for model in models)] for M in SHOWN]
    for low, high in ((24, 128), (136, 512)):
        worst = [min((r, M) for (name, M), r in layers.items() if name == m and low <= M <= high) for m in models]
        rows.append([f"worst of {low} to {high}", *(f"{ratio:.3f} at {M}" for ratio, M in worst)])
    runs = dict[str, list[str]]()
    for run in record["runs"]:
        where = f"{run['device']}, torch {run['torch']}, triton {run['triton']}, commit {run['commit'][:7]}"
        runs.setdefault(where, []).extend(run["models"])
    said = "; ".join(f"{', '.join(names)} on {where}" for where, names in runs.items())
    said = f"\n\n{said}; [{path.name}]({path.relative_to(ROOT)}).{other_now(record)}"
    return table(["tokens", *models], rows, left=0) + said


def other_now(record: dict[str, Any]) -> str:
    """Note on runs with the cost model before the current one."""
    now = hashlib.sha256(FACTORS.read_bytes()).hexdigest()[:16]
    if all(run["cost_model"] == now for run in record["runs"]):
        return ""
    return " The cost model was fitted again since, so other kernels may be selected now than those of this table."


def every_size() -> str:
    """A decoder layer between the tuned token counts, and the quality of the cost model's choices."""
    fitted = json.loads(EVERY_SIZE.read_text())
    outside = json.loads(FACTORS.read_text())["quality"]["shape_left_out"]
    commits = [run["commit"] for run in (fitted, *fitted.get("more", ()))]
    return (
        layers_of(LAYERS["h200"])
        + "\n\nSpeed relative to cuBLAS bf16 without an adapter: a decoder layer without its attention, RMSNorm and "
        f"SwiGLU between the products as in a model, rank-{fitted['lora_rank']} adapter inside ours, by the kernels "
        "that ship. On a matrix that the fit has not seen, the selected kernel is slower than the fastest of all that "
        f"were timed by {outside['mean_loss']:.1%} in the mean, by {outside['p90_loss']:.1%} in nine of ten cases, and "
        f"by {outside['worst_loss']:.0%} at worst ({outside['worst']}). The fit: "
        f"{measured_by(EVERY_SIZE, fitted['device'], commits, torch=fitted['torch'], triton=fitted['triton'])}."
    )


def cards_bf16() -> str:
    """Arithmetic of bounds.py for a 7B layer by card, in w4a16, and in w4a8 with FP8 units: speed relative to bf16."""
    rows, shapes = [], tune.layer_shapes("7B").values()
    heads = [f"{name}, {M}" for name in ("w4a16", "w4a8") for M in (*CARD_SIZES, "bf16 faster from")]
    for card in bounds.CARDS:
        cells: list[str] = []
        w4a16 = lambda *of: bounds.priced(*of, (of[0].shared_kib - 1) * 1024)[0][0]  # noqa: E731
        for price in (w4a16, lambda *of: min(bounds.fp8_us(*of)))[: 1 + (card.capability >= (8, 9))]:
            us = {M: [sum(f(card, *NK, M) for NK in shapes) for f in (bounds.bf16_us, price)] for M in cost.SIZES}
            last = max(M for M, (bf16, ours) in us.items() if ours <= bf16)
            cells += [*(f"{us[M][0] / us[M][1]:.2f}" for M in CARD_SIZES), str(last + 1)]
        rows.append([card.name.removeprefix("GeForce "), *cells, *["-"] * (len(heads) - len(cells))])
    return table(["card", *heads], rows).replace(f" {cost.SIZES[-1] + 1} |", " never |")
