"""Rollout tokens/s of our engine against stock vLLM, in one run, on random weights in the Qwen2.5 shapes.

    python rollout_speed.py --out FILE ours:7b stock-lora:7b ...        one process a case
    python rollout_speed.py --out FILE --case ours:7b --batches 8,32

With `--together` all cases build their engines at the same time and are then measured one after the other (the others idle), which
saves minutes on a rented machine; they must fit the GPU side by side, except those named in `--after`, which build when the others are
done. A third part of a case lists batches whose decode step is profiled as well: `ours:7b:8,64,256:64,256`. `ours` also times syncs of
adapter and noise. What comes out is one JSON, results/rollout_speed_h200.json where it is committed.

Cases (each `NAME:SIZE`):
    ours          NVFP4 base shared with a trainer's model, rank-32 adapter inside the quantized layer
    ours-dense    the same engine with a bf16 base
    ours-slots    our NVFP4 base, the adapter in vLLM's own LoRA slots
    stock-lora    stock vLLM, bf16, rank-32 adapter in vLLM's LoRA slots
    stock-merged  stock vLLM, bf16, no adapter: what TRL runs after it merged and streamed every weight
Settings as in the baselines: 256-token prompts, 256 new tokens, temperature 1, processed log-probabilities, CUDA graphs of the
decode step, no torch.compile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("MASTER_PORT", "0")  # TRL then picks a free one

import torch

sys.path.insert(0, str(Path(__file__).parent))
import about
from rollout_models import VOCAB, folder, generation, model_config, policy, seconds, time_syncs

WHAT = (
    "tokens per second; 256-token prompts, 256 new tokens, temperature 1, processed log-probabilities, full decode CUDA graphs, no "
    "torch.compile, rank-32 adapter on all seven projections; ours: NVFP4 base shared with a trainer's model, adapter inside the quantized "
    "layer; stock-lora: bf16 with vLLM's LoRA slots; stock-merged: bf16 without adapter, what TRL runs after merging; median of up to three "
    "rollouts; engines of one run side by side on the GPU, measured one after the other"
)
RANK, PROMPT, NEW = 32, 256, 256
FIRST_PORT = 29600  # of cases that run side by side
ENOUGH = 8.0  # seconds after which a batch is not repeated
PREFILL = 64  # sequences whose prefill alone is timed
CAPTURE = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def engine_settings(size: str, batches: list[int]) -> dict:
    c = model_config(size)
    head = c["hidden_size"] // c["num_attention_heads"]
    kv_bytes = 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * head * 2
    return {
        # room for all sequences at full length, said explicitly: what is free does not matter then
        "kv_cache_memory_bytes": max(8, max(batches)) * (PROMPT + NEW + 32) * kv_bytes + 2**30,
        "gpu_memory_utilization": 0.02,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [c for c in CAPTURE if c <= max(batches)],
        },
    }


def stock_settings(size: str, batches: list[int]) -> dict:
    return {
        "dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": max(batches), "seed": 0,
        "logprobs_mode": "processed_logprobs", "max_num_batched_tokens": 4096, **engine_settings(size, batches),
    }  # fmt: skip


def write_lora(size: str) -> str:
    """A PEFT adapter folder with random rank-32 weights on all seven projections."""
    from safetensors.torch import save_file

    c = model_config(size)
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    kv = hidden // c["num_attention_heads"] * c["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    tensors = {}
    for layer in range(c["num_hidden_layers"]):
        for name, (n, k) in shapes.items():
            base = f"base_model.model.model.layers.{layer}.{name}"
            tensors[base + ".lora_A.weight"] = (torch.randn(RANK, k, device="cuda") * 0.01).bfloat16().cpu()
            tensors[base + ".lora_B.weight"] = (torch.randn(n, RANK, device="cuda") * 0.01).bfloat16().cpu()
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
    from qerl_trl.rollout.vllm.in_process import engine_model

    for name, parameter in engine_model(llm).named_parameters():
        parameter.data.fill_(1.0) if parameter.ndim == 1 and "norm" in name else parameter.data.normal_(0, 0.02)


def build(name: str, size: str, batches: list[int]):
    """(llm, LoRA request or None)"""
    if name in ("ours", "ours-dense"):
        model = policy(size, RANK, dense=name == "ours-dense")
        g = generation(model, max_sequences=max(batches), max_length=2048, **engine_settings(size, batches))
        build.keep = g
        return g.llm, None
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    lora = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}
    if name == "ours-slots":
        from rollout_models import packed_model

        from qerl_trl.rollout.vllm import loader

        model = packed_model(size)
        loader.publish(model)
        settings = stock_settings(size, batches)
        llm = LLM(folder(size), load_format="qerl_trainer", quantization="qerl_nvfp4", **settings, **lora)
        loader.publish(None)
    else:
        lora = lora if name == "stock-lora" else {}
        llm = LLM(folder(size), load_format="dummy", **stock_settings(size, batches), **lora)
        randomize_stock(llm)
    return llm, None if name == "stock-merged" else LoRARequest("a", 1, write_lora(size))


def rollout(llm, request, batch: int, new_tokens: int, seed: int = 0, prompt: int = PROMPT) -> float:
    """Seconds that `batch` fresh random prompts with `new_tokens` sampled tokens each take."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(1000 * batch + seed)
    ids = torch.randint(1000, VOCAB - 1000, (batch, prompt), generator=generator).tolist()
    parameters = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False)
    inputs = [{"prompt_token_ids": i} for i in ids]
    return seconds(lambda: llm.generate(inputs, parameters, use_tqdm=False, lora_request=request))


