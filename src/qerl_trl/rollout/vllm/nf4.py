"""Linear method for a bitsandbytes base (QLoRA): the trainer's 4-bit tensors, and the adapter in our static buffers.

vLLM's bitsandbytes support is not used (0.31 has none): bitsandbytes computes each product as in the trainer, with the
same weights. q, k and v stay three packed tensors and products, since blocks of 64 values cross the ends of rows and
cannot be joined or cut. So there is no tensor parallelism.

Tensors per shard: packed, absmax, code; with double quantization also offset, absmax2, code2. All operations are
kernels on the current stream and allocations from PyTorch's pool, so CUDA graphs can capture them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method

from .linear import AdaptedMethod, Layer, add_adapter_, register_operator


def is_nf4(module: nn.Module) -> bool:
    """Whether `module` has 4-bit weights of bitsandbytes, without importing it."""
    weight = module._parameters.get("weight")
    return type(module).__module__.startswith("bitsandbytes") and hasattr(weight, "quant_state")


def _dequantize(tensors: list[Tensor], blocks: list[int], shape: list[int], kind: str, dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    packed, absmax, code, *nested = tensors
    state = QuantState(absmax, torch.Size(shape), code, blocks[0], kind, dtype)
    if nested:
        offset, absmax2, code2 = nested
        state.nested, state.offset = True, offset
        state.state2 = QuantState(absmax2, code=code2, blocksize=blocks[1], dtype=torch.float32)
    return dequantize_4bit(packed, state)


def _nf4_linear(
    x: Tensor, weights: list[Tensor], blocks: list[int], kind: str, dtype: torch.dtype,
    bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None, splits: list[int],
) -> Tensor:  # fmt: skip
    x_MK = x.reshape(-1, x.shape[-1])
    size, products, row = len(weights) // len(splits), [], 0
    for shard, width in enumerate(splits):
        tensors = weights[shard * size : (shard + 1) * size]
        weight_NK = _dequantize(tensors, blocks, [width, x_MK.shape[1]], kind, dtype).to(x.dtype)
        products.append(F.linear(x_MK, weight_NK, None if bias is None else bias[row : row + width]))
        row += width
    y_MN = products[0] if len(products) == 1 else torch.cat(products, dim=1)
    if lora_a is not None and lora_b is not None:
        add_adapter_(y_MN, x_MK, lora_a, lora_b, splits)
    return y_MN.view(*x.shape[:-1], -1)


register_operator(
    "nf4_linear(Tensor x, Tensor[] weights, int[] blocks, str kind, ScalarType dtype, Tensor? bias, Tensor? lora_a, "
    "Tensor? lora_b, int[] splits) -> Tensor",
    _nf4_linear,
    lambda x, weights, blocks, kind, dtype, bias, lora_a, lora_b, splits: x.new_empty((*x.shape[:-1], sum(splits))),
)


@register_weight_loader_v2_supported_method
class NF4Method(AdaptedMethod):
    """Multiply with the trainer's `Params4bit`, installed by the loader. supported.py refuses tensor parallelism."""

    @torch.no_grad()
    def set_weights(self, layer: Layer, modules: list[Any], alias: bool) -> None:
        """Install the 4-bit weights of the trainer's `modules`, one per shard, as copies unless `alias`."""
        states = [module.weight.quant_state for module in modules]
        kinds = {(s.quant_type, s.dtype, s.nested, s.blocksize, s.state2.blocksize if s.nested else 0) for s in states}
        ((layer.nf4_kind, layer.nf4_dtype, nested, *blocks),) = kinds
        layer.nf4_blocks = blocks
        tensors: list[Tensor] = []
        for module, state in zip(modules, states, strict=True):
            packed = module.weight.data.as_subclass(Tensor)
            parts = [packed, state.absmax, state.code]
            if nested:
                parts += [state.offset, state.state2.absmax, state.state2.code]
            tensors += [part.detach().to(packed.device) for part in parts]
        for index, tensor in enumerate(tensors):
            # buffers, so that torch.compile treats them as graph inputs
            layer.register_buffer(f"nf4_{index}", tensor if alias else tensor.clone(), persistent=False)
        layer.nf4_tensors = len(tensors)

    def apply(self, layer: Layer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weights = [layer.get_buffer(f"nf4_{index}") for index in range(layer.nf4_tensors)]
        how = layer.nf4_blocks, layer.nf4_kind, layer.nf4_dtype
        adapter = layer.adapter_a, layer.adapter_b, layer.qerl_splits
        return torch.ops.qerl.nf4_linear(x, weights, *how, bias, *adapter)
