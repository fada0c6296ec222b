"""The trained weights, an adapter or all of them, and their way from the trainer's model into an engine."""

import contextlib
import functools
import hashlib
import json
import mmap
import os
import secrets
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, cast

import torch
from peft import PeftModel
from torch import nn

from ..noise.hooks import NoiseDraw
from ..support.names import canonical_name, full_tensor, full_tensors, local_tensor
from .engine import AdapterTensors, Engine, Update, changes, fingerprint, word_sum
from .spec import active_adapter, check_servable, rollout_layers, trained_norms

#: context manager with the whole tensors of sharded parameters
Gather = Callable[[list[torch.Tensor]], AbstractContextManager]


class Trained(ABC):
    """The trained part of a model, found once at start: wrappers such as DDP and FSDP keep the modules."""

    @abstractmethod
    def parameters(self) -> list[torch.Tensor]:
        """Return all trained tensors, with their current values."""

    @abstractmethod
    def put(
        self, engine: Engine, gather: Gather, noisy: Sequence[str] = (), draw: NoiseDraw | None = None
    ) -> tuple[str, float | None]:
        """Copy the trained weights into the engine, and put the noise of `draw`, if any, on its norms `noisy`. Returns
        the weights' fingerprint and the result of `Engine.put`. Collective for sharded parameters."""

    @abstractmethod
    def fingerprint(self, parameters: Sequence[torch.Tensor]) -> str:
        """Return the fingerprint that `put` returns, from whole `parameters`. Makes no copies: slower than the sums."""

    def whole(self) -> bool:
        """Whether nothing is sharded; `stamp` then equals the fingerprint from `put`."""
        return _whole(self.parameters())

    def stamp(self) -> str:
        """Return a digest of this process's tensors or shards, to detect any change: an update, a load, a copy. By
        sums, so a permutation within one tensor does not change it."""
        parameters = self.parameters()
        return self.fingerprint(parameters) if _whole(parameters) else changes(map(local_tensor, parameters))


class TrainedAdapter(Trained):
    """The active LoRA adapter of a PEFT model and the norms in its `modules_to_save`."""

    def __init__(self, model: nn.Module) -> None:
        check_servable(model)
        self.name = active_adapter(model)
        self.layers = {
            name: (layer, cast(nn.Linear, layer.lora_A[self.name]), cast(nn.Linear, layer.lora_B[self.name]))
            for name, layer in rollout_layers(model).items()
        }
        self.norms = cast(dict[str, nn.RMSNorm], trained_norms(model))
        self._check_complete(model)

    def _check_complete(self, model: nn.Module) -> None:
        """Raise `ValueError` for trained tensors that a sync would not copy."""
        mine, others = set(map(id, self.parameters())), set(cast(PeftModel, model).peft_config) - {self.name}
        trained = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in mine]
        if left := [name for name in trained if not others & {*name.split(".")}]:
            layers = sorted({canonical_name(name.partition(".lora_")[0]) for name in left})
            raise ValueError(
                f"{len(left)} trained tensors would never reach vLLM, which carries LoRA on linear layers and norms in "
                f"modules_to_save: those of {', '.join(layers[:4])}. Take them out of target_modules, or use "
                "use_vllm=False."
            )

    def parameters(self) -> list[torch.Tensor]:
        modules: list[nn.Linear | nn.RMSNorm] = [half for _, down, up in self.layers.values() for half in (down, up)]
        # hundreds of tensors twice per step: the module's own dict is faster than its attribute
        return [cast(torch.Tensor, module._parameters["weight"]) for module in [*modules, *self.norms.values()]]

    def put(
        self, engine: Engine, gather: Gather, noisy: Sequence[str] = (), draw: NoiseDraw | None = None
    ) -> tuple[str, float | None]:
        parameters = self.parameters()
        with gather(parameters):
            update = self._update(full_tensors(parameters))
            effective = engine.put(update, noisy, draw)
            return update.fingerprint, effective

    def fingerprint(self, parameters: Sequence[torch.Tensor]) -> str:
        return self._update(parameters).fingerprint

    def _update(self, parameters: Sequence[torch.Tensor]) -> Update:
        following = iter(parameters)
        adapter = {
            name: AdapterTensors(next(following), next(following), layer.scaling[self.name])
            for name, (layer, _, _) in self.layers.items()
        }
        return Update(adapter, {name: next(following) for name in self.norms})


