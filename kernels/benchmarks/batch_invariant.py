"""What the batch-invariant mode costs: a decoder layer's products by what is selected and by the mode, in turns, with an adapter of rank 32.

    python kernels/benchmarks/batch_invariant.py --out batch_invariant.json --seconds 240 [--models 7B,1.5B] [--sizes 1,8,64,512,4096]
    python kernels/benchmarks/batch_invariant.py --out results/batch_invariant_h200.json --page kernels/HOW_IT_WORKS.md    only writes its table

Layers run as in every_size.py: RMSNorm, q/k/v, o, RMSNorm, gate/up, SwiGLU, down in one CUDA graph over rotating layers, without attention.
`selected_us` and `invariant_us` are whole layers, `bf16_us` the same by cuBLAS bf16 without an adapter, `glue_us` without products;
`cost` = invariant_us / selected_us, `ratio` = bf16_us / invariant_us.

Before a size is timed, each of its four products is compared with the reference, and its rows bit for bit with the same rows alone and in the
largest batch; what fails is named in `failed`, and nothing is timed for that size.  `others` counts, for the products as they are selected,
how many values differ between a row in this batch and the same row alone: what the mode is for.
`--dry-run` runs all of it on a CPU in Triton's interpreter (TRITON_INTERPRET=1), with tiny matrices, and times nothing worth reading.
"""

import argparse
import functools
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch-ext"))

from compare import commit
from every_size import RANK, TINY, Layers, shipped, times_us, write
from pages import placed

import qerl_nvfp4
from qerl_nvfp4 import ops, precompile, reference, select, timing, tune

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 1024, 2048, 4096)
BEGIN, END = "<!-- batch_invariant: written by benchmarks/batch_invariant.py -->\n", "<!-- end of batch_invariant -->\n"
CHECKED = 512  # rows of a weight that are compared with the reference


