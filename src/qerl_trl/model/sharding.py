"""FSDP 2 of a base whose weights are bytes.

In torch 2.11 `fully_shard` makes every parameter first with a gradient, then asks whether the original had one: `nn.Parameter(...)`, then
`.requires_grad_(False)`. Bytes cannot have one for that moment either ("only Tensors of floating point dtype can require gradients"), so a packed
base stops there. A torch function mode answers that one question while accelerate prepares the model; torch 2.13 never asks it.

A reference and a reward model are nobody's to fill in: [`loaded_everywhere`]. And checkpoints are of whole tensors: of shards, which is what `accelerate config` proposes for FSDP 2, transformers writes no adapter.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch.overrides import TorchFunctionMode

logger = logging.getLogger(__name__)

#: accelerate's name for whole tensors in a checkpoint
FULL = "FULL_STATE_DICT"


class BytesWithoutGradient(TorchFunctionMode):
    """Inside, asking a tensor of whole numbers for a gradient leaves it as it is, without one, instead of raising."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.requires_grad_ and not (args[0].is_floating_point() or args[0].is_complex()):
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def loaded_everywhere(wanted: bool = True) -> Iterator[None]:
    """In the block `from_pretrained` reads weights in every process, also with `fsdp_cpu_ram_efficient_loading`. With that, all but the first of a machine
    get zeros, which accelerate replaces in the policy when it shards it, and in no other model."""
    name, before = "FSDP_CPU_RAM_EFFICIENT_LOADING", os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING")
    if not wanted or before is None:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ[name] = before


def save_whole_tensors(accelerator: Accelerator) -> None:
    """Under FSDP, checkpoints whose adapter others can read, whatever accelerate's configuration says."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or (now := getattr(plugin.state_dict_type, "name", plugin.state_dict_type)) == FULL:
        return
    logger.warning(
        "fsdp_state_dict_type is %s, with which checkpoints and output_dir would have no adapter_model.safetensors. This run uses %s; write "
        "`fsdp_state_dict_type: %s` into accelerate's configuration.",
        now,
        FULL,
        FULL,
    )
    plugin.state_dict_config = plugin.optim_state_dict_config = None  # of shards; it makes those that fit
    plugin.set_state_dict_type(FULL)
