"""The FP8 layers of a mixed ModelOpt checkpoint (`MIXED_PRECISION`): read exactly, and dense from then on.

    X.weight       F8_E4M3 (N, K)
    X.weight_scale F32 ()          multiplies: W = weight * weight_scale
    X.input_scale                  of activations, ignored as in W4A4

There are 256 codes, so W is a table of 256 numbers: each is the exact product, rounded once to the compute dtype. An FP8 layer takes 2 bytes
per weight here instead of 1; it is frozen and adapted like every other dense layer.
"""

import math
from collections.abc import Mapping

import torch
from torch import nn

from .headers import IGNORED_SUFFIXES, TensorInfo, read_number

_PARTS = {"weight": "F8_E4M3", "weight_scale": "F32"}
#: rows that are decoded at a time: their table indices take four bytes each
_ROWS = 1024


@torch.no_grad()
def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(N, K) in `dtype` of codes (N, K) float8_e4m3fn and one float32 scale, which multiplies. On the codes' device."""
    codes = torch.arange(256, dtype=torch.uint8, device=weight.device).view(torch.float8_e4m3fn)
    table = (codes.to(torch.float64) * scale.to(weight.device, torch.float64).reshape(())).to(dtype)
    return torch.cat([table[rows.int()] for rows in weight.view(torch.uint8).split(_ROWS)])


def check_fp8(
    tensors: Mapping[str, TensorInfo], modules: Mapping[str, nn.Linear]
) -> tuple[dict[str, dict[str, TensorInfo]], list[str]]:
    """(for each of `modules` its tensors by their last name component, what is wrong with them).

    Args:
        tensors: from `read_headers`.
        modules: the model's linears that the configuration says are FP8, by name.
    """
    found: dict[str, dict[str, TensorInfo]] = {name: {} for name in modules}
    problems = []
    for full, info in tensors.items():
        name, _, part = full.rpartition(".")
        if name in found:
            found[name][part] = info
            if part not in (*_PARTS, "bias", *IGNORED_SUFFIXES):
                problems.append(
                    f"{info.file}: unexpected tensor {full!r} beside FP8 weights: it may change what they mean."
                )
    for name, module in modules.items():
        for part, dtype in _PARTS.items():
            stored = found[name].get(part)
            wanted = (module.out_features, module.in_features) if part == "weight" else ()
            if stored is None:
                problems.append(
                    f"checkpoint: tensor '{name}.{part}' is missing. Download or export the checkpoint again."
                )
            elif stored.dtype != dtype:
                problems.append(
                    f"{stored.file}: tensor {stored.name!r} is {stored.dtype}; the configuration says that {name} is FP8, which has {dtype} there."
                )
            elif stored.shape != wanted and (wanted or math.prod(stored.shape) != 1):
                problems.append(
                    f"{stored.file}: tensor {stored.name!r} has shape {stored.shape}, {wanted or 'one number'} belongs there: only FP8 with one scale "
                    "per layer is read."
                )
            elif part == "weight_scale" and not (math.isfinite(value := read_number(stored)) and value > 0):
                problems.append(
                    f"{stored.file}: tensor {stored.name!r} is {value:g}; a scale is a positive finite number."
                )
    return found, problems
