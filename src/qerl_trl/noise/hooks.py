"""Noise on the norms of a live model, without writing a parameter."""

import math
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from .generator import standard_noises

# norms with the hooks of a NormNoise: two would add up. Weak references, as a NormNoise refers to its norms: only
# their hooks keep it alive
_noisy_modules: "weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[NormNoise], str]]" = weakref.WeakKeyDictionary()

#: relative tolerance of an engine's reported rms: above the sampling error of n values, 1 / sqrt(2 n), and below the
#: error of rounded norms
_AS_ASKED = 0.25

# dtypes not widened by noise
_EXACT = (torch.float32, torch.float64)


class NoiseDraw(NamedTuple):
    """The key of one draw, sufficient for a worker to reproduce the noise of every norm.

    `sigma` is 0 without noise (evaluation, stage 0). The noise of a norm has the standard deviation sigma (absolute),
    or with `scales`, a number per norm by name, sigma times that number (relative: `norms.multiplier_rms`).
    """

    sigma: float
    seed: int
    step: int
    generation: int
    scales: Mapping[str, float] | None = None

    def noise(self, names: Sequence[str], sizes: Sequence[int], device: torch.device) -> torch.Tensor:
        """Compute the noise of norms with `sizes` weights, concatenated: (sum of sizes,) float32, the same bits
        everywhere."""
        unit = standard_noises(self.seed, self.step, self.generation, names, sizes, device) * self.sigma
        return unit if self.scales is None else unit * self.units(names, sizes, device)

    def units(self, names: Sequence[str], sizes: Sequence[int], device: torch.device) -> torch.Tensor | float:
        """Return the standard deviation of the noise per sigma: (sum of sizes,) float32; 1 for absolute noise."""
        if self.scales is None:
            return 1.0
        scales = torch.tensor([self.scales[name] for name in names])
        return scales.repeat_interleave(torch.tensor(sizes)).to(device, non_blocking=True)

    def check(self, effective: float) -> None:
        """Raise `RuntimeError` if `effective`, the rms of the noise in an engine, is not this draw's sigma."""
        if abs(effective - self.sigma) <= _AS_ASKED * self.sigma:
            return
        raise RuntimeError(
            f"Noise of sigma {self.sigma:g} was requested at step {self.step}, but the engine's norms have "
            f"{effective:.4g}: earlier noise was left on, or norms are rounded. Restart the engine and resume from "
            "the last checkpoint, or pass aqn=False."
        )


