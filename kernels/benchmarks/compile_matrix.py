"""Compile all selectable kernels for several GPUs and versions of Triton, without a GPU.

    python compile_matrix.py --out results/compile.json --tritons DIR:DIR:...      one folder per version, made by
        pip install --no-deps --target DIR triton==3.9.0
    python compile_matrix.py --out compile.json                                    the installed Triton

The launches are real (ops.product, on tensors without memory); a stub replaces Triton's driver, names the GPU and never
launches. A row has a kernel's registers and stack bytes per thread, shared memory per block and the card's limit, or
the error. `--quick`, for kernels/tests, skips some matrices, token counts and ranks. The file is written after each
version and keeps the rows of others; `kernels` has the digest of the sources. Kernels with stack are printed as the
table of HOW_IT_WORKS.md.
"""

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "torch-ext"))

# sm -> a card of this architecture, multiprocessors, maximum shared memory per block in bytes
CARDS = {
    80: ("NVIDIA A100-SXM4-80GB", 108, 163 * 1024),
    86: ("NVIDIA GeForce RTX 3090", 82, 99 * 1024),
    89: ("NVIDIA L40S", 142, 99 * 1024),
    90: ("NVIDIA H200", 132, 227 * 1024),
    100: ("NVIDIA B200", 148, 227 * 1024),
    120: ("NVIDIA GeForce RTX 5090", 170, 99 * 1024),
}


class Driver:
    """Stub of Triton's driver for compilation."""

    def __init__(self, sm: int):
        self.sm = sm

    def get_current_device(self) -> int:
        return self.sm  # Triton caches the target per device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.sm, 32)


