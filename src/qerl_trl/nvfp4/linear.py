"""`NVFP4Linear`: a frozen linear layer stored as packed NVFP4 bytes only.

    forward     y  = x W^T + b
    backward    dx = dy W           W is decoded again from the packed bytes: no dense weight is ever kept for backward
                                    (no gradient for W: the base is frozen, LoRA learns)

With `compute="w4a8"` both products round their operands to FP8 (format.py), for the tensor cores of sm_89 and newer; on
other devices PyTorch multiplies the rounded values in float32.

The kernels of `qerl_nvfp4` serve bf16 and fp16 on a CUDA device, if available; everything else (CPU, fp32, no triton)
uses the reference: dequantize, then `F.linear`. `describe` returns the choice and its reason.

The state is three `uint8` parameters, not float8 and not buffers: `.to(torch.bfloat16)`, FSDP2 mixed precision,
DeepSpeed's `.bfloat16()` and the gloo collectives all mangle float8 or float32 parameters, and DDP broadcasts buffers
at every forward.
"""

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from .checkpoints import LAYOUTS
from .format import (
    BLOCK_SIZE,
    COMPUTES,
    FP8_DIVISOR,
    NVFP4Tensor,
    as_rounded,
    decode_fp8,
    dequantize,
    quantize,
    quantize_fp8,
)
from .view import DecodedWeight, read

#: parameters of a layer's weight, in the order of `NVFP4Tensor`, with their names on disk
PACKED = LAYOUTS["compressed-tensors"].tensors
#: "decode" (by the kernel) and "reference" (plain PyTorch) decode the weight, to the same bits, for an ordinary product
IMPLEMENTATIONS = ("auto", "kernel", "decode", "reference")
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
#: "auto" uses cuBLAS above this number of tokens: training decodes the weight for the gradient anyway, and has many
#: lengths, while each kernel for a range of lengths takes seconds to compile
_MOST_TOKENS = 128


# --- choice of the implementation -------------------------------------------------------------------------------------


@functools.cache
def _kernels(device: torch.device) -> tuple[ModuleType | None, str]:
    """Return (the `qerl_nvfp4` package or None, reason) for a device."""
    if device.type != "cuda":
        return None, f"the kernels need a CUDA device, this is {device.type}"
    try:
        import qerl_nvfp4
    except ImportError as error:
        return None, f"the kernels could not be imported ({error})"
    if not qerl_nvfp4.is_available(device):
        return None, qerl_nvfp4.describe(device)
    return qerl_nvfp4, qerl_nvfp4.describe(device)


def kernels_for(device: torch.device) -> ModuleType | None:
    """Return the `qerl_nvfp4` package if its kernels run on `device`, else None."""
    return _kernels(device)[0]


def describe(device: torch.device | str) -> str:
    """Describe in one line the implementation of NVFP4 linears on `device`, and the reason."""
    kernels, reason = _kernels(torch.device(device))
    return f"NVFP4 linear on {device}: {'reference (dequantize + matmul)' if kernels is None else 'kernels'}; {reason}"


def _pick(device: torch.device, dtype: torch.dtype, implementation: str) -> ModuleType | None:
    """Return the kernel package to call, or None for the reference."""
    assert implementation in IMPLEMENTATIONS, implementation
    if implementation == "reference":
        return None
    kernels, reason = _kernels(device)
    if dtype not in _KERNEL_DTYPES:
        kernels, reason = None, f"the kernels compute in bf16 or fp16, not {dtype}"
    assert kernels is not None or implementation != "kernel", reason
    return kernels


def runs_a_kernel(device: torch.device, dtype: torch.dtype, tokens: int, implementation: str = "auto") -> bool:
    """True if a kernel multiplies this many tokens with the packed bytes, False if cuBLAS does."""
    kernels = _pick(device, dtype, implementation)
    few = implementation == "kernel" or (implementation == "auto" and tokens <= _MOST_TOKENS)
    return kernels is not None and few


def decode_into(
    out: torch.Tensor,
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    implementation: str = "auto",
) -> None:
    """Write the dense weight (N, K) into `out` (any row stride), in its dtype. All implementations agree bitwise."""
    kernels = _pick(out.device, out.dtype, implementation)
    if kernels is None:
        out.copy_(dequantize(packed, block_scale, global_scale, out.dtype))
    else:
        kernels.dequantize(packed, block_scale, global_scale, out.dtype, out=out)


