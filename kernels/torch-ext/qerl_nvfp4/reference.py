"""Plain PyTorch versions of every kernel: the ground truth of the tests and the (slow) path without Triton.

Shapes: M tokens, N output features, K input features.  A weight is
    W[n, k] = e2m1(code[n, k]) * e4m3(block_scale[n, k // 16]) / global_scale[n or 0]
with two codes a byte (low nibble first) in `packed` (N, K/2) uint8, `block_scale` (N, K/16) as float8_e4m3fn or its bytes, and
`global_scale` float32 (1,) or (N,).  The same format as qerl_trl/nvfp4/format.py, which teaches it; repeated here because a Hub kernel
may import nothing but torch and triton.
"""

import functools

import torch

BLOCK_SIZE = 16
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
MIN_BLOCK_SCALE = 2.0**-6  # smaller e4m3 values are subnormal, and Marlin flushes them to zero
SCALE_RULES = ("rtn", "four_over_six", "neighbor_sweep")
COMPUTE = ("w4a16", "w4a8")
MIN_AMAX = 2.0**-100  # of a row in FP8, so that 448 / amax is finite
NEIGHBORS = 8  # neighbor_sweep looks at this many e4m3 codes to each side of amax / 6


def as_e4m3(block_scale: torch.Tensor) -> torch.Tensor:
    """View scale bytes as float8_e4m3fn."""
    return block_scale if block_scale.dtype == torch.float8_e4m3fn else block_scale.view(torch.float8_e4m3fn)


