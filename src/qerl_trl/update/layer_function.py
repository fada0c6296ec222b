"""A layer class's forward as a compiled function, of two kinds: with saved activations, or with recomputation.

                 saved for backward                  the backward function computes
    keeping      the compiler's choice               the gradients
    recomputing  its inputs                          the needed part of the forward again, then the gradients

A checkpoint around a compiled layer repeats the whole forward, including the last product (down_proj: 29 % of the
weights of a Qwen2.5-7B layer), unneeded by any gradient. Inside, the compiler drops it. The recomputing kind is torch's
partitioner at a memory budget of zero (`torch._functorch.config.activation_memory_budget`). It does not repeat random
numbers, so a layer with dropout is detected before its output is used, and recomputed from outside.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
import torch._dynamo  # not loaded by `import torch`
import torch._functorch.config
import torch.compiler.config
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..support.names import unwrap

logger = logging.getLogger(__name__)

#: graphs of one layer class: mask or none, noise or none, full or sliding attention, lengths divisible by 16 or not
_MOST_GRAPHS = 24
#: a layer's numeric arguments that change with the batch (attention.py), by torch.compile's names
_CHANGING = "L['kwargs']['max_length_q'],L['kwargs']['max_length_k']"


class _DrawsRandomNumbers(Exception):
    """Raised for a layer that must not be recomputed inside: it draws random numbers."""


FAILURES = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit, _DrawsRandomNumbers)


class LayerFunction:
    """A layer class's compiled forward, until it fails; `recomputes`: also a recomputing function, until that fails."""

    def __init__(self, forward: Callable, backend: str, deterministic: bool) -> None:
        self.eager, self.failed, self.recomputes = forward, False, True
        # kernels chosen by timing differ from run to run, and so the order of a sum
        options: dict[str, Any] | None = {"deterministic": True} if deterministic and backend == "inductor" else None

        def recomputing(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:  # own code, own graphs
            return forward(layer, *args, **kwargs)

        self._keeping, self._recomputing = (
            torch.compile(function, backend=backend, fullgraph=True, options=options)
            for function in (forward, recomputing)
        )
        # inside DDP's forward torch would cut a layer at full gradient buckets: longer compilation, more saved tensors
        self._settings = [
            torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS, optimize_ddp=False),
            cast(Any, torch.compiler.config).patch(dynamic_sources=_CHANGING),
        ]

    def __call__(self, layer: nn.Module, recompute: bool, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for setting in self._settings:
                stack.enter_context(setting)
            if not recompute:
                return self._keeping(layer, *args, **kwargs)
            stack.enter_context(torch._functorch.config.patch(activation_memory_budget=0.0))
            before = _random_states(args, kwargs)
            for _ in range(2):  # the compiler may draw once
                output = self._recomputing(layer, *args, **kwargs)
                if all(torch.equal(get(), state) for get, _, state in before):
                    return output
                for _, put, state in before:
                    put(state)
            raise _DrawsRandomNumbers("it draws random numbers")

    def give_up(self, layer: nn.Module, reason: str, recompute: bool = False) -> None:
        """Stop compiling; a function with recomputation inside falls back to recomputation outside."""
        if recompute:
            self.recomputes, what = False, "recomputes its whole forward"
        else:
            self.failed, what = True, "runs in eager mode"
        logger.warning(
            f"{type(layer).__name__} {what} from here on, so training steps take longer: it does not compile "
            f"({reason}). Set compile_layers=False to accept this without a warning."
        )


def _random_states(args: Any, kwargs: Any) -> list[tuple[Callable, Callable, torch.Tensor]]:
    """Return (get, set, state) of the random generators of the CPU and the device."""
    device = tensors([args, kwargs])[0].device
    found: list[tuple[Callable, Callable]] = [(torch.get_rng_state, torch.set_rng_state)]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        found.append((partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)))
    return [(get, put, get()) for get, put in found]


def tensors(value: Any) -> list[torch.Tensor]:
    """List all tensors in nested mappings, tuples and lists, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for part in value for tensor in tensors(part)]


def base_of(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model without wrappers: DDP, DeepSpeed, PEFT."""
    inner = unwrap(model)
    return inner if isinstance(inner, PreTrainedModel) else cast(Any, inner).get_base_model()


def decoder_of(model: nn.Module) -> nn.Module:
    """Return a model's text part, without towers of other modalities."""
    return base_of(model).get_decoder()


def decoder_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the checkpointable layers of a model's text part, in forward order; [] without such a list."""
    lists = [child for child in decoder_of(model).children() if isinstance(child, nn.ModuleList)]
    return [layer for part in lists for layer in part if isinstance(layer, GradientCheckpointingLayer)]