@contextlib.contextmanager
def decoded_weights(model: nn.Module, compute: str | None = None) -> Iterator[None]:
    """Context manager in which every NVFP4 layer decodes its weight and uses cuBLAS, as in a training step of many
    tokens: kernels for few tokens would take seconds to compile. `compute`: in this arithmetic, not the layers' own."""
    layers = [layer for layer in model.modules() if isinstance(layer, NVFP4Linear) and layer.implementation == "auto"]
    own = [layer.compute for layer in layers]
    for layer in layers:
        layer.implementation, layer.compute = "decode", compute or layer.compute
    try:
        yield
    finally:
        for layer, its in zip(layers, own, strict=True):
            layer.implementation, layer.compute = "auto", its


# --- products in FP8 --------------------------------------------------------------------------------------------------


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """True if a device's tensor cores multiply E4M3 (sm_89 and newer)."""
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 9)
    )


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack matrices by rows: a view of the storage that a group shares (`fuse_storage`), else a copy."""
    first, after = parts[0], parts[0].data_ptr()
    for part in parts:
        same = part.data_ptr() == after and part.is_contiguous() and part.stride() == first.stride()
        if not same or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(parts))
        after += part.nbytes
    return first.as_strided((sum(part.shape[0] for part in parts), first.shape[1]), first.stride())


# Opaque to the compiler, so the dense weight is scratch in the forward and the backward pass, and the adapter is added
# in place: torch.addmm in compiled code copies the whole output first.
@torch.library.custom_op("qerl_trl::fp8_product", mutates_args=())
def _fp8_product(
    x8: torch.Tensor,
    scale: torch.Tensor,
    packed: list[torch.Tensor],
    block_scale: list[torch.Tensor],
    factor: torch.Tensor,
    down: torch.Tensor,
    up: list[torch.Tensor],
    implementation: str,
    transpose: bool,
) -> torch.Tensor:
    """Compute (x8 w8^T) * factor * scale + adapter in `down`'s dtype: x8 (M, K) and the decoded, stacked w8 (N, K) in
    E4M3, or w8^T with `transpose`; scale float32 (M,), factor float32 (N,). Columns i of `down` (M, R) times up_i
    (R_i, N_i) are added to columns i of the product."""
    kernels, dtype = _pick(x8.device, torch.bfloat16, implementation), down.dtype
    w8 = (decode_fp8 if kernels is None else kernels.dequantize_fp8)(_stacked(packed), _stacked(block_scale), transpose)
    if has_fp8(x8.device) and dtype in _KERNEL_DTYPES and not (w8.shape[0] % 16 or w8.shape[1] % 16):
        scales = scale.unsqueeze(1), factor.unsqueeze(0)
        # by rows it returns bfloat16 only; it adds up as the rollout's kernel does, in the tensor cores
        y = torch._scaled_mm(x8, w8.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True).to(dtype)
    else:
        with torch.autocast(x8.device.type, enabled=False):  # its cast would round the sums
            y = F.linear(x8.float(), w8.float()).mul_(factor).mul_(scale.unsqueeze(1)).to(dtype)
    rows, columns = ([part.shape[dim] for part in up] for dim in (0, 1))
    for part, left, right in zip(y.split(columns, 1), down.split(rows, 1), up, strict=True) if up else ():
        part.addmm_(left, right)
    return y


@_fp8_product.register_fake
def _(x8, scale, packed, block_scale, factor, down, up, implementation, transpose):
    return down.new_empty(x8.shape[0], factor.shape[0])


def _quantized(parts: Sequence[torch.Tensor], implementation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[`quantize_fp8`]; in eager code by one kernel instead of several passes over x, if there is one."""
    kernels = None if torch.compiler.is_compiling() else _pick(parts[0].device, parts[0].dtype, implementation)
    return quantize_fp8(*parts) if kernels is None else kernels.quantize_fp8(*parts)


