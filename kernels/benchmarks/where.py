"""Where the time of the products goes that are chosen for many tokens: the cost model's own terms, with the factors that were fitted to measurements.

    python kernels/benchmarks/where.py results/every_size_h200.json [--page kernels/HOW_IT_WORKS.md]

For the four matrices of a decoder layer with an adapter of rank 32: what nothing could be faster than (compare.floor_us), cuBLAS bf16, ours as timed, and
what the model says of the chosen ones, by term (cost.terms).  Factors come from least squares, so a part is as good as the model is: `predicted` stands
beside what was timed.  No GPU is needed.
"""

import argparse
import json
from pathlib import Path

from compare import floor_us
from fit import known, latest

from qerl_nvfp4 import cost

PAGE = Path(__file__).resolve().parents[1] / "HOW_IT_WORKS.md"
BEGIN, END = "<!-- where: written by benchmarks/where.py -->\n", "<!-- end of where -->\n"
SIZES = (64, 128, 192, 256, 384, 512)
PARTS = {  # column -> terms
    "launches": ("launch",),
    "units of 256 columns (decode, matrix units)": ("units", "GFLOP", "rounds"),
    "ends of tiles, cut tiles": ("tiles", "split", "shares"),
    "weights, x, y beside": ("MB of weights", "MB of x", "MB of y", "weights"),
    "x A^T": ("MFLOP of x A^T",),
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


def table(result: dict) -> list[str]:
    lines = [
        f"| model | tokens | floor | bf16 | ours | predicted | {' | '.join(PARTS)} |",
        "|---|" + "---:|" * (5 + len(PARTS)),
    ]
    rows = latest(result["matrices"])
    models = dict.fromkeys(row["matrix"].rpartition(".")[0] for row in rows)
    for model in models:
        for M in SIZES:
            four = [r for r in rows if r["M"] == M and r["matrix"].startswith(model + ".")]
            if len(four) != 4:
                continue
            found = [parts(row, result["multiprocessors"]) for row in four]
            sums = [
                sum(floor_us(row["N"], row["K"], M) for row in four),
                sum(row["bf16_us"] for row in four),
                sum(us for us, _ in found),
                sum(sum(each.values()) for _, each in found),
                *(sum(each[part] for _, each in found) for part in PARTS),
            ]
            lines.append(f"| {model} | {M} | " + " | ".join(f"{us:.0f}" for us in sums) + " |")
    return lines


def text(result: dict) -> str:
    about = (
        "Microseconds of the four products of a layer, adapter of rank 32 in ours, none in bf16; the columns from the seventh on are the fitted model's "
        f"parts of `predicted`, which is of the candidates that it chooses. {result['device']}, torch {result['torch']}, triton {result['triton']}, commit "
        f"{', '.join(run['commit'][:7] for run in (result, *result.get('more', ())))}."
    )
    return "\n".join([*table(result), "", about]) + "\n"


def written(page: str, result: dict) -> str:
    """The page with the table in its place."""
    head, _, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        raise ValueError(f"the page has no {BEGIN.strip()} and {END.strip()}")
    return head + BEGIN + text(result) + END + tail


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
