"""vLLM linear methods with the adapter inside: y = base(x) + (x A^T) B^T, in static buffers.

Reinforcement learning has one adapter for all tokens, so vLLM's multi-adapter machinery is not needed. Each adapted
layer has two buffers next to its weights; a sync is an in-place copy into them (state.py), so CUDA graphs and
torch.compile stay valid.

Shapes (of one tensor-parallel rank): K input features, N output features, S fused shards (q, k, v), r padded rank.
    weight_packed (N, K/2) uint8, weight_scale (N, K/16) uint8 in rows of whole 16 bytes
    weight_global_scale float32 (1,) or (N,), a divisor
    adapter_a (S*r, K), adapter_b (N, r) with alpha/r folded in; shard i uses rows i*r:(i+1)*r of adapter_a
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter
from vllm.model_executor.utils import set_weight_attrs

import qerl_nvfp4
from qerl_nvfp4 import cost

from ...nvfp4.checkpoints import LAYOUTS
from ...nvfp4.format import BLOCK_SIZE, dequantize_fp8, largest_magnitude, power_of_two_global_scale
from ..engine import BATCH_INVARIANT, batch_invariant
from .compile_ahead import compile_expected, expect_layer

#: vLLM's `LinearBase` with our attributes: weights, `adapter_a`, `adapter_b`, `qerl_splits`. Any, because the type
#: checker takes a module's attributes for tensors or modules
Layer = Any
#: vLLM's weight loader of one parameter
Loader = Callable | None
#: adapter buffers are padded with zeros to a multiple of this rank: the tensor cores' smallest inner dimension
RANK_MULTIPLE = 16
_LIBRARY = torch.library.Library("qerl", "FRAGMENT")


def register_operator(definition: str, implementation: Callable, fake: Callable) -> None:
    """Register an operator `qerl::name` of schema `definition`, opaque to torch.compile and recorded by CUDA graphs.
    `fake` takes the same arguments and returns empty results, for tracing."""
    name = definition.partition("(")[0]
    _LIBRARY.define(definition)
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, device)
    torch.library.register_fake(f"qerl::{name}", fake, lib=_LIBRARY)


def _dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, splits: list[int]) -> Tensor:
    x_MK = x.reshape(-1, x.shape[-1])
    y_MN = add_adapter_(F.linear(x_MK, weight, bias), x_MK, a, b, splits)
    return y_MN.view(*x.shape[:-1], -1)


def add_adapter_(y_MN: Tensor, x_MK: Tensor, lora_a: Tensor, lora_b: Tensor, splits: list[int]) -> Tensor:
    """Compute y += (x A^T) B^T, shard by shard, in place."""
    rank, column = lora_b.shape[1], 0
    down_MR = F.linear(x_MK, lora_a)
    for shard, width in enumerate(splits):
        b_NR = lora_b[column : column + width]
        y_MN[:, column : column + width].addmm_(down_MR[:, shard * rank : (shard + 1) * rank], b_NR.t())
        column += width
    return y_MN


register_operator(
    "dense_linear(Tensor x, Tensor weight, Tensor? bias, Tensor lora_a, Tensor lora_b, int[] splits) -> Tensor",
    _dense_linear,
    lambda x, weight, *rest: x.new_empty((*x.shape[:-1], weight.shape[0])),
)


class AdaptedMethod(LinearMethodBase):
    """Base class of our linear methods, which names the fused layers and creates the adapter's buffers.

    Args:
        names: the checkpoint's layers fused in this layer, in row order.
        rank: rank to reserve for an adapter; 0 for none.
        scale_rule: block-scale rule, for quantization at load.
        deferred: allocate nothing, since the loader installs the trainer's tensors.
        rows: output features of each of `names` on one rank, if the trainer's layers are known.
        compute: arithmetic of packed layers, "w4a16" or "w4a8".
    """

    supports_pre_processed_weights = False
    #: kernels compute a row to the same bits in any batch, unlike cuBLAS
    can_be_batch_invariant = False

    def __init__(
        self,
        names: list[str],
        rank: int,
        scale_rule: str = "rtn",
        deferred: bool = False,
        rows: list[int] | None = None,
        compute: str = "w4a16",
    ) -> None:
        self.names, self.rank, self.scale_rule, self.deferred, self.rows = names, rank, scale_rule, deferred, rows
        self.batch_invariant, self.compute = batch_invariant(), compute

    def create_weights(
        self,
        layer: Layer,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Loader = None,
        **extra: Any,
    ) -> None:
        """Create the adapter's buffers and the method's weights; a hook that vLLM calls."""
        self._common(layer, input_size_per_partition, output_partition_sizes, params_dtype)
        self._create(layer, input_size_per_partition, output_partition_sizes, params_dtype, weight_loader)

    def _create(self, layer: Layer, k: int, widths: list[int], dtype: torch.dtype, weight_loader: Loader) -> None:
        """Create the weights of a layer with K = `k` and shards of `widths` rows on this rank."""

    def _common(self, layer: Layer, k: int, widths: list[int], dtype: torch.dtype) -> None:
        if self.batch_invariant and not self.can_be_batch_invariant:
            raise ValueError(
                f"{BATCH_INVARIANT}=1 is set, and {self.names} are not NVFP4: their products depend on the batch. "
                "Leave that mode off, or quantize them."
            )
        layer.logical_widths = list(widths)
        if len(self.names) == len(widths):
            splits = list(widths)
        else:  # fused already in the checkpoint (Phi-3, Qwen3.5): one adapter and one tensor scale each
            ranks, _ = parts_of(layer)
            splits = [sum(widths)] if len(self.names) == 1 else list(self.rows or ())
            if sum(splits) != sum(widths) or (self.rank and ranks > 1):
                raise ValueError(
                    f"vLLM fuses {self.names} into {len(widths)} shards, and this rank lacks the rows of each. "
                    "Use vllm_mode='colocate' with vllm_tensor_parallel_size=1, or use_vllm=False."
                )
        layer.qerl_splits = splits
        layer.input_size_per_partition, layer.output_size_per_partition = k, sum(widths)
        layer.adapter_a = layer.adapter_b = None
        if self.rank:
            padded = -(-self.rank // RANK_MULTIPLE) * RANK_MULTIPLE
            for name, shape in (("adapter_a", (len(splits) * padded, k)), ("adapter_b", (sum(splits), padded))):
                del layer.__dict__[name]
                layer.register_buffer(name, torch.zeros(shape, dtype=dtype), persistent=False)

    def full_sizes(self, layer: Layer, shard: int) -> tuple[int, int]:
        """Return the rows of B and the columns of A of a shard before tensor parallelism."""
        width, k, (ranks, _) = layer.qerl_splits[shard], layer.input_size_per_partition, parts_of(layer)
        if isinstance(layer, RowParallelLinear):
            return width, k * ranks
        if ranks > 1 and isinstance(layer, QKVParallelLinear) and shard > 0:
            ranks //= layer.num_kv_head_replicas
        return width * ranks, k

    def shard_slices(self, layer: Layer, shard: int) -> tuple[slice, slice]:
        """Return this rank's part of a shard under tensor parallelism: (rows of B, columns of A)."""
        width, (ranks, rank) = layer.qerl_splits[shard], parts_of(layer)
        if isinstance(layer, RowParallelLinear):
            k = layer.input_size_per_partition
            return slice(0, width), slice(rank * k, (rank + 1) * k)
        if ranks == 1:
            rank = 0
        elif isinstance(layer, QKVParallelLinear) and shard > 0:
            rank //= layer.num_kv_head_replicas
        return slice(rank * width, (rank + 1) * width), slice(0, layer.input_size_per_partition)