def profile(llm, request, batch: int) -> list[str]:
    """Kernels of a decode step, by time: microseconds per step, launches per step. Prefill and first steps are subtracted.

    Kernels that wait for their predecessor on the GPU (launched early, as ours are) count the waiting, so their sum exceeds the wall.
    """
    first, steps = 24, 16  # after 24 steps every sequence of the batch decodes
    spans = []
    for new_tokens in (first, first + steps):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            wall = rollout(llm, request, batch, new_tokens)
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


def run_case(case: str, batches: list[int], profiled: list[int], repeats: int, rendezvous: Path | None) -> dict:
    import vllm.entrypoints.llm

    def await_turn(announce: str, turn: str) -> None:
        if rendezvous is not None:
            (rendezvous / f"{case}.{announce}").touch()
            while not (rendezvous / f"{case}.{turn}").exists():
                time.sleep(0.1)

    name, size = case.split(":")
    await_turn("imported", "build")
    started = time.time()
    llm, request = build(name, size, batches)
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    result = {"case": case, "load_s": round(time.time() - started, 1), **versions}
    await_turn("ready", "measure")
    if name == "ours":
        result["sync_ms"] = time_syncs(build.keep)
    rollout(llm, request, 16, 8)  # a prefill step of full size
    result["tokens_per_s"] = {}
    for batch in batches:
        rollout(llm, request, batch, 8, prompt=16)
        times: list[float] = []
        while len(times) < repeats and sum(times) < ENOUGH:
            times.append(rollout(llm, request, batch, NEW, seed=len(times) + 1))
        result["tokens_per_s"][batch] = [round(batch * NEW / t, 1) for t in times]
    result["prefill_s"] = {PREFILL: round(rollout(llm, request, PREFILL, 1), 4)} if max(batches) >= PREFILL else {}
    if profiled:
        result["profile"] = {batch: profile(llm, request, batch) for batch in profiled}
    return result


