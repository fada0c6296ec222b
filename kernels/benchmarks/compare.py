"""Speed of the kernels against cuBLAS bf16, vLLM's Marlin and humming-kernels, on equal inputs with checked results.

    python compare.py --out results/h200.json [--marlin _C_stable_libtorch.abi3.so] [--humming] [--models 7B,32B]

--marlin: operator library of a vLLM wheel (unzip -j vllm-*.whl vllm/_C_stable_libtorch.abi3.so), for the torch version
of that wheel. --humming: humming-kernels, compiled with nvcc on first use, on the four matrices of 7B. --compute w4a8:
ours by `qerl_nvfp4.linear`, quantizing x included; the others stay W4A16, since humming 0.1.20 refuses FP8 inputs with
scales of 16 weights.

Times are medians of alternating CUDA graph replays; weights rotate over several times the L2 cache. Floor = max(bytes /
4.59 TB/s, flops / 790 TFLOP/s, twice as many in FP8), measured on an H200. A kernel that fails its check has no time.
"""

import argparse
import importlib.metadata
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch-ext"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from common import commit, save

import qerl_nvfp4
from qerl_nvfp4 import ops, precompile, reference, select, tune
from qerl_nvfp4.precompile import Weight
from qerl_nvfp4.timing import copies_needed, random_weight, relative_error, times_us

READ_BANDWIDTH, MATRIX_RATE, RANK = 4.59e12, 790e12, 32
FLOAT4_E2M1F_ID = 562949953487106  # vllm.scalar_type.scalar_types.float4_e2m1f.id


SELECTED = {"kernel": "selected"}  # by `qerl_nvfp4.linear` with compute="w4a8"


def linear_w4a8(x, weight, gs, adapter=(None, None), splits=None) -> torch.Tensor:
    return qerl_nvfp4.linear(x, *weight, gs, None, *adapter, splits, compute="w4a8")


def exact_w4a8(x, weight, gs, adapter=None, splits=None) -> torch.Tensor:
    """The same in float32, from operands rounded by the reference."""
    x8, token_scale = reference.quantize_fp8(x)
    y = x8.float() @ reference.dequantize_fp8(*weight).float().T * (8 / gs) * token_scale[:, None]
    return y if adapter is None else y + reference.lora(x.float(), *(part.float() for part in adapter), splits)


class Computed(tune.Matrix):
    """Rotating copies of a matrix, multiplied with `compute`."""

    compute = "w4a16"

    def expected(self, x, adapter: bool) -> torch.Tensor:
        if self.compute == "w4a16":
            return super().expected(x, adapter)
        return exact_w4a8(x, self.weights[0], self.gs, self.adapters[0] if adapter else None, self.splits)[:, self.rows]

    def call(self, config, x, out, adapter: bool):
        if config != SELECTED:
            return super().call(config, x, out, adapter)
        adapters, splits = (self.adapters, self.splits) if adapter else ([(None, None)] * self.copies, None)
        return lambda i: linear_w4a8(x, self.weights[i], self.gs, adapters[i], splits)

    def error(self, call, out, expected) -> float:
        out.fill_(float("nan"))
        returned = call(0)
        return relative_error((out if returned is None else returned)[:, self.rows], expected)


class Marlin:
    """vLLM's fp4 Marlin from the bare operator library; the layout code follows vLLM's marlin_utils_fp4.py."""

    def __init__(self, library: str):
        torch.ops.load_library(library)
        self.gemm, self.repack = torch.ops._C.marlin_gemm, torch.ops._C.gptq_marlin_repack

    def make(self, packed, scale, divisor: float):
        N, K = packed.shape[0], packed.shape[1] * 2
        words = packed.view(torch.int32).T.contiguous()
        w = self.repack(words, torch.empty(0, dtype=torch.int, device="cuda"), K, N, 4, False)
        index = torch.arange(64, device="cuda").view(8, 8).t().reshape(-1)
        s = scale.view(torch.float8_e4m3fn).T.contiguous().to(torch.bfloat16)
        s = s.reshape(-1, 64)[:, index].reshape(s.shape).to(torch.half).view(-1, 4)[:, [0, 2, 1, 3]].reshape(s.shape)
        largest, factor = s.float().max() * 128, 1.0
        if 0 < largest < 448 * 128:
            factor = float((448 * 128 / largest).log2().floor().exp2())
        s = (s.float() * factor).to(torch.half) * 128
        s[s < 2] = 0
        s = (s.view(torch.int16) << 1).view(torch.float8_e4m3fn)[:, 1::2].contiguous()
        g = torch.tensor(1 / divisor * 2.0**119 / factor, dtype=torch.float32, device="cuda")
        work = torch.zeros(torch.cuda.get_device_properties(0).multi_processor_count, dtype=torch.int, device="cuda")

        def call(x):
            kind = (FLOAT4_E2M1F_ID, x.shape[0], N, K, True, False, True, False)
            return self.gemm(x, None, w, None, s, None, g, None, None, None, work, *kind)

        return call


