"""Rollout speed in tokens/s of our engine and stock vLLM, on random weights in real shapes (CONFIGS in models.py).

    python benchmarks/rollout.py --out FILE ours:7b stock-merged:7b stock-lora:7b
    python benchmarks/rollout.py --out FILE ours:32b:8,32,64 stock-merged:32b:8,32,64

A case (`NAME:SIZE` or `NAME:SIZE:BATCHES`) is one process, alone on the GPU. Batches that do not fit, or would start
after `SECONDS` of measuring, are in `left_out` with the reason. Cases of other runs stay in FILE; `runs` has command,
commit, device and versions of each. Ratios compare cases of one run. Committed: results/rollout_h200.json.

    ours          NVFP4 base shared with a trainer's model, rank-32 adapter inside the quantized layer
    stock-lora    stock vLLM, bf16, rank-32 adapter in vLLM's LoRA slots
    stock-merged  stock vLLM, bf16, no adapter: TRL's rollout after merging and streaming every weight

256-token prompts, 256 new tokens, temperature 1, processed log-probabilities, CUDA graphs of the decode step, no
torch.compile. A step has as many tokens as the memory plan prefers (`ours`), or TRL's 4096. `ours:dry` runs on a CPU.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
from models import folder, kv_bytes, linear_shapes, model_config, randomize, seconds
from step import prompts, trainer_of

from qerl_trl.memory.workload import LARGER_STEPS, MAX_BATCHED_TOKENS

ORDER = "cases one after the other, each alone on the GPU"
WHAT = (
    "tokens per second; 256-token prompts, 256 new tokens, temperature 1, processed log-probabilities, full decode "
    "CUDA graphs, no torch.compile, rank-32 adapter on all seven projections; ours: NVFP4 base shared with a trainer's "
    "model, adapter inside the quantized layer; stock-lora: bf16 with vLLM's LoRA slots; stock-merged: bf16 without "
    "adapter, what TRL runs after merging; median of up to three rollouts; ratios are of engines of one run"
)
PROMPT, NEW, RANK, GIB = 256, 256, 32, 2**30
#: limits in seconds: repeats of one batch; measurement of a case, before larger batches are left out
ENOUGH, SECONDS = 8.0, 120.0
PREFILL = 64  # sequences of the timed prefill
CAPTURE = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Case(NamedTuple):
    """Engine and model, `NAME:SIZE`, and the batch sizes."""

    name: str
    batches: tuple[int, ...]

    @property
    def size(self) -> str:
        return self.name.split(":")[1]


def cases_of(words: list[str], batches: str = "8,32,64,128,256,512") -> list[Case]:
    """Cases of a command line, with `batches` by default.

    Raises:
        `ValueError`: not NAME:SIZE.
    """
    cases = []
    for word in words:
        engine, _, rest = word.partition(":")
        size, _, own = rest.partition(":")
        if not size:
            raise ValueError(f"{word!r} is no case; write NAME:SIZE or NAME:SIZE:BATCHES.")
        numbers = sorted({int(number) for number in (own or batches).split(",")})
        cases.append(Case(f"{engine}:{size}", tuple(numbers)))
    return cases


# --- the file -------------------------------------------------------------------------------------


def added(
    record: dict[str, Any] | None, name: str, run: dict[str, Any], cases: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Add the cases of run `name` to a record (None: a new one); drop runs without cases.

    Args:
        run: `command`, `commit`, `device`, `versions` and more.
        cases: by name; `tokens_per_s` of each has a list per batch size.
    """
    before: dict[str, Any] = record or {"runs": {}, "cases": {}}
    merged = before["cases"] | {case: {**found, "run": name} for case, found in cases.items()}
    used = {case["run"] for case in merged.values()}
    runs = {key: value for key, value in (before["runs"] | {name: run}).items() if key in used}
    speed = {
        case: {batch: statistics.median(values) for batch, values in found["tokens_per_s"].items()}
        for case, found in merged.items()
    }
    return {"what": WHAT, "tokens_per_s": speed, "ratios": ratios(merged, speed), "runs": runs, "cases": merged}


