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

The head is scaled so that the policy's entropy is a trained model's, not a random one's.
"""

import argparse
import functools
import importlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import common

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
    import memory
    import models
    import step
    import torch
    from transformers import TrainerCallback

    from qerl_trl import QeRLConfig

    size, _, completions = workload.partition(":")
    sequences = int(completions or 8)
    clock = Clock(device)
    packed_model = models.packed_model

    def sharper(*args: Any, **kwargs: Any) -> Any:
        model = packed_model(*args, **kwargs)
        with torch.no_grad():
            model.lm_head.weight.mul_(SHARPER)
        return model

    models.packed_model = sharper
    tiny = device == "cpu"
    if tiny:
        small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
        models.CONFIGS[size] = {**small, "num_key_value_heads": 2, "vocab_size": 1024}
    tokenizer = byte_pairs(1000 if tiny else 151_643)
    step.tokenizer = lambda: tokenizer
    count, every = 3 if tiny else STEPS, QeRLConfig.__dataclass_fields__["rollout_probe_steps"].default
    sequences = 4 if tiny else sequences
    case = memory.Case(size, sequences, 16 if tiny else 256, 8 if tiny else 512, sequences)
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [sequences]}
    engine = {"max_num_seqs": case.sequences, **({"enforce_eager": True} if tiny else {"compilation_config": graphs})}
    started = time.perf_counter()
    trainer = memory.build_trainer(
        case, device, steps_per_generation=1, num_generations=case.micro, max_steps=count + 2 * pairs, vllm_engine_kwargs=engine,
        rollout_probe_steps=count - 1, learning_rate=1e-5, aqn_sigma_start=1e-2,
        aqn_num_stages=2 * (count + 2 * pairs) // count,  # noise begins in the middle of the steps that are timed check by check
        vllm_gpu_memory_utilization=0.25 if tiny else None,
    )  # fmt: skip
    start = {"whole": time.perf_counter() - started, **clock.take()}
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
        "at_start_s": {label: round(start[label], 4) for label in in_start},
        "of_a_folder_s": of_a_folder,
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


def byte_pairs(size: int) -> Any:
    """A tokenizer of `size` tokens, all but 258 of them merged from others at random. w0 to w399, of which step.py makes prompts, are a token each."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters, digits, draw = sorted(pre_tokenizers.ByteLevel.alphabet()), "0123456789", random.Random(0)
    vocabulary = {letter: index for index, letter in enumerate(["<eos>", "<pad>", *letters])}
    merges: list[tuple[str, str]] = []

    def merge(left: str, right: str) -> None:
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))

    for begun in ["w", *(f"w{digit}" for digit in digits), *(f"w{number}" for number in range(10, 40))]:
        for digit in digits:
            merge(begun, digit)
    known = list(vocabulary)[2:]
    while len(vocabulary) < size:
        pair = draw.choice(known[:1000]), draw.choice(known[:1000])
        known.append("".join(pair))
        merge(*pair)
    built = Tokenizer(models.BPE(vocabulary, merges))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=built, eos_token="<eos>", pad_token="<pad>", unk_token="<pad>", padding_side="left"
    )


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
        common.give(measure(args.worker, args.device, args.pairs))
    head = common.head(args.device)
    record: dict[str, Any] = {**head, "gpu": head["device"].partition(",")[0], "checks": []}

    def start(size: str) -> tuple[list[str], dict[str, str]]:
        worker = [__file__, "--worker", size, "--device", args.device, "--pairs", str(args.pairs)]
        one = {"MASTER_PORT": "0", "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
        return [sys.executable, *worker], common.ENVIRONMENT | one  # of several GPUs one process may see one

    for size, row in common.results_of(list(args.sizes), start, limit=args.timeout):
        record["checks"].append({"size": size, **row})
        print(json.dumps(record["checks"][-1], indent=1), flush=True)
        common.save(record, args.output)
    sys.exit(any("failed" in row for row in record["checks"]))


if __name__ == "__main__":
    main()
