"""FSDP 2 of a base whose weights are bytes.

In torch 2.11 `fully_shard` makes every parameter first with a gradient, then asks whether the original had one: `nn.Parameter(...)`, then
`.requires_grad_(False)`. Bytes cannot have one for that moment either ("only Tensors of floating point dtype can require gradients"), so a packed
base stops there. A torch function mode answers that one question while accelerate prepares the model; torch 2.13 never asks it.
"""

import logging
import os
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .memory.workload import optimizer_under_fsdp
from .upstream import OnlineTrainer

logger = logging.getLogger(__name__)


def fsdp_version(args: Any) -> int | None:
    """Of the FSDP that a run will use, by its arguments or by what `accelerate launch` left in the environment; None: none."""
    said = (getattr(args, "fsdp_plugin_args", None) or {}).get("fsdp_version")
    if said is None and os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
        return int(os.environ.get("FSDP_VERSION", "1"))
    return said


def settle_optimizer(args: Any) -> None:
    """Under FSDP, an optimizer that can step what it shares out ([`optimizer_under_fsdp`]) in place of one that would stop at the first step.

    Raises:
        `ValueError`: there is none that computes the same.
    """
    if fsdp_version(args) is None:
        return
    wanted = str(getattr(args.optim, "value", args.optim))
    used = optimizer_under_fsdp(wanted)
    if used != wanted:
        logger.warning(
            "optim=%r is bitsandbytes', which cannot step parameters that FSDP shares out between processes. This run uses %r: the same AdamW, with a "
            "state in float32 that is shared out too, 8 bytes per trained parameter for all processes together.",
            wanted,
            used,
        )
        args.optim = type(args.optim)(used)


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
