"""Give q/k/v and gate/up layers one storage and one global scale, for vLLM's fused layer to share.

vLLM runs the three attention inputs of a block as one matrix, and the two MLP inputs as another. NVFP4's layout is
row-major and not swizzled, so a row slice of a packed matrix is the packed matrix of these rows: the trainer's layers
can be slices of vLLM's layers.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from .architectures import DECODER
from .format import BLOCK_SIZE, decode_scale, quantize, rescale
from .linear import NVFP4Linear, kernels_for


def fused_groups(model: nn.Module) -> Iterator[tuple[str, list[tuple[str, NVFP4Linear]]]]:
    """Yield (parent, [(child's name, layer), ...]) for each complete group with one input width and device.

    Sees through adapters: a PEFT layer counts as the NVFP4 layer in its `base_layer`.
    """
    for parent_name, parent in model.named_modules():
        for group in DECODER.groups:
            children = [parent._modules.get(child) for child in group]
            inner = [getattr(child, "base_layer", child) for child in children]
            layers = [layer for layer in inner if isinstance(layer, NVFP4Linear)]
            if len(layers) < len(group):
                continue
            if len({(layer.in_features, layer.weight_packed.device) for layer in layers}) == 1:
                yield parent_name, list(zip(group, layers, strict=True))


#: most unused bytes that torch's allocator may cache during fusion
CACHED_BYTES = 2**29


@torch.no_grad()
def fuse_storage(model: nn.Module) -> int:
    """Give q/k/v (and gate/up) one global scale and one storage each; returns the number of groups. Idempotent.

    Afterwards each layer's `weight_packed` and `weight_scale` are row slices of one tensor, in the group's order. The
    shared global scale is the smallest one (the largest weights decide). The move is exact for our power-of-two scales,
    except for blocks with a new scale below 2^-6: those are rounded again. A foreign checkpoint's layers keep their own
    scales if an exact move is impossible, so their weights never change.
    """
    groups = 0
    for _, members in fused_groups(model):
        groups += 1
        layers = [layer for _, layer in members]
        storages = {layer.weight_packed.untyped_storage().data_ptr() for layer in layers}
        if all(layer.fused_rows for layer in layers) and len(storages) == 1:
            continue
        share_global_scale(layers)
        one_storage(layers)
    return groups


@torch.no_grad()
def one_storage(layers: list[NVFP4Linear]) -> None:
    """Make the packed weights and block scales row slices of one tensor each. Global scales stay."""
    for attribute in ("weight_packed", "weight_scale"):
        parts = [layer.get_parameter(attribute) for layer in layers]
        fused = torch.cat([part.detach() for part in parts])
        for part, view in zip(parts, fused.split([part.shape[0] for part in parts]), strict=True):
            part.data = view
    for layer in layers:
        layer.fused_rows = fused.shape[0]
    give_back_cached(layers[0].weight_packed.device)


def give_back_cached(device: torch.device) -> None:
    """Free torch's cached GPU memory above `CACHED_BYTES`.

    Fusing frees two or three blocks per group, all too small for the next group: cached, they add up to another copy of
    the weights.
    """
    if device.type != "cuda":
        return
    if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > CACHED_BYTES:
        torch.cuda.empty_cache()


def share_global_scale(layers: list[NVFP4Linear]) -> bool:
    """Give the layers one global scale; return False instead of changing a foreign checkpoint's weights."""
    scales = torch.cat([layer.global_scale for layer in layers])
    shared = scales.amin().reshape(1)
    if bool((scales == shared).all()):
        return True
    ours = bool((torch.frexp(scales).mantissa == 0.5).all())  # powers of two
    moved = [rescale(layer.weight_scale, layer.global_scale, shared) for layer in layers]
    if not ours and not all(exact for _, exact in moved):
        return False
    for layer, (block_scale, exact) in zip(layers, moved, strict=True):
        if not exact:
            old_unit = decode_scale(layer.weight_scale) / layer.global_scale
            changed = decode_scale(block_scale) / shared != old_unit
            rounded = quantize(layer.dequantize(torch.float32), "rtn", shared).packed
            blocks = (*block_scale.shape, BLOCK_SIZE // 2)
            packed = torch.where(changed.unsqueeze(-1), rounded.view(blocks), layer.weight_packed.view(blocks))
            layer.weight_packed.copy_(packed.view_as(rounded))
        layer.weight_scale.copy_(block_scale)
        layer.weight_global_scale.copy_(shared.view(torch.uint8))
    return True


# --- matrices of the engine's products --------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """Packed layers that the engine multiplies as one matrix, and the number of such matrices in the model."""

    layers: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    number: int

    @property
    def name(self) -> str:
        return f"{self.number} x {' + '.join(self.layers)}"


def packed_matrices(model: nn.Module) -> list[Matrix]:
    """List the distinct packed matrices of a model, possibly on the meta device."""
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
    """Return {name: (rows, columns, number of layers, each with its own adapter)} of the distinct packed matrices.

    A name lists the matrix's layers in a decoder block ("q_proj + k_proj + v_proj"), and the number of such matrices.
    """
    return {matrix.name: (sum(matrix.rows), matrix.columns, len(matrix.rows)) for matrix in packed_matrices(model)}


def selected_for_matrices(
    matrices: dict[str, tuple[int, ...]],
    device: torch.device | str,
    rank: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    compute: str = "w4a16",
) -> list[str]:
    """Describe, per matrix {name: (rows, columns[, layers])}, the kernel for each number of tokens, and why."""
    kernels = kernels_for(torch.device(device))
    if kernels is None:
        return []
    return kernels.selected_text(matrices, torch.device(device), rank, dtype, batch_invariant, compute)


def selected_for_model(model: nn.Module, rank: int = 0, batch_invariant: bool = False) -> list[str]:
    """Do as [`selected_for_matrices`] for a model's packed matrices, with an adapter of this rank (0: none)."""
    layer = next((module for module in model.modules() if isinstance(module, NVFP4Linear)), None)
    if layer is None:
        return []
    device, dtype = layer.weight_packed.device, layer.compute_dtype
    return selected_for_matrices(matrices_of(model), device, rank, dtype, batch_invariant, layer.compute)


def measured_by_the_user(device: torch.device) -> tuple[list[str], str]:
    """Return (results of `qerl-trl tune` for this GPU, one line per matrix; the problem with them, or "")."""
    kernels = kernels_for(device)
    if kernels is None:
        return [], ""
    found = kernels.select.measured_for(device.index)
    sizes: dict[tuple[int, int, int], int] = {}
    for place, (_, where) in found.entries.items():
        if where == kernels.measured.HERE:
            sizes[place[:3]] = sizes.get(place[:3], 0) + 1
    lines = [f"{n} x {k}, rank {rank}: {count} numbers of tokens" for (n, k, rank), count in sorted(sizes.items())]
    return lines and [str(found.path), *lines], found.problem
