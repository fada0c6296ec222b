"""Seconds from the start of the process to the first sampled token: a QeRL trainer with vLLM in its process, and plain vLLM in the same run.

    python start_time.py --out results/start_time.json                      # 7B on a GPU, about 8 minutes
    python start_time.py --out /tmp/start.json --shape tiny --device cpu    # does it run at all

Cases: `ours` (bf16 folder, quantized while it loads, rank-32 adapter, noise, CUDA graphs as vLLM captures them), `trl` (TRL's own trainer
with vLLM in its process, bf16, the same adapter, merged into the engine; GPU only), `vllm` (bf16, the engine alone) and `vllm-lora` (bf16,
rank-32 adapter in vLLM's own slots). Each runs twice, each time in a process of its own: `cold` with empty caches of
Triton, of torch.compile and of vLLM, then `warm` with those that the cold run left. Python's files are in the page cache either way: an
import that is not measured comes first. `imports` are the import statements of a user's script, and `imports_begin_s` the second in which
each large package was first asked for; `collector_s` is what Python's search for garbage takes of imports and of all before the first token.
Then as many sequences as one rollout has, of 100 random tokens each, to the first token and again, and a whole rollout of 32 tokens, twice;
what a second call no longer takes was compilation.

`log` holds what vLLM says about its own phases, with the second in which it says so.
"""

import argparse
import gc
import importlib.abc
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))

import about  # noqa: E402

CASES = ("vllm", "vllm-lora", "trl", "ours")
RANK, PROMPT, NEW = 32, 100, 32
SEQUENCES = (8, 64)
MAX_LENGTH = 1024
TELLING = re.compile(r"\d (s|sec|secs|seconds)\b|took|compil|captur|cache", re.IGNORECASE)


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


class Begun(importlib.abc.MetaPathFinder):
    """Finds nothing, but knows when each of some packages was first asked for."""

    def __init__(self, clock: Clock, *packages: str) -> None:
        self.clock, self.packages = clock, packages
        self.seconds: dict[str, float] = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname in self.packages:
            self.seconds.setdefault(fullname, self.clock.now())


