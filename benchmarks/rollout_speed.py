"""Rollout tokens/s of our engine against stock vLLM, in one run, on random weights in real shapes (SHAPES in rollout_models.py).

    python rollout_speed.py --out FILE ours:7b stock-merged:7b stock-lora:7b
    python rollout_speed.py --out FILE ours:32b stock-merged:32b then stock-lora:32b
    python rollout_speed.py --out FILE --plan ours:14b ...      only prints what would be measured, and what memory that is thought to take

Each case (`NAME:SIZE`) is a process. Engines of a stage are built at the same time, lie on the GPU side by side, and are measured one after the
other in turns, batch by batch; the others idle. `then` begins another stage, when the processes before it have ended (rollout_plan.py). Batches
that do not fit beside the others, or come after `--seconds` of measuring a case, are left out, and the result says so. A case's third and fourth
part are its batches, and those whose decode step is profiled: `ours:7b:8,64,256:64,256`. `ours` also times syncs of adapter and noise.

FILE may exist, with cases of other runs: a case measured again replaces the former one (rollout_results.py). It is written after every batch.
results/rollout_speed_h200.json is the committed one.

Cases:
    ours          NVFP4 base shared with a trainer's model, rank-32 adapter inside the quantized layer
    ours-dense    the same engine with a bf16 base
    ours-slots    our NVFP4 base, the adapter in vLLM's own LoRA slots
    stock-lora    stock vLLM, bf16, rank-32 adapter in vLLM's LoRA slots
    stock-merged  stock vLLM, bf16, no adapter: what TRL runs after it merged and streamed every weight
Settings as in the baselines: 256-token prompts, 256 new tokens, temperature 1, processed log-probabilities, CUDA graphs of the
decode step, no torch.compile. A step of `ours` and `ours-dense` processes as many tokens as a plan chooses where there is room, one of the others
what TRL says. On a CPU, `dry` runs through all of it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("MASTER_PORT", "0")  # TRL then picks a free one

import torch

sys.path.insert(0, str(Path(__file__).parent))
import about
import rollout_results
from process_groups import free_ports
from rollout_models import folder, generation, linear_shapes, model_config, policy, seconds, time_syncs
from rollout_plan import (
    GIB,
    NEW,
    PLANNED_STEPS,
    PROMPT,
    USABLE,
    Case,
    case_gib,
    fitting,
    kv_cache_bytes,
    stages_of,
    turns,
)

from qerl_trl.memory.workload import LARGER_STEPS, MAX_BATCHED_TOKENS

ORDER = "engines of a stage side by side, measured in turns, batch by batch, beginning with another one each time"
RANK = 32
ENOUGH = 8.0  # seconds after which a batch is not repeated
PREFILL = 64  # sequences whose prefill alone is timed
CAPTURE = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUILD, WARM, LAST = "build", "warm", "last"  # turns beside those of the batches


def step_tokens_of(name: str, ours: int) -> int:
    """Tokens that a step of an engine may process; TRL's GRPOTrainer has no other value."""
    return ours if name in PLANNED_STEPS else MAX_BATCHED_TOKENS


def engine_settings(size: str, batches: list[int], step_tokens: int) -> dict:
    settings = {"max_num_batched_tokens": step_tokens, "skip_tokenizer_init": True}
    if DEVICE == "cpu":
        return settings | {"gpu_memory_utilization": 0.25, "enforce_eager": True}
    return settings | {
        # room for all sequences at full length, said explicitly: what is free does not matter then
        "kv_cache_memory_bytes": kv_cache_bytes(size, max(batches)),
        "gpu_memory_utilization": 0.02,
        "enable_prefix_caching": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [c for c in CAPTURE if c <= max(batches)],
        },
    }


def stock_settings(size: str, batches: list[int], step_tokens: int) -> dict:
    return {
        "dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": max(batches), "seed": 0,
        "logprobs_mode": "processed_logprobs", **engine_settings(size, batches, step_tokens),
    }  # fmt: skip


def write_lora(size: str) -> str:
    """A PEFT adapter folder with random rank-32 weights on all seven projections."""
    from safetensors.torch import save_file

    shapes, tensors = linear_shapes(size), {}
    for layer in range(model_config(size)["num_hidden_layers"]):
        for name, (n, k) in shapes.items():
            base = f"base_model.model.model.layers.{layer}.{name}"
            tensors[base + ".lora_A.weight"] = (torch.randn(RANK, k, device=DEVICE) * 0.01).bfloat16().cpu()
            tensors[base + ".lora_B.weight"] = (torch.randn(n, RANK, device=DEVICE) * 0.01).bfloat16().cpu()
    path = Path(tempfile.mkdtemp())
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0, "bias": "none",
        "target_modules": sorted(name.split(".")[1] for name in shapes), "base_model_name_or_path": "x", "inference_mode": True,
        "fan_in_fan_out": False, "modules_to_save": None, "use_dora": False, "use_rslora": False,
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


