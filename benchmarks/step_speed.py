"""Whole GRPO steps on random weights in the Qwen2.5 shapes: seconds per phase and peak memory, ours as shipped and stock TRL.

    python benchmarks/step_speed.py --output step_h200.json                          # all cases, one GPU each at a time
    python benchmarks/step_speed.py --gpus 0 1 2 3 --output step_h200.json           # side by side: about 5 minutes
    python benchmarks/step_speed.py --only ours-7b-64x512 --output step_h200.json    # rows of other cases stay in the file
    python benchmarks/step_speed.py --only ours-tiny stock-tiny --device cpu         # dry run; `--profile`: step_profile.py

A case is a process of its own: up to `STEPS` optimizer steps, fewer where `ENOUGH` seconds have passed. `ours-*` is a `QeRLGRPOTrainer`
with its defaults on an NVFP4 base, with colocated vLLM. `stock-*` is `trl.GRPOTrainer` with its defaults on the same shape in bf16, the
same LoRA and its own colocated vLLM with 0.4 of the GPU. Prompts have 256 tokens, completions exactly as many as a case says
(`ignore_eos`). In `ragged` cases the engine generates a few tokens, and completions are filled with random tokens up to drawn lengths, the
same ones for both: only the update's seconds mean something then. The adapter has rank 32 on every linear layer.

Every phase is wall time between two synchronizations of the GPU: `rollout` (without `sync`), `sync` (adapter, norms or merged weights
into the engine), `reward`, `scoring` (what a rollout's log-probabilities and advantages take), and `update`, which is all else of a step.
`garbage` is what Python's collector took of a step, within its phases, and `passes` how many forward passes over the trained model it made.
`median` is over the steps from the third on. `profiles` in the file are of steps that were traced, with the commit of each. `update_and_scoring` is what the issue's "update" was measured as.

`measured_gib`: the most that the process took of its GPU (NVML, all phases). `planned_gib`: what `qerl-trl plan` says. With `cap` the
process sees a GPU of that many GiB, and torch's allocator is limited to them (not where the engine sleeps: torch counts a KV cache that is
not there then).
"""

import argparse
import dataclasses
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import about
import plan_check
import step_profile
from plan_check import GIB, Peak, fill_completions, show_a_card_of, tokenizer
from process_groups import free_ports

from qerl_trl.memory.plan import MemoryPlan
from qerl_trl.memory.workload import Lengths, workload_of

STEPS, ENOUGH = 5, 150
#: seconds that one case may take, and all of them together
LIMIT, TOTAL = 230, 570
PROMPT, RANK, GENERATIONS = 256, 32, 8
#: steps that are not counted: compilation, autotuning, the first growth of the allocator
WARM = 2
#: tokens of a ragged completion: exp of a normal variable with this standard deviation, of this mean, up to this many
SPREAD, MEAN = 0.8, 250


@dataclasses.dataclass(frozen=True)
class Case:
    """`batch` completions of `new` tokens per step (`ragged`: up to `new`), `micro` per backward pass, GiB of the GPU (`cap`)."""

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


