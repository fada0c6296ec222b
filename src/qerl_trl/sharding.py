"""FSDP 2 of a base whose weights are bytes.

In torch 2.11 `fully_shard` makes every parameter first with a gradient, then asks whether the original had one: `nn.Parameter(...)`, then
`.requires_grad_(False)`. Bytes cannot have one for that moment either ("only Tensors of floating point dtype can require gradients"), so a packed
base stops there. A torch function mode answers that one question while accelerate prepares the model; torch 2.13 never asks it.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .upstream import OnlineTrainer


class BytesWithoutGradient(TorchFunctionMode):
    """Inside, asking a tensor of whole numbers for a gradient leaves it as it is, without one, instead of raising."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.requires_grad_ and not (args[0].is_floating_point() or args[0].is_complex()):
            return args[0]
        return func(*args, **(kwargs or {}))


class ShardingMixin(OnlineTrainer):
    """See the module docstring. To be mixed in before TRL's trainer."""

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        with BytesWithoutGradient():
            prepared = super()._prepare_for_training(*args, **kwargs)
        for module in self.model.modules():
            vars(module).pop("unread", None)  # it has the first process's weights now, and should be compiled as there
        return prepared
