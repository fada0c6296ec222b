"""Time these kernels against another version of them: one process, the same inputs, in turns, checked before they are timed.

    mkdir -p build && git archive COMMIT kernels/torch-ext/qerl_nvfp4 | tar -x -C build
    python kernels/benchmarks/former.py --former build/kernels/torch-ext/qerl_nvfp4 --out former.json [--ms 1,8,16] [--models 7B,32B]

Each version chooses with its own table.  Weights rotate over several times the second-level cache; CUDA graph replays, the versions
and cuBLAS bf16 in turns; `--passes` such medians, of which the median is reported, and the largest relative distance between them.
"""

import argparse
import importlib.util
import inspect
import json
import os
import statistics
import sys
import types
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch-ext"))

from compare import commit

import qerl_nvfp4
from qerl_nvfp4 import ops, select, tune
from qerl_nvfp4.timing import copies_needed, times_us

NAME = "qerl_nvfp4_former"


def import_former(folder: Path) -> types.ModuleType:
    """The package in `folder` under another name, its operators in a namespace of their own."""
    namespace = types.ModuleType(f"{NAME}._ops")  # what the Hub's build writes into a package, for the same purpose
    namespace.add_op_namespace_prefix = lambda name: f"{NAME}::{name}"
    sys.modules[namespace.__name__] = namespace
    spec = importlib.util.spec_from_file_location(
        NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module


def chosen(select, matrix: tune.Matrix, M: int, adapter: bool) -> dict:
    """What a version selects; a former one may not ask for the adapter's rank, or for how many shards have one."""
    about = {"rank": matrix.adapters[0][1].shape[1], "shards": len(matrix.splits or (matrix.N,))} if adapter else {}
    asked = inspect.signature(select.choose).parameters
    about = {name: value for name, value in about.items() if name in asked}
    return select.choose(matrix.N, matrix.K, M, torch.cuda.current_device(), True, **about)


def measure(matrix: tune.Matrix, dense: list, versions: dict, M: int, passes: int) -> dict:
    """Microseconds of every version without and with an adapter, and of cuBLAS."""
    x, out = matrix.problem(M)
    row, calls = {"M": M, "configs": {}}, {"bf16": lambda i: torch.mm(x, dense[i % len(dense)].t(), out=out)}
    for name, (v_ops, v_select) in versions.items():
        for adapter in (False, True):
            key = name + (" + adapter" if adapter else "")
            config = row["configs"][key] = chosen(v_select, matrix, M, adapter)

            def call(i, product=v_ops.product, config=config, adapter=adapter):
                a, b = matrix.adapters[i] if adapter else (None, None)
                splits = matrix.splits if adapter else None
                product(config, x, *matrix.weights[i], matrix.gs, None, a, b, splits, out)

            error = matrix.error(call, out, matrix.expected(x, adapter))
            if error < tune.TOLERANCE:
                calls[key] = call
            else:
                print(f"# WRONG {matrix.N} x {matrix.K}, {M} tokens, {key}: relative error {error:.1e}", flush=True)
    keys = list(calls)
    found = {key: [] for key in keys}
    for turn in range(passes):
        order = keys[turn % len(keys) :] + keys[: turn % len(keys)]
        for key, us in zip(order, times_us([calls[k] for k in order], matrix.copies, 11), strict=True):
            found[key].append(us)
    row["us"] = {key: round(statistics.median(times), 2) for key, times in found.items()}
    row["spread"] = {key: round(max(times) / min(times) - 1, 4) for key, times in found.items()}
    return row


def sums(rows: list[dict]) -> list[dict]:
    """Per model and number of tokens: the four matrices of one decoder layer."""
    found = []
    for model, M in dict.fromkeys((r["model"], r["M"]) for r in rows):
        four = [r for r in rows if (r["model"], r["M"]) == (model, M)]
        keys = [key for key in four[0]["us"] if all(key in r["us"] for r in four)]
        if len(four) == 4:
            us = {key: round(sum(r["us"][key] for r in four), 2) for key in keys}
            found.append({"model": model, "matrix": "layer", "M": M, "us": us})
    return found


def table(rows: list[dict]) -> list[str]:
    lines = ["model matrix   tokens |   bf16 | former    new       | with adapter: former    new"]
    for r in rows:
        us = r["us"]

        def pair(suffix: str, us=us) -> str:
            before, now = us.get("former" + suffix, float("nan")), us.get("new" + suffix, float("nan"))
            return f"{before:6.1f} {now:6.1f} {100 * (now / before - 1):+6.1f} %"

        head = f"{r['model']:5s} {r['matrix']:8s} {r['M']:6d} | {us['bf16']:6.1f} | "
        lines.append(head + pair("") + " | " + pair(" + adapter"))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--former", type=Path, required=True, help="folder of the other version's package")
    parser.add_argument("--former-commit", default="", help="recorded in the result")
    parser.add_argument("--out", type=Path, default=Path("former.json"))
    parser.add_argument("--models", default="7B,32B")
    parser.add_argument("--ms", default="1,8,16")
    parser.add_argument("--passes", type=int, default=3)
    args = parser.parse_args()
    import triton

    former = import_former(args.former.resolve())
    from qerl_nvfp4_former import ops as former_ops
    from qerl_nvfp4_former import select as former_select

    versions = {"former": (former_ops, former_select), "new": (ops, select)}
    properties = torch.cuda.get_device_properties(0)
    result = {
        "device": properties.name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "former_commit": args.former_commit,
        "command": f"former.py --models {args.models} --ms {args.ms} --passes {args.passes}",
        "describe": {"former": former.describe(), "new": qerl_nvfp4.describe()},
        "rows": [],
    }
    for model in args.models.split(","):
        splits = tune.layer_splits(model)
        for name, (N, K) in tune.layer_shapes(model).items():
            matrix = tune.Matrix(N, K, splits.get((N, K)), properties.L2_cache_size)
            copies = copies_needed(N * K * 2, properties.L2_cache_size, 8)
            dense = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
            for M in (int(m) for m in args.ms.split(",")):
                row = {"model": model, "matrix": name} | measure(matrix, dense, versions, M, args.passes)
                result["rows"].append(row)
                print(f"# {model} {name} {M} tokens: {row['us']}, spread {max(row['spread'].values()):.1%}", flush=True)
            del matrix, dense
            torch.cuda.empty_cache()
            result["sums"] = sums(result["rows"])
            temporary = args.out.with_suffix(".tmp")
            temporary.write_text(json.dumps(result, indent=1) + "\n")
            os.replace(temporary, args.out)
    print("\n".join(table(result["sums"] + result["rows"])))


if __name__ == "__main__":
    main()