#: what `qerl-trl plan` proposes where memory is short; with 1024 instead of 4096 tokens of prompts at a time more sequences have room
LEAST = (("vllm_enable_sleep_mode", True), ("optim", "adamw_8bit"), ("vllm_engine_kwargs", {"max_num_batched_tokens": 1024}))  # fmt: skip
#: 80 layers of random weights amplify a rounding to 0.2 nats per token, more than two halves of one trained policy may differ by
UNTRAINED = (("rollout_mismatch_threshold", None),)
#: the longest first
CASES = {
    **_both("7b-64x512", "7b", 64, 512, 64),
    "ours-32b-8x512-48gib": Case("ours", "32b", 8, 512, 8, cap=48.0),
    "ours-32b-8x512-26gib": Case("ours", "32b", 8, 512, 1, cap=26.0, options=LEAST),
    "ours-7b-64x512-40gib": Case("ours", "7b", 64, 512, 64, cap=40.0),
    "ours-7b-64x512-40gib-micro8": Case("ours", "7b", 64, 512, 8, cap=40.0),
    **_both("7b-ragged", "7b", 64, 1024, 8, ragged=True),
    **_both("7b-8x512", "7b", 8, 512, 8),
}
#: not among those that are measured by default
FURTHER = {
    "ours-7b-64x512-bf16": Case("ours", "7b", 64, 512, 64, base_format="bf16"),
    "ours-7b-8x512-bf16": Case("ours", "7b", 8, 512, 8, base_format="bf16"),
    "ours-7b-64x512-micro8": Case("ours", "7b", 64, 512, 8),
    "ours-7b-64x512-checkpointing": Case("ours", "7b", 64, 512, 64, options=(("gradient_checkpointing", True),)),
    "stock-7b-64x512-micro16": Case("stock", "7b", 64, 512, 16, base_format="bf16"),
    "ours-7b-8x512-checkpointing": Case("ours", "7b", 8, 512, 8, options=(("gradient_checkpointing", True),)),
    "ours-32b-8x512-48gib-checkpointing": Case(
        "ours", "32b", 8, 512, 8, cap=48.0, options=(("gradient_checkpointing", True),)
    ),
    # as qwen2.5-7b.yaml has it, where the greatest length is many times that of a completion
    **_both("7b-ragged-8192", "7b", 128, 8192, 4, ragged=True),
    "ours-7b-ragged-padded": Case("ours", "7b", 64, 1024, 8, ragged=True, options=(("padding_free", False),)),
    # Llama-3-70B's shape, in one GPU's memory alone: nothing of it is written to a disk
    "ours-70b-8x512": Case("ours", "70b", 8, 512, 8, options=UNTRAINED),
    # the whole model, as transformers' Trainer compiles it
    "stock-7b-8x512-compile": Case("stock", "7b", 8, 512, 8, base_format="bf16", options=(("torch_compile", True),)),
    "stock-tiny-compile": Case("stock", "dry", 8, 12, 4, base_format="bf16", options=(("torch_compile", True),)),
    **_both("tiny", "dry", 8, 12, 4),
    "ours-tiny-ragged": Case("ours", "dry", 8, 24, 4, ragged=True),
}
ALL = CASES | FURTHER
#: of every process that measures
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "TOKENIZERS_PARALLELISM": "false", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip
#: compiled code is kept between runs, as it is for a user; everything else of a case is in a folder of its own
CACHES = {"TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "step-speed-inductor")}


def ragged_lengths(longest: int, seed: int = 0) -> Iterator[int]:
    """Tokens per completion, log-normal, from 1 to `longest`; the mean falls a little short of `MEAN` where the tail is cut."""
    import math

    draw = random.Random(seed)
    while True:
        mean = min(MEAN, longest // 4)
        yield max(1, min(longest, round(draw.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD))))


# --- one case, in a process of its own -----------------------------------------------------------------------------------------------


def dataset(count: int = 256) -> Any:
    from datasets import Dataset

    draw = random.Random(0)
    prompts = [" ".join(f"w{draw.randrange(400)}" for _ in range(PROMPT)) for _ in range(count)]
    return Dataset.from_dict({"prompt": prompts})


def settings(case: Case, cpu: bool) -> dict[str, Any]:
    """Of the trainer, TRL's and (for ours) those that only we have."""
    use_vllm = not (cpu and case.who == "stock")  # stock TRL cannot sync into an engine on a CPU
    exact = {"ignore_eos": True, "min_tokens": case.new} if use_vllm else {"min_new_tokens": case.new}
    chosen: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "use_vllm": use_vllm, "vllm_mode": "colocate", "use_cpu": cpu, "bf16": not cpu,
        "per_device_train_batch_size": case.micro, "gradient_accumulation_steps": case.batch // case.micro,
        "num_generations": min(GENERATIONS, case.batch), "max_completion_length": case.new, "learning_rate": 1e-5,
        "generation_kwargs": None if case.ragged else exact, "max_steps": STEPS, "logging_steps": 1, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True,
    } | dict(case.options)  # fmt: skip
    if case.who == "ours":
        chosen |= {"base_format": case.base_format, "aqn_num_stages": 2}
        if case.ragged:  # the log-probabilities of filled tokens are made up
            chosen["rollout_mismatch_threshold"] = None
    elif use_vllm:
        chosen |= {"vllm_gpu_memory_utilization": 0.4, "vllm_max_model_length": PROMPT + case.new}
    return chosen


def plan_of(case: Case) -> MemoryPlan:
    """What is planned for a case of ours, as its own trainer plans on a GPU of this size; needs no GPU."""
    from qerl_trl import QeRLConfig

    args = QeRLConfig(**settings(case, cpu=False) | {"use_cpu": True, "bf16": False})
    work = workload_of(args, Lengths(PROMPT, case.new), lora_rank=RANK)
    gpu = plan_check.Gpu.of_gib(case.cap or 139.8)
    return plan_check.plan_of_shape(case.size, work, gpu)