class TrainedWeights(Trained):
    """Every trainable weight of a model without an adapter (`base_format="full"`), tied ones once."""

    def __init__(self, model: nn.Module) -> None:
        self.places: list[tuple[str, nn.Module, str]] = []
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    self.places.append((canonical_name(f"{prefix}.{key}" if prefix else key), module, key))

    def parameters(self) -> list[torch.Tensor]:
        return [cast(torch.Tensor, module._parameters[key]) for _, module, key in self.places]

    def put(
        self, engine: Engine, gather: Gather, noisy: Sequence[str] = (), draw: NoiseDraw | None = None
    ) -> tuple[str, float | None]:
        sums: list[tuple[str, torch.Tensor]] = []

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name, module, key in self.places:
                parameter = cast(torch.Tensor, module._parameters[key])
                with gather([parameter]):
                    whole = full_tensor(parameter)
                    sums.append((name, word_sum(whole)))
                    yield name, whole

        engine.put_weights(stream())
        return fingerprint(sums), engine.put(None, noisy, draw)

    def fingerprint(self, parameters: Sequence[torch.Tensor]) -> str:
        return fingerprint((name, parameter) for (name, _, _), parameter in zip(self.places, parameters, strict=True))


def _whole(parameters: Sequence[torch.Tensor]) -> bool:
    return {*map(type, parameters)} <= {nn.Parameter}


#: elements per partial count; each takes 4 bytes meanwhile
_CHUNK = 2**26


class WeightSummary(NamedTuple):
    """One weight, or one rank's shard of it. `kind`: "nvfp4" or "dense" (linear layers), "bias", "norm" or "embedding"
    (the head too). `numel`: elements without padding; NVFP4: packed bytes. `sums`: [`checksum`]; NVFP4: of codes and
    block scales. `divisor`: NVFP4's global scale."""

    kind: str
    numel: int
    sums: list[int]
    divisor: float = 0.0


def checksum(tensor: torch.Tensor) -> list[int]:
    """Return sums of squared byte values, one per byte of an element (two for bf16); sums of shards add up."""
    bytes_EB = tensor.detach().contiguous().view(torch.uint8).view(-1, tensor.element_size())
    squares = torch.arange(256, dtype=torch.int64, device=tensor.device) ** 2
    return [
        sum(int((torch.bincount(part.int(), minlength=256) * squares).sum()) for part in column.split(_CHUNK))
        for column in bytes_EB.unbind(1)
    ]


def summary(kind: str, *parts: torch.Tensor, divisor: float = 0.0) -> WeightSummary:
    """Summarize a weight, or packed (N, K/2) and block scales (N, K/16); norms as float32, for any stored dtype."""
    sums = [value for part in parts for value in checksum(part.float() if kind == "norm" else part)]
    return WeightSummary(kind, parts[0].numel(), sums, divisor)


