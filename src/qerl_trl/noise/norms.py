"""Find the norms for the noise: those in front of a linear layer.

Noise z on the weight of an RMSNorm perturbs all linear layers reading its output, as if column j of each of their
weights were scaled by 1 + z_j / w_j (the paper, Section 3.3). This needs a norm read directly by a linear layer, and
these differ by family: `input_layernorm` and `post_attention_layernorm` on Llama and Qwen, `pre_feedforward_layernorm`
instead of the latter on Gemma 2 and 3 (there `post_attention_layernorm` feeds the residual stream), none at all on
OLMo-2. No table of names: one forward of four tokens is traced, and a norm is taken if a linear layer received its
output tensor (by storage, so views count).

Left out: norms inside attention (q_norm, k_norm, latent attention), sandwich norms, and the final norm (output head).
"""

import copy
import importlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from ..nvfp4.linear import NVFP4Linear, decoded_weights
from ..support.names import canonical_name, full_tensors, unwrap
from ..support.phases import evaluation_mode


def find_noisy_norms(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> dict[str, nn.Module]:
    """Find the norms that feed a linear layer other than the output head, by canonical name, in model order.

    Runs one forward of four tokens; random state, gradients and training flags are unchanged. Under FSDP2 and ZeRO-3 it
    is collective: call this on every rank.

    Args:
        model: a causal language model of transformers, bare or inside PEFT, DDP, FSDP2 or torch.compile; on one device
        or several, quantized or not.
        inputs: keyword arguments of the forward, if `input_ids` of shape (1, 4) are not enough.

    Returns:
        {"model.layers.0.input_layernorm": module, ...}; under PEFT's `modules_to_save` the module is the trained copy.

    Raises:
        ValueError: no norm of the model feeds a linear layer (OLMo-2, for example).
    """
    whole: Any = unwrap(model)
    text = whole.config.get_text_config(decoder=True)
    norms = {}
    for name, module in whole.named_modules():
        weight = module._parameters.get("weight")
        # ZeRO-3 keeps an empty tensor between forwards and the true shape in ds_shape
        shape = () if weight is None else tuple(getattr(weight, "ds_shape", weight.shape))
        if "norm" in type(module).__name__.lower() and shape == (text.hidden_size,):
            norms[name] = module
    if inputs is None:
        tokens = torch.arange(1, 5, device=next(whole.get_input_embeddings().parameters()).device)
        inputs = {"input_ids": tokens.remainder(text.vocab_size)[None], "use_cache": False}
    fed = _trace(whole, norms, inputs)
    found = {canonical_name(name): module for name, module in norms.items() if name in fed}
    if not found:
        seen = sorted({type(module).__name__ for module in norms.values()}) or ["none"]
        base = whole.get_base_model() if isinstance(whole, PeftModel) else whole
        raise ValueError(
            f"{type(base).__name__} has no norm that feeds a linear layer, as in OLMo-2 (norm classes of hidden size: "
            f"{', '.join(seen)}). Train without noise (aqn=False, or no AQNCallback), or choose a pre-norm model."
        )
    return found


@torch.no_grad()
def multiplier_rms(norms: Mapping[str, nn.Module]) -> dict[str, float]:
    """Return the rms of each norm's multiplier: its weight, or 1 + weight in classes that add 1 (Gemma, Qwen3-Next).

    Summed exactly, so every rank and device gets the same bits. Collective under FSDP 2 and ZeRO-3.
    """
    parameters: list[Any] = [module._parameters["weight"] for module in norms.values()]
    gathered: Any = nullcontext()
    if hasattr(parameters[0], "ds_id"):  # ZeRO-3
        gathered = importlib.import_module("deepspeed").zero.GatheredParameters(parameters)
    with gathered:
        weights = [weight.clone() for weight in full_tensors(parameters)]
    found = {}
    for (name, module), weight in zip(norms.items(), weights, strict=True):
        values = (weight.double().cpu() + _added(module, weight.numel())).tolist()
        found[name] = math.sqrt(math.fsum(value * value for value in values) / len(values))
    return found


def _added(norm: nn.Module, size: int) -> int:
    """Return 1 if the norm's class multiplies by 1 + weight, else 0: its output for 1, -1, ... with zero weights."""
    bare = copy.copy(norm)
    parameters: Any = {name: None if p is None else torch.zeros(size) for name, p in norm._parameters.items()}
    bare._parameters = parameters
    return round(type(norm).forward(bare, torch.ones(size).mul_((-1) ** torch.arange(size))[None]).abs().mean().item())


def _trace(model: Any, norms: Mapping[str, nn.Module], inputs: Mapping[str, Any]) -> set[str]:
    """Return the names of the norms that fed a linear layer in one forward."""
    head = model.get_output_embeddings()
    head_modules = set(head.modules()) if head is not None else set()
    source: dict[int, str] = {}
    outputs: list[torch.Tensor] = []  # kept alive, so that no other tensor reuses their storage addresses
    fed: set[str] = set()

    def on_norm(name, module, args, output):
        if isinstance(output, torch.Tensor):
            outputs.append(output)
            source[output.untyped_storage().data_ptr()] = name

    def on_linear(module, args, kwargs):
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                name = source.get(value.untyped_storage().data_ptr())
                if name is not None:
                    fed.add(name)

    handles = [module.register_forward_hook(partial(on_norm, name)) for name, module in norms.items()]
    for module in model.modules():
        linear = isinstance(module, nn.Linear) or hasattr(module, "in_features")  # the second: quantized by others
        # fused experts are one 3-D parameter per projection and no nn.Linear
        fused = any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))
        if module not in head_modules and (linear or fused):
            handles.append(module.register_forward_pre_hook(on_linear, with_kwargs=True))
    device = next(model.parameters()).device
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            evaluation_mode(model),
            decoded_weights(model),
            _no_products(model),
            torch.compiler.set_stance("force_eager"),
        ):
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return fed


@contextmanager
def _no_products(model: nn.Module) -> Iterator[None]:
    """Context manager in which packed layers return zeros: the trace ignores values, and decoding the weights of a 7B
    model on a CPU (under FSDP until training starts) takes a minute."""

    def zeros(layer: NVFP4Linear, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(*x.shape[:-1], layer.out_features)

    layers = [m for m in model.modules() if isinstance(m, NVFP4Linear) and "forward" not in vars(m)]
    for layer in layers:
        vars(layer)["forward"] = partial(zeros, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]
