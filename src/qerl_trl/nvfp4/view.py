"""`NVFP4Linear.weight`: the dense weight (N, K) of a packed layer, decoded on each read.

Code for dense layers (above all PEFT's tuners) finds the shape, dtype, device and values of the dequantized model.
Reads decode every time; nothing is cached. A write makes the layer dense for good and logs it: rounded to 4 bits again,
a change of a 16-bit weight would mostly be lost. So merging into the weight gives the bits of the dequantized model. A
packed weight has no gradient: setting one raises.
"""

import functools
import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

logger = logging.getLogger(__name__)

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class DecodedWeight(torch.Tensor):
    """A weight (N, K) in the layer's `compute_dtype`, without storage of its own. See the module's docstring."""

    #: an `NVFP4Linear` (linear.py imports this file)
    layer: Any

    @staticmethod
    def __new__(cls, layer: Any) -> "DecodedWeight":
        shape = (layer.out_features, layer.in_features)
        view = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=layer.compute_dtype, device=layer.weight_packed.device
        )
        view.layer = layer
        # transformers initializes weights without this mark
        ready = getattr(layer.weight_packed, "_is_hf_initialized", False)
        view._is_hf_initialized = ready  # type: ignore[attr-defined]
        return view

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"DecodedWeight({tuple(self.shape)}, {self.dtype}, {self.device}), packed in 4 bits"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asks_for_gradient = (
            func is torch.Tensor.requires_grad_ and (args[1:] or (kwargs.get("requires_grad", True),))[0]
        ) or (
            func == torch.Tensor.requires_grad.__set__ and args[1]  # type: ignore[attr-defined]
        )
        if asks_for_gradient and isinstance(args[0], cls):
            raise RuntimeError(
                f"The weight {tuple(args[0].shape)} is packed in 4 bits and has no gradient. Train an adapter on the "
                "layer, keep the layer dense (NVFP4Config(modules_to_not_convert=[...])), or call model.dequantize() "
                "first."
            )
        if func == torch.Tensor.data.__set__ and isinstance(args[0], cls):  # type: ignore[attr-defined]
            view, value = args
            if not (isinstance(value, cls) and value.layer is view.layer):  # after `weight.data += delta`
                _dense(view.layer).weight.data = read(value)
            return None
        if func == torch.Tensor.__setitem__ and isinstance(args[0], cls):
            _dense(args[0].layer).weight.data[read(args[1])] = read(args[2])
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return tree_map(_part, func(*args, **kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as PyTorch calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _ALIASES:
            return cls(args[0].layer) if _is_packed(args[0].layer) else func(read(args[0]))
        written = [
            given
            for argument, given in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, cls)
        ]
        written += [value for name, value in (kwargs or {}).items() if name == "out" and isinstance(value, cls)]
        for view in written:
            _dense(view.layer)
        result = func(*tree_map(read, args), **tree_map(read, dict(kwargs or {})))
        return written[0] if written and isinstance(result, torch.Tensor) else result


class DecodedPart(torch.Tensor):
    """A read-only view of a decoded `DecodedWeight`: writes to it would be lost."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        in_place = name == "__setitem__" or re.fullmatch(r"__i\w+__|[a-z]\w*[^_]_", name)
        if (in_place and isinstance(args[0], cls)) or isinstance((kwargs or {}).get("out"), cls):
            raise RuntimeError(
                f"{name} would write to a part of a decoded copy of a packed 4-bit weight, and be lost. Write to the "
                "whole weight (layer.weight.data = ..., which makes the layer dense), or call model.dequantize() first."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return tree_map(_part, func(*args, **(kwargs or {})))


def _part(result: Any) -> Any:
    if isinstance(result, DecodedWeight) and not _is_packed(result.layer):
        return result.layer.weight.data  # written to: the layer is dense now and has a tensor
    plain = type(result) is torch.Tensor
    return result.as_subclass(DecodedPart) if plain and result._is_view() else result


def _is_packed(layer: nn.Module) -> bool:
    return hasattr(layer, "weight_packed")


def read(value: Any) -> Any:
    """Return the dense tensor (N, K) of a `DecodedWeight`; any other `value` unchanged."""
    if not isinstance(value, DecodedWeight):
        return value
    return value.layer.dequantize() if _is_packed(value.layer) else value.layer.weight.data


def _dense(layer: Any) -> nn.Linear:
    """Make the layer dense for good, and return it."""
    if _is_packed(layer):
        _tell(layer.compute_dtype)
        layer.become_dense()
    return layer


@functools.cache
def _tell(dtype: torch.dtype) -> None:
    logger.warning(
        "A packed weight was written to (an adapter merged?), so its layer is dense from now on, in %s.", dtype
    )
