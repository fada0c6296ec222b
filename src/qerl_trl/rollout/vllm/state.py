"""What changes inside vLLM between rollouts: adapter buffers and noisy norms of one model, on one tensor-parallel rank.

Everything is an in-place copy into tensors that exist since the engine was built, so captured CUDA graphs and compiled code
stay valid. Whoever calls these methods must reset the engine's prefix cache afterwards: its keys do not know about weights.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ...noise.hooks import NoiseDraw, standard_noise
from ..engine import RolloutError
from ..wire import AdapterTensors
from .linear import AdaptedMethod, Layer
from .norm import find_norms


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
        sharded = getattr(layer, "tp_size", 1) > 1
        self.rows: slice | None
        self.columns: slice | None
        self.rows, self.columns = layer.quant_method.shard_slices(layer, shard) if sharded else (None, None)


class RolloutState:
    """The mutable part of a vLLM model that was built by our method.

    Args:
        model (`nn.Module`): vLLM's model of this rank.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        #: layer of the checkpoint -> (vLLM's layer, number of the shard in it)
        self.shards: dict[str, tuple[Layer, int]] = {}
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, AdaptedMethod):
                self.shards |= {name: (layer, shard) for shard, name in enumerate(method.names)}
        self.slots = {name: _Slot(*place) for name, place in self.shards.items() if place[0].adapter_a is not None}
        self.norms: dict[str, Any] = find_norms(model)
        self._clean: torch.Tensor | None = None  # all noisy norms' clean weights, one after the other, float32
        self._names: tuple[str, ...] = ()
        self.draw: NoiseDraw | None = None
        #: the latest draw with noise under which the model computed (`watch`)
        self.sampled: NoiseDraw | None = None

    def watch(self, runner: Any) -> None:
        """Keep `sampled` up to date: look whenever vLLM's model runner computes a step."""
        execute = runner.execute_model

        @functools.wraps(execute)
        def watched(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduled.total_num_scheduled_tokens and self.draw is not None and self.draw.sigma > 0:
                self.sampled = self.draw
            return execute(scheduled, *args, **kwargs)

        runner.execute_model = watched

    # ------------------------------------------------------------------ adapter

    @torch.no_grad()
    def load_adapter(self, adapter: Mapping[str, AdapterTensors]) -> int:
        """Copy an adapter into the buffers. Layers that have buffers but are not in `adapter` become zero.

        Returns:
            Number of layers written.

        Raises:
            `ValueError`: a layer without buffers, or a rank larger than what the engine reserved.
        """
        unknown = sorted(set(adapter) - set(self.slots))
        if unknown or not adapter:
            raise ValueError(
                f"The adapter has {len(adapter)} layers, of which {len(unknown)} have no buffers in vLLM "
                f"({unknown[:4]}); the engine was built for {len(self.slots)} layers. Give the engine the adapter's own "
                "target modules."
            )
        downs: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        ups: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for name, slot in self.slots.items():
            tensors = adapter.get(name)
            if tensors is None:
                slot.a_RK.zero_()
                slot.b_NR.zero_()
                continue
            a, b, scaling = tensors.a, tensors.b, tensors.scaling
            rank, a_RK, b_NR = a.shape[0], slot.a_RK, slot.b_NR
            if rank > slot.rank:
                raise ValueError(
                    f"{name} has rank {rank}, but the engine reserved {slot.rank}. Rebuild it with that rank."
                )
            if rank < slot.rank:  # what lies beyond may hold an earlier, larger adapter
                a_RK[rank:].zero_()
                b_NR[:, rank:].zero_()
                a_RK, b_NR = a_RK[:rank], b_NR[:, :rank]
            if slot.rows is not None:
                a, b = a[:, slot.columns], b[slot.rows]
            downs[0].append(a_RK)
            downs[1].append(a)
            targets, sources = ups.setdefault(scaling, ([], []))
            targets.append(b_NR)
            sources.append(b)
        _copy(*downs)
        for scaling, (targets, sources) in ups.items():
            if scaling != 1.0 and not math.log2(abs(scaling)).is_integer():
                # rounding B and then the product would round twice; a power of two is exact in any order
                sources = list(torch._foreach_mul([source.float() for source in sources], scaling))
                scaling = 1.0
            _copy(targets, sources)
            if scaling != 1.0:
                torch._foreach_mul_(targets, scaling)
        return len(adapter)

    @torch.no_grad()
    def clear_adapter(self) -> None:
        """Adapter off: the bare base model."""
        for slot in self.slots.values():
            slot.a_RK.zero_()
            slot.b_NR.zero_()

    # ------------------------------------------------------------------ weights that are trained themselves

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy whole weights, by the checkpoint's names, into vLLM's parameters. Noise in force stays in force, on top of them.

        Raises:
            [`RolloutError`]: they did not arrive.
        """
        draw = self.draw
        self.clear_noise()
        count = 0
        ends: dict[
            str, tuple[str, torch.Tensor]
        ] = {}  # the first and the last linear layer that came, to look at afterwards

        def watched() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal count
            for name, tensor in weights:
                count += 1
                layer = name.removesuffix(".weight")
                if layer in self.shards:
                    ends["first" if not ends else "last"] = (layer, tensor)
                yield name, tensor

        loaded = self.model.load_weights(watched())
        wrong = self.differing(dict(ends.values()))
        if not loaded or wrong:
            raise RolloutError(
                f"{count} trained weights were sent to vLLM's {type(self.model).__name__}; it took {len(loaded or ())} of its "
                f"parameters from them and holds other values in {wrong}. Use use_vllm=False for this architecture."
            )
        if self._names:
            self._clean = self._gather()
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
    def remember_clean(self, names: Iterable[str]) -> None:
        """Declare which norms carry noise, and keep clean copies of them. Noise is off afterwards.

        Args:
            names: canonical names of the norms, in a fixed order.

        Raises:
            `ValueError`: vLLM's model lacks one of the norms.
        """
        names = tuple(names)
        unknown = sorted(set(names) - set(self.norms))
        if unknown or not names:
            raise ValueError(
                f"Noise should go on {len(names)} norms, but vLLM's model lacks {len(unknown)} of them ({unknown[:4]}); it has "
                f"{len(self.norms)} norms that can carry noise. Noise on no norm would silently do nothing."
            )
        self.clear_noise()
        self._names = names
        self._clean = self._gather()
        self.draw = None

    @torch.no_grad()
    def update_clean(self, weights: Mapping[str, torch.Tensor]) -> None:
        """New clean weights of trained norms. Noise in force stays in force, on top of them.

        Raises:
            `ValueError`: vLLM's model lacks one of the norms.
        """
        unknown = sorted(set(weights) - set(self.norms))
        if unknown:
            raise ValueError(f"The trainer trains norms that vLLM's model does not have: {unknown[:4]}.")
        draw = self.draw
        self.clear_noise()
        for name, weight in weights.items():
            self.norms[name].weight.copy_(weight)
        if self._names:
            self._clean = self._gather()
            if draw is not None:
                self.set_noise(draw)

    def clean_norms(self) -> dict[str, torch.Tensor]:
        """Weights of all norms that can carry noise, without noise."""
        norms = {name: norm.weight.detach() for name, norm in self.norms.items()}
        if self._clean is not None:
            norms |= dict(zip(self._names, self._split(self._clean), strict=True))
        return norms

    @torch.no_grad()
    def set_noise(self, draw: NoiseDraw) -> None:
        """Set every noisy norm to clean + sigma * z, in float32, with z a function of the draw and the norm's name alone.

        Raises:
            `RuntimeError`: `remember_clean` was not called.
        """
        if self._clean is None:
            raise RuntimeError("The engine does not know which norms carry noise: call remember_clean(names) first.")
        weights = self._weights()
        if draw.sigma == 0:
            _copy(weights, self._split(self._clean))
        else:
            key = (draw.seed, draw.step, draw.generation)
            sizes = [weight.numel() for weight in weights]
            unit = torch.cat([standard_noise(*key, name, size) for name, size in zip(self._names, sizes, strict=True)])
            # the same two roundings as in the trainer (NormNoise): sigma * z, then the sum
            noise = (unit * draw.sigma).to(self._clean.device, non_blocking=True)
            _copy(weights, self._split(self._clean + noise))
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
        return torch.cat([weight.detach().float().flatten() for weight in self._weights()])

    def _weights(self) -> list[torch.Tensor]:
        return [self.norms[name].weight.data for name in self._names]

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        weights = self._weights()
        return [t.view_as(w) for t, w in zip(flat.split([w.numel() for w in weights]), weights, strict=True)]


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy many tensors, converting dtypes, with few kernel launches."""
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
