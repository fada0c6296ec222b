"""Sums of tensors read as integers, by which a tensor's content is known; exact, whatever the order of the sum.

On a GPU for which the kernels are made, all tensors are read in one launch (`qerl_nvfp4.sums`). Elsewhere PyTorch computes the same numbers.
"""

import functools
import math
from collections.abc import Sequence

import torch

#: integers of the size of an element
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: of them, in 8 bytes; single bytes are read four at a time
_LANES = {1: 2, 2: 4, 4: 2, 8: 1}
#: elements that are summed at a time: PyTorch writes each of them as 8 bytes first
_AT_ONCE = 2**24


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor's elements read as integers, a scalar int64 on its device. Zeros add nothing."""
    tensor = tensor.detach()
    if tensor.element_size() == 1 and tensor.is_contiguous() and tensor.numel() % 4 == 0:
        tensor = tensor.view(-1).view(torch.int32)  # a quarter of the additions
    parts = tensor.view(_INTEGERS[tensor.element_size()]).reshape(-1).split(_AT_ONCE)
    return torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()


@functools.cache
def _launches() -> bool:
    """Whether the kernels' package can sum on this process's GPUs."""
    import qerl_nvfp4

    return qerl_nvfp4.is_available()


def launch_each(dtype: torch.dtype) -> None:
    """Every launch of an engine in `dtype` once, with tensors on the meta device: to be compiled with the engine's other kernels. Of an adapter in
    float32, as it trains."""
    from qerl_nvfp4.sums import rounded_sums, sums

    meta = torch.device("meta")
    for lanes in (2, 4):  # no engine holds integers of 8 bytes
        sums([(0, 1)], lanes, meta)
    rounded_sums([torch.empty(1, device=meta)], [1.0], dtype)


@torch.no_grad()
def all_bits(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`bits` of each tensor, (count,) int64 on the device of the first."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    device = tensors[0].device
    if not (tensors[0].is_cuda and _launches()):
        return torch.stack([bits(tensor).to(device) for tensor in tensors])
    from qerl_nvfp4.sums import sums, words_of

    lanes = [_LANES[tensor.element_size()] if tensor.device == device else 0 for tensor in tensors]
    words = [words_of(tensor) for tensor in tensors]
    if len({*lanes}) == 1 and None not in words:
        return sums(words, lanes[0], device)
    found = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    launched = {kind: [n for n, each in enumerate(lanes) if each == kind and words[n]] for kind in {*lanes} - {0}}
    for kind, mine in launched.items():
        found[torch.tensor(mine, device=device)] = sums([words[n] for n in mine], kind, device)
    for number in {*range(len(tensors))}.difference(*launched.values()):
        found[number] = bits(tensors[number]).to(device)
    return found


def all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether each of these tensors holds neither NaN nor infinity, (count,) bool on their device."""
    return torch.stack(torch._foreach_norm(list(tensors), math.inf)).isfinite()


@torch.no_grad()
def largest_magnitude(tensors: Sequence[torch.Tensor]) -> float | None:
    """The largest magnitude in tensors of floats, NaN where one is NaN; None where not one launch can tell. Waits for the device once."""
    if not (tensors and tensors[0].is_cuda and _launches()):
        return None
    if any(hasattr(kind, "to_local") for kind in {type(t) for t in tensors}):
        return None  # part of each is elsewhere
    from qerl_nvfp4.sums import EXPONENT, largest, words_of

    first = tensors[0]
    if len({t.dtype for t in tensors}) > 1 or len({t.device for t in tensors}) > 1:
        return None
    words = [words_of(t) for t in tensors]
    if first.dtype not in EXPONENT or None in words:
        return None
    bits_of = largest(words, 8 // first.element_size(), first.device)
    return float(bits_of.to(_INTEGERS[first.element_size()]).view(first.dtype))


@torch.no_grad()
def rounded(
    tensors: Sequence[torch.Tensor], factors: Sequence[float], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each tensor times its factor will be in `like`'s dtype, multiplied in float32 and rounded once: its `bits`, (count,) int64, and whether it
    holds neither NaN nor infinity, (count,) bool; both on `like`'s device. Of values that are not finite the `bits` mean nothing."""
    if like.is_cuda and _launches() and {(t.dtype, t.device) for t in tensors} == {(tensors[0].dtype, like.device)}:
        from qerl_nvfp4.sums import EXPONENT, rounded_sums

        if {like.dtype, tensors[0].dtype} <= EXPONENT.keys():
            found, bad = rounded_sums([tensor.contiguous() for tensor in tensors], list(factors), like.dtype)
            return found, bad == 0
    sums, finite = [], []
    for tensor, factor in zip(tensors, factors, strict=True):
        alike = (tensor if factor == 1.0 else tensor.float() * factor).to(like)
        sums.append(bits(alike))
        finite.append(alike.isfinite().all())
    return torch.stack(sums), torch.stack(finite)
