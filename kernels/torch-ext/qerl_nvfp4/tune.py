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
from .launch import forget_scratch
from .timing import copies_needed, random_weight, relative_error, time_us, times_us

TOLERANCE = 6e-3  # relative error above which a product is wrong
FINALISTS = 5  # the fastest candidates are timed again, in turns
FAILURES = (TritonError, RuntimeError, ValueError, AssertionError, TypeError)

MODELS = {  # (hidden, rows of q, of k and of v, intermediate); Qwen2.5 where no name is given
    "0.5B": (896, 896, 128, 4864),
    "1.5B": (1536, 1536, 256, 8960),
    "3B": (2048, 2048, 256, 11008),
    "7B": (3584, 3584, 512, 18944),
    "14B": (5120, 5120, 1024, 13824),
    "32B": (5120, 5120, 1024, 27648),
    "Llama-3-8B": (4096, 4096, 1024, 14336),
}


def layer_shapes(size: str) -> dict[str, tuple[int, int]]:
    """name -> (N, K) of the four matrices of a decoder layer, q/k/v and gate/up fused."""
    hidden, q, kv, inner = MODELS[size]
    return {"qkv": (q + 2 * kv, hidden), "o": (hidden, q), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}


def layer_splits(size: str) -> dict[tuple[int, int], tuple[int, ...]]:
    """(N, K) -> rows of the shards of a fused matrix, each with an adapter of its own."""
    _, q, kv, inner = MODELS[size]
    shapes = layer_shapes(size)
    return {shapes["qkv"]: (q, kv, kv), shapes["gate_up"]: (inner, inner)}


def skinny_candidates(N: int, K: int, bucket: int, sms: int):
    for WK, WN, R in ((4, 1, 2), (4, 1, 4), (8, 1, 2), (2, 2, 2), (4, 2, 2)):
        config = {"kernel": "skinny", "BM": 8 if bucket <= 8 else 16, "WK": WK, "WN": WN, "R": R, "late": False}
        if not select.skinny_fits(config, N, K):
            continue
        tiles = N // (16 * R * WN)
        resident = 16 // (WK * WN)
        grids = {sms * i for i in (2, 3, 4) if i <= resident} | {
            tiles * i for i in (1, 2) if tiles * i <= sms * resident
        }
        yield from (config | {"grid": g} for g in sorted(grids))
        if WK * WN == 4:  # late loads want registers
            yield from (config | {"late": True, "grid": g} for g in sorted(grids) if g <= 3 * sms)


def adapter_candidates(config: dict, bucket: int, sms: int):
    """What to try with an adapter where a configuration is good without."""
    layout = {k: v for k, v in config.items() if k != "grid"}
    if config["kernel"] == "wgmma":
        tasks = [True, False] if bucket >= 128 else [True]  # x A^T beside it, or by cuBLAS before
        if config["BM"] < 128 or config["P"] < 4:
            grids = {config["grid"], *range(sms - 24, sms + 1, 8)}
            yield from (layout | {"grid": g, "tasks": t} for g in sorted(grids) for t in tasks)
        return
    if config["kernel"] == "dense":
        yield config
        return
    resident = 16 // (config["WK"] * config["WN"])
    for grid in {sms * i for i in range(max(1, resident - 2), resident + 1)} | {config["grid"]}:
        yield from (layout | {"grid": grid, "cost": cost} for cost in (2, 3, 5, 8))


WGMMA = {  # tokens -> (BM, P, S, permute)
    16: [(16, 3, 4, True), (16, 3, 5, True)],
    32: [(32, 2, 5, True), (32, 3, 4, True), (32, 3, 4, False)],
    64: [(64, 2, 4, True), (64, 3, 3, True), (64, 2, 4, False), (64, 3, 3, False)],
    128: [(128, 2, 2, False), (128, 3, 2, False), (128, 4, 2, False)],
}


