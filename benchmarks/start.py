"""Seconds from process start to the first sampled token: a QeRL trainer with colocated vLLM, and vLLM alone.

    python benchmarks/start.py --out results/start_h200.json                      # 7B on a GPU, about 8 minutes
    python benchmarks/start.py --out /tmp/start.json --shape tiny --device cpu    # dry run

Cases: `ours` (bf16 folder, quantized during loading, rank-32 adapter, noise) and `vllm` (bf16, the engine alone), both
with CUDA graphs. `cold` starts with empty caches of Triton, torch.compile and vLLM, `warm` with those of the cold run.
An import before both fills the page cache. `imports`: a user's import statements. Then the sequences of one rollout
(100 random tokens each) run to the first token and for 32 tokens, twice each; the difference is compilation.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import common

CASES = ("vllm", "ours")
RANK, PROMPT, NEW = 32, 100, 32
SEQUENCES = (8, 64)
MAX_LENGTH = 1024


class Clock:
    """Seconds since the process start, and durations of named parts."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.parts: dict[str, float] = {}

    def now(self) -> float:
        return round(time.time() - self.started, 2)

    def part(self, name: str, function: Callable[[], Any]) -> Any:
        begin = time.time()
        result = function()
        self.parts[name] = round(self.parts.get(name, 0.0) + time.time() - begin, 2)
        return result

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Time every call of `owner.attribute`."""
        original = getattr(owner, attribute)
        setattr(owner, attribute, lambda *args, **kwargs: self.part(name, lambda: original(*args, **kwargs)))


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(int(time.time() * 1000) % 2**31)  # new prompts, to miss the prefix cache
    return torch.randint(2, vocabulary, (count, PROMPT), generator=generator).tolist()


def start_ours(clock: Clock, checkpoint: Path, device: str) -> Callable[[int, int], None]:
    """Build a trainer with its engine; return its rollout function (sequences, new tokens)."""
    from trl.trainer import grpo_trainer

    from qerl_trl import trainer as trainer_module
    from qerl_trl.noise.callback import AQNCallback
    from qerl_trl.rollout.generation import QeRLVLLMGeneration
    from qerl_trl.rollout.vllm import engine as in_process

    clock.watch(QeRLVLLMGeneration, "_init_vllm", "engine and probe")
    clock.watch(in_process, "SharedLLM", "  LLM(...)")
    clock.watch(QeRLVLLMGeneration, "run_probe", "  probe")
    clock.watch(QeRLVLLMGeneration, "probe_noise", "noise: probe")
    clock.watch(grpo_trainer, "create_model_from_path", "weights, quantized while they load")
    clock.watch(trainer_module, "plan_trainer", "plan of memory")
    clock.watch(trainer_module.fingerprint, "shared_base_sha256", "fingerprint of the base")
    clock.watch(AQNCallback, "attach", "noise: find the norms")
    clock.watch(trainer_module, "prepare_updates", "update: fuse, pack, compile")
    trainer = clock.part("trainer", lambda: build(checkpoint, device))
    engine, vocabulary = trainer.vllm_generation, trainer.model.config.vocab_size

    def rollout(sequences: int, tokens: int) -> None:
        engine.max_completion_length = tokens
        with trainer.aqn.generation() if trainer.aqn is not None else nullcontext():
            engine.generate(prompts(sequences, vocabulary), None, 1)

    return rollout


def build(checkpoint: Path, device: str) -> Any:
    """A trainer with an engine for the sequences of one rollout."""
    from datasets import Dataset
    from peft import LoraConfig

    from qerl_trl import QeRLConfig, QeRLGRPOTrainer

    cpu = {"vllm_gpu_memory_utilization": 0.05, "vllm_engine_kwargs": {"enforce_eager": True}}
    arguments = QeRLConfig(
        output_dir=tempfile.mkdtemp(), use_vllm=True, vllm_mode="colocate", vllm_max_model_length=MAX_LENGTH,
        max_completion_length=NEW, per_device_train_batch_size=8, gradient_accumulation_steps=max(SEQUENCES) // 8,
        num_generations=8, model_init_kwargs={"dtype": "bfloat16"}, bf16=True, use_cpu=device == "cpu", report_to=[],
        **(cpu if device == "cpu" else {}),
    )  # fmt: skip
    return QeRLGRPOTrainer(
        model=str(checkpoint),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["1 " * PROMPT] * 64}),  # sets the size of the KV cache
        peft_config=LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def start_vllm(clock: Clock, checkpoint: Path, device: str) -> Callable[[int, int], None]:
    from vllm import LLM, SamplingParams

    options = {"gpu_memory_utilization": 0.05, "enforce_eager": True} if device == "cpu" else {}
    llm = clock.part(
        "LLM(...)",
        lambda: LLM(
            str(checkpoint), dtype="bfloat16", max_model_len=MAX_LENGTH, max_num_seqs=max(SEQUENCES),
            max_num_batched_tokens=4096, logprobs_mode="processed_logprobs", **options,
        ),
    )  # fmt: skip
    vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def rollout(sequences: int, tokens: int) -> None:
        inputs = [{"prompt_token_ids": ids} for ids in prompts(sequences, vocabulary)]
        parameters = SamplingParams(temperature=1.0, max_tokens=tokens, logprobs=0)
        llm.generate(inputs, parameters, use_tqdm=False)

    return rollout


def imports(case: str) -> None:
    """Import statements of a user's script."""
    if case == "ours":
        from qerl_trl import QeRLConfig, QeRLGRPOTrainer  # noqa: F401
    else:
        from vllm import LLM, SamplingParams  # noqa: F401


