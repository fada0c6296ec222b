"""Is the planned peak of GPU memory what a run takes? Whole training steps on random weights in the Qwen2.5 shapes, beside the plan.

    python benchmarks/plan_check.py --output memory_h200.json               # all workloads, at most 6 minutes
    python benchmarks/plan_check.py --only 7b-4x4096-sleep 32b-2x2048 --output memory_h200.json   # some of them
    python benchmarks/plan_check.py --plan                                  # only what is planned; needs no GPU
    python benchmarks/plan_check.py --only tiny tiny-engine --device cpu    # dry run, nothing measured

Each workload is a process of its own with a `QeRLGRPOTrainer`: two optimizer steps, a rollout each. The engine gets its KV cache at the
planned size, prompts for all its sequences and a few tokens to generate; completions are then filled up to their full length with random
tokens, and all prompts have the full length too, so that every update has the tokens that were planned. transformers generates all its
tokens. A `card` is the size of the GPU that the process sees, and by which it plans how many layers recompute nothing.

`measured_gib` is the most that the process took of the GPU, sampled by NVML every 10 ms (CUDA context, graphs and cached memory
included), `reserved_gib` and `allocated_gib` what torch counts of it. `ratio` is planned over measured, `error` that minus 1. Required: an
error from 0 to 0.1.

Rows of other workloads stay in a file that is there already, each with its commit and versions; a row that is measured again goes to `before`.
"""

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import about

from qerl_trl.memory.plan import GIB, Gpu, MemoryPlan, plan_run
from qerl_trl.memory.workload import Workload, on_a_gpu

#: tokens that the engine really generates; the rest of a completion is random
GENERATED = 8
#: seconds that one workload may take, and all of them together; none is started in the last `LAST`
LIMIT, TOTAL, LAST = 280, 350, 50
ALLOWED = (0.0, 0.10)


@dataclasses.dataclass(frozen=True)
class Case:
    """`micro` sequences per backward pass, prompts of `prompt` and completions of `new` tokens, `sequences` in the engine at a time
    (None: transformers generates, for `micro`). `graphs`: with vLLM's compiled CUDA graphs, as a run has it; without starts faster. `card`:
    GiB of the GPU that is shown. `options`: further settings of the run."""

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
        """Backward passes per step, and per rollout: GRPO wants two completions."""
        return 2 if self.micro == 1 else 1

    @property
    def generations(self) -> int:
        """Completions per prompt: the largest number up to 8 that goes into a rollout."""
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
            rollout="transformers" if self.sequences is None else "colocate", generations=min(self.generations, self.micro), **how,
        )  # fmt: skip


#: TRL's and PEFT's own way: eager, every LoRA layer alone, padding
PLAIN = (("compile_layers", False), ("fused_lora", False), ("padding_free", False))
#: the longest first
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
DRY = {
    "tiny": Case("dry", 2, 16, 24),
    "tiny-engine": Case("dry", 2, 16, 24, 8),
}


def planned(case: Case, gpu: Gpu | None = None) -> MemoryPlan:
    """Of a case, for a card of its size unless another is given."""
    if gpu is None and case.card is not None:
        gpu = Gpu.of_gib(case.card)
    return plan_of_shape(case.size, case.work, gpu)


def plan_of_shape(size: str, work: Workload, gpu: Gpu | None) -> MemoryPlan:
    """From the shape alone, as `qerl-trl plan` does it; `size` of `rollout_models.SHAPES`."""
    from rollout_models import folder

    from qerl_trl.memory.formulas import shape_of

    return plan_run(shape_of(folder(size)), work, gpu)


# --- one workload, in a process of its own -------------------------------------------------------------------------------------------


class Peak:
    """The most that this process takes of the GPU, in all and in each phase, looked at every so many seconds."""

    def __init__(self, every: float = 0.01) -> None:
        import pynvml

        self._every = every

        pynvml.nvmlInit()
        rank = int(os.environ.get("LOCAL_RANK", "0"))  # of several processes each has a GPU
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = devices.split(",")[rank] if devices else str(rank)
        self._nvml = pynvml
        self._handle = (
            pynvml.nvmlDeviceGetHandleByIndex(int(visible))
            if visible.isdigit()
            else pynvml.nvmlDeviceGetHandleByUUID(visible)
        )
        self.phase, self.bytes = "load", dict[str, int]()
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self) -> int:
        """
        Raises:
            `RuntimeError`: NVML does not show this process.
        """
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
        raise RuntimeError("NVML does not show this process; run outside of a container with its own process ids.")

    def _watch(self) -> None:
        while True:
            self.bytes[self.phase] = max(self.bytes.get(self.phase, 0), self.now())
            time.sleep(self._every)


def show_a_card_of(size: int, peak: Peak) -> None:
    """Runs side by side each see a GPU of their own: `torch.cuda.mem_get_info` counts this process only."""
    import torch

    def of_that_size(device: Any = None) -> tuple[int, int]:
        return max(0, size - peak.now()), size

    torch.cuda.mem_get_info = torch.cuda.memory.mem_get_info = of_that_size


