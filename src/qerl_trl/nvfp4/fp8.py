"""The FP8 layers of a mixed ModelOpt checkpoint (`MIXED_PRECISION`): read exactly, and dense from then on.

    X.weight       F8_E4M3 (N, K)
    X.weight_scale F32 ()          multiplies: W = weight * weight_scale
    X.input_scale                  of activations, ignored as in W4A4

There are 256 codes, so W is a table of 256 numbers: each is the exact product, rounded once to the compute dtype. An FP8 layer takes 2 bytes
per weight here instead of 1; it is frozen and adapted like every other dense layer.
"""

import torch

#: rows that are decoded at a time: their table indices take four bytes each
_ROWS = 1024


@torch.no_grad()
def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(N, K) in `dtype` of codes (N, K) float8_e4m3fn and one float32 scale, which multiplies. On the codes' device."""
    codes = torch.arange(256, dtype=torch.uint8, device=weight.device).view(torch.float8_e4m3fn)
    table = (codes.to(torch.float64) * scale.to(weight.device, torch.float64).reshape(())).to(dtype)
    return torch.cat([table[rows.int()] for rows in weight.view(torch.uint8).split(_ROWS)])
