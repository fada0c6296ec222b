"""Complete GRPO steps on random weights in the Qwen2.5 shapes: seconds per phase and peak memory, ours and stock TRL.

    python benchmarks/step.py --output step_h200.json                          # all cases, one GPU each at a time
    python benchmarks/step.py --gpus 0 1 2 3 --output step_h200.json           # in parallel: about 5 minutes
    python benchmarks/step.py --only ours-7b-64x512 --output step_h200.json    # rows of other cases stay in the file
    python benchmarks/step.py --only ours-tiny stock-tiny --device cpu         # dry run

A case is one process with up to `STEPS` optimizer steps, fewer after `ENOUGH` seconds. `ours-*`: `QeRLGRPOTrainer` with
defaults, NVFP4 base, colocated vLLM. `stock-*`: `trl.GRPOTrainer` with defaults, the same shape in bf16, the same LoRA
(rank 32, all linear layers), colocated vLLM with 0.4 of the GPU. Prompts have 256 tokens, completions exactly the
length of the case (`ignore_eos`). In `ragged` cases random tokens fill the completions up to drawn lengths, the same
for both; only the seconds of the update are meaningful there.

Phases, in wall time between two synchronizations of the GPU: `rollout` (without `sync`), `sync` (adapter, norms or
merged weights to the engine), `reward`, `scoring` (log-probabilities and advantages of a rollout), `update` (the
rest). `garbage`: share of Python's collector. `passes`: forward passes of the trained model. `median`: from the third
step on. `measured_gib`: NVML peak of the process. `planned_gib`: `qerl-trl plan`. With `cap` the process sees a GPU of
that size and limits torch's allocator to it (not with sleep mode, since torch would count the released KV cache).
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common

from qerl_trl.memory.plan import GIB, Gpu, MemoryPlan, plan_run
from qerl_trl.memory.workload import Workload
from qerl_trl.support.phases import PhaseTimer

STEPS, ENOUGH = 5, 150
#: seconds per case and in total; none is started in the `LAST` seconds
LIMIT, TOTAL, LAST = 230, 570, 90
PROMPT, RANK, GENERATIONS = 256, 32, 8
#: uncounted steps: compilation, autotuning, growth of the allocator
WARM = 2
#: lengths of ragged completions: log-normal with this sigma and mean
SPREAD, MEAN = 0.8, 250
#: generated tokens of a filled completion
GENERATED = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """`batch` completions of (`ragged`: up to) `new` tokens per step, `micro` per backward pass, a GPU of `cap` GiB."""

    who: str
    size: str
    batch: int
    new: int
    micro: int
    ragged: bool = False
    cap: float | None = None
    base_format: str = "nvfp4"
    options: tuple[tuple[str, Any], ...] = ()


def _both(name: str, *case: Any, **options: Any) -> dict[str, Case]:
    formats = {"ours": "nvfp4", "stock": "bf16"}
    return {f"{who}-{name}": Case(who, *case, base_format=base, **options) for who, base in formats.items()}


#: options proposed by `qerl-trl plan` for small GPUs; smaller prefill steps leave room for more sequences
_SMALL = {"max_num_batched_tokens": 1024}
LEAST = (("vllm_enable_sleep_mode", True), ("optim", "adamw_8bit"), ("vllm_engine_kwargs", _SMALL))
#: 80 random layers amplify rounding to 0.2 nats per token, above the mismatch limit
UNTRAINED = (("rollout_mismatch_threshold", None),)
#: slowest first
CASES = {
    **_both("7b-64x512", "7b", 64, 512, 64),
    "ours-32b-8x512-48gib": Case("ours", "32b", 8, 512, 8, cap=48.0),
    "ours-32b-8x512-26gib": Case("ours", "32b", 8, 512, 1, cap=26.0, options=LEAST),
    "ours-7b-64x512-40gib": Case("ours", "7b", 64, 512, 64, cap=40.0),
    "ours-7b-64x512-40gib-micro8": Case("ours", "7b", 64, 512, 8, cap=40.0),
    **_both("7b-ragged", "7b", 64, 1024, 8, ragged=True),
    **_both("7b-8x512", "7b", 8, 512, 8),
}
#: only measured by name; 70b has Llama-3-70B's shape and is never written to disk
ALL = CASES | {
    "ours-70b-8x512": Case("ours", "70b", 8, 512, 8, options=UNTRAINED),
    **_both("tiny", "dry", 8, 12, 4),
    "ours-tiny-ragged": Case("ours", "dry", 8, 24, 4, ragged=True),
}
#: `NAME-w4a8`: the same with compute="w4a8"
ALL |= {
    f"{name}-w4a8": dataclasses.replace(case, options=(*case.options, ("compute", "w4a8")))
    for name, case in ALL.items()
    if case.who == "ours"
}
#: runs share compiled code, as for a user; all other files of a case are temporary
CACHES = {"TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "step-speed-inductor")}


# --- also used by memory.py ---


class Peak:
    """Peak GPU memory of this process in each phase, sampled by NVML."""

    def __init__(self, every: float = 0.01) -> None:
        import pynvml

        self._every = every
        pynvml.nvmlInit()
        rank = int(os.environ.get("LOCAL_RANK", "0"))  # one GPU per process
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = devices.split(",")[rank] if devices else str(rank)
        named = pynvml.nvmlDeviceGetHandleByIndex if visible.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
        self._nvml, self._handle = pynvml, named(int(visible) if visible.isdigit() else visible)
        self.phase, self.bytes = "load", dict[str, int]()
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self) -> int:
        """Current memory; RuntimeError if NVML does not show this process."""
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
        raise RuntimeError("NVML does not show this process; run outside of a container with its own process ids.")

    def _watch(self) -> None:
        while True:
            self.bytes[self.phase] = max(self.bytes.get(self.phase, 0), self.now())
            time.sleep(self._every)


def show_a_card_of(size: int, peak: Peak) -> None:
    """Let `torch.cuda.mem_get_info` count this process only, so that parallel runs each see a separate GPU."""
    import torch

    def of_that_size(device: Any = None) -> tuple[int, int]:
        return max(0, size - peak.now()), size

    torch.cuda.mem_get_info = torch.cuda.memory.mem_get_info = of_that_size


def tokenizer() -> Any:
    """A tokenizer with one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(400)} | {"<eos>": 400, "<pad>": 401}
    built = Tokenizer(models.WordLevel(words, unk_token="w0"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=built, eos_token="<eos>", pad_token="<pad>", unk_token="w0", padding_side="left"
    )


def prompts(longest: int, count: int = 64) -> Any:
    """Prompts of `longest` tokens each."""
    from datasets import Dataset

    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(400)}" for _ in range(longest)) for _ in range(count)]
    return Dataset.from_dict({"prompt": texts})


