"""Expected times of a layer's four matrices on unmeasured GPUs, by qerl_nvfp4/bounds.py.

python kernels/benchmarks/expected.py [--model 7B]      # prints the tables of HOW_IT_WORKS.md
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch-ext"))

from qerl_nvfp4 import bounds, tune

SIZES = (24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SHARED_KIB = {(8, 0): 163}  # per block, on the cards of bounds.CARDS; 99 elsewhere


def expected(card: bounds.Card, model: str, M: int) -> dict:
    """Microseconds of the four matrices (floor, as selected, dense, bf16), and the bound of the largest."""
    shared = SHARED_KIB.get(card.capability, 99) * 1024
    sums = {"floor": 0.0, "ours": 0.0, "dense": 0.0, "bf16": 0.0}
    for name, (N, K) in tune.layer_shapes(model).items():
        config = bounds.priced(card, N, K, M, shared)[0][1]
        dense = bounds.dense_us(card, N, K, M)
        mma = config["kernel"] == "mma"
        sums["floor"] += bounds.floor_us(card, N, K, M)
        sums["ours"] += bounds.mma_us(card, config, N, K, M) if mma else dense
        sums["dense"] += dense
        sums["bf16"] += bounds.bf16_us(card, N, K, M)
        if name == "gate_up":
            busy = bounds.mma_bounds(card, config, N, K, M) if mma else {}
            by = max(busy, key=busy.__getitem__) if mma else "dense path"
    return sums | {"bound": by}


def table(model: str) -> list[str]:
    """One row per card: share of the floor and speed relative to cuBLAS bf16, per token count."""
    lines = ["| card | " + " | ".join(str(M) for M in SIZES) + " |", "|---|" + "---:|" * len(SIZES)]
    named = []
    for card in bounds.CARDS:
        rows = [expected(card, model, M) for M in SIZES]
        cells = (f"{r['floor'] / r['ours']:.0%}, {r['bf16'] / r['ours']:.2f}" for r in rows)
        lines.append(f"| {card.name} | " + " | ".join(cells) + " |")
        changes = [f"{rows[0]['bound']} from {SIZES[0]} tokens"]
        changes += [
            f"{b['bound']} from {M}"
            for a, b, M in zip(rows, rows[1:], SIZES[1:], strict=False)
            if a["bound"] != b["bound"]
        ]
        named.append(f"{card.name}: {', '.join(changes)}")
    return [*lines, "", f"What bounds gate/up, the largest matrix: {'; '.join(named)}."]


def text(model: str) -> str:
    about = (
        f"Share of the floor, and cuBLAS bf16 over ours, for the four matrices of a {model} layer without adapter, by "
        "number of tokens. **Expected, not measured**: the largest of what a product's bytes, instructions and matrix "
        f"units need at the least, divided by {bounds.OURS} for the mma kernel, {bounds.LIBRARY} for cuBLAS and "
        f"{bounds.STREAM} for what streams; {bounds.LAUNCH_US:g} us per launch and {bounds.START_US:g} us per round of "
        "programs. The divisors are assumptions."
    )
    return "\n".join([about, "", *table(model)]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7B")
    print(text(parser.parse_args().model), end="")