def decode_e2m1(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 codes (sign << 3 | index) -> values."""
    table = _kept_table if codes.is_cuda else _e2m1_table  # a CUDA graph must not copy from the host
    return table(codes.device, dtype)[codes.int()]


def _e2m1_table(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=device, dtype=dtype)


_kept_table = functools.cache(_e2m1_table)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Values -> uint8 codes, round to nearest even on the e2m1 grid, saturating at 6."""
    a = values.abs()
    index = (a > 0.25).to(torch.uint8)
    for midpoint, inclusive in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        index += (a >= midpoint) if inclusive else (a > midpoint)
    return index | (torch.signbit(values).to(torch.uint8) << 3)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """(N, K/2) bytes -> (N, K) codes."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def dequantize(
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """(fp32(e4m3) / global_scale) * e2m1, rounded once to `dtype` -> (N, K)."""
    n, half_k = packed.shape
    scale = as_e4m3(block_scale).float() / global_scale.float().reshape(-1, 1)
    values = decode_e2m1(unpack(packed)).view(n, -1, BLOCK_SIZE) * scale.unsqueeze(-1)
    values = values.view(n, half_k * 2).to(dtype)
    return values if out is None else out.copy_(values)


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, K) floating -> x8 (M, K) float8_e4m3fn, scale (M,) float32: the largest |x| of a row / 448, and x / scale."""
    amax = x.float().abs().amax(-1, keepdim=True).clamp(min=MIN_AMAX)
    top = torch.full_like(amax, E4M3_MAX)  # a tensor: PyTorch divides numbers, and by numbers, through a reciprocal
    return (x.float() * (top / amax)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), (amax / top).squeeze(-1)


def in_decode_order(x8: torch.Tensor) -> torch.Tensor:
    """(M, K) float8_e4m3fn -> (M, ceil(K / 128) * 128), padded with zeros, in the order in which Hopper's kernel decodes weights: column
    32 t + 8 w + 4 h + i of each 128 (t, w, i < 4; h < 2) becomes 32 w + 16 h + 4 t + i."""
    padded = torch.nn.functional.pad(x8.view(torch.uint8), (0, -x8.shape[1] % 128))
    ordered = padded.view(len(x8), -1, 4, 4, 2, 4).permute(0, 1, 3, 4, 2, 5).reshape(padded.shape)
    return ordered.view(torch.float8_e4m3fn)


def wide_columns(K: int) -> int:
    """Columns of a wide tensor: y (..., K) of 16 bits; in memory all of y, then its x8 in decode order, then its scales."""
    return K + (K + 127) // 128 * 64 + 2


def wide_parts(wide: torch.Tensor, K: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of a whole wide tensor, not of a slice: y (..., K), x8 (M, ceil(K / 128) * 128) bytes, scale (M,)."""
    M = wide.numel() // wide_columns(K)
    y, x8, scale = wide.view(-1).split([M * K, M * (wide_columns(K) - K - 2), M * 2])
    return y.view(*wide.shape[:-1], K), x8.view(torch.uint8).view(M, -1), scale.view(torch.float32)


def widened(y: torch.Tensor) -> torch.Tensor:
    """The wide tensor of y (..., K)."""
    x8, scale = quantize_fp8(y.reshape(-1, y.shape[-1]))
    parts = (part.contiguous().view(y.dtype).flatten() for part in (y, in_decode_order(x8), scale))
    return torch.cat(list(parts)).view(*y.shape[:-1], wide_columns(y.shape[-1]))


def dequantize_fp8(packed: torch.Tensor, block_scale: torch.Tensor, transpose: bool = False) -> torch.Tensor:
    """w8 = e4m3(code * block_scale / 8), at most 336 -> (N, K) float8_e4m3fn, or (K, N) contiguous."""
    scale = as_e4m3(block_scale).float().unsqueeze(-1) / 8
    values = decode_e2m1(unpack(packed)).view(*block_scale.shape, BLOCK_SIZE) * scale
    w8 = values.flatten(1).to(torch.float8_e4m3fn)
    return w8.t().contiguous() if transpose else w8


def fp8_factor(global_scale: torch.Tensor) -> torch.Tensor:
    """8 / global_scale: W is about w8 * fp8_factor."""
    return torch.full_like(global_scale, 8.0) / global_scale


def split_rows(lora_b: torch.Tensor, lora_splits: tuple[int, ...] | None) -> tuple[int, ...]:
    """Row counts of the shards that share one input; None means a single shard."""
    return (lora_b.shape[0],) if lora_splits is None else tuple(lora_splits)


def lora(
    x: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, lora_splits: tuple[int, ...] | None, dtype=None
) -> torch.Tensor:
    """(M, K), (S*r, K), (N, r) -> (M, N) in `dtype`, or x's: shard i of the output uses rows i*r : (i+1)*r of A."""
    splits, rank = split_rows(lora_b, lora_splits), lora_b.shape[1]
    down, up = (x @ lora_a.to(x.dtype).t()).to(dtype or x.dtype), lora_b.to(x.dtype).to(dtype or x.dtype)
    parts = [down[:, i * rank : (i + 1) * rank] @ b.t() for i, b in enumerate(up.split(splits))]
    return torch.cat(parts, dim=-1)


def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    lora_a: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
    lora_splits: tuple[int, ...] | None = None,
    compute: str = "w4a16",
) -> torch.Tensor:
    """x (..., K) -> (..., N) = x W^T [+ bias] [+ (x A^T) B^T]. "w4a8": x8 w8^T instead of x W^T, and everything rounded once."""
    if compute == "w4a8":
        x_MK, sums = x.reshape(-1, x.shape[-1]), torch.promote_types(x.dtype, torch.float32)
        x8, scale = quantize_fp8(x_MK)
        y = x8.to(sums) @ dequantize_fp8(packed, block_scale).to(sums).t()
        y = y * fp8_factor(global_scale) * scale.unsqueeze(-1) + (0 if bias is None else bias)
        y = y if lora_a is None else y + lora(x_MK, lora_a, lora_b, lora_splits, sums)
        return y.to(x.dtype).view(*x.shape[:-1], len(packed))
    y = torch.nn.functional.linear(x, dequantize(packed, block_scale, global_scale, x.dtype), bias)
    if lora_a is not None:
        x_MK = x.reshape(-1, x.shape[-1])
        y = y + lora(x_MK, lora_a, lora_b, lora_splits).view_as(y)
    return y


def linear_backward(
    dy: torch.Tensor,
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    compute: str = "w4a16",
) -> torch.Tensor:
    """dy (..., N) -> dx (..., K) = dy W. "w4a8" quantizes each row of dy, times 8 / global_scale where that has a number per row of W."""
    if compute == "w4a8":
        factor, sums = fp8_factor(global_scale), torch.promote_types(dy.dtype, torch.float32)
        before, after = (factor, 1) if factor.numel() > 1 else (1, factor)
        dy8, scale = quantize_fp8(dy.reshape(-1, len(packed)).float() * before)
        dx = dy8.to(sums) @ dequantize_fp8(packed, block_scale).to(sums) * scale.unsqueeze(-1) * after
        return dx.to(dy.dtype).view(*dy.shape[:-1], packed.shape[1] * 2)
    return dy @ dequantize(packed, block_scale, global_scale, dy.dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm with fp32 arithmetic and an fp32 weight; with `residual`, of x + residual, which is returned as well."""
    if residual is not None:
        residual = (x.float() + residual.float()).to(x.dtype)
        x = residual
    h = x.float()
    y = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
    return y if residual is None else (y, residual)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[gate | up] (..., 2 K) -> silu(gate) * up; both steps round."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _squared_error(blocks: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Sum over a block of (rounded - exact)^2 in units of 1 / global_scale, added 16 -> 8 -> 4 -> 2 -> 1: the same bits everywhere."""
    error = (decode_e2m1(encode_e2m1(blocks / scale)) * scale - blocks) * global_scale
    error = error * error
    while error.shape[-1] > 1:
        half = error.shape[-1] // 2
        error = error[..., :half] + error[..., half:]
    return error


def quantize(weight: torch.Tensor, scale_rule: str, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, K) floating -> packed (N, K/2) uint8, block_scale (N, K/16) uint8, for a given divisor `global_scale` (1,)."""
    if scale_rule not in SCALE_RULES:
        raise ValueError(f"scale_rule={scale_rule!r} is not one of {SCALE_RULES}")
    n, k = weight.shape
    gs = global_scale.float().reshape(-1, 1, 1)
    blocks = weight.float().view(n, k // BLOCK_SIZE, BLOCK_SIZE)
    amax = blocks.abs().amax(-1, keepdim=True)

    def encode_scale(value: torch.Tensor) -> torch.Tensor:
        return value.clamp(MIN_BLOCK_SCALE, E4M3_MAX).to(torch.float8_e4m3fn)

    # by a tensor: CUDA multiplies by the reciprocal of a number, which rounds differently
    base = encode_scale(amax / torch.full_like(gs, E2M1_MAX) * gs)
    if scale_rule == "rtn":
        candidates = [base]
    elif scale_rule == "four_over_six":
        candidates = [base, encode_scale(amax / 4.0 * gs)]
    else:
        code = base.view(torch.uint8).int()
        steps = sorted(range(-NEIGHBORS, NEIGHBORS + 1), key=abs)  # rtn first: the first candidate wins a tie
        candidates = [(code + i).clamp(8, 126).to(torch.uint8).view(torch.float8_e4m3fn) for i in steps]
    best, best_error = candidates[0].view(torch.uint8), None
    if len(candidates) > 1:
        for candidate in candidates:
            error = _squared_error(blocks, candidate.float() / gs, gs)
            if best_error is None:
                best_error = error
                continue
            better = error < best_error
            best = torch.where(better, candidate.view(torch.uint8), best)
            best_error = torch.where(better, error, best_error)
    codes = encode_e2m1(blocks / (best.view(torch.float8_e4m3fn).float() / gs)).view(n, k)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), best.squeeze(-1).contiguous()
