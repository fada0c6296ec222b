"""What is expected on GPUs that nobody has measured: a decoder layer's four matrices, by the arithmetic of qerl_nvfp4/bounds.py.

    python kernels/benchmarks/expected.py [--model 7B] [--page kernels/HOW_IT_WORKS.md]      prints the tables, or writes them into the page
    python kernels/benchmarks/expected.py --measure --out mma.json [--seconds 300]           times the mma kernel on this GPU

`--measure` runs the kernel for Ampere and Ada on whatever GPU there is, without and with an adapter of rank 32, beside the dense path, what is
selected, and cuBLAS bf16: each candidate of `bounds.mma_candidates` is compared with the reference before it is timed, in CUDA graph replays
over rotating weights.  `bounds_us` in a row are those of the fastest candidate on this GPU, where its figures are known (`HERE`).
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from pages import placed

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch-ext"))

from qerl_nvfp4 import bounds, select, timing, tune

SIZES = (24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
RANK = 32
PAGE = Path(__file__).resolve().parents[1] / "HOW_IT_WORKS.md"
BEGIN, END = "<!-- expected: written by benchmarks/expected.py -->\n", "<!-- end of expected -->\n"
SHARED_KIB = {(8, 0): 163}  # of a block, on the cards of bounds.CARDS; 99 on all others
#: of mma.sync on Hopper no figure of NVIDIA's is known: half of what wgmma does is assumed
HERE = {
    "H200": bounds.Card("H200", (9, 0), 132, 1.83, 4800, 1024, 228),
    "H100": bounds.Card("H100", (9, 0), 132, 1.83, 3350, 1024, 228),
}


def expected(card: bounds.Card, model: str, M: int) -> dict:
    """Microseconds of the four matrices: the floor, as selected, dense, bf16; and what bounds the largest of them, by which kernel."""
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
    """One row per card: at each number of tokens the share of the floor, and cuBLAS bf16 over ours."""
    lines = [
        "| card | " + " | ".join(str(M) for M in SIZES) + " |",
        "|---|" + "---:|" * len(SIZES),
    ]
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
        f"Share of the floor, and cuBLAS bf16 over ours, for the four matrices of a {model} layer without adapter, by number of tokens. **Expected, "
        f"not measured**: the largest of what a product's bytes, instructions and matrix units need at the least, divided by {bounds.OURS} for the mma "
        f"kernel, {bounds.LIBRARY} for cuBLAS and {bounds.STREAM} for what streams; {bounds.LAUNCH_US:g} us per launch and {bounds.START_US:g} us per "
        "round of programs. The divisors are assumptions."
    )
    return "\n".join([about, "", *table(model)]) + "\n"


def written(page: str, model: str) -> str:
    """The page with these tables in their place."""
    return placed(page, BEGIN, END, text(model))


# --- on a GPU -------------------------------------------------------------------------------------------------------------------------


def measured(model: str, name: str, N: int, K: int, deadline: float) -> list[dict]:
    """Rows of one matrix, one per number of tokens that there was time for."""
    properties = torch.cuda.get_device_properties(0)
    card = next((c for key, c in HERE.items() if key in properties.name), None)
    sms, shared = properties.multi_processor_count, select.shared_memory_limit(0)
    matrix = tune.Matrix(N, K, tune.layer_splits(model).get((N, K)), properties.L2_cache_size, RANK)
    weights = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(max(2, matrix.copies // 4))]
    rows = []
    for M in SIZES:
        if time.time() > deadline:
            print(f"# time is up before {name} at {M} tokens", flush=True)
            break
        tried = [c for c in bounds.mma_candidates(N, K, M, sms, shared) if c["SK"] in (1, 2, 3, 4, 7)]
        if card is not None:
            tried = sorted(tried, key=lambda c: bounds.mma_us(card, c, N, K, M))[:8]
        now = select.with_adapter(select.choose(N, K, M, 0, True, 32, len(matrix.splits or (N,))))
        row = {"model": model, "matrix": name, "N": N, "K": K, "M": M, "selected": now}
        for adapter in (False, True):
            timed = matrix.time([*tried, {"kernel": "dense", "pieces": 1}, now], M, adapter, time.time() + 60)
            ours = [(us, c) for us, c in timed if c["kernel"] == "mma"]
            if not ours:
                row["failed"] = "no candidate of the mma kernel was right"
                break
            key = "_lora_us" if adapter else "_us"
            row["mma" + key], row["mma"] = round(ours[0][0], 2), ours[0][1]
            row |= {f"{c['kernel']}{key}": round(us, 2) for us, c in timed if c["kernel"] == "dense"}
            row["selected" + key] = next((round(us, 2) for us, c in timed if c == now), None)
            if not adapter and card is not None:
                busy = bounds.mma_bounds(card, ours[0][1], N, K, M)
                row["bounds_us"] = {what: round(us, 2) for what, us in busy.items()}
        x, out = matrix.problem(M)
        row["bf16_us"] = round(
            timing.time_us(lambda i, x=x, y=out: torch.mm(x, weights[i].t(), out=y), len(weights)), 2
        )
        print(row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7B")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("mma.json"))
    parser.add_argument("--seconds", type=float, default=300)
    args = parser.parse_args()
    if args.page:
        args.page.write_text(written(args.page.read_text(), args.model))
        return
    if not args.measure:
        print(text(args.model), end="")
        return
    if not torch.cuda.is_available():
        raise SystemExit("expected.py --measure times a GPU, and there is none")
    import triton
    from compare import commit

    result = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "command": f"expected.py --measure --model {args.model} --seconds {args.seconds:g}",
        "lora_rank": RANK,
        "rows": [],
    }
    begin, shapes = time.time(), tune.layer_shapes(args.model)
    for i, (name, (N, K)) in enumerate(shapes.items()):
        result["rows"] += measured(args.model, name, N, K, begin + args.seconds * (i + 1) / len(shapes))
        lines = ",\n".join("  " + json.dumps(row) for row in result["rows"])
        head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)[:-2]
        temporary = args.out.with_suffix(".tmp")
        temporary.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')
        os.replace(temporary, args.out)
        torch.cuda.empty_cache()
    sys.exit(any("failed" in row for row in result["rows"]))


if __name__ == "__main__":
    main()
