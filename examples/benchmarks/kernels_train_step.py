"""Time a training step of a Qwen2.5-shaped model with random weights: bf16 LoRA, NVFP4 LoRA (ours), optionally bitsandbytes NF4.

    python kernels_train_step.py --size 7b --batch 8 --tokens 1024 --kinds bf16,nvfp4 --out train_step.json

Forward, backward and AdamW on a rank-32 adapter on every linear layer, gradient checkpointing, logits one sequence at a time.
Reports the median step, the weights' memory and the peak. Random weights: speed and memory, not quality.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

SIZES = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
}


def random_(parameter: torch.Tensor) -> None:
    parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)


def to_nvfp4(linear: nn.Linear) -> nn.Module:
    from qerl_trl.nvfp4.linear import NVFP4Linear

    return NVFP4Linear.from_linear(linear)


def to_nf4(linear: nn.Linear) -> nn.Module:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=torch.bfloat16, quant_type="nf4"
    )
    layer.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=layer).cuda()
    if linear.bias is not None:
        layer.bias = linear.bias
    return layer


@torch.no_grad()
def build(size: str, kind: str) -> nn.Module:
    """One decoder layer at a time on the GPU, so that the dense model never exists at once."""
    config = Qwen2Config(**SIZES[size], vocab_size=152064, max_position_embeddings=32768, tie_word_embeddings=False)
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    convert = {"bf16": None, "nvfp4": to_nvfp4, "nf4": to_nf4}[kind]
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                child.to_empty(device="cuda")
                for parameter in child.parameters():
                    random_(parameter)
                if convert is not None and name != "lm_head":
                    setattr(module, name, convert(child))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type == "meta":
                value = torch.empty(parameter.shape, device="cuda", dtype=torch.bfloat16)
                random_(value)
                setattr(module, name, nn.Parameter(value))
    model.model.rotary_emb.__init__(config)
    model.model.rotary_emb.to("cuda")
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model


@torch.no_grad()
def check(layer: nn.Module) -> None:
    """The packed layer's forward and backward against the dequantized weight: no time is reported for a wrong kernel."""
    from qerl_trl.nvfp4.linear import linear

    x = torch.randn(512, layer.in_features, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(512, layer.out_features, device="cuda", dtype=torch.bfloat16)
    dense = layer.dequantize(torch.float32)
    with torch.enable_grad():
        y = linear(x.requires_grad_(), *layer.nvfp4, implementation="kernel")
    (dx,) = torch.autograd.grad(y, x, dy)
    for ours, exact in ((y, x.float() @ dense.T), (dx, dy.float() @ dense)):
        error = ((ours.float() - exact).norm() / exact.norm()).item()
        if not error < 4e-3:
            raise RuntimeError(f"relative error {error:.1e} in {layer}; no time is reported")


def trainer(size: str, kind: str, batch: int, tokens: int) -> tuple[nn.Module, Callable[[], None]]:
    """The model with its adapter, and a function that does one training step."""
    model = build(size, kind)
    lora = LoraConfig(r=32, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    if kind == "nvfp4":
        from qerl_trl.model.lora import register_nvfp4_lora

        check(model.model.layers[0].mlp.down_proj)
        lora = register_nvfp4_lora(lora)
    model = get_peft_model(model, lora)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    inner = model.base_model.model

    def step() -> None:
        ids = torch.randint(0, 100000, (batch, tokens), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            hidden = inner.model(ids).last_hidden_state
            leaf = hidden.detach().requires_grad_()
            for i in range(batch):
                logits = inner.lm_head(leaf[i, :-1]).float()
                (-torch.log_softmax(logits, -1).gather(-1, ids[i, 1:, None]).mean()).backward()
        hidden.backward(leaf.grad)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def measure(size: str, kind: str, batch: int, tokens: int, steps: int, profile: bool) -> dict:
    torch.manual_seed(0)
    model, step = trainer(size, kind, batch, tokens)
    weights = torch.cuda.memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    times = []
    for i in range(steps + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(time.perf_counter() - begin)
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters() if p.requires_grad)
    if not finite:
        raise RuntimeError(f"{kind}: the adapter is not finite after {steps} steps; no time is reported")
    if profile:
        with torch.profiler.profile() as profiler:
            step()
            torch.cuda.synchronize()
        print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=90))
    return {
        "kind": kind,
        "step_s": round(statistics.median(times), 4),
        "weights_GiB": round(weights, 2),
        "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="7b", choices=SIZES)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--kinds", default="bf16,nvfp4")
    parser.add_argument("--profile", action="store_true", help="print where one more step spends its time on the GPU")
    parser.add_argument("--out", default="train_step.json")
    args = parser.parse_args()
    result = {
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "triton", "transformers", "peft")},
        "command": " ".join(["kernels_train_step.py", *(Path(a).name if "/" in a else a for a in sys.argv[1:])]),
        "size": args.size,
        "batch": args.batch,
        "tokens": args.tokens,
    }
    result["commit"] = os.environ.get("BENCH_COMMIT", "unknown")
    result["runs"] = []
    if "nf4" in args.kinds:
        result["versions"]["bitsandbytes"] = version("bitsandbytes")
    for kind in args.kinds.split(","):
        result["runs"].append(measure(args.size, kind, args.batch, args.tokens, args.steps, args.profile))
        print(result["runs"][-1], flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        temporary = Path(args.out + ".tmp")
        temporary.write_text(json.dumps(result, indent=1))
        os.replace(temporary, args.out)


if __name__ == "__main__":
    main()
