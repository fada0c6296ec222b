"""Microseconds of what stands between a decoder layer's products: RMSNorm, SwiGLU and rotary embedding, forward and backward.

    python benchmarks/neighbours.py --out neighbours_h200.json                     # 7B, 8 x 768 tokens; under a minute
    python benchmarks/neighbours.py --size dry --tokens 128 --device cpu --out FILE  # dry run, without liger-kernel

    eager      as transformers writes them
    compiled   the same code through torch.compile, as decoder layers are compiled (update/compiled_layers.py), each operator alone. Within a layer the
               compiler joins them with what stands beside them, too
    liger      liger-kernel's functions for them

In bf16, norms with a frozen weight, as under LoRA. `add_norm` is the residual's addition and the norm after it. SwiGLU reads gate and up
side by side, as one product leaves them. Outputs and gradients are compared with float32 first: no time is given for what is further off
than rounding. `gb_s` counts every input, output and gradient once. `ms_per_pass`: of all layers of the model.
"""

import argparse
import importlib.metadata
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from models import CONFIGS
from torch.nn import functional as F

Function = Callable[..., tuple[torch.Tensor, ...]]
EPS, BASE = 1e-6, 1e6
#: relative distance, in the 2-norm, from float32
ROUNDING = 8e-3
#: how often each is in a layer: both norms follow a residual's addition, but for the first of all
PER_LAYER = {"add_norm": 2, "swiglu": 1, "rotary": 1}
WARM, ROUNDS = 3, 20


def norm(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (weight * wide.to(x.dtype),)


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = x + residual
    return *norm(total, weight), total


def swiglu(both: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gate, up = both.chunk(2, -1)
    return (F.silu(gate) * up,)


def rotary(
    q: torch.Tensor, k: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    def half_turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)

    cosine, sine = cosine.unsqueeze(1), sine.unsqueeze(1)
    return q * cosine + half_turned(q) * sine, k * cosine + half_turned(k) * sine


EAGER: dict[str, Function] = {"norm": norm, "add_norm": add_norm, "swiglu": swiglu, "rotary": rotary}


def compiled() -> dict[str, Function]:
    import torch._inductor.config as inductor

    options: dict[str, Any] | None = {"deterministic": True} if hasattr(inductor, "deterministic") else None
    return {name: torch.compile(f, fullgraph=True, dynamic=True, options=options) for name, f in EAGER.items()}


def liger() -> dict[str, Function]:
    """
    Raises:
        `ImportError`: liger-kernel or Triton is not there.
    """
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    return {
        "norm": lambda x, weight: (LigerRMSNormFunction.apply(x, weight, EPS),),
        "add_norm": lambda x, residual, weight: LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS),
        # in two dimensions: its gradient has no more, whatever it was given
        "swiglu": lambda both: (
            LigerFusedGateUpSiLUMulFunction.apply(both.flatten(0, -2)).unflatten(0, both.shape[:-1]),
        ),
        "rotary": lambda q, k, cosine, sine: LigerRopeFunction.apply(q, k, cosine, sine),
    }


def inputs(name: str, shape: dict[str, Any], tokens: int, device: str) -> tuple[list[torch.Tensor], int]:
    """(arguments of an operator in bf16, how many of them have gradients), one row of `tokens` tokens."""
    hidden, heads, kv = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    size = hidden // heads

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=torch.bfloat16)

    weight = 1 + 0.1 * drawn(hidden)
    if name == "norm":
        return [drawn(1, tokens, hidden), weight], 1
    if name == "add_norm":
        return [drawn(1, tokens, hidden), drawn(1, tokens, hidden), weight], 2
    if name == "swiglu":
        return [drawn(1, tokens, 2 * shape["intermediate_size"])], 1
    place = torch.arange(tokens, device=device).float()
    angle = torch.outer(place, BASE ** (-torch.arange(0, size, 2, device=device).float() / size)).repeat(1, 2)[None]
    # as the projections leave them: heads beside each other
    q, k = (drawn(1, tokens, count * size).view(1, tokens, count, size).transpose(1, 2) for count in (heads, kv))
    return [q, k, angle.cos().bfloat16(), angle.sin().bfloat16()], 2