def build_trainer(case: Case, device: str, callback: Any) -> Any:
    import rollout_models
    from peft import LoraConfig

    model = rollout_models.packed_model(case.size, device, dense=case.base_format == "bf16")
    folder = rollout_models.folder(case.size)
    words = tokenizer()
    words.save_pretrained(folder)
    model.config._name_or_path = folder
    cpu = device == "cpu"
    options = settings(case, cpu)
    common: dict[str, Any] = {
        "model": model,
        "reward_funcs": lambda completions, **kwargs: [random.random() for _ in completions],
        "train_dataset": dataset(),
        "processing_class": words,
        "peft_config": LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
        "callbacks": [callback],
    }
    if case.who == "ours":
        from qerl_trl import QeRLConfig, QeRLGRPOTrainer

        if cpu:
            options |= {"vllm_gpu_memory_utilization": 0.05, "vllm_engine_kwargs": {"enforce_eager": True}}
        return QeRLGRPOTrainer(args=QeRLConfig(**options), **common)
    import functools

    import trl.generation.vllm_generation as generation
    from trl import GRPOConfig, GRPOTrainer

    if options["use_vllm"]:  # its weights come with the first sync; nothing of them is on disk
        generation.LLM = functools.partial(generation.LLM, load_format="dummy")
    return GRPOTrainer(args=GRPOConfig(**options), **common)


