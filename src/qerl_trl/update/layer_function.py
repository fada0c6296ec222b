"""The forward of a layer class as a compiled function, in two kinds: one keeps for the backward pass what is dear to compute, the other recomputes.

                 keeps for the backward pass         the backward function computes
    keeping      what the compiler finds worth it    the gradients
    recomputing  its inputs                          once more what of the forward the gradients need, then the gradients

A checkpoint around a compiled layer runs the forward function as a whole, also the last product (down_proj: 29 % of the weights of a
Qwen2.5-7B layer), which no gradient needs. Inside, the compiler drops it. The recomputing kind is what torch's partitioner makes of a memory
budget of zero (`torch._functorch.config.activation_memory_budget`). It does not repeat random numbers, so a layer that draws some (dropout) is
found before its output is used, and recomputed from outside.
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

#: graphs of one layer class: with and without mask, with and without noise, full and sliding attention, lengths that are multiples of 16 or not
_MOST_GRAPHS = 24
#: numbers among a layer's arguments that change from batch to batch (attention.py), as torch.compile names them
_CHANGING = "L['kwargs']['max_length_q'],L['kwargs']['max_length_k']"


class _DrawsRandomNumbers(Exception):
    """A layer was to be recomputed from its input alone, and depends on more."""


FAILURES = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit, _DrawsRandomNumbers)


class LayerFunction:
    """A layer class's forward, compiled, until it fails; `recomputes`: also as a function that keeps its inputs alone, until that fails."""

    def __init__(self, forward: Callable, backend: str, deterministic: bool) -> None:
        self.eager, self.failed, self.recomputes = forward, False, True
        # kernels are not chosen by timing them, which may differ from run to run, and with it the order of a sum
        options: dict[str, Any] | None = {"deterministic": True} if deterministic and backend == "inductor" else None

        def recomputing(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:  # graphs belong to a function's code
            return forward(layer, *args, **kwargs)

        self._keeping, self._recomputing = (
            torch.compile(function, backend=backend, fullgraph=True, options=options)
            for function in (forward, recomputing)
        )
        # inside of DDP's forward torch would cut a layer where a bucket of gradients is full: a longer compilation, and more that is kept
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
            for _ in range(2):  # the first time it may have been the compiler that drew
                output = self._recomputing(layer, *args, **kwargs)
                if all(torch.equal(get(), state) for get, _, state in before):
                    return output
                for _, put, state in before:
                    put(state)
            raise _DrawsRandomNumbers("it draws random numbers")

    def give_up(self, layer: nn.Module, reason: str, recompute: bool = False) -> None:
        """Compile no longer; of a function that recomputes inside: recompute from outside."""
        if recompute:
            self.recomputes, what = False, "recomputes its whole forward"
        else:
            self.failed, what = True, "runs in eager mode"
        logger.warning(
            f"{type(layer).__name__} {what} from here on, so an update takes longer: it does not compile ({reason}). compile_layers=False says that this "
            "is wanted."
        )


def _random_states(args: Any, kwargs: Any) -> list[tuple[Callable, Callable, torch.Tensor]]:
    """Of the generators that a layer could draw from, the CPU's and its device's: (get, set, state)."""
    device = tensors([args, kwargs])[0].device
    found: list[tuple[Callable, Callable]] = [(torch.get_rng_state, torch.set_rng_state)]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        found.append((partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)))
    return [(get, put, get()) for get, put in found]


def tensors(value: Any) -> list[torch.Tensor]:
    """Those in nested mappings, tuples and lists, in their order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for part in value for tensor in tensors(part)]


# --- the layers of a model ----------------------------------------------------------------------------------------------------------


def base_of(model: nn.Module) -> PreTrainedModel:
    """The model of transformers, without what wraps it: DDP, DeepSpeed, PEFT."""
    inner = unwrap(model)
    return inner if isinstance(inner, PreTrainedModel) else cast(Any, inner).get_base_model()


def decoder_of(model: nn.Module) -> nn.Module:
    """A model's text part: towers of other modalities are left alone."""
    return base_of(model).get_decoder()


def decoder_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers of a model's text part that can be checkpointed one by one, the first one first; [] where it has no list of such."""
    lists = [child for child in decoder_of(model).children() if isinstance(child, nn.ModuleList)]
    return [layer for part in lists for layer in part if isinstance(layer, GradientCheckpointingLayer)]
