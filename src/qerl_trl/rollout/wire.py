"""What changes between rollouts, adapter and trained norms, with its fingerprints; and the names that a server is told."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from .sums import all_bits, all_finite

#: the server's paths for the trainer alone (vllm/endpoint.py): a method of the worker extension, and the port for updates from another host
CALL, LISTEN = "/qerl/call", "/qerl/listen"
#: the worker extension
WORKER_EXTENSION = "qerl_trl.rollout.vllm.worker.QeRLWorkerExtension"
#: seconds that a request to them may take
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


def changes(tensors: Iterable[torch.Tensor]) -> str:
    """Another text after a change of any of these tensors; by sums of each, so not where values only change places within one."""
    found = list(tensors)
    return _digest([str(len(found))], all_bits(found))


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


@dataclass(frozen=True)
class Update:
    """A trained adapter and trained norms, by canonical names, on their way into an engine; as they are while it is put."""

    adapter: Mapping[str, AdapterTensors]
    norms: Mapping[str, torch.Tensor]

    @cached_property
    def fingerprint(self) -> str:
        return update_fingerprint(self.adapter, self.norms)


def not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of the tensors that hold NaN or infinity; waits for the device once."""
    names, tensors = [], []
    for name, tensor in named:
        names.append(name)
        tensors.append(tensor.detach())
    if not names:
        return []
    return [name for name, good in zip(names, all_finite(tensors).tolist(), strict=True) if not good]