def wgmma_candidates(N: int, K: int, bucket: int, sms: int):
    if not select.wgmma_fits(N, K):
        return
    for BM, P, S, permute in WGMMA[min(bucket, 128)]:
        tiles = math.ceil(N / (64 * P)) * math.ceil(bucket / BM)
        grids = {sms} | {tiles * i for i in range(1, sms // tiles + 1) if tiles * i * 2 >= sms}
        waves = math.ceil(tiles / sms)
        if tiles % waves == 0:
            grids.add(tiles // waves)  # whole tiles only
        config = {"kernel": "wgmma", "BM": BM, "P": P, "S": S, "permute": permute}
        yield from (config | {"grid": g} for g in sorted(grids))


def candidates(
    N: int, K: int, bucket: int, sms: int, kernels: tuple[str, ...] = ("skinny", "wgmma", "dense")
) -> list[dict]:
    """Everything worth timing for `bucket` tokens (0: many)."""
    found = []
    if bucket and bucket <= 16:
        found += skinny_candidates(N, K, bucket, sms)
    if bucket >= 16:
        found += wgmma_candidates(N, K, bucket, sms)
    if bucket == 0 or bucket >= 128:
        found += [{"kernel": "dense", "pieces": p} for p in (1, 2, 4, 8) if N // p >= 2048]
    return [c for c in found if c["kernel"] in kernels]


def compile_one(job) -> tuple[str, str]:
    """Compile by launching once."""
    config, N, K, rank = job
    try:
        weight = random_weight(N, K, 0)  # the whole matrix: registers depend on the number of programs
        x = torch.randn(min(config.get("BM", 16), 16), K, device="cuda", dtype=torch.bfloat16)
        a = torch.zeros(rank, K, device="cuda", dtype=torch.bfloat16) if rank else None
        b = torch.zeros(N, rank, device="cuda", dtype=torch.bfloat16) if rank else None
        out = torch.empty(len(x), N, device="cuda", dtype=torch.bfloat16)
        ops.product(config, x, *weight, torch.ones(1, device="cuda"), None, a, b, None, out)
        torch.cuda.synchronize()
    except FAILURES as error:  # a candidate that does not compile is only dropped, and named in the log
        return str(job), f"{type(error).__name__}: {str(error)[-200:]}"
    return str(job), ""


def precompile(jobs: list, processes: int) -> dict[str, str]:
    """Fill Triton's disk cache; returns the jobs that failed."""
    sms = select.device_properties(torch.cuda.current_device())[1]
    unique = {}
    for config, N, K, rank in jobs:
        used = select.with_adapter(config) if rank else config
        if used["kernel"] != "dense":
            layout = {k: v for k, v in used.items() if k not in ("grid", "lora", "cost")}
            if used["kernel"] == "skinny":  # compiled for a matrix's K and for its number of programs
                layout |= {"K": K, "resident": math.ceil(used["grid"] / sms)}
            key = json.dumps([layout, rank])
            unique.setdefault(key, (config, N, K, rank))
    begin = time.time()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        failed = {job: error for job, error in pool.imap_unordered(compile_one, unique.values()) if error}
    print(f"# compiled {len(unique)} variants in {time.time() - begin:.0f} s, {len(failed)} failed", flush=True)
    for job, error in failed.items():
        print(f"#   {job}: {error}")
    return failed


class Matrix:
    """Rotating copies of one (N, K) with adapters (a model never reads the same one twice in a row either), and the times of
    configurations that are right."""

    def __init__(self, N: int, K: int, splits: tuple[int, ...] | None, l2: int, rank: int = 32, device: str = "cuda"):
        self.N, self.K, self.splits = N, K, splits
        self.copies = copies_needed(N * K * 9 // 16, l2)
        self.weights = [random_weight(N, K, i, device) for i in range(self.copies)]
        self.gs = torch.tensor([2048.0], device=device)
        self.rows = torch.randperm(N, device=device)[: min(N, 4096)]
        packed, scale = self.weights[0]
        self.reference = reference.dequantize(packed[self.rows], scale[self.rows], self.gs, torch.float32)
        self.adapters = [
            (
                torch.randn(len(splits or (N,)) * rank, K, device=device, dtype=torch.bfloat16) / math.sqrt(K),
                torch.randn(N, rank, device=device, dtype=torch.bfloat16),
            )
            for _ in range(self.copies)
        ]

    def problem(self, M: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x, and where its product goes."""
        device = self.gs.device
        x = torch.randn(M, self.K, device=device, dtype=torch.bfloat16)
        return x, torch.empty(M, self.N, device=device, dtype=torch.bfloat16)

    def expected(self, x, adapter: bool) -> torch.Tensor:
        """The product with the first copy, at self.rows, float32."""
        y = x.float() @ self.reference.T
        if adapter:
            a, b = self.adapters[0]
            y += reference.lora(x.float(), a.float(), b.float(), self.splits)[:, self.rows]
        return y

    def call(self, config, x, out, adapter: bool):
        """call(i): the product with copy i."""

        def call(i):
            a, b = self.adapters[i] if adapter else (None, None)
            ops.product(config, x, *self.weights[i], self.gs, None, a, b, self.splits if adapter else None, out)

        return call

    def error(self, call, out, expected) -> float:
        out.fill_(float("nan"))
        call(0)
        return relative_error(out[:, self.rows], expected)

    def time(self, configs, M: int, adapter: bool, deadline: float) -> list[tuple[float, dict]]:
        """(microseconds, configuration), the best first; one that is wrong or fails is dropped and named."""
        x, out = self.problem(M)
        expected = self.expected(x, adapter)
        found = []
        for config in configs:
            if time.time() > deadline:
                break
            call = self.call(config, x, out, adapter)
            try:
                error = self.error(call, out, expected)
                if error < TOLERANCE:
                    found.append((time_us(call, self.copies, 5), config, call))
                else:
                    print(f"# WRONG {self.N}x{self.K} M={M} {config}: relative error {error:.1e}", flush=True)
                    forget_scratch()
            except FAILURES as failure:
                forget_scratch()
                print(f"# failed {self.N}x{self.K} M={M} {config}: {type(failure).__name__} {str(failure)[-150:]}")
        found.sort(key=lambda t: t[0])
        again = times_us([call for _, _, call in found[:FINALISTS]], self.copies, 9)
        final = sorted(zip(again, (config for _, config, _ in found), strict=False), key=lambda t: t[0])
        return final + [(us, config) for us, config, _ in found[FINALISTS:]]


def report(N: int, K: int, M: int, timed: list[tuple[float, dict]]) -> None:
    best = "  ".join(f"{t:.1f} {short(c)}" for t, c in timed[:6])
    print(f"{N:6d} x {K:5d} M={M:5d} {timed[0][0]:8.2f} us  {best}", flush=True)


def tune_shape(
    N: int,
    K: int,
    splits: tuple[int, ...] | None,
    buckets: list[int],
    sms: int,
    l2: int,
    deadline: float,
    kernels: tuple[str, ...],
    large: int = 2048,
) -> list[dict]:
    """Entries for one matrix; bucket 0 (every larger M) is tuned at `large` tokens."""
    matrix = Matrix(N, K, splits, l2)
    entries = []
    for bucket in buckets:
        M = bucket or large
        timed = matrix.time(candidates(N, K, bucket, sms, kernels), M, False, deadline)
        if not timed:
            continue
        report(N, K, M, timed)
        best = timed[0][1]
        # the adapter wants registers and other programs: the best layouts again, with everything they may change
        layouts = {}
        for _, config in timed[:6]:
            layouts.setdefault(json.dumps(config | {"grid": 0}), config)
        tries = [lora for c in layouts.values() for lora in adapter_candidates(c, bucket, sms)]
        tries = [{k: v for k, v in lora.items() if best.get(k) != v} for lora in tries]
        fused = matrix.time([best | {"lora": lora} for lora in tries], M, True, deadline)
        if fused:
            report(N, K, M, fused)
            best = fused[0][1]
        entries.append({"N": N, "K": K, "bucket": bucket, "us": round(timed[0][0], 2), "config": best})
    return entries


def short(config: dict) -> str:
    named = (
        "natural" if k == "natural" else str(v) for k, v in config.items() if k != "kernel" and (k != "natural" or v)
    )
    return config["kernel"][0] + "_".join(named)


def write(path: Path, device: str, sms: int, entries: list[dict]) -> None:
    """Merge into the table; the file appears whole or not at all."""
    old = json.loads(path.read_text())["entries"] if path.is_file() else []
    merged = {(e["N"], e["K"], e["bucket"]): e for e in old} | {(e["N"], e["K"], e["bucket"]): e for e in entries}
    import triton

    lines = ",\n".join("  " + json.dumps(merged[key]) for key in sorted(merged))
    head = {"device": device, "multiprocessors": sms, "torch": torch.__version__, "triton": triton.__version__}
    text = json.dumps(head)[:-1] + ', "entries": [\n' + lines + "\n]}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="", help="comma-separated NxK; default: Qwen2.5 3B, 7B, 14B, 32B")
    parser.add_argument("--models", default="7B,32B,14B,3B")
    parser.add_argument(
        "--buckets", default="8,16,32,64,128,256,512,1024,0", help="numbers of tokens; 0: every larger one"
    )
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
    jobs = []
    for N, K in shapes:
        for bucket in buckets:
            for config in candidates(N, K, bucket, sms, kernels):
                jobs.append((config, N, K, 0))
                jobs += [(config | {"lora": lora}, N, K, 32) for lora in adapter_candidates(config, bucket, sms)]
    precompile(jobs, args.processes)
    splits = {nk: s for model in MODELS for nk, s in layer_splits(model).items()}
    path = Path(args.output) if args.output else select.table_path(properties.name)
    for N, K in shapes:
        if time.time() > deadline:
            print(f"# time is up before {N}x{K}")
            break
        entries = tune_shape(N, K, splits.get((N, K)), buckets, sms, properties.L2_cache_size, deadline, kernels)
        write(path, properties.name, sms, entries)
        torch.cuda.empty_cache()
    print(f"# wrote {path}")


if __name__ == "__main__":
    main()
