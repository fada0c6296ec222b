"""PEFT's LoRA layers, computed in groups with the same input: q|k|v, gate|up, every other layer alone.

PEFT stays the owner. [`fuse`] changes the class of its layers to override `forward`; modules, parameters, names and
files are unchanged. Anything but one plain active adapter runs PEFT's own forward, decided in each call.
`fused_lora.py` has the computation, `nvfp4/architectures.py` the reasons for the groups.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn

from ..model.lora import NVFP4LoraLinear
from ..nvfp4.architectures import DECODER
from ..nvfp4.linear import PACKED, NVFP4Linear, as_bytes, runs_a_kernel
from .fused_lora import DENSE, LoraGroup

logger = logging.getLogger(__name__)


def why_not(layer: LoraLayer) -> str:
    """Return why a layer must run its own forward for any input, as words for a message; "" if it need not."""
    if type(layer) not in _FUSED and not isinstance(layer, _Fused):
        return f"layers of the class {type(layer).__module__}.{type(layer).__name__}"
    base, active = layer.base_layer, layer.active_adapters
    if type(base) not in (nn.Linear, NVFP4Linear):
        return f"an adapter on a {type(base).__name__}"
    if len(active) != 1:
        return "several active adapters"
    name = active[0]
    if name not in layer.lora_A:
        return ""
    if name in layer.lora_variant:
        return type(layer.lora_variant[name]).__name__.removesuffix("LinearVariant")
    if layer.lora_bias[name] or (base.bias is not None and base.bias.requires_grad):
        return "biases that are trained"
    if not isinstance(layer.lora_dropout[name], nn.Identity):
        return "lora_dropout"
    if type(base) is nn.Linear and base.weight.requires_grad:
        return "a base weight that is trained"
    return ""


def fuses_all(model: nn.Module) -> bool:
    """Whether [`fuse`] takes every LoRA layer of a model with at least one."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    return bool(layers) and not any(map(why_not, layers))


def _adapter(layer: LoraLayer) -> str | None:
    """Return the name of the layer's only active plain adapter; None: its own forward must run."""
    if layer._disable_adapters or layer.merged_adapters or not layer.cast_input_dtype_enabled or why_not(layer):
        return None
    name = layer.active_adapters[0]
    if name not in layer.lora_A:
        return None
    for module in (layer.base_layer, layer.lora_A[name], layer.lora_B[name]):
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return None  # hooks observe, or gather, these tensors
    return name


class _Call(NamedTuple):
    """All that a layer's output depends on, except the values of its input."""

    adapter: str
    scaling: float
    dtype: torch.dtype
    implementation: str
    compute: str
    gradients: bool
    versions: tuple[int, ...]