def humming_layer(N: int, K: int):
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    weight_config = {"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3"}
    layer = HummingLayer(shape_n=N, shape_k=K, torch_dtype=torch.bfloat16, weight_config=weight_config)
    layer = layer.to("cuda:0")
    dense = torch.randn(N, K, device="cuda", dtype=torch.bfloat16) * 0.5
    layer.load_from_unquantized(dense)
    layer.transform()
    tuning = json.dumps(get_heuristics_config(layer_config=layer.humming_config))
    return lambda x: layer(inputs=x, tuning_config=tuning), dense


def cold_us(calls: dict) -> dict[str, float]:
    """Median microseconds per call, alternating, with a cold L2 cache; the GPU waits until a call is launched."""
    junk = torch.empty(80_000_000, device="cuda", dtype=torch.int32)
    times = {name: [] for name in calls}
    for _ in range(12):
        for name, call in calls.items():
            junk.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(4_000_000)  # 2 ms, longer than any launch
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: round(statistics.median(found), 2) for name, found in times.items()}


def against_humming(name: str, N: int, K: int, tokens: list[int], compute: str) -> list[dict]:
    """One matrix by humming-kernels, ours and cuBLAS, without CUDA graphs: humming cannot be captured everywhere."""
    humming, dense = humming_layer(N, K)
    weight, gs = random_weight(N, K, 0), torch.tensor([2048.0], device="cuda")
    rows = []
    for M in tokens:
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
        error = relative_error(humming(x), x.float() @ dense.float().T)  # rough: the weight is rounded to 4 bits
        if not error < 0.2:
            print(f"# humming M={M}: relative error {error:.2f}, not timed")
            continue
        config = select.choose(N, K, M, torch.cuda.current_device(), True)
        calls = {
            "humming_us": lambda x=x: humming(x),
            "ours_us": lambda x=x, out=out, config=config: ops.product(
                config, x, *weight, gs, None, None, None, None, out
            ),
            "bf16_us": lambda x=x, out=out: torch.mm(x, dense.t(), out=out),
        }
        if compute == "w4a8":
            calls["ours_us"] = lambda x=x: linear_w4a8(x, weight, gs)
        rows.append({"shape": name, "M": M} | cold_us(calls))
    return rows


def add_humming(result: dict, tokens: list[int], compute: str, save: Callable[[], None]) -> None:
    """Add the matrices of 7B by `against_humming`, saved one by one, and the version of humming-kernels."""
    result["humming_kernels"] = importlib.metadata.version("humming-kernels")
    result["humming"] = []
    for name, (N, K) in tune.layer_shapes("7B").items():
        result["humming"] += against_humming(f"7B.{name}", N, K, [m for m in tokens if m <= 512], compute)
        print("humming", *result["humming"][-3:], flush=True)
        save()


def floor_us(N: int, K: int, M: int, compute: str) -> float:
    rate = MATRIX_RATE * (2 if compute == "w4a8" else 1)
    return max((N * K * 0.5625 + 2 * M * (N + K)) / READ_BANDWIDTH, 2 * M * N * K / rate) * 1e6


