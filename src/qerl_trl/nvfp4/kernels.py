"""The packed matrices of a model as its engine multiplies them, and which kernel computes each: lines for the banner of a run and for
`qerl-trl doctor`, and what `qerl-trl tune` measures."""

import os
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from .config import NVFP4Config, load_config
from .fused import fused_groups
from .linear import NVFP4Linear, kernels_for


class Matrix(NamedTuple):
    """Packed layers that the engine multiplies as one: q/k/v, gate/up, or one alone. Rows of each, columns, and how many such the model has."""

    layers: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    number: int

    @property
    def name(self) -> str:
        return f"{self.number} x {' + '.join(self.layers)}"


def packed_matrices(model: nn.Module) -> list[Matrix]:
    """The different packed matrices of a model, which may be on the meta device."""
    found: dict[tuple[tuple[str, ...], tuple[int, ...], int], int] = {}
    grouped: set[int] = set()
    for _, members in fused_groups(model):
        layers = [layer for _, layer in members]
        grouped.update(map(id, layers))
        rows = tuple(layer.out_features for layer in layers)
        key = tuple(name for name, _ in members), rows, layers[0].in_features
        found[key] = found.get(key, 0) + 1
    for name, layer in model.named_modules():
        if isinstance(layer, NVFP4Linear) and id(layer) not in grouped:
            parts = [part for part in name.split(".") if part != "base_layer"]
            key = (parts[-1] if parts else "weight",), (layer.out_features,), layer.in_features
            found[key] = found.get(key, 0) + 1
    return [Matrix(*key, count) for key, count in found.items()]


def matrices_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """{name: (rows, columns, layers in it, each with an adapter)} of the different packed matrices.

    A name tells the layers of a decoder block that are in it ("q_proj + k_proj + v_proj"), and how many such matrices there are.
    """
    return {matrix.name: (sum(matrix.rows), matrix.columns, len(matrix.rows)) for matrix in packed_matrices(model)}


def matrices_of_checkpoint(model_id: str | os.PathLike, **kwargs: Any) -> list[Matrix]:
    """The matrices that a folder or Hub id has once it is loaded in NVFP4, from its configuration alone; `kwargs` as for `load_config`.

    Raises:
        `ValueError`: the model cannot be quantized, as when it is loaded.
    """
    config = load_config(model_id, **kwargs)
    stored = getattr(config, "quantization_config", None)
    quantization = NVFP4Config() if stored is None else NVFP4Config.from_dict(stored)
    if stored is not None:
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, linear in quantization.linears_to_quantize(model).items():
        packed = NVFP4Linear(linear.in_features, linear.out_features, linear.bias is not None, "meta")
        model.set_submodule(name, packed)
    return packed_matrices(model)


def selected_for_matrices(
    matrices: dict[str, tuple[int, ...]],
    device: torch.device | str,
    rank: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
) -> list[str]:
    """One line per matrix {name: (rows, columns[, layers in it])}: which kernel up to how many tokens, and why. [] where no kernels run."""
    kernels = kernels_for(torch.device(device))
    if kernels is None:
        return []
    return kernels.selected_text(matrices, torch.device(device), rank, dtype, batch_invariant)


def selected_for_model(model: nn.Module, rank: int = 0, batch_invariant: bool = False) -> list[str]:
    """The same for the packed matrices of a model, with an adapter of this rank (0: none)."""
    layer = next((module for module in model.modules() if isinstance(module, NVFP4Linear)), None)
    if layer is None:
        return []
    device, dtype = layer.weight_packed.device, layer.compute_dtype
    return selected_for_matrices(matrices_of(model), device, rank, dtype, batch_invariant)


def measured_by_the_user(device: torch.device) -> tuple[list[str], str]:
    """What `qerl-trl tune` has kept for this GPU, one line per matrix, and what is wrong with it ("": nothing)."""
    kernels = kernels_for(device)
    if kernels is None:
        return [], ""
    found = kernels.select.measured_for(device.index)
    sizes: dict[tuple[int, int, int], int] = {}
    for rows, columns, rank, _ in found.entries:
        sizes[rows, columns, rank] = sizes.get((rows, columns, rank), 0) + 1
    lines = [f"{n} x {k}, rank {rank}: {count} numbers of tokens" for (n, k, rank), count in sorted(sizes.items())]
    return lines and [str(found.path), *lines], found.problem