def plan_of_shape(size: str, work: Workload, gpu: Gpu | None) -> MemoryPlan:
    """Memory plan from the shape alone, as in `qerl-trl plan`."""
    from models import folder

    from qerl_trl.memory.formulas import shape_of

    return plan_run(shape_of(folder(size)), work, gpu)


def trainer_of(size: str, settings: dict[str, Any], data: Any, device: str, stock: bool = False, callbacks: Any = ()):
    """A trainer on a random model in memory, with a rank-32 adapter on every linear layer."""
    import models
    from peft import LoraConfig

    dense = stock or settings.get("base_format") == "bf16"
    model, folder, words = models.packed_model(size, device, dense=dense), models.folder(size), tokenizer()
    words.save_pretrained(folder)
    model.config._name_or_path = folder
    common: dict[str, Any] = {
        "model": model, "train_dataset": data, "processing_class": words, "callbacks": list(callbacks),
        "reward_funcs": lambda completions, **kwargs: [random.random() for _ in completions],
        "peft_config": LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
    }  # fmt: skip
    if not stock:
        from qerl_trl import QeRLConfig, QeRLGRPOTrainer

        return QeRLGRPOTrainer(args=QeRLConfig(**settings), **common)
    import trl.generation.vllm_generation as generation
    from trl import GRPOConfig, GRPOTrainer

    if settings["use_vllm"]:  # the first sync brings the weights; none are on disk
        generation.LLM = functools.partial(generation.LLM, load_format="dummy")
    return GRPOTrainer(args=GRPOConfig(**settings), **common)


