"""Compile the kernels of an engine under construction ahead of their first launch.

vLLM creates all layers before it processes any weights, so the first processed layer compiles the kernels of all layers
in parallel. At launch they would compile one by one, during vLLM's profiling, graph captures and first prompts. Runs in
the trainer's process and in servers, on every tensor-parallel rank for its own shapes.
"""

import functools
import logging
from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from qerl_nvfp4 import ops
from qerl_nvfp4.precompile import Weight, precompile

from ..engine import launch_each

logger = logging.getLogger(__name__)

#: packed layers and norms with kernels to compile: their compute dtype, and for layers batch invariance and arithmetic
_layers: WeakKeyDictionary[nn.Module, tuple[torch.dtype, bool, str]] = WeakKeyDictionary()
_norms: WeakKeyDictionary[Any, tuple[torch.dtype, bool]] = WeakKeyDictionary()
_swiglus: WeakKeyDictionary[nn.Module, tuple[torch.dtype, int]] = WeakKeyDictionary()


def expect_layer(layer: nn.Module, dtype: torch.dtype, batch_invariant: bool = False, compute: str = "w4a16") -> None:
    """Register a new packed layer; `batch_invariant`, `compute`: arguments of `qerl_nvfp4.linear` in its method."""
    _layers[layer] = dtype, batch_invariant, compute


def expect_norm(norm: nn.Module, dtype: torch.dtype, wide: bool = False) -> None:
    """Register a new norm for our kernel, or change its registration; `wide`: argument of `qerl_nvfp4.rms_norm`."""
    _norms[norm] = dtype, wide


def expect_swiglu(module: nn.Module, dtype: torch.dtype, columns: int) -> None:
    """Register a module that calls `qerl_nvfp4.swiglu` for outputs of `columns`."""
    _swiglus[module] = dtype, columns


def compile_expected() -> None:
    """Compile the kernels of the layers and norms registered since the last call, and the engine's checksum kernels."""
    weights: dict[tuple[torch.dtype, bool, str], set[Weight]] = defaultdict(set)
    widths: dict[tuple[torch.dtype, bool], set[int]] = defaultdict(set)
    for layer, kind in _layers.items():
        weights[kind].add(_weight(layer))
    for norm, how in _norms.items():
        widths[how].add(norm.weight.shape[0])
    swiglus = set(_swiglus.values())
    for known in (_layers, _norms, _swiglus):
        known.clear()
    tell = functools.partial(print, flush=True)
    for dtype, invariant, compute in {*weights, *((dtype, False, "w4a16") for dtype, wide in widths if not wide)}:
        plain = (invariant, compute) == (False, "w4a16")
        options: dict[str, Any] = {
            "norms": widths[dtype, False] if plain else (),
            "also": functools.partial(_launch_others, dtype, widths[dtype, True], swiglus),
        }
        options |= {"batch_invariant": invariant, "compute": compute}
        found = precompile(weights[dtype, invariant, compute], dtype=dtype, tell=tell, **options)
        if found.failed:
            logger.info("%d kernels did not compile ahead. The first error: %s", len(found.failed), found.failed[0])


def _launch_others(dtype: torch.dtype, norms: set[int], swiglus: set[tuple[torch.dtype, int]]) -> None:
    """Compile, on meta tensors, the checksum kernels and those with a wide output."""
    launch_each(dtype)
    empty = functools.partial(torch.empty, dtype=dtype, device="meta")
    for columns in norms:
        for residual in (None, empty(1, columns)):
            ops._rms_norm(empty(1, columns), empty(columns, dtype=torch.float32), 1e-6, residual, wide=True)
    for kind, columns in swiglus:
        if kind == dtype:
            ops._swiglu(empty(1, 2 * columns))


def _weight(layer: Any) -> Weight:  # our attributes on vLLM's layers are undeclared
    return Weight(
        N=layer.output_size_per_partition,
        K=layer.input_size_per_partition,
        splits=tuple(layer.qerl_splits),
        rank=0 if layer.adapter_b is None else layer.adapter_b.shape[1],
        bias=layer.bias is not None and not layer.skip_bias_add,
        aligned=True,  # by _PackedMethod.set_weights
    )
