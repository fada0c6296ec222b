"""Seconds from the start of the process to the first sampled token: a QeRL trainer with vLLM in its process, and plain vLLM in the same run.

    python benchmarks/start.py --out results/start_time.json                      # 7B on a GPU, about 8 minutes
    python benchmarks/start.py --out /tmp/start.json --shape tiny --device cpu    # does it run at all

Cases: `ours` (bf16 folder, quantized while it loads, rank-32 adapter, noise, CUDA graphs as vLLM captures them), `trl` (TRL's own trainer
with vLLM in its process, bf16, the same adapter, merged into the engine; GPU only), `vllm` (bf16, the engine alone) and `vllm-lora` (bf16,
rank-32 adapter in vLLM's own slots). Each runs twice, each time in a process of its own: `cold` with empty caches of
Triton, of torch.compile and of vLLM, then `warm` with those that the cold run left. Python's files are in the page cache either way: an
import that is not measured comes first. `imports` are the import statements of a user's script; `collector_s` is what Python's search for
garbage takes of imports and of all before the first token. Then as many sequences as one rollout has, of 100 random tokens each, to the first
token and again, and a whole rollout of 32 tokens, twice; what a second call no longer takes was compilation.
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

CASES = ("vllm", "vllm-lora", "trl", "ours")
RANK, PROMPT, NEW = 32, 100, 32
SEQUENCES = (8, 64)
MAX_LENGTH = 1024


class Clock:
    """Seconds since the process was started, and how long each named part took."""

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

    generator = torch.Generator().manual_seed(int(time.time() * 1000) % 2**31)  # never in the prefix cache
    return torch.randint(2, vocabulary, (count, PROMPT), generator=generator).tolist()


def build(config: Any, trainer: Any, checkpoint: Path, device: str, **options: Any) -> Any:
    """A trainer of either kind, whose engine has room for as many sequences as one rollout has."""
    from datasets import Dataset
    from peft import LoraConfig

    if device == "cpu":
        options |= {"vllm_gpu_memory_utilization": 0.05, "vllm_engine_kwargs": {"enforce_eager": True}}
    arguments = config(
        output_dir=tempfile.mkdtemp(), use_vllm=True, vllm_mode="colocate", vllm_max_model_length=MAX_LENGTH, max_completion_length=NEW,
        per_device_train_batch_size=8, gradient_accumulation_steps=max(SEQUENCES) // 8, num_generations=8,
        model_init_kwargs={"dtype": "bfloat16"}, bf16=True, use_cpu=device == "cpu", report_to=[], **options,
    )  # fmt: skip
    return trainer(
        model=str(checkpoint),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["1 " * PROMPT] * 64}),  # by which a planned KV cache is sized
        peft_config=LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def start_trl(clock: Clock, checkpoint: Path) -> Callable[[int, int], None]:
    """TRL's trainer with its engine, in whose weights the adapter is merged, as before each of its rollouts."""
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation
    from trl.trainer import grpo_trainer

    clock.watch(vllm_generation, "LLM", "  LLM(...)")
    clock.watch(grpo_trainer, "create_model_from_path", "weights")
    clock.watch(grpo_trainer, "get_peft_model", "adapter")
    clock.watch(vllm_generation.VLLMGeneration, "sync_weights", "merged adapter into the engine")
    trainer = clock.part(
        "trainer", lambda: build(GRPOConfig, GRPOTrainer, checkpoint, "cuda", vllm_gpu_memory_utilization=0.4)
    )
    trainer.vllm_generation.sync_weights()
    return rollouts_of(trainer)