def fill_completions(trainer: Any, sequences: int, lengths: Callable[[int], list[int]]) -> None:
    """Generate a few tokens for `sequences` prompts, then fill up to `lengths(count)` with random tokens."""
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


# --- one case, in its process ---


def ragged_lengths(longest: int, seed: int = 0) -> Iterator[int]:
    """Tokens per completion, log-normal, from 1 to `longest`."""
    draw = random.Random(seed)
    while True:
        mean = min(MEAN, longest // 4)
        yield max(1, min(longest, round(draw.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD))))


def settings(case: Case, cpu: bool) -> dict[str, Any]:
    """Arguments of the trainer: TRL's, and ours for `ours`."""
    use_vllm = not (cpu and case.who == "stock")  # stock TRL cannot sync into an engine on a CPU
    exact = {"ignore_eos": True, "min_tokens": case.new} if use_vllm else {"min_new_tokens": case.new}
    chosen: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "use_vllm": use_vllm, "vllm_mode": "colocate", "use_cpu": cpu,
        "bf16": not cpu, "per_device_train_batch_size": case.micro,
        "gradient_accumulation_steps": case.batch // case.micro, "num_generations": min(GENERATIONS, case.batch),
        "max_completion_length": case.new, "learning_rate": 1e-5, "max_steps": STEPS, "logging_steps": 1,
        "generation_kwargs": None if case.ragged else exact, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True,
    } | dict(case.options)  # fmt: skip
    if case.who == "ours":
        chosen |= {"base_format": case.base_format, "aqn_num_stages": 2}
        if case.ragged:  # filled tokens have made-up log-probabilities
            chosen["rollout_mismatch_threshold"] = None
    elif use_vllm:
        chosen |= {"vllm_gpu_memory_utilization": 0.4, "vllm_max_model_length": PROMPT + case.new}
    return chosen


def build_trainer(case: Case, device: str, callback: Any) -> Any:
    options = settings(case, device == "cpu")
    if device == "cpu" and case.who == "ours":
        options |= {"vllm_gpu_memory_utilization": 0.05, "vllm_engine_kwargs": {"enforce_eager": True}}
    return trainer_of(case.size, options, prompts(PROMPT, 256), device, case.who == "stock", [callback])


def time_phases(trainer: Any, synchronize: Callable[[], None]) -> PhaseTimer:
    """Time the parts of a step; nested parts are not counted twice."""
    timer = PhaseTimer("rollout", "sync", "reward", "scoring")

    def wrap(owner: Any, name: str, phase: str) -> None:
        inner = getattr(owner, name, None)
        if inner is None:
            return

        def timed(*args: Any, **kwargs: Any) -> Any:
            synchronize()
            with timer.phase(phase):
                output = inner(*args, **kwargs)
                synchronize()
            return output

        setattr(owner, name, timed)

    wrap(trainer, "_generate", "rollout")
    wrap(trainer, "_calculate_rewards", "reward")
    wrap(trainer, "_generate_and_score_completions", "scoring")
    for name in ("sync_weights", "sync_noise"):
        wrap(getattr(trainer, "vllm_generation", None), name, "sync")
    return timer