def ratios(cases: dict[str, dict[str, Any]], speed: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Speed relative to each other engine on the same model in the same run, by batch size."""
    found = {}
    for ours in cases:
        for other in cases:
            one_model = ours.split(":")[1] == other.split(":")[1]
            one_run = cases[ours]["run"] == cases[other]["run"]
            if ours.startswith("ours:") and other != ours and one_model and one_run:
                shared = [batch for batch in speed[ours] if batch in speed[other]]
                found[f"{ours} over {other}"] = {b: round(speed[ours][b] / speed[other][b], 3) for b in shared}
    return found


def label(size: str) -> str:
    """Name of a model; a bare size is Qwen2.5's."""
    return (f"Qwen2.5-{size}" if size[0].isdigit() else size).title()


def by_model(sizes: Iterable[str]) -> list[str]:
    return sorted(
        sizes,
        key=lambda size: (not size[0].isdigit(), label(size).rpartition("-")[0], float(size.rpartition("-")[2][:-1])),
    )


# --- one engine per process -----------------------------------------------------------------------


def engine_settings(size: str, batches: tuple[int, ...], step_tokens: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_num_batched_tokens": step_tokens}
    if DEVICE == "cpu":
        return settings | {"gpu_memory_utilization": 0.25, "enforce_eager": True}
    captured = [c for c in CAPTURE if c <= max(batches)]
    return settings | {
        # explicit size for all sequences at full length, independent of the free memory
        "kv_cache_memory_bytes": max(8, *batches) * (PROMPT + NEW + 32) * kv_bytes(size) + GIB,
        **{"gpu_memory_utilization": 0.02, "enable_prefix_caching": False},
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": captured},
    }


def write_lora(size: str) -> str:
    """A PEFT adapter folder with random rank-32 weights on all seven projections."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    shapes, tensors = linear_shapes(size), {}
    for layer in range(model_config(size)["num_hidden_layers"]):
        for name, (n, k) in shapes.items():
            base = f"base_model.model.model.layers.{layer}.{name}"
            tensors[base + ".lora_A.weight"] = (torch.randn(RANK, k, device=DEVICE) * 0.01).bfloat16().cpu()
            tensors[base + ".lora_B.weight"] = (torch.randn(n, RANK, device=DEVICE) * 0.01).bfloat16().cpu()
    path = tempfile.mkdtemp()
    save_file(tensors, f"{path}/adapter_model.safetensors")
    leaves = sorted(name.split(".")[1] for name in shapes)
    LoraConfig(r=RANK, lora_alpha=RANK, target_modules=leaves, task_type="CAUSAL_LM").save_pretrained(path)
    return path


def build(case: Case, step_tokens: int) -> tuple[Any, Any, Any]:
    """(llm, LoRA request or None, trainer that shares its weights or None)."""
    settings = engine_settings(case.size, case.batches, step_tokens)
    if case.name.startswith("ours"):
        cpu = DEVICE == "cpu"
        arguments = {
            "output_dir": tempfile.mkdtemp(), "use_vllm": True, "vllm_mode": "colocate", "use_cpu": cpu,
            "bf16": not cpu, "max_completion_length": NEW, "vllm_max_model_length": 2048, "report_to": "none",
            "aqn_num_stages": 2,
            "vllm_gpu_memory_utilization": settings.pop("gpu_memory_utilization"),
            "vllm_engine_kwargs": settings | {"max_num_seqs": max(case.batches)},
        }  # fmt: skip
        trainer = trainer_of(case.size, arguments, prompts(PROMPT), DEVICE)
        randomize(trainer.model)
        trainer.vllm_generation.sync_weights()
        return trainer.vllm_generation.llm, None, trainer
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    from qerl_trl.rollout.vllm.engine import engine_model

    slots = case.name.startswith("stock-lora")
    settings |= {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1} if slots else {}
    llm = LLM(
        folder(case.size), load_format="dummy", dtype="bfloat16", max_model_len=2048, seed=0, skip_tokenizer_init=True,
        max_num_seqs=max(case.batches), logprobs_mode="processed_logprobs", **settings,
    )  # fmt: skip
    # weights of about 0.02, norms of 1: vLLM's dummy values are a thousand times smaller
    for name, parameter in engine_model(llm).named_parameters():
        parameter.data.fill_(1.0) if parameter.ndim == 1 and "norm" in name else parameter.data.normal_(0, 0.02)
    return llm, LoRARequest("a", 1, write_lora(case.size)) if slots else None, None


def rollout(llm, request, vocabulary: int, batch: int, new_tokens: int, seed: int = 0, prompt: int = PROMPT) -> float:
    """Seconds to sample `new_tokens` tokens for each of `batch` new random prompts."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(1000 * batch + seed)
    edge = min(1000, vocabulary // 4)
    ids = torch.randint(edge, vocabulary - edge, (batch, prompt), generator=generator).tolist()
    parameters = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False)
    inputs = [{"prompt_token_ids": i} for i in ids]
    return seconds(lambda: llm.generate(inputs, parameters, use_tqdm=False, lora_request=request), DEVICE)


def run_case(case: Case, repeats: int, step_tokens: int) -> dict[str, Any]:
    """Build the engine and time its batches in ascending order."""
    vocabulary = model_config(case.size)["vocab_size"]
    step_tokens = step_tokens if case.name.startswith("ours") else MAX_BATCHED_TOKENS
    result: dict[str, Any] = {"step_tokens": step_tokens, "tokens_per_s": {}, "left_out": {}}
    started = time.time()
    llm, request, _trainer = build(case, step_tokens)
    result["load_s"] = round(time.time() - started, 1)
    rollout(llm, request, vocabulary, 16, 8)  # a full prefill step
    started = time.time()
    for batch in case.batches:
        why = f"{SECONDS:g} s of measuring were over" if time.time() - started >= SECONDS else ""
        try:
            result["tokens_per_s"] |= {} if why else {batch: speeds(llm, request, vocabulary, batch, repeats)}
        except torch.OutOfMemoryError as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if why:
            result["left_out"] = {rest: why for rest in case.batches if rest >= batch}
            break
    if PREFILL in result["tokens_per_s"]:
        result["prefill_s"] = {PREFILL: round(rollout(llm, request, vocabulary, PREFILL, 1), 4)}
    if DEVICE == "cuda":
        result["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 1)
    return result


def speeds(llm, request, vocabulary: int, batch: int, repeats: int) -> list[float]:
    """Tokens per second of up to `repeats` rollouts, none started after `ENOUGH` seconds."""
    rollout(llm, request, vocabulary, batch, 8, prompt=16)
    times: list[float] = []
    while len(times) < repeats and sum(times) < ENOUGH:
        times.append(rollout(llm, request, vocabulary, batch, NEW, seed=len(times) + 1))
    return [round(batch * NEW / t, 1) for t in times]


# --- all of them ---


def measure(cases: list[Case], options: argparse.Namespace) -> None:
    """Run the cases and add their measurements to `options.out`."""
    before = json.loads(options.out.read_text()) if options.out.exists() else None
    head = common.head(DEVICE, options.commit)
    run_name = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {(head['commit'] or 'unknown')[:7]}"
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, Any] = {}
    words = {case.name: f"{case.name}:{','.join(map(str, case.batches))}" for case in cases}

    def start(name: str) -> tuple[list[str], dict[str, str]]:
        given = ["--repeats", options.repeats, "--step-tokens", options.step_tokens, "--out", "-"]
        environment = common.ENVIRONMENT | {"MASTER_PORT": str(common.free_ports(1)[0])}
        return [sys.executable, __file__, "--case", words[name], *map(str, given)], environment

    for name, row in common.results_of(list(words), start, limit=options.timeout):
        if "failed" in row:
            failed[name] = row["failed"]
        else:
            found[name] = row
        print(name, row.get("tokens_per_s") or row, flush=True)
        if found:
            run = {**head, "order": ORDER, "failed": failed}
            common.save(added(before, run_name, run, found), options.out)
    if not found:
        sys.exit(f"Nothing was measured: {failed}. {options.out} is unchanged.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="NAME:SIZE or NAME:SIZE:BATCHES")
    parser.add_argument("--repeats", type=int, default=3, help=f"maximum; none starts after {ENOUGH:g} s")
    parser.add_argument("--step-tokens", type=int, default=LARGER_STEPS[0], help="tokens per step of `ours`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="recorded in the result")
    parser.add_argument("--timeout", type=float, default=420, help="seconds per case")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        common.give(run_case(cases_of([options.case])[0], options.repeats, options.step_tokens))
    try:
        cases = cases_of(options.cases)
    except ValueError as error:
        parser.error(str(error))
    measure(cases, options)


if __name__ == "__main__":
    main()
