"""The kernels of the engine that is being built, compiled before its weights are used.

vLLM creates every layer before it processes the weights of any, so the first layer whose weights are ready can have the kernels of all
of them compiled, in parallel: left to the launches, they are compiled one after the other while vLLM profiles, captures its graphs and
answers the first prompts. This holds in the trainer's process and in a server, on every tensor-parallel rank, whose shapes they are.
"""

import functools
import logging
from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from qerl_nvfp4.precompile import Weight, precompile

from ..engine import launch_each

logger = logging.getLogger(__name__)

#: packed layers and norms of which no kernel was asked for yet, and the dtype of what they compute on; of layers, whether batch-invariantly
_layers: WeakKeyDictionary[nn.Module, tuple[torch.dtype, bool]] = WeakKeyDictionary()
_norms: WeakKeyDictionary[Any, torch.dtype] = WeakKeyDictionary()


def expect_layer(layer: nn.Module, dtype: torch.dtype, batch_invariant: bool = False) -> None:
    """A packed layer was created; `batch_invariant`: as its method will call `qerl_nvfp4.linear`."""
    _layers[layer] = dtype, batch_invariant


def expect_norm(norm: nn.Module, dtype: torch.dtype) -> None:
    """A norm was created that our kernel will compute."""
    _norms[norm] = dtype


def compile_expected() -> None:
    """Compile what the layers and norms created since the last call need, and what sums their weights."""
    weights: dict[tuple[torch.dtype, bool], set[Weight]] = defaultdict(set)
    widths: dict[torch.dtype, set[int]] = defaultdict(set)
    for layer, kind in _layers.items():
        weights[kind].add(_weight(layer))
    for norm, dtype in _norms.items():
        widths[dtype].add(norm.weight.shape[0])
    _layers.clear()
    _norms.clear()
    tell = functools.partial(print, flush=True)
    for dtype, invariant in {*weights, *((dtype, False) for dtype in widths)}:
        options = {"norms": () if invariant else widths[dtype], "also": functools.partial(launch_each, dtype)}
        found = precompile(weights[dtype, invariant], dtype=dtype, tell=tell, batch_invariant=invariant, **options)
        if found.failed:
            logger.info("%d kernels did not compile ahead. The first error: %s", len(found.failed), found.failed[0])


def _weight(layer: Any) -> Weight:  # what our methods put on vLLM's layers has no declared type
    return Weight(
        N=layer.output_size_per_partition,
        K=layer.input_size_per_partition,
        splits=tuple(layer.qerl_splits),
        rank=0 if layer.adapter_b is None else layer.adapter_b.shape[1],
        bias=layer.bias is not None and not layer.skip_bias_add,
        aligned=True,  # by _PackedMethod.set_weights
    )
