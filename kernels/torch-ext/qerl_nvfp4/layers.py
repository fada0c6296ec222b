"""Layers for the Kernel Hub: they replace only `forward` of a module that has the right attributes."""

import torch
import torch.nn as nn

from .ops import ops


class NVFP4Linear(nn.Module):
    """Forward of a module with `weight_packed`, `weight_scale`, `weight_global_scale` (bytes) and `bias`."""

    has_backward = False
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gs = self.weight_global_scale.view(torch.float32)
        return ops.linear(x, self.weight_packed, self.weight_scale, gs, self.bias)