#: compute dtypes by their names in vLLM
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: bytes per partial sum of an update's checksum
_BLOCK = 2**16
_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class UpdateLayout:
    """Layout of an update's tensors: (kind, name, dtype, shape) each, kind "a" (r, K), "b" (N, r) or "norm" (K,).
    Float32 comes before 16 bits, for alignment."""

    entries: tuple[tuple[str, str, str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, update: Update, dtype: torch.dtype) -> "UpdateLayout":
        """Make the layout for an adapter in `dtype` and norms in float32."""
        name = str(dtype).removeprefix("torch.")
        found = [("norm", key, "float32", tuple(weight.shape)) for key, weight in update.norms.items()]
        found += [("a", key, name, tuple(t.a.shape)) for key, t in update.adapter.items()]
        found += [("b", key, name, tuple(t.b.shape)) for key, t in update.adapter.items()]
        return cls(tuple(found))

    @cached_property
    def text(self) -> str:
        """JSON, for `parse`."""
        return json.dumps(self.entries)

    @classmethod
    @functools.lru_cache(maxsize=1)
    def parse(cls, text: str) -> "UpdateLayout":
        """Undo `text`. Cached, as all updates of one trainer have the same layout."""
        return cls(tuple((kind, name, dtype, tuple(shape)) for kind, name, dtype, shape in json.loads(text)))

    @cached_property
    def _sizes(self) -> list[int]:
        return [torch.Size(shape).numel() * DTYPES[dtype].itemsize for _, _, dtype, shape in self.entries]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of an update: its tensors, zero-padded to a whole block."""
        return -(-sum(self._sizes) // _BLOCK) * _BLOCK

    @cached_property
    def _latest(self) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        return []  # latest buffer and its hundreds of views, for the next update in the same buffer

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors as views of a buffer, uint8 (nbytes,)."""
        if not (self._latest and self._latest[0][0] is flat):
            parts = zip(flat[: sum(self._sizes)].split(self._sizes), self.entries, strict=True)
            self._latest[:] = [(flat, [part.view(DTYPES[dtype]).view(shape) for part, (_, _, dtype, shape) in parts])]
        return self._latest[0][1]

    @torch.no_grad()
    def pack(self, update: Update, flat: torch.Tensor) -> None:
        """Write an update into `flat`, uint8 (nbytes,) on the tensors' device; alpha/r goes into b, in float32."""
        adapted, views = update.adapter.values(), self.views(flat)
        sources = [*update.norms.values(), *(t.a for t in adapted)]
        halves = [(t.b.detach().float(), t.scaling) for t in adapted]
        if flat.is_cpu:  # one at a time, within the cache: a float32 copy of all is slower than the rest
            for (b, factor), view in zip(halves, views[len(sources) :], strict=True):
                torch.mul(b, factor, out=view)
        elif halves:
            sources += torch._foreach_mul(*zip(*halves, strict=True))
        if sources:
            torch._foreach_copy_(views[: len(sources)], [source.detach() for source in sources])

    def unpack(self, flat: torch.Tensor) -> tuple[dict[str, AdapterTensors], dict[str, torch.Tensor]]:
        """Return adapter and norms as views of `flat`."""
        parts: dict[str, dict[str, torch.Tensor]] = {"norm": {}, "a": {}, "b": {}}
        for (kind, name, _, _), tensor in zip(self.entries, self.views(flat), strict=True):
            parts[kind][name] = tensor
        return {name: AdapterTensors(a, parts["b"][name], 1.0) for name, a in parts["a"].items()}, parts["norm"]


def checksum_of(flat: torch.Tensor) -> str:
    """Return a digest of bytes (uint8, whole blocks). Waits for the device."""
    sums = flat.view(torch.int64).view(-1, _BLOCK // 8).sum(1) if flat.numel() else flat.long()
    return hashlib.blake2b(sums.cpu().numpy().tobytes(), digest_size=16).hexdigest()


class SharedMemory:
    """A file in `/dev/shm` with access for this user only, mapped as `data`, uint8 (size,), pinned for a GPU. `name`
    opens another process's file. Python's `multiprocessing.shared_memory` would remove it when either process ends."""

    def __init__(self, size: int, device: torch.device, name: str | None = None) -> None:
        self.size, self.name = size, name or f"qerl-{secrets.token_hex(16)}"
        self._path = _SHM / os.path.basename(self.name)  # the name may come over the network
        descriptor = os.open(self._path, os.O_RDWR | (0 if name else os.O_CREAT | os.O_EXCL), 0o600)
        try:
            if name is None:
                weakref.finalize(self, self._path.unlink, missing_ok=True)
                os.posix_fallocate(descriptor, 0, size)  # else too little memory kills the process later
            self.data = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        finally:
            os.close(descriptor)
        self.pinned = device.type == "cuda" and _pin(self.data)
        if self.pinned:
            weakref.finalize(self, _unpin, self.data)

    def unlink(self) -> None:
        """Remove the file; existing mappings keep the memory, and a SIGKILL leaves no file."""
        self._path.unlink(missing_ok=True)

    @staticmethod
    def is_here(name: str) -> bool:
        return bool(name) and os.access(_SHM / os.path.basename(name), os.R_OK | os.W_OK)


def _pin(data: torch.Tensor) -> bool:
    if int(torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # CUDA keeps the error for the next kernel launch
        torch.zeros(1, device="cuda").add_(1)
    return False


def _unpin(data: torch.Tensor) -> None:
    with contextlib.suppress(Exception):  # the driver may be gone at the end of the process
        torch.cuda.cudart().cudaHostUnregister(data.data_ptr())
