"""What the checks cost: seconds of each, per rollout and per start, in real training steps on random weights in the Qwen2.5 shapes.

    python benchmarks/checks_cost.py 7b --output benchmarks/results/checks_h200.json          # one GPU, 2 minutes
    python benchmarks/checks_cost.py 7b 7b:64 32b --output benchmarks/results/checks_h200.json   # 8, 64 and 8 completions per step
    python benchmarks/checks_cost.py 7b --pairs 16 --output checks.json                                 # one minute more
    python benchmarks/checks_cost.py tiny --device cpu                                                 # dry run

A `QeRLGRPOTrainer` with vLLM in the process takes `STEPS` steps of 8 (or as many as stand after the colon) x 512 tokens, one rollout each. Every function in `TIMED` waits for
the device before and after, and what it spends in another one of them is counted there only; so the sum over checks is an upper bound of
what a step without them would save. The first step warms up and is not counted. `checks_at_start_s` is of the constructor and of `train()` up to
its first step; before that the base is written, sealed and with its fixed prompt as an export has it, and taken for the folder that it was
loaded from, so that `train()` compares what it compares of any packed base. What is hashed in a thread while a model loads and an engine starts
stands by itself, in `of_a_folder_s`. The tokenizer has as many tokens as Qwen2.5's.

With `--pairs N` as many steps again are taken with all checks and with none, in turns, and nothing else is timed in them: the difference is what a
step's checks cost, where they overlap with the GPU's work and no wait is added. The probe between steps is left out of these, and added to `percent`
by its share.

`limits` puts what a healthy run measures in bf16 beside what it may be: the probe at start, the fixed prompt of an export, the gap and the
mismatch of log-probabilities. The head is scaled so that the policy's entropy is a trained model's, not a random one's.
"""

import argparse
import functools
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import about

sys.path.insert(0, str(Path(__file__).parent))

STEPS = 6
#: logits of random weights have a standard deviation of about 1.2, those of a trained model about 4
SHARPER = 4.0
PROBE = "rollout: probe, every few steps"
#: label -> (kind, module, path of the function). "check": issue of this measurement; "work": what is done anyhow, for comparison
TIMED = {
    "start: settings and environment": ("check", "qerl_trl.checks.environment", "check"),
    "start: lock of the run folder": ("check", "qerl_trl.run.folder", "lock_for"),
    "start: disk space": ("check", "qerl_trl.run.folder", "check_disk"),
    "start: memory plan": ("check", "qerl_trl.trainer", "plan_trainer"),
    "start: fingerprint of the base": ("check", "qerl_trl.checkpoint.fingerprint", "shared_base_sha256"),
    "start: probe of the engine": ("check", "qerl_trl.rollout.generation", "QeRLVLLMGeneration.run_probe"),
    "start: noise in the engine": ("check", "qerl_trl.rollout.generation", "QeRLVLLMGeneration.probe_noise"),
    "train(): every value finite": ("check", "qerl_trl.model.loading", "finish"),
    "train(): the tokenizer's content": ("check", "qerl_trl.checkpoint.settings", "recorded_tokenizer"),
    "train(): run folder": ("check", "qerl_trl.run.resume", "RunRecord.settle"),
    "start: norms that carry noise": ("work", "qerl_trl.noise.callback", "find_noisy_norms"),
    "sync: weights": ("work", "qerl_trl.rollout.generation", "QeRLVLLMGeneration.sync_weights"),
    "sync: noise": ("work", "qerl_trl.rollout.generation", "QeRLVLLMGeneration.sync_noise"),
    "sync: weights changed?": ("check", "qerl_trl.rollout.generation", "QeRLVLLMGeneration._is_put"),
    "sync: fingerprint of the update": ("check", "qerl_trl.rollout.engine", "update_fingerprint"),
    "sync: the same in the engine": ("check", "qerl_trl.rollout.vllm.state", "update_fingerprint"),
    "sync: the update is whole and finite": ("check", "qerl_trl.rollout.vllm.state", "RolloutState._checked"),
    "sync: noise that landed": ("check", "qerl_trl.rollout.vllm.state", "RolloutState.sigma_effective"),
    "rollout: what the engine holds": ("check", "qerl_trl.rollout.vllm.state", "RolloutState.contents"),
    PROBE: ("check", "qerl_trl.rollout.generation", "QeRLVLLMGeneration._probe_if_due"),
    "rollout: mismatch": ("check", "qerl_trl.rollout.mismatch", "MismatchWatch.rollout"),
    "rollout: signal": ("check", "qerl_trl.checks.learning", "SignalMonitor.rewards"),
    "rewards": ("check", "qerl_trl.checks.rewards", "check_reward_tensor"),
    "update: loss": ("check", "qerl_trl.checks.rewards", "check_loss"),
    "update: gradients": ("check", "qerl_trl.checks.rewards", "check_gradients"),
}