class NormNoise:
    """Noise on the norms of a live transformers model, through forward hooks.

    `set(draw)` chooses the noise, `with active():` applies it, `in_training = True` applies it in every forward of a
    norm in training mode (and in the recomputation of gradient checkpointing). During one forward of a norm the entry
    `_parameters["weight"]` is replaced by `weight + noise` in fp32 and put back, also when the forward raises. A
    trainable norm gets its gradient through the sum. FSDP2, DDP and ZeRO-3 see no change between forwards.

    Args:
        norms: {canonical name: module}, from `find_noisy_norms`.

    Raises:
        ValueError: a norm already has the hooks of another NormNoise.
    """

    def __init__(self, norms: Mapping[str, nn.Module]) -> None:
        for name, module in norms.items():
            if module in _noisy_modules:
                raise ValueError(
                    f"The norm {name!r} already carries adaptive quantization noise. Use one AQNCallback per model "
                    "(QeRL trainers bring their own), and call detach() on the callback of an interrupted run."
                )
        self.norms = dict(norms)
        self.draw: NoiseDraw | None = None
        self._in_training, self._depth = False, 0
        self._noise: dict[str, torch.Tensor] = {}
        self._ready: dict[str, tuple[int, torch.Tensor]] = {}
        self._landed: dict[str, torch.Tensor] = {}
        self._clean: dict[str, tuple[dict[str, torch.Tensor], torch.dtype]] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for name, module in self.norms.items():
            self._install(name, module)

    def set(self, draw: NoiseDraw) -> None:
        """Take the noise of `draw` from now on. With sigma 0 the hooks do nothing at all."""
        self.draw = draw
        self._noise, self._ready, self._landed = {}, {}, {}
        if self._depth or self._in_training:
            self._compute()

    def _compute(self) -> None:
        """Compute the noise on demand: with an engine, which computes its own, this model's norms stay clean."""
        draw = self.draw
        if self._noise or draw is None or draw.sigma == 0:
            return
        weights = self.weights
        # ds_shape: ZeRO-3
        sizes = {name: math.prod(getattr(weight, "ds_shape", weight.shape)) for name, weight in weights.items()}
        for device in {weight.device for weight in weights.values()}:
            names = [name for name, weight in weights.items() if weight.device == device]
            own = [sizes[name] for name in names]
            self._noise |= zip(names, draw.noise(names, own, device).split(own), strict=True)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Weight of each norm by canonical name."""
        return {name: _weight(module) for name, module in self.norms.items()}

    @property
    def in_training(self) -> bool:
        """Whether norms in training mode are noisy."""
        return self._in_training

    @in_training.setter
    def in_training(self, value: bool) -> None:
        self._in_training = value
        if value:
            self._compute()

    def clear(self) -> None:
        self.draw, self.in_training = None, False
        self._noise, self._ready, self._landed = {}, {}, {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context manager in which every norm forward is noisy, in any mode. May be nested."""
        self.enter()
        try:
            yield
        finally:
            self.exit()

    def enter(self) -> None:
        """Begin what `active` does, without a `with` block; `exit` ends it."""
        self._compute()
        self._depth += 1

    def exit(self) -> None:
        assert self._depth > 0, "exit() without enter()"
        self._depth -= 1

    @property
    def landed(self) -> int:
        """Number of norms run with the noise of the current draw."""
        return len(self._landed)

    def sigma_effective(self) -> float | None:
        """Return the rms of the current draw's noise in the norm weights, in units of the draw, in their first noisy
        forward; else None.

        Equals sigma up to the sampling error of the noise itself, 1/sqrt(2 n) over n values.
        """
        if self.draw is not None and self.draw.sigma == 0:
            return 0.0
        if not self._landed:
            return None
        device = next(iter(self._landed.values())).device
        scales = (self.draw and self.draw.scales) or dict.fromkeys(self._landed, 1.0)
        total = sum(value.to(device) / scales[name] ** 2 for name, value in self._landed.items())
        count = sum(self._noise[name].numel() for name in self._landed)
        return math.sqrt(float(total) / count)

    def remove(self) -> None:
        """Remove the hooks. The model is then exactly as before."""
        self.clear()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for module in self.norms.values():
            _noisy_modules.pop(module, None)

    def _acts_on(self, module: nn.Module) -> bool:
        # the compiler of torch 2.11 cannot take the truth of a dict
        return len(self._noise) > 0 and (self._depth > 0 or (self._in_training and module.training))

    def _install(self, name: str, module: nn.Module) -> None:
        def before(running: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            # a deepcopy of the model shares this closure and must stay clean
            if running is module and self._acts_on(module):
                return self._swap_in(name, module, args, kwargs)
            return None

        def after(running: nn.Module, args: tuple, output: Any) -> Any:
            if running is module and name in self._clean:
                return self._swap_out(name, module, output)
            return None

        # FSDP2 may shard the norm: it gathers before our hooks and must reshard after the parameter is clean again,
        # hence prepend. always_call: gradient checkpointing ends its recomputation with an exception within a forward.
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, prepend=True, always_call=True))
        _noisy_modules[module] = weakref.ref(self), name

    def _swap_in(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        parameters = _parameters(module)
        clean = _weight(module)
        noisy = self._noisy_weight(name, clean)
        dtype = noisy.dtype
        hidden = args[0] if args else next(iter(kwargs.values()))
        replaced: dict[str, torch.Tensor] = {"weight": clean}
        if isinstance(module, nn.LayerNorm | nn.RMSNorm) and clean.dtype != dtype:
            # torch's fused kernels need input, weight and bias in one dtype (and compute in fp32 inside)
            if (bias := parameters.get("bias")) is not None:
                replaced["bias"] = bias
                parameters["bias"] = bias.to(dtype)
            args = (args[0].to(dtype), *args[1:]) if args else args
            kwargs = kwargs if args else {key: value.to(dtype) for key, value in kwargs.items()}
        self._clean[name] = (replaced, hidden.dtype)
        parameters["weight"] = noisy
        return args, kwargs

    def _noisy_weight(self, name: str, clean: torch.Tensor) -> torch.Tensor:
        """Compute weight + sigma * z in fp32 (fp64 for fp64 weights); a frozen weight's is kept between forwards."""
        # a compiled graph fuses the sum; changing cache entries would break it up
        compiling = torch.compiler.is_compiling()
        if not compiling:
            version, noisy = self._ready.get(name, (None, None))
            if noisy is not None and version == clean._version and noisy.device == clean.device:
                return noisy
        noise = self._noise[name]
        if noise.device != clean.device:
            noise = self._noise[name] = noise.to(clean.device)
        noisy = clean + noise
        if not compiling and not clean.requires_grad:
            self._ready[name] = (clean._version, noisy)
        if name not in self._landed:
            self._landed[name] = (noisy.detach() - clean.detach()).square().sum()
        return noisy

    def _swap_out(self, name: str, module: nn.Module, output: Any) -> Any:
        replaced, dtype = self._clean.pop(name)
        _parameters(module).update(replaced)
        # noise changes values, never dtypes: a norm with an fp32 weight may return fp32 for a bf16 input
        if isinstance(output, torch.Tensor) and replaced["weight"].dtype not in _EXACT:
            return output.to(dtype)
        return output


@contextmanager
def laid_on(modules: Iterable[nn.Module], rehearse: bool = False) -> Iterator[bool]:
    """Context manager that adds the active noise to the weights of `modules`, and removes the hooks meanwhile.

    For compiled layers: with hooks, different for each norm, every layer would be compiled separately, while a weight
    is one more input. Values and gradients are those of the hooks.

    Args:
        rehearse: do the same without active noise, with the clean values.

    Yields:
        False if unsupported, with the hooks left on: norms computed by torch's kernels in one dtype, norms with foreign
        hooks, or 16-bit norms without autocast, which would return another dtype.
    """
    found = [(module, *_noisy_modules[module]) for module in modules if module in _noisy_modules]
    noisy = [(module, noise, name) for module, known, name in found if (noise := known()) is not None]
    acting = [(*row, _weight(row[0])) for row in noisy if rehearse or row[1]._acts_on(row[0])]
    torchs = any(isinstance(module, nn.LayerNorm | nn.RMSNorm) for module, *_ in acting)
    rounded = any(w.dtype not in _EXACT and not torch.is_autocast_enabled(w.device.type) for *_, w in acting)
    hooks = [(module, module._forward_pre_hooks, module._forward_hooks) for module, *_ in noisy]
    if torchs or rounded or any(len(before) + len(after) > 2 for _, before, after in hooks):
        yield False
        return
    try:
        for module, *_ in hooks:
            module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
        for module, noise, name, weight in acting:
            exact = weight if weight.dtype in _EXACT else weight.float()
            _parameters(module)["weight"] = exact + 0 if rehearse else noise._noisy_weight(name, weight)
        yield True
    finally:
        for module, before, after in hooks:
            module._forward_pre_hooks, module._forward_hooks = before, after
        for module, _, _, weight in acting:
            _parameters(module)["weight"] = weight


def _parameters(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return torch's own table of a module's parameters, which has a plain tensor during a noisy forward."""
    return module._parameters  # type: ignore[return-value]  # annotated for parameters only; dict values are invariant


def _weight(module: nn.Module) -> torch.Tensor:
    weight = module._parameters["weight"]
    assert weight is not None, "find_noisy_norms takes norms with a weight only"
    return weight
