"""What changes between rollouts, adapter and trained norms: its fingerprints, and the limits of its way to a server."""

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

#: bytes of one part of an update
CHUNK = 16 * 2**20
#: an adapter of rank 512 on a 70B model in bf16; more is not an adapter
MAX_TRANSFER = 16 * 2**30
#: the server's paths for the trainer alone (vllm/endpoint.py): a method of the worker extension, and the prefix cache
CALL, RESET = "/qerl/call", "/qerl/reset_prefix_cache"
#: that extension
WORKER_EXTENSION = "qerl_trl.rollout.vllm.worker.QeRLWorkerExtension"
#: bytes of one request to them: a line of JSON, and a part
MAX_MESSAGE = CHUNK + 2**20
#: seconds that one may take
MESSAGE_TIMEOUT = 300
#: vLLM's own switch of its batch-invariant mode, in the environment of the process that computes; ours follows it
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"


def batch_invariant() -> bool:
    """Whether an engine in this process computes batch-invariantly."""
    return bool(int(os.environ.get(BATCH_INVARIANT, "0")))


@dataclass(frozen=True)
class AdapterTensors:
    """One adapted layer: `a` (r, K) and `b` (N, r) unsharded, and the factor alpha/r (or alpha/sqrt(r)) of its output."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


#: integers of the size of an element
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
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


@torch.no_grad()
def all_bits(tensors: Sequence[torch.Tensor], sums: Callable[[torch.Tensor], torch.Tensor] = bits) -> torch.Tensor:
    """`bits` of each tensor (or `words`), (count,) int64 on their device. Small ones are summed together: their places in one running sum,
    subtracted."""
    found: list[torch.Tensor] = []
    where: list[int] = []  # the tensors' numbers in the order of `found`
    groups: dict[torch.dtype, tuple[list[int], list[torch.Tensor], list[int]]] = {}  # of each also the ends

    def finish(numbers: list[int], flat: list[torch.Tensor], ends: list[int]) -> None:
        running = nn.functional.pad(_integers(torch.cat(flat)).cumsum(0, dtype=torch.int64), (1, 0))
        found.append(running[torch.tensor([0, *ends]).to(running.device, non_blocking=True)].diff())
        where.extend(numbers)

    for number, tensor in enumerate(tensors):
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
    return together[torch.tensor(where).argsort().to(together.device, non_blocking=True)]


def changes(tensors: Iterable[torch.Tensor]) -> str:
    """Another text after a change of any of these tensors."""
    found = list(tensors)
    return _digest([str(len(found))], all_bits(found, words))


def fingerprint(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Of tensors by name, in order; reads each once and waits for the device once."""
    names, tensors = [], []
    for name, tensor in named:
        names.append(name)
        tensors.append(tensor)
    return _digest(names, all_bits(tensors))


def _digest(names: list[str], sums: torch.Tensor) -> str:
    return hashlib.blake2b(repr((names, sums.tolist())).encode(), digest_size=16).hexdigest()


def update_fingerprint(adapter: Mapping[str, AdapterTensors], norms: Mapping[str, torch.Tensor]) -> str:
    """Of an adapter and trained norms, as the trainer has them."""
    halves = ((f"{half}:{name}*{t.scaling}", getattr(t, half)) for name, t in adapter.items() for half in "ab")
    return fingerprint([*halves, *norms.items()])


def not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of the tensors that hold NaN or infinity; waits for the device once."""
    names, tensors = [], []
    for name, tensor in named:
        names.append(name)
        tensors.append(tensor.detach())
    if not names:
        return []
    return [name for name, good in zip(names, all_finite(tensors).tolist(), strict=True) if not good]


def all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether each of these tensors holds neither NaN nor infinity, (count,) bool on their device."""
    return torch.stack(torch._foreach_norm(list(tensors), math.inf)).isfinite()