class Collector:
    """Seconds that Python's search for garbage took."""

    def __init__(self) -> None:
        self.seconds = self._begun = 0.0
        gc.callbacks.append(self._look)

    def _look(self, phase: str, info: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._begun = now
        else:
            self.seconds += now - self._begun


class Heard(logging.Handler):
    """What vLLM logs about how long something takes."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(logging.INFO)
        self.clock, self.lines = clock, []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if TELLING.search(text) and len(text) < 300:
            self.lines.append(f"{self.clock.now():6.1f} {text}")


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
        output_dir=tempfile.mkdtemp(),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=MAX_LENGTH,
        max_completion_length=NEW,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=max(SEQUENCES) // 8,
        num_generations=8,
        model_init_kwargs={"dtype": "bfloat16"},
        bf16=True,
        use_cpu=device == "cpu",
        report_to=[],
        **options,
    )
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
    engine = trainer.vllm_generation
    engine.sync_weights()
    vocabulary = trainer.model.config.vocab_size

    def rollout(sequences: int, tokens: int) -> None:
        engine.max_completion_length = tokens
        engine.generate(prompts(sequences, vocabulary), None, 1)

    return rollout


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
    trainer = clock.part("trainer", lambda: build(QeRLConfig, QeRLGRPOTrainer, checkpoint, device))
    engine = trainer.vllm_generation
    vocabulary = trainer.model.config.vocab_size

    def rollout(sequences: int, tokens: int) -> None:
        engine.max_completion_length = tokens
        with trainer.aqn.generation() if trainer.aqn is not None else nullcontext():
            engine.generate(prompts(sequences, vocabulary), None, 1)

    return rollout


def start_vllm(clock: Clock, checkpoint: Path, device: str, lora: Path | None) -> Callable[[int, int], None]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = clock.part(
        "LLM(...)",
        lambda: LLM(
            str(checkpoint),
            dtype="bfloat16",
            max_model_len=MAX_LENGTH,
            max_num_seqs=max(SEQUENCES),
            max_num_batched_tokens=4096,
            logprobs_mode="processed_logprobs",
            **({"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1} if lora else {}),
            **({"gpu_memory_utilization": 0.05, "enforce_eager": True} if device == "cpu" else {}),
        ),
    )
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


def import_ours() -> None:
    from qerl_trl import QeRLConfig, QeRLGRPOTrainer  # noqa: F401


def import_trl() -> None:
    from trl import GRPOConfig, GRPOTrainer  # noqa: F401


def import_vllm() -> None:
    from vllm import LLM, SamplingParams  # noqa: F401
    from vllm.lora.request import LoRARequest  # noqa: F401


IMPORTS = {"ours": import_ours, "trl": import_trl, "vllm": import_vllm, "vllm-lora": import_vllm}


def run_case(case: str, checkpoint: Path, device: str, lora: Path, started: float) -> dict:
    clock = Clock(started)
    begun = Begun(clock, "torch", "transformers", "vllm", "vllm.entrypoints.llm", "trl", "datasets", "peft")
    sys.meta_path.insert(0, begun)
    collector = Collector()
    clock.part("imports", IMPORTS[case])
    collected = {"imports": round(collector.seconds, 2)}
    heard = Heard(clock)
    logging.getLogger("vllm").addHandler(heard)
    if case == "ours":
        rollout = start_ours(clock, checkpoint, device)
    elif case == "trl":
        rollout = start_trl(clock, checkpoint)
    else:
        rollout = start_vllm(clock, checkpoint, device, lora if case == "vllm-lora" else None)
    found: dict[str, Any] = {"ready_s": clock.now(), "first_token_s": 0.0}

    def seconds(sequences: int, tokens: int) -> float:
        begin = time.time()
        rollout(sequences, tokens)
        return round(time.time() - begin, 2)

    found["rollouts"] = []
    for sequences in SEQUENCES:
        for tokens in (1, NEW):
            times = [seconds(sequences, tokens)]
            found["first_token_s"] = found["first_token_s"] or clock.now()
            collected.setdefault("first token", round(collector.seconds, 2))
            times.append(seconds(sequences, tokens))
            found["rollouts"].append(
                {"sequences": sequences, "tokens": tokens, "first_s": times[0], "again_s": times[1]}
            )
    return found | {
        "total_s": clock.now(),
        "parts": clock.parts,
        "imports_begin_s": begun.seconds,
        "collector_s": collected,
        "log": heard.lines,
    }


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
    settings = {
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        "MASTER_PORT": "0",  # TRL then picks a free one
    }
    if device == "cpu":
        settings |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    return os.environ | settings


def run(case: str, state: str, args: argparse.Namespace, work: Path) -> dict:
    command = [
        sys.executable,
        __file__,
        "--case",
        case,
        "--shape",
        args.shape,
        "--device",
        args.device,
        "--out",
        str(work),
    ]
    log = work / f"{case}-{state}.log"
    with open(log, "w") as file:
        process = subprocess.run(
            [*command, "--started", str(time.time())],
            env=environment(work / f"caches-{case}", args.device),
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=args.timeout,
        )
    for line in reversed(log.read_text().splitlines()):
        if line.startswith("RESULT "):
            return {"case": case, "state": state, **json.loads(line.removeprefix("RESULT "))}
    raise RuntimeError(f"{case} ({state}) ended with {process.returncode} and no result:\n{log.read_text()[-4000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--checkpoint", type=Path, help="Of `random_checkpoint.py`, where one is there already.")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        folders = args.out / "checkpoint", args.device, args.out / "adapter"
        print("RESULT " + json.dumps(run_case(args.case, *folders, args.started)), flush=True)
        os._exit(0)  # an engine in this process does not always end

    import torch
    from random_checkpoint import write_checkpoint

    from qerl_trl.checkpoint.records import device_name, versions

    begin = time.time()
    with tempfile.TemporaryDirectory(prefix="start-time-") as folder:
        work = Path(folder)
        if args.checkpoint:
            (work / "checkpoint").symlink_to(args.checkpoint.resolve())
        else:
            write_checkpoint(args.shape, work / "checkpoint", args.device)
        write_adapter(work / "checkpoint", work / "adapter")
        subprocess.run(
            [sys.executable, "-c", "import torch, transformers, vllm, trl, qerl_trl.trainer"],
            env=environment(work / "caches-imports", args.device),
            check=True,
            capture_output=True,
        )
        runs = []
        # on a CPU TRL's trainer cannot put its weights into vLLM
        for case in [case for case in args.cases if case != "trl" or args.device == "cuda"]:
            for state in ("cold", "warm"):
                try:
                    runs.append(run(case, state, args, work))
                except (RuntimeError, subprocess.TimeoutExpired) as error:  # the others are measured all the same
                    runs.append({"case": case, "state": state, "error": str(error)[-2000:]})
                print(json.dumps({k: v for k, v in runs[-1].items() if k != "log"}), flush=True)
    warm = {run["case"]: run["first_token_s"] for run in runs if run["state"] == "warm" and "error" not in run}
    result = {
        "what": __doc__.splitlines()[0],
        "command": about.command(),
        "shape": args.shape,
        "machine": f"{device_name(torch.device(args.device))}, {len(os.sched_getaffinity(0))} processors",
        "versions": versions(),
        "commit": about.commit(),
        "warm_first_token_against": {
            case: round(warm["ours"] / seconds, 2)
            for case, seconds in warm.items()
            if case != "ours" and "ours" in warm
        },
        "minutes": round((time.time() - begin) / 60, 1),
        "runs": runs,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"warm, to the first token, ours against: {result['warm_first_token_against']}; {result['minutes']} minutes")
    sys.exit(any("error" in run for run in runs))


if __name__ == "__main__":
    main()