#: checks of a step that return something, and what a step without them takes for it: labels of TIMED
WITHOUT: dict[str, Any] = {
    "sync: weights changed?": lambda generation: generation._stamp[0] == generation.trainer.state.global_step,
    "sync: fingerprint of the update": lambda *args: "",
    "sync: the same in the engine": lambda *args: "",
    "sync: the update is whole and finite": lambda *args: {},
}
#: not the checks of a step
_NOT_OF_A_STEP = ("start: ", "train(): ")


class Clock:
    """Seconds spent in functions of the package, less what they spend in each other."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.spent: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._inside: list[float] = []
        #: label -> (module or class, name there, what it is)
        self.places: dict[str, tuple[Any, str, Any]] = {}
        for label, (_, module, path) in TIMED.items():
            owner = importlib.import_module(module)
            *parents, name = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            self.places[label] = owner, name, getattr(owner, name)
            setattr(owner, name, self._timed(label, getattr(owner, name)))

    def stop(self) -> None:
        """Everything is as it was."""
        for owner, name, function in self.places.values():
            setattr(owner, name, function)

    def check_steps(self, on: bool) -> None:
        """After `stop`: with the checks of a step, or without them."""
        for label, (owner, name, function) in self.places.items():
            if TIMED[label][0] == "check" and not label.startswith(_NOT_OF_A_STEP):
                setattr(owner, name, function if on else WITHOUT.get(label, lambda *args, **kwargs: None))

    def _now(self) -> float:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def _timed(self, label: str, function: Any) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = self._now()
            self._inside.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                whole = self._now() - started
                self.spent[label] += whole - self._inside.pop()
                self.calls[label] += 1
                if self._inside:
                    self._inside[-1] += whole

        return timed

    def take(self) -> dict[str, float]:
        """Seconds since the last call."""
        spent, self.spent = dict(self.spent), defaultdict(float)
        return spent


def paired(seconds: list[float], probe_ms: float) -> dict[str, Any]:
    """Of steps in pairs, the first with checks and the second without, the next pair the other way round. `probe_ms`: of a probe, per step."""
    order = [
        pair if number % 2 == 0 else pair[::-1]
        for number, pair in enumerate(zip(seconds[::2], seconds[1::2], strict=True))
    ]
    checked, free = ([pair[n] for pair in order] for n in (0, 1))
    differences = [1e3 * (one - other) for one, other in order]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    difference, step = statistics.median(differences), statistics.median(free)
    return {
        "pairs": len(order),
        "with_checks_s": round(statistics.median(checked), 4),
        "without_s": round(step, 4),
        "difference_ms": round(difference, 2),
        "standard_error_ms": round(error, 2),
        "differences_ms": [round(one, 1) for one in differences],
        "percent": round((difference + probe_ms) / step / 10, 3),
    }


def measure(workload: str, device: str, pairs: int) -> dict[str, Any]:
    """Args: workload: a size, and after a colon the completions of a step."""
    import plan_check
    import random_checkpoint
    import rollout_models
    import torch
    from transformers import TrainerCallback

    from qerl_trl import QeRLConfig

    size, _, completions = workload.partition(":")
    sequences = int(completions or 8)
    clock = Clock(device)
    packed_model = rollout_models.packed_model

    def sharper(*args: Any, **kwargs: Any) -> Any:
        model = packed_model(*args, **kwargs)
        with torch.no_grad():
            model.lm_head.weight.mul_(SHARPER)
        return model

    rollout_models.packed_model = sharper
    tiny = device == "cpu"
    if tiny:
        small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
        rollout_models.SHAPES[size] = {**small, "num_key_value_heads": 2, "vocab_size": 1024}
    tokenizer = random_checkpoint.byte_pairs(1000 if tiny else 151_643)
    plan_check.tokenizer = lambda: tokenizer
    count, every = 3 if tiny else STEPS, QeRLConfig.__dataclass_fields__["rollout_probe_steps"].default
    sequences = 4 if tiny else sequences
    case = plan_check.Case(size, sequences, 16 if tiny else 256, 8 if tiny else 512, sequences)
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [sequences]}
    engine = {"max_num_seqs": case.sequences, **({"enforce_eager": True} if tiny else {"compilation_config": graphs})}
    started = time.perf_counter()
    trainer = plan_check.build_trainer(
        case, device, steps_per_generation=1, num_generations=case.micro, max_steps=count + 2 * pairs, vllm_engine_kwargs=engine,
        rollout_probe_steps=count - 1, learning_rate=1e-5, aqn_sigma_start=1e-2,
        aqn_num_stages=2 * (count + 2 * pairs) // count,  # noise begins in the middle of the steps that are timed check by check
        vllm_gpu_memory_utilization=0.25 if tiny else None,
    )  # fmt: skip
    start = {"whole": time.perf_counter() - started, **clock.take()}
    again = probes_again(trainer, clock)
    folder = tempfile.TemporaryDirectory()
    of_a_folder = sealed_base(trainer, Path(folder.name))
    clock.take()
    steps: list[dict[str, float]] = []
    began: list[float] = []

    class Steps(TrainerCallback):
        def on_step_begin(self, args: Any, *others: Any, **kwargs: Any) -> None:
            before = clock.take()
            if len(began) >= count:  # the pairs: with, without, without, with
                if len(began) == count:
                    clock.stop()
                    args.rollout_probe_steps = 0
                clock.check_steps((len(began) - count) % 4 in (0, 3))
            if not began:
                start.update({label: start.get(label, 0.0) + seconds for label, seconds in before.items()})
            began.append(clock._now())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps.append({"whole": clock._now() - began[-1], **clock.take()})

    trainer.add_callback(Steps())
    trainer.train()
    folder.cleanup()
    counted = steps[1:count]
    labels = [label for label in TIMED if any(label in step for step in counted)]
    milliseconds = {label: round(1e3 * statistics.median(s.get(label, 0.0) for s in counted), 3) for label in labels}
    whole = statistics.median(step["whole"] for step in counted)
    probes = [step.get(PROBE, 0.0) for step in counted]
    # one step of this run is probed, and of a run one in this many
    milliseconds[PROBE] = round(1e3 * max(probes) / every, 3)
    checks = [label for label in labels if TIMED[label][0] == "check"]
    in_start = [label for label in TIMED if label in start]
    row = {
        "size": size,
        "completions": sequences,
        "step_s": round(whole, 4),
        "checks_ms_per_step": round(sum(milliseconds[label] for label in checks), 2),
        "checks_percent": round(sum(milliseconds[label] for label in checks) / whole / 10, 3),
        "checks_at_start_s": round(sum(start[label] for label in in_start if TIMED[label][0] == "check"), 3),
        "start_s": round(start["whole"], 2),
        "per_step_ms": milliseconds,
        **({"paired": paired([step["whole"] for step in steps[count:]], milliseconds[PROBE])} if pairs else {}),
        "one_probe_between_steps_ms": round(1e3 * max(probes), 1),
        "steps_per_probe": every,
        "noise_sync_ms": noise_syncs(trainer, clock),
        "probes_again_s": again,
        "at_start_s": {label: round(start[label], 4) for label in in_start},
        "of_a_folder_s": of_a_folder | folder_checks(trainer),
        "limits": limits(trainer, count),
    }
    return row


def noise_syncs(trainer: Any, clock: Clock, count: int = 20) -> float:
    """Median milliseconds of a new draw on all norms of the engine, as a rollout does it: drawn, written, measured, cache reset."""
    from qerl_trl.noise.hooks import NoiseDraw

    generation, times = trainer.vllm_generation, []
    generation.engine.wake()
    for step in range(count):
        began = clock._now()
        generation.sync_noise(NoiseDraw(1e-2, 0, 1000 + step, 0))
        times.append(1e3 * (clock._now() - began))
    generation.sync_noise(NoiseDraw(0.0, 0, 0, 0))
    return round(statistics.median(times[2:]), 3)


def probes_again(trainer: Any, clock: Clock) -> dict[str, float]:
    """Seconds of the two probes of the start once more, in a process that has done it all before: at start they are also the first to run what
    training and rollouts will run (allocations, libraries, kernels), which somebody has to."""
    generation, found = trainer.vllm_generation, {}
    generation.sync_weights()
    for name in ("run_probe", "probe_noise"):
        generation.engine.wake()
        began = clock._now()
        getattr(generation, name)()
        found[name] = round(clock._now() - began, 4)
    return found


def sealed_base(trainer: Any, folder: Path) -> dict[str, float]:
    """Write the base into `folder`, sealed as an export of it is, and let it be where it was loaded from. Seconds of what is compared before a
    model is loaded, and of the hashing meanwhile."""
    from safetensors.torch import save_file

    from qerl_trl.checkpoint import seal
    from qerl_trl.model import loading

    policy = trainer.accelerator.unwrap_model(trainer.model)
    base = policy.get_base_model()
    shutil.copy(Path(base.config.name_or_path, "config.json"), folder)
    values = {name: value.detach().cpu().clone() for name, value in base.named_parameters() if "lora_" not in name}
    save_file(values, folder / "model.safetensors")
    seal.seal(folder, {"kind": "nvfp4_base", "settings": {"base_sha256": trainer.base_sha256}})
    base.config.name_or_path = str(folder)
    began = time.perf_counter()
    loading.begin(folder)
    begun = time.perf_counter()
    loading.finish()
    return {
        "base_gib": round((folder / "model.safetensors").stat().st_size / 2**30, 3),
        "begin": round(begun - began, 4),
        "hash_in_the_background": round(time.perf_counter() - begun, 3),
    }


def folder_checks(trainer: Any) -> dict[str, float]:
    """Seconds of sealing and of verifying a checkpoint."""
    from qerl_trl.checkpoint import seal

    found = {}

    def timed(name: str, function: Any) -> None:
        began = time.perf_counter()
        function()
        found[name] = round(time.perf_counter() - began, 4)

    with tempfile.TemporaryDirectory() as folder:
        timed("save_adapter", lambda: trainer.save_adapter(f"{folder}/adapter"))
        timed("verify_adapter", lambda: seal.verify(f"{folder}/adapter"))
    return found


def limits(trainer: Any, counted: int) -> dict[str, Any]:
    """What this healthy run measured, beside what it may be, in its first steps: those with all checks."""
    import torch

    from qerl_trl.rollout import probe
    from qerl_trl.rollout.mismatch import MismatchWatch

    generation = trainer.vllm_generation
    dtype, found = getattr(torch, generation.spec.dtype), generation.probe_result
    # the run itself has none: plan_check's trainer fills completions with random tokens
    threshold = trainer.args.__dataclass_fields__["rollout_mismatch_threshold"].default
    rollouts = [
        {
            key: log.get(key)
            for key in ("aqn/sigma", "rollout/mismatch_kl", "rollout/logp_gap", "rollout/entropy", "entropy")
        }
        for log in [log for log in trainer.state.log_history if "loss" in log][:counted]
    ]
    return {
        "dtype": generation.spec.dtype,
        "probe: clean difference, nats": [found.base_difference, probe.CLEAN * found.rounding + probe.FLOOR[dtype]],
        "probe: difference with the probe adapter, nats": [found.difference, probe.SHARE * found.effect],
        "probe: rounding": found.rounding,
        "probe: fraction": found.size,
        "mismatch_kl warns above": {"clean": threshold / MismatchWatch.STOP, "noisy": threshold},
        "logp_gap warns above": threshold / MismatchWatch.STOP,
        "rollouts": rollouts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=["7b"])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--timeout", type=float, default=240, help="seconds per size")
    parser.add_argument("--pairs", type=int, default=0, help="steps with and without checks, in turns; 2 at least")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print("RESULT " + json.dumps(measure(args.worker, args.device, args.pairs)), flush=True)
        os._exit(0)  # an engine's own shutdown takes seconds
    from qerl_trl.checkpoint import records

    record: dict[str, Any] = {
        "command": about.command(),
        "commit": about.commit(),
        "versions": records.versions(),
        "checks": [],
    }
    if args.device == "cuda":
        import torch

        record["gpu"] = torch.cuda.get_device_name()
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "TOKENIZERS_PARALLELISM": "false", "MASTER_PORT": "0",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"),  # of several one process may see one
    }  # fmt: skip
    failed = 0
    for size in args.sizes:
        began = time.perf_counter()
        command = [sys.executable, __file__, "--worker", size, "--device", args.device, "--pairs", str(args.pairs)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=args.timeout)
            output = done.stdout + done.stderr
        except subprocess.TimeoutExpired as late:
            output = f"after {late.timeout:g} s: {late.stdout or b''!r}"[-3000:]
        line = next((line for line in output.splitlines() if line.startswith("RESULT ")), None)
        failed += line is None
        row = json.loads(line.removeprefix("RESULT ")) if line else {"size": size, "failed": output[-3000:]}
        row["seconds"] = round(time.perf_counter() - began, 1)
        record["checks"].append(row)
        print(json.dumps(row, indent=1) if line else f"{size} FAILED\n{output[-6000:]}", flush=True)
        if args.output is not None:
            args.output.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
