"""Where the time of the products goes that are chosen for many tokens: the cost model's own terms, with the factors that were fitted to measurements.

    python kernels/benchmarks/where.py results/every_size_h200.json [--page kernels/HOW_IT_WORKS.md]

For the four matrices of a decoder layer with an adapter of rank 32: what nothing could be faster than (compare.floor_us), cuBLAS bf16, ours as timed, and
what the model says of the chosen ones, by term (cost.terms).  Factors come from least squares, so a part is as good as the model is: `predicted` stands
beside what was timed, and where the units' part is below what the matrix units need at their peak, that is said.  Below that, what a step to the next
tile of tokens costs, of whole layers (layers_h200.json); and what x in its natural order gains.  No GPU is needed.
"""

import argparse
import json
from pathlib import Path

from compare import floor_us
from fit import known, latest
from pages import placed

from qerl_nvfp4 import cost

LAYERS = Path(__file__).resolve().parent / "results" / "layers_h200.json"
PAGE = Path(__file__).resolve().parents[1] / "HOW_IT_WORKS.md"
BEGIN, END = "<!-- where: written by benchmarks/where.py -->\n", "<!-- end of where -->\n"
SIZES = (64, 128, 192, 256, 384, 512)
UNITS = "units of 256 columns (decode, matrix units)"
UNTIMED = ((176, 3), (208, 3), (272, 2), (288, 2))  # tiles of `wide` that are newer than the measurement
COMPUTE = 256  # from so many tokens on, the floor of all of these matrices is the matrix units' time
NATURAL, NATURAL_END = "<!-- natural: written by benchmarks/where.py -->\n", "<!-- end of natural -->\n"
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


def table(found: list[tuple[str, int, dict[str, float]]]) -> list[str]:
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


def text(result: dict) -> str:
    about = (
        "Microseconds of the four products of a layer, adapter of rank 32 in ours, none in bf16; the columns from the seventh on are the fitted model's "
        f"parts of `predicted`, which is of the candidates that it chooses. {result['device']}, torch {result['torch']}, triton {result['triton']}, commit "
        f"{', '.join(dict.fromkeys(run['commit'][:7] for run in (result, *result.get('more', ()))))}."
    )
    layers = json.loads(LAYERS.read_text())
    runs = ", ".join(dict.fromkeys(run["commit"][:7] for run in layers["runs"]))
    found = sums(result)
    below = f"{steps(layers['layers'], found)} Layers of `results/{LAYERS.name}`, commit {runs}."
    return "\n\n".join(filter(None, ["\n".join(table(found)), about, too_short(found), below])) + "\n"


def written(page: str, result: dict) -> str:
    """The page with the tables in their places."""
    return placed(placed(page, BEGIN, END, text(result)), NATURAL, NATURAL_END, natural_order(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    result = json.loads(args.result.read_text())
    if args.page:
        args.page.write_text(written(args.page.read_text(), result))
    else:
        print(text(result), end="")


if __name__ == "__main__":
    main()