def start_ours(clock: Clock, checkpoint: Path, device: str) -> Callable[[int, int], None]:
    """A trainer with its engine; returns what rolls out (sequences, new tokens)."""
    from trl.trainer import grpo_trainer

    from qerl_trl import QeRLConfig, QeRLGRPOTrainer
    from qerl_trl import trainer as trainer_module
    from qerl_trl.noise.callback import AQNCallback
    from qerl_trl.rollout import generation
    from qerl_trl.rollout.vllm import compile_ahead
    from qerl_trl.rollout.vllm import engine as in_process

    clock.watch(generation.QeRLVLLMGeneration, "_init_vllm", "engine and probe")
    clock.watch(in_process, "SharedLLM", "  LLM(...)")
    clock.watch(compile_ahead, "precompile", "    kernels")
    clock.watch(in_process, "fuse_storage", "  one storage")
    clock.watch(generation.QeRLVLLMGeneration, "run_probe", "  probe")
    clock.watch(generation.QeRLVLLMGeneration, "sync_weights", "    adapter into the engine")
    clock.watch(grpo_trainer, "create_model_from_path", "weights, quantized while they load")
    clock.watch(grpo_trainer, "get_peft_model", "adapter")
    clock.watch(trainer_module, "plan_trainer", "plan of memory")
    clock.watch(trainer_module.base_identity, "shared_base_sha256", "fingerprint of the base")
    clock.watch(AQNCallback, "attach", "noise: find the norms")
    clock.watch(generation.QeRLVLLMGeneration, "probe_noise", "noise: probe")
    clock.watch(trainer_module, "prepare", "update: fuse, pack, compile")
    return rollouts_of(clock.part("trainer", lambda: build(QeRLConfig, QeRLGRPOTrainer, checkpoint, device)))


def rollouts_of(trainer: Any) -> Callable[[int, int], None]:
    engine, vocabulary, aqn = trainer.vllm_generation, trainer.model.config.vocab_size, getattr(trainer, "aqn", None)

    def rollout(sequences: int, tokens: int) -> None:
        engine.max_completion_length = tokens
        with aqn.generation() if aqn is not None else nullcontext():
            engine.generate(prompts(sequences, vocabulary), None, 1)

    return rollout


def start_vllm(clock: Clock, checkpoint: Path, device: str, lora: Path | None) -> Callable[[int, int], None]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1} if lora else {}
    options |= {"gpu_memory_utilization": 0.05, "enforce_eager": True} if device == "cpu" else {}
    llm = clock.part(
        "LLM(...)",
        lambda: LLM(
            str(checkpoint), dtype="bfloat16", max_model_len=MAX_LENGTH, max_num_seqs=max(SEQUENCES), max_num_batched_tokens=4096,
            logprobs_mode="processed_logprobs", **options,
        ),
    )  # fmt: skip
    request = LoRARequest("adapter", 1, str(lora)) if lora else None
    vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def rollout(sequences: int, tokens: int) -> None:
        llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts(sequences, vocabulary)],
            SamplingParams(temperature=1.0, max_tokens=tokens, logprobs=0),
            use_tqdm=False,
            lora_request=request,
        )

    return rollout


def imports(case: str) -> None:
    """Those of a user's script."""
    if case == "ours":
        from qerl_trl import QeRLConfig, QeRLGRPOTrainer  # noqa: F401
    elif case == "trl":
        from trl import GRPOConfig, GRPOTrainer  # noqa: F401
    else:
        from vllm import LLM, SamplingParams  # noqa: F401
        from vllm.lora.request import LoRARequest  # noqa: F401


def run_case(case: str, work: Path, device: str, started: float) -> dict[str, Any]:
    clock, collector = Clock(started), common.Garbage()
    clock.part("imports", lambda: imports(case))
    collected, checkpoint = {"imports": round(collector.seconds, 2)}, work / "checkpoint"
    if case == "ours":
        rollout = start_ours(clock, checkpoint, device)
    elif case == "trl":
        rollout = start_trl(clock, checkpoint)
    else:
        rollout = start_vllm(clock, checkpoint, device, work / "adapter" if case == "vllm-lora" else None)
    found: dict[str, Any] = {"ready_s": clock.now(), "first_token_s": 0.0, "rollouts": []}

    def seconds(sequences: int, tokens: int) -> float:
        begin = time.time()
        rollout(sequences, tokens)
        return round(time.time() - begin, 2)

    for sequences in SEQUENCES:
        for tokens in (1, NEW):
            first = seconds(sequences, tokens)
            found["first_token_s"] = found["first_token_s"] or clock.now()
            collected.setdefault("first token", round(collector.seconds, 2))
            row = {"sequences": sequences, "tokens": tokens, "first_s": first, "again_s": seconds(sequences, tokens)}
            found["rollouts"].append(row)
    return found | {"total_s": clock.now(), "parts": clock.parts, "collector_s": collected}