def _call(layer: Any, x: torch.Tensor) -> _Call | None:
    """Return how to compute `layer(x)`; None: by its own forward."""
    name = _adapter(layer)
    if name is None:
        return None
    base, a, b = layer.base_layer, layer.lora_A[name].weight, layer.lora_B[name].weight
    packed = isinstance(base, NVFP4Linear)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        if x.dtype == torch.float64:
            return None
    else:  # PEFT computes the adapter in its own dtype
        dtype = x.dtype
        if not dtype == (base.compute_dtype if packed else base.weight.dtype) == a.dtype == b.dtype:
            return None
    implementation = base.implementation if packed else DENSE
    if implementation == "kernel":
        return None
    if torch.compiler.is_compiling():
        versions: tuple[int, ...] = ()
    elif packed and runs_a_kernel(x.device, dtype, x.numel() // x.shape[-1], implementation):
        return None
    else:
        versions = tuple(-1 if p.is_inference() else p._version for p in (x, a, b))
    compute = base.compute if packed else "w4a16"
    return _Call(name, layer.scaling[name], dtype, implementation, compute, torch.is_grad_enabled(), versions)


def _compute(layers: Sequence[Any], calls: Sequence[_Call], x: torch.Tensor) -> list[torch.Tensor]:
    """Compute the outputs (..., N_i) of all layers of a group: of each layer i, for the same input x."""
    bases = [layer.base_layer for layer in layers]
    a = [layer.lora_A[call.adapter].weight for layer, call in zip(layers, calls, strict=True)]
    b = [layer.lora_B[call.adapter].weight for layer, call in zip(layers, calls, strict=True)]
    if calls[0].implementation == DENSE:
        weights = [base.weight for base in bases]
    else:
        weights = [as_bytes(getattr(base, name)) for name in PACKED for base in bases]
    flat, scalings = x.reshape(-1, x.shape[-1]).to(calls[0].dtype), tuple(call.scaling for call in calls)
    biases = [base.bias for base in bases]
    ys = LoraGroup.apply(flat, scalings, calls[0].implementation, calls[0].compute, *a, *b, *biases, *weights)
    return [y.view(*x.shape[:-1], y.shape[-1]) for y in ys]


class FusedGroup:
    """Layers with the same input. The first call computes all of them; others take its output once, if still valid."""

    def __init__(self, members: Sequence[Any]) -> None:
        self.members = tuple(members)
        self.drop()

    def drop(self) -> None:
        """Drop cached outputs."""
        self.x: torch.Tensor | None = None
        self.ready: dict[int, tuple[_Call, torch.Tensor]] = {}

    def __getstate__(self) -> dict:
        return {"members": self.members}  # a copy of a model copies no activations

    def __setstate__(self, state: dict) -> None:
        self.members = state["members"]
        self.drop()

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """Return a member's output (..., N) for x (..., K), or None if its own forward must run."""
        own = _call(self.members[index], x)
        if own is None:
            return None
        if self.x is x and index in self.ready:
            call, y = self.ready.pop(index)
            if not self.ready:
                self.x = None
            if call == own:
                return y
        calls = {index: own}
        for i, member in enumerate(self.members):
            if i != index:
                other = _call(member, x)
                if other is not None and other[2:5] == own[2:5]:  # dtype, implementation and compute
                    calls[i] = other
        order = sorted(calls)
        ys = dict(zip(order, _compute([self.members[i] for i in order], [calls[i] for i in order], x), strict=True))
        y = ys.pop(index)
        self.x, self.ready = (x, {i: (calls[i], ys[i]) for i in ys}) if ys else (None, {})
        return y


class _Fused:
    """Mixin for a PEFT layer's class: computes its forward within a group if possible."""

    fused_group: FusedGroup
    fused_index: int

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        group, index = self.fused_group, self.fused_index
        if not args and not kwargs and group.members[index] is self:  # not so in a replica of nn.DataParallel
            y = group.output(index, x)
            if y is not None:
                return y
        return super().forward(x, *args, **kwargs)  # type: ignore[misc]


class FusedLoraLinear(_Fused, LoraLinear):
    """`lora.Linear` on a dense base, computed in a group."""


class FusedNVFP4LoraLinear(_Fused, NVFP4LoraLinear):
    """`NVFP4LoraLinear` on a packed base, computed in a group."""


_FUSED: dict[type, type] = {LoraLinear: FusedLoraLinear, NVFP4LoraLinear: FusedNVFP4LoraLinear}


def fuse(model: nn.Module) -> int:
    """Compute the supported LoRA layers of `model` in groups. Repeatable, and undone by [`unfuse`].

    Unsupported layers keep PEFT's forward, logged once with their number and the reason.

    Returns:
        The number of fused layers.
    """
    unfuse(model)
    left, taken = Counter[str](), 0
    done: set[int] = set()
    for parent in list(model.modules()):
        for names in _groups_in(parent):
            members: list[Any] = []
            for name in names:
                layer = parent.get_submodule(name)
                if isinstance(layer, LoraLayer) and id(layer) not in done:
                    done.add(id(layer))
                    reason = why_not(layer)
                    if reason:
                        left[reason] += 1
                    else:
                        members.append(layer)
            if members:
                group = FusedGroup(members)
                for index, layer in enumerate(members):
                    layer.__class__ = _FUSED[type(layer)]
                    layer.fused_group, layer.fused_index = group, index
                taken += len(members)
    for reason, count in left.items():
        said = logger.info if next(model.parameters()).device.type == "cpu" else logger.warning
        total = taken + left.total()
        said("%d of %d LoRA layers keep PEFT's own forward and backward, which are slower: %s.", count, total, reason)
    return taken


def unfuse(model: nn.Module) -> None:
    """Restore the layers' own classes."""
    for module in model.modules():
        if isinstance(module, _Fused):
            module.__class__ = next(own for own, fused in _FUSED.items() if fused is type(module))
            del module.fused_group, module.fused_index


def _groups_in(parent: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of `parent`'s children in groups that read the same input."""
    children: dict[str, Any] = dict(parent.named_children())
    alone = [name for name, child in children.items() if isinstance(child, LoraLayer)]
    groups: list[tuple[str, ...]] = []
    if not getattr(parent, "is_kv_shared_layer", False):  # k and v come from another layer
        for group in DECODER.groups:
            found = [name for name in group if name in alone]
            if len(found) > 1 and len({children[name].in_features for name in found}) == 1:
                groups.append(tuple(found))
                alone = [name for name in alone if name not in found]
    return groups + [(name,) for name in alone]