def randomize_stock(llm) -> None:
    """Weights of about 0.02 everywhere, norms 1: vLLM's own dummy values are a thousand times smaller."""
    from qerl_trl.rollout.vllm.engine import engine_model

    for name, parameter in engine_model(llm).named_parameters():
        parameter.data.fill_(1.0) if parameter.ndim == 1 and "norm" in name else parameter.data.normal_(0, 0.02)


def build(name: str, size: str, batches: list[int], step_tokens: int):
    """(llm, LoRA request or None)"""
    if name in ("ours", "ours-dense"):
        model = policy(size, RANK, DEVICE, dense=name == "ours-dense")
        g = generation(
            model, max_sequences=max(batches), max_length=2048, **engine_settings(size, batches, step_tokens)
        )
        build.keep = g
        return g.llm, None
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    lora = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}
    if name == "ours-slots":
        from rollout_models import packed_model

        from qerl_trl.rollout.vllm import loader

        model = packed_model(size, DEVICE)
        loader.publish(model)
        settings = stock_settings(size, batches, step_tokens)
        llm = LLM(folder(size), load_format="qerl_trainer", quantization="qerl_nvfp4", **settings, **lora)
        loader.publish(None)
    else:
        lora = lora if name == "stock-lora" else {}
        llm = LLM(folder(size), load_format="dummy", **stock_settings(size, batches, step_tokens), **lora)
        randomize_stock(llm)
    return llm, None if name == "stock-merged" else LoRARequest("a", 1, write_lora(size))


