"""Compile for sm_90 without a GPU and pin the machine code that makes the kernels fast."""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from nvfp4_cases import COMPILING, in_a_fresh_process

triton = pytest.importorskip("triton")


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


def hot_loop(code: list[tuple[int, str, str]], matrix: str, count: int = 0) -> list[str]:
    """The innermost loop that issues (`count`) matrix instructions: its opcodes."""
    bodies = []
    for address, op, rest in code:
        target = re.search(r"0x([0-9a-f]+)", rest)
        if op.startswith("BRA") and target and int(target.group(1), 16) < address:
            body = [o for a, o, _ in code if int(target.group(1), 16) <= a <= address]
            found = sum(o.startswith(matrix) for o in body)
            # a range with an EXIT is a wait's way back from the end of the code, not a loop
            if "EXIT" not in body and (found == count if count else found >= 8):
                bodies.append(body)
    assert bodies, f"no loop with {matrix} instructions"
    return min(bodies, key=len)


POINTERS = {
    "x_ptr": "*bf16", "w_ptr": "*i32", "s_ptr": "*i16", "gs_ptr": "*fp32", "bias_ptr": "*bf16", "a_ptr": "*bf16",
    "xa_ptr": "*fp32", "slice_ptr": "*fp32", "ticket_ptr": "*i32", "flag_ptr": "*i32", "taken_ptr": "*i32",
    "count_ptr": "*i32", "b_ptr": "*bf16", "y_ptr": "*bf16", "ws_ptr": "*fp32", "cnt_ptr": "*i32", "done_ptr": "*i32",
}  # fmt: skip


def compile_sm90(
    kernel, constants: dict, num_warps: int, descriptors: dict | None = None, num_stages: int = 3,
    pointers: dict | None = None, registers: int | None = None, capability: int = 90,
):  # fmt: skip
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    known = POINTERS | (pointers or {}) | (descriptors or {})
    signature = {n: "constexpr" if n in constants else known.get(n, "i32") for n in names}
    aligned = [n for n in names if n in known and n not in (descriptors or {})] + [
        n for n in names if n in ("N", "K", "sxm", "sym", "swn", "ssn", "son")
    ]
    aligned = {(names.index(n),) for n in aligned if n not in constants}
    for n in ("pointers", "aligned"):
        aligned |= {(names.index(n), i) for i in range(len(known[n]))} if n in names else set()
    attributes = {key: [["tt.divisibility", 16]] for key in sorted(aligned)}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": registers}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def opcodes(code):
    return [op for _, op, _ in code]


def starting(ops: list[str], *names: str) -> list[str]:
    return [op for op in ops if op.startswith(names)]


def local(ops: list[str]) -> list[str]:
    """Accesses to local memory: spilled registers."""
    return starting(ops, "LDL", "STL")


def check(code, matrix: str, weights_per_thread: int, limit: float, spills: int = 0, count: int = 0) -> None:
    body = hot_loop(code, matrix, count)
    ratio, spilled = len(body) / weights_per_thread, len(local(opcodes(code)))
    print(f"{len(body)} instructions for {weights_per_thread} weights per thread: {ratio:.2f}; {spilled} spills")
    if triton.__version__.startswith(("3.6.", "3.7.")):  # later ones spill more
        assert ratio < limit
        assert spilled <= spills and not local(body)
    stores = starting(body, "STS", "STSM")
    assert not stores, f"weights take a detour through shared memory: {stores[:3]}"


# BM, WK, WN, R, late, rank, programs per multiprocessor, instructions per weight
SKINNY = [
    (8, 2, 2, 2, False, 0, 4, 3.15),
    (8, 4, 1, 4, False, 32, 3, 2.95),
    (8, 4, 1, 2, True, 0, 3, 3.0),
    (16, 4, 1, 2, False, 32, 3, 3.45),
    (16, 4, 1, 4, True, 32, 2, 2.95),
]
# BM, P, S, permute (or natural), rank; local memory accesses outside the loop
WGMMA = [
    (16, 3, 4, True, 32, 8),
    (32, 2, 5, True, 32, 4),
    (64, 2, 4, True, 0, 0),
    (64, 3, 3, False, 32, 12),
    (128, 2, 2, False, 224, 8),
    (128, 3, 2, False, 32, 12),
    (128, 2, 2, "natural", 32, 12),
]