class Products:
    """A layer's four matrices by the mode, or by what is selected."""

    def __init__(self, model: str, l2: int, device: str) -> None:
        self.layers = Layers(model, l2, device)
        self.device = device
        generator = torch.Generator(device=device).manual_seed(0)
        largest = max(K for _, K in self.layers.shapes.values())
        self.tokens = torch.randn(max(SIZES), largest, device=device, dtype=torch.bfloat16, generator=generator)
        self.whole: dict[str, torch.Tensor] = {}

    def product(self, invariant: bool, i: int, name: str, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        layers = self.layers
        N, K = layers.shapes[name]
        arguments = (x, *layers.packed[i][name], layers.gs, None, *layers.adapters[i][name], layers.splits.get((N, K)))
        if invariant:
            ops.product_in_any_batch(*arguments, out)
        else:
            ops.product(shipped(N, K, x.shape[0], layers.adapters[i][name][0].shape[0]), *arguments, out)
        return out

    def rows(self, invariant: bool, name: str, rows: slice) -> torch.Tensor:
        N, K = self.layers.shapes[name]
        x = self.tokens[rows, :K].contiguous()
        return self.product(invariant, 0, name, x, torch.full((len(x), N), float("nan"), device=self.device).bfloat16())

    def problem(self, name: str, M: int, largest: int) -> str:
        """What is wrong with the mode at M tokens; "": nothing."""
        if name not in self.whole:
            self.whole = {name: self.rows(True, name, slice(0, largest))}
        y, (N, K), layers = self.rows(True, name, slice(0, M)), self.layers.shapes[name], self.layers
        some = torch.randperm(N, device=self.device)[:CHECKED]
        packed, scale = layers.packed[0][name]
        a, b = layers.adapters[0][name]
        x = self.tokens[:M, :K].float()
        exact = x @ reference.dequantize(packed[some], scale[some], layers.gs, torch.float32).T
        exact += reference.lora(x, a.float(), b.float(), layers.splits.get((N, K)))[:, some]
        if not (error := timing.relative_error(y[:, some], exact)) < tune.TOLERANCE:
            return f"{name}: relative error {error:.1e}"
        if not torch.equal(y, self.whole[name][:M]):
            return (
                f"{name}: {int((y != self.whole[name][:M]).sum())} of {y.numel()} values differ from {largest} tokens'"
            )
        for m in {0, M // 2, M - 1}:
            if not torch.equal(self.rows(True, name, slice(m, m + 1))[0], y[m]):
                return f"{name}: row {m} alone differs"
        return ""

    def differing(self, name: str, M: int) -> int:
        """Values of the first row that are others when it stands alone, as products are selected by speed."""
        return int((self.rows(False, name, slice(0, M))[0] != self.rows(False, name, slice(0, 1))[0]).sum())

    def call(self, M: int, invariant: bool):
        layers = self.layers
        x = torch.randn(M, layers.hidden, device=self.device, dtype=torch.bfloat16)
        outs = {n: torch.empty(M, N, device=self.device, dtype=torch.bfloat16) for n, (N, _) in layers.shapes.items()}

        def product(i: int, name: str, x: torch.Tensor) -> torch.Tensor:
            return self.product(invariant, i, name, x, outs[name])

        return lambda i: layers.run(x, functools.partial(product, i))


def rows_of(model: str, sizes: list[int], l2: int, device: str, deadline: float) -> tuple[list[dict], list[dict]]:
    """(a row per size that is right, what is wrong with others)."""
    products, rows, failed = Products(model, l2, device), [], []
    shapes = products.layers.shapes
    wrong = {M: [] for M in sizes}
    for name in shapes:  # name by name: the largest product of one is kept
        for M in sizes:
            if problem := products.problem(name, M, max(sizes)):
                wrong[M].append(problem)
    products.whole = {}
    for M in sizes:
        if wrong[M]:
            failed.append({"model": model, "M": M, "problems": wrong[M]})
            print("# WRONG", failed[-1], flush=True)
            continue
        if time.time() > deadline:
            print(f"# time is up before {model} M={M}", flush=True)
            break
        layers = products.layers
        calls = [products.call(M, False), products.call(M, True), layers.call(M, None), layers.call(M, {})]
        chosen, invariant, bf16, glue = times_us(calls, layers.copies, 5, 4)
        rows.append(
            {
                "model": model,
                "M": M,
                "selected_us": round(chosen, 2),
                "invariant_us": round(invariant, 2),
                "bf16_us": round(bf16, 2),
                "glue_us": round(glue, 2),
                "cost": round(invariant / chosen, 3),
                "ratio": round(bf16 / invariant, 3),
                "others": {n: products.differing(n, M) for n in shapes},
            }
        )
        print(rows[-1], flush=True)
    return rows, failed


def written(page: str, result: dict) -> str:
    """The page with microseconds of a decoder layer by what is selected and in the batch-invariant mode."""
    lines = [
        "| model | tokens | selected us | batch-invariant us | that, times selected | bf16 / batch-invariant |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for r in result["layers"]:
        times = f"{r['selected_us']:.1f} | {r['invariant_us']:.1f} | {r['cost']:.2f} | {r['ratio']:.2f}"
        lines.append(f"| {r['model']} | {r['M']} | {times} |")
    failed = [f"{f['model']} at {f['M']} tokens" for f in result["failed"]]
    lines += ["", f"Not bit-equal, and not timed: {', '.join(failed)}."] if failed else []
    about = (
        f"A decoder layer without its attention, norms and SwiGLU included, CUDA graph replays over rotating weights; rank-{result['lora_rank']} "
        f"adapter inside ours, none in bf16. Each size was compared bit for bit before it was timed. {result['device']}, torch {result['torch']}, "
        f"triton {result['triton']}, commit {result['commit'][:7]}."
    )
    return placed(page, BEGIN, END, "\n".join([*lines, "", about]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="batch_invariant.json")
    parser.add_argument("--models", default="7B,1.5B,32B")
    parser.add_argument("--sizes", default="", help="numbers of tokens")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--page", type=Path, help="into which only the table is written, from --out")
    args = parser.parse_args()
    if args.page:
        args.page.write_text(written(args.page.read_text(), json.loads(Path(args.out).read_text())))
        return
    begin, on_gpu = time.time(), torch.cuda.is_available()
    if args.dry_run:
        tune.MODELS["tiny"] = TINY
        args.models, args.sizes = "tiny", args.sizes or "1,3,20"
        ops._batch_invariant = lambda N, K, M, index, dtype: select.batch_invariant(N, K, M, 132, False, False, 1 << 17)
        ops.device_properties = lambda index: ("no GPU", 132, (9, 0))
    elif not on_gpu:
        raise SystemExit("batch_invariant.py times a GPU, and there is none; --dry-run shows on a CPU that it works")
    sizes = [int(m) for m in args.sizes.split(",")] if args.sizes else list(SIZES)
    device, l2 = ("cuda", torch.cuda.get_device_properties(0).L2_cache_size) if on_gpu else ("cpu", 1)
    import triton

    result = {
        "device": torch.cuda.get_device_name(0) if on_gpu else "CPU, a dry run",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "command": " ".join(["batch_invariant.py", *(Path(a).name if "/" in a else a for a in sys.argv[1:])]),
        "lora_rank": RANK,
        "failed": [],
        "layers": [],
    }
    print("#", qerl_nvfp4.describe(), flush=True)
    for model in args.models.split(","):
        if time.time() > begin + args.seconds:
            print(f"# time is up before {model}")
            break
        if on_gpu:
            splits = tune.layer_splits(model)
            weights = [
                precompile.Weight(N, K, tuple(splits.get((N, K), (N,))), RANK)
                for N, K in tune.layer_shapes(model).values()
            ]
            for mode in (True, False):
                precompile.precompile(weights, sizes, batch_invariant=mode)
        rows, failed = rows_of(model, sizes, l2, device, begin + args.seconds)
        result["layers"] += rows
        result["failed"] += failed
        write(args.out, result)
        if on_gpu:
            torch.cuda.empty_cache()
    print(f"# wrote {args.out} after {time.time() - begin:.0f} s; failed: {len(result['failed'])} sizes")
    sys.exit(bool(result["failed"]))


if __name__ == "__main__":
    main()
