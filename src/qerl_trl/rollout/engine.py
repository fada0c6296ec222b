"""Interface between trainer and engine, the only one used in `rollout/`.

| implementation | where | when |
|---|---|---|
| `InProcessEngine` | vllm/engine.py | colocate mode: vLLM in this process, its weights shared with the trainer |
| `ServerEngine` | server.py | server mode, main process: `vllm serve` with our plugin |
| `RankWithoutEngine` | here | server mode, every other process: joins the main process's requests |

Every process calls every method, in the same order. Changes to an engine (`put_...`, `set_noise`) invalidate cached
attention states: call `reset_prefix_cache` before the next `generate`. `put` makes all three calls in one request.
"""
# ruff: noqa: B027  (an engine overrides only the methods it needs)

import functools
import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from ..noise.hooks import NoiseDraw

#: URL path for the trainer's requests (vllm/worker.py): POST calls the worker extension, PUT uploads an update
CALL = "/qerl/call"
#: class that `vllm serve` mixes into its workers
WORKER_EXTENSION = "qerl_trl.rollout.vllm.worker.QeRLWorkerExtension"
#: time limit of a request to `CALL`, in seconds
MESSAGE_TIMEOUT = 300
#: vLLM's environment variable for batch-invariant mode; our kernels obey it too
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"


def batch_invariant() -> bool:
    """Whether an engine in this process computes batch-invariantly."""
    return bool(int(os.environ.get(BATCH_INVARIANT, "0")))


@dataclass(frozen=True)
class AdapterTensors:
    """One adapted layer: unsharded `a` (r, K) and `b` (N, r); `scaling`: alpha/r (or alpha/sqrt(r))."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


def changes(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of the tensors' sums; a permutation within one tensor does not change it."""
    return fingerprint(("", tensor) for tensor in tensors)