@pytest.mark.compiled
@pytest.mark.parametrize("BM,WK,WN,R,late,rank,programs,limit", SKINNY)
def test_skinny(BM, WK, WN, R, late, rank, programs, limit):
    from qerl_nvfp4 import hopper

    constants = {
        "swn": 448, "ssn": 112, "BM": BM, "WK": WK, "WN": WN, "R": R, "BIAS": rank > 0, "RANK": rank, "K": 3584,
        "SLICE": 512, "LATE": late, "PDL": True, "CONVERT": False,
    }  # fmt: skip
    pointers = {"xa_ptr": "*i32", "ws_ptr": "*i32"}
    registers = min(255, 65536 // (programs * WK * WN * 32) // 8 * 8)
    kernel = compile_sm90(hopper.skinny_kernel, constants, WK * WN, None, 3, pointers, registers)
    code = disassemble(kernel.asm["cubin"])
    count = 8 * R * (BM // 8)  # the loop over the weights, not that of the x A^T tasks
    check(code, "HMMA", 64 * R, limit, count=count)
    body = hot_loop(code, "HMMA", count)
    assert not starting(body, "BAR", "LDS"), "the loop has no barrier and reads no shared memory"
    words = [op for op in body if op.startswith("LDG") and "LTC256B" in op]
    assert len(words) == 2 * R, "each fetches 256 bytes into the second-level cache"
    x = [op for op in body if op.startswith("LDG") and ".EL" in op]
    assert len(x) == BM // 2 and all(".128" in op for op in words + x), "16-byte loads"
    assert not late or len(starting(body, "MOV", "IMAD.MOV")) < 8, (
        "words are loaded into the registers that decode them"
    )
    fences = starting(opcodes(code), "MEMBAR", "ATOM")
    assert rank > 0 or not fences, "a tile's pieces are cells that are awaited: no counter, no fence"


def wgmma(BM: int, P: int, S: int, X: int, order: str, rank: int, tasks: bool | None = None, fp8: bool = False):
    """The machine code of wgmma_kernel, its PTX and its variant, with x A^T in tasks or before the product."""
    from qerl_nvfp4 import hopper_tile as hopper
    from qerl_nvfp4.hopper_wgmma import wgmma_kernel

    tasks = rank > 0 if tasks is None else tasks
    average, *registers = hopper.registers(BM, P, order == "permute", tasks)
    variant = hopper.variant(BM, P, S, X, order, fp8, rank > 0, rank, tasks, True, *registers)
    boxes, kind, layout = hopper.boxes_of(BM), *(("fp8e4nv", hopper.X8_SHARED) if fp8 else ("bf16", hopper.X_SHARED))
    x_box = f"tensordesc<{kind}[%d, {variant.C}],{layout!r}>"
    xa_box = f"tensordesc<bf16[%d, 32],{hopper.L_SHARED!r}>"
    descriptors = {f"x{i}_d": x_box % b for i, b in enumerate(boxes) if b}
    descriptors |= {f"xa{i}_d": xa_box % b for i, b in enumerate(boxes) if b and rank}
    descriptors |= {
        "w_d": f"tensordesc<i32[64, {32 // variant.B}],{hopper.words_shared(variant.B)!r}>",
        "s_d": f"tensordesc<i16[64, 8],{hopper.S_SHARED!r}>",
        "y_d": f"tensordesc<bf16[16, 64],{hopper.X_SHARED!r}>",
    }
    descriptors |= {"b_d": xa_box % 64} if rank else {}
    absent = {n: None for n in wgmma_kernel.arg_names if n.endswith("_d") and n not in descriptors}
    pointers = "*bf16 *bf16 *fp32 *bf16 *i32 *i32 *i32 *i32 *fp32 *bf16 *fp32 *fp32 *i32".split()
    descriptors |= {"pointers": tuple(pointers), "aligned": ("i32",) * 3, "sizes": ("i64",) * 11}
    compiled = compile_sm90(wgmma_kernel, absent | {"V": variant}, 4, descriptors, registers=average)
    assert compiled.metadata.shared <= 227 * 1024
    return disassemble(compiled.asm["cubin"]), compiled.asm["ptx"], variant


@pytest.mark.compiled
@pytest.mark.parametrize("BM,P,S,permute,rank,spills", WGMMA)
def test_wgmma(BM, P, S, permute, rank, spills):
    order = permute if isinstance(permute, str) else "permute" if permute else "decoded"
    code, ptx, variant = wgmma(BM, P, S, 0, order, rank)
    made = ptx.count("mbarrier.init.shared")
    ring = S * variant.B * (3 if permute is True else 2)
    assert made == ring + (2 if rank else 0), "a barrier that nobody waits for lies in a buffer"
    check(code, "HGMMA", 128, 5.0 if order == "natural" else 3.5, spills, count=16)
    waits = [rest for _, op, rest in code if op == "WARPGROUP.DEPBAR.LE"]
    # a group waits eight times in its loop, once after it and once a piece of the adapter (ptxas copies one or two),
    # else wgmma is serialized
    assert len(waits) <= P * (9 + (rank + 31) // 32) + 2
    assert sum("0x1" in rest for rest in waits) == 8 * P, "a wgmma runs on during the next decode"
    everything = opcodes(code)
    assert len(starting(everything, "STSM")) >= P * BM // 16, "y leaves through the matrix store"
    assert len(starting(everything, "UTMASTG")) == P * BM // 16, "and the bulk copy engine"
    loads = [op for op in starting(everything, "LDG", "STG") if "128" in op]
    assert len(loads) >= 2 * P * BM // 8, "partial sums travel 16 bytes at a time"
    if permute is True:
        assert sum("128" in op for op in starting(everything, "STS")) >= BM // 4, "x is put in order 16 bytes at a time"


@pytest.mark.compiled
@pytest.mark.parametrize(
    "tile,order,tasks,limit,spills",
    [
        ((160, 2, 3, 7), "decoded", True, 4.6, 8),
        ((256, 2, 2, 4), "decoded", False, 5.3, 24),
        ((144, 3, 3, 6), "natural", True, 6.8, 24),
    ],
)
def test_wide(tile, order, tasks, limit, spills):
    """A weight is decoded once for all parts of a tile, in registers, while the parts' wgmma run."""
    from qerl_nvfp4 import cost
    from qerl_nvfp4.hopper_tile import parts_of

    assert tile in cost.WIDE
    BM, P, *_ = tile
    code, *_ = wgmma(*tile, order, 32, tasks)
    count = 16 * len(parts_of(BM))
    check(code, "HGMMA", 128, limit, spills, count=count)
    waits = [rest for _, op, rest in code if op == "WARPGROUP.DEPBAR.LE"]
    assert len(waits) <= P * 10 + 2 and sum(f"0x{count // 16}" in rest for rest in waits) == 8 * P
    assert len(starting(opcodes(code), "UTMASTG")) == P * BM // 16


@pytest.mark.skipif(bool(COMPILING), reason="the outer test")
def test_in_a_fresh_process():
    in_a_fresh_process(__file__)