def step(function: Function, given: list[torch.Tensor], count: int, ones: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs and the gradients of the first `count` arguments."""
    taken = [x.detach().requires_grad_() for x in given[:count]]
    outputs = function(*taken, *given[count:])
    return [*outputs, *torch.autograd.grad(outputs, taken, ones)]


def kernel_microseconds(call: Callable[[], Any], device: str) -> float:
    """What the device computes in one call, by torch's profiler; on a CPU the wall time."""
    for _ in range(WARM):
        call()
    if device == "cpu":
        began = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - began)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(ROUNDS):
            call()
        torch.cuda.synchronize()
    return sum(event.device_time_total for event in trace.key_averages()) / ROUNDS


def measure(name: str, shape: dict[str, Any], tokens: int, device: str, ways: dict[str, dict[str, Function]]) -> dict:
    given, count = inputs(name, shape, tokens, device)
    wide = [x.float() for x in given]
    ones = [torch.randn_like(x) for x in EAGER[name](*given)]
    exact = step(EAGER[name], wide, count, [x.float() for x in ones])
    moved = sum(x.nbytes for x in given[:count]) * 2 + sum(x.nbytes for x in ones) * 2
    row: dict[str, Any] = {"bytes": moved}
    for way, functions in ways.items():
        # liger-kernel writes into what it is given
        made = step(functions[name], [x.clone() for x in given], count, [x.clone() for x in ones])
        pairs = [(m.detach().float(), e.detach()) for m, e in zip(made, exact, strict=True)]
        far = max(float((m - e).norm() / e.norm()) for m, e in pairs)
        row[way] = {"distance": round(far, 5)}
        if far > ROUNDING:
            row[way]["failed"] = f"not equal up to rounding, {ROUNDING}"
            continue
        mine, gradients = [x.clone() for x in given], [x.clone() for x in ones]
        took = kernel_microseconds(lambda f=functions[name], x=mine, g=gradients: step(f, x, count, g), device)
        row[way] |= {"us": round(took, 1), "gb_s": round(moved / took / 1e3)}
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="7b", choices=CONFIGS)
    parser.add_argument("--tokens", type=int, default=8 * 768)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="Of the code that runs, where there is no git.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    torch.manual_seed(0)
    shape, ways = CONFIGS[options.size], {"eager": EAGER, "compiled": compiled()}
    record: dict[str, Any] = {
        "what": "microseconds of kernels, forward and backward of one operator, bf16",
        **common.head(options.device, options.commit),
        "size": options.size,
        "tokens": options.tokens,
    }
    try:
        ways["liger"] = liger()
        record["versions"]["liger-kernel"] = importlib.metadata.version("liger-kernel")
    except (ImportError, RuntimeError) as error:  # it asks Triton for a driver when it is imported
        record["liger"] = f"cannot be imported: {type(error).__name__}: {error}"
        print(record["liger"])
    rows = {name: measure(name, shape, options.tokens, options.device, ways) for name in EAGER}
    record["operators"] = rows
    layers = shape["num_hidden_layers"]
    record["ms_per_pass"] = {
        way: round(sum(layers * times * rows[name][way]["us"] for name, times in PER_LAYER.items()) / 1e3, 2)
        for way in ways
        if all("us" in rows[name][way] for name in PER_LAYER)
    }
    for name, row in rows.items():
        print(f"{name:<9}" + "  ".join(f"{way} {row[way].get('us')} us {row[way].get('gb_s')} GB/s" for way in ways))
    print(record["ms_per_pass"])
    common.save(record, options.out)
    return int(any("failed" in row[way] for row in rows.values() for way in ways))


if __name__ == "__main__":
    sys.exit(main())
