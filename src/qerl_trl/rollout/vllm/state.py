"""Mutable state of one vLLM model on one tensor-parallel rank: adapter buffers and noisy norms.

Every change is an in-place copy into the engine's own tensors, so captured CUDA graphs and compiled code stay valid.
Callers must reset the engine's prefix cache afterwards: its keys ignore the weights.

The whole update is checked before the first copy (names, shapes, dtypes, finite values): a refused one changes nothing.
The expected bit sums of the adapter buffers come from the update, so that `contents` detects a lost or partial copy.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from ...noise.hooks import NoiseDraw
from ..engine import (
    AdapterTensors,
    Contents,
    RolloutError,
    all_bits,
    fingerprint,
    not_finite,
    rounded,
    update_fingerprint,
    word_sum,
)
from .linear import AdaptedMethod, Layer, parts_of
from .loader import Renaming
from .norm import find_norms

#: elements of an adapter per batch of copies
_TOGETHER = 2**24


class _Slot:
    """Place of one checkpoint layer: shard number `shard` of vLLM's `layer`, with views of its part of the buffers.

    a_RK (padded r, K of this rank), b_NR (N of this rank, padded r). `rows` and `columns`: this rank's part of the
    unsharded B and A, None for all of it.
    """

    def __init__(self, layer: Layer, shard: int) -> None:
        self.layer = layer
        self.rank = layer.adapter_b.shape[1]
        start = sum(layer.qerl_splits[:shard])
        self.a_RK = layer.adapter_a[shard * self.rank : (shard + 1) * self.rank]
        self.b_NR = layer.adapter_b[start : start + layer.qerl_splits[shard]]
        sharded = parts_of(layer)[0] > 1
        self.rows: slice | None
        self.columns: slice | None
        self.rows, self.columns = layer.quant_method.shard_slices(layer, shard) if sharded else (None, None)
        self.full_n, self.full_k = layer.quant_method.full_sizes(layer, shard)

    def refuses(self, name: str, tensors: AdapterTensors) -> str | None:
        """Return why these tensors cannot be this layer's adapter, or None."""
        a, b, rank = tensors.a, tensors.b, tensors.a.shape[0]
        if rank > self.rank:
            return f"{name} has rank {rank}, but the engine reserved {self.rank}"
        if (*a.shape, *b.shape) != (rank, self.full_k, self.full_n, rank):
            return f"{name} has A {tuple(a.shape)} and B {tuple(b.shape)}; the layer is {self.full_n} x {self.full_k}"
        return None

    def part(self, tensors: AdapterTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's A (r, K) and B (N, r), views of the whole tensors."""
        a, b = tensors.a.detach(), tensors.b.detach()
        if self.rows is not None:
            a, b = a[:, self.columns], b[self.rows]
        return a, b

    def filled(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffers' part for LoRA rank `rank`, and clear the rest: a larger adapter may have used it."""
        if rank < self.rank:
            self.a_RK[rank:].zero_()
            self.b_NR[:, rank:].zero_()
        return self.a_RK[:rank], self.b_NR[:, :rank]


class RolloutState:
    """Mutable state of this rank's vLLM model. `known`: names of the trainer's modules, if known."""

    def __init__(self, model: Any, renaming: Renaming | None = None, known: Collection[str] = ()) -> None:
        self.model = model
        #: layer of the checkpoint -> (vLLM's layer, number of the shard in it)
        self.shards: dict[str, tuple[Layer, int]] = {}
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, AdaptedMethod):
                self.shards |= {name: (layer, shard) for shard, name in enumerate(method.names)}
        self.slots = {name: _Slot(*place) for name, place in self.shards.items() if place[0].adapter_a is not None}
        #: the adapter's buffers by name
        self._halves: list[tuple[str, torch.Tensor]] = []
        for name, slot in self.slots.items():
            self._halves += [(f"{name}.lora_A", slot.a_RK), (f"{name}.lora_B", slot.b_NR)]
        self.renaming, self._known = renaming or Renaming(), known
        self.norms: dict[str, Any] = find_norms(model, self.original)
        self._clean: torch.Tensor | None = None  # clean weights of all noisy norms, concatenated, float32
        self._names: tuple[str, ...] = ()
        self.draw: NoiseDraw | None = None
        self._received: str | None = None
        #: name of an adapter's buffer -> its expected `bits`
        self._bits = dict.fromkeys(dict(self._halves), 0)

    def original(self, name: str) -> str:
        return self.renaming.original(name, self._known)

    @torch.no_grad()
    def contents(self) -> Contents:
        """Return this rank's state; reads the adapter once."""
        found = all_bits([half for _, half in self._halves]).tolist()
        damaged = [name for (name, _), now in zip(self._halves, found, strict=True) if now != self._bits[name]]
        return Contents(self._received, damaged, self.draw)

    @torch.no_grad()
    def sums(self) -> dict[str, int]:
        """Return `bits` of all parameters and buffers of vLLM's model, by vLLM's names. Reads each once."""
        tensors = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        return dict(zip(tensors, all_bits(list(tensors.values())).tolist(), strict=True))

    @torch.no_grad()
    def load_adapter(
        self, adapter: Mapping[str, AdapterTensors], norms: Mapping[str, torch.Tensor], received: str | None = None
    ) -> int:
        """Copy an adapter into the buffers, and new clean weights into trained norms. Buffers of other layers become
        zero; current noise stays on. `received`: name of the update in `contents`, by default its fingerprint.
        Returns the number of layers. Raises `ValueError` for a wrong update."""
        found = self._checked(adapter, norms)
        received = received or update_fingerprint(adapter, norms)
        for group in self._groups(adapter):
            targets = [half for name in group for half in self.slots[name].filled(adapter[name].a.shape[0])]
            _copy(targets, self._parts(adapter, group))
        for name in self.slots.keys() - adapter.keys():
            self.slots[name].a_RK.zero_()
            self.slots[name].b_NR.zero_()
        if norms:
            self._update_clean(norms)
        self._bits |= found
        self._received = received
        return len(adapter)

    def _checked(self, adapter: Mapping[str, AdapterTensors], norms: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Check an update; return the `bits` that the adapter's buffers must have after it. Raises `ValueError`."""
        problems = [f"vLLM has no buffers for {name}" for name in adapter if name not in self.slots]
        problems += [f"vLLM has no norm {name}" for name in norms if name not in self.norms]
        if not problems:
            problems = [problem for name, t in adapter.items() if (problem := self.slots[name].refuses(name, t))]
            for name, weight in norms.items():
                if weight.shape != (own := self.norms[name].weight.shape):
                    problems.append(f"{name} has shape {tuple(weight.shape)}, in vLLM {tuple(own)}")
        found: dict[str, int] = {}
        if not problems:
            parts = [half for name, t in adapter.items() for half in self.slots[name].part(t)]
            factors = [factor for t in adapter.values() for factor in (1.0, t.scaling)]
            sums, finite = rounded(parts, factors, next(iter(self.slots.values())).a_RK)
            came = [f"{name}.lora_{half}" for name in adapter for half in "AB"]
            found = dict(zip(came, sums.tolist(), strict=True))
            bad = not_finite(norms.items())
            bad += [name for name, good in zip(came, finite.tolist(), strict=True) if not good]
            problems = [f"{name} holds NaN or infinity" for name in bad]
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise ValueError(
                f"The update was refused, and nothing has changed: {'; '.join(problems[:3])}{more}. Send an update "
                "that was made for this model."
            )
        return dict.fromkeys(self._bits, 0) | found

    def _groups(self, adapter: Mapping[str, AdapterTensors]) -> Iterator[list[str]]:
        """Yield the adapter's layers in groups of about `_TOGETHER` elements."""
        group, size = list[str](), 0
        for name, tensors in adapter.items():
            group.append(name)
            size += tensors.a.numel() + tensors.b.numel()
            if size > _TOGETHER:
                yield group
                group, size = [], 0
        if group:
            yield group

    def _parts(self, adapter: Mapping[str, AdapterTensors], group: list[str]) -> list[torch.Tensor]:
        """Return this rank's A and B of each layer of the group in turn, float32, B multiplied by alpha/r."""
        parts = [half for name in group for half in self.slots[name].part(adapter[name])]
        factors = [adapter[name].scaling for name in group]
        if any(factor != 1.0 for factor in factors):
            parts[1::2] = torch._foreach_mul([b.float() for b in parts[1::2]], factors)
        return parts

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy whole weights, by the checkpoint's names, into vLLM's parameters. Current noise stays on. Raises
        [`RolloutError`] if vLLM has other weights afterwards."""
        draw = self.draw
        self.clear_noise()
        came: list[tuple[str, torch.Tensor]] = []
        ends: dict[str, tuple[str, torch.Tensor]] = {}  # first and last linear layer in `weights`

        def watched() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                came.append((name, word_sum(tensor)))
                layer = name.removesuffix(".weight")
                if layer in self.shards:
                    ends["first" if not ends else "last"] = (layer, tensor)
                yield name, tensor

        loaded = self.model.load_weights(watched())
        wrong = self.differing(dict(ends.values()))
        if not loaded or wrong:
            raise RolloutError(
                f"vLLM's {type(self.model).__name__} loaded {len(loaded or ())} of {len(came)} trained weights and has "
                f"other values in {wrong}. Use use_vllm=False for this architecture."
            )
        if self._names:
            self._clean = self._gather()
        self._received = fingerprint(came)
        if draw is not None:
            self.set_noise(draw)

    @torch.no_grad()
    def differing(self, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of dense layers, given as unsharded (N, K) weights, with other bits in vLLM."""
        wrong = []
        for name, weight in weights.items():
            layer, shard = self.shards[name]
            rows, columns = layer.quant_method.shard_slices(layer, shard)
            start = sum(layer.qerl_splits[:shard])
            mine = layer.weight[start : start + layer.qerl_splits[shard]]
            if not torch.equal(mine, weight[rows, columns].to(mine)):
                wrong.append(name)
        return wrong

    @torch.no_grad()
    def declare_noisy(self, names: Iterable[str]) -> None:
        """Set the noisy norms, by canonical names in a fixed order, and keep clean copies. A change turns noise off.
        Raises `ValueError` for unknown norms."""
        if (names := tuple(names)) and names == self._names:
            return
        unknown = sorted(set(names) - set(self.norms))
        if unknown or not names:
            raise ValueError(
                f"Noise should go on {len(names)} norms, but vLLM's model lacks {len(unknown)} of them "
                f"({unknown[:4]}). LayerNorms need vllm_mode='colocate'; or use use_vllm=False or aqn=False."
            )
        self.clear_noise()
        self._names = names
        self._clean = self._gather()
        self.draw = None

    def _update_clean(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the clean weights of trained norms. Current noise stays on."""
        for name, weight in weights.items():
            self.norms[name].weight.copy_(weight)
        if self._clean is not None:
            clean = dict(zip(self._names, self._split(self._clean), strict=True)) | {**weights}
            self._clean = torch.cat([clean[name].to(self._clean).flatten() for name in self._names])
            self.set_noise(self.draw or NoiseDraw(0.0, 0, 0, 0))

    def clean_norms(self) -> dict[str, torch.Tensor]:
        """Return the clean weights of all norms that support noise."""
        norms = {name: norm.weight.detach() for name, norm in self.norms.items()}
        if self._clean is not None:
            norms |= dict(zip(self._names, self._split(self._clean), strict=True))
        return norms

    @torch.no_grad()
    def set_noise(self, draw: NoiseDraw) -> None:
        """Set every noisy norm to clean + sigma * z, in float32; z depends only on the draw and the norm's name."""
        assert self._clean is not None, "declare_noisy comes first"
        weights = self._weights()
        noisy = self._clean
        if draw.sigma > 0:
            sizes = [weight.numel() for weight in weights]
            noisy = self._clean + draw.noise(self._names, sizes, self._clean.device)
        _copy(weights, self._split(noisy))
        self.draw = draw

    def clear_noise(self) -> None:
        """Turn noise off: restore the clean norms, bit for bit."""
        if self._clean is not None:
            self.set_noise(NoiseDraw(0.0, 0, 0, 0))

    @torch.no_grad()
    def sigma_effective(self) -> float:
        """Return the rms of the noise in vLLM's norm weights, after rounding, in units of the draw."""
        if self._clean is None or self.draw is None:
            return 0.0
        units = self.draw.units(self._names, [weight.numel() for weight in self._weights()], self._clean.device)
        return float(((self._gather() - self._clean) / units).square().mean().sqrt())

    def _gather(self) -> torch.Tensor:
        """Copy the noisy norms' current weights, concatenated: (sum of sizes,) float32."""
        return torch.cat([weight.flatten() for weight in self._weights()]).float()

    def _weights(self) -> list[torch.Tensor]:
        return [self.norms[name].weight.data for name in self._names]

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        weights = self._weights()
        return [t.view_as(w) for t, w in zip(flat.split([w.numel() for w in weights]), weights, strict=True)]


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy many tensors, converting dtypes, with few kernel launches."""
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
