"""A model computed once more, as honestly and with other rounding: how far two right implementations may be apart."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..nvfp4.linear import NVFP4Linear, compute_dtype, decode_into

#: elements of a matrix that are cast to float32 at a time
_CHUNK = 2**26


class _Cast(TorchFunctionMode):
    """Inside, the operands of products and norms and what embeddings give are cast."""

    OPERANDS = (F.linear, F.conv1d, F.layer_norm, F.rms_norm, F.scaled_dot_product_attention, torch.matmul)

    def __init__(self, cast: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.cast = lambda tensor: cast(tensor) if tensor.is_floating_point() else tensor

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.embedding:
            return self.cast(function(*args, **kwargs))
        if function in self.OPERANDS:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            if (
                function is F.linear and args[1].numel() > _CHUNK and bias is None
            ):  # a head, a part of its rows at a time
                rows = args[1].split(max(1, _CHUNK // args[1].shape[1]))
                return torch.cat([F.linear(self.cast(args[0]), self.cast(part)) for part in rows], -1)
            args, kwargs = tree_map_only(torch.Tensor, self.cast, (args, kwargs))
        return function(*args, **kwargs)


def _float32_product(layer: NVFP4Linear, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    weight = torch.empty(layer.out_features, layer.in_features, dtype=layer.compute_dtype, device=output.device)
    decode_into(weight, *layer.nvfp4)
    return F.linear(args[0].float(), weight.float(), None if layer.bias is None else layer.bias.float())


@contextlib.contextmanager
def other_arithmetic(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the model computes as honestly as outside, and rounds elsewhere: in float32 where it computes in 16 bits; under autocast where
    only the engine does; with TF32's operands where neither does."""
    if (own := compute_dtype(model)) == torch.float32 and dtype != own:
        with torch.autocast(next(model.parameters()).device.type, dtype):
            yield
        return

    def tf32(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.float().view(torch.int32) & ~0x1FFF).view(torch.float32)

    packed = [module for module in model.modules() if isinstance(module, NVFP4Linear)] if own != torch.float32 else []
    handles = [layer.register_forward_hook(_float32_product) for layer in packed]
    try:
        with torch.compiler.set_stance("force_eager"), _Cast(tf32 if own == torch.float32 else torch.Tensor.float):
            yield
    finally:
        for handle in handles:
            handle.remove()