def pretend(sm: int) -> None:
    """Make the package and Triton see a card of this architecture."""
    import torch
    from triton.runtime import driver

    from qerl_nvfp4 import launch, ops, select

    name, sms, shared = CARDS[sm]
    driver.set_active(Driver(sm))
    for module in (select, launch, ops):
        module.device_properties = lambda index: (name, sms, (sm // 10, sm % 10))
    select.shared_memory_limit = lambda index: shared
    ops._made_for = lambda index: True
    torch.cuda.current_device = lambda: 0
    select.explain.cache_clear()


def recorded(call) -> list:
    """[(kernel, compiled)] of the launches of `call`."""
    from triton.runtime.jit import JITFunction

    from qerl_nvfp4.launch import only_compile

    found, run = [], JITFunction.run

    def recording(self, *args, **kwargs):
        found.append((self.__name__, run(self, *args, **kwargs)))
        return found[-1][1]

    JITFunction.run = recording
    try:
        with only_compile():
            call()
    finally:
        JITFunction.run = run
    return found


def product(config: dict, N: int, K: int, M: int, splits: tuple[int, ...], rank: int, dtype):
    """Launches of one matrix product."""
    import torch

    from qerl_nvfp4 import ops

    def empty(*shape, dtype=dtype):
        return torch.empty(*shape, device="meta", dtype=dtype)

    weight = (empty(N, K // 2, dtype=torch.uint8), empty(N, K // 16, dtype=torch.uint8), empty(1, dtype=torch.float32))
    adapter = (empty(len(splits) * rank, K), empty(N, rank), splits) if rank else (None, None, None)
    ops.product(config, empty(M, K), *weight, empty(N), *adapter, empty(M, N))


def streams() -> None:
    """Kernels other than the product."""
    import torch

    from qerl_nvfp4 import ops

    x, weight = (torch.empty(64, 3584, device="meta", dtype=torch.bfloat16) for _ in range(2))
    for wide in {False, ops._converts_fp8(x)}:
        ops._rms_norm(x, torch.empty(3584, device="meta"), 1e-6, x, wide)
    for rule in ("rtn", "four_over_six", "neighbor_sweep"):
        ops._quantize(weight, rule, torch.empty(1, device="meta"))
    if ops._converts_fp8(x):
        ops._swiglu(torch.empty(64, 37888, device="meta", dtype=torch.bfloat16))
        packed, scale = (torch.empty(64, n, device="meta", dtype=torch.uint8) for n in (1792, 224))
        for flag in (False, True):
            ops._quantize_fp8(x, flag)
            ops._dequantize_fp8(packed, scale, flag)


def resources(cubin: bytes) -> dict[str, int]:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return {"registers": int(found["REG"]), "stack": int(found["STACK"])}


def rank_in_turn(variant: tuple, known: list[tuple], sm: int) -> int:
    """Rank to compile a configuration for: every rank occurs over three cards, and over three configurations.

    Args:
        variant: kernel name and configuration.
        known: earlier variants of this kernel; this one is added.
    """
    if variant not in known:
        known.append(variant)
    # the dense path launches the same kernels with an adapter
    ranks = (256, 32) if variant[0] == "dense" else (256, 32, 0)
    return ranks[(known.index(variant) + list(CARDS).index(sm)) % len(ranks)]


def cases(sm: int, quick: bool):
    """(what, call) of everything to compile for an architecture."""
    import torch

    from qerl_nvfp4 import cost, ops, select, tune

    pretend(sm)
    shapes, splits = tune.layer_shapes("7B"), tune.layer_splits("7B")
    matrices = [(*nk, splits.get(nk, (nk[0],))) for nk in shapes.values()]
    matrices = [matrices[0], matrices[3]] if quick else [*matrices, (1000, 1040, (1000,))]
    done, turns = set(), collections.defaultdict(list)
    for dtype in (torch.bfloat16, torch.float16):
        tokens = (1, 16, 32, 64, 128, 2048) if quick or sm != 90 else (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
        for_wide = () if sm != 90 else (96, 208, 448) if quick else (72, 96, 112, 144, 160, 176, 192, 208, 320, 448)
        tokens += for_wide  # sizes for wide tiles, which other cards lack
        if dtype == torch.float16:
            tokens = (16,) if quick else (16, 64)
        for N, K, shards in matrices:
            bf16 = dtype == torch.bfloat16 and ops.use_gluon(0)
            about = CARDS[sm][1], sm == 90, bf16, CARDS[sm][2]
            invariant = ((M, config) for M in tokens for config in select.batch_invariant(N, K, min(M, 1024), *about))
            chosen = [
                (M, select.choose(N, K, M, 0, bf16, rank, len(shards)), [rank]) for M in tokens for rank in (0, 32, 256)
            ]
            # also tried by `qerl-trl tune`
            natural = (
                (M, config | {"natural": True}, [rank]) for M, config, (rank,) in chosen if cost.can_be_natural(config)
            )
            invariant = [(M, config, [0, 32, 256]) for M, config in invariant]
            fp8 = []
            if bf16 and sm == 90:
                some = (config for M in tokens for config in cost.candidates(N, K, M, CARDS[sm][1], fp8=True))
                fp8 = [(config.get("BM", 2048), config, [0, 32]) for config in some if config["kernel"] != "dense"]
            elif bf16 and sm >= 89:
                some = ((M, select.choose(N, K, M, 0, True, fp8=True), [0, 32, 256]) for M in tokens)
                fp8 = [each for each in some if each[1]["kernel"] != "dense"]
            for M, config, ranks in (*chosen, *natural, *invariant, *fp8):
                if M in for_wide and config["kernel"] != "wide":
                    continue
                if quick:
                    variant = ops._variant(config, 0, dtype)
                    ranks = [rank_in_turn(variant, turns[config["kernel"]], sm)]
                for rank in ranks:
                    resident = -(-config["grid"] // CARDS[sm][1]) if config["kernel"] == "skinny" else 1
                    exact = (K, N) if config["kernel"] == "skinny" and not quick else ()  # K and strides are constants
                    key = (ops._variant(config, rank, dtype), resident, exact)
                    if key not in done:
                        done.add(key)
                        arguments = (config, N, K, M, shards, rank, dtype)
                        what = {"N": N, "K": K, "tokens": M, "rank": rank, "dtype": str(dtype)[6:], "config": config}
                        yield what, lambda arguments=arguments: product(*arguments)
    yield {"config": {"kernel": "streams"}}, streams


def compile_all(architectures: list[int], quick: bool) -> list[dict]:
    """One row per kernel launched in each case."""
    from qerl_nvfp4 import fallback

    rows = []
    for sm in architectures:
        for what, call in cases(sm, quick):
            begin = time.time()
            try:
                compiled = recorded(call)
            except fallback.COMPILE_ERRORS as error:
                rows.append({"sm": sm, "kernel": what["config"]["kernel"]} | what | {"error": repr(error)[:400]})
                print(rows[-1], flush=True)
                continue
            for name, kernel in compiled:
                row = {"sm": sm, "kernel": name} | what | resources(kernel.asm["cubin"])
                row |= {"shared": kernel.metadata.shared, "shared_limit": CARDS[sm][2]}
                if name == "skinny_kernel":
                    row["converts"] = "cvt.rn.bf16x2.e2m1x2" in kernel.asm["ptx"]
                if row not in rows:
                    rows.append(row)
            print(f"sm_{sm} {what} {time.time() - begin:.1f} s", flush=True)
        for key, reason in fallback.refused.items():  # streaming kernels have a fallback
            rows.append({"sm": sm, "kernel": str(key), "error": reason})
        fallback.forget()
    return rows


def stacks(result: dict) -> str:
    """Markdown: the most stack of each kernel that uses any."""
    versions = sorted(result["tritons"])
    found: dict[tuple, dict[str, int]] = collections.defaultdict(dict)
    for version in versions:
        for row in result["tritons"][version]:
            if row.get("stack"):
                kind = row["kernel"].removesuffix("_kernel").replace("gemm", "portable"), row["sm"]
                found[kind][version] = max(row["stack"], found[kind].get(version, 0))
    short = [".".join(version.split(".")[:2]) for version in versions]
    lines = [f"| kernel | sm | {' | '.join(short)} |", "|---|---|" + "---:|" * len(short)]
    for (kernel, sm), by in sorted(found.items()):
        lines.append(f"| `{kernel}` | {sm} | {' | '.join(str(by.get(v, 0)) for v in versions)} |")
    return "\n".join(lines) + "\n"


def in_a_process_of_its_own(triton: str, arguments: list[str], log=None) -> tuple[str, list[dict]]:
    """Rows of one Triton, compiled in a subprocess; "": the installed Triton."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [triton, environment.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--inside", "--out", str(out), *arguments]
        result = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
        if result.returncode:
            raise RuntimeError(
                f"{' '.join(command)} with Triton from {triton or 'the environment'} failed; see its output"
            )
        found = json.loads(out.read_text())
    return found["triton"], found["rows"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("compile.json"))
    parser.add_argument("--tritons", default="", help="folders with a Triton each, separated like PATH")
    parser.add_argument("--architectures", default=",".join(map(str, CARDS)))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--inside", action="store_true", help="with the Triton of this process")
    args = parser.parse_args()
    architectures = [int(sm) for sm in args.architectures.split(",")]
    if args.inside:
        import triton

        result = {"triton": triton.__version__, "rows": compile_all(architectures, args.quick)}
        replace(args.out, json.dumps(result))
    else:
        passed_on = ["--architectures", args.architectures] + ["--quick"] * args.quick
        folders = args.tritons.split(os.pathsep)
        command = f"compile_matrix.py --architectures {args.architectures}" + " --quick" * args.quick
        from qerl_nvfp4.measured import source_digest

        for folder in folders:
            digest = source_digest()
            version, rows = in_a_process_of_its_own(folder, passed_on)
            # read each time, since another process may have added another Triton
            old = json.loads(args.out.read_text()) if args.out.is_file() else {}
            result = {
                "command": f"{command} --tritons <one folder per version>",
                "kernels": old.get("kernels", {}) | {version: digest},
                "tritons": old.get("tritons", {}) | {version: rows},
            }
            replace(args.out, one_row_per_line(result))
        for version, rows in result["tritons"].items():
            print(f"Triton {version}: {len(rows)} kernels, {sum('error' in row for row in rows)} failed")
        print(stacks(result))


def one_row_per_line(result: dict) -> str:
    head = {k: v for k, v in result.items() if k != "tritons"}
    versions = ",\n".join(
        f" {json.dumps(version)}: [\n  " + ",\n  ".join(map(json.dumps, rows)) + "\n ]"
        for version, rows in sorted(result["tritons"].items())
    )
    return json.dumps(head)[:-1] + ', "tritons": {\n' + versions + "\n}}\n"


def replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
