"""The kernel for Ampere, Ada and GeForce Blackwell: its machine code, without a GPU, and its selection.

Its results: test_kernels_emulated.py, and test_kernels_gpu.py on any GPU.
"""

import re
import subprocess

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.ampere")
import test_kernels_sm90 as sm90
import triton
from nvfp4_cases import COMPILING, in_a_fresh_process, launchable

from qerl_nvfp4 import bounds, cost, select

INTEGER = ("LOP3", "SHF", "PRMT", "ISETP", "SEL", "IADD3", "LEA", "PLOP3", "MOV", "IMNMX", "VIMNMX", "VIADD")
MULTIPLY = ("IMAD", "HFMA2", "HMUL2", "HADD2")


def compiled(BM: int, R: int, capability: int, rank: int = 32, NS: int = 3):
    from qerl_nvfp4 import ampere

    WN, WT = bounds.warps(BM)
    constants = {"BM": BM, "R": R, "WN": WN, "WT": WT, "NS": NS, "SPLIT": True, "BIAS": True, "RANK": rank}
    constants["PDL"] = capability >= 90
    registers = bounds.registers(BM, R, rank)
    return sm90.compile_sm90(ampere.mma_kernel, constants, WN * WT, None, 3, {"xa_ptr": "*bf16"}, registers, capability)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "capability,BM,R", [*((sm, *tile) for sm in (80, 120) for tile in bounds.ISSUED), (86, 64, 2), (89, 64, 2)]
)
def test_costs_of_a_tile(BM, R, capability, tmp_path):
    """The counts with which bounds.py computes, registers, shared memory, and that words stay in registers."""
    NS = bounds.stages(BM, select.SMALLEST_SHARED_MEMORY)
    kernel = compiled(BM, R, capability, NS=NS)
    assert kernel.metadata.shared == NS * BM * 256, "only a ring of x"
    code = sm90.disassemble(kernel.asm["cubin"])
    assert not sm90.local(sm90.opcodes(code))
    body = sm90.hot_loop(code, "HMMA", 8 * R * (BM // 8) // bounds.warps(BM)[1])
    counts = tuple(len(sm90.starting(body, *names)) for names in (("HMMA",), INTEGER, MULTIPLY, ("",)))
    (tmp_path / "cubin").write_bytes(kernel.asm["cubin"])
    usage = [sm90.tools() / "cuobjdump", "-res-usage", tmp_path / "cubin"]
    text = subprocess.run(usage, capture_output=True, text=True, check=True).stdout
    registers = int(re.findall(r"REG:(\d+)", text)[0])
    print(f"sm_{capability} {BM} {R} {counts} of {bounds.ISSUED[BM, R]}, {registers} of {bounds.REGISTERS[BM, R]}")
    if triton.__version__.startswith("3.6."):
        assert counts[0] == bounds.ISSUED[BM, R][0]
        assert all(0.75 * most <= found <= most for found, most in zip(counts, bounds.ISSUED[BM, R], strict=True))
    assert registers <= bounds.REGISTERS[BM, R]
    assert not sm90.starting(body, "STS", "LDSM"), "weights and x go straight to their operands"
    wide = [op for op in body if "128" in op]
    reads = len(sm90.starting(wide, "LDS"))
    assert reads == BM // 2 // bounds.warps(BM)[1], "x in 16-byte reads, once for all rows of a warp"
    copies, threads = len(sm90.starting(body, "LDGSTS")), 32 * bounds.warps(BM)[0] * bounds.warps(BM)[1]
    assert copies == len(sm90.starting(wide, "LDGSTS")) == BM * 256 // 16 // threads, "x comes by cp.async"
    assert len(sm90.starting(wide, "LDG.")) == 2 * R, "the next words are on their way while these are decoded"


@pytest.mark.skipif(bool(COMPILING), reason="the outer test")
def test_in_a_fresh_process():
    in_a_fresh_process(__file__)


# --- selection ------------------------------------------------------------------------------------


@pytest.fixture(params=bounds.CARDS, ids=lambda card: card.name)
def card(request, pretend):
    """A machine with this card."""
    found = request.param
    pretend(f"NVIDIA {found.name}", found.sms, found.capability, 163 if found.capability == (8, 0) else 99)
    return found


@pytest.mark.parametrize("N,K", [(37888, 3584), (3584, 18944), (4608, 3584), (1152, 896), (1000, 1152)])
def test_the_selected_kernel_can_run_and_is_the_cheapest(card, N, K):
    shared = select.shared_memory_limit(0)
    for M in (17, 32, 64, 100, 200, 512, 1536):
        config, why = select.explain(N, K, M, 0, True)
        assert why == f"bounds of {card.name}"
        assert launchable(config, N, K, M, card.sms, shared)
        size = next(s for s in cost.SIZES if s >= M)
        ours = [bounds.mma_us(card, c, N, K, size) for c in bounds.mma_candidates(N, K, size, card.sms, shared)]
        cheapest = "mma" if min(ours) < bounds.dense_us(card, N, K, size) else "dense"
        assert config["kernel"] == cheapest and (M != 32 or cheapest == "mma")
    assert select.explain(N, K, 2000, 0, True) == ({"kernel": "dense"}, "heuristic")
    assert select.explain(N, K, 8, 0, True)[1] == "heuristic"
    assert select.explain(N, K, 32, 0, False)[0]["kernel"] == "portable", "float16"
    assert select.explain(N, K - 16, 32, 0, True)[0]["kernel"] == "portable", "K that 128 does not divide"
    for M in (1, 128, 300, 1024, 1537):
        config, why = select.explain(N, K, M, 0, True, fp8=True)
        ours, dense = bounds.fp8_us(card, N, K, M)
        assert config["fp8"] and launchable(config, N, K, M, card.sms, shared)
        assert config["kernel"] == ("portable" if M <= 128 or (ours < dense and M < 1500) else "dense")
        assert why == (f"bounds of {card.name}" if M < 1500 else "heuristic")
    assert select.explain(N, K, 32, 0, False, fp8=True) == (select.DENSE_FP8, "heuristic"), "float16"
