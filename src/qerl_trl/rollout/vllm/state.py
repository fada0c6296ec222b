"""What changes inside vLLM between rollouts: adapter buffers and noisy norms of one model, on one tensor-parallel rank.

Everything is an in-place copy into tensors that exist since the engine was built, so captured CUDA graphs and compiled code
stay valid. Whoever calls these methods must reset the engine's prefix cache afterwards: its keys do not know about weights.

An update is looked at as a whole before the first byte is copied: names, shapes, dtypes, finite values. One that is refused has changed
nothing. What each adapter buffer then has to hold is remembered as a sum of its bits, taken from what came and not from where it went, so that
`contents` finds a copy that was lost or was made by half.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from ...noise.generator import standard_noises
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

#: elements of an adapter that are copied together
_TOGETHER = 2**24


class _Slot:
    """Where one layer of the checkpoint lives: shard number `shard` of vLLM's `layer`, with views of its part of the buffers.

    a_RK (padded r, K of this rank), b_NR (N of this rank, padded r); `rows` and `columns` say which part of the unsharded B and A
    this rank holds, None for all of it.
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
        """Why these tensors cannot be this layer's adapter."""
        a, b, rank = tensors.a, tensors.b, tensors.a.shape[0]
        if rank > self.rank:
            return f"{name} has rank {rank}, but the engine reserved {self.rank}"
        if (*a.shape, *b.shape) != (rank, self.full_k, self.full_n, rank):
            return f"{name} has A {tuple(a.shape)} and B {tuple(b.shape)}; the layer is {self.full_n} x {self.full_k}"
        return None

    def part(self, tensors: AdapterTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's A (r, K) and B (N, r), views of the whole ones."""
        a, b = tensors.a.detach(), tensors.b.detach()
        if self.rows is not None:
            a, b = a[:, self.columns], b[self.rows]
        return a, b

    def filled(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where an adapter of this rank goes. What lies beyond becomes zero: it may hold an earlier, larger adapter."""
        if rank < self.rank:
            self.a_RK[rank:].zero_()
            self.b_NR[:, rank:].zero_()
        return self.a_RK[:rank], self.b_NR[:, :rank]


class RolloutState:
    """The mutable part of this rank's vLLM model that was built by our method. `known`: the trainer's modules, where they are known."""

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
        self._clean: torch.Tensor | None = None  # all noisy norms' clean weights, one after the other, float32
        self._names: tuple[str, ...] = ()
        self.draw: NoiseDraw | None = None
        self._received: str | None = None
        #: name of an adapter's buffer -> `bits` that it has to have
        self._bits = dict.fromkeys((name for name, _ in self._halves), 0)

    def original(self, name: str) -> str:
        return self.renaming.original(name, self._known)

    # ------------------------------------------------------------------ what is there

    @torch.no_grad()
    def contents(self) -> Contents:
        """What this rank computes with. Reads the adapter once."""
        found = all_bits([half for _, half in self._halves]).tolist()
        damaged = [name for (name, _), now in zip(self._halves, found, strict=True) if now != self._bits[name]]
        return Contents(self._received, damaged, self.draw)

    @torch.no_grad()
    def sums(self) -> dict[str, int]:
        """`bits` of every parameter and buffer of vLLM's model, by its name there. Reads all of them once."""
        tensors = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        return dict(zip(tensors, all_bits(list(tensors.values())).tolist(), strict=True))

    # ------------------------------------------------------------------ adapter

    @torch.no_grad()
    def load_adapter(
        self, adapter: Mapping[str, AdapterTensors], norms: Mapping[str, torch.Tensor], received: str | None = None
    ) -> int:
        """Copy an adapter into the buffers, and new clean weights into trained norms; the number of layers written. Layers that have buffers but
        are not in `adapter` become zero; noise in force stays in force, on top of the norms. `received` is the update's name in `contents`, by
        default its fingerprint."""
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
        """`bits` of what the adapter's buffers have to hold after this update."""
        problems = [f"vLLM has no buffers for {name}" for name in adapter if name not in self.slots]
        problems += [f"vLLM has no norm {name}" for name in norms if name not in self.norms]
        if not problems:
            problems = [problem for name, t in adapter.items() if (problem := self.slots[name].refuses(name, t))]
            for name, weight in norms.items():
                if weight.shape != (own := self.norms[name].weight.shape):
                    problems.append(f"{name} came as {tuple(weight.shape)}, and is {tuple(own)}")
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
                f"The update cannot be taken, and nothing has changed: {'; '.join(problems[:3])}{more}. Send one that was made for this model."
            )
        return dict.fromkeys(self._bits, 0) | found

    def _groups(self, adapter: Mapping[str, AdapterTensors]) -> Iterator[list[str]]:
        """The adapter's layers, as many at a time as are small together."""
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
        """This rank's A and B of each layer of the group in turn, alpha/r folded into B in float32."""
        parts = [half for name in group for half in self.slots[name].part(adapter[name])]
        factors = [adapter[name].scaling for name in group]
        if any(factor != 1.0 for factor in factors):
            parts[1::2] = torch._foreach_mul([b.float() for b in parts[1::2]], factors)
        return parts

    # ------------------------------------------------------------------ weights that are trained themselves

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy whole weights, by the checkpoint's names, into vLLM's parameters. Noise in force stays in force, on top of them."""
        draw = self.draw
        self.clear_noise()
        came: list[tuple[str, torch.Tensor]] = []
        ends: dict[str, tuple[str, torch.Tensor]] = {}  # the first and the last linear layer that came

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
                f"vLLM's {type(self.model).__name__} took {len(loaded or ())} of {len(came)} trained weights and holds other values in {wrong}. Use "
                "use_vllm=False for this architecture."
            )
        if self._names:
            self._clean = self._gather()
        self._received = fingerprint(came)
        if draw is not None:
            self.set_noise(draw)

    @torch.no_grad()
    def differing(self, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """Which of these dense layers, given as unsharded (N, K) weights, vLLM does not hold bit for bit in its own dtype."""
        wrong = []
        for name, weight in weights.items():
            layer, shard = self.shards[name]
            rows, columns = layer.quant_method.shard_slices(layer, shard)
            start = sum(layer.qerl_splits[:shard])
            mine = layer.weight[start : start + layer.qerl_splits[shard]]
            if not torch.equal(mine, weight[rows, columns].to(mine)):
                wrong.append(name)
        return wrong

    # ------------------------------------------------------------------ noise

    @torch.no_grad()
    def declare_noisy(self, names: Iterable[str]) -> None:
        """Which norms carry noise, by canonical names in a fixed order. Keeps clean copies, and turns noise off, where others did before."""
        if (names := tuple(names)) and names == self._names:
            return
        unknown = sorted(set(names) - set(self.norms))
        if unknown or not names:
            raise ValueError(
                f"Noise should go on {len(names)} norms, but vLLM's model lacks {len(unknown)} of them ({unknown[:4]}). LayerNorms need "
                "vllm_mode='colocate'; or use use_vllm=False or aqn=False."
            )
        self.clear_noise()
        self._names = names
        self._clean = self._gather()
        self.draw = None

    def _update_clean(self, weights: Mapping[str, torch.Tensor]) -> None:
        """New clean weights of trained norms. Noise in force stays in force, on top of them."""
        for name, weight in weights.items():
            self.norms[name].weight.copy_(weight)
        if self._clean is not None:
            clean = dict(zip(self._names, self._split(self._clean), strict=True)) | {**weights}
            self._clean = torch.cat([clean[name].to(self._clean).flatten() for name in self._names])
            self.set_noise(self.draw or NoiseDraw(0.0, 0, 0, 0))

    def clean_norms(self) -> dict[str, torch.Tensor]:
        """Weights of all norms that can carry noise, without noise."""
        norms = {name: norm.weight.detach() for name, norm in self.norms.items()}
        if self._clean is not None:
            norms |= dict(zip(self._names, self._split(self._clean), strict=True))
        return norms

    @torch.no_grad()
    def set_noise(self, draw: NoiseDraw) -> None:
        """Set every noisy norm to clean + sigma * z, in float32, with z a function of the draw and the norm's name alone."""
        assert self._clean is not None, "declare_noisy comes first"
        weights = self._weights()
        noisy = self._clean
        if draw.sigma > 0:
            sizes = [weight.numel() for weight in weights]
            unit = standard_noises(draw.seed, draw.step, draw.generation, self._names, sizes, self._clean.device)
            # the same two roundings as in the trainer (NormNoise): sigma * z, then the sum
            noisy = self._clean + unit * draw.sigma
        _copy(weights, self._split(noisy))
        self.draw = draw

    def clear_noise(self) -> None:
        """Noise off: the clean norms, bit for bit."""
        if self._clean is not None:
            self.set_noise(NoiseDraw(0.0, 0, 0, 0))

    @torch.no_grad()
    def sigma_effective(self) -> float:
        """Rms of what was really added to the norm weights that vLLM computes with."""
        if self._clean is None:
            return 0.0
        return float((self._gather() - self._clean).square().mean().sqrt())

    def _gather(self) -> torch.Tensor:
        """The noisy norms' weights as they are now, one after the other: (sum of sizes,) float32, a copy."""
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
