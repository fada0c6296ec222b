"""The tables of HOW_IT_WORKS.md that are made of several committed measurements: no GPU is needed.

    python kernels/benchmarks/how_it_works.py [--write]      prints the tables, or writes them into the page

decode, prefetch: where a decode step of a whole rollout goes. A step is what is left of `rollout_speed_h200.json` (tokens per second in vLLM, ours and
bf16 merged) without the prefill, which was timed for 64 sequences and is taken in proportion. Beside it stand, for 7B, 28 times a decoder layer without
attention (`layers_h200.json`), 28 times the four products one after the other (`h200.json`), and what both read at the least: the packed layers and the
head, which stays in bfloat16. The rest of a step is attention, sampling with its log-probabilities, and whatever the GPU waits for.

where, natural: where the time of the products goes that are chosen for many tokens, by the cost model's own terms, with the factors that were fitted to
`every_size_h200.json`. For the four matrices of a decoder layer with an adapter of rank 32: what nothing could be faster than (compare.floor_us), cuBLAS
bf16, ours as timed, and what the model says of the chosen ones, by term (cost.terms). Factors come from least squares, so a part is as good as the model
is: `predicted` stands beside what was timed. Below that, what a step to the next tile of tokens costs; and what x in its natural order gains.

w4a8: what FP8 activations could win at the most. At these numbers of tokens the floor is what the matrix units need at their peak; half of it is taken
off ours with the adapter, as if products in FP8 took half of the time and all else stayed. No kernel of that kind was written.
"""

import argparse
import json
from pathlib import Path

from compare import floor_us
from fit import known, latest
from pages import placed

from qerl_nvfp4 import cost

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
ROLLOUT = HERE.parents[1] / "benchmarks" / "results" / "rollout_speed_h200.json"
LAYERS = RESULTS / "layers_h200.json"
PAGE = HERE.parent / "HOW_IT_WORKS.md"

# --- decode, prefetch ----------------------------------------------------------------------------------------------------------------

#: by the name in layers_h200.json: that in rollout_speed_h200.json, layers, hidden size, rows of the head
MODELS = {
    "1.5B": ("1.5b", 28, 1536, 152064),
    "7B": ("7b", 28, 3584, 152064),
    "Llama-3-8B": ("llama-3-8b", 32, 4096, 128256),
    "32B": ("32b", 64, 5120, 152064),
}
NEW = 256  # tokens of a rollout, as rollout.py has them
SEVEN_B_LAYERS = MODELS["7B"][1]
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


def step_parts(model: str, batch: int) -> dict[str, float] | None:
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


