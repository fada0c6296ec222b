"""The tables of readme_tables.py about the kernels: products of a decoder layer relative to cuBLAS bf16."""

import json
from typing import Any

from speed_tables import ROOT, measured_by

KERNELS = ROOT / "kernels/benchmarks/results/h200.json"
EVERY_SIZE = ROOT / "kernels/benchmarks/results/every_size_h200.json"
#: layers by what ships; a model stands in it whole or not at all
LAYERS = ROOT / "kernels/benchmarks/results/layers_h200.json"
#: the same on a card on which nothing was fitted
LAYERS_H100 = ROOT / "kernels/benchmarks/results/layers_h100.json"
FACTORS = ROOT / "kernels/torch-ext/qerl_nvfp4/configs/cost_model.json"


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
    versions = {name: record[name] for name in ("torch", "triton")}
    return (
        "\n".join([*rows, "", *floor_share(sums)])
        + "\n\nSpeed relative to cuBLAS bf16 (above 1 is faster), summed over the four matrices of a Qwen2.5 decoder layer; "
        f"rank-{record['lora_rank']} adapter inside the kernel, against bf16 without one. The floor is what memory and matrix units need at the least. "
        f"{measured_by(KERNELS, record['device'], [record['commit']], **versions)}."
    )


def humming() -> str:
    """Single matrices of 7B by humming-kernels, which vLLM takes on Hopper from 0.32 on, and by ours: how many times as fast ours are."""
    record = json.loads(KERNELS.read_text())
    run, rows = record.get("humming_run", record), record["humming"]
    shapes = dict.fromkeys(row["shape"] for row in rows)
    times = {(row["shape"], row["M"]): row["humming_us"] / row["ours_us"] for row in rows}
    lines = [f"| tokens | {' | '.join(shapes)} |", "|---:|" + "---:|" * len(shapes)]
    for tokens in dict.fromkeys(row["M"] for row in rows):
        lines.append(f"| {tokens} | {' | '.join(f'{times[shape, tokens]:.2f}' for shape in shapes)} |")
    versions = {name: run[name] for name in ("torch", "triton")}
    return (
        "\n".join(lines)
        + f"\n\nHow many times as fast as humming-kernels {run['humming_kernels']}, by its own heuristic: "
        "without an adapter, which it has not; single launches with a cold cache, "
        f"the time of launching left out. {measured_by(KERNELS, run['device'], [run['commit']], **versions)}."
    )


#: of the physical limit, what 7B should reach with the adapter, and at how many tokens
FLOOR_WANTED, FLOOR_TOKENS = 0.5, (16, 32, 64)


def floor_share(sums: dict[tuple[str, int], dict[str, Any]]) -> list[str]:
    """What a layer of 7B could take at the least (compare.floor_us, in the record) over what it takes with the adapter."""
    cells = []
    for tokens in FLOOR_TOKENS:
        entry = sums["7B", tokens]
        share = entry["floor_us"] / entry["ours_lora_us"]
        cells.append(f"{share:.0%}, wanted {FLOOR_WANTED:.0%}: {'reached' if share >= FLOOR_WANTED else 'missed'}")
    head = f"| tokens | {' | '.join(map(str, FLOOR_TOKENS))} |"
    return [head, "|---|" + "---:|" * len(FLOOR_TOKENS), f"| 7B with LoRA, share of the floor | {' | '.join(cells)} |"]


SHOWN = (8, 16, 24, 32, 48, 64, 72, 80, 96, 128, 144, 160, 192, 208, 256, 272, 320, 384, 448, 512)
#: of the cards on which layers were timed, and of the adapter in them
SMS, LORA_RANK = 132, 32
#: of each model's layer, the worst ratio wanted from 24 to 128 tokens, and from 136 to 512
WANTED = {"7B": (1.05, 0.9), "32B": (1.05, 0.9), "Llama-3-8B": (1.05, 0.9), "1.5B": (0.95, 0.95), "0.5B": (0.95, 0.95)}