def parts_of(layer: Layer) -> tuple[int, int]:
    """Return (tensor-parallel ranks of a layer, this rank). vLLM gives a replicated layer a `tp_size` too."""
    if isinstance(layer, ReplicatedLinear):
        return 1, 0
    return layer.tp_size, layer.tp_rank


def on_hopper() -> bool:
    """Return whether this process's GPU runs Hopper's kernels."""
    return qerl_nvfp4.is_available() and torch.cuda.get_device_capability()[0] == 9


def reads_wide(layer: Layer, dtype: torch.dtype) -> bool:
    """Return whether a layer of a model in `dtype` multiplies the FP8 copy in a wide tensor (`qerl_nvfp4.rms_norm`)."""
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, _PackedMethod) or method.compute != "w4a8" or method.batch_invariant:
        return False
    fits = cost.fits(layer.output_size_per_partition, layer.input_size_per_partition)
    return fits and parts_of(layer)[0] == 1 and dtype == torch.bfloat16 and on_hopper()


def _expect_scales(layer: Layer, names: tuple[str, ...], shards: int, weight_loader: Loader) -> None:
    """Create parameters for the tensor scales of each shard, NaN until loaded, to detect a missing scale."""
    for name in names:
        data = torch.full((shards,), float("nan"), dtype=torch.float32)
        layer.register_parameter(name, PerTensorScaleParameter(data=data, weight_loader=weight_loader))


