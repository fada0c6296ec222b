"""Module names independent of wrappers, and whole tensors of sharded ones."""

import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

_PREFIXES = re.compile(r"^(?:module\.|_orig_mod\.|_fsdp_wrapped_module\.|base_model\.model\.)+")
_CHILDREN = ("_orig_mod", "module", "_fsdp_wrapped_module")
_WRAPPERS = re.compile(r"(?<=\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_PEFT_LAYERS = re.compile(r"\.(modules_to_save\.[^.]+|original_module|base_layer|token_adapter)(?=\.|$)")


def canonical_name(name: str) -> str:
    """Return a module's or parameter's path in the checkpoint, without wrappers: PEFT, DDP, FSDP, compile.

    >>> canonical_name("module.base_model.model.model.layers.0.input_layernorm.modules_to_save.default")
    'model.layers.0.input_layernorm'
    """
    return _PEFT_LAYERS.sub("", _WRAPPERS.sub("", _PREFIXES.sub("", name)))


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel, DeepSpeed, FSDP 1 and torch.compile; PEFT stays."""
    # by registered child, not by hasattr: a PeftModel forwards unknown attributes to what it wraps
    while (inner := next(filter(None, map(model._modules.get, _CHILDREN)), None)) is not None:
        model = inner
    return model


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether FSDP 2 shards `tensor`; without importing torch's `DTensor`, which takes seconds."""
    return type(tensor) is not torch.Tensor and hasattr(tensor, "full_tensor")


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    tensor = parameter.detach()
    return cast(Any, tensor).full_tensor() if is_dtensor(tensor) else tensor


def full_tensors(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Apply `full_tensor` to all in few collectives: tensors sharded by rows (FSDP 2) are gathered together, in one
    collective per process group, device and dtype; any other tensor alone."""
    wholes: list[torch.Tensor | None] = [None] * len(parameters)
    groups: dict[tuple, list[int]] = {}
    for number, parameter in enumerate(parameters):
        place = _rows_shared_out(parameter)
        if place is None:
            wholes[number] = full_tensor(parameter)
        else:
            groups.setdefault((*place, parameter.device, parameter.dtype), []).append(number)
    for (mesh, dimension, *_), numbers in groups.items():
        gathered = _gather_rows([parameters[n] for n in numbers], mesh.get_group(dimension), mesh.size(dimension))
        for number, whole in zip(numbers, gathered, strict=True):
            wholes[number] = whole
    return cast(list[torch.Tensor], wholes)


def _rows_shared_out(parameter: torch.Tensor) -> tuple[Any, int] | None:
    """Return the device mesh and its dimension for a tensor sharded by rows; None for any other tensor."""
    if not is_dtensor(parameter):
        return None
    from torch.distributed.tensor import DTensor, Replicate, Shard

    assert isinstance(parameter, DTensor)
    shared = [number for number, kind in enumerate(parameter.placements) if type(kind) is not Replicate]
    if len(shared) != 1 or parameter.ndim == 0:
        return None
    kind = parameter.placements[shared[0]]
    # exact type: a strided shard is a `Shard` too, in another order
    return (parameter.device_mesh, shared[0]) if type(kind) is Shard and kind.dim == 0 else None


@torch.no_grad()
def _gather_rows(parameters: Sequence[torch.Tensor], group: Any, ranks: int) -> list[torch.Tensor]:
    """Gather tensors divided into `ceil(rows / ranks)` consecutive rows per process, the rest on the last one."""
    # rows of a full part, and the other dimensions
    sizes = [(-(-p.shape[0] // ranks), p.shape[1:]) for p in parameters]
    counts = [rows * rest.numel() for rows, rest in sizes]
    parts = [local_tensor(p).reshape(-1) for p in parameters]
    mine = torch.zeros(sum(counts), dtype=parts[0].dtype, device=parts[0].device)
    torch._foreach_copy_([to[: part.numel()] for to, part in zip(mine.split(counts), parts, strict=True)], parts)
    everyones = mine.new_empty(ranks * mine.numel())
    torch.distributed.all_gather_into_tensor(everyones, mine, group=group)
    pieces = everyones.view(ranks, -1).split(counts, dim=1)
    wholes = [mine.new_empty(ranks, count) for count in counts]
    torch._foreach_copy_(wholes, list(pieces))
    return [
        whole.view(ranks * rows, *rest)[: p.shape[0]]
        for whole, p, (rows, rest) in zip(wholes, parameters, sizes, strict=True)
    ]


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a parameter, or all if it is not sharded."""
    tensor = parameter.detach()
    return cast(Any, tensor).to_local() if is_dtensor(tensor) else tensor


@torch.no_grad()
def set_whole(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Write a whole tensor, known to every process, into a parameter or into this process's part of it."""
    whole = whole.to(parameter.device, parameter.dtype)
    if is_dtensor(parameter):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)


def reshard(model: nn.Module) -> None:
    """Free parameters that FSDP 2 gathered for a forward without backward: the next forward gathers new values."""
    for module in model.modules():
        # FSDPModule is slow to import, and hasattr on a module without the attribute slower than on its class
        if hasattr(type(module), "set_reshard_after_forward"):
            cast(Any, module).reshard()


def is_part(parameter: torch.Tensor) -> bool:
    """Whether this process has only a part of `parameter`, because of FSDP 2 or ZeRO-3."""
    return is_dtensor(parameter) or hasattr(parameter, "ds_id")


def is_sharded(model: nn.Module) -> bool:
    return any(map(is_part, model.parameters()))


def text_tokenizer(processing_class: Any) -> Any:
    """Return the tokenizer: `processing_class` itself, or the one in a processor."""
    return getattr(processing_class, "tokenizer", processing_class)