def measure(case: Case, device: str, build: Callable[[Case, str, Any], Any] = build_trainer) -> dict[str, Any]:
    """Build the trainer and take steps; return seconds and memory."""
    started = time.perf_counter()
    import torch
    from transformers import TrainerCallback

    peak = None
    if device == "cuda":
        torch.zeros(1, device=device)
        peak = Peak(every=0.03)
        if case.cap is not None:
            if not dict(case.options).get("vllm_enable_sleep_mode"):
                torch.cuda.set_per_process_memory_fraction(case.cap * GIB / torch.cuda.mem_get_info()[1])
            show_a_card_of(round(case.cap * GIB), peak)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    rows: list[dict[str, float]] = []
    garbage, passes, row = common.Garbage(), [0], dataclasses.asdict(case)

    class Clock(TrainerCallback):
        began, timer = 0.0, PhaseTimer()

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            self.timer.take()
            garbage.seconds, passes[0] = 0.0, 0
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            synchronize()
            step = time.perf_counter() - self.began
            phases = self.timer.take()
            update = step - sum(phases.values())
            rows.append({"step": step, **phases, "update": update, "garbage": garbage.seconds, "passes": passes[0]})
            print(f"step {len(rows)}: {rows[-1]}", flush=True)
            enough = len(rows) == STEPS or (len(rows) > WARM and time.perf_counter() - started > ENOUGH)
            control.should_training_stop |= enough

    clock = Clock()
    trainer = build(case, device, clock)
    if case.ragged:
        lengths = ragged_lengths(case.new)
        fill_completions(trainer, case.batch, lambda count: [next(lengths) for _ in range(count)])
    clock.timer = time_phases(trainer, synchronize)
    trainer.model.register_forward_pre_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    if peak is not None:
        peak.phase = "train"
    ready = time.perf_counter()
    trainer.train()
    counted = rows[min(WARM, len(rows) - 1) :]
    median = {name: round(statistics.median(row[name] for row in counted), 4) for name in rows[0]}
    logs = [log for log in trainer.state.log_history if "loss" in log]
    names = ("completions/mean_length", "completions/max_length", "rollout/mismatch_kl", "grad_norm")
    row |= {
        "start": round(ready - started, 1),
        "median": median | {"update_and_scoring": round(median["update"] + median["scoring"], 4)},
        "steps": [{name: round(value, 4) for name, value in row.items()} for row in rows],
        "logged": {name: [round(log[name], 4) for log in logs if name in log] for name in names},
    }
    plan = getattr(trainer, "memory_plan", None)
    if plan is not None:
        row["planned_gib"] = round(plan.peak / GIB, 2)
        row["workload"] = dataclasses.asdict(plan.work)
        row["parts_gib"] = {p.name: [round(p.update / GIB, 3), round(p.rollout / GIB, 3)] for p in plan.parts}
    if peak is not None:
        row |= {
            "measured_gib": round(max(peak.bytes.values()) / GIB, 2),
            "phases_gib": {phase: round(size / GIB, 2) for phase, size in peak.bytes.items()},
            "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
            "allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        }
        if plan is not None:
            row["plan_error"] = round(row["planned_gib"] / row["measured_gib"] - 1, 4)
    return row


def line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['name']:<28} failed: {row['failed']} {row.get('last_lines', '')[-5:]}"
    median = row["median"]
    phases = "  ".join(f"{name} {median[name]:.3f}" for name in ("rollout", "sync", "reward", "scoring", "update"))
    plan = f", planned {row['planned_gib']:.1f}" if "planned_gib" in row else ""
    return (
        f"{row['name']:<28} step {median['step']:7.3f} s  ({phases})  {row.get('measured_gib', 0):.1f} GiB{plan}, "
        f"start {row['start']:.0f} s, {len(row['steps'])} steps"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ALL, default=list(CASES))
    parser.add_argument("--gpus", type=int, nargs="+", default=[0], help="Indices of the GPUs to use.")
    parser.add_argument("--limit", type=float, default=LIMIT, help="Seconds for one case.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="Commit of the code, if there is no git.")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", choices=ALL, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        common.give(measure(ALL[options.worker], options.device))
    origin = common.head(options.device, options.commit)
    record: dict[str, Any] = {"step": []}
    if options.output is not None and options.output.exists():
        record = json.loads(options.output.read_text())
    free, of, failed, place = list(options.gpus), dict[str, int](), 0, Path(tempfile.mkdtemp())

    def start(name: str) -> tuple[list[str], dict[str, str]]:
        of[name], folder = free.pop(0), place / name
        folder.mkdir()
        environment = CACHES | common.ENVIRONMENT | {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "MASTER_PORT": str(common.free_ports(1)[0]), "TMPDIR": str(folder),
            "CUDA_VISIBLE_DEVICES": str(of[name]),
        }  # fmt: skip
        return [sys.executable, __file__, "--worker", name, "--device", options.device], environment

    names = list(options.only)
    for name, row in common.results_of(names, start, lambda *_: bool(free), options.limit, TOTAL, LAST):
        if name in of:
            free.append(of[name])
        row["name"] = name
        print(line(row), flush=True)
        failed += "failed" in row
        record["step"] = [old for old in record["step"] if old["name"] != name] + [row | origin]
        record["step"].sort(key=lambda row: list(ALL).index(row["name"]))
        common.save(record, options.output)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
