"""What step.py's `--profile` says of one optimizer step: per phase the GPU's kernels, its idle time and what the host launched.

The step is traced by torch.profiler with CUDA activities alone. CUPTI gives a kernel inside a CUDA graph a record of its own, as any other,
and the launch of the graph one among the host's calls; so `kernels` counts what the GPU ran (copies and fills included), `launches` what
the host asked for, and `graphs` how many of those were whole graphs. Tracing takes time of its own: compare a
phase's `wall_ms` with the row's `median` before `idle_ms` is believed.

Without a GPU the operators of the CPU stand in for kernels (`of` is `cpu_op`), nested ones counted each: a dry run, no measurement.
"""

import bisect
import itertools
import json
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qerl_trl.support.phases import PhaseTimer

TOP = 10
#: what no wrapped function took of a step
REST = "update"
#: CUPTI's records of a step may take this much; the default, 128 MiB, ends within a rollout of 32B, of 400,000 kernels
KINETO = "ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB=4096\n"
#: a trace whose last kernel ends this many seconds before the step does is not whole
LOST = 0.5
#: kinds of kernels by what their names contain, the first that fits; every other kernel is named by its function
KINDS = (
    ("reshape_and_cache", "writing the KV cache"),
    ("flash|fmha|attention|attn|sdpa", "attention"),
    ("nvjet|cublas|gemmsn|gemv2|splitkreduce|cutlass.*gemm|gemm.*cutlass", "cuBLAS's matrix products"),
    ("^triton_", "what inductor fused"),
    ("^memcpy", "memcpy"),
    ("^memset", "memset"),
)


def environment(folder: Path) -> dict[str, str]:
    """Of a process that traces: Kineto reads its limits from a file."""
    (folder / "kineto.conf").write_text(KINETO)
    return {"KINETO_CONFIG": str(folder / "kineto.conf"), "TEARDOWN_CUPTI": "0"}


def kind_of(kernel: str) -> str:
    """A kernel's kind, or the name of its function without namespaces, template arguments and parameters."""
    for pattern, kind in KINDS:
        if re.search(pattern, kernel.lower()):
            return kind
    name = kernel.replace("(anonymous namespace)", "anonymous").removeprefix("void ")
    return re.split(r"[<(]", name, maxsplit=1)[0].rpartition("::" if kernel.startswith("void ") else "\0")[2][:60]


class SpanTimer(PhaseTimer):
    """Also remembers what was called when: (name, start, end) in nanoseconds of the clock that a trace has, inner ones first."""

    def __init__(self, *phases: str) -> None:
        super().__init__(*phases)
        self.spans: list[tuple[str, int, int]] = []

    @contextmanager
    def phase(self, name: str, counts: bool = True, span: str | None = None) -> Iterator[None]:
        began = time.time_ns()
        with super().phase(name, counts):
            try:
                yield
            finally:
                self.spans.append((span or name, began, time.time_ns()))

    def take(self) -> dict[str, float]:
        self.spans = []
        return super().take()


