"""What FP8 activations could win at the most, by measurements that are committed: no GPU is needed, and no kernel of that kind was written.

    python kernels/benchmarks/w4a8.py [--page kernels/HOW_IT_WORKS.md]      prints the table, or writes it into the page

A layer's four matrices of 7B in `h200.json`.  At these numbers of tokens the floor is what the matrix units need at their peak; half of it is
taken off ours with the adapter, as if products in FP8 took half of the time and all else stayed.
"""

import argparse
import json
from pathlib import Path

from pages import placed

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "h200.json"
PAGE = HERE.parent / "HOW_IT_WORKS.md"
BEGIN, END = "<!-- w4a8: written by benchmarks/w4a8.py -->\n", "<!-- end of w4a8 -->\n"
WANTED = {256: 1.25, 512: 1.4}  # times cuBLAS bf16, by number of tokens


def rows(result: dict) -> list[dict]:
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


def text(result: dict) -> str:
    lines = [
        "| tokens | matrix units in bf16 at their peak (floor) | cuBLAS bf16 | ours | ours with adapter | if matrix time halved and all else stayed | "
        "that, against cuBLAS bf16 | wanted |",
        "|" + "---:|" * 8,
    ]
    found = rows(result)
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


def written(page: str, result: dict) -> str:
    """The page with the table in its place."""
    return placed(page, BEGIN, END, text(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    result = json.loads(RESULT.read_text())
    if args.page:
        args.page.write_text(written(args.page.read_text(), result))
    else:
        print(text(result), end="")


if __name__ == "__main__":
    main()