def write_adapter(checkpoint: Path, folder: Path) -> None:
    """Random rank-32 weights on all projections, as PEFT saves them."""
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith("_proj"):
            key = f"base_model.model.{name}.lora_"
            tensors[f"{key}A.weight"] = (torch.randn(RANK, module.in_features) * 0.01).bfloat16()
            tensors[f"{key}B.weight"] = (torch.randn(module.out_features, RANK) * 0.01).bfloat16()
    leaves = sorted({name.split(".")[-3] for name in tensors})
    LoraConfig(r=RANK, lora_alpha=RANK, target_modules=leaves, task_type="CAUSAL_LM").save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors")


def environment(caches: Path, device: str) -> dict[str, str]:
    names = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "VLLM_CACHE_ROOT": "vllm"}
    settings = common.ENVIRONMENT | {name: str(caches / folder) for name, folder in names.items()}
    settings |= {"VLLM_LOGGING_LEVEL": "INFO", "MASTER_PORT": "0"}  # TRL then picks a free one
    return settings | ({"TORCHDYNAMO_DISABLE": "1"} if device == "cpu" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--checkpoint", type=Path, help="Of models.py, where one is there already.")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        common.give(run_case(args.case, args.out, args.device, args.started))
    from models import write_checkpoint

    begin, head = time.time(), common.head(args.device)
    # on a CPU TRL's trainer cannot put its weights into vLLM
    cases = [case for case in args.cases if case != "trl" or args.device == "cuda"]
    with tempfile.TemporaryDirectory(prefix="start-time-") as folder:
        work = Path(folder)
        if args.checkpoint:
            (work / "checkpoint").symlink_to(args.checkpoint.resolve())
        else:
            write_checkpoint(args.shape, work / "checkpoint", args.device)
        write_adapter(work / "checkpoint", work / "adapter")
        once = [sys.executable, "-c", "import torch, transformers, vllm, trl, qerl_trl.trainer"]
        unmeasured = os.environ | environment(work / "caches-imports", args.device)
        subprocess.run(once, env=unmeasured, check=True, capture_output=True)
        runs = []

        def started(name: tuple[str, str]) -> tuple[list[str], dict[str, str]]:
            told = ["--case", name[0], "--device", args.device, "--out", str(work), "--started", str(time.time())]
            return [sys.executable, __file__, *told], environment(work / f"caches-{name[0]}", args.device)

        waiting = [(case, state) for case in cases for state in ("cold", "warm")]
        for (case, state), row in common.results_of(waiting, started, limit=args.timeout):
            runs.append({"case": case, "state": state, **row})
            print(runs[-1], flush=True)
    warm = {run["case"]: run["first_token_s"] for run in runs if run["state"] == "warm" and "failed" not in run}
    against = {case: round(warm["ours"] / s, 2) for case, s in warm.items() if case != "ours" and "ours" in warm}
    result = {
        "what": __doc__.splitlines()[0],
        **{name: head[name] for name in ("command", "versions", "commit")},
        "shape": args.shape,
        "machine": f"{head['device']}, {len(os.sched_getaffinity(0))} processors",
        "warm_first_token_against": against,
        "minutes": round((time.time() - begin) / 60, 1),
        "runs": runs,
    }
    common.save(result, args.out)
    print(f"warm, to the first token, ours against: {against}; {result['minutes']} minutes")
    sys.exit(any("failed" in run for run in runs))


if __name__ == "__main__":
    main()
