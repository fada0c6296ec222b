"""Microseconds of a decoder layer's LoRA linears in a training step: PEFT's own and in groups, eager and compiled, NVFP4 and bf16 bases.

    python examples/benchmarks/lora_linear.py OUT.json [--size 7b] [--tokens 6144] [--rank 32] [--device cuda] [--bases nvfp4 bf16]

Four parts of one layer: q|k|v, o, gate|up with SwiGLU behind it, down. Under bf16 autocast, adapters in float32. "product" is what the
frozen matrix alone would take: forward y = x W^T and backward dx = dy W on a dense bf16 weight, nothing else. Values are compared first:
no time is given for what is not equal to PEFT's up to rounding.
"""

import argparse
import json
import time
from pathlib import Path

import rollout_models
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

from qerl_trl.model.lora import register_nvfp4_lora
from qerl_trl.nvfp4.format import quantize
from qerl_trl.nvfp4.linear import NVFP4Linear
from qerl_trl.update.lora_linear import fuse, unfuse


class Part(nn.Module):
    """Linears that read one input, and what a layer does with their outputs before anything else is a product."""

    def __init__(self, names: tuple[str, ...], K: int, widths: list[int], packed: bool, device: str) -> None:
        super().__init__()
        self.names = names
        weight = torch.randn(sum(widths), K, device=device, dtype=torch.bfloat16) / K**0.5
        # one storage and one scale, as the package packs what is fused
        parts = quantize(weight) if packed else None
        row = 0
        for name, rows in zip(names, widths, strict=True):
            cut = slice(row, row + rows)
            if parts is None:
                layer = nn.Linear(K, rows, bias=False, device="meta")
                layer.weight = nn.Parameter(weight[cut], requires_grad=False)
            else:
                layer = NVFP4Linear.from_nvfp4((parts.packed[cut], parts.block_scale[cut], parts.global_scale))
                layer.fused_rows = sum(widths) if len(names) > 1 else None
            setattr(self, name, layer)
            row += rows

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ys = tuple(getattr(self, name)(x) for name in self.names)
        return (F.silu(ys[0]) * ys[1],) if self.names[0] == "gate_proj" else ys


def parts_of(size: str) -> dict[str, tuple[tuple[str, ...], int, list[int]]]:
    """{part: (names, inputs, outputs)}"""
    shapes = {name.split(".")[1]: shape for name, shape in rollout_models.linear_shapes(size).items()}
    parts = {
        "qkv": ("q_proj", "k_proj", "v_proj"),
        "o": ("o_proj",),
        "gate_up": ("gate_proj", "up_proj"),
        "down": ("down_proj",),
    }
    return {part: (names, shapes[names[0]][1], [shapes[name][0] for name in names]) for part, names in parts.items()}


def microseconds(function, device: str, repeats: int) -> float:
    function()
    if device != "cuda":
        started = time.perf_counter()
        function()
        return 1e6 * (time.perf_counter() - started)
    function()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / repeats


class Measured:
    """One part with an adapter: its outputs and gradients, and how long forward and backward take."""

    def __init__(self, spec, packed: bool, tokens: int, rank: int, device: str) -> None:
        names, K, widths = spec
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(names))
        self.model = get_peft_model(Part(names, K, widths, packed, device), register_nvfp4_lora(config)).train()
        rollout_models.randomize(self.model)
        self.part, self.device = self.model.get_base_model(), device
        self.x = torch.randn(tokens, K, device=device, dtype=torch.bfloat16, requires_grad=True)
        with torch.no_grad():
            self.dys = [torch.randn_like(y) for y in self.forward()]
        self.inputs = [self.x, *(p for p in self.model.parameters() if p.requires_grad)]

    def forward(self) -> tuple[torch.Tensor, ...]:
        with torch.autocast(self.device, torch.bfloat16):
            return self.part(self.x)

    def both(self) -> list[torch.Tensor]:
        ys = self.forward()
        return [*(y.detach() for y in ys), *torch.autograd.grad(ys, self.inputs, self.dys)]

    def times(self, repeats: int) -> dict[str, float]:
        forward = microseconds(self.forward, self.device, repeats)
        total = microseconds(self.both, self.device, repeats)
        return {"forward_us": round(forward, 1), "backward_us": round(total - forward, 1)}


def apart(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative difference of any output or gradient, in norm."""
    return max(((f.float() - e.float()).norm() / e.float().norm()).item() for f, e in zip(found, expected, strict=True))


def product_alone(spec, tokens: int, device: str, repeats: int) -> dict[str, float]:
    _, K, widths = spec
    weight = torch.randn(sum(widths), K, device=device, dtype=torch.bfloat16)
    x, dy = (torch.randn(tokens, width, device=device, dtype=torch.bfloat16) for width in (K, sum(widths)))
    return {
        "forward_us": round(microseconds(lambda: x @ weight.t(), device, repeats), 1),
        "backward_us": round(microseconds(lambda: dy @ weight, device, repeats), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="7b", choices=rollout_models.SHAPES)
    parser.add_argument("--tokens", type=int, default=8 * 768)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--bases", nargs="+", default=["nvfp4", "bf16"], choices=["nvfp4", "bf16"])
    given = parser.parse_args()
    torch.manual_seed(0)
    result: dict = {"torch": torch.__version__, "size": given.size, "tokens": given.tokens, "rank": given.rank}
    result["device"] = torch.cuda.get_device_name() if given.device == "cuda" else given.device
    for part, spec in parts_of(given.size).items():
        rows = result.setdefault(part, {"product": product_alone(spec, given.tokens, given.device, given.repeats)})
        for base in given.bases:
            measured = Measured(spec, base == "nvfp4", given.tokens, given.rank, given.device)
            expected = measured.both()
            for name in ("peft", "fused", "peft_compiled", "fused_compiled"):
                unfuse(measured.model)
                if name.startswith("fused"):
                    fuse(measured.model)
                if name.endswith("compiled"):
                    torch._dynamo.reset()
                    measured.part.compile(dynamic=False)
                difference = apart(measured.both(), expected)
                # outputs and gradients of PEFT and ours are each rounded a few times to 8 bits
                assert difference < 2e-2, f"{base} {part} {name} is {difference:.3g} from PEFT"
                rows[f"{base}_{name}"] = {**measured.times(given.repeats), "apart": round(difference, 5)}
            del measured, expected
        print(part, *(f"\n    {name:22s}{times}" for name, times in rows.items()), flush=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    for name in next(iter(result[part] for part in parts_of(given.size))):
        total = {
            key: round(sum(result[p][name][key] for p in parts_of(given.size)), 1)
            for key in ("forward_us", "backward_us")
        }
        result.setdefault("layer", {})[name] = total
        print("layer", name, total)
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