class Garbage:
    """Seconds that Python's collector took since somebody set them to zero."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0
        gc.callbacks.append(self)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began


def measure(
    case: Case, device: str, build: Callable[[Case, str, Any], Any] | None = None, profile: bool = False
) -> dict[str, Any]:
    """Build the trainer (with `build` in place of `build_trainer`), take steps, and say what they took; with `profile` trace one more."""
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

    garbage, passes, row = Garbage(), [0], dataclasses.asdict(case)
    trace = step_profile.StepTrace(device) if profile else None

    class Clock(TrainerCallback):
        began, timer = 0.0, step_profile.SpanTimer()

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            self.timer.take()
            garbage.seconds, passes[0] = 0.0, 0
            self.began = time.perf_counter()
            if trace is not None:
                trace.step_begins()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            synchronize()
            if trace is not None and trace.running:
                row["profile"] = trace.stop(self.timer.spans)
                control.should_training_stop = True
                return
            step = time.perf_counter() - self.began
            phases = self.timer.take()
            update = step - sum(phases.values())
            rows.append({"step": step, **phases, "update": update, "garbage": garbage.seconds, "passes": passes[0]})
            print(f"step {len(rows)}: {rows[-1]}", flush=True)
            enough = len(rows) == STEPS or (len(rows) > WARM and time.perf_counter() - started > ENOUGH)
            if trace is None:
                control.should_training_stop |= enough
            elif enough:
                if peak is not None:
                    peak.phase = "trace"
                trace.start()

    clock = Clock()
    trainer = (build or build_trainer)(case, device, clock)
    if case.ragged:
        lengths = ragged_lengths(case.new)
        fill_completions(trainer, case.batch, lambda count: [next(lengths) for _ in range(count)])
    clock.timer = step_profile.time_phases(trainer, synchronize)
    trainer.model.register_forward_pre_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    if peak is not None:
        peak.phase = "train"
    ready = time.perf_counter()
    trainer.args.max_steps += profile
    trainer.train()
    counted = rows[min(WARM, len(rows) - 1) :]
    median = {name: round(statistics.median(row[name] for row in counted), 4) for name in rows[0]}
    logs = [log for log in trainer.state.log_history if "loss" in log]
    names = ("completions/mean_length", "completions/max_length", "rollout/mismatch_kl", "grad_norm")  # fmt: skip
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
        untraced = {phase: size for phase, size in peak.bytes.items() if phase != "trace"}
        row |= {
            "measured_gib": round(max(untraced.values()) / GIB, 2),
            "phases_gib": {phase: round(size / GIB, 2) for phase, size in untraced.items()},
            "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
            "allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        }
        if plan is not None:
            row["plan_error"] = round(row["planned_gib"] / row["measured_gib"] - 1, 4)
    return row


# --- all of them -----------------------------------------------------------------------------------------------------------------------


def run_all(
    names: list[str],
    device: str,
    gpus: list[int],
    keep: Callable[[dict[str, Any]], None],
    profile: bool = False,
    limit: float = LIMIT,
) -> None:
    """Start the cases, one per GPU at a time; `keep` gets each row as it comes."""
    waiting, free, started = list(names), list(gpus), time.monotonic()
    running: dict[str, tuple[subprocess.Popen[str], Path, float, int]] = {}
    place = Path(tempfile.mkdtemp())
    while waiting or running:
        now = time.monotonic()
        while waiting and free and now - started < TOTAL - 90:
            name, gpu = waiting.pop(0), free.pop(0)
            folder = place / name
            folder.mkdir()
            environment = CACHES | os.environ | ENVIRONMENT | {
                "MASTER_PORT": str(free_ports(1)[0]), "TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": str(gpu),
            }  # fmt: skip
            environment |= step_profile.environment(folder) if profile else {}
            log = (place / f"{name}.log").open("w")
            command = [sys.executable, __file__, "--worker", name, "--device", device, *["--profile"] * profile]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, env=environment)
            running[name] = process, place / f"{name}.log", now, gpu
        for name, (process, log_file, since, gpu) in list(running.items()):
            late = now - since > limit or now - started > TOTAL
            if process.poll() is None and late:
                process.kill()
                process.wait()
            if process.poll() is None:
                continue
            lines = log_file.read_text().splitlines()
            found = next((line for line in lines if line.startswith("RESULT ")), None)
            if found:
                row = {"name": name, **json.loads(found.removeprefix("RESULT "))}
            else:
                why = "time" if late else [line for line in lines if "Error" in line][-3:]
                row = {"name": name, "failed": why, "last_lines": lines[-5:]}
            keep(row)
            del running[name]
            free.append(gpu)
        if waiting and not running and time.monotonic() - started >= TOTAL - 90:
            for name in waiting:
                keep({"name": name, "failed": "time"})
            break
        time.sleep(0.5)


def line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['name']:<28} failed: {row['failed']} {row.get('last_lines', '')}"
    median = row["median"]
    phases = "  ".join(f"{name} {median[name]:.3f}" for name in ("rollout", "sync", "reward", "scoring", "update"))
    plan = f", planned {row['planned_gib']:.1f}" if "planned_gib" in row else ""
    return (
        f"{row['name']:<28} step {median['step']:7.3f} s  ({phases})  {row.get('measured_gib', 0):.1f} GiB{plan}, "
        f"start {row['start']:.0f} s, {len(row['steps'])} steps"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ALL)
    parser.add_argument("--gpus", type=int, nargs="+", help="Indices of the GPUs to use. Default: all.")
    parser.add_argument("--plan", action="store_true", help="Print the plans of our cases and stop.")
    parser.add_argument("--profile", action="store_true", help="Trace one more step of each case.")
    parser.add_argument("--limit", type=float, default=LIMIT, help="Seconds for one case.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="Of the code that runs, where there is no git.")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", choices=ALL, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        row = measure(ALL[options.worker], options.device, profile=options.profile)
        print("RESULT " + json.dumps(row), flush=True)
        os._exit(0)  # vLLM's own end can hang
    names = options.only or list(CASES)
    if options.plan:
        for name in names:
            case = ALL[name]
            if case.who == "ours":
                plan = plan_of(case)
                print(f"{name}\n{plan.table()}\n{plan.verdict()}\n")
        return 0

    import torch

    gpus = options.gpus or list(range(max(1, torch.cuda.device_count())))
    origin = about.head(options.device, options.commit)
    record: dict[str, Any] = {"step": []}
    if options.output is not None and options.output.exists():
        record = json.loads(options.output.read_text())
    failed = []

    def keep(row: dict[str, Any]) -> None:
        print(line(row), flush=True)
        failed.extend([row["name"]] if "failed" in row else [])
        if "profile" in row:  # stays where it is when the case is timed again without one
            traced = [old for old in record.get("profiles", []) if old["name"] != row["name"]]
            part = {"name": row["name"], "profile": row.pop("profile"), "commit": origin["commit"]}
            record["profiles"] = sorted([*traced, part], key=lambda row: list(ALL).index(row["name"]))
        record["step"] = [old for old in record["step"] if old["name"] != row["name"]] + [row | origin]
        record["step"].sort(key=lambda row: list(ALL).index(row["name"]))
        if options.output is not None:
            options.output.write_text(json.dumps(record, indent=1) + "\n")

    run_all(names, options.device, gpus, keep, options.profile, options.limit)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
