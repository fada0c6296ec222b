"""Every kernel that is selected compiles, for six GPUs and all Tritons of benchmarks/results/compile.json.

QERL_TRITONS=DIR:DIR, from `pip install --no-deps --target DIR triton==3.9.0`, adds Tritons; QERL_EXHAUSTIVE=1 ranks.
"""

import functools
import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
import triton

from qerl_nvfp4 import select
from qerl_nvfp4.measured import source_digest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import compile_matrix

BENCHMARKS = Path(compile_matrix.__file__).parent
RECORD = json.loads((BENCHMARKS / "results" / "compile.json").read_text())
EXHAUSTIVE = os.environ.get("QERL_EXHAUSTIVE") == "1"
FOLDERS = [*filter(None, os.environ.get("QERL_TRITONS", "").split(os.pathsep))]  # "" below: the installed one
FOLDERS += [""] if EXHAUSTIVE or triton.__version__ not in RECORD["tritons"] else []


@functools.cache
def compiled(of: str) -> tuple[str, list[dict]]:
    """The version, and the rows of all kernels: of a version that is recorded, or compiled with a folder's."""
    if of in RECORD["tritons"]:
        return of, RECORD["tritons"][of]
    return compile_matrix.in_a_process_of_its_own(of, [] if EXHAUSTIVE else ["--quick"])


per_triton = pytest.mark.parametrize("of", [*RECORD["tritons"], *FOLDERS], ids=lambda of: Path(of).name or "installed")


def test_the_record_is_of_these_sources():
    """CARD.md and the quick start name Triton 3.6 to 3.9."""
    digests = dict.fromkeys(RECORD["tritons"], source_digest())
    assert RECORD["kernels"] == digests, "run benchmarks/compile_matrix.py again"
    assert {version.rsplit(".", 1)[0] for version in RECORD["tritons"]} >= {"3.6", "3.7", "3.8", "3.9"}


@per_triton
def test_every_selected_kernel_compiles_and_fits_the_card(of):
    _, rows = compiled(of)
    assert not [row for row in rows if "error" in row]
    assert not [row for row in rows if row["shared"] > row["shared_limit"]]
    found = {(row["sm"], row["kernel"]) for row in rows}
    for sm in compile_matrix.CARDS:
        for kernel in ("skinny", "gemm", "lora_down", "dequantize", "lora_up", "rms_norm", "quantize", "quantize_rtn"):
            assert (sm, f"{kernel}_kernel") in found
    assert {sm for sm, kernel in found if kernel == "wgmma_kernel"} == {90}
    assert {sm for sm, kernel in found if kernel == "mma_kernel"} == {80, 86, 89, 120}
    portable = [row for row in rows if row["kernel"] == "gemm_kernel"]
    for sm in (86, 89, 120):
        ranks = {row["rank"] for row in portable if row["sm"] == sm}
        assert ranks == {0, 32, 256}, "a block has about 100 KB here: the adapter's rank must not matter"
    for row in portable:
        assert row["shared"] <= select.portable_shared_memory(row["config"]) <= row["shared_limit"], row
