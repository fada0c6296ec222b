"""Tune the kernels for this GPU and write configs/device_name=<name>.json.

    python -m qerl_nvfp4.tune                                    the matrices of Qwen2.5 3B, 7B, 14B and 32B
    python -m qerl_nvfp4.tune --shapes 37888x3584,3584x18944     N x K of your model's (fused) linear layers

Every candidate is checked against the reference before it is timed; one that is wrong or does not compile is dropped and named.
Candidates are compiled in parallel processes first. Entries of shapes that are not tuned now stay in the file.
"""

import argparse
import json
import math
import multiprocessing
import os
import time
from pathlib import Path

import torch
from triton.errors import TritonError

from . import ops, reference, select
from .launch import tile_rows
from .timing import copies_needed, random_weight, relative_error, time_us

FAILURES = (TritonError, RuntimeError, ValueError, AssertionError, TypeError)

QWEN = {  # (hidden, q heads * 128, kv heads * 128, intermediate)
    "3B": (2048, 2048, 256, 11008),
    "7B": (3584, 3584, 512, 18944),
    "14B": (5120, 5120, 1024, 13824),
    "32B": (5120, 5120, 1024, 27648),
}


def layer_shapes(size: str) -> dict[str, tuple[int, int]]:
    """name -> (N, K) of the four matrices of a decoder layer, q/k/v and gate/up fused."""
    hidden, q, kv, inner = QWEN[size]
    return {"qkv": (q + 2 * kv, hidden), "o": (hidden, q), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}


def skinny_candidates(N: int, K: int, bucket: int, sms: int):
    for WK, WN, R in (
        (4, 1, 1),
        (4, 1, 2),
        (4, 1, 4),
        (4, 2, 1),
        (4, 2, 2),
        (8, 1, 1),
        (8, 1, 2),
        (2, 2, 2),
        (2, 4, 2),
        (2, 2, 4),
    ):
        config = {"kernel": "skinny", "BM": 8 if bucket <= 8 else 16, "WK": WK, "WN": WN, "R": R}
        if not select.skinny_fits(config, N, K):
            continue
        tiles = N // (16 * R * WN)
        resident = 20 // (WK * WN)
        grids = {sms * i for i in (1, 2, 3, 4, 5) if i <= resident} | {
            tiles * i for i in (1, 2) if tiles * i <= sms * resident
        }
        yield from (config | {"grid": g} for g in sorted(grids))


WGMMA = {  # tokens -> (BM, P, S, permute)
    32: [(32, 2, 5, True), (32, 3, 4, True), (32, 3, 4, False)],
    64: [(64, 2, 4, True), (64, 2, 4, False), (64, 3, 3, False)],
    128: [(128, 2, 2, False), (128, 3, 2, False)],
}