def _of_rows(packed: Sequence[torch.Tensor], global_scale: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the divisor of each row of stacked matrices, (N,)."""
    return torch.cat([g.expand(p.shape[0]) for p, g in zip(packed, global_scale, strict=True)])


def fp8_forward(
    x: torch.Tensor,
    packed: Sequence[torch.Tensor],
    block_scale: Sequence[torch.Tensor],
    global_scale: Sequence[torch.Tensor],
    implementation: str = "auto",
    adapter: tuple[torch.Tensor, list[torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Compute x (M, K) times all packed matrices, (M, N) in x's dtype, with FP8 operands; x is rounded once.

    `adapter`: (t (M, R), [B_i^T (R_i, N_i), ...]), added by shards.
    """
    factor, (down, up) = FP8_DIVISOR / _of_rows(packed, global_scale), adapter or (x[:, :0], [])
    return _fp8_product(
        *_quantized([as_rounded(x)], implementation), list(packed), list(block_scale), factor, down, up, implementation,
        False,
    )  # fmt: skip


def fp8_backward(
    dys: Sequence[torch.Tensor],
    packed: Sequence[torch.Tensor],
    block_scale: Sequence[torch.Tensor],
    global_scale: Sequence[torch.Tensor],
    implementation: str = "auto",
    adapter: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute dx (M, K) from gradients dy_i (M, N_i) of [`fp8_forward`]; dy times the rows' factors is rounded once.

    `adapter`: (u (M, R), A (R, K)), added.
    """
    K, divisors = packed[0].shape[1] * 2, list(global_scale)
    kernels = None if torch.compiler.is_compiling() else _pick(dys[0].device, dys[0].dtype, implementation)
    if kernels is not None:
        divisor, dy = divisors[0], dys[0]
        if len(packed) > 1:
            divisor, dy = _of_rows(packed, divisors), torch.cat(list(dys), 1)
        dx = kernels.linear_backward(dy, _stacked(packed), _stacked(block_scale), divisor, compute="w4a8")
        return dx if adapter is None else dx.addmm_(*adapter)
    down, up = (dys[0][:, :0], []) if adapter is None else (adapter[0], [adapter[1]])
    if len(divisors) == 1 and divisors[0].numel() == 1:
        parts, factor = [as_rounded(dys[0])], (FP8_DIVISOR / divisors[0]).expand(K).contiguous()
    else:
        parts = [as_rounded(dy).to(torch.float32) * (FP8_DIVISOR / g) for dy, g in zip(dys, divisors, strict=True)]
        factor = divisors[0].new_ones(K)
    return _fp8_product(
        *_quantized(parts, implementation), list(packed), list(block_scale), factor, down, up, implementation, True
    )


# --- the operation ----------------------------------------------------------------------------------------------------


def _forward(
    x: torch.Tensor,
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    implementation: str,
) -> torch.Tensor:
    kernels = _pick(x.device, x.dtype, implementation)
    tokens = x.numel() // x.shape[-1]
    # above their last length the kernels choose the same, with a reused buffer
    many = implementation == "auto" and kernels is not None and _MOST_TOKENS < tokens <= kernels.select.cost.SIZES[-1]
    if kernels is not None and (many or implementation == "decode"):
        return F.linear(x, kernels.dequantize(packed, block_scale, global_scale, x.dtype), bias)
    if kernels is not None:
        return kernels.linear(x, packed, block_scale, global_scale, bias)
    return F.linear(x, dequantize(packed, block_scale, global_scale, x.dtype), bias)


def _backward(
    dy: torch.Tensor, packed: torch.Tensor, block_scale: torch.Tensor, global_scale: torch.Tensor, implementation: str
) -> torch.Tensor:
    kernels = _pick(dy.device, dy.dtype, implementation)
    if kernels is not None:
        return kernels.linear_backward(dy, packed, block_scale, global_scale)
    return dy @ dequantize(packed, block_scale, global_scale, dy.dtype)


# Under torch.compile the next two replace these: kernels are registered operators, so a model compiles as one graph.
# In eager code the dispatcher would cost tens of microseconds per call.


def _traced_forward(
    x: torch.Tensor,
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    implementation: str,
) -> torch.Tensor:
    import qerl_nvfp4

    if implementation == "kernel":
        return qerl_nvfp4.linear(x, packed, block_scale, global_scale, bias)
    # compiled code trains, on many tokens: same choice as `_forward`
    return F.linear(x, qerl_nvfp4.dequantize(packed, block_scale, global_scale, x.dtype), bias)


def _traced_backward(
    dy: torch.Tensor, packed: torch.Tensor, block_scale: torch.Tensor, global_scale: torch.Tensor, implementation: str
) -> torch.Tensor:
    import qerl_nvfp4

    if implementation == "reference":
        return dy @ qerl_nvfp4.dequantize(packed, block_scale, global_scale, dy.dtype)
    return qerl_nvfp4.linear_backward(dy, packed, block_scale, global_scale)


def _forward_w4a8(
    x: torch.Tensor,
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    implementation: str,
) -> torch.Tensor:
    if not torch.compiler.is_compiling() and runs_a_kernel(x.device, x.dtype, x.numel() // x.shape[-1], implementation):
        kernels = cast(ModuleType, kernels_for(x.device))
        return kernels.linear(x, packed, block_scale, global_scale, bias, compute="w4a8")
    y = fp8_forward(x.reshape(-1, x.shape[-1]), [packed], [block_scale], [global_scale], implementation)
    y = y.view(*x.shape[:-1], y.shape[-1])
    return y if bias is None else y + bias


def _backward_w4a8(
    dy: torch.Tensor, packed: torch.Tensor, block_scale: torch.Tensor, global_scale: torch.Tensor, implementation: str
) -> torch.Tensor:
    dx = fp8_backward([dy.reshape(-1, dy.shape[-1])], [packed], [block_scale], [global_scale], implementation)
    return dx.view(*dy.shape[:-1], dx.shape[-1])


class _NVFP4Matmul(torch.autograd.Function):
    """The product, saving only the packed weight for backward. `global_scale`: float32 (1,) or (N,)."""

    @staticmethod
    def forward(ctx: Any, x, packed, block_scale, global_scale, bias, implementation, compute):
        ctx.save_for_backward(packed, block_scale, global_scale)
        ctx.implementation, ctx.compute = implementation, compute
        if compute == "w4a8":
            return _forward_w4a8(x, packed, block_scale, global_scale, bias, implementation)
        forward = _traced_forward if torch.compiler.is_compiling() else _forward
        return forward(x, packed, block_scale, global_scale, bias, implementation)

    @staticmethod
    def backward(ctx: Any, dy):
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            backward = _traced_backward if torch.compiler.is_compiling() else _backward
            backward = _backward_w4a8 if ctx.compute == "w4a8" else backward
            packed, block_scale, global_scale = ctx.saved_tensors
            dx = backward(dy, packed, block_scale, global_scale, ctx.implementation)
        if ctx.needs_input_grad[4]:
            dbias = dy.reshape(-1, dy.shape[-1]).sum(0)
        return dx, None, None, None, dbias, None, None


def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    implementation: str = "auto",
    compute: str = "w4a16",
) -> torch.Tensor:
    """Compute y = x W^T + bias for a packed W, differentiable in `x` and `bias`.

    x (..., K) float; packed uint8 (N, K/2); block_scale uint8 or float8_e4m3fn (N, K/16); global_scale float32 (1,) or
    (N,), divides; bias (N,) in x's dtype. Returns (..., N) in x's dtype. `implementation`: "auto"; "kernel", which
    raises if there is none (except under torch.compile, where the device is unknown); "decode", the decoding kernel,
    then cuBLAS; or "reference". `compute`: "w4a16", or "w4a8" for operands in FP8.
    """
    assert compute in COMPUTES, compute
    if torch.compiler.is_compiling():
        return _NVFP4Matmul.apply(x, packed, block_scale, global_scale, bias, implementation, compute)
    # as a matrix: the result must not be a view, or autograd refuses to add to it in place
    y = _NVFP4Matmul.apply(x.reshape(-1, x.shape[-1]), packed, block_scale, global_scale, bias, implementation, compute)
    return y.view(*x.shape[:-1], y.shape[-1])


# --- the layer --------------------------------------------------------------------------------------------------------


class NVFP4Linear(nn.Linear):
    """A frozen `nn.Linear` in NVFP4. A subclass, so that PEFT's "all-linear" finds it.

    Parameters, all without gradient (see `qerl_trl.nvfp4` for the format):
        weight_packed        uint8 (N, K/2)
        weight_scale         uint8 (N, K/16), E4M3 bit patterns
        weight_global_scale  uint8 (4,), the bytes of one float32 (a divisor)
        bias                 (N,) float, or None

    The dtype of the matmul: the dtype of autocast, if on; else the input's if it is bf16, fp16 or fp64; a float32
    input (fp32 norms in front, no autocast) is computed in `compute_dtype` and returned as float32.

    q/k/v and gate/up layers of one block may share one storage: each holds a row slice of it
    (`qerl_trl.nvfp4.fused.fuse_storage`). `copy.deepcopy` and `.to(device)` of the model keep that sharing.
    """

    #: (`weight_packed`,) of a layer that waits for weights from another process (quantizer.py); FSDP replaces it
    unread: tuple[nn.Parameter] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        compute_dtype: torch.dtype = torch.bfloat16,
    ):
        nn.Module.__init__(self)  # nn.Linear's would allocate the dense weight
        self.in_features, self.out_features = in_features, out_features
        self.compute_dtype = compute_dtype  # read by PEFT as the layer's dtype
        self.implementation = "auto"
        self.compute = "w4a16"  # or "w4a8"
        self.fused_rows: int | None = None  # rows of the shared storage; None: not shared
        self.weight_packed = _frozen(torch.empty(out_features, in_features // 2, dtype=torch.uint8, device=device))
        self.weight_scale = _frozen(
            torch.empty(out_features, in_features // BLOCK_SIZE, dtype=torch.uint8, device=device)
        )
        self.weight_global_scale = _frozen(torch.empty(4, dtype=torch.uint8, device=device))
        empty = _frozen(torch.empty(out_features, dtype=compute_dtype, device=device)) if bias else None
        self.register_parameter("bias", empty)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, scale_rule: str = "rtn", global_scale: torch.Tensor | None = None
    ) -> "NVFP4Linear":
        """Quantize a dense layer. The bias is shared, not copied. `compute_dtype` is the dense weight's dtype."""
        weight = linear.weight.detach()
        return cls.from_nvfp4(quantize(weight, scale_rule, global_scale), linear.bias, weight.dtype)

    @classmethod
    def from_nvfp4(
        cls, tensor: NVFP4Tensor, bias: torch.Tensor | None = None, compute_dtype: torch.dtype = torch.bfloat16
    ) -> "NVFP4Linear":
        """Wrap a quantized matrix without a copy. Block scales: uint8 or float8_e4m3fn; global scale: one float32."""
        packed, block_scale, global_scale = tensor
        out_features, in_features = packed.shape[0], packed.shape[1] * 2
        layer = cls(in_features, out_features, bias=False, device="meta", compute_dtype=compute_dtype)
        layer.weight_packed = _frozen(packed)
        layer.weight_scale = _frozen(block_scale.view(torch.uint8))
        layer.weight_global_scale = _frozen(global_scale.detach().float().reshape(1).contiguous().view(torch.uint8))
        layer.register_parameter("bias", None if bias is None else _frozen(bias))
        return layer

    @property
    def weight(self) -> DecodedWeight:  # type: ignore[override]  # not a parameter
        """The dense weight (N, K), decoded on each read; see view.py for writes."""
        return DecodedWeight(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
        # `layer.weight = layer.weight`, as in PEFT's unload, changes nothing
        elif not (isinstance(value, DecodedWeight) and value.layer is self):
            value = read(value)  # perhaps of another packed layer: read it before this layer is dense
            self.become_dense().weight = value if isinstance(value, nn.Parameter) else _frozen(value)

    @property
    def W_q(self) -> nn.Parameter:
        """Attribute by which PEFT finds a layer's `dequantize()` (DoRA needs the dense weight's norm)."""
        return self.weight_packed

    @property
    def global_scale(self) -> torch.Tensor:
        """float32 (1,), a view of the parameter's bytes."""
        return as_bytes(self.weight_global_scale.detach()).view(torch.float32)

    @property
    def nvfp4(self) -> NVFP4Tensor:
        """The three packed tensors, as views (uint8, uint8, float32). Raises `RuntimeError` if they were not read."""
        if self.unread is not None and self.unread[0] is self.weight_packed:
            raise RuntimeError(
                "The weights of this NVFP4 layer were not read: with fsdp_cpu_ram_efficient_loading only the first "
                "process reads them. Call accelerator.prepare(model) before it computes, or set that option to false."
            )
        packed, block_scale = as_bytes(self.weight_packed.detach()), as_bytes(self.weight_scale.detach())
        return NVFP4Tensor(packed, block_scale, self.global_scale)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the dense weight (N, K), by default in `compute_dtype`."""
        return dequantize(*self.nvfp4, dtype or self.compute_dtype)

    def to_dense(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """Return a frozen `nn.Linear` with the decoded weight and a copied bias, by default in `compute_dtype`."""
        dtype = dtype or self.compute_dtype
        dense = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        dense.weight = _frozen(self.dequantize(dtype))
        dense.register_parameter("bias", None if self.bias is None else _frozen(self.bias.detach().clone().to(dtype)))
        return dense

    def become_dense(self) -> nn.Linear:
        """Turn this module in place into the `nn.Linear` of `to_dense`. Irreversible."""
        dense = self.to_dense()
        for name in PACKED:
            del self._parameters[name]
        for name in ("compute_dtype", "implementation", "compute", "fused_rows"):
            vars(self).pop(name)
        self.__class__ = nn.Linear  # type: ignore[assignment]
        self.register_parameter("weight", cast(nn.Parameter, dense.weight))
        return self

    def forward(self, x: torch.Tensor, implementation: str | None = None) -> torch.Tensor:
        """Compute x (..., K) -> (..., N). `implementation` overrides the layer's for this call."""
        output_dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = output_dtype = torch.get_autocast_dtype(x.device.type)
        else:
            dtype = self.compute_dtype if x.dtype == torch.float32 else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        y = linear(x.to(dtype), *self.nvfp4, bias, implementation or self.implementation, self.compute)
        return y.to(output_dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, nvfp4"

    # --- shared storage: a deepcopy or a move copies the fused storage once, and slices it again --------------

    def __deepcopy__(self, memo: dict[int, Any]) -> "NVFP4Linear":
        for parameter in (self.weight_packed, self.weight_scale):
            if id(parameter) not in memo and self._is_slice(parameter):
                key = -parameter.untyped_storage().data_ptr()  # ids are positive: no clash
                if key not in memo:
                    memo[key] = whole_storage(parameter).clone()
                memo[id(parameter)] = _frozen(slice_like(memo[key], parameter))
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "NVFP4Linear":
        def move(tensor: torch.Tensor) -> torch.Tensor:
            return move_slice(fn, tensor) if self._is_slice(tensor) else fn(tensor)

        return super()._apply(move, recurse)

    def _is_slice(self, tensor: torch.Tensor) -> bool:
        """True if `tensor` is still one of this layer's row slices of a fused storage."""
        if self.fused_rows is None or tensor.dtype != torch.uint8 or tensor.ndim != 2 or tensor.device.type == "meta":
            return False
        return tensor.untyped_storage().nbytes() == self.fused_rows * tensor.shape[1]


def has_nvfp4(model: nn.Module) -> bool:
    """True if any layer of the model is packed."""
    return any(isinstance(module, NVFP4Linear) for module in model.modules())


def set_compute(model: nn.Module, compute: str) -> None:
    """Let the packed layers of a model compute in "w4a16" or "w4a8"."""
    assert compute in COMPUTES, compute
    for module in model.modules():
        if isinstance(module, NVFP4Linear):
            module.compute = compute


def compute_of(model: nn.Module) -> str:
    """Return the arithmetic of a model's packed layers, "w4a16" without any."""
    return next((module.compute for module in model.modules() if isinstance(module, NVFP4Linear)), "w4a16")


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return a model's compute dtype: of its packed layers, else of its embeddings."""
    for module in model.modules():
        if isinstance(module, NVFP4Linear):
            return module.compute_dtype
    return model.get_input_embeddings().weight.dtype  # type: ignore[operator]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a packed parameter as uint8 again: FSDP 2 of torch 2.11 casts even integers to the dtype of mixed
    precision, exact for 0 to 255. (2.13 does not.)"""
    return tensor if tensor.dtype == torch.uint8 else tensor.to(torch.uint8)


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return uint8 (bytes,) over the whole storage of a uint8 tensor."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def slice_like(whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of `whole` (bytes,) at the offset that `tensor` has in its own storage."""
    start = tensor.storage_offset()
    return whole[start : start + tensor.numel()].view(tensor.shape)


#: fn -> {address of a fused storage: result of fn}. `Module.to` passes one closure to every layer, and the entry
#: disappears with the closure
_MOVED: "weakref.WeakKeyDictionary[Callable, dict[int, torch.Tensor]]" = weakref.WeakKeyDictionary()


def move_slice(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    moved = _MOVED.setdefault(fn, {})
    address = tensor.untyped_storage().data_ptr()
    if address not in moved:
        moved[address] = fn(whole_storage(tensor))
    if moved[address].data_ptr() == address:
        return tensor.detach()  # fn changed nothing
    return slice_like(moved[address], tensor)