def time_phases(trainer: Any, synchronize: Callable[[], None]) -> SpanTimer:
    """Wrap what a step consists of; of nested phases each counts its own share."""
    timer = SpanTimer("rollout", "sync", "reward", "scoring")

    def wrap(owner: Any, name: str, phase: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            synchronize()
            with timer.phase(phase, span=name if phase == "sync" else phase):
                output = inner(*args, **kwargs)
                synchronize()
            return output

        setattr(owner, name, timed)

    wrap(trainer, "_generate", "rollout")
    wrap(trainer, "_calculate_rewards", "reward")
    wrap(trainer, "_generate_and_score_completions", "scoring")
    for name in ("sync_weights", "sync_noise"):
        if hasattr(getattr(trainer, "vllm_generation", None), name):
            wrap(trainer.vllm_generation, name, "sync")
    return timer


def segments(spans: list[tuple[str, int, int]], start: int, end: int) -> list[tuple[int, int, str]]:
    """A step cut where its spans begin and end: (from, to, the innermost span there, else `REST`), in order, without gaps."""
    cuts = sorted({start, end, *(min(max(t, start), end) for _, *times in spans for t in times)})
    found = []
    for low, high in itertools.pairwise(cuts):
        around = [(e - b, name) for name, b, e in spans if b <= low and high <= e]
        found.append((low, high, min(around)[1] if around else REST))
    return found


def covered(intervals: list[tuple[int, int]]) -> int:
    """Length of the union."""
    total, reached = 0, 0
    for low, high in sorted(intervals):
        low = max(low, reached)
        if high > low:
            total, reached = total + high - low, high
    return total


def summary(
    trace: dict[str, Any], spans: list[tuple[str, int, int]], start: int, end: int, cpu: bool
) -> dict[str, Any]:
    """Of a Chrome trace of torch.profiler; times of `spans`, `start` and `end` are nanoseconds of the epoch.

    Raises:
        RuntimeError: the trace ends before the step, or has nothing of it.
    """
    base, cuts = trace.get("baseTimeNanoseconds", 0), segments(spans, start, end)
    begins = [low for low, _, _ in cuts]
    wall: Counter[str] = Counter()
    for low, high, name in cuts:
        wall[name] += high - low
    kernels: dict[str, list[tuple[int, int, str]]] = {name: [] for name in wall}
    calls = {name: Counter[str]() for name in wall}
    outside = last = 0
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        category, name = event.get("cat"), event["name"]
        low = base + round(1e3 * event["ts"])
        runs = category in (("cpu_op",) if cpu else ("kernel", "gpu_memcpy", "gpu_memset"))
        asks = category in ("cuda_runtime", "cuda_driver") and re.search("Launch|MemcpyAsync|MemsetAsync", name)
        if not runs and not asks:
            continue
        if not start <= low < end:
            outside += runs
            continue
        _, border, phase = cuts[bisect.bisect_right(begins, low) - 1]
        if runs:
            high = low + round(1e3 * event["dur"])
            last = max(last, high)
            kernels[phase].append((low, min(high, border), kind_of(name)))
        else:
            calls[phase]["graphs" if "GraphLaunch" in name else "others"] += 1
    if not last or (not cpu and end - last > 1e9 * LOST):
        raise RuntimeError(
            f"the trace's last kernel ends {(end - last) / 1e9:.2f} s before the step does: Kineto stopped collecting. A larger "
            f"ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB in the file that KINETO_CONFIG names has room for more"
            if last
            else f"no kernel of the step is in the trace, and {outside} outside of it: the clocks of the two differ"
        )
    phases = {name: _phase(wall[name], kernels[name], calls[name]) for name in wall}
    whole = [one for found in kernels.values() for one in found]
    phases["step"] = _phase(end - start, whole, sum(calls.values(), Counter[str]()))
    return {"of": "cpu_op" if cpu else "kernel", "outside": outside, "phases": phases}


def _phase(wall: int, kernels: list[tuple[int, int, str]], calls: Counter[str]) -> dict[str, Any]:
    spent, counts = Counter[str](), Counter[str]()
    for low, high, kind in kernels:
        spent[kind] += high - low
        counts[kind] += 1
    busy = covered([(low, high) for low, high, _ in kernels])
    return {
        "wall_ms": round(wall / 1e6, 2),
        "kernels_ms": round(sum(spent.values()) / 1e6, 2),
        "idle_ms": round((wall - busy) / 1e6, 2),
        "kernels": len(kernels),
        "launches": calls.total(),
        "graphs": calls["graphs"],
        "top": [{"kernel": k, "ms": round(ns / 1e6, 2), "count": counts[k]} for k, ns in spent.most_common(TOP)],
    }


class StepTrace:
    """Traces from `start` to `stop`, and says of the step in between what `summary` says."""

    def __init__(self, device: str) -> None:
        self.running = False
        self._cpu = device == "cpu"
        self._began = 0

    def start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CPU if self._cpu else ProfilerActivity.CUDA])
        self._profile.start()
        self.running = True

    def step_begins(self) -> None:
        self._began = time.time_ns()

    def stop(self, spans: list[tuple[str, int, int]]) -> dict[str, Any]:
        """The GPU has done its work. `failed` and why, where the trace is not whole."""
        ended = time.time_ns()
        self._profile.stop()
        self.running = False
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            self._profile.export_chrome_trace(path)
            trace = json.loads(Path(path).read_text(errors="replace"))
        try:
            found = summary(trace, spans, self._began, ended, self._cpu)
        except RuntimeError as error:
            return {"failed": str(error)}
        return found | {"summarized_s": round((time.time_ns() - ended) / 1e9, 1)}


# --- of rows that have a profile, for the documentation --------------------------------------------------------------------------------


def dearest(part: dict[str, Any], count: int = 5) -> str:
    """The kernels of a phase that take the most, in milliseconds."""
    return ", ".join(f"{one['kernel']} {one['ms']:.3g}" for one in part["top"][:count])


def bound(part: dict[str, Any]) -> str:
    """What takes the time of a phase: its kernels, or a GPU that waits."""
    return f"traced: kernels {part['kernels_ms']:.4g} and an idle GPU {part['idle_ms']:.4g} of {part['wall_ms']:.4g} ms; {dearest(part)}"


#: of a step, from which on a phase stands in the table; the file has all of them
SHOWN = 0.02


def table(rows: list[dict[str, Any]]) -> str:
    """Empty where no row has a profile."""
    lines = []
    for row in rows:
        phases = row.get("profile", {}).get("phases", {})
        known = sorted(phases.items(), key=lambda item: -item[1]["wall_ms"])
        for name, part in [pair for pair in known if pair[1]["wall_ms"] >= SHOWN * known[0][1]["wall_ms"]]:
            numbers = " | ".join(f"{part[key]:.4g}" for key in ("wall_ms", "kernels_ms", "idle_ms"))
            counts = " | ".join(str(part[key]) for key in ("kernels", "launches", "graphs"))
            commit = f" ({row['commit'][:7]})" if "commit" in row else ""
            lines.append(f"| {row['name']}{commit} | {name} | {numbers} | {counts} | {dearest(part)} |")
    if not lines:
        return ""
    head = "| traced step | phase | wall, ms | kernels, ms | GPU idle, ms | kernels | launches | of graphs | dearest kernels, ms |"
    return "\n".join([head, "|---|---|" + "---:|" * 6 + "---|", *lines]) + (
        "\n\nOne more step of these cases, traced by torch.profiler, at the commit in brackets. Tracing itself takes time: wall and idle are to be read "
        "beside the seconds of the timed steps."
    )