class Group:
    """Cases that run side by side: all build their engines, then one after the other measures."""

    def __init__(self, commands: dict[str, list[str]], after: list[str], timeout: float) -> None:
        self.folder, self.after, self.timeout = Path(tempfile.mkdtemp()), after, timeout
        self.running = {}
        for port, (case, command) in enumerate(commands.items(), FIRST_PORT):
            environment = dict(os.environ, MASTER_PORT=str(port))  # TRL's search for a free one is a race between them
            self.running[case] = subprocess.Popen([*command, "--rendezvous", str(self.folder)], env=environment)

    def _tell(self, case: str, what: str) -> None:
        (self.folder / f"{case}.{what}").touch()

    def build(self, cases: list[str]) -> None:
        """Returns when every case has its engine, or ended."""
        for case in cases:
            self._tell(case, "build")
        deadline = time.time() + self.timeout
        while time.time() < deadline:
            if all(self.running[c].poll() is not None or (self.folder / f"{c}.ready").exists() for c in cases):
                break
            time.sleep(0.2)

    def measure(self, cases: list[str]) -> None:
        for case in cases:
            self._tell(case, "measure")
            report(case, self.running[case], self.timeout)

    def run(self) -> None:
        first = [case for case in self.running if case not in self.after]
        self.build(first)
        self.measure(first)
        for case in self.after:
            self.build([case])
            self.measure([case])


def report(case: str, process: subprocess.Popen, timeout: float) -> None:
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        code = "timeout"
    if code:
        print(f"CASE {case} FAILED: {code}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="NAME:SIZE, NAME:SIZE:BATCHES or NAME:SIZE:BATCHES:PROFILED")
    parser.add_argument("--case")
    parser.add_argument("--batches", default="8,32,64,128,256")
    parser.add_argument("--profile", default="", help="batches whose decode step is profiled")
    parser.add_argument("--repeats", type=int, default=3, help=f"at most; none after {ENOUGH:g} s")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="recorded in the result")
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--after", default="", help="cases that build when the others are done: NAME:SIZE,...")
    parser.add_argument("--rendezvous", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        batches, profiled = ([int(b) for b in text.split(",") if b] for text in (args.batches, args.profile))
        result = run_case(args.case, batches, profiled, args.repeats, args.rendezvous)
        with open(args.out, "a") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)
        os._exit(0)
    lines = args.out.with_suffix(".jsonl")
    lines.unlink(missing_ok=True)
    commands = dict(command(item, args, lines) for item in args.cases)
    if args.together:
        Group(commands, [case for case in args.after.split(",") if case], args.timeout).run()
    else:
        for case, arguments in commands.items():
            report(case, subprocess.Popen(arguments), args.timeout)
    args.out.write_text(json.dumps(summary(lines, args.commit), indent=1) + "\n")


def summary(lines: Path, commit: str) -> dict:
    """The result as it is committed: where it was measured, medians, ratios of ours to each other engine, and every case."""

    cases = {case["case"]: case for case in map(json.loads, lines.read_text().splitlines())}
    speed = {
        name: {batch: statistics.median(values) for batch, values in case["tokens_per_s"].items()}
        for name, case in cases.items()
    }
    ratios = {
        f"{ours} over {other}": {
            b: round(speed[ours][b] / speed[other][b], 3) for b in speed[ours] if b in speed[other]
        }
        for ours in speed
        for other in speed
        if ours.startswith("ours:") and other != ours and other.split(":")[1] == ours.split(":")[1]
    }
    return {
        "what": WHAT,
        **about.head("cuda", commit),
        "tokens_per_s": speed,
        "ratios": ratios,
        "cases": cases,
    }


def command(item: str, args: argparse.Namespace, lines: Path) -> tuple[str, list[str]]:
    """A case's name and the command line of its process."""
    name, size, *rest = item.split(":")
    batches, profiled = [*rest, *(args.batches, args.profile)[len(rest) :]][:2]
    case = f"{name}:{size}"
    arguments = ["--case", case, "--batches", batches, "--profile", profiled, "--repeats", str(args.repeats)]
    return case, [sys.executable, __file__, *arguments, "--out", str(lines)]


if __name__ == "__main__":
    main()
