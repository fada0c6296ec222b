"""Every kernel that is selected compiles, for six GPUs, with the installed Triton and with those that QERL_TRITONS
names.

QERL_TRITONS=DIR:DIR pytest kernels/tests/test_kernels_compile.py      one folder per version, made by
    pip install --no-deps --target DIR triton==3.9.0

On each card a configuration is compiled for one rank of the adapter, in turn; with QERL_EXHAUSTIVE=1 for all, and more
matrices.
"""

import functools
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import compile_matrix

TRITONS = ["", *filter(None, os.environ.get("QERL_TRITONS", "").split(os.pathsep))]  # "": the installed one
EXHAUSTIVE = os.environ.get("QERL_EXHAUSTIVE") == "1"
per_triton = pytest.mark.parametrize("triton", TRITONS, ids=lambda folder: Path(folder).name or "installed")


@functools.cache
def compiled(triton: str) -> tuple[str, list[dict]]:
    """The version, and the rows of all kernels."""
    return compile_matrix.in_a_process_of_its_own(triton, [] if EXHAUSTIVE else ["--quick"])


@per_triton
def test_every_selected_kernel_compiles_and_fits_the_card(triton):
    _, rows = compiled(triton)
    assert not [row for row in rows if "error" in row]
    assert not [row for row in rows if row["shared"] > row["shared_limit"]]
    found = {(row["sm"], row["kernel"]) for row in rows}
    for sm in compile_matrix.CARDS:
        for kernel in ("skinny", "gemm", "lora_down", "dequantize", "lora_up", "rms_norm", "quantize", "quantize_rtn"):
            assert (sm, f"{kernel}_kernel") in found
    assert {sm for sm, kernel in found if kernel == "wgmma_kernel"} == {90}
    assert {sm for sm, kernel in found if kernel == "mma_kernel"} == {80, 86, 89, 120}
    for sm in (86, 89, 120):
        ranks = {row["rank"] for row in rows if row["sm"] == sm and row["kernel"] == "gemm_kernel"}
        assert ranks == {0, 32, 256}, "a block has about 100 KB here: the adapter's rank must not matter"


@per_triton
def test_blackwell_converts_where_the_assembler_can(triton):
    """And no other card does."""
    version, rows = compiled(triton)
    can = tuple(map(int, version.split(".")[:2])) >= (3, 8)
    converting = {(row["sm"], row["converts"]) for row in rows if row["kernel"] == "skinny_kernel"}
    assert converting == {(sm, can and sm >= 100) for sm in compile_matrix.CARDS}


@per_triton
def test_no_kernel_takes_more_shared_memory_than_was_computed(triton):
    from qerl_nvfp4 import select

    _, rows = compiled(triton)
    portable = [row for row in rows if row["kernel"] == "gemm_kernel"]
    assert portable
    for row in portable:
        assert row["shared"] <= select.portable_shared_memory(row["config"]) <= row["shared_limit"], row


@per_triton
def test_what_decodes_does_not_spill(triton):
    """More than a word or two on the stack would be the loop's."""
    version, rows = compiled(triton)
    if not version.startswith(("3.6.", "3.7.")):
        pytest.skip("later ones spill more")
    for row in rows:
        if row["kernel"] in ("skinny_kernel", "gemm_kernel", "mma_kernel") and row["dtype"] == "bfloat16":
            assert row["stack"] <= 24, row
