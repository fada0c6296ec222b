"""benchmarks/step_profile.py: what it reads out of a trace, by hand and from torch.profiler itself."""

import importlib
import time
from pathlib import Path

import pytest
import torch

MS = 1_000_000
BASE = 1_700_000_000_000_000_000


@pytest.fixture
def profiles(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("step_profile")


def event(name, begins, lasts=0.01, category="kernel"):
    """Times in milliseconds."""
    return {"ph": "X", "cat": category, "name": name, "ts": 1e3 * begins, "dur": 1e3 * lasts}


def trace_of(*events):
    return {"baseTimeNanoseconds": BASE, "traceEvents": [{"ph": "M", "name": "process_name"}, *events]}


def spans_of(*spans):
    return [(name, BASE + begins * MS, BASE + ends * MS) for name, begins, ends in spans]


def test_each_phase_has_its_own_kernels_and_idle_time(profiles):
    """A rollout from 0 to 50 with a sync from 10 to 20 in it, and an update of what is left of 100 ms."""
    trace = trace_of(
        event("cudaGraphLaunch", 21, category="cuda_runtime"),
        event("cuLaunchKernelEx", 12, category="cuda_driver"),
        event("cudaStreamSynchronize", 13, category="cuda_runtime"),
        event("gemm_kernel", 12, 4),
        event("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128> >(flash::Params)", 22, 10),
        event("gemm_kernel", 30, 10),
        event("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", 60, 38),
        event("Memcpy HtoD (Pinned -> Device)", 98, 1, category="gpu_memcpy"),
        event("before the step", -5),
    )
    found = profiles.summary(trace, spans_of(("sync_noise", 10, 20), ("rollout", 0, 50)), BASE, BASE + 100 * MS, False)
    numbers = {
        name: [part[key] for key in ("wall_ms", "kernels_ms", "idle_ms", "kernels", "launches", "graphs")]
        for name, part in found["phases"].items()
    }
    assert numbers == {
        "rollout": [40, 20, 22, 2, 1, 1],
        "sync_noise": [10, 4, 6, 1, 1, 0],
        "update": [50, 39, 11, 2, 0, 0],
        "step": [100, 63, 39, 5, 2, 1],
    }
    assert found["outside"] == 1
    assert found["phases"]["step"]["top"] == [
        {"kernel": "cuBLAS's matrix products", "ms": 38, "count": 1},
        {"kernel": "gemm_kernel", "ms": 14, "count": 2},
        {"kernel": "attention", "ms": 10, "count": 1},
        {"kernel": "memcpy", "ms": 1, "count": 1},
    ]


@pytest.mark.parametrize(
    ("events", "message"),
    [([event("a", 1)], "2.00 s before the step does: Kineto stopped collecting"), ([event("a", -9)], "and 1 outside")],
    ids=["stopped", "other-clock"],
)
def test_a_trace_that_is_not_whole_is_no_profile(profiles, events, message):
    with pytest.raises(RuntimeError, match=message):
        profiles.summary(trace_of(*events), [], BASE, BASE + 2001 * MS, False)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void vllm::rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long)", "rms_norm_kernel"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(int)", "writing the KV cache"),
        ("void at::native::(anonymous namespace)::vectorized_elementwise_kernel<4>(int)", "vectorized_elementwise_kernel"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<> > >(int)", "attention"),
        ("triton_red_fused__to_copy_mul_3", "what inductor fused"),
        ("Memset (Device)", "memset"),
        ("skinny_kernel", "skinny_kernel"),
    ],
)  # fmt: skip
def test_kernels_are_named_by_their_kind_or_function(profiles, kernel, kind):
    assert profiles.kind_of(kernel) == kind


def test_the_clock_of_a_trace_is_that_of_the_spans(profiles):
    timer, trace = profiles.SpanTimer("rollout"), profiles.StepTrace("cpu")
    trace.start()
    trace.step_begins()
    with timer.phase("rollout"):
        torch.ones(64, 64) @ torch.ones(64, 64)
    time.sleep(0.01)
    torch.ones(8).cumsum(0)
    phases = trace.stop(timer.spans)["phases"]
    kinds = {name: {one["kernel"] for one in part["top"]} for name, part in phases.items()}
    assert "aten::mm" in kinds["rollout"] and "aten::cumsum" in kinds["update"]
    assert not {"aten::cumsum"} & kinds["rollout"] and phases["update"]["idle_ms"] >= 9
    assert phases["step"]["kernels"] == phases["rollout"]["kernels"] + phases["update"]["kernels"]
    assert not trace.running
    assert not timer.take().keys() - {"rollout"} and not timer.spans


def test_rows_without_a_profile_have_no_table(profiles):
    part = profiles.summary(trace_of(event("a", 1)), [], BASE, BASE + 3 * MS, False)
    row = {"name": "case", "profile": part}
    assert profiles.table([{"name": "other"}, {"name": "lost", "profile": {"failed": "why"}}]) == ""
    assert "| case | step | 3 | 0.01 | 2.99 | 1 | 0 | 0 | a 0.01 |" in profiles.table([row])
