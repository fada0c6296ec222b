"""Sums of tensors read as integers: what a tensor's content is known by, exact whatever the order of the sum.

On a GPU for which the kernels are made, all tensors are read in one launch (`qerl_nvfp4.sums`); a tensor that it cannot read, and every one elsewhere,
is summed by PyTorch, to the same number.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

#: integers of the size of an element
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: of them, in 8 bytes; single bytes are read four at a time
_LANES = {1: 2, 2: 4, 4: 2, 8: 1}
#: elements of small tensors that are copied together, to be read at once
_TOGETHER = 2**22
#: elements of a large tensor that are summed at a time: PyTorch writes each of them as 8 bytes first
_AT_ONCE = 2**24


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.element_size() == 1 and tensor.is_contiguous() and tensor.numel() % 4 == 0:
        tensor = tensor.view(-1).view(torch.int32)  # a quarter of the additions
    return tensor.view(_INTEGERS[tensor.element_size()])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor's elements read as integers, a scalar int64 on its device: exact, whatever the order of the sum.

    A weight that is another one, was scaled, or was written by half has another sum; zeros add nothing.
    """
    parts = _integers(tensor).reshape(-1).split(_AT_ONCE)
    return torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()


def words(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor's bytes read as 8-byte integers, a scalar int64 on its device. As `bits`, but nothing is widened on the way, so that it takes
    one reading of the memory; to be compared only with that of the same tensor at another time: another layout of the same elements has
    another sum."""
    return _eights(tensor).sum() if _in_eights(tensor) else bits(tensor)


def _in_eights(tensor: torch.Tensor) -> bool:
    size = tensor.element_size()
    return tensor.is_contiguous() and tensor.numel() * size % 8 == 0 and tensor.storage_offset() * size % 8 == 0


def _eights(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.int64)


@functools.cache
def _launches() -> bool:
    """Whether the kernels' package can sum on this process's GPUs."""
    import qerl_nvfp4

    return qerl_nvfp4.is_available()


def _launched_floats() -> Collection[torch.dtype]:
    from qerl_nvfp4.sums import EXPONENT

    return EXPONENT


def _of_launches(tensors: Sequence[torch.Tensor], whole: bool) -> tuple[list[int], list[torch.Tensor]]:
    """Numbers of the tensors that are summed by a launch, and the sums of each launch, in that order."""
    if not (tensors and tensors[0].is_cuda and _launches()):
        return [], []
    from qerl_nvfp4.sums import sums, words_of

    places = [words_of(tensor) for tensor in tensors]
    lanes = [1] * len(tensors) if whole else [_LANES[tensor.element_size()] for tensor in tensors]
    numbers: list[int] = []
    found: list[torch.Tensor] = []
    for kind in dict.fromkeys(lanes):  # of integers in a word
        mine = [n for n, place in enumerate(places) if place is not None and lanes[n] == kind]
        if mine:
            numbers += mine
            found.append(sums([places[n] for n in mine], kind, tensors[0].device))
    return numbers, found


def launch_each(dtype: torch.dtype) -> None:
    """Every launch of an engine in `dtype` once, with tensors on the meta device: to be compiled with the engine's other kernels. Of an adapter in
    float32, as it trains."""
    from qerl_nvfp4.sums import rounded_sums, sums

    meta = torch.device("meta")
    for lanes in sorted({1, *_LANES.values()}):
        sums([(0, 1)], lanes, meta)
    rounded_sums([torch.empty(1, device=meta)], [1.0], dtype)


@torch.no_grad()
def all_bits(tensors: Sequence[torch.Tensor], sums: Callable[[torch.Tensor], torch.Tensor] = bits) -> torch.Tensor:
    """`bits` of each tensor (or `words`), (count,) int64 on their device. Small ones that no launch sums are summed together: their places in
    one running sum, subtracted."""
    where, found = _of_launches(tensors, sums is words)  # numbers of the tensors in the order of `found`
    if len(where) == len(tensors) and len(found) == 1:
        return found[0]
    done = set(where)
    groups: dict[torch.dtype, tuple[list[int], list[torch.Tensor], list[int]]] = {}  # of each also the ends

    def finish(numbers: list[int], flat: list[torch.Tensor], ends: list[int]) -> None:
        running = nn.functional.pad(_integers(torch.cat(flat)).cumsum(0, dtype=torch.int64), (1, 0))
        found.append(running[torch.tensor([0, *ends]).to(running.device, non_blocking=True)].diff())
        where.extend(numbers)

    for number, tensor in enumerate(tensors):
        if number in done:
            continue
        if sums is words and _in_eights(tensor):
            tensor = _eights(tensor)
        count = tensor.numel()
        if count > _TOGETHER // 4 or tensor.element_size() == 1:  # the latter are mostly large, and read four at a time
            found.append(sums(tensor)[None])
            where.append(number)
            continue
        numbers, flat, ends = groups.setdefault(tensor.dtype, ([], [], []))
        numbers.append(number)
        flat.append(tensor.reshape(-1))
        ends.append(count + (ends[-1] if ends else 0))
        if ends[-1] > _TOGETHER:
            finish(*groups.pop(tensor.dtype))
    for group in groups.values():
        finish(*group)
    if not found:
        return torch.zeros(0, dtype=torch.int64)
    together = torch.cat(found)
    if where == sorted(where):
        return together
    return together[torch.tensor(where).argsort().to(together.device, non_blocking=True)]


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
    from qerl_nvfp4.sums import largest, words_of

    first = tensors[0]
    if len({t.dtype for t in tensors}) > 1 or len({t.device for t in tensors}) > 1:
        return None
    words = [words_of(t) for t in tensors]
    if first.dtype not in _launched_floats() or None in words:
        return None
    bits_of = largest(words, 8 // first.element_size(), first.device)
    return float(bits_of.to(_INTEGERS[first.element_size()]).view(first.dtype))


@torch.no_grad()
def rounded(
    tensors: Sequence[torch.Tensor], factors: Sequence[float], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each tensor times its factor will be in `like`'s dtype, multiplied in float32 and rounded once: its `bits`, (count,) int64, and whether it
    holds neither NaN nor infinity, (count,) bool; both on `like`'s device. Of values that are not finite the `bits` mean nothing."""
    count = len(tensors)
    sums = torch.zeros(count, dtype=torch.int64, device=like.device)
    finite = torch.ones(count, dtype=torch.bool, device=like.device)
    groups: dict[torch.dtype, list[int]] = {}
    floats = _launched_floats() if like.is_cuda and like.dtype in _launched_floats() and _launches() else ()
    for number, tensor in enumerate(tensors):
        if tensor.dtype in floats and tensor.device == sums.device:
            groups.setdefault(tensor.dtype, []).append(number)
        elif tensor.numel():
            alike = (tensor if factors[number] == 1.0 else tensor.float() * factors[number]).to(like)
            sums[number], finite[number] = bits(alike), all_finite([alike])[0]
    for numbers in groups.values():
        from qerl_nvfp4.sums import rounded_sums

        found, bad = rounded_sums([tensors[n].contiguous() for n in numbers], [factors[n] for n in numbers], like.dtype)
        if len(numbers) == count:
            return found, bad == 0
        where = torch.tensor(numbers).to(like.device, non_blocking=True)
        sums[where], finite[where] = found, bad == 0
    return sums, finite
