"""The matrices of known models, and the times of configurations of one matrix that are right: what refine.py and the benchmarks share."""

import math
import time

import torch
from triton.errors import TritonError

from . import ops, reference
from .launch import forget_scratch
from .timing import copies_needed, random_weight, relative_error, time_us, times_us

TOLERANCE = 6e-3  # relative error above which a product is wrong
FINALISTS = 5  # the fastest candidates are timed again, in turns
FAILURES = (TritonError, RuntimeError, ValueError, AssertionError, TypeError)

MODELS = {  # (hidden, rows of q, of k and of v, intermediate); Qwen2.5 where no name is given
    "0.5B": (896, 896, 128, 4864),
    "1.5B": (1536, 1536, 256, 8960),
    "3B": (2048, 2048, 256, 11008),
    "7B": (3584, 3584, 512, 18944),
    "14B": (5120, 5120, 1024, 13824),
    "32B": (5120, 5120, 1024, 27648),
    "Llama-3-8B": (4096, 4096, 1024, 14336),
}


def layer_shapes(size: str) -> dict[str, tuple[int, int]]:
    """name -> (N, K) of the four matrices of a decoder layer, q/k/v and gate/up fused."""
    hidden, q, kv, inner = MODELS[size]
    return {"qkv": (q + 2 * kv, hidden), "o": (hidden, q), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}


def layer_splits(size: str) -> dict[tuple[int, int], tuple[int, ...]]:
    """(N, K) -> rows of the shards of a fused matrix, each with an adapter of its own."""
    _, q, kv, inner = MODELS[size]
    shapes = layer_shapes(size)
    return {shapes["qkv"]: (q, kv, kv), shapes["gate_up"]: (inner, inner)}


class Matrix:
    """Rotating copies of one (N, K) with adapters (a model never reads the same one twice in a row either), and the times of
    configurations that are right."""

    def __init__(self, N: int, K: int, splits: tuple[int, ...] | None, l2: int, rank: int = 32, device: str = "cuda"):
        self.N, self.K, self.splits = N, K, splits
        self.copies = copies_needed(N * K * 9 // 16, l2)
        self.weights = [random_weight(N, K, i, device) for i in range(self.copies)]
        self.gs = torch.tensor([2048.0], device=device)
        self.rows = torch.randperm(N, device=device)[: min(N, 4096)]
        packed, scale = self.weights[0]
        self.reference = reference.dequantize(packed[self.rows], scale[self.rows], self.gs, torch.float32)
        self.adapters = [
            (
                torch.randn(len(splits or (N,)) * rank, K, device=device, dtype=torch.bfloat16) / math.sqrt(K),
                torch.randn(N, rank, device=device, dtype=torch.bfloat16),
            )
            for _ in range(self.copies)
        ]

    def problem(self, M: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x, and where its product goes."""
        device = self.gs.device
        x = torch.randn(M, self.K, device=device, dtype=torch.bfloat16)
        return x, torch.empty(M, self.N, device=device, dtype=torch.bfloat16)

    def expected(self, x, adapter: bool) -> torch.Tensor:
        """The product with the first copy, at self.rows, float32."""
        y = x.float() @ self.reference.T
        if adapter:
            a, b = self.adapters[0]
            y += reference.lora(x.float(), a.float(), b.float(), self.splits)[:, self.rows]
        return y

    def call(self, config, x, out, adapter: bool):
        """call(i): the product with copy i."""

        def call(i):
            a, b = self.adapters[i] if adapter else (None, None)
            ops.product(config, x, *self.weights[i], self.gs, None, a, b, self.splits if adapter else None, out)

        return call

    def error(self, call, out, expected) -> float:
        out.fill_(float("nan"))
        call(0)
        return relative_error(out[:, self.rows], expected)

    def time(self, configs, M: int, adapter: bool, deadline: float) -> list[tuple[float, dict]]:
        """(microseconds, configuration), the best first; one that is wrong or fails is dropped and named."""
        x, out = self.problem(M)
        expected = self.expected(x, adapter)
        found = []
        for config in configs:
            if time.time() > deadline:
                break
            call = self.call(config, x, out, adapter)
            try:
                error = self.error(call, out, expected)
                if error < TOLERANCE:
                    found.append((time_us(call, self.copies, 5), config, call))
                else:
                    print(f"# WRONG {self.N}x{self.K} M={M} {config}: relative error {error:.1e}", flush=True)
                    forget_scratch()
            except FAILURES as failure:
                forget_scratch()
                print(f"# failed {self.N}x{self.K} M={M} {config}: {type(failure).__name__} {str(failure)[-150:]}")
        found.sort(key=lambda t: t[0])
        again = times_us([call for _, _, call in found[:FINALISTS]], self.copies, 9)
        final = sorted(zip(again, (config for _, config, _ in found), strict=False), key=lambda t: t[0])
        return final + [(us, config) for us, config, _ in found[FINALISTS:]]


def short(config: dict) -> str:
    named = (
        "natural" if k == "natural" else str(v) for k, v in config.items() if k != "kernel" and (k != "natural" or v)
    )
    return config["kernel"][0] + "_".join(named)
