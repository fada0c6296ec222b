"""Where a decode step of a whole rollout goes, by measurements that are committed: no GPU is needed.

    python kernels/benchmarks/decode.py [--page kernels/HOW_IT_WORKS.md]      prints the tables, or writes them into the page

A step is what is left of `rollout_speed_h200.json` (tokens per second in vLLM, ours and bf16 merged) without the prefill, which was timed
for 64 sequences and is taken in proportion.  Beside it stand, for 7B, 28 times a decoder layer without attention (`layers_h200.json`: as in a
model, with norms and SwiGLU), 28 times the four products one after the other (`h200.json`), and what both read at the least: the packed layers
and the head, which stays in bfloat16.  The rest of a step is attention, sampling with its log-probabilities, and whatever the GPU waits for.
The models that both files have stand in a second table, at 64 sequences.
Layers whose kernels ask for the bytes of the next one (`prefetch_h200.json`) have a table of their own.
Beside the first table stands how far the repeats of a rollout are apart, in milliseconds per step: no difference of less says anything.
"""

import argparse
import json
from pathlib import Path

from pages import placed

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
ROLLOUT = HERE.parents[1] / "benchmarks" / "results" / "rollout_speed_h200.json"
PAGE = HERE.parent / "HOW_IT_WORKS.md"
BEGIN, END = "<!-- decode: written by benchmarks/decode.py -->\n", "<!-- end of decode -->\n"
PREFETCH = "<!-- prefetch: written by benchmarks/decode.py -->\n", "<!-- end of prefetch -->\n"
#: by the name in layers_h200.json: that in rollout_speed_h200.json, layers, hidden size, rows of the head
MODELS = {
    "1.5B": ("1.5b", 28, 1536, 152064),
    "7B": ("7b", 28, 3584, 152064),
    "Llama-3-8B": ("llama-3-8b", 32, 4096, 128256),
    "32B": ("32b", 64, 5120, 152064),
}
NEW = 256  # tokens of a rollout, as rollout.py has them
LAYERS = MODELS["7B"][1]
FAR = 0.5  # milliseconds per step
BANDWIDTH = 4.59e6  # bytes per microsecond that an H200 reads, as in compare.py


def step_ms(one: dict, batch: int, tokens_per_s: float) -> float:
    """Milliseconds of a step of a rollout at such a speed, by its prefill's share."""
    prefill = one["prefill_s"]["64"] * batch / 64
    return (batch * NEW / tokens_per_s - prefill) / (NEW - 1) * 1e3


def apart(one: dict, batch: int) -> float:
    """Milliseconds per step between the fastest and the slowest repeat of a rollout."""
    speeds = one["tokens_per_s"][str(batch)]
    return step_ms(one, batch, min(speeds)) - step_ms(one, batch, max(speeds))


def parts(model: str, batch: int) -> dict[str, float] | None:
    """Milliseconds of a step of a model; None: it was not measured at so many sequences."""
    rollout = json.loads(ROLLOUT.read_text())["cases"]
    layers = json.loads((RESULTS / "layers_h200.json").read_text())["layers"]
    size, count, hidden, vocabulary = MODELS[model]
    layer = {(r["model"], r["M"]): r for r in layers}[model, batch]
    head = 2 * vocabulary * hidden / BANDWIDTH / 1e3
    found = {"head": head, "glue": count * layer["glue_us"] / 1e3}
    for case, step, inside, rest, key in (
        (f"ours:{size}", "step", "layers", "rest", "ours_us"),
        (f"stock-merged:{size}", "bf16 step", "bf16 layers", "bf16 rest", "bf16_us"),
    ):
        speeds = rollout[case]["tokens_per_s"].get(str(batch))
        if not speeds:
            return None
        found[step] = step_ms(rollout[case], batch, sum(speeds) / len(speeds))
        found[inside] = count * layer[key] / 1e3
        found[rest] = found[step] - found[inside] - head
    return found


def rows() -> list[dict]:
    """Milliseconds of a step of 7B, per number of sequences that all three files know."""
    products = {r["M"]: r for r in json.loads((RESULTS / "h200.json").read_text())["sums"] if r["model"] == "7B"}
    order = ("sequences", "step", "floor", "products", "layers", "glue", "head", "rest", "bf16 step", "bf16 layers", "bf16 rest")  # fmt: skip
    found = []
    for batch in (8, 32, 64):
        if (row := parts("7B", batch)) is None:
            continue
        row |= {
            "sequences": batch,
            "floor": LAYERS * products[batch]["floor_us"] / 1e3 + row["head"],
            "products": LAYERS * products[batch]["ours_lora_us"] / 1e3,
        }
        found.append({name: row[name] for name in order})
    return found


def models(batch: int = 64) -> list[str]:
    """A table of the models that both files have, and of which of them something outside of the layers is far from bf16's."""
    columns = ("step", "layers", "head", "rest", "bf16 step", "bf16 layers", "bf16 rest")
    lines = [
        f"| {batch} sequences | step | layers without attention | head, at least | rest | bf16 step | bf16 layers | bf16 rest |",
        "|---|" + "---:|" * len(columns),
    ]
    far = []
    for model in MODELS:
        if row := parts(model, batch):
            lines.append(f"| {model} | " + " | ".join(f"{row[name]:.2f}" for name in columns) + " |")
            if (more := row["rest"] - row["bf16 rest"]) > FAR:
                far.append(f"{model}'s rest is {more:.1f} ms longer than bf16's")
    return (
        [*lines, "", f"{'; '.join(far)}: no product is in that, no such engine was profiled, and why is not known."]
        if far
        else lines
    )


