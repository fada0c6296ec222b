"""Compile for sm_90 without a GPU and pin what makes the kernels fast: register operands, no local memory, few instructions a weight."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
# the interpreter replaces triton.jit when triton is imported, so compilation happens in a fresh process
INSIDE = os.environ.get("QERL_SM90_COMPILE") == "1"


def tools() -> Path:
    import triton.backends.nvidia

    return Path(triton.backends.nvidia.__file__).parent / "bin"


INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)([^;]*);", re.M)


def disassemble(cubin: bytes) -> list[tuple[int, str, str]]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        command = [tools() / "cuobjdump", "-sass", f.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [(int(a, 16), op, rest) for a, op, rest in INSTRUCTION.findall(text)]


def hot_loop(code: list[tuple[int, str, str]], matrix: str) -> list[str]:
    """The innermost loop that issues matrix instructions: its opcodes."""
    bodies = []
    for address, op, rest in code:
        target = re.search(r"0x([0-9a-f]+)", rest)
        if op.startswith("BRA") and target and int(target.group(1), 16) < address:
            body = [o for a, o, _ in code if int(target.group(1), 16) <= a <= address]
            if sum(o.startswith(matrix) for o in body) >= 8:
                bodies.append(body)
    assert bodies, f"no loop with {matrix} instructions"
    return min(bodies, key=len)


POINTERS = {
    "x_ptr": "*bf16",
    "w_ptr": "*i32",
    "s_ptr": "*i16",
    "gs_ptr": "*fp32",
    "bias_ptr": "*bf16",
    "a_ptr": "*bf16",
    "xa_ptr": "*fp32",
    "flag_ptr": "*i32",
    "b_ptr": "*bf16",
    "y_ptr": "*bf16",
    "ws_ptr": "*fp32",
    "cnt_ptr": "*i32",
}


def compile_sm90(
    kernel,
    constants: dict,
    num_warps: int,
    descriptors: dict | None = None,
    num_stages: int = 3,
    pointers: dict | None = None,
):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    known = POINTERS | (pointers or {}) | (descriptors or {})
    signature = {n: "constexpr" if n in constants else known.get(n, "i32") for n in names}
    aligned = [n for n in names if n in known and n not in (descriptors or {})] + [
        n for n in names if n in ("N", "K", "sxm", "sym", "swn", "ssn", "son")
    ]
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned if n not in constants}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def opcodes(code):
    return [op for _, op, _ in code]


def check(code, matrix: str, weights_per_thread: int, limit: float) -> None:
    everything = opcodes(code)
    assert not [op for op in everything if op.startswith(("LDL", "STL"))], "local memory traffic"
    body = hot_loop(code, matrix)
    ratio = len(body) / weights_per_thread
    print(f"{len(body)} instructions for {weights_per_thread} weights a thread: {ratio:.2f}")
    assert ratio < limit
    stores = [op for op in body if op.startswith(("STS", "STSM"))]
    assert not stores, f"weights take a detour through shared memory: {stores[:3]}"


SKINNY = [(8, 4, 1, 2, 0, 3.15), (8, 4, 1, 4, 32, 2.95), (16, 4, 1, 2, 32, 3.45)]
WGMMA = [(64, 256, 16, 3, 0, 4.3), (64, 256, 8, 3, 32, 3.5), (32, 256, 16, 4, 32, 4.3), (128, 128, 8, 2, 32, 4.3)]


@pytest.mark.skipif(not INSIDE, reason="run by test_in_a_fresh_process")
@pytest.mark.parametrize("BM,WK,WN,R,rank,limit", SKINNY)
def test_skinny(BM, WK, WN, R, rank, limit):
    from qerl_nvfp4 import hopper

    constants = {
        "swn": 448,
        "ssn": 112,
        "BM": BM,
        "WK": WK,
        "WN": WN,
        "R": R,
        "BIAS": rank > 0,
        "RANK": rank,
        "KS": 7 * (rank > 0),
        "SLICE": 512 * (rank > 0),
        "LATE": False,
        "PDL": True,
    }
    code = disassemble(compile_sm90(hopper.skinny_kernel, constants, WK * WN).asm["cubin"])
    check(code, "HMMA", 64 * R, limit)
    body = hot_loop(code, "HMMA")
    assert not [op for op in body if op.startswith(("BAR", "LDS"))], (
        "the loop has no barrier and reads no shared memory"
    )
    assert sum(op.startswith("LDG") and "128" in op for op in body) >= 2 * R, "16-byte loads of weights"


@pytest.mark.skipif(not INSIDE, reason="run by test_in_a_fresh_process")
@pytest.mark.parametrize("BM,BN,NW,S,rank,limit", WGMMA)
def test_wgmma(BM, BN, NW, S, rank, limit):
    from qerl_nvfp4 import hopper_wgmma as hopper

    constants = {
        "BM": BM,
        "BN": BN,
        "NW": NW,
        "S": S,
        "BIAS": rank > 0,
        "RANK": rank,
        "KS": 7 * (rank > 0),
        "PDL": True,
    }
    descriptors = {
        "x_d": f"tensordesc<bf16[{BM}, 128],{hopper.X_SHARED!r}>",
        "w_d": f"tensordesc<i32[{BN}, 16],{hopper.W_SHARED!r}>",
        "s_d": f"tensordesc<i16[{BN}, 8],{hopper.S_SHARED!r}>",
    }
    code = disassemble(compile_sm90(hopper.wgmma_kernel, constants, NW, descriptors).asm["cubin"])
    check(code, "HGMMA", BN * 256 // (NW * 32), limit)
    waits = [rest for _, op, rest in code if op == "WARPGROUP.DEPBAR.LE"]
    assert len(waits) <= 3 + (rank + 31) // 32, "wgmma is serialized"
    assert sum("0x1" in rest for rest in waits) == 2, "one wgmma stays in flight during the next decode"


@pytest.mark.skipif(not INSIDE, reason="run by test_in_a_fresh_process")
def test_portable():
    import triton.language as tl

    from qerl_nvfp4 import portable

    constants = {
        "BM": 16,
        "BN": 128,
        "BK": 128,
        "SPLIT": True,
        "EVEN_K": True,
        "MMA": 3,
        "BIAS": False,
        "RANK": 0,
        "BRANK": 16,
        "INTERP": False,
    }
    kernel = compile_sm90(portable.gemm_kernel, constants, 4, None, 4, {"s_ptr": "*u8"})
    code = disassemble(kernel.asm["cubin"])
    everything = opcodes(code)
    assert not [op for op in everything if op.startswith(("LDL", "STL"))]
    assert any(op.startswith("HGMMA") for op in everything)
    constants = {"BN": 8, "BK": 512, "DTYPE": tl.bfloat16, "INTERP": False}
    kernel = compile_sm90(portable.dequantize_kernel, constants, 4, None, 3, {"s_ptr": "*u8", "o_ptr": "*bf16"})
    everything = opcodes(disassemble(kernel.asm["cubin"]))
    assert not [op for op in everything if op.startswith(("LDL", "STL"))]
    assert any(op.startswith("STG") and "128" in op for op in everything)


@pytest.mark.skipif(INSIDE, reason="the outer test")
def test_in_a_fresh_process():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"QERL_SM90_COMPILE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        __file__,
        "-q",
        "-p",
        "no:cacheprovider",
        "--noconftest",
        "-o",
        "addopts=",
        "-rA",
    ]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    print(result.stdout[-6000:])
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "8 passed" in result.stdout
