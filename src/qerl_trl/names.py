"""Names of modules whatever wraps the model, and whole tensors whatever shards them."""

import re
from typing import Any, cast

import torch
from torch import nn

_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model.")
_CHILDREN = ("_orig_mod", "module", "_fsdp_wrapped_module")
_WRAPPERS = re.compile(r"(?<=\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_PEFT_LAYERS = re.compile(r"\.(modules_to_save\.[^.]+|original_module|base_layer|token_adapter)(?=\.|$)")


def canonical_name(name: str) -> str:
    """The module or parameter path in the checkpoint (and in vLLM), whatever wraps the model: PEFT, DDP, FSDP, compile.

    >>> canonical_name("module.base_model.model.model.layers.0.input_layernorm.modules_to_save.default")
    'model.layers.0.input_layernorm'
    """
    while name.startswith(_PREFIXES):
        name = name[len(next(prefix for prefix in _PREFIXES if name.startswith(prefix))) :]
    return _PEFT_LAYERS.sub("", _WRAPPERS.sub("", name))


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of DistributedDataParallel, DeepSpeed, FSDP's first version and torch.compile; PEFT stays."""
    # by registered child, not by hasattr: a PeftModel forwards unknown attributes to what it wraps
    while (inner := next((model._modules[name] for name in _CHILDREN if model._modules.get(name)), None)) is not None:
        model = inner
    return model


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    tensor = parameter.detach()
    return tensor if type(tensor) is torch.Tensor or not hasattr(tensor, "full_tensor") else tensor.full_tensor()


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """What this process holds of it."""
    tensor = parameter.detach()
    return tensor if type(tensor) is torch.Tensor or not hasattr(tensor, "to_local") else tensor.to_local()


@torch.no_grad()
def set_whole(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Write a whole tensor, which every process has, into a parameter or into this process's part of one."""
    whole = whole.to(parameter.device, parameter.dtype)
    if hasattr(parameter, "full_tensor"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)


def reshard(model: nn.Module) -> None:
    """Let go of what FSDP 2 keeps whole after a forward that no backward follows: the next one gathers it anew, as it is then."""
    for module in model.modules():
        # torch's FSDPModule, which takes seconds to import; a module that lacks an attribute takes microseconds to say so, its class does not
        if hasattr(type(module), "set_reshard_after_forward"):
            cast(Any, module).reshard()


def is_sharded(model: nn.Module) -> bool:
    return any(hasattr(p, "full_tensor") or hasattr(p, "ds_id") for p in model.parameters())