def wgmma_candidates(N: int, K: int, bucket: int, sms: int):
    if not select.wgmma_fits(N, K):
        return
    for BM, P, S, permute in WGMMA[min(bucket, 128)]:
        tiles = math.ceil(N / (64 * P)) * math.ceil(bucket / BM)
        grids = {sms} | {tiles * i for i in range(1, sms // tiles + 1) if tiles * i * 2 >= sms}
        config = {"kernel": "wgmma", "BM": BM, "P": P, "S": S, "permute": permute}
        yield from (config | {"grid": g} for g in sorted(grids))


def candidates(
    N: int, K: int, bucket: int, sms: int, kernels: tuple[str, ...] = ("skinny", "wgmma", "dense")
) -> list[dict]:
    """Everything worth timing for `bucket` tokens (0: many)."""
    found = []
    if bucket and bucket <= 16:
        found += skinny_candidates(N, K, bucket, sms)
    if bucket >= 32:
        found += wgmma_candidates(N, K, bucket, sms)
    if bucket == 0 or bucket >= 128:
        found += [{"kernel": "dense", "pieces": p} for p in (1, 2, 4, 8) if N // p >= 2048]
    return [c for c in found if c["kernel"] in kernels]


def run(config, x, weight, gs, out, bias=None, a=None, b=None, splits=None) -> None:
    if config["kernel"] == "dense":
        ops.linear_dense(x, *weight, gs, bias, a, b, splits, out, config["pieces"])
    else:
        ops.launch(config, x, *weight, gs, bias, a, b, splits, out)


def compile_one(job) -> tuple[str, str]:
    """Compile by launching once on a small problem with the row strides of the real one."""
    config, _, K, rank = job
    try:
        rows = max(512, tile_rows(config))
        weight = random_weight(rows, K, 0)
        x = torch.randn(min(config["BM"], 16), K, device="cuda", dtype=torch.bfloat16)
        a = torch.zeros(rank, K, device="cuda", dtype=torch.bfloat16) if rank else None
        b = torch.zeros(rows, rank, device="cuda", dtype=torch.bfloat16) if rank else None
        out = torch.empty(len(x), rows, device="cuda", dtype=torch.bfloat16)
        run(config, x, weight, torch.ones(1, device="cuda"), out, None, a, b)
        torch.cuda.synchronize()
    except FAILURES as error:  # a candidate that does not compile is only dropped, and named in the log
        return str(job), f"{type(error).__name__}: {str(error)[-200:]}"
    return str(job), ""


def precompile(jobs: list, processes: int) -> dict[str, str]:
    """Fill Triton's disk cache; returns the jobs that failed."""
    unique = {}
    for config, N, K, rank in jobs:
        if config["kernel"] != "dense":
            key = json.dumps(
                [{k: v for k, v in config.items() if k != "grid"}, K if config["kernel"] == "skinny" else 0, rank]
            )
            unique.setdefault(key, (config, N, K, rank))
    begin = time.time()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        failed = {job: error for job, error in pool.imap_unordered(compile_one, unique.values()) if error}
    print(f"# compiled {len(unique)} variants in {time.time() - begin:.0f} s, {len(failed)} failed", flush=True)
    for job, error in failed.items():
        print(f"#   {job}: {error}")
    return failed


def tune_shape(
    N: int, K: int, buckets: list[int], sms: int, l2: int, deadline: float, kernels: tuple[str, ...], large: int = 2048
) -> list[dict]:
    """Entries for one matrix; bucket 0 (every larger M) is tuned at `large` tokens."""
    nbytes = N * K * 9 // 16
    copies = copies_needed(nbytes, l2)
    weights = [random_weight(N, K, i) for i in range(copies)]
    gs = torch.tensor([2048.0], device="cuda")
    rows = torch.randperm(N, device="cuda")[: min(N, 4096)]
    dense = reference.dequantize(weights[0][0][rows], weights[0][1][rows], gs, torch.float32)
    entries = []
    for bucket in buckets:
        M = bucket or large
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
        expected = x.float() @ dense.T
        timed = []
        for config in candidates(N, K, bucket, sms, kernels):
            if time.time() > deadline:
                break
            try:
                out.fill_(float("nan"))
                run(config, x, weights[0], gs, out)
                error = relative_error(out[:, rows], expected)
                if not error < 6e-3:
                    print(f"# WRONG {N}x{K} M={M} {config}: relative error {error:.1e}", flush=True)
                    ops.scratch(x.device, "counters", 1, torch.int32).zero_()
                    continue
                timed.append(
                    (time_us(lambda i, c=config, x=x, out=out: run(c, x, weights[i], gs, out), copies, 5), config)
                )
            except FAILURES as failure:
                print(f"# failed {N}x{K} M={M} {config}: {type(failure).__name__} {str(failure)[-150:]}", flush=True)
        timed.sort(key=lambda t: t[0])
        if timed:
            print(
                f"{N:6d} x {K:5d} M={M:5d} {timed[0][0]:8.2f} us  "
                + "  ".join(f"{t:.1f} {short(c)}" for t, c in timed[:6]),
                flush=True,
            )
            entries.append({"N": N, "K": K, "bucket": bucket, "us": round(timed[0][0], 2), "config": timed[0][1]})
    return entries


def short(config: dict) -> str:
    return config["kernel"][0] + "_".join(str(v) for k, v in config.items() if k != "kernel")


def write(path: Path, device: str, entries: list[dict]) -> None:
    """Merge into the table; the file appears whole or not at all."""
    old = json.loads(path.read_text())["entries"] if path.is_file() else []
    merged = {(e["N"], e["K"], e["bucket"]): e for e in old} | {(e["N"], e["K"], e["bucket"]): e for e in entries}
    import triton

    lines = ",\n".join("  " + json.dumps(merged[key]) for key in sorted(merged))
    head = {"device": device, "torch": torch.__version__, "triton": triton.__version__}
    text = json.dumps(head)[:-1] + ', "entries": [\n' + lines + "\n]}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="", help="comma-separated NxK; default: Qwen2.5 3B, 7B, 14B, 32B")
    parser.add_argument("--models", default="7B,32B,14B,3B")
    parser.add_argument("--buckets", default="8,16,32,64,128,256,512,0", help="numbers of tokens; 0: every larger one")
    parser.add_argument("--kernels", default="skinny,wgmma,dense", help="families to try")
    parser.add_argument("--seconds", type=float, default=600, help="stop cleanly after this long")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--output", default="", help="default: the package's own table for this device")
    args = parser.parse_args(arguments)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if properties.major != 9:
        raise SystemExit(
            f"the tuner knows Hopper's kernels only; {properties.name} uses the heuristic for the portable ones"
        )
    if args.shapes:
        shapes = [tuple(int(v) for v in s.split("x")) for s in args.shapes.split(",")]
    else:
        shapes = [nk for model in args.models.split(",") for nk in layer_shapes(model).values()]
    shapes = list(dict.fromkeys(shapes))
    buckets = [int(b) for b in args.buckets.split(",")]
    kernels = tuple(args.kernels.split(","))
    deadline = time.time() + args.seconds
    sms = properties.multi_processor_count
    precompile(
        [(c, N, K, 0) for N, K in shapes for b in buckets for c in candidates(N, K, b, sms, kernels)], args.processes
    )
    path = Path(args.output) if args.output else select.table_path(properties.name)
    for N, K in shapes:
        if time.time() > deadline:
            print(f"# time is up before {N}x{K}")
            break
        write(path, properties.name, tune_shape(N, K, buckets, sms, properties.L2_cache_size, deadline, kernels))
        torch.cuda.empty_cache()
    print(f"# wrote {path}")


if __name__ == "__main__":
    main()