def run_case(case: str, work: Path, device: str, started: float) -> dict[str, Any]:
    clock = Clock(started)
    clock.part("imports", lambda: imports(case))
    start = start_ours if case == "ours" else start_vllm
    rollout = start(clock, work / "checkpoint", device)
    found: dict[str, Any] = {"ready_s": clock.now(), "first_token_s": 0.0, "rollouts": []}

    def seconds(sequences: int, tokens: int) -> float:
        begin = time.time()
        rollout(sequences, tokens)
        return round(time.time() - begin, 2)

    for sequences in SEQUENCES:
        for tokens in (1, NEW):
            first = seconds(sequences, tokens)
            found["first_token_s"] = found["first_token_s"] or clock.now()
            row = {"sequences": sequences, "tokens": tokens, "first_s": first, "again_s": seconds(sequences, tokens)}
            found["rollouts"].append(row)
    return found | {"total_s": clock.now(), "parts": clock.parts}


def environment(caches: Path, device: str) -> dict[str, str]:
    names = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "VLLM_CACHE_ROOT": "vllm"}
    settings = common.ENVIRONMENT | {name: str(caches / folder) for name, folder in names.items()}
    settings |= {"VLLM_LOGGING_LEVEL": "INFO", "MASTER_PORT": "0"}  # TRL picks a free port
    return settings | ({"TORCHDYNAMO_DISABLE": "1"} if device == "cpu" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--checkpoint", type=Path, help="An existing checkpoint of models.py.")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        common.give(run_case(args.case, args.out, args.device, args.started))
    from models import write_checkpoint

    begin, head = time.time(), common.head(args.device)
    with tempfile.TemporaryDirectory(prefix="start-time-") as folder:
        work = Path(folder)
        if args.checkpoint:
            (work / "checkpoint").symlink_to(args.checkpoint.resolve())
        else:
            write_checkpoint(args.shape, work / "checkpoint", args.device)
        once = [sys.executable, "-c", "import torch, transformers, vllm, trl, qerl_trl.trainer"]
        unmeasured = os.environ | environment(work / "caches-imports", args.device)
        subprocess.run(once, env=unmeasured, check=True, capture_output=True)
        runs = []

        def started(name: tuple[str, str]) -> tuple[list[str], dict[str, str]]:
            worker = ["--case", name[0], "--device", args.device, "--out", str(work), "--started", str(time.time())]
            return [sys.executable, __file__, *worker], environment(work / f"caches-{name[0]}", args.device)

        waiting = [(case, state) for case in CASES for state in ("cold", "warm")]
        for (case, state), row in common.results_of(waiting, started, limit=args.timeout):
            runs.append({"case": case, "state": state, **row})
            print(runs[-1], flush=True)
    warm = {run["case"]: run["first_token_s"] for run in runs if run["state"] == "warm" and "failed" not in run}
    against = {case: round(warm["ours"] / s, 2) for case, s in warm.items() if case != "ours" and "ours" in warm}
    result = {
        "what": __doc__.splitlines()[0], **{name: head[name] for name in ("command", "versions", "commit")},
        "shape": args.shape, "machine": f"{head['device']}, {len(os.sched_getaffinity(0))} processors",
        "warm_first_token_against": against, "minutes": round((time.time() - begin) / 60, 1), "runs": runs,
    }  # fmt: skip
    common.save(result, args.out)
    print(f"warm, to the first token, ours against: {against}; {result['minutes']} minutes")
    sys.exit(any("failed" in run for run in runs))


if __name__ == "__main__":
    main()