def matrices() -> dict[str, dict]:
    """Microseconds of the four products at 8 tokens, one after the other: floor, ours, ours with an adapter."""
    rows = json.loads((RESULTS / "h200.json").read_text())["rows"]
    return {r["shape"].removeprefix("7B."): r for r in rows if r["shape"].startswith("7B.") and r["M"] == 8}


def text() -> str:
    found = rows()
    lines = [
        "| sequences | step | floor | products alone | layers without attention | of it norms, SwiGLU | head, at least | rest | bf16 step | bf16 layers | bf16 rest |",
        "|" + "---:|" * len(found[0]),
    ]
    for row in found:
        lines.append(f"| {row['sequences']} | " + " | ".join(f"{row[n]:.2f}" for n in list(row)[1:]) + " |")
    above = {name: r["ours_us"] - r["floor_us"] for name, r in matrices().items()}
    adapter = sum(r["ours_lora_us"] - r["ours_us"] for r in matrices().values()) * LAYERS / 1e3
    hidden = len(above) * min(above.values()) * LAYERS / 1e3
    gaps = ", ".join(f"{name} {us:.1f}" for name, us in above.items())
    few = found[0]
    cases = json.loads(ROLLOUT.read_text())["cases"]
    spreads = {
        row["sequences"]: [apart(cases[case], row["sequences"]) for case in ("ours:7b", "stock-merged:7b")]
        for row in found
    }
    repeats = "; ".join(
        f"{one:.2f} (ours) and {other:.2f} (bf16) at {n} sequences" for n, (one, other) in spreads.items()
    )
    between, largest = abs(round(few["rest"], 2) - round(few["bf16 rest"], 2)), max(spreads[few["sequences"]])
    outside = ", ".join(
        f"{row['rest'] / (row['step'] - row['floor']):.0%} at {row['sequences']} sequences" for row in found
    )
    lines += ["", *models()]
    lines += [
        "",
        "Milliseconds per step, first of 7B, on an H200, adapter of rank 32 in ours, none in bf16; a step is of the mean of the repeats. These are apart by "
        f"{repeats} of 7B, and the files are of different processes: a difference of less says nothing. Of the distance between step and floor, "
        f"the rest, which is outside of the layers, is {outside}. At {few['sequences']} sequences:",
        "",
        f"* {few['rest']:.2f} ms are attention, sampling with log-probabilities, and waiting; for bf16 {few['bf16 rest']:.2f}. No product is in it, and the "
        f"{between:.2f} between them are {'less' if between < largest else 'more'} than repeats are apart.",
        f"* {few['layers']:.2f} ms are the layers. Their products alone take {few['products']:.2f}, of which the adapter {adapter:.2f}; norms and SwiGLU "
        f"{few['glue']:.2f} (two and three kernels in the benchmark, two and one in the engine); "
        f"{few['layers'] - few['products'] - few['glue']:.2f} is left over between two files; a product may overlap less with such "
        "neighbours.",
        f"* Without an adapter, above their floor the products are, in microseconds: {gaps}. The smallest of these is what a product costs that has almost no bytes to read: "
        f"if one kernel for the layer hid that much of each, {hidden:.2f} ms ({hidden / few['step']:.0%} of the step) were gone, less what its barriers over "
        "all multiprocessors take.",
    ]
    return "\n".join(lines) + "\n"


def prefetched() -> str:
    """Layers with the next matrix's first bytes asked for, beside those without."""
    record = json.loads((RESULTS / "prefetch_h200.json").read_text())
    lines = [
        "| model | tokens | layer, us | products ask for the next matrix | norms too |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['model']} | {row['M']} | {row['ours_us']:.1f} | {row['by_products_us']:.1f} | {row['by_norms_and_products_us']:.1f} |"
        for row in record["layers"]
    ]
    ratios = [row["ours_us"] / row["by_products_us"] for row in record["layers"]]
    faster = sum(ratio > 1 for ratio in ratios)
    return (
        "\n".join(lines)
        + f"\n\nFaster in {faster} of {len(ratios)}, at best by {100 * (max(ratios) - 1):.1f} %, at worst slower by {100 * (1 / min(ratios) - 1):.1f} %. "
        f"{record['device']}, torch {record['torch']}, triton {record['triton']}, one run; the code is that of commit {record['commit'][:7]}, "
        "[prefetch_h200.json](benchmarks/results/prefetch_h200.json).\n"
    )


def written(page: str) -> str:
    """The page with both tables in their places."""
    return placed(placed(page, BEGIN, END, text()), *PREFETCH, prefetched())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    if args.page:
        args.page.write_text(written(args.page.read_text()))
    else:
        print(text(), prefetched(), sep="\n", end="")


if __name__ == "__main__":
    main()
