"""Rollout tokens/s of our engine against stock vLLM, in one run, on random weights in real shapes (CONFIGS in models.py).

    python benchmarks/rollout.py --out FILE ours:7b stock-merged:7b stock-lora:7b
    python benchmarks/rollout.py --out FILE ours:32b:8,32,64 stock-merged:32b:8,32,64 then stock-lora:32b:8,32,64

A case (`NAME:SIZE` or `NAME:SIZE:BATCHES`) is a process. Engines of a stage are built at the same time, lie on the GPU side by side, and are
measured in turns, batch by batch, beginning with another one each time, so that what drifts (clocks, heat) meets all of a model alike. `then`
begins another stage, when the processes before it have ended. A batch that does not fit, or comes after `SECONDS` of measuring a case, is left
out, and the result says so. `ours` also times syncs of adapter and noise.

FILE may exist, with cases of other runs: `runs` says of each run its command, commit, device and versions; a case names its run, and one that is
measured again replaces the former one. Ratios are only between cases of one run. results/rollout_speed_h200.json is the committed file.

Cases:
    ours          NVFP4 base shared with a trainer's model, rank-32 adapter inside the quantized layer
    stock-lora    stock vLLM, bf16, rank-32 adapter in vLLM's LoRA slots
    stock-merged  stock vLLM, bf16, no adapter: what TRL runs after it merged and streamed every weight
256-token prompts, 256 new tokens, temperature 1, processed log-probabilities, CUDA graphs of the decode step, no torch.compile. A step of `ours`
processes as many tokens as a plan chooses where there is room, one of the others what TRL says. On a CPU, `ours:dry` runs through all of it.
"""

import argparse
import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
from models import folder, generation, kv_bytes, linear_shapes, model_config, policy, randomize, seconds

from qerl_trl.memory.workload import LARGER_STEPS, MAX_BATCHED_TOKENS

THEN = "then"  # between the cases of two stages
ORDER = "engines of a stage side by side, measured in turns, batch by batch, beginning with another one each time"
WHAT = (
    "tokens per second; 256-token prompts, 256 new tokens, temperature 1, processed log-probabilities, full decode CUDA graphs, no "
    "torch.compile, rank-32 adapter on all seven projections; ours: NVFP4 base shared with a trainer's model, adapter inside the quantized "
    "layer; stock-lora: bf16 with vLLM's LoRA slots; stock-merged: bf16 without adapter, what TRL runs after merging; median of up to three "
    "rollouts; ratios are of engines of one run"
)
PROMPT, NEW, RANK, GIB = 256, 256, 32, 2**30
#: seconds after which a batch is not repeated, and of measuring a case, after which larger batches are left out
ENOUGH, SECONDS = 8.0, 120.0
PREFILL = 64  # sequences whose prefill alone is timed
CAPTURE = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUILD, WARM, LAST = "build", "warm", "last"  # turns beside those of the batches


class Case(NamedTuple):
    """An engine and a model, `NAME:SIZE`, with the numbers of sequences that it rolls out."""

    name: str
    batches: tuple[int, ...]

    @property
    def size(self) -> str:
        return self.name.split(":")[1]


def stages_of(words: list[str], batches: str = "8,32,64,128,256,512") -> list[list[Case]]:
    """The stages that a command line names; `batches` where a case says none.

    Raises:
        `ValueError`: a case is named twice, or is not NAME:SIZE.
    """
    stages: list[list[Case]] = [[]]
    for word in words:
        if word == THEN:
            stages.append([])
            continue
        engine, _, rest = word.partition(":")
        size, _, said = rest.partition(":")
        if not size:
            raise ValueError(f"{word!r} is no case; write NAME:SIZE or NAME:SIZE:BATCHES.")
        numbers = sorted({int(number) for number in (said or batches).split(",")})
        stages[-1].append(Case(f"{engine}:{size}", tuple(numbers)))
    names = [case.name for stage in stages for case in stage]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)}: named more than once. A run measures a case once.")
    return [stage for stage in stages if stage]


