"""Norms with a float32 weight inside vLLM, and norms and SwiGLU with an FP8 output for W4A8.

bf16 weights swallow small noise: around 1.0 half a step is 2^-9, so a noise of 5e-4 would change nothing. vLLM's
out-of-tree registry is the public hook to replace `RMSNorm`. Our class keeps the weight and multiplies in float32; in
engines without `qerl_nvfp4` it behaves like its parent. Other norm classes have no such hook; for the trainer's own
weights (loader.py), `make_noisy` changes their instances.

With `compute="w4a8"` every product quantizes its input first, in a launch of its own. `make_wide` saves it where only
one packed layer reads the output of a norm or of SwiGLU: these return a wide tensor, y and its FP8 copy.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.utils import set_weight_attrs

import qerl_nvfp4

from ...nvfp4.checkpoints import METHOD
from .compile_ahead import expect_norm, expect_swiglu
from .linear import Layer, reads_wide


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
            if self.enabled():  # else torch.compile fuses it with its neighbours
                expect_norm(self, torch.get_default_dtype())

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        """Compute in plain PyTorch, which torch.compile fuses with neighbouring operations."""
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
    """Gemma's norm (weight + 1) with a float32 weight; its arithmetic is float32 already."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.noisy = _ours_is_building()
        if self.noisy:
            self.weight = Parameter(self.weight.data.float(), requires_grad=False)


_CLASSES: dict[str, tuple[Any, Any, str]] = {
    "RMSNorm": (RMSNorm, NoisyRMSNorm, "rms_norm"),
    "GemmaRMSNorm": (GemmaRMSNorm, NoisyGemmaRMSNorm, "gemma_rms_norm"),
}
try:  # vLLM's Transformers backend builds these instead
    from vllm.model_executor.models.transformers.fusers.rms_norm import TPAwareGemmaRMSNorm, TPAwareRMSNorm
except ImportError:  # versions without these classes
    pass
else:

    class NoisyTPAwareRMSNorm(TPAwareRMSNorm, NoisyRMSNorm):
        """vLLM's TPAwareRMSNorm with a float32 weight."""

    class NoisyTPAwareGemmaRMSNorm(TPAwareGemmaRMSNorm, NoisyGemmaRMSNorm):
        """vLLM's TPAwareGemmaRMSNorm with a float32 weight."""

    _CLASSES |= {
        "TPAwareRMSNorm": (TPAwareRMSNorm, NoisyTPAwareRMSNorm, "rms_norm"),
        "TPAwareGemmaRMSNorm": (TPAwareGemmaRMSNorm, NoisyTPAwareGemmaRMSNorm, "gemma_rms_norm"),
    }


def install() -> None:
    """Register our classes in vLLM's out-of-tree registry, once per process."""
    for name, (parent, ours, op_name) in _CLASSES.items():
        if op_registry_oot.get(name) is ours:
            continue
        parent.register_oot(ours, name=name)
        ours.name = op_name  # the stock class's name in compilation_config.custom_ops


class _InFloat32:
    """Mixin for a norm class that is not an operator of vLLM: runs the class's own forward in float32."""

    noisy = True

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        inputs = (x.float(),) if residual is None else (x.float(), residual.float())
        output = super().forward(*inputs)  # type: ignore[misc]  # the next class in the MRO
        if isinstance(output, tuple):
            return tuple(part if part is None else part.to(x.dtype) for part in output)
        return output.to(x.dtype)


@functools.cache
def _in_float32(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"Noisy{cls.__name__}", (_InFloat32, cls), {"__module__": __name__})


def make_noisy(model: nn.Module) -> None:
    """Enable noise on every other norm of `model`: LayerNorm (Cohere, StableLM, Phi, Nemotron) or a model's own class.
    Call it before the weights are loaded, so that they keep float32 values."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if isinstance(module, CustomOp) or weight is None or weight.ndim != 1 or not _is_norm(module):
            continue
        own: Any = type(module)
        module.__class__ = _in_float32(own)  # as torch.nn.utils.parametrize does
        for name, parameter in list(module.named_parameters(recurse=False)):
            wider = Parameter(parameter.data.float(), requires_grad=False)
            set_weight_attrs(wider, vars(parameter))
            setattr(module, name, wider)


class WideRMSNorm(NoisyRMSNorm):
    """Our norm with a wide output, compiled by torch.compile or not."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        return qerl_nvfp4.rms_norm(x, self.weight, self.variance_epsilon, residual, wide=True)


class WideSiluAndMul(SiluAndMul):
    """vLLM's SwiGLU with a wide output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return qerl_nvfp4.swiglu(x)


#: decoder layers of vLLM's models in which each of these outputs has one reader
_DECODERS = ("llama.LlamaDecoderLayer", "qwen2.Qwen2DecoderLayer", "qwen3.Qwen3DecoderLayer")
_READERS = {"input_layernorm": "self_attn.qkv_proj", "post_attention_layernorm": "mlp.gate_up_proj"}
_READERS |= {"mlp.act_fn": "mlp.down_proj"}


def make_wide(model: nn.Module) -> None:
    """Give the norms and SwiGLU of known decoder layers a wide output if its reader takes one."""
    dtype = torch.get_default_dtype()
    for decoder in model.modules():
        name = f"{type(decoder).__module__}.{type(decoder).__name__}"
        if name.removeprefix("vllm.model_executor.models.") not in _DECODERS:
            continue
        for path, reader in _READERS.items():
            module, layer = decoder.get_submodule(path), cast(Layer, decoder.get_submodule(reader))
            if not reads_wide(layer, dtype):
                continue
            if type(module) is NoisyRMSNorm and module.noisy:
                module.__class__ = WideRMSNorm
                expect_norm(module, dtype, wide=True)
            elif type(module) is SiluAndMul:
                module.__class__ = WideSiluAndMul
                expect_swiglu(module, dtype, layer.input_size_per_partition)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def find_norms(model: nn.Module, original: Callable[[str], str]) -> dict[str, nn.Module]:
    """Return the norms of a vLLM model that support noise, by transformers' names; `original` translates a name."""
    return {original(name): module for name, module in model.named_modules() if getattr(module, "noisy", False)}