def tokenizer():
    """One token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(400)} | {"<eos>": 400, "<pad>": 401}
    built = Tokenizer(models.WordLevel(words, unk_token="w0"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=built, eos_token="<eos>", pad_token="<pad>", unk_token="w0", padding_side="left"
    )


def prompts(longest: int, count: int = 64):
    """Of `longest` tokens each."""
    from datasets import Dataset

    draw = random.Random(0)
    return Dataset.from_dict(
        {"prompt": [" ".join(f"w{draw.randrange(400)}" for _ in range(longest)) for _ in range(count)]}
    )


def fill_completions(trainer: Any, sequences: int, lengths: Callable[[int], list[int]]) -> None:
    """Let the engine generate a few tokens for as many prompts as it has sequences, and fill the completions with random tokens.

    Args:
        lengths: of so many completions, in tokens.
    """
    generation = trainer.vllm_generation
    generate, draw = generation.generate, random.Random(1)

    def filled(prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None) -> tuple:
        wanted = lengths(len(prompts))
        generation.max_completion_length = min(GENERATED, *wanted)
        repeats = -(-sequences // len(prompts))
        output = generate(prompts * repeats, images, num_generations, profiler)
        ids, completions, logps, *rest = (part[: len(prompts)] if part is not None else None for part in output)
        completions = [
            [*c, *(draw.randrange(400) for _ in range(n - len(c)))] for c, n in zip(completions, wanted, strict=True)
        ]
        logps = [[*own, *([-6.0] for _ in range(n - len(own)))] for own, n in zip(logps, wanted, strict=True)]
        return ids, completions, logps, *rest

    generation.generate = filled


def build_trainer(case: Case, device: str, **options: Any) -> Any:
    """`options`: further settings, or other ones than those of the measurement here."""
    import rollout_models
    from peft import LoraConfig

    from qerl_trl import QeRLConfig, QeRLGRPOTrainer

    model = rollout_models.packed_model(case.size, device, dense=case.base_format == "bf16")
    folder = rollout_models.folder(case.size)
    words = tokenizer()
    words.save_pretrained(folder)
    model.config._name_or_path = folder
    cpu = device == "cpu"
    engine = {"enforce_eager": not case.graphs, "max_num_seqs": case.sequences} if case.sequences else {}
    settings = {
        "output_dir": tempfile.mkdtemp(), "base_format": case.base_format, "use_cpu": cpu, "bf16": not cpu, "use_vllm": case.sequences is not None,
        "vllm_mode": "colocate", "vllm_enable_sleep_mode": case.sleep, "vllm_engine_kwargs": engine,
        "vllm_gpu_memory_utilization": 0.05 if cpu else None, "per_device_train_batch_size": case.micro,
        "steps_per_generation": case.accumulation, "gradient_accumulation_steps": case.accumulation, "num_generations": case.generations,
        "max_completion_length": case.new, "gradient_checkpointing": case.checkpointing, "max_steps": 2, "logging_steps": 1,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "aqn_num_stages": 2,
        "rollout_mismatch_threshold": None,  # the log-probabilities of filled tokens are made up
        "generation_kwargs": None if case.sequences else {"min_new_tokens": case.new},
    }  # fmt: skip
    args = QeRLConfig(**settings | dict(case.options) | options)
    return QeRLGRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **kwargs: [random.random() for _ in completions],
        args=args,
        train_dataset=prompts(case.prompt),
        processing_class=words,
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def measure(case: Case, device: str, card: float) -> dict[str, Any]:
    """Build the trainer, train, and say what it took."""
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
    row: dict[str, Any] = {
        "workload": dataclasses.asdict(found.work),
        "planned_gib": round(found.peak / GIB, 3),
        "planned_update_gib": round(found.update / GIB, 3),
        "planned_rollout_gib": round(found.rollout / GIB, 3),
        "kv_gib": round(found.kv_bytes / GIB, 3),
        "kv_of_all_gib": round(found.kv_wanted / GIB, 3),
        "seconds": {"start": round(ready - started, 1), "train": round(time.perf_counter() - ready, 1)},
    }
    if peak is not None:
        torch.cuda.synchronize()
        row |= {
            "measured_gib": round(max(peak.bytes.values()) / GIB, 3),
            "phases_gib": {phase: round(size / GIB, 3) for phase, size in peak.bytes.items()},
            "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 3),
            "allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 3),
            "outside_torch_gib": round((peak.now() - torch.cuda.memory_reserved()) / GIB, 3),
            "stays_gib": round(torch.cuda.memory_allocated() / GIB, 3),
        }
        row["ratio"] = round(row["planned_gib"] / row["measured_gib"], 4)
        row["error"] = round(row["ratio"] - 1, 4)
    return row | {"parts_gib": {p.name: [round(p.update / GIB, 3), round(p.rollout / GIB, 3)] for p in found.parts}}


# --- all of them -----------------------------------------------------------------------------------------------------------------------


def gpu_gib(device: str) -> float:
    """Of the GPU that is used, without a context on it."""
    if device == "cpu":
        return 1e9
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total / GIB


def continued(record: dict[str, Any], output: Path) -> dict[str, Any]:
    """`record` with the rows of a file that is there; a `ValueError` if they are of another device."""
    found = json.loads(output.read_text())
    if found["device"] != record["device"]:
        raise ValueError(f"{output} is of {found['device']}, this is {record['device']}. Write to another file.")
    for row in [*found["memory"], *found["before"]]:
        row.setdefault("versions", found["versions"])
    return record | {"memory": found["memory"], "before": found["before"]}


def keep(row: dict[str, Any], record: dict[str, Any]) -> None:
    """Put a row into the record, with commit and versions. One of the same workload goes to `before`; a failure replaces none."""
    row |= {"commit": record["commit"], "versions": record["versions"]}
    earlier = [other for other in record["memory"] if other["name"] == row["name"]]
    if "failed" in row and any("failed" not in other for other in earlier):
        print(f"{row['name']} failed ({row['failed']}); its earlier row stays")
        return
    record["memory"] = [*(other for other in record["memory"] if other not in earlier), row]
    record["before"] += [other for other in earlier if "failed" not in other]


def run_all(
    names: list[str], device: str, record: dict[str, Any], output: Path | None, share: float, side_by_side: int
) -> None:
    """Start the workloads, as many side by side as `share` of the GPU has memory for; the record is written after each."""
    plans = {name: planned((CASES | DRY)[name]) for name in names}
    needs = {name: made.peak / GIB * 1.05 for name, made in plans.items()}
    cards = {name: (CASES | DRY)[name].card or needs[name] * 1.05 + 1 for name in names}
    available = share * gpu_gib(device)
    waiting, running, started = list(names), dict[str, tuple[subprocess.Popen[str], Path, float]](), time.monotonic()
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    logs = Path(tempfile.mkdtemp())
    while waiting or running:
        now = time.monotonic()
        for name in list(waiting):
            taken = sum(needs[other] for other in running)
            fits = len(running) < side_by_side and (not running or taken + needs[name] <= available)
            if fits and now - started < TOTAL - LAST:
                arguments = ["--worker", name, "--device", device, "--card", f"{cards[name]:.2f}"]
                command = [sys.executable, __file__, *arguments]
                environment["MASTER_PORT"] = str(29500 + len(record["memory"]) + len(running) + 10 * len(waiting))
                log = (logs / name).open("w")
                process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, env=environment)
                running[name] = process, logs / name, now
                waiting.remove(name)
        for name, (process, log_file, since) in list(running.items()):
            late = now - since > LIMIT or now - started > TOTAL
            if process.poll() is None and late:
                process.kill()
                process.wait()
            if process.poll() is None:
                continue
            lines = log_file.read_text().splitlines()
            found = next((line for line in lines if line.startswith("RESULT ")), None)
            row = {"name": name, "shape": name.split("-")[0]}
            row |= (
                json.loads(found.removeprefix("RESULT "))
                if found
                else {"failed": ["time", *lines[-1:]] if late else [line for line in lines if "Error" in line][-3:]}
            )
            keep(row, record)
            print(
                json.dumps({k: v for k, v in row.items() if k not in ("workload", "parts_gib", "versions")}), flush=True
            )
            if output is not None:
                output.write_text(json.dumps(record, indent=1) + "\n")
            del running[name]
        if waiting and not running and time.monotonic() - started >= TOTAL - LAST:
            for name in waiting:
                keep({"name": name, "failed": ["time"]}, record)
            break
        time.sleep(0.5)


def verdict(record: dict[str, Any]) -> int:
    """Print the table; the exit status: 1 where a planned peak is off."""
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
            f"(torch: {row['reserved_gib']:7.2f} reserved, {row['allocated_gib']:7.2f} allocated)  {100 * row['error']:+5.1f} % "
            f"{'' if fine else 'OFF'}"
        )
    return int(off > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES | DRY)
    parser.add_argument("--plan", action="store_true", help="Print the plans and stop.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="Of the code that runs, where there is no git.")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--share", type=float, default=0.93, help="Of the GPU, that planned peaks may add up to.")
    parser.add_argument("--side-by-side", type=int, default=4, help="Runs at a time.")
    parser.add_argument("--worker", choices=CASES | DRY, help=argparse.SUPPRESS)
    parser.add_argument("--card", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        row = measure((CASES | DRY)[options.worker], options.device, options.card)
        print("RESULT " + json.dumps(row), flush=True)
        os._exit(0)  # vLLM's own end can hang
    names = options.only or list(CASES)
    if options.plan:
        for name in names:
            print(f"{name}\n{planned((CASES | DRY)[name]).table()}\n")
        return 0

    output = options.output
    record: dict[str, Any] = {
        **about.head(options.device, options.commit),
        "memory": [],
        "before": [],
    }
    if output is not None and output.is_file():
        record = continued(record, output)
    run_all(names, options.device, record, output, options.share, options.side_by_side)
    return verdict(record)


if __name__ == "__main__":
    sys.exit(main())
