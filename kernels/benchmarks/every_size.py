"""Time of a decoder layer's four matrices at all token counts of a draining batch, for every candidate.

    python kernels/benchmarks/every_size.py --out every_size.json --seconds 220 [--models 7B,32B,...]
    python kernels/benchmarks/every_size.py --out more.json --sizes 272,512 --layer-sizes 512
    python kernels/benchmarks/every_size.py --out layers.json --layers-only          # part 3 with the shipped kernels
    python kernels/benchmarks/every_size.py --out layers.json --join A.json B.json   # layers of several such runs
    python kernels/benchmarks/every_size.py --out fp8.json --compute w4a8 --models 7B,32B,Llama-3-8B,Qwen3-8B ...

1. Compile and check every variant on a small product, in processes with a time limit. Variants that fail, hang or are
   wrong are listed and skipped.
2. For each matrix and `CANDIDATE_SIZES`, time all candidates (cost.candidates), the selected kernel and cuBLAS bf16 in
   turns, with a rank-32 adapter and rotating copies of the weights. fit.py fits the cost model to these rows.
3. For each model and multiple of 8 tokens, time a decoder layer without attention in one CUDA graph over rotating
   layers: RMSNorm, q/k/v, o, RMSNorm, gate/up, SwiGLU, down; by the selected kernels with an adapter, and by cuBLAS
   bf16 without (SwiGLU by torch.compile). `glue_us`: without products. `ratio`: of layers, `products`: less the glue.

`--compute w4a8`: its own candidates and, as "selected" and in layers (after a check of each product),
`qerl_nvfp4.linear`; quantizing x is included. `w4a16_us`: the same layers by the shipped kernels, `chosen`.
`cost_model`: digest of configs/cost_model.json; user measurements of `qerl-trl tune` are ignored. With `--layers-only`
a failed shipped variant ends the run. A product that fails its check has no time. `--dry-run` runs tiny matrices on a
CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

import argparse
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch-ext"))

from compare import SELECTED, Computed, commit, exact_w4a8, linear_w4a8

import qerl_nvfp4
from qerl_nvfp4 import cost, ops, reference, select, timing, tune
from qerl_nvfp4.launch import forget_scratch

CANDIDATE_SIZES = (
    24, 32, 48, 64, 72, 80, 96, 104, 112, 128, 160, 192, 224, 256, 264, 320, 384, 392, 448, 512, 704, 1504,
)  # fmt: skip
LAYER_SIZES = (*range(8, 513, 8), 704, 1504)
COMPILED = ("wgmma", "wide")  # kernels with variants to probe first
RANK = 32
PROBE_SECONDS = 75
TINY = (256, 256, 128, 512)


def times_us(calls: list, copies: int, repeats: int, at_least: int) -> list[float]:
    """timing.times_us, or one call each on a CPU."""
    if torch.cuda.is_available():
        return timing.times_us(calls, copies, repeats, at_least)
    found = []
    for call in calls:
        begin = time.perf_counter()
        call(0)
        found.append((time.perf_counter() - begin) * 1e6)
    return found


def rows_of(model: str, N: int, K: int) -> int:
    """Rows of the stacked A of a matrix of a model."""
    return RANK * len(tune.layer_splits(model).get((N, K), (N,)))


def multiprocessors() -> int:
    return select.device_properties(None)[1] if torch.cuda.is_available() else 132


def shipped(N: int, K: int, M: int, rows: int) -> dict:
    """Shipped configuration for an adapter with this number of rows of A; ignores user tuning."""
    if not torch.cuda.is_available():
        return {"kernel": "dense"}
    return select.explain(N, K, M, torch.cuda.current_device(), True, RANK, rows // RANK, own=False)[0]


# --- 1: which variants work -----------------------------------------------------------------------


def probe(config: dict) -> str:
    """Reason to reject a variant, or "". Two shapes, shared and unshared tiles, an adapter of two shards."""
    torch.manual_seed(0)
    for grid, M in ((5, config["BM"] + 19), (132, config["BM"] - 3)):
        N, K = 640, 1024
        packed, scale = timing.random_weight(N, K, 0)
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
        a = torch.randn(2 * RANK, K, device="cuda", dtype=torch.bfloat16) / math.sqrt(K)
        b = torch.randn(N, RANK, device="cuda", dtype=torch.bfloat16)
        gs, splits, out = torch.tensor([2048.0], device="cuda"), (384, 256), torch.empty(M, N, device="cuda").bfloat16()
        if config.get("fp8"):
            exact = exact_w4a8(x, (packed, scale), gs)
        else:
            exact = x.float() @ reference.dequantize(packed, scale, gs, torch.float32).T
        exact += reference.lora(x.float(), a.float(), b.float(), splits)
        try:
            for _ in range(2):
                out.fill_(float("nan"))
                ops.product(config | {"grid": grid}, x, packed, scale, gs, None, a, b, splits, out)
                torch.cuda.synchronize()
                error = timing.relative_error(out, exact)
                if not error < tune.TOLERANCE:
                    return f"relative error {error:.1e} with {M} tokens on {grid} programs"
        except tune.FAILURES as failure:
            return f"{type(failure).__name__}: {str(failure)[-200:]}"
    return ""


def usable_variants(configs: list[dict], seconds: float) -> tuple[set[str], dict[str, str]]:
    """Variants that passed, and reasons against the others; a timeout is a failure and ends the process."""
    unique = {cost.variant(c): c for c in configs if c["kernel"] in COMPILED}
    if not torch.cuda.is_available():
        return set(), {}
    deadline, good, bad = time.time() + seconds, set(), {}
    with multiprocessing.get_context("spawn").Pool(max(1, min(len(unique), (os.cpu_count() or 2) - 1))) as pool:
        waiting = {name: pool.apply_async(probe, (config,)) for name, config in unique.items()}
        for name, answer in waiting.items():
            try:
                reason = answer.get(max(0.1, deadline - time.time()))
            except multiprocessing.TimeoutError:
                reason = f"not done after {seconds:.0f} s (slow to compile, or it hangs)"
            good.add(name) if not reason else bad.setdefault(name, reason)
    return good, bad


def runs(config: dict, good: set[str]) -> bool:
    return config["kernel"] not in COMPILED or cost.variant(config) in good


# --- 2: candidates --------------------------------------------------------------------------------


def matrix_rows(matrix: Computed, name: str, sizes, good: set[str], deadline: float) -> list[dict]:
    """Microseconds of each correct candidate and of cuBLAS bf16, per size."""
    rows, (N, K), fp8 = [], (matrix.N, matrix.K), matrix.compute == "w4a8"
    device = matrix.gs.device
    dense = [
        torch.randn(N, K, device=device, dtype=torch.bfloat16) * 0.02
        for _ in range(min(matrix.copies, timing.copies_needed(N * K * 2, 50 << 20, 8)))
    ]
    lora_rows = RANK * len(matrix.splits or (N,))
    for M in sizes:
        if time.time() > deadline:
            print(f"# time is up before {name} M={M}", flush=True)
            break
        now = SELECTED if fp8 else shipped(N, K, M, lora_rows)
        tries = [now, *(c for c in cost.candidates(N, K, M, multiprocessors(), fp8) if runs(c, good))]
        if M <= 128 and K % 256 and now is not SELECTED:
            tries.append(select.portable_heuristic(N, K, M, multiprocessors(), True))
        tries = list({json.dumps(c, sort_keys=True): c for c in tries}.values())
        x, out = matrix.problem(M)
        expected, calls = matrix.expected(x, True), []
        for config in tries:
            call = matrix.call(config, x, out, True)
            try:
                error = matrix.error(call, out, expected)
            except tune.FAILURES as failure:
                print(f"# failed {name} M={M} {config}: {type(failure).__name__} {str(failure)[-150:]}", flush=True)
                forget_scratch()
                continue
            if error < tune.TOLERANCE:
                calls.append((config, call))
            else:
                print(f"# WRONG {name} M={M} {config}: relative error {error:.1e}", flush=True)
                forget_scratch()
        bf16 = functools.partial(lambda i, x, out: torch.mm(x, dense[i % len(dense)].t(), out=out), x=x, out=out)
        times = times_us([*(call for _, call in calls), bf16], matrix.copies, 3, 8)
        measured = [{"config": c, "us": round(us, 2)} for (c, _), us in zip(calls, times[:-1], strict=True)]
        measured.sort(key=lambda m: m["us"])
        row = {
            "matrix": name, "N": N, "K": K, "M": M, "rows": lora_rows, "bf16_us": round(times[-1], 2),
            "shipped_us": next((m["us"] for m in measured if m["config"] == now), None), "candidates": measured,
        }  # fmt: skip
        rows.append(row)
        if measured:
            best = measured[0]
            print(
                f"{name:18s} M={M:5d} bf16 {times[-1]:8.2f} now {rows[-1]['shipped_us'] or math.nan:8.2f} best "
                f"{best['us']:8.2f} x{times[-1] / best['us']:.2f} {tune.short(best['config'])} of {len(measured)}",
                flush=True,
            )
    return rows


# --- 3: layers ------------------------------------------------------------------------------------


class Layers:
    """Rotating decoder layers of one model: packed and bf16 weights, adapters, norms."""

    def __init__(self, model: str, l2: int, device: str):
        self.hidden, self.q, self.kv, self.inner = tune.MODELS[model]
        shapes, self.splits = tune.layer_shapes(model), tune.layer_splits(model)
        nbytes = sum(N * K for N, K in shapes.values()) * 9 // 16
        self.copies = timing.copies_needed(nbytes, l2) if device == "cuda" else 1
        self.gs = torch.tensor([2048.0], device=device)
        self.packed, self.dense, self.adapters = [], [], []
        for i in range(self.copies):
            self.packed.append({n: timing.random_weight(N, K, i, device) for n, (N, K) in shapes.items()})
            adapters = {}
            for n, (N, K) in shapes.items():
                a = torch.randn(RANK * len(self.splits.get((N, K), (N,))), K, device=device).bfloat16() / math.sqrt(K)
                adapters[n] = a, torch.randn(N, RANK, device=device, dtype=torch.bfloat16)
            self.adapters.append(adapters)
        for _ in range(min(self.copies, 8)):
            self.dense.append(
                {n: torch.randn(N, K, device=device, dtype=torch.bfloat16) * 0.02 for n, (N, K) in shapes.items()}
            )
        self.norm = torch.full((self.hidden,), 0.01, device=device)  # keeps the values of a random layer small
        self.shapes, self.device = shapes, device
        self.swiglu = torch.compile(reference.swiglu, dynamic=True) if device == "cuda" else reference.swiglu

    def run(self, x, product, wide: bool = False) -> torch.Tensor:
        """Apply `product(name, x)` for the four matrices; `wide`: as an engine does with W4A8."""
        n, h = qerl_nvfp4.rms_norm(x, self.norm, 1e-6, x, wide)
        y = product("o", product("qkv", n)[:, : self.q])
        n, h = qerl_nvfp4.rms_norm(y, self.norm, 1e-6, h, wide)
        return product("down", (qerl_nvfp4.swiglu if wide else self.swiglu)(product("gate_up", n))) + h

    def call(self, M: int, chosen: dict[str, dict] | None, errors: list[float] | None = None):
        """call(i): layer i with these configurations; None: cuBLAS bf16; {}: no products; SELECTED: W4A8 (`errors`)."""
        x = torch.randn(M, self.hidden, device=self.device, dtype=torch.bfloat16)
        outs = {n: torch.empty(M, N, device=self.device, dtype=torch.bfloat16) for n, (N, _) in self.shapes.items()}

        def product(i: int, name: str, x: torch.Tensor) -> torch.Tensor:
            out = outs[name]
            if chosen is None:
                torch.mm(x, self.dense[i % len(self.dense)][name].t(), out=out)
            splits, packed, adapter = self.splits.get(self.shapes[name]), self.packed[i][name], self.adapters[i][name]
            if chosen is SELECTED:
                out = linear_w4a8(x, packed, self.gs, adapter, splits)
                if errors is not None:
                    x = x if name == "o" else reference.wide_parts(x, self.shapes[name][1])[0]
                    errors.append(timing.relative_error(out, exact_w4a8(x, packed, self.gs, adapter, splits)))
            elif chosen:
                ops.product(chosen[name], x, *packed, self.gs, None, *adapter, splits, out)
            return out

        return lambda i: self.run(x, functools.partial(product, i), chosen is SELECTED)


def layer_rows(model: str, sizes, l2: int, deadline: float, compute: str) -> list[dict]:
    """Layers with the shipped kernels and an adapter."""
    layers = Layers(model, l2, "cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for M in sizes:
        if time.time() > deadline:
            print(f"# time is up before layers of {model} M={M}", flush=True)
            break
        chosen = {n: shipped(N, K, M, rows_of(model, N, K)) for n, (N, K) in layers.shapes.items()}
        ways = [chosen, None, {}]
        if compute == "w4a8":
            ways.insert(0, SELECTED)
            layers.call(M, SELECTED, errors := [])(0)
            if not all(error < tune.TOLERANCE for error in errors):
                print(f"# WRONG {model} M={M}: relative errors {errors}", flush=True)
                continue
        ours, *others, bf16, glue = times_us([layers.call(M, way) for way in ways], layers.copies, 3, 4)
        row = {
            "model": model, "M": M,
            "ours_us": round(ours, 2), "bf16_us": round(bf16, 2), "glue_us": round(glue, 2),
            "ratio": round(bf16 / ours, 3),
            "products": round((bf16 - glue) / (ours - glue), 3) if ours > glue else None,
            "chosen": {n: tune.short(c) for n, c in chosen.items()},
        }  # fmt: skip
        row |= {"w4a16_us": round(others[0], 2)} if others else {}
        rows.append(row)
        print({k: v for k, v in rows[-1].items() if k != "chosen"}, flush=True)
    return rows


#: fields shared by the layers of a `--layers-only` run
OF_A_RUN = ("device", "multiprocessors", "torch", "triton", "commit", "command", "lora_rank", "cost_model")


def joined(records: list[dict]) -> dict:
    """Join `runs` and `layers`: the last run of a model with all sizes replaces earlier ones."""
    runs, found = [], {}
    for record in records:
        heads = record.get("runs") or [{name: record[name] for name in OF_A_RUN}]
        of_model = {
            name: list(rows) for name, rows in itertools.groupby(record["layers"], key=lambda row: row["model"])
        }
        whole = {name: rows for name, rows in of_model.items() if {row["M"] for row in rows} >= set(LAYER_SIZES)}
        heads = [{**head, "models": [name for name in head.get("models", whole) if name in whole]} for head in heads]
        runs = [{**run, "models": [name for name in run["models"] if name not in whole]} for run in runs] + heads
        found |= whole
    return {"runs": [run for run in runs if run["models"]], "layers": [row for rows in found.values() for row in rows]}


def write(path: str, result: dict) -> None:
    """Write atomically, with one row of `matrices` and `layers` per line."""
    head, *lists = [json.dumps({k: v for k, v in result.items() if k not in ("matrices", "layers")}, indent=1)[:-2]]
    for name in ("matrices", "layers"):
        if name in result:
            lists.append(f'\n "{name}": [\n' + ",\n".join("  " + json.dumps(row) for row in result[name]) + "\n ]")
    Path(path + ".tmp").write_text(f"{','.join([head, *lists])}\n}}\n")
    os.replace(path + ".tmp", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="every_size.json")
    parser.add_argument("--join", nargs="+", type=Path, help="files of runs with --layers-only, the latest last")
    parser.add_argument("--models", default="7B,1.5B,32B,0.5B,Llama-3-8B")
    parser.add_argument("--sizes", default="", help="numbers of tokens at which all candidates are timed")
    parser.add_argument("--layer-sizes", default="", help="numbers of tokens at which layers are timed")
    parser.add_argument("--seconds", type=float, default=220)
    parser.add_argument("--layers-only", action="store_true", help="time layers by the shipped kernels, no candidates")
    parser.add_argument(
        "--probe-seconds", type=float, default=PROBE_SECONDS, help="a variant that takes longer to compile is left out"
    )
    parser.add_argument("--compute", default="w4a16", choices=("w4a16", "w4a8"))
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    if args.join:
        write(args.out, joined([json.loads(path.read_text()) for path in args.join]))
        return
    if args.layers_only and args.sizes:
        parser.error("--sizes selects candidates, and --layers-only times none: pass one of them")
    begin, on_gpu = time.time(), torch.cuda.is_available()
    tune.MODELS.setdefault("Qwen3-8B", (4096, 4096, 1024, 12288))
    if args.dry_run:
        tune.MODELS["tiny"] = TINY
        args.models, args.layer_sizes = "tiny", args.layer_sizes or "8,24"
        args.sizes = args.sizes or ("" if args.layers_only else "24,160")
    elif not on_gpu:
        raise SystemExit("No GPU found. Use --dry-run to test on a CPU")
    sizes = [int(m) for m in args.sizes.split(",")] if args.sizes else list(CANDIDATE_SIZES)
    sizes = [] if args.layers_only else sizes
    layer_sizes = [int(m) for m in args.layer_sizes.split(",")] if args.layer_sizes else list(LAYER_SIZES)
    models, sms = args.models.split(","), multiprocessors()
    l2 = torch.cuda.get_device_properties(0).L2_cache_size if on_gpu else 1
    layers_until = begin + args.seconds
    candidates_until = layers_until - (60 if len(layer_sizes) > 20 else 20)
    if on_gpu:
        signal.alarm(int(args.seconds) + 40)  # ends a process that hangs despite the probe; saved rows are kept
    import triton

    result = {
        "device": torch.cuda.get_device_name(0) if on_gpu else "CPU, a dry run", "multiprocessors": sms,
        "torch": torch.__version__, "triton": triton.__version__, "commit": commit(),
        "command": " ".join(["every_size.py", *(Path(word).name for word in sys.argv[1:])]),
        "lora_rank": RANK, "compute": args.compute,
        "cost_model": hashlib.sha256(cost.FACTORS.read_bytes()).hexdigest()[:16],
        "variants_left_out": {}, "matrices": [], "layers": [],
    }  # fmt: skip

    def save() -> None:
        write(args.out, result)

    matrices = [(m, n, *nk) for m in models for n, nk in tune.layer_shapes(m).items()]
    fp8 = args.compute == "w4a8"
    all_tries = [c for _, _, N, K in matrices for M in sizes for c in cost.candidates(N, K, M, sms, fp8)]
    all_tries += [shipped(N, K, M, rows_of(m, N, K)) for m, _, N, K in matrices for M in (*sizes, *layer_sizes)]
    print("#", qerl_nvfp4.describe(), flush=True)
    good, result["variants_left_out"] = usable_variants(all_tries, args.probe_seconds)
    print(
        f"# {len(good)} variants work, {time.time() - begin:.0f} s; left out: {result['variants_left_out']}", flush=True
    )
    save()
    if args.layers_only and result["variants_left_out"]:
        raise SystemExit(f"Shipped variants failed, nothing was timed: {result['variants_left_out']}")
    device = "cuda" if on_gpu else "cpu"
    for model, name, N, K in [] if args.layers_only else matrices:
        if time.time() > candidates_until:
            print(f"# time is up before {model}.{name}")
            break
        matrix = Computed(N, K, tune.layer_splits(model).get((N, K)), l2, RANK, device)
        matrix.compute = args.compute
        result["matrices"] += matrix_rows(matrix, f"{model}.{name}", sizes, good, candidates_until)
        save()
        del matrix
        if on_gpu:
            torch.cuda.empty_cache()
    print(f"# {len(result['matrices'])} rows of candidates after {time.time() - begin:.0f} s", flush=True)

    for name in models:
        if time.time() > layers_until:
            print(f"# time is up before layers of {name}")
            break
        result["layers"] += layer_rows(name, layer_sizes, l2, layers_until, args.compute)
        save()
        if on_gpu:
            torch.cuda.empty_cache()
    print(f"# wrote {args.out} after {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
