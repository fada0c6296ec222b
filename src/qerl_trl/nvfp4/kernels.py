"""Which kernel computes each matrix of a model: lines for the banner of a run and for `qerl-trl doctor`."""

import torch
from torch import nn

from .fused import fused_groups
from .linear import NVFP4Linear, kernels_for


def matrices_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """{name: (rows, columns)} of the different packed matrices, as the engine multiplies them: q/k/v are one, gate/up are one.

    A name tells the layers of a decoder block that are in it ("q_proj + k_proj + v_proj"), and how many such matrices there are.
    """
    found: dict[tuple[str, int, int], int] = {}
    grouped: set[int] = set()
    for _, members in fused_groups(model):
        layers = [layer for _, layer in members]
        grouped.update(map(id, layers))
        key = (
            " + ".join(name for name, _ in members),
            sum(layer.out_features for layer in layers),
            layers[0].in_features,
        )
        found[key] = found.get(key, 0) + 1
    for name, layer in model.named_modules():
        if isinstance(layer, NVFP4Linear) and id(layer) not in grouped:
            parts = [part for part in name.split(".") if part != "base_layer"]
            key = parts[-1] if parts else "weight", layer.out_features, layer.in_features
            found[key] = found.get(key, 0) + 1
    return {f"{count} x {name}": (rows, columns) for (name, rows, columns), count in found.items()}


def selected_for_matrices(
    matrices: dict[str, tuple[int, int]], device: torch.device | str, rank: int = 0, dtype: torch.dtype = torch.bfloat16
) -> list[str]:
    """One line per matrix {name: (rows, columns)}: which kernel up to how many tokens, and why. [] where no kernels run."""
    kernels = kernels_for(torch.device(device))
    return [] if kernels is None else kernels.selected_text(matrices, torch.device(device), rank, dtype)


def selected_for_model(model: nn.Module, rank: int = 0) -> list[str]:
    """The same for the packed matrices of a model, with an adapter of this rank (0: none)."""
    layer = next((module for module in model.modules() if isinstance(module, NVFP4Linear)), None)
    if layer is None:
        return []
    return selected_for_matrices(matrices_of(model), layer.weight_packed.device, rank, layer.compute_dtype)
