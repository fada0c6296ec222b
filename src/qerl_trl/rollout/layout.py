"""An update of a server as bytes: where in them each tensor of adapter and trained norms lies.

Both ends agree on the layout once, before the first update; after that only numbers travel, as one flat buffer that is made and taken apart
on the GPU in a few launches.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from .wire import MAX_TRANSFER, AdapterTensors

#: what a tensor is: of the adapter (a and b, alpha/r folded into b), or a norm's clean weight
_KINDS = ("norm", "a", "b")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: bytes that are summed into one number of an update's mark
_BLOCK = 2**16
#: tensors of the largest adapter
_MOST = 2**17


@dataclass(frozen=True)
class UpdateLayout:
    """The tensors of an update in order: (kind, name, dtype, shape) each; float32 before 16 bits, so that all are aligned.

    Args:
        entries: kind is "a" (r, K), "b" (N, r) or "norm" (K,); dtype a name of `torch`'s.
    """

    entries: tuple[tuple[str, str, str, tuple[int, ...]], ...]

    @classmethod
    def of(
        cls, adapter: Mapping[str, AdapterTensors], norms: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> "UpdateLayout":
        """For this adapter in `dtype`, and these norms in float32."""
        name = str(dtype).removeprefix("torch.")
        found = [("norm", key, "float32", tuple(weight.shape)) for key, weight in norms.items()]
        for half in "ab":
            found += [(half, key, name, tuple(getattr(t, half).shape)) for key, t in adapter.items()]
        return cls(tuple(found))

    def text(self) -> str:
        """As it travels; `parse` reads it."""
        return json.dumps(self.entries)

    @classmethod
    def parse(cls, text: str) -> "UpdateLayout":
        """What `text` wrote.

        Raises:
            `ValueError`: it is something else, or more than an adapter can be.
        """
        try:
            entries = tuple((kind, name, dtype, tuple(shape)) for kind, name, dtype, shape in json.loads(text))
        except (ValueError, TypeError) as error:
            raise ValueError(f"This is no layout of an update: {type(error).__name__}: {error}") from error
        for entry in entries:
            kind, name, dtype, shape = entry
            whole = all(type(size) is int and 0 < size <= MAX_TRANSFER for size in shape)
            if (
                kind not in _KINDS
                or type(name) is not str
                or dtype not in _DTYPES
                or not whole
                or not 0 < len(shape) < 3
            ):
                raise ValueError(
                    f"The layout has an entry {str(entry)[:200]!r}; expected a, b or norm, a name, one of {', '.join(_DTYPES)}, and one or "
                    "two sizes."
                )
        widths = [_DTYPES[dtype].itemsize for _, _, dtype, _ in entries]
        if widths != sorted(widths, reverse=True):
            raise ValueError("The layout has 32-bit numbers behind 16-bit ones, where they would not be aligned.")
        found = cls(entries)
        names = {kind: [e[1] for e in entries if e[0] == kind] for kind in _KINDS}
        if any(len(set(those)) != len(those) for those in names.values()) or len(entries) > _MOST:
            raise ValueError(f"The layout names a tensor twice, or has more than {_MOST} of them.")
        if set(names["a"]) != set(names["b"]):
            raise ValueError(
                f"The layout has only half of the adapter for {sorted(set(names['a']) ^ set(names['b']))[:4]}."
            )
        if found.nbytes > MAX_TRANSFER:
            raise ValueError(
                f"The layout has {found.nbytes} bytes, more than the {MAX_TRANSFER} of the largest adapter."
            )
        return found

    @cached_property
    def _sizes(self) -> list[int]:
        return [torch.Size(shape).numel() * _DTYPES[dtype].itemsize for _, _, dtype, shape in self.entries]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of an update: those of its tensors, and zeros up to a whole block."""
        return -(-sum(self._sizes) // _BLOCK) * _BLOCK

    @cached_property
    def _latest(self) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """The buffer that was looked at last, and its views: an update has hundreds, and every one is made in the same buffer."""
        return []

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a buffer: uint8 (nbytes,), whose bytes they share."""
        if not (self._latest and self._latest[0][0] is flat):
            starts = accumulate(self._sizes, initial=0)
            views = [
                flat[start : start + size].view(_DTYPES[dtype]).view(shape)
                for start, size, (_, _, dtype, shape) in zip(starts, self._sizes, self.entries, strict=False)
            ]
            self._latest[:] = [(flat, views)]
        return self._latest[0][1]

    @torch.no_grad()
    def pack(
        self, adapter: Mapping[str, AdapterTensors], norms: Mapping[str, torch.Tensor], flat: torch.Tensor
    ) -> None:
        """Write an update into `flat`, uint8 (nbytes,) on the tensors' device; alpha/r goes into b, in float32."""
        scaled = [t.b.float() for t in adapter.values()]
        if scaled:
            scaled = list(torch._foreach_mul(scaled, [t.scaling for t in adapter.values()]))
        sources = [*norms.values(), *(t.a for t in adapter.values()), *scaled]
        if sources:
            torch._foreach_copy_(self.views(flat), [source.detach() for source in sources])

    def unpack(self, flat: torch.Tensor) -> tuple[dict[str, AdapterTensors], dict[str, torch.Tensor]]:
        """Adapter and norms in `flat`, whose bytes they share."""
        parts: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in _KINDS}
        for (kind, name, _, _), tensor in zip(self.entries, self.views(flat), strict=True):
            parts[kind][name] = tensor
        return {name: AdapterTensors(a, parts["b"][name], 1.0) for name, a in parts["a"].items()}, parts["norm"]


def mark(flat: torch.Tensor) -> str:
    """Another text after a change of any of these bytes (uint8, whole blocks): damage on the way; signatures are what malice meets."""
    sums = flat.view(torch.int64).view(-1, _BLOCK // 8).sum(1) if flat.numel() else flat.long()
    return hashlib.blake2b(sums.cpu().numpy().tobytes(), digest_size=16).hexdigest()


def as_tensor(buffer: Any) -> torch.Tensor:
    """uint8 (bytes,) over a writable buffer."""
    return torch.frombuffer(buffer, dtype=torch.uint8)
