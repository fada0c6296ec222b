"""Planned and measured peaks of GPU memory: complete training steps on random weights in the Qwen2.5 shapes.

    python benchmarks/memory.py --output memory_h200.json               # all workloads, at most 6 minutes
    python benchmarks/memory.py --only 7b-4x4096-sleep 32b-2x2048 --output memory_h200.json
    python benchmarks/memory.py --only tiny tiny-engine --device cpu    # dry run, nothing measured

A workload is one process: a `QeRLGRPOTrainer` takes two optimizer steps with a rollout each. The engine has a KV cache
of the planned size, prompts for all sequences, and generates a few tokens; random tokens then fill the completions to
full length. transformers generates all tokens.

`measured_gib`: NVML peak of the process, sampled every 10 ms. `ratio`: planned over measured. `error`: ratio minus 1,
required between 0 and 0.1. `card`: size of the GPU in the plan. Rows of other workloads stay in the file.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
from step import Peak, fill_completions, plan_of_shape, prompts, show_a_card_of, trainer_of

from qerl_trl.memory.plan import GIB, Gpu, MemoryPlan
from qerl_trl.memory.workload import Workload, on_a_gpu

#: seconds per workload and in total; none is started in the `LAST` seconds
LIMIT, TOTAL, LAST = 280, 350, 50
ALLOWED = (0.0, 0.10)
#: maximum sum of the planned peaks, as a share of the GPU
SHARE = 0.93


@dataclasses.dataclass(frozen=True)
class Case:
    """`micro` sequences per backward pass, `sequences` in the engine at a time (None: transformers generates).

    `graphs`: with vLLM's CUDA graphs. `card`: GiB of the GPU. `options`: further settings.
    """

    size: str
    micro: int
    prompt: int
    new: int
    sequences: int | None = None
    sleep: bool = False
    graphs: bool = False
    checkpointing: bool | None = True
    base_format: str = "nvfp4"
    card: float | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def accumulation(self) -> int:
        """Backward passes per step and per rollout: GRPO needs two completions."""
        return 2 if self.micro == 1 else 1

    @property
    def generations(self) -> int:
        """Completions per prompt: the largest divisor of the rollout up to 8."""
        return max(n for n in range(1, 9) if self.micro * self.accumulation % n == 0)

    @property
    def work(self) -> Workload:
        options = dict(self.options)
        how = on_a_gpu(self.base_format)
        names = {"packed": "padding_free", "compiled": "compile_layers", "fused": "fused_lora"}
        how = {name: value and options.get(names[name]) is not False for name, value in how.items()}
        return Workload(
            batch=self.micro, prompt_length=self.prompt, completion_length=self.new, accumulation=self.accumulation,
            completions=self.sequences or self.micro * self.accumulation, gradient_checkpointing=self.checkpointing,
            base_format=self.base_format, sleep=self.sleep, graphs=self.graphs or self.sequences is None,
            rollout="transformers" if self.sequences is None else "colocate",
            generations=min(self.generations, self.micro), **how,
        )  # fmt: skip


#: as TRL and PEFT: eager, separate LoRA layers, padding
PLAIN = (("compile_layers", False), ("fused_lora", False), ("padding_free", False))
#: slowest first
CASES = {
    "3b-16x512-transformers": Case("3b", 16, 256, 512),
    "14b-2x8192-sleep": Case("14b", 2, 256, 8192, 8, sleep=True),
    "7b-8x512-24gib-graphs": Case("7b", 8, 256, 512, 16, graphs=True, checkpointing=None, card=24),
    "32b-2x2048": Case("32b", 2, 256, 2048, 8),
    "7b-64x512-40gib": Case("7b", 64, 256, 512, 64, checkpointing=None, card=40),
    "32b-1x512-sleep-36gib": Case("32b", 1, 256, 512, 8, sleep=True, checkpointing=None, card=36),
    "7b-4x4096-sleep": Case("7b", 4, 256, 4096, 32, sleep=True),
    "14b-8x1024": Case("14b", 8, 256, 1024, 32),
    "7b-1x8192": Case("7b", 1, 256, 8192, 16),
    "7b-16x1024-not-compiled": Case("7b", 16, 256, 1024, 16, options=PLAIN[:1]),
    "7b-8x1024-plain": Case("7b", 8, 256, 1024, 16, options=PLAIN),
    "7b-8x1024-bf16": Case("7b", 8, 256, 1024, 16, base_format="bf16"),
    "3b-64x512": Case("3b", 64, 256, 512, 64),
    "3b-16x2048-24gib": Case("3b", 16, 256, 2048, 32, checkpointing=None, card=24),
    "7b-2x768-no-checkpointing": Case("7b", 2, 256, 768, 16, checkpointing=False),
}
ALL = CASES | {"tiny": Case("dry", 2, 16, 24), "tiny-engine": Case("dry", 2, 16, 24, 8)}


def planned(case: Case) -> MemoryPlan:
    """Memory plan of a case, for its GPU."""
    return plan_of_shape(case.size, case.work, None if case.card is None else Gpu.of_gib(case.card))


def build_trainer(case: Case, device: str) -> Any:
    cpu = device == "cpu"
    engine = {"enforce_eager": not case.graphs, "max_num_seqs": case.sequences} if case.sequences else {}
    settings = {
        "output_dir": tempfile.mkdtemp(), "base_format": case.base_format, "use_cpu": cpu, "bf16": not cpu,
        "use_vllm": case.sequences is not None, "vllm_mode": "colocate", "vllm_enable_sleep_mode": case.sleep,
        "vllm_engine_kwargs": engine, "vllm_gpu_memory_utilization": 0.05 if cpu else None,
        "per_device_train_batch_size": case.micro, "steps_per_generation": case.accumulation,
        "gradient_accumulation_steps": case.accumulation, "num_generations": case.generations, "max_steps": 2,
        "max_completion_length": case.new, "gradient_checkpointing": case.checkpointing, "logging_steps": 1,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "aqn_num_stages": 2,
        "rollout_mismatch_threshold": None,  # filled tokens have made-up log-probabilities
        "generation_kwargs": None if case.sequences else {"min_new_tokens": case.new},
    }  # fmt: skip
    return trainer_of(case.size, settings | dict(case.options), prompts(case.prompt), device)


def measure(case: Case, device: str, card: float) -> dict[str, Any]:
    """Build the trainer and train; return planned and measured memory."""
    import torch

    started, peak = time.perf_counter(), None
    if device == "cuda":
        torch.zeros(1, device=device)
        peak = Peak()
        show_a_card_of(round(card * GIB), peak)
    trainer = build_trainer(case, device)
    if peak is not None:
        peak.phase = "train"
    if case.sequences is not None:
        fill_completions(trainer, case.sequences, lambda count: [case.new] * count)
    ready = time.perf_counter()
    trainer.train()
    found: MemoryPlan = trainer.memory_plan

    def gib(size: float) -> float:
        return round(size / GIB, 3)

    row: dict[str, Any] = {
        "workload": dataclasses.asdict(found.work),
        "planned_gib": gib(found.peak),
        "planned_update_gib": gib(found.update), "planned_rollout_gib": gib(found.rollout),
        "kv_gib": gib(found.kv_bytes), "kv_of_all_gib": gib(found.kv_wanted),
        "seconds": {"start": round(ready - started, 1), "train": round(time.perf_counter() - ready, 1)},
    }  # fmt: skip
    if peak is not None:
        torch.cuda.synchronize()
        row |= {
            "measured_gib": gib(max(peak.bytes.values())),
            "phases_gib": {phase: gib(size) for phase, size in peak.bytes.items()},
            "reserved_gib": gib(torch.cuda.max_memory_reserved()), "stays_gib": gib(torch.cuda.memory_allocated()),
            "allocated_gib": gib(torch.cuda.max_memory_allocated()),
            "outside_torch_gib": gib(peak.now() - torch.cuda.memory_reserved()),
        }  # fmt: skip
        row["ratio"] = round(row["planned_gib"] / row["measured_gib"], 4)
        row["error"] = round(row["ratio"] - 1, 4)
    return row | {"parts_gib": {p.name: [gib(p.update), gib(p.rollout)] for p in found.parts}}


def gpu_gib(device: str) -> float:
    """Size of the GPU, read without a CUDA context."""
    if device == "cpu":
        return 1e9
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total / GIB


def keep(row: dict[str, Any], record: dict[str, Any]) -> None:
    """Add a row with commit and versions to the record; a failure replaces nothing."""
    row |= {"commit": record["commit"], "versions": record["versions"]}
    earlier = [other for other in record["memory"] if other["name"] == row["name"]]
    if "failed" in row and any("failed" not in other for other in earlier):
        print(f"{row['name']} failed ({row['failed']}); its earlier row is kept")
        return
    record["memory"] = [*(other for other in record["memory"] if other not in earlier), row]


def verdict(record: dict[str, Any]) -> int:
    """Print the table; return 1 if a planned peak is out of range."""
    off = 0
    for row in record["memory"]:
        if "error" not in row:
            print(f"{row['name']:<28} {row.get('failed', 'nothing measured')}")
            off += "failed" in row
            continue
        fine = ALLOWED[0] <= row["error"] <= ALLOWED[1]
        off += not fine
        print(
            f"{row['name']:<28} planned {row['planned_gib']:7.2f} measured {row['measured_gib']:7.2f} "
            f"({row['reserved_gib']:7.2f} reserved)  {100 * row['error']:+5.1f} % {'' if fine else 'OFF'}"
        )
    return int(off > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ALL, default=list(CASES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="Commit of the code, if there is no git.")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--side-by-side", type=int, default=4, help="Runs at a time.")
    parser.add_argument("--worker", choices=ALL, help=argparse.SUPPRESS)
    parser.add_argument("--card", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        common.give(measure(ALL[options.worker], options.device, options.card))
    record: dict[str, Any] = {**common.head(options.device, options.commit), "memory": []}
    if options.output is not None and options.output.is_file():
        found = json.loads(options.output.read_text())
        if found["device"] != record["device"]:
            parser.error(f"{options.output} is of {found['device']}, this is {record['device']}. Name another file.")
        record["memory"] = [{"versions": found["versions"], **row} for row in found["memory"]]
    needs = {name: planned(ALL[name]).peak / GIB * 1.05 for name in options.only}
    available = SHARE * gpu_gib(options.device)

    def may(name: str, running: list[str]) -> bool:
        taken = sum(needs[other] for other in running)
        return len(running) < options.side_by_side and (not running or taken + needs[name] <= available)

    def start(name: str) -> tuple[list[str], dict[str, str]]:
        card = ALL[name].card or needs[name] * 1.05 + 1
        worker = [__file__, "--worker", name, "--device", options.device, "--card", f"{card:.2f}"]
        return [sys.executable, *worker], common.ENVIRONMENT | {"MASTER_PORT": str(common.free_ports(1)[0])}

    for name, row in common.results_of(list(options.only), start, may, LIMIT, TOTAL, LAST):
        keep({"name": name, "shape": name.split("-")[0], **row}, record)
        print(name, {k: v for k, v in row.items() if k not in ("workload", "parts_gib")}, flush=True)
        common.save(record, options.output)
    return verdict(record)


if __name__ == "__main__":
    sys.exit(main())