def _check_scales(names: list[str], scales: Tensor) -> None:
    if not bool(((scales > 0) & scales.isfinite()).all()):
        raise ValueError(f"The scales of {names} are {scales.tolist()} after loading. Quantize the checkpoint again.")


class _PackedMethod(AdaptedMethod):
    """Base class of the methods for packed base weights."""

    can_be_batch_invariant = True

    def _common(self, layer: Layer, k: int, widths: list[int], dtype: torch.dtype) -> None:
        super()._common(layer, k, widths, dtype)
        layer.qerl_ready = False
        expect_layer(layer, dtype, self.batch_invariant, self.compute)

    def apply(self, layer: Layer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = layer.weight_packed, layer.weight_scale, layer.weight_global_scale
        adapter = layer.adapter_a, layer.adapter_b, layer.qerl_splits
        return qerl_nvfp4.linear(x, *weight, bias, *adapter, self.batch_invariant, self.compute)

    @staticmethod
    def set_weights(layer: Layer, packed: Tensor, scale: Tensor, global_scale: Tensor) -> None:
        """Install final tensors without a copy, so views of the trainer's storage stay views. Only block scales with K
        not a multiple of 256, a ninth of the matrix, are copied to padded rows for Hopper's kernels."""
        layer.weight_packed = Parameter(packed, requires_grad=False)
        scale = qerl_nvfp4.align_scale_rows(scale.view(torch.uint8))
        layer.weight_scale = Parameter(scale, requires_grad=False)
        layer.weight_global_scale = Parameter(global_scale, requires_grad=False)
        layer.qerl_ready = True

    @staticmethod
    def row_scale(per_shard: Tensor, widths: list[int]) -> Tensor:
        """Return one divisor if all shards agree, else one per row: exact for fused layers, unlike their maximum."""
        per_shard = per_shard.float().flatten()
        if bool((per_shard == per_shard[0]).all()):
            return per_shard[:1].clone()
        return torch.cat([scale.expand(width) for scale, width in zip(per_shard, widths, strict=True)]).contiguous()


@register_weight_loader_v2_supported_method
class NVFP4Method(_PackedMethod):
    """Packed weights in the compressed-tensors layout, from a checkpoint or from the trainer."""

    layout = LAYOUTS["compressed-tensors"]
    per_tensor: tuple[str, ...] = (layout.global_scale,)

    def _create(self, layer: Layer, k: int, widths: list[int], dtype: torch.dtype, weight_loader: Loader) -> None:
        n, device = sum(widths), "meta" if self.deferred else None
        packed = torch.empty(n, k // 2, dtype=torch.uint8, device=device)
        scale = torch.empty(n, k // BLOCK_SIZE, dtype=torch.float8_e4m3fn, device=device)
        how: dict[str, Any] = {"input_dim": 1, "output_dim": 0, "weight_loader": weight_loader}
        layer.register_parameter(self.layout.packed, ModelWeightParameter(data=packed, **how))
        layer.register_parameter(self.layout.block_scale, GroupQuantScaleParameter(data=scale, **how))
        _expect_scales(layer, self.per_tensor, len(widths), weight_loader)

    def _divisors(self, layer: Layer) -> Tensor:
        scales = layer.get_parameter(self.layout.global_scale).data
        return scales if self.layout.divides else 1.0 / scales.float()

    def process_weights_after_loading(self, layer: Layer) -> None:
        compile_expected()
        if layer.qerl_ready:
            return
        divisors = self._divisors(layer)[: len(layer.qerl_splits)]
        _check_scales(self.names, divisors)
        packed, scale = (layer.get_parameter(name).data for name in (self.layout.packed, self.layout.block_scale))
        for name in (self.layout.packed, self.layout.block_scale, *self.per_tensor):
            delattr(layer, name)
        self.set_weights(layer, packed, scale, self.row_scale(divisors, layer.qerl_splits))


@register_weight_loader_v2_supported_method
class ModelOptNVFP4Method(NVFP4Method):
    """ModelOpt's layout: `weight`, `weight_scale`, and the factor `weight_scale_2`. `input_scale` belongs to W4A4."""

    layout = LAYOUTS["modelopt"]
    per_tensor = (layout.global_scale, "input_scale")


@register_weight_loader_v2_supported_method
class OnlineNVFP4Method(_PackedMethod):
    """A bf16 checkpoint, quantized layer by layer at load, with the trainer's rule and one scale per fused group."""

    uses_meta_device = True

    def _create(self, layer: Layer, k: int, widths: list[int], dtype: torch.dtype, weight_loader: Loader) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

        weight = torch.empty(sum(widths), k, dtype=dtype, device="meta")
        parameter = ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=weight_loader)
        layer.register_parameter("weight", parameter)
        initialize_online_processing(layer)

    @torch.no_grad()
    def process_weights_after_loading(self, layer: Layer) -> None:
        compile_expected()
        if layer.qerl_ready:
            return
        weight = layer.weight.data
        amax = largest_magnitude(weight)
        if layer.tp_size > 1:
            torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=get_tp_group().device_group)
        global_scale = power_of_two_global_scale(amax).to(weight.device)
        packed, scale = qerl_nvfp4.quantize(weight, self.scale_rule, global_scale)
        del layer.weight
        self.set_weights(layer, packed, scale, global_scale)
        layer._already_called_process_weights_after_loading = True


@register_weight_loader_v2_supported_method
class DenseMethod(AdaptedMethod):
    """An unquantized linear with the same adapter buffers, for LoRA or noise on a bf16 base in this engine."""

    def _create(self, layer: Layer, k: int, widths: list[int], dtype: torch.dtype, weight_loader: Loader) -> None:
        data = torch.empty(sum(widths), k, dtype=dtype, device="meta" if self.deferred else None)
        weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=weight_loader)
        layer.register_parameter("weight", weight)

    def apply(self, layer: Layer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if layer.adapter_a is None:
            return F.linear(x, layer.weight, bias)
        return torch.ops.qerl.dense_linear(x, layer.weight, bias, layer.adapter_a, layer.adapter_b, layer.qerl_splits)


@register_weight_loader_v2_supported_method
class ModelOptFP8Method(DenseMethod):
    """FP8 layers of a mixed ModelOpt checkpoint: dense once loaded, bit-equal to the trainer's (nvfp4/format.py)."""

    per_tensor = ("weight_scale", "input_scale")

    def _create(self, layer: Layer, k: int, widths: list[int], dtype: torch.dtype, weight_loader: Loader) -> None:
        self.dtype = dtype
        codes = torch.empty(sum(widths), k, dtype=torch.float8_e4m3fn)
        weight = ModelWeightParameter(data=codes, input_dim=1, output_dim=0, weight_loader=weight_loader)
        layer.register_parameter("weight", weight)
        _expect_scales(layer, self.per_tensor, len(widths), weight_loader)

    def process_weights_after_loading(self, layer: Layer) -> None:
        if layer.weight.dtype == self.dtype:
            return
        codes, scales = layer.weight.data.split(layer.qerl_splits), layer.weight_scale.data
        _check_scales(self.names, scales)
        parts = [dequantize_fp8(part, scale, self.dtype) for part, scale in zip(codes, scales, strict=False)]
        for name in ("weight", *self.per_tensor):
            delattr(layer, name)
        layer.weight = Parameter(torch.cat(parts), requires_grad=False)


class EmbeddingMethod(UnquantizedEmbeddingMethod):
    """Embedding and head, unchanged after loading: vLLM's own method would repack them for the CPU."""

    def __init__(self, deferred: bool) -> None:
        self.deferred, self.batch_invariant = deferred, batch_invariant()

    def create_weights(
        self,
        layer: Layer,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        device = "meta" if self.deferred else None
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype, device=device)
        weight = Parameter(data, requires_grad=False)
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0})
        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, extra)

    def process_weights_after_loading(self, layer: Layer) -> None:
        """Do nothing: the packed copy that vLLM makes for a CPU would miss updates."""

    def apply(self, layer: Layer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.batch_invariant:
            return super().apply(layer, x, bias)
        return F.linear(x, layer.weight, bias)
