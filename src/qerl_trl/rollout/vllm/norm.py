"""RMSNorm with a float32 weight inside vLLM.

bf16 weights swallow small noise: around 1.0 half a step is 2^-9, so a noise of 5e-4 would change nothing. vLLM
instantiates the class registered under `RMSNorm` in its out-of-tree registry instead of its own, which is the public
hook for a platform's norm. Ours holds the weight in float32 and multiplies in float32; in an engine that does not use
`qerl_nvfp4` the class behaves as its parent.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

import qerl_nvfp4

from ...nvfp4.layouts import METHOD
from .compile_ahead import expect_norm


def _ours_is_building() -> bool:
    config = get_current_vllm_config().quant_config
    return config is not None and config.get_name() == METHOD


class NoisyRMSNorm(RMSNorm):
    """y = x / rms(x) * w with w and the arithmetic in float32; y and the residual in x's dtype."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.noisy = self.has_weight and self.variance_size_override is None and _ours_is_building()
        if self.noisy:
            self.weight = Parameter(self.weight.data.float(), requires_grad=False)
            if self.enabled():  # else torch.compile makes it part of its neighbours
                expect_norm(self, torch.get_default_dtype())

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        """Plain PyTorch, which torch.compile fuses with its neighbours."""
        if not self.noisy:
            return super().forward_native(x, residual)
        if residual is not None:
            x = residual = (x.float() + residual.float()).to(x.dtype)
        h_float = x.float()
        y = h_float * torch.rsqrt(h_float.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight
        y = y.to(x.dtype)
        return y if residual is None else (y, residual)

    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        if not self.noisy:
            return super().forward_cuda(x, residual)
        return qerl_nvfp4.rms_norm(x, self.weight, self.variance_epsilon, residual)


class NoisyGemmaRMSNorm(GemmaRMSNorm):
    """Gemma's norm (weight + 1) with the weight held in float32; its arithmetic is float32 already."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.noisy = _ours_is_building()
        if self.noisy:
            self.weight = Parameter(self.weight.data.float(), requires_grad=False)


_CLASSES: dict[str, tuple[Any, Any, str]] = {
    "RMSNorm": (RMSNorm, NoisyRMSNorm, "rms_norm"),
    "GemmaRMSNorm": (GemmaRMSNorm, NoisyGemmaRMSNorm, "gemma_rms_norm"),
}


def install() -> None:
    """Register our classes in vLLM's out-of-tree registry, once a process, when an engine asks for our method.

    Raises:
        `RuntimeError`: another plugin has already replaced the norm.
    """
    for name, (parent, ours, op_name) in _CLASSES.items():
        registered = op_registry_oot.get(name)
        if registered is ours:
            continue
        if registered is not None:
            raise RuntimeError(
                f"Another vLLM plugin has replaced {name} by {registered.__module__}.{registered.__qualname__}, so noise on the "
                "norms would not work. Disable that plugin (VLLM_PLUGINS lists the ones to load), or this one."
            )
        parent.register_oot(ours, name=name)
        ours.name = op_name  # the name by which compilation_config.custom_ops switches the stock class


def find_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The norms of a vLLM model that can carry noise, by vLLM's module path."""
    return {n: m for n, m in model.named_modules() if isinstance(m, (NoisyRMSNorm, NoisyGemmaRMSNorm)) and m.noisy}
