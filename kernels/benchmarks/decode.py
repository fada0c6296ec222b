"""Where a decode step of a whole rollout goes, by measurements that are committed: no GPU is needed.

    python kernels/benchmarks/decode.py [--page kernels/HOW_IT_WORKS.md]      prints the tables, or writes them into the page

A step is what is left of `rollout_speed_h200.json` (tokens per second of 7B in vLLM, ours and bf16 merged) without the prefill, which was timed
for 64 sequences and is taken in proportion.  Beside it stand 28 times a decoder layer without attention (`batch_invariant_h200.json`: as in a
model, with norms and SwiGLU), 28 times the four products one after the other (`h200.json`), and what both read at the least: the packed layers
and the head, which stays in bfloat16.  The rest of a step is attention, sampling with its log-probabilities, and whatever the GPU waits for.
Layers whose kernels ask for the bytes of the next one (`prefetch_h200.json`) have a table of their own.
Beside the first table stands how far the repeats of a rollout are apart, in milliseconds per step: no difference of less says anything.
"""

import argparse
import json
from pathlib import Path

from pages import placed

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
ROLLOUT = HERE.parents[1] / "examples" / "benchmarks" / "results" / "rollout_speed_h200.json"
PAGE = HERE.parent / "HOW_IT_WORKS.md"
BEGIN, END = "<!-- decode: written by benchmarks/decode.py -->\n", "<!-- end of decode -->\n"
PREFETCH = "<!-- prefetch: written by benchmarks/decode.py -->\n", "<!-- end of prefetch -->\n"
LAYERS, HIDDEN, VOCABULARY, NEW = (
    28,
    3584,
    152064,
    256,
)  # Qwen2.5-7B's shapes, and new tokens of a rollout, as rollout_speed.py has them
BANDWIDTH = 4.59e6  # bytes per microsecond that an H200 reads, as in compare.py


def step_ms(one: dict, batch: int, tokens_per_s: float) -> float:
    """Milliseconds of a step of a rollout at such a speed, by its prefill's share."""
    prefill = one["prefill_s"]["64"] * batch / 64
    return (batch * NEW / tokens_per_s - prefill) / NEW * 1e3


def apart(one: dict, batch: int) -> float:
    """Milliseconds per step between the fastest and the slowest repeat of a rollout."""
    speeds = one["tokens_per_s"][str(batch)]
    return step_ms(one, batch, min(speeds)) - step_ms(one, batch, max(speeds))


def rows() -> list[dict]:
    """Milliseconds of a step, per number of sequences that all three files know."""
    rollout = json.loads(ROLLOUT.read_text())["cases"]
    products = {r["M"]: r for r in json.loads((RESULTS / "h200.json").read_text())["sums"] if r["model"] == "7B"}
    layers = json.loads((RESULTS / "batch_invariant_h200.json").read_text())["layers"]
    layers = {r["M"]: r for r in layers if r["model"] == "7B"}
    head = 2 * VOCABULARY * HIDDEN / BANDWIDTH / 1e3

    def step(case: str, batch: int) -> float:
        speeds = rollout[case]["tokens_per_s"][str(batch)]
        return step_ms(rollout[case], batch, sum(speeds) / len(speeds))

    found = []
    for batch in (8, 32, 64):
        if any(str(batch) not in rollout[case]["tokens_per_s"] for case in ("ours:7b", "stock-merged:7b")):
            continue
        product, layer = products[batch], layers[batch]
        ours, merged = step("ours:7b", batch), step("stock-merged:7b", batch)
        inside, beside = LAYERS * layer["selected_us"] / 1e3, LAYERS * layer["bf16_us"] / 1e3
        found.append(
            {
                "sequences": batch,
                "step": ours,
                "floor": LAYERS * product["floor_us"] / 1e3 + head,
                "products": LAYERS * product["ours_lora_us"] / 1e3,
                "layers": inside,
                "glue": LAYERS * layer["glue_us"] / 1e3,
                "head": head,
                "rest": ours - inside - head,
                "bf16 step": merged,
                "bf16 layers": beside,
                "bf16 rest": merged - beside - head,
            }
        )
    return found


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
    lines += [
        "",
        "Milliseconds per step of 7B on an H200, adapter of rank 32 in ours, none in bf16; a step is of the mean of the repeats. These are apart by "
        f"{repeats}, and the files are of different runs and commits: a difference of less says nothing. Of the distance between step and floor, "
        f"the rest, which is outside of the layers, is {outside}. At {few['sequences']} sequences:",
        "",
        f"* {few['rest']:.2f} ms are attention, sampling with log-probabilities, and waiting; for bf16 {few['bf16 rest']:.2f}. No product is in it, and the "
        f"{between:.2f} between them are {'less' if between < largest else 'more'} than repeats are apart.",
        f"* {few['layers']:.2f} ms are the layers. Their products alone take {few['products']:.2f}, of which the adapter {adapter:.2f}; norms and SwiGLU "
        f"{few['glue']:.2f} (two and three kernels in the benchmark, two and one in the engine); "
        f"{few['layers'] - few['products'] - few['glue']:.2f} is left over between two files of different commits; a product may overlap less with such "
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