def layers_of(record: dict[str, Any], wanted: bool = True) -> list[str]:
    """A table of a decoder layer's ratios, and the worst of all multiples of 8; `wanted`: beside what they should be at least."""
    layers = {(row["model"], row["M"]): row["ratio"] for row in record["layers"]}
    models = list(WANTED)
    rows = [f"| tokens | {' | '.join(models)} |", "|" + "---:|" * (1 + len(models))]
    for tokens in SHOWN:
        rows.append(f"| {tokens} | {' | '.join(f'{layers[model, tokens]:.2f}' for model in models)} |")
    for low, high, column in ((24, 128, 0), (136, 512, 1)):
        cells = []
        for model in models:
            worst, tokens = min((ratio, M) for (name, M), ratio in layers.items() if name == model and low <= M <= high)
            reached = "reached" if worst >= WANTED[model][column] else "missed"
            cells.append(f"{worst:.3f} at {tokens}" + f", wanted {WANTED[model][column]:g}: {reached}" * wanted)
        rows.append(f"| worst of {low} to {high} | {' | '.join(cells)} |")
    return rows


def other_now(record: dict[str, Any]) -> str:
    """What a reader must know of layers that were timed before the cost model was fitted last: at how many of the numbers of tokens another kernel
    ships now, and from where to where they are."""
    from qerl_nvfp4 import cost, select, tune

    table, changed, timed = select.load_table("NVIDIA H200", SMS), set[int](), set[int]()
    for row in record["layers"]:
        shapes, M = tune.layer_shapes(row["model"]), row["M"]
        if M <= 16:  # priced by no model
            continue
        timed.add(M)
        for name, (N, K) in shapes.items():
            rows = LORA_RANK * len(tune.layer_splits(row["model"]).get((N, K), (N,)))
            found = cost.fastest_timed(N, K, M, SMS, rows)
            tuned = table.get((N, K, select.bucket_of(M)))
            now = found[0] if found else select.by_price(N, K, M, SMS, rows, tuned)
            if now is not None and tune.short(select.with_adapter(now)) != row["chosen"][name]:
                changed.add(M)
    if not changed:
        return ""
    return (
        f" The model was fitted again since, to more timings: at {len(changed)} of the {len(timed)} numbers of tokens above 16 ({min(changed)} to {max(changed)}) some matrix "
        "has another kernel now, and these layers have not been timed with it."
    )


def every_size() -> str:
    """A decoder layer as in a model at numbers of tokens between the tuned ones, adapter included, and the worst of all multiples of 8."""
    record, later = json.loads(EVERY_SIZE.read_text()), json.loads(LAYERS.read_text())
    rows = layers_of(later)
    outside = json.loads(FACTORS.read_text())["quality"]["shape_left_out"]
    new, source = (path.relative_to(ROOT) for path in (LAYERS, EVERY_SIZE))
    commits = " and ".join(run["commit"][:7] for run in (record, *record.get("more", ())))
    return (
        "\n".join(rows)
        + "\n\nSpeed relative to cuBLAS bf16 without an adapter: a decoder layer without its attention, RMSNorm and SwiGLU between the products as in a model, "
        f"rank-{record['lora_rank']} adapter inside ours. By what ships: {'; '.join(map(_run, later['runs']))}; [{new.name}]({new}).{other_now(later)} Its cost model is fitted to candidates that were timed "
        f"at commit {commits} ({record['device']}, torch {record['torch']}, triton {record['triton']}, [{source.name}]({source})), and the fastest timed one is taken where "
        "the fit misses it. On a matrix that the fit has not seen, the selected kernel is slower than the "
        f"fastest of all that were timed by {outside['mean_loss']:.1%} in the mean, by {outside['p90_loss']:.1%} in nine of ten cases, and by {outside['worst_loss']:.0%} at worst ({outside['worst']})."
    )


def every_size_h100() -> str:
    """The same on an H100. What is wanted is wanted of an H200."""
    record = json.loads(LAYERS_H100.read_text())
    link = LAYERS_H100.relative_to(ROOT)
    return (
        "\n".join(layers_of(record, wanted=False))
        + f"\n\n{'; '.join(map(_run, record['runs']))}; [{link.name}]({link}).{other_now(record)}"
    )


def _run(run: dict[str, Any]) -> str:
    """Which models' layers were timed in a run, and where."""
    return f"{', '.join(run['models'])} on {run['device']}, torch {run['torch']}, triton {run['triton']}, commit {run['commit'][:7]}"
