"""Moving tensors that are slices of one storage so that they still are: a model's layers hand in one slice each, and the storage moves once."""

import weakref
from collections.abc import Callable

import torch


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 (bytes,) over the whole storage behind a uint8 tensor."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def slice_like(whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The part of `whole` (bytes,) at the place that `tensor` has in its own storage."""
    start = tensor.storage_offset()
    return whole[start : start + tensor.numel()].view(tensor.shape)


#: fn -> {address of a fused storage: what fn made of it}. `Module.to` hands one and the same closure to every layer, and the entry
#: disappears with that closure.
_MOVED: "weakref.WeakKeyDictionary[Callable, dict[int, torch.Tensor]]" = weakref.WeakKeyDictionary()


def move_slice(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    moved = _MOVED.setdefault(fn, {})
    address = tensor.untyped_storage().data_ptr()
    if address not in moved:
        moved[address] = fn(whole_storage(tensor))
    if moved[address].data_ptr() == address:
        return tensor.detach()  # fn changed nothing
    return slice_like(moved[address], tensor)