def decode_rows() -> list[dict]:
    """Milliseconds of a step of 7B, per number of sequences that all three files know."""
    products = {r["M"]: r for r in json.loads((RESULTS / "h200.json").read_text())["sums"] if r["model"] == "7B"}
    order = ("sequences", "step", "floor", "products", "layers", "glue", "head", "rest", "bf16 step", "bf16 layers", "bf16 rest")  # fmt: skip
    found = []
    for batch in (8, 32, 64):
        if (row := step_parts("7B", batch)) is None:
            continue
        row |= {
            "sequences": batch,
            "floor": SEVEN_B_LAYERS * products[batch]["floor_us"] / 1e3 + row["head"],
            "products": SEVEN_B_LAYERS * products[batch]["ours_lora_us"] / 1e3,
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
        if row := step_parts(model, batch):
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


def decode_text() -> str:
    found = decode_rows()
    lines = [
        "| sequences | step | floor | products alone | layers without attention | of it norms, SwiGLU | head, at least | rest | bf16 step | bf16 layers | bf16 rest |",
        "|" + "---:|" * len(found[0]),
    ]
    for row in found:
        lines.append(f"| {row['sequences']} | " + " | ".join(f"{row[n]:.2f}" for n in list(row)[1:]) + " |")
    above = {name: r["ours_us"] - r["floor_us"] for name, r in matrices().items()}
    adapter = sum(r["ours_lora_us"] - r["ours_us"] for r in matrices().values()) * SEVEN_B_LAYERS / 1e3
    hidden = len(above) * min(above.values()) * SEVEN_B_LAYERS / 1e3
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


# --- where, natural ------------------------------------------------------------------------------------------------------------------

SIZES = (64, 128, 192, 256, 384, 512)
UNITS = "units of 256 columns (decode, matrix units)"
UNTIMED = ((176, 3), (208, 3), (272, 2), (288, 2))  # tiles of `wide` that are newer than the measurement
COMPUTE = 256  # from so many tokens on, the floor of all of these matrices is the matrix units' time
NATURAL_SIZES = (128, 256, 272, 320, 384, 448, 512)
PARTS = {  # column -> terms
    "launches": ("launch",),
    UNITS: ("units", "units of tokens that are not", "GFLOP", "rounds"),
    "ends of tiles, cut tiles": ("tiles", "pieces", "split", "shares"),
    "weights, x, y beside": ("MB of weights", "MB of x", "MB of y", "weights"),
    "x A^T": ("MFLOP of x A^T", "rounds of x A^T"),
}


def parts(row: dict, sms: int) -> tuple[float, dict[str, float]]:
    """Microseconds timed of the candidate that the model chooses for one matrix, and the model's parts of its time."""
    place = row["N"], row["K"], row["M"], sms, row["rows"]
    priced = [c for c in row["candidates"] if known(c["config"]) and cost.variant(c["config"]) in cost.factors()]
    chosen = min(priced, key=lambda c: cost.predicted_us(c["config"], *place))
    own, values = cost.factors()[cost.variant(chosen["config"])], cost.terms(chosen["config"], *place)
    return chosen["us"], {
        part: sum(own.get(name, 0.0) * values.get(name, 0.0) for name in names) for part, names in PARTS.items()
    }


def sums(result: dict) -> list[tuple[str, int, dict[str, float]]]:
    """(model, tokens, microseconds by column) of the four products."""
    lines = []
    rows = latest(result["matrices"])
    models = dict.fromkeys(row["matrix"].rpartition(".")[0] for row in rows)
    for model in models:
        for M in SIZES:
            four = [r for r in rows if r["M"] == M and r["matrix"].startswith(model + ".")]
            if len(four) != 4:
                continue
            found = [parts(row, result["multiprocessors"]) for row in four]
            columns = {
                "floor": sum(floor_us(row["N"], row["K"], M) for row in four),
                "bf16": sum(row["bf16_us"] for row in four),
                "ours": sum(us for us, _ in found),
                "predicted": sum(sum(each.values()) for _, each in found),
            }
            lines.append((model, M, columns | {part: sum(each[part] for _, each in found) for part in PARTS}))
    return lines


def where_table(found: list[tuple[str, int, dict[str, float]]]) -> list[str]:
    lines = [f"| model | tokens | {' | '.join(found[0][2])} |", "|---|" + "---:|" * (5 + len(PARTS))]
    for model, M, columns in found:
        lines.append(f"| {model} | {M} | " + " | ".join(f"{us:.0f}" for us in columns.values()) + " |")
    return lines


def too_short(found: list[tuple[str, int, dict[str, float]]]) -> str:
    """Where the fitted units take less than the matrix units can."""
    many = [(model, M, row[UNITS], row["floor"]) for model, M, row in found if M >= COMPUTE]
    short = [f"{units:.0f} of {floor:.0f} for {model} at {M}" for model, M, units, floor in many if units < floor]
    if not short:
        return ""
    return (
        f"From {COMPUTE} tokens on the floor is what the matrix units need at their peak, and nothing can be below it. In {len(short)} of {len(many)} rows "
        f"the units' column is: {', '.join(short)} (microseconds). Part of their time stands in other columns there: least squares do not tell terms "
        "apart that grow together, and a column is not to be trusted to a tenth of the sum."
    )


def steps(layers: list[dict], found: list[tuple[str, int, dict[str, float]]], model: str = "7B") -> str:
    """What the widths of tiles do to a layer's time, and what finer ones could win at the most."""
    us = {row["M"]: row["ours_us"] for row in layers if row["model"] == model}
    prices = " ".join(cost.factors())
    new = [(BM, P) for BM, P in UNTIMED if f"wide BM={BM} P={P} " not in prices]
    narrow, wide = sorted({BM for BM, *_ in cost.WGMMA}), sorted({BM for BM, _ in set(cost.WIDE) - set(new)})
    others = [f"{BM} tokens by {64 * P} rows" for BM, P in new]
    untimed = (
        f" Compiled and tested without a GPU, but not timed, so without a price: `wide` with tiles of {', '.join(others)}."
        if others
        else ""
    )
    finer = next(row for name, M, row in found if (name, M) == (model, 64))

    def at(*tokens: int) -> str:
        return ", ".join(f"{us[M]:.0f} at {M}" for M in tokens)

    edges = "; ".join(f"{us[M]:.0f} to {us[M + 8]:.0f} from {M} to {M + 8} tokens" for M in (64, 256, 384))
    return (
        f"**Tiles of tokens.** `wgmma` has tiles of {', '.join(map(str, narrow))} tokens, `wide` of {', '.join(map(str, wide[:-1]))} and {wide[-1]}: between "
        f"{narrow[0]} and {wide[0]} there are only powers of two. So 24 tokens cost what 32 do, and 40 and 48 nearly what 64 do: a layer of {model} takes "
        f"{at(24, 32)}, then {at(40, 48, 56, 64)} us. It jumps where the next tile begins: {edges}. Finer tiles between 16 and 64 tokens were not built. At "
        f"40 tokens one could win at the most what is between 32 and 40 now, {us[40] - us[32]:.0f} of {us[40]:.0f} us, since no tile of 40 would be faster "
        f"than that of 32, and only in the units of the table: at 64 tokens they are {finer[UNITS]:.0f} of {finer['ours']:.0f} us, of which decoding does "
        f"not become less with the tile.{untimed}"
    )


def natural_order(result: dict) -> str:
    """What x in its natural order gains: four products relative to bf16, the fastest candidates without it and with it, of one run each."""
    by_commit: dict[tuple, list[dict]] = {}
    for row in result["matrices"]:
        if row["M"] in NATURAL_SIZES:
            by_commit.setdefault((row["matrix"].rpartition(".")[0], row["M"], row.get("commit", "")), []).append(row)
    found: dict[str, dict[int, str]] = {}
    commits = []
    for (model, M, commit), four in by_commit.items():
        if len(four) == 4 and any(c["config"].get("natural") for row in four for c in row["candidates"]):
            bf16 = sum(row["bf16_us"] for row in four)
            best = [
                sum(min(c["us"] for c in row["candidates"] if also or not c["config"].get("natural")) for row in four)
                for also in (False, True)
            ]
            found.setdefault(model, {})[M] = " -> ".join(f"{bf16 / us:.2f}" for us in best)
            commits.append(commit[:7])
    sizes = [M for M in NATURAL_SIZES if any(M in of for of in found.values())]
    lines = [f"| model | {' | '.join(map(str, sizes))} |", "|---|" + "---:|" * len(sizes)]
    lines += [f"| {model} | {' | '.join(of.get(M, '') for M in sizes)} |" for model, of in found.items()]
    tiles = sorted({name.partition(" natural")[0] for name in cost.factors() if "natural=1" in name})
    return (
        "\n".join(lines)
        + f"\n\nA layer's four products relative to cuBLAS bf16 (adapter of rank 32 in ours alone), by number of tokens: the fastest candidates without `natural` -> with it. Priced, and so "
        f"selected where they are fastest: {', '.join(f'`{name}`' for name in tiles)}; the other tiles with `natural` were not timed, or won nothing. {result['device']}, commit {', '.join(dict.fromkeys(commits))}.\n"
    )


def where_text(result: dict) -> str:
    about = (
        "Microseconds of the four products of a layer, adapter of rank 32 in ours, none in bf16; the columns from the seventh on are the fitted model's "
        f"parts of `predicted`, which is of the candidates that it chooses. {result['device']}, torch {result['torch']}, triton {result['triton']}, commit "
        f"{', '.join(dict.fromkeys(run['commit'][:7] for run in (result, *result.get('more', ()))))}."
    )
    layers = json.loads(LAYERS.read_text())
    runs = ", ".join(dict.fromkeys(run["commit"][:7] for run in layers["runs"]))
    found = sums(result)
    below = f"{steps(layers['layers'], found)} Layers of `results/{LAYERS.name}`, commit {runs}."
    return "\n\n".join(filter(None, ["\n".join(where_table(found)), about, too_short(found), below])) + "\n"


# --- w4a8 ----------------------------------------------------------------------------------------------------------------------------

WANTED = {256: 1.25, 512: 1.4}  # times cuBLAS bf16, by number of tokens


def w4a8_rows(result: dict) -> list[dict]:
    """Microseconds of the four products, what halved matrix time would leave, and what of it is neither matrix units nor adapter."""
    sums = {r["M"]: r for r in result["sums"] if r["model"] == "7B"}
    found = []
    for tokens, wanted in WANTED.items():
        row = sums[tokens]
        halved = row["ours_lora_us"] - row["floor_us"] / 2
        found.append(
            {
                "tokens": tokens,
                "floor": row["floor_us"],
                "bf16": row["bf16_us"],
                "ours": row["ours_us"],
                "with adapter": row["ours_lora_us"],
                "halved": halved,
                "ratio": row["bf16_us"] / halved,
                "wanted": wanted,
                "adapter": row["ours_lora_us"] - row["ours_us"],
                "other": row["ours_us"] - row["floor_us"],
            }
        )
    return found


def verdict(row: dict) -> str:
    """What the arithmetic says of a number of tokens, before the decode has become any dearer."""
    ratio, wanted = f"{row['ratio']:.2f}", f"{row['wanted']:g}"
    if row["ratio"] < row["wanted"]:
        return f"at {row['tokens']} tokens the arithmetic gives {ratio} where {wanted} was wanted: out of reach of today's tiles and adapter"
    return (
        f"at {row['tokens']} tokens it gives {ratio} where {wanted} was wanted, which leaves {row['ratio'] / row['wanted'] - 1:.0%} for what makes the "
        "decode dearer"
    )


def w4a8_text(result: dict) -> str:
    lines = [
        "| tokens | matrix units in bf16 at their peak (floor) | cuBLAS bf16 | ours | ours with adapter | if matrix time halved and all else stayed | "
        "that, against cuBLAS bf16 | wanted |",
        "|" + "---:|" * 8,
    ]
    found = w4a8_rows(result)
    for row in found:
        us = [f"{row[name]:.0f}" for name in ("tokens", "floor", "bf16", "ours", "with adapter", "halved")]
        lines.append(f"| {' | '.join([*us, format(row['ratio'], '.2f'), format(row['wanted'], 'g')])} |")
    most = found[-1]
    lines += [
        "",
        f"Microseconds of a layer's four matrices of 7B. {result['device']}, torch {result['torch']}, triton {result['triton']}, commit "
        f"{result['commit'][:7]}. The last three columns are arithmetic, not a measurement: half of the floor taken off ours with the adapter. What is "
        f"bounded by something else stays: {most['other']:.0f} of {most['with adapter']:.0f} us at {most['tokens']} tokens are neither matrix units nor "
        f"adapter (what of the decode is not hidden, launches, ends of tiles), {most['adapter']:.0f} are the adapter, which stays in bf16. Before the decode "
        f"has become any dearer, {'; '.join(verdict(row) for row in reversed(found))}.",
    ]
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with every table in its place."""
    sizes, products = (json.loads((RESULTS / name).read_text()) for name in ("every_size_h200.json", "h200.json"))
    tables = {
        "decode": decode_text(),
        "prefetch": prefetched(),
        "where": where_text(sizes),
        "natural": natural_order(sizes),
        "w4a8": w4a8_text(products),
    }
    for name, text in tables.items():
        page = placed(
            page, f"<!-- {name}: written by benchmarks/how_it_works.py -->\n", f"<!-- end of {name} -->\n", text
        )
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print(written(PAGE.read_text()))