def rollout(llm, request, vocabulary: int, batch: int, new_tokens: int, seed: int = 0, prompt: int = PROMPT) -> float:
    """Seconds that `batch` fresh random prompts with `new_tokens` sampled tokens each take."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(1000 * batch + seed)
    edge = min(1000, vocabulary // 4)
    ids = torch.randint(edge, vocabulary - edge, (batch, prompt), generator=generator).tolist()
    parameters = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False)
    inputs = [{"prompt_token_ids": i} for i in ids]
    return seconds(lambda: llm.generate(inputs, parameters, use_tqdm=False, lora_request=request), DEVICE)


def profile(llm, request, vocabulary: int, batch: int) -> list[str]:
    """Kernels of a decode step, by time: microseconds per step, launches per step. Prefill and first steps are subtracted.

    Kernels that wait for their predecessor on the GPU (launched early, as ours are) count the waiting, so their sum exceeds the wall.
    """
    first, steps = 24, 16  # after 24 steps every sequence of the batch decodes
    spans = []
    for new_tokens in (first, first + steps):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            wall = rollout(llm, request, vocabulary, batch, new_tokens)
        spans.append(({e.key: (e.device_time_total, e.count) for e in trace.key_averages()}, wall))
    (before, wall_before), (after, wall_after) = spans
    rows = []
    for key, (time_us, count) in after.items():
        old_us, old_count = before.get(key, (0.0, 0))
        rows.append(((time_us - old_us) / steps, (count - old_count) / steps, key))
    rows.sort(reverse=True)
    lines = [
        f"wall {1e6 * (wall_after - wall_before) / steps:.0f} us per step, kernels {sum(r[0] for r in rows):.0f} us"
    ]
    return lines + [f"{us:9.1f} us {count:7.1f}x {key[:110]}" for us, count, key in rows[:24]]


class Turns:
    """A case's side of `Stage`: says through files in `folder` that it awaits a turn, and waits until it is given. Ends this process, and gives
    the GPU back, when the one that gives turns is gone."""

    def __init__(self, case: str, folder: Path) -> None:
        self.case, self.folder, self.parent = case, folder, os.getppid()

    def await_(self, turn: object) -> None:
        (self.folder / f"{self.case}.{turn}.awaited").touch()
        while not (self.folder / f"{self.case}.{turn}").exists():
            if os.getppid() != self.parent:
                os._exit(1)
            time.sleep(0.02)


def run_case(case: Case, options: argparse.Namespace) -> None:
    """Adds a line to `options.out` whenever something new is known of the case; the last one counts."""
    import vllm.entrypoints.llm

    mine, name = Turns(case.name, options.rendezvous), case.name.split(":")[0]
    batches, vocabulary = list(case.batches), model_config(case.size)["vocab_size"]
    mine.await_(BUILD)
    started = time.time()
    step_tokens = step_tokens_of(name, options.step_tokens)
    llm, request = build(name, case.size, batches, step_tokens)
    result: dict[str, Any] = {
        "case": case.name,
        "load_s": round(time.time() - started, 1),
        "step_tokens": step_tokens,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
        "measure_s": 0.0,
        "tokens_per_s": {},
        "left_out": {},
    }
    mine.await_(WARM)
    if name == "ours":
        result["sync_ms"] = time_syncs(build.keep, device=DEVICE)
    rollout(llm, request, vocabulary, 16, 8)  # a prefill step of full size
    for batch in batches:
        mine.await_(batch)
        started = time.time()
        why = f"{options.seconds:g} s of measuring were over" if result["measure_s"] >= options.seconds else None
        if why is None:
            try:
                result["tokens_per_s"][batch] = speeds(llm, request, vocabulary, batch, options.repeats)
            except torch.OutOfMemoryError as error:
                why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        result["measure_s"] = round(result["measure_s"] + time.time() - started, 1)
        if why:
            result["left_out"] |= {rest: why for rest in batches if rest >= batch}
        if DEVICE == "cuda":
            result["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 1)
        write_line(options.out, result)
        if why:
            break
    mine.await_(LAST)
    if PREFILL in result["tokens_per_s"]:
        result["prefill_s"] = {PREFILL: round(rollout(llm, request, vocabulary, PREFILL, 1), 4)}
    if case.profiled:
        measured = [batch for batch in case.profiled if batch in result["tokens_per_s"]]
        result["profile"] = {batch: profile(llm, request, vocabulary, batch) for batch in measured}
    write_line(options.out, result)


def speeds(llm, request, vocabulary: int, batch: int, repeats: int) -> list[float]:
    """Tokens per second of so many rollouts at most, none begun after `ENOUGH` seconds."""
    rollout(llm, request, vocabulary, batch, 8, prompt=16)
    times: list[float] = []
    while len(times) < repeats and sum(times) < ENOUGH:
        times.append(rollout(llm, request, vocabulary, batch, NEW, seed=len(times) + 1))
    return [round(batch * NEW / t, 1) for t in times]


def write_line(path: Path, result: dict[str, Any]) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(result) + "\n")


class Stage:
    """Processes whose engines are on the GPU side by side: all build, then they get their turns one at a time.

    Args:
        saved: called whenever there may be more to save.
        timeout: seconds that a turn may take; then its process is killed.
    """

    def __init__(self, cases: list[Case], folder: Path, running: dict[str, subprocess.Popen], saved, timeout: float):
        self.cases, self.folder, self.running = cases, folder, running
        self.saved, self.timeout = saved, timeout
        self.failed: dict[str, str] = {}

    def _await(self, case: str, after: str) -> None:
        """Returns when the case awaits a turn beyond the given one, or ended."""
        process, deadline = self.running[case], time.time() + self.timeout
        while not self._awaited(case) and process.poll() is None:
            if time.time() > deadline:
                process.kill()
                process.wait()
                self.failed[case] = f"killed after {self.timeout:g} s of its turn `{after}`"
                break
            time.sleep(0.05)
        if process.poll():
            self.failed.setdefault(case, f"its process ended with {process.poll()} in its turn `{after}`")

    def _awaited(self, case: str) -> set[str]:
        """Turns that the case awaits, not given yet."""
        awaited = {path.name.removesuffix(".awaited") for path in self.folder.glob(f"{case}.*.awaited")}
        return {name.removeprefix(f"{case}.") for name in awaited if not (self.folder / name).exists()}

    def _give(self, case: str, turn: object) -> None:
        (self.folder / f"{case}.{turn}").touch()

    def run(self) -> None:
        names = [case.name for case in self.cases]
        for name in names:
            self._await(name, "import")
        for name in names:
            self._give(name, BUILD)
        for name in names:
            self._await(name, BUILD)
        for name, turn in [*((name, WARM) for name in names), *turns(self.cases), *((name, LAST) for name in names)]:
            if str(turn) in self._awaited(name) and self.running[name].poll() is None:
                self._give(name, turn)
                self._await(name, str(turn))
                self.saved()
        for name in names:
            self._finish(name)

    def _finish(self, name: str) -> None:
        try:
            self.running[name].wait(self.timeout)
        except subprocess.TimeoutExpired:
            self.running[name].kill()
            self.running[name].wait()
        if code := self.running[name].returncode:
            self.failed.setdefault(name, f"its process ended with {code} while others had their turns")
        if name in self.failed:
            print(f"CASE {name} FAILED: {self.failed[name]}", flush=True)


def command(case: Case, options: argparse.Namespace, lines: Path, rendezvous: Path) -> list[str]:
    """The command line of a case's process."""
    batches, profiled = (",".join(map(str, some)) for some in (case.batches, case.profiled))
    arguments = ["--case", case.name, "--batches", batches, "--profile", profiled, "--repeats", str(options.repeats)]
    limits = ["--seconds", str(options.seconds), "--step-tokens", str(options.step_tokens)]
    return [sys.executable, __file__, *arguments, *limits, "--rendezvous", str(rendezvous), "--out", str(lines)]