class Matrix(Computed):
    """A matrix with bf16 and Marlin copies."""

    def __init__(self, name: str, N: int, K: int, l2: int, marlin: Marlin | None, rank: int, compute: str):
        super().__init__(N, K, tune.layer_splits(name.split(".")[0]).get((N, K)), l2, rank)
        self.name, self.rank, self.compute = name, rank, compute
        self.dense = [
            torch.randn(N, K, device="cuda", dtype=torch.bfloat16) * 0.02
            for _ in range(copies_needed(N * K * 2, l2, 8))
        ]
        self.marlin = None if marlin is None else [marlin.make(*w, 2048.0) for w in self.weights]

    def measure(self, M: int) -> dict:
        x, out = self.problem(M)
        place = self.N, self.K, M, torch.cuda.current_device(), True
        config = SELECTED if self.compute == "w4a8" else select.choose(*place)
        floor = round(floor_us(self.N, self.K, M, self.compute), 2)
        row = {"shape": self.name, "N": self.N, "K": self.K, "M": M, "floor_us": floor, "config": config}
        calls = {"bf16_us": lambda i: torch.mm(x, self.dense[i % len(self.dense)].t(), out=out)}
        adapted = select.choose(*place, self.rank, len(self.splits or (self.N,))) if config != SELECTED else SELECTED
        row |= {"lora_config": adapted} if adapted != config else {}
        for key, chosen, adapter in (("ours_us", config, False), ("ours_lora_us", adapted, True)):
            call = self.call(chosen, x, out, adapter)
            error = self.error(call, out, self.expected(x, adapter))
            if error < tune.TOLERANCE:
                calls[key] = call
            else:
                print(f"# WRONG {self.name} M={M} {key}: relative error {error:.1e}", flush=True)
        if self.marlin is not None:
            error = relative_error(self.marlin[0](x)[:, self.rows], tune.Matrix.expected(self, x, False))
            if error < 2e-2:
                calls["marlin_us"] = lambda i: self.marlin[i](x)
            else:
                print(f"# WRONG marlin {self.name} M={M}: relative error {error:.1e}", flush=True)
        # Marlin separately: where it draws little power, the next kernel would run at a higher clock
        turns = [[key for key in calls if key != "marlin_us"], [key for key in calls if key == "marlin_us"]]
        for keys in turns:
            times = times_us([calls[key] for key in keys], self.copies)
            row |= {key: round(us, 2) for key, us in zip(keys, times, strict=True)}
        return row


def sums(rows: list[dict]) -> list[dict]:
    """Sums over the four matrices of a decoder layer, per model and M."""
    found = []
    for model in dict.fromkeys(r["shape"].split(".")[0] for r in rows):
        for M in dict.fromkeys(r["M"] for r in rows):
            four = [r for r in rows if r["shape"].startswith(model + ".") and r["M"] == M]
            if len(four) != 4:
                continue
            entry = {"model": model, "M": M}
            for key in ("floor_us", "bf16_us", "marlin_us", "ours_us", "ours_lora_us"):
                if all(key in r for r in four):
                    entry[key] = round(sum(r[key] for r in four), 2)
            found.append(entry)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="compare.json")
    parser.add_argument("--models", default="7B,32B", help="empty: only the matrices of --humming")
    parser.add_argument("--ms", default="1,4,8,16,32,64,128,256,512,1024,4096")
    parser.add_argument("--marlin", default="")
    parser.add_argument("--humming", action="store_true")
    parser.add_argument("--compute", default="w4a16", choices=("w4a16", "w4a8"))
    parser.add_argument("--seconds", type=float, default=300)
    args = parser.parse_args()
    begin = time.time()
    torch.backends.cuda.matmul.allow_tf32 = False
    tokens, models = [int(m) for m in args.ms.split(",")], [m for m in args.models.split(",") if m]
    properties = torch.cuda.get_device_properties(0)
    print("#", qerl_nvfp4.describe(), flush=True)
    marlin = Marlin(args.marlin) if args.marlin else None
    shapes = [(f"{m}.{n}", N, K) for m in models for n, (N, K) in tune.layer_shapes(m).items()]
    of_model = {nk: rows for m in models for nk, rows in tune.layer_splits(m).items()}
    if args.compute == "w4a16":
        ranks = itertools.product(shapes, (0, RANK))
        precompile.precompile([Weight(N, K, of_model.get((N, K), (N,)), r) for (_, N, K), r in ranks], tokens)
    import triton

    result = {
        "device": properties.name, "torch": torch.__version__, "triton": triton.__version__, "commit": commit(),
        "command": " ".join(["compare.py", *(Path(a).name if "/" in a else a for a in sys.argv[1:])]),
        "describe": qerl_nvfp4.describe(), "lora_rank": RANK, "compute": args.compute, "rows": [],
    }  # fmt: skip

    def written() -> None:
        result["sums"] = sums(result["rows"])
        save(result, Path(args.out))

    for name, N, K in shapes:
        if time.time() - begin > args.seconds:
            print(f"# time is up before {name}")
            break
        matrix = Matrix(name, N, K, properties.L2_cache_size, marlin, RANK, args.compute)
        for M in tokens:
            row = matrix.measure(M)
            result["rows"].append(row)
            print({key: value for key, value in row.items() if "config" not in key}, flush=True)
        written()
        del matrix
        torch.cuda.empty_cache()
    print(*result.get("sums", []), sep="\n", flush=True)
    if args.humming:
        add_humming(result, tokens, args.compute, written)
    print(f"# wrote {args.out} after {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