def turns(stage: list[Case]) -> list[tuple[str, int]]:
    """(case, sequences) in the order in which a stage is measured: model by model, batch by batch, beginning with another case each time."""
    order = []
    for size in dict.fromkeys(case.size for case in stage):
        cases = [case for case in stage if case.size == size]
        for i, batch in enumerate(sorted({batch for case in cases for batch in case.batches})):
            first = i % len(cases)
            order += [(case.name, batch) for case in (*cases[first:], *cases[:first]) if batch in case.batches]
    return order


# --- the file ----------------------------------------------------------------------------------------------------------------------------


def added(
    record: dict[str, Any] | None, name: str, run: dict[str, Any], cases: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """`record`, a file's content or None, with what the run `name` measured. A run of which no case is left goes.

    Args:
        run: what the run says of itself: `command`, `commit`, `device`, `versions` and more.
        cases: by their names; `tokens_per_s` of each holds values by the number of sequences, which is text.
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
    """Speed of ours relative to each other engine on the same model in the same run, by the number of sequences."""
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
    """A model as its publisher writes it; a bare size is Qwen2.5's."""
    return (f"Qwen2.5-{size}" if size[0].isdigit() else size).title()


def by_model(sizes: Iterable[str]) -> list[str]:
    """Sorted by family, then by size."""
    return sorted(
        sizes,
        key=lambda size: (not size[0].isdigit(), label(size).rpartition("-")[0], float(size.rpartition("-")[2][:-1])),
    )


# --- one engine, in a process of its own -------------------------------------------------------------------------------------------------


def engine_settings(size: str, batches: tuple[int, ...], step_tokens: int) -> dict[str, Any]:
    settings = {"max_num_batched_tokens": step_tokens, "skip_tokenizer_init": True}
    if DEVICE == "cpu":
        return settings | {"gpu_memory_utilization": 0.25, "enforce_eager": True}
    captured = [c for c in CAPTURE if c <= max(batches)]
    return settings | {
        # room for all sequences at full length, said explicitly: what is free does not matter then
        "kv_cache_memory_bytes": max(8, *batches) * (PROMPT + NEW + 32) * kv_bytes(size) + GIB,
        "gpu_memory_utilization": 0.02,
        "enable_prefix_caching": False,
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
    """(llm, LoRA request or None, our generation or None)."""
    settings = engine_settings(case.size, case.batches, step_tokens)
    if case.name.startswith("ours"):
        model = policy(case.size, RANK, DEVICE)
        g = generation(model, max_sequences=max(case.batches), max_length=2048, **settings)
        return g.llm, None, g
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    from qerl_trl.rollout.vllm.engine import engine_model

    slots = case.name.startswith("stock-lora")
    settings |= {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1} if slots else {}
    llm = LLM(
        folder(case.size), load_format="dummy", dtype="bfloat16", max_model_len=2048, max_num_seqs=max(case.batches), seed=0,
        logprobs_mode="processed_logprobs", **settings,
    )  # fmt: skip
    # weights of about 0.02 everywhere, norms 1: vLLM's own dummy values are a thousand times smaller
    for name, parameter in engine_model(llm).named_parameters():
        parameter.data.fill_(1.0) if parameter.ndim == 1 and "norm" in name else parameter.data.normal_(0, 0.02)
    return llm, LoRARequest("a", 1, write_lora(case.size)) if slots else None, None


def rollout(llm, request, vocabulary: int, batch: int, new_tokens: int, seed: int = 0, prompt: int = PROMPT) -> float:
    """Seconds that `batch` fresh random prompts with `new_tokens` sampled tokens each take."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(1000 * batch + seed)
    edge = min(1000, vocabulary // 4)
    ids = torch.randint(edge, vocabulary - edge, (batch, prompt), generator=generator).tolist()
    parameters = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False)
    inputs = [{"prompt_token_ids": i} for i in ids]
    return seconds(lambda: llm.generate(inputs, parameters, use_tqdm=False, lora_request=request), DEVICE)


def time_syncs(generation: Any, count: int = 10) -> dict[str, list[float]]:
    """Wall milliseconds of syncs with fresh values: adapter, a new draw for every noisy norm, both."""
    from qerl_trl.noise.hooks import NoiseDraw

    times: dict[str, list[float]] = {"adapter": [], "norms_new_draw": [], "both": []}

    def new_draw(step: int, sigma: float = 1e-2) -> None:
        generation.trainer.aqn.draw = NoiseDraw(sigma, 0, step, 0)
        generation.sync_noise()

    def both(step: int) -> None:
        generation.sync_weights()
        new_draw(step)

    for step in range(count):
        randomize(generation.model)
        times["adapter"].append(seconds(generation.sync_weights, DEVICE))
        times["norms_new_draw"].append(seconds(lambda step=step: new_draw(1000 + step), DEVICE))
        times["both"].append(seconds(lambda step=step: both(step), DEVICE))
    new_draw(0, 0.0)
    return {name: [round(1e3 * t, 2) for t in values] for name, values in times.items()}


def run_case(case: Case, options: argparse.Namespace) -> None:
    """Do each turn that comes by standard input, and answer with all that is known so far. Ends when the one that gives turns is gone."""
    import vllm.entrypoints.llm

    vocabulary = model_config(case.size)["vocab_size"]
    # TRL's GRPOTrainer has no other value than that of the others
    step_tokens = options.step_tokens if case.name.startswith("ours") else MAX_BATCHED_TOKENS
    result: dict[str, Any] = {
        "case": case.name,
        "step_tokens": step_tokens,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "measure_s": 0.0,
        "tokens_per_s": {},
        "left_out": {},
    }
    llm = request = ours = None
    print("\nRESULT " + json.dumps(result), flush=True)
    for turn in map(str.strip, sys.stdin):
        started = time.time()
        if turn == BUILD:
            llm, request, ours = build(case, step_tokens)
            result["gpu"] = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
            result["load_s"] = round(time.time() - started, 1)
        elif turn == WARM:
            if ours is not None:
                result["sync_ms"] = time_syncs(ours)
            rollout(llm, request, vocabulary, 16, 8)  # a prefill step of full size
        elif turn == LAST and PREFILL in result["tokens_per_s"]:
            result["prefill_s"] = {PREFILL: round(rollout(llm, request, vocabulary, PREFILL, 1), 4)}
        elif turn.isdigit() and int(turn) not in result["left_out"]:
            batch, why = int(turn), None
            if result["measure_s"] >= SECONDS:
                why = f"{SECONDS:g} s of measuring were over"
            else:
                try:
                    result["tokens_per_s"][batch] = speeds(llm, request, vocabulary, batch, options.repeats)
                except torch.OutOfMemoryError as error:
                    why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            result["measure_s"] = round(result["measure_s"] + time.time() - started, 1)
            result["left_out"] |= {rest: why for rest in case.batches if why and rest >= batch}
        if DEVICE == "cuda":
            result["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 1)
        print("\nRESULT " + json.dumps(result), flush=True)
        if turn == LAST:
            break
    os._exit(0)  # vLLM's own end can hang


def speeds(llm, request, vocabulary: int, batch: int, repeats: int) -> list[float]:
    """Tokens per second of so many rollouts at most, none begun after `ENOUGH` seconds."""
    rollout(llm, request, vocabulary, batch, 8, prompt=16)
    times: list[float] = []
    while len(times) < repeats and sum(times) < ENOUGH:
        times.append(rollout(llm, request, vocabulary, batch, NEW, seed=len(times) + 1))
    return [round(batch * NEW / t, 1) for t in times]


# --- all of them -------------------------------------------------------------------------------------------------------------------------


class Engine:
    """The process of a case. `found`: its last answer. `failed`: why it gives no more.

    Args:
        timeout: seconds that a turn may take; then its process is killed.
    """

    def __init__(self, case: Case, command: list[str], port: int, timeout: float) -> None:
        self.case, self.timeout, self.found, self.failed = case, timeout, dict[str, Any](), ""
        # TRL's search for a free port is a race between them
        environment = os.environ | common.ENVIRONMENT | {"MASTER_PORT": str(port)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                self._answers.put(json.loads(line.removeprefix("RESULT ")))
        self._answers.put(None)

    def give(self, turn: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{turn}\n")
            self.process.stdin.flush()

    def wait(self, turn: object) -> None:
        """For the answer to a turn."""
        if self.failed:
            return
        try:
            answer = self._answers.get(timeout=self.timeout)
        except queue.Empty:
            self.process.kill()
            self.failed = f"killed after {self.timeout:g} s of its turn `{turn}`"
            return
        if answer is None:
            self.failed = f"its process ended with {self.process.wait()} in its turn `{turn}`"
        else:
            self.found = answer

    def end(self) -> None:
        try:
            self.process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.failed:
            print(f"CASE {self.case.name} FAILED: {self.failed}", flush=True)


def command(case: Case, options: argparse.Namespace) -> list[str]:
    """The command line of a case's process."""
    told = {"--case": f"{case.name}:{','.join(map(str, case.batches))}", "--repeats": options.repeats}
    told |= {"--step-tokens": options.step_tokens, "--out": options.out}
    return [sys.executable, __file__, *(str(word) for pair in told.items() for word in pair)]


def measure(stages: list[list[Case]], options: argparse.Namespace) -> None:
    """Runs the stages one after the other, and adds what they measure to `options.out`."""
    before = json.loads(options.out.read_text()) if options.out.exists() else None
    head = common.head(DEVICE, options.commit)
    run_name = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {(head['commit'] or 'unknown')[:7]}"
    cases = [case for stage in stages for case in stage]
    ports = common.free_ports(len(cases))
    engines = {
        case.name: Engine(case, command(case, options), port, options.timeout)
        for case, port in zip(cases, ports, strict=True)
    }

    def save() -> dict[str, dict[str, Any]]:
        found, failed = {}, {}
        for number, stage in enumerate(stages):
            for engine in [engines[case.name] for case in stage]:
                if not engine.found.get("tokens_per_s"):
                    failed |= {engine.case.name: engine.failed} if engine.failed else {}
                    continue
                one = found[engine.case.name] = engine.found | {"stage": number}
                missing = {str(b) for b in engine.case.batches} - one["tokens_per_s"].keys() - one["left_out"].keys()
                why = dict.fromkeys(sorted(missing, key=int), engine.failed) if engine.failed else {}
                one["left_out"] = one["left_out"] | why
        if found:
            run = {**head, "order": ORDER, "failed": failed}
            common.save(added(before, run_name, run, found), options.out)
        return found

    for stage in stages:
        together = [engines[case.name] for case in stage]
        for engine in together:
            engine.wait("import")
        for engine in together:
            engine.give(BUILD)
        for engine in together:
            engine.wait(BUILD)
        names = [case.name for case in stage]
        for name, turn in [*((name, WARM) for name in names), *turns(stage), *((name, LAST) for name in names)]:
            engines[name].give(turn)
            engines[name].wait(turn)
            save()
        for engine in together:
            engine.end()
    if not save():
        failed = {name: engine.failed for name, engine in engines.items()}
        sys.exit(f"Nothing was measured: {failed}. {options.out} is as it was.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="NAME:SIZE or NAME:SIZE:BATCHES, with `then` between stages")
    parser.add_argument("--repeats", type=int, default=3, help=f"at most; none after {ENOUGH:g} s")
    parser.add_argument("--step-tokens", type=int, default=LARGER_STEPS[0], help="that a step of ours may process")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="recorded in the result")
    parser.add_argument("--timeout", type=float, default=240, help="seconds that a build, or a turn, may take")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        run_case(stages_of([options.case])[0][0], options)
    try:
        stages = stages_of(options.cases)
    except ValueError as error:
        parser.error(str(error))
    measure(stages, options)


if __name__ == "__main__":
    main()