def measure(stages: list[list[Case]], left: dict[str, dict[str, str]], options: argparse.Namespace) -> None:
    """Runs the stages one after the other, and adds what they measure to `options.out`.

    Args:
        left: what is not measured, and why, by case and number of sequences.
    """
    before, head = rollout_results.read(options.out), about.head(DEVICE, options.commit)
    run_name = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {(head['commit'] or 'unknown')[:7]}"
    failed: dict[str, str] = {}
    folder = Path(tempfile.mkdtemp())
    lines = folder / "cases.jsonl"

    def saved() -> None:
        written, found = rollout_results.latest(lines), {}
        for number, stage in enumerate(stages):
            for case in stage:
                if case.name not in written:
                    continue
                found[case.name] = one = written[case.name]
                one["left_out"] |= left[case.name]
                if case.name in failed:
                    missing = {str(b) for b in case.batches} - one["tokens_per_s"].keys() - one["left_out"].keys()
                    one["left_out"] |= dict.fromkeys(sorted(missing, key=int), failed[case.name])
                one["stage"] = number
        run = {**head, "order": ORDER, "failed": {name: why for name, why in failed.items() if name not in found}}
        if found:
            rollout_results.write(options.out, rollout_results.added(before, run_name, run, found))

    running = {}
    cases = [case for stage in stages for case in stage]
    for port, case in zip(free_ports(len(cases)), cases, strict=True):
        environment = dict(os.environ, MASTER_PORT=str(port))  # TRL's search for a free one is a race between them
        running[case.name] = subprocess.Popen(command(case, options, lines, folder), env=environment)
    for together in stages:
        stage = Stage(together, folder, running, saved, options.timeout)
        stage.run()
        failed |= stage.failed
        saved()
    if not rollout_results.latest(lines):
        sys.exit(f"Nothing was measured: {failed}. {options.out} is as it was.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases",
        nargs="*",
        help="NAME:SIZE, NAME:SIZE:BATCHES or NAME:SIZE:BATCHES:PROFILED, with `then` between stages",
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--batches", default="8,32,64,128,256,512")
    parser.add_argument("--profile", default="", help="batches whose decode step is profiled")
    parser.add_argument("--repeats", type=int, default=3, help=f"at most; none after {ENOUGH:g} s")
    parser.add_argument(
        "--seconds", type=float, default=60, help="of measuring a case, after which larger batches are left out"
    )
    parser.add_argument("--step-tokens", type=int, default=LARGER_STEPS[0], help="that a step of ours may process")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="recorded in the result")
    parser.add_argument("--timeout", type=float, default=240, help="seconds that a build, or a turn, may take")
    parser.add_argument("--plan", action="store_true", help="only print stages, memory and what is left out")
    parser.add_argument("--gpu-gib", type=float, help="of the GPU that --plan is for, where it is not here")
    parser.add_argument("--rendezvous", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        (case,) = stages_of([options.case], options.batches, options.profile)[0]
        run_case(case, options)
        sys.stdout.flush()
        os._exit(0)
    try:
        total = options.gpu_gib or (
            torch.cuda.get_device_properties(0).total_memory / GIB if DEVICE == "cuda" else None
        )
        stages, left = [], {}
        for named in stages_of(options.cases, options.batches, options.profile):
            stage, out = fitting(named, total and USABLE * total)
            stages.append(stage)
            left |= out
    except (ValueError, KeyError) as error:
        parser.error(str(error))
    for stage in stages:
        for case in stage:
            skipped = f", without {', '.join(left[case.name])}" if left[case.name] else ""
            print(f"{case.name}: {case_gib(case):.1f} GiB at {','.join(map(str, case.batches))}{skipped}")
        print(f"side by side {sum(map(case_gib, stage)):.1f} GiB", flush=True)
    if not options.plan:
        measure(stages, left, options)


if __name__ == "__main__":
    main()
