"""NVFP4 weight-only kernels: frozen 4-bit weights, 16-bit activations, one LoRA adapter fused in.

    y = linear(x, packed, block_scale, global_scale, bias, lora_a, lora_b, lora_splits)      no autograd
    dx = linear_backward(dy, packed, block_scale, global_scale)

`reference.py` holds the number format and the plain PyTorch version of everything; without Triton or without a GPU it is what runs,
and `describe()` says so.  Only torch and triton are imported.
"""

import torch

from . import ops as _ops
from .ops import align_scale_rows, describe, is_available, selected, selected_text

__all__ = [
    "align_scale_rows",
    "dequantize",
    "dequantize_fp8",
    "describe",
    "is_available",
    "layers",
    "linear",
    "linear_backward",
    "quantize",
    "quantize_fp8",
    "rms_norm",
    "selected",
    "selected_text",
    "swiglu",
]


def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    lora_a: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
    lora_splits: tuple[int, ...] | None = None,
    batch_invariant: bool = False,
    compute: str = "w4a16",
) -> torch.Tensor:
    """y = x W^T [+ bias] [+ (x A^T) B^T], (..., K) -> (..., N); the kernel is picked by the number of tokens.

    Args:
        x: bfloat16 or float16 (other types take the plain PyTorch path).
        packed: uint8 (N, K/2), K a multiple of 16; a row slice of a larger weight is as good.
        block_scale: (N, K/16), float8_e4m3fn or its bytes. Where K is no multiple of 256, Hopper's kernels for more than 16 tokens want
            what `align_scale_rows` makes of it; without, a slower kernel is taken.
        global_scale: float32 (1,) or (N,); it divides.
        lora_a: (S * r, K); lora_b: (N, r), alpha/r folded in; lora_splits: S row counts that sum to N (None: one shard).
            Rows of shard i use rows i*r to (i+1)*r of lora_a.  Up to three shards whose edges are multiples of 64 (of 128 where `portable`
            or the dense path multiplies) and ranks up to 256, multiples of 8 (of 4 up to 16 tokens), are fused; anything else is added by
            two more products. Rank 0 is no adapter.
        batch_invariant: compute a row of y by the same sums in the same order however many rows there are, so that its bits do not depend
            on who stands beside it. Slower; kernels and rank are then fewer, and what cannot be had so is an error.
        compute: "w4a16" multiplies in x's type. "w4a8" multiplies `quantize_fp8` of x by `dequantize_fp8` of the weight, from sm_89 on, and
            elsewhere by the same rule in float32, slowly; the adapter multiplies x itself.

    Deterministic, safe in CUDA graphs and transparent to torch.compile.  No autograd: inputs that require a gradient are refused unless
    gradients are off.  Scratch buffers are one set per stream of a device, and one for all its CUDA graphs, made and grown by the first
    calls: streams may run at the same time, but do not call from two threads on one stream, nor replay graphs on two streams at a time, nor
    capture one graph from two streams, and call eagerly what a graph will do before it is captured. torch.compile(mode="reduce-overhead") is not for
    these: it stops where scratch buffers outlive the graphs that it captures by itself.

    Raises:
        `ValueError`: shapes or devices disagree, scales are of another type, or no kernel is batch-invariant for these. `RuntimeError`: a gradient
        would be lost.
    """
    return _ops.ops.linear(
        x, packed, block_scale, global_scale, bias, lora_a, lora_b, lora_splits, batch_invariant, compute
    )


def linear_backward(
    dy: torch.Tensor,
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    compute: str = "w4a16",
) -> torch.Tensor:
    """dx = dy W, (..., N) -> (..., K), from the packed bytes: nothing else has to be kept for the backward pass. `compute` as in `linear`;
    "w4a8" quantizes dy, times 8 / global_scale where that has a number per row."""
    return _ops.ops.linear_backward(dy, packed, block_scale, global_scale, compute)


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) -> x8 (M, K) float8_e4m3fn, scale (M,) float32 = max|x| of each row / 448; x is about x8 * scale."""
    return _ops.ops.quantize_fp8(x)


def dequantize_fp8(packed: torch.Tensor, block_scale: torch.Tensor, transpose: bool = False) -> torch.Tensor:
    """e4m3(code * block_scale / 8) -> float8_e4m3fn (N, K), or (K, N) contiguous; times 8 / global_scale about the weight."""
    return _ops.ops.dequantize_fp8(packed, block_scale, transpose)


def dequantize(
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """(N, K) = e2m1 * (e4m3 / global_scale), rounded once to `dtype`: bit for bit compressed-tensors' own decompression.

    `out`: where to write it; shape, dtype and device must fit. Raises `ValueError` when shapes disagree.
    """
    if out is None:
        return _ops.ops.dequantize(packed, block_scale, global_scale, dtype)
    return _ops.dequantize_into(packed, block_scale, global_scale, dtype, out)


def quantize(weight: torch.Tensor, scale_rule: str, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, K) float -> packed (N, K/2), block_scale (N, K/16), both uint8, for the divisor `global_scale` (1,) or (N,).

    `scale_rule`: "rtn", "four_over_six" or "neighbor_sweep"; the same bytes as qerl_trl.nvfp4.quantize.
    """
    return _ops.ops.quantize(weight, scale_rule, global_scale)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, wide: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the last dimension with a float32 `weight` (K,); with `residual`, of x + residual, which is returned too.

    `wide`: y is followed by its `quantize_fp8`, in one tensor that only `linear` with "w4a8" takes, and then quantizes nothing itself.
    """
    y, h = _ops.ops.rms_norm(x, weight, eps, residual, wide)
    return y if residual is None else (y, h)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [gate | up] (..., 2 K), as a wide tensor (`rms_norm`)."""
    return _ops.ops.swiglu(gate_up)


from . import layers  # noqa: E402  needs the functions above