def fingerprint(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a digest of named tensors, in order; reads each once, with one device sync."""
    found = list(named)
    names, tensors = [name for name, _ in found], [tensor for _, tensor in found]
    on_cpu = bool(tensors) and tensors[0].is_cpu
    sums = torch.stack([word_sum(tensor).cpu() for tensor in tensors]) if on_cpu else all_bits(tensors)
    return hashlib.blake2b(repr((names, sums.tolist())).encode(), digest_size=16).hexdigest()


def word_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum that changes with the content: `bits` on a GPU, on a CPU the faster sum of 8-byte words. The two
    differ: compare only sums of the same tensor on the same device."""
    tensor = tensor.detach()
    start = tensor.storage_offset() * tensor.element_size()
    if tensor.is_cpu and tensor.is_contiguous() and tensor.nbytes % 8 == start % 8 == 0:
        return tensor.view(-1).view(torch.int64).sum()
    return bits(tensor)


def update_fingerprint(adapter: Mapping[str, AdapterTensors], norms: Mapping[str, torch.Tensor]) -> str:
    """Return the fingerprint of the trainer's adapter and trained norms."""
    halves = []
    for name, t in adapter.items():
        halves += [(f"a:{name}*{t.scaling}", t.a), (f"b:{name}*{t.scaling}", t.b)]
    return fingerprint([*halves, *norms.items()])


@dataclass(frozen=True)
class Update:
    """A trained adapter and trained norms, by canonical names, during a sync into an engine."""

    adapter: Mapping[str, AdapterTensors]
    norms: Mapping[str, torch.Tensor]

    @cached_property
    def fingerprint(self) -> str:
        return update_fingerprint(self.adapter, self.norms)


def not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of the tensors with NaN or infinity; one device sync."""
    found = [(name, tensor.detach()) for name, tensor in named]
    finite = all_finite([tensor for _, tensor in found]).tolist() if found else []
    return [name for (name, _), good in zip(found, finite, strict=True) if not good]


class RolloutError(RuntimeError):
    """The engine died, hung, or disagrees with the trainer. Training cannot continue; resume from a checkpoint."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, greedy by default. `seed`: prompt number i of a call uses seed + i."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Seeds:
    """Seeds for the completions of one call, computed from `entropy`: seed of the run, step and number of the call."""

    entropy: tuple[int, ...]

    def of(self, count: int) -> list[int]:
        """Return `count` seeds, each in [0, 2^63)."""
        return [int(seed) for seed in np.random.SeedSequence(self.entropy).generate_state(count, np.uint64) >> 1]


class Completion(NamedTuple):
    """Token ids (the end-of-sequence token included, if one came) and the log-probability of each, in nats."""

    tokens: list[int]
    logps: list[float]


class Contents(NamedTuple):
    """State of an engine.

    received: fingerprint of the latest accepted update, None before the first.
    damaged: names of the adapter buffers that differ in bits from the update.
    draw: current noise, None before the first.
    """

    received: str | None
    damaged: list[str]
    draw: NoiseDraw | None


class Engine(ABC):
    """One engine, seen from a process of the trainer."""

    def put_adapter(self, adapter: Mapping[str, AdapterTensors], norms: Mapping[str, torch.Tensor]) -> None:
        """Replace the adapter, by canonical layer names, and the clean weights of the trained norms. Layers missing
        from `adapter` lose theirs; current noise stays on. Raises `RuntimeError` or `ValueError` if the engine
        refuses the update; its state is then unchanged, bit for bit."""

    def put_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace weights of a model trained without an adapter, by canonical names, if the engine supports it. Current
        noise stays on. Raises [`RolloutError`] if the engine has other weights afterwards."""

    def set_noise(self, norms: Sequence[str], draw: NoiseDraw) -> float | None:
        """Put the noise of `draw` on `norms` (canonical names, the same in every call); sigma 0 restores every bit.
        Returns the rms of the noise added to the engine's weights; None in a process without an engine."""

    def reset_prefix_cache(self) -> None:
        """Forget cached attention states. Raises [`RolloutError`] if the engine refuses."""

    def put(self, update: Update | None, noisy: Sequence[str] = (), draw: NoiseDraw | None = None) -> float | None:
        """Call `put_adapter` with `update` and `set_noise` with `draw` on the norms `noisy` (each unless None), then
        `reset_prefix_cache`. Returns the result of `set_noise`; None without a draw. A refused update has no effect."""
        if update is not None:
            self.put_adapter(update.adapter, update.norms)
        effective = None if draw is None else self.set_noise(noisy, draw)
        self.reset_prefix_cache()
        return effective

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """Complete each of this process's prompts (token ids) once, with the current adapter and noise."""

    @abstractmethod
    def contents(self) -> Contents | None:
        """Read the engine's state from its weights; None in a process without an engine."""

    @abstractmethod
    def trl_attributes(self) -> dict[str, Any]:
        """Return the attributes that TRL's `VLLMGeneration.generate` reads: `llm` or `vllm_client`."""

    def sleep(self) -> None:
        """Free generation memory. Only `wake` and `close` may be called while asleep."""

    def wake(self) -> None:
        """Undo `sleep`; no-op when awake. Raises [`RolloutError`] if the weights changed during sleep."""

    @abstractmethod
    def close(self) -> None:
        """Release the engine. Safe to call twice."""


class RankWithoutEngine(Engine):
    """A process without its own engine: the main process updates the server and broadcasts the completions."""

    def contents(self) -> Contents | None:
        return None

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        counts, _ = gather_prompts(prompts)
        payload: list[list[Completion] | None] = [None]
        broadcast_object_list(payload, from_process=0)
        assert payload[0] is not None, "the main process got no completions from the server; its error says why"
        rank = PartialState().process_index
        start = sum(counts[:rank])
        return payload[0][start : start + counts[rank]]

    def trl_attributes(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Do nothing: this process has no engine."""


def gather_prompts(prompts: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Return the number of prompts per process, and all prompts in rank order."""
    return gather_object([len(prompts)]), gather_object([list(prompt) for prompt in prompts])


#: integer dtype by element size in bytes
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: integers per 8 bytes; single bytes are read four at a time
_LANES = {1: 2, 2: 4, 4: 2, 8: 1}
#: elements per partial sum: PyTorch widens each to 8 bytes first
_AT_ONCE = 2**24


# Integer sums are exact in any order. GPUs with our kernels read all tensors in one launch.


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's elements read as integers, a scalar int64 on its device. Zero padding adds 0."""
    tensor = tensor.detach()
    if tensor.element_size() == 1 and tensor.is_contiguous() and tensor.numel() % 4 == 0:
        tensor = tensor.view(-1).view(torch.int32)  # a quarter of the additions
    parts = tensor.view(_INTEGERS[tensor.element_size()]).reshape(-1).split(_AT_ONCE)
    return torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()


@functools.cache
def _launches() -> bool:
    """Whether our kernels can sum on this process's GPUs."""
    import qerl_nvfp4

    return qerl_nvfp4.is_available()


def launch_each(dtype: torch.dtype) -> None:
    """Compile the checksum kernels for an engine in `dtype` with a float32 adapter: call each on meta tensors."""
    from qerl_nvfp4.sums import rounded_sums, sums

    meta = torch.device("meta")
    for lanes in (2, 4):  # no engine has 8-byte integers
        sums([(0, 1)], lanes, meta)
    rounded_sums([torch.empty(1, device=meta)], [1.0], dtype)


@torch.no_grad()
def all_bits(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `bits` of each tensor, (count,) int64 on the device of the first."""
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
    """Whether each tensor is free of NaN and infinity, (count,) bool on their device."""
    return torch.stack(torch._foreach_norm(list(tensors), math.inf)).isfinite()


@torch.no_grad()
def largest_magnitude(tensors: Sequence[torch.Tensor]) -> float | None:
    """Return the largest magnitude in float tensors, NaN if any is NaN; None if one launch cannot do it. One sync."""
    if not (tensors and tensors[0].is_cuda and _launches()):
        return None
    if any(hasattr(kind, "to_local") for kind in {type(t) for t in tensors}):
        return None  # sharded over processes
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
    """Multiply each tensor by its factor in float32 and round it once to `like`'s dtype. Returns the `bits`, (count,)
    int64 (meaningless for NaN and infinity), and whether all values are finite, (count,) bool, on `like`'s device."""
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


#: environment variable with the shared secret of server and trainer
SECRET = "QERL_SERVER_SECRET"


def secret() -> str:
    """Return this process's server secret, sent as a bearer token. Raises `RuntimeError` if unset."""
    value = os.environ.get(SECRET, "").strip()
    if not value:
        raise RuntimeError(
            f"{SECRET} is not set, so anybody could change what the server computes. Set it for server and trainer:\n"
            f"""export {SECRET}=$(python3 -c "import secrets; print(secrets.token_hex(32))")"""
        )
    return value
