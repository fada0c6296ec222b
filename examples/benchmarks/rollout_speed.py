"""Rollout tokens/s of our engine against stock vLLM, in one run, on random weights in the Qwen2.5 shapes.

    python rollout_speed.py --out FILE ours:7b stock-lora:7b ...        one process a case
    python rollout_speed.py --out FILE --case ours:7b --batches 8,32

Cases (each `NAME:SIZE`):
    ours          NVFP4 base shared with a trainer's model, rank-32 adapter inside the quantized layer
    ours-dense    the same engine with a bf16 base
    ours-slots    our NVFP4 base, the adapter in vLLM's own LoRA slots
    stock-lora    stock vLLM, bf16, rank-32 adapter in vLLM's LoRA slots
    stock-merged  stock vLLM, bf16, no adapter: what TRL runs after it merged and streamed every weight
    profile       `ours` under torch.profiler: the kernels of one decode step
Settings as in the baselines: 256-token prompts, 256 new tokens, temperature 1, processed log-probabilities, CUDA graphs of the
decode step, no torch.compile.
"""

import argparse
import json
import os
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
from rollout_models import VOCAB, folder, generation, model_config, policy, seconds

CASES = ("ours", "ours-dense", "ours-slots", "stock-lora", "stock-merged", "profile")
RANK, PROMPT, NEW = 32, 256, 256
CAPTURE = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def engine_settings(batches: list[int]) -> dict:
    return {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [c for c in CAPTURE if c <= max(batches)],
        },
    }


def stock_settings(batches: list[int]) -> dict:
    return {
        "dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": max(batches), "gpu_memory_utilization": 0.85, "seed": 0,
        "logprobs_mode": "processed_logprobs", "max_num_batched_tokens": 4096, **engine_settings(batches),
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
    from qerl_trl.rollout import engine_model

    for name, parameter in engine_model(llm).named_parameters():
        parameter.data.fill_(1.0) if parameter.ndim == 1 and "norm" in name else parameter.data.normal_(0, 0.02)


def build(name: str, size: str, batches: list[int]):
    """(llm, LoRA request or None)"""
    if name in ("ours", "ours-dense", "profile"):
        model = policy(size, RANK, dense=name == "ours-dense")
        g = generation(model, max_sequences=max(batches), max_length=2048, **engine_settings(batches))
        build.keep = g
        return g.llm, None
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    lora = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}
    if name == "ours-slots":
        from rollout_models import packed_model

        from qerl_trl import vllm_loader

        model = packed_model(size)
        vllm_loader.publish(model)
        settings = stock_settings(batches) | {"gpu_memory_utilization": 0.6}
        llm = LLM(folder(size), load_format="qerl_trainer", quantization="qerl_nvfp4", **settings, **lora)
        vllm_loader.publish(None)
    else:
        llm = LLM(
            folder(size), load_format="dummy", **stock_settings(batches), **(lora if name == "stock-lora" else {})
        )
        randomize_stock(llm)
    return llm, None if name == "stock-merged" else LoRARequest("a", 1, write_lora(size))


def measure(llm, request, batch: int, repeats: int) -> list[float]:
    """Tokens per second of `repeats` rollouts of `batch` sequences."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(batch)

    def run(new_tokens: int) -> int:
        ids = torch.randint(1000, VOCAB - 1000, (batch, PROMPT), generator=generator).tolist()
        parameters = SamplingParams(
            temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False
        )
        outputs = llm.generate([{"prompt_token_ids": i} for i in ids], parameters, use_tqdm=False, lora_request=request)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    run(8)
    return [round(batch * NEW / seconds(lambda: run(NEW)), 1) for _ in range(repeats)]


def profile(llm, batch: int) -> list[str]:
    """Kernels of a decode step, by time: microseconds a step, launches a step."""
    from vllm import SamplingParams

    steps = 16
    ids = torch.randint(1000, VOCAB - 1000, (batch, 32)).tolist()
    inputs = [{"prompt_token_ids": i} for i in ids]

    def run(new_tokens: int) -> None:
        parameters = SamplingParams(
            temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False
        )
        llm.generate(inputs, parameters, use_tqdm=False)

    run(8)
    spans = []
    for new_tokens in (8, 8 + steps):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            wall = seconds(lambda n=new_tokens: run(n))
        spans.append(({e.key: (e.device_time_total, e.count) for e in trace.key_averages()}, wall))
    (before, wall_before), (after, wall_after) = spans
    rows = []
    for key, (time_us, count) in after.items():
        old_us, old_count = before.get(key, (0.0, 0))
        rows.append(((time_us - old_us) / steps, (count - old_count) / steps, key))
    rows.sort(reverse=True)
    lines = [f"wall {1e6 * (wall_after - wall_before) / steps:.0f} us a step, kernels {sum(r[0] for r in rows):.0f} us"]
    return lines + [f"{us:9.1f} us {count:7.1f}x {key[:110]}" for us, count, key in rows[:18]]


def run_case(case: str, batches: list[int], repeats: int) -> dict:
    import vllm

    name, size = case.split(":")
    started = time.time()
    llm, request = build(name, size, batches)
    result = {
        "case": case,
        "load_s": round(time.time() - started, 1),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
    }
    result["gpu"] = torch.cuda.get_device_name()
    if name == "profile":
        result["profile"] = {batch: profile(llm, batch) for batch in batches}
    else:
        result["tokens_per_s"] = {batch: measure(llm, request, batch, repeats) for batch in batches}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--case")
    parser.add_argument("--batches", default="8,32,64,128,256")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--timeout", type=float, default=240)
    args = parser.parse_args()
    if args.case:
        result = run_case(args.case, [int(b) for b in args.batches.split(",")], args.repeats)
        with open(args.out, "a") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result, indent=1) if "profile" in result else json.dumps(result), flush=True)
        os._exit(0)
    for item in args.cases:  # NAME:SIZE or NAME:SIZE:BATCHES
        name, size, batches, *_ = [*item.split(":"), args.batches][:3]
        command = [sys.executable, __file__, "--case", f"{name}:{size}", "--batches", batches, "--out", str(args.out)]
        try:
            code = subprocess.run([*command, "--repeats", str(args.repeats)], timeout=args.timeout).returncode
        except subprocess.TimeoutExpired:
            code = "timeout"
        if code:
            print(f"CASE {item} FAILED: {code}", flush=True)


if __name__ == "__main__":
    main()
