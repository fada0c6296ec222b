"""The operators: argument checks, scratch memory, launches, registration with torch.library.

A call of W4A16 allocates its result only.  Scratch memory (split tiles, x in order or in FP8, x A^T, one decoded weight) is one set per stream
of a device, and one for its CUDA graphs (launch.py), grown on demand and never shrunk.
"""

import functools
import importlib
import itertools
import math
from typing import NamedTuple

import torch

from . import cost, reference, select
from ._compat import add_op_namespace_prefix
from .select import choose, device_properties

try:
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor as _  # noqa: F401  a Triton new enough for Hopper's copy engine

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

if HAS_TRITON:
    from . import elementwise, fallback, portable
    from .launch import compiles, fused_adapter, launch, launcher, quantize_x8, scale_args, scale_bytes, scratch, x8_of


_HALF = (torch.bfloat16, torch.float16)


def missing_from_gluon() -> str | None:
    """What this Triton lacks of what the Hopper kernels use; None: nothing."""
    try:
        for name in ("hopper_wgmma", "ampere"):  # and all that they import
            importlib.import_module(f".{name}", __package__)
    except (ImportError, AttributeError, TypeError) as error:
        return str(error)
    return None


@functools.cache
def _gluon_lacks() -> str | None:
    return missing_from_gluon()


def use_gluon(index: int) -> bool:
    """Whether the Gluon kernels can run on a device: `skinny` from sm_80 on, `wgmma` on Hopper."""
    return device_properties(index)[2] >= (8, 0) and _gluon_lacks() is None


def is_available(device: torch.device | str | int | None = None) -> bool:
    """Whether the Triton kernels can run on `device` (default: the current CUDA device)."""
    if not HAS_TRITON or not torch.cuda.is_available():
        return False
    index = _device_index(device)
    return index is not None and _made_for(index)


def _made_for(index: int) -> bool:
    return HAS_TRITON and torch.version.cuda is not None and device_properties(index)[2] >= (8, 0)


def _runs_on(tensor: torch.Tensor) -> bool:
    """Whether the kernels can run where a tensor is: on a GPU for which they are made, or in Triton's interpreter."""
    return _made_for(tensor.device.index) if _on_gpu(tensor) else HAS_TRITON and portable.INTERPRET


def _on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU, or stands for one that will be."""
    return tensor.is_cuda or (HAS_TRITON and compiles(tensor))


def _refuse_grad(name: str, *tensors: torch.Tensor | None) -> None:
    """A product computed here would silently lack gradients, or part of them."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"qerl_nvfp4.{name} has no autograd, and one of its inputs requires a gradient. Call it under torch.no_grad(), or inside a "
            "torch.autograd.Function whose backward uses linear_backward (qerl_trl.nvfp4.linear.linear is one)."
        )


def _unit_stride(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """x (..., K) as (M, K), copied where rows overlap in memory, or are so far apart that the kernels' 32-bit offsets do not reach the last."""
    x = x.reshape(-1, x.shape[-1])
    M, K = x.shape
    return x if M <= 1 or K <= x.stride(0) < 2**31 // M else x.contiguous()


def _device_index(device: torch.device | str | int | None) -> int | None:
    if device is None:
        return torch.cuda.current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def describe(device: torch.device | str | int | None = None) -> str:
    """One line: which path is used on `device`, and why."""
    if not HAS_TRITON:
        return "qerl_nvfp4: plain PyTorch, slow (the whole weight is dequantized at every call): Triton is not installed or too old"
    if not is_available(device):
        where = (
            "no CUDA device"
            if not torch.cuda.is_available()
            else f"{device} is not a CUDA device of compute capability >= 8.0"
        )
        return f"qerl_nvfp4: plain PyTorch, slow (the whole weight is dequantized at every call): {where}"
    name, sms, (major, minor) = device_properties(_device_index(device))
    path = (
        "Hopper kernels (Gluon)"
        if major == 9
        else "Gluon kernels without what Hopper added (for more than 16 tokens selected by arithmetic, not by measurements)"
    )
    if not use_gluon(_device_index(device)):
        path = f"portable Triton kernels (slower than the Gluon kernels, which are made for Triton 3.6 to 3.9; this one: {_gluon_lacks()})"
    shapes: dict[str, set] = {}
    for place, (_, where) in select.measured_for(_device_index(device)).entries.items():
        shapes.setdefault(where, set()).add(place[:2])
    tuned = ", ".join(f"{len(found)} shapes {where}" for where, found in shapes.items())
    tuned = tuned or f"nothing measured for {name} with {sms} multiprocessors"
    refused = fallback.refused_on(_device_index(device))
    failed = "".join(f"; {variant[0]} does not compile: {reason}" for variant, reason in refused.items())
    return f"qerl_nvfp4: {path}, sm_{major}{minor}, Triton {triton.__version__}, {tuned}{failed}"


class Selected(NamedTuple):
    """What computes y (tokens, N) = x (tokens, K) W^T."""

    N: int
    K: int
    tokens: int
    kernel: str  # "skinny", "wgmma", "wide", "mma", "portable", "dense" (dequantize, then cuBLAS), "reference" (plain PyTorch)
    config: dict
    why: str  # measured where, the cost model, the heuristic, or what did not compile


def selected(
    N: int,
    K: int,
    tokens: tuple[int, ...] = (*select.BUCKETS, 2048),
    device: torch.device | str | int | None = None,
    rank: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    shards: int = 1,
    compute: str = "w4a16",
) -> list[Selected]:
    """Which kernel is selected for a weight (N, K), for each number of tokens; `rank` of the adapter, 0: none, of which each of the
    `shards` has one. `batch_invariant`, `compute`: as `linear` is called.

    What was already refused by the compiler is taken into account. For a weight whose rows or addresses the kernel cannot read (`usable`) it
    is `portable` up to 128 tokens, else the dense path: on Hopper where K is no multiple of 256, unless `align_scale_rows` was used.
    """
    index, fp8, why = _device_index(device), compute == "w4a8", ""
    if dtype not in _HALF:
        why = f"x is {dtype}"
    elif not is_available(device):
        why = "Triton or a GPU for it is missing"
    elif fp8 and (N % 16 or device_properties(index)[2] < (8, 9)):
        why = "W4A8 wants sm_89 or newer and rows in multiples of 16"
    if why:
        return [Selected(N, K, M, "reference", {}, why) for M in tokens]
    bf16 = dtype == torch.bfloat16 and use_gluon(index)
    rows = []
    if batch_invariant:
        found = ((M, _batch_invariant(N, K, min(M, select.INVARIANT_TOKENS), index, dtype, fp8)) for M in tokens)
        none = [{"kernel": "none"}]
        return [Selected(N, K, M, (c or none)[0]["kernel"], (c or none)[0], "batch-invariant") for M, c in found]
    refused = fallback.refused_on(index)
    for M in tokens:
        config, why = select.explain(N, K, M, index, bf16, rank, shards, fp8)
        while config["kernel"] != "dense" and (failed := refused.get(_variant(config, rank, dtype))):
            config, why = _instead_of(config, N, K, M, index), f"{config['kernel']} does not compile: {failed}"
        rows.append(Selected(N, K, M, config["kernel"], config, why))
    return rows


def selected_text(
    matrices: dict[str, tuple[int, ...]],
    device=None,
    rank: int = 0,
    dtype=torch.bfloat16,
    batch_invariant: bool = False,
    compute: str = "w4a16",
) -> list[str]:
    """One line per matrix {name: (N, K), or (N, K, number of shards with an adapter each)}: which kernel is selected up to how many
    tokens, and why."""
    lines = []
    for name, (N, K, *more) in matrices.items():
        sizes = (*select.BUCKETS, select.cost.SIZES[-1])
        parts, rows = (
            [],
            selected(N, K, (*sizes, sizes[-1] + 1), device, rank, dtype, batch_invariant, *(more or (1,)), compute),
        )
        for kernel, group in itertools.groupby(rows, key=lambda row: row.kernel):
            last = list(group)[-1].tokens
            parts.append(f"{kernel} up to {last} tokens" if last in sizes else f"{kernel} for more")
        if len(parts) == 1:
            parts = [rows[0].kernel]
        reasons = "; ".join(dict.fromkeys(row.why for row in rows))
        lines.append(f"{name} {N} x {K}: {', '.join(parts)} ({reasons})")
    return lines


# --- matrix product ---------------------------------------------------------------------------------------------------------------


def _dense_weight(packed, block_scale, global_scale, dtype, extra: int = 0) -> torch.Tensor:
    """The dequantized weight in the shared scratch buffer, with `extra` more columns beside it."""
    N, K = packed.shape[0], packed.shape[1] * 2
    out = scratch(packed.device, f"dense {dtype}", N * (K + extra), dtype)[: N * (K + extra)].view(N, K + extra)
    _dequantize(packed, block_scale, global_scale, dtype, out[:, :K])
    return out


def linear_dense(x, packed, block_scale, global_scale, bias, lora_a, lora_b, splits, out) -> None:
    """Dequantize, then cuBLAS. Where the output is much wider than x the adapter becomes more columns of the same product,
    [x | x A^T] [W | B]^T: adding it afterwards would read and write the output once more."""
    N, K = packed.shape[0], x.shape[1]
    joined = 0 if lora_a is None or N < 2 * K or lora_a.shape[0] % 8 else lora_a.shape[0]
    if joined:
        M, x_MK = x.shape[0], x
        x = scratch(x.device, f"joined {x.dtype}", M * (K + joined), x.dtype)[: M * (K + joined)].view(M, K + joined)
        x[:, :K].copy_(x_MK)
        torch.mm(x_MK, lora_a.to(x.dtype).t(), out=x[:, K:])
    weight = _dense_weight(packed, block_scale, global_scale, x.dtype, joined)
    if joined:
        _block_diagonal(lora_b, splits, weight[:, K:])
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias.to(x.dtype), x, weight.t(), out=out)
    if lora_a is not None and not joined:
        _add_adapter(x, lora_a, lora_b, splits, out)


def _add_adapter(x, lora_a, lora_b, splits, out) -> None:
    """out += (x A^T) B^T; up to three shards in one launch."""
    (M, N), rank, rows = out.shape, lora_b.shape[1], lora_a.shape[0]
    edges = list(itertools.accumulate(reference.split_rows(lora_b, splits)))[:-1]
    BM, BN = 64, 128
    if len(edges) > 2 or any(e % BN for e in edges):
        out += reference.lora(x, lora_a, lora_b, splits)
        return
    down = scratch(x.device, f"lora down {x.dtype}", M * rows, x.dtype)[: M * rows].view(M, rows)
    torch.mm(x, lora_a.to(x.dtype).t(), out=down)

    def start() -> None:
        launcher(portable.lora_up_kernel, triton.cdiv(N, BN), triton.cdiv(M, BM))(
            down,
            lora_b.to(x.dtype).contiguous(),
            out,
            M,
            N,
            rows,
            out.stride(0),
            *(edges + [2**31 - 1] * 2)[:2],
            RANK=rank,
            BM=BM,
            BN=BN,
            BRANK=max(16, min(64, triton.next_power_of_2(rank))),
            INTERP=portable.INTERPRET,
            num_warps=4,
        )

    if not fallback.attempt(start, lambda: ("lora_up", rank, x.dtype), _PLAIN, x.device.index):
        out += reference.lora(x, lora_a, lora_b, splits)


def _block_diagonal(lora_b, splits, out) -> None:
    """B (N, r) with shard i in columns i*r to (i+1)*r and zeros elsewhere."""
    widths, rank, start = reference.split_rows(lora_b, splits), lora_b.shape[1], 0
    if len(widths) > 1:
        out.zero_()
    for i, width in enumerate(widths):
        rows = slice(start, start + width)
        out[rows, i * rank : (i + 1) * rank] = lora_b[rows]
        start += width


def product(config, x, packed, block_scale, global_scale, bias, lora_a, lora_b, splits, out) -> None:
    """out (M, N) = x (M, K) W^T [+ bias] [+ LoRA] by the kernel of a configuration, or, if the memory layout does not suit it, by the next
    slower one that it suits.

    An error if the kernel does not compile, which tuning and benchmarks want to know; `product_by_any` falls back.
    """
    config = _suited(config, x, packed, block_scale)
    _start(config, None, x, packed, block_scale, global_scale, bias, lora_a, lora_b, splits, out)


def _suited(config: dict, x, packed, block_scale) -> dict:
    """The configuration, or what is selected without Gluon if its kernel cannot read this layout, and dense if that cannot either (sliced
    along K at an odd place: right, and only as slow as decoding everything)."""
    while config["kernel"] != "dense" and not usable(config, x, packed, block_scale):
        config = _instead_of(config, packed.shape[0], x.shape[1], x.shape[0], x.device.index)
    return config


def _start(config: dict, x8, *arguments) -> None:
    if config["kernel"] == "dense" and config.get("fp8"):
        linear_fp8(*arguments)
    elif config["kernel"] == "dense":
        linear_dense(*arguments)
    else:
        launch(config, *arguments, x8)


def product_by_any(config, x, packed, block_scale, global_scale, bias, lora_a, lora_b, splits, out, x8=None) -> None:
    """The same, by a slower kernel where this one does not compile: Gluon's -> portable -> dense, each said once; `x8`: see `launch`."""
    config = _suited(config, x, packed, block_scale)
    arguments = (x8, x, packed, block_scale, global_scale, bias, lora_a, lora_b, splits, out)
    (M, K), N, rank = x.shape, packed.shape[0], 0 if lora_b is None else lora_b.shape[1]
    while config["kernel"] != "dense":
        done = fallback.attempt(
            lambda c=config: _start(c, *arguments),
            lambda c=config: _variant(c, rank, x.dtype),
            _DENSE if config["kernel"] == "portable" or config.get("fp8") or M > 128 else "The portable kernel",
            x.device.index,
        )
        if done:
            return
        config = _suited(_instead_of(config, N, K, M, x.device.index), x, packed, block_scale)
    _start(config, *arguments)


def _batch_invariant(N: int, K: int, M: int, index: int | None, dtype: torch.dtype, fp8: bool = False) -> list[dict]:
    _, sms, capability = device_properties(index)
    bf16 = dtype == torch.bfloat16 and use_gluon(index)
    return select.batch_invariant(N, K, M, sms, capability[0] == 9, bf16, select.shared_memory_limit(index), fp8)


def product_in_any_batch(
    x, packed, block_scale, global_scale, bias, lora_a, lora_b, splits, out, fp8: bool = False
) -> None:
    """The same, with bits in each row of `out` that depend on that row of x alone, not on how many others there are.

    Raises:
        `ValueError`: no kernel can do that for this weight or adapter. What a compiler refuses is an error too: nothing takes its place.
    """
    (M, K), N = x.shape, packed.shape[0]
    x = _unit_stride(x)
    for first in range(0, M, select.INVARIANT_TOKENS):
        rows = slice(first, min(M, first + select.INVARIANT_TOKENS))
        part = x[rows]
        for config in _batch_invariant(N, K, part.shape[0], x.device.index, x.dtype, fp8):
            fits = lora_a is None or fused_adapter(config, part, lora_a, lora_b, splits) is not None
            if fits and usable(config, part, packed, block_scale):
                break
        else:
            adapter = "" if lora_b is None else f" with an adapter of rank {lora_b.shape[1]} on shards {splits or (N,)}"
            raise ValueError(
                f"batch_invariant: no kernel computes a weight of {N} x {K}{adapter} in the same order for every number of tokens. It takes "
                "rows that lie one after the other, and an adapter in x's type, of rank at most 256, on at most three shards of multiples of 64 "
                "rows. Change the adapter, or leave batch_invariant off."
            )
        launch(config, part, packed, block_scale, global_scale, bias, lora_a, lora_b, splits, out[rows])


_DENSE = "The dense path (dequantize, then cuBLAS)"


_LAUNCH_ONLY = ("kernel", "grid", "cost", "SK", "slices")


def _variant(config: dict, rank: int, dtype: torch.dtype) -> tuple:
    """What is compiled for a configuration, without what only the launch depends on."""
    compiled = tuple(sorted((k, v) for k, v in config.items() if k not in _LAUNCH_ONLY))
    return (config["kernel"], compiled, rank, dtype)


def _instead_of(config: dict, N: int, K: int, M: int, index: int) -> dict:
    if config.get("fp8"):
        return select.DENSE_FP8
    return {"kernel": "dense"} if config["kernel"] == "portable" else select.without_gluon(N, K, M, index)


def usable(config: dict, x, packed, block_scale) -> bool:
    """Whether the memory layout suits the kernel: unit strides; the bulk copy engine also wants 16-byte rows and addresses."""
    scale_alignment = 16 if config["kernel"] in ("wgmma", "wide") else 2 if config["kernel"] in ("skinny", "mma") else 1
    word_alignment = 16 if config["kernel"] in ("skinny", "wgmma", "wide", "mma") else 8 if config.get("fp8") else 4
    return (
        x.stride(1) == 1
        and packed.stride(1) == 1
        and packed.stride(0) % word_alignment == 0
        and packed.data_ptr() % word_alignment == 0
        and block_scale.stride(1) == 1
        and block_scale.stride(0) % scale_alignment == 0
        and block_scale.data_ptr() % scale_alignment == 0
    )


def align_scale_rows(block_scale: torch.Tensor) -> torch.Tensor:
    """Block scales (N, K/16), of one byte each, whose rows begin at multiples of 16 bytes, as Hopper's kernels want them: the tensor itself
    where they do, or where those kernels do not take its shape; else a view of a copy with rows of ceil(K / 256) * 16 bytes."""
    N, blocks = block_scale.shape
    if not cost.fits(N, 16 * blocks):
        return block_scale
    if block_scale.stride(1) == 1 and block_scale.stride(0) % 16 == 0 and block_scale.data_ptr() % 16 == 0:
        return block_scale
    rows = torch.zeros(N, math.ceil(blocks / 16) * 16, dtype=torch.uint8, device=block_scale.device)
    aligned = rows.view(block_scale.dtype)[:, :blocks]
    aligned.view(torch.uint8).copy_(block_scale.view(torch.uint8))
    return aligned


def check_weight(packed, block_scale, global_scale) -> None:
    K, N = packed.shape[1] * 2, packed.shape[0]
    if block_scale.shape != (N, K // 16):
        raise ValueError(
            f"block_scale has shape {tuple(block_scale.shape)}; a weight of {N} x {K} needs {(N, K // 16)}"
        )
    if block_scale.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise ValueError(
            f"block_scale is {block_scale.dtype}, and its bytes are read as float8_e4m3fn. Give float8_e4m3fn, or its bytes as uint8; values of "
            "another type are converted by block_scale.to(torch.float8_e4m3fn), where that loses nothing."
        )
    check_global_scale(global_scale, N)
    check_devices(packed.device, block_scale=block_scale, global_scale=global_scale)


def check_devices(device: torch.device, /, **others: torch.Tensor | None) -> None:
    """A kernel is given addresses, which mean something else on another device."""
    for name, other in others.items():
        if other is not None and other.device != device:
            raise ValueError(f"{name} is on {other.device}, the packed weight on {device}. Move them to one device.")


def check_global_scale(global_scale, N: int) -> None:
    """One divisor for the whole weight, or one for each of its N rows, in the type in which kernels read it."""
    if global_scale.dtype != torch.float32:
        raise ValueError(
            f"global_scale is {global_scale.dtype}, and it is read as float32. Give global_scale.float(); after model.to(dtype) restore what was loaded, "
            "because a divisor that was rounded is another one."
        )
    if global_scale.numel() != 1 and global_scale.shape != (N,):
        raise ValueError(
            f"global_scale has {global_scale.numel()} elements, of shape {tuple(global_scale.shape)}; give 1, or one for each of the {N} rows, of "
            f"shape {(N,)}."
        )


def check_compute(compute: str) -> None:
    if compute not in reference.COMPUTE:
        raise ValueError(f"compute={compute!r} is unknown; choose one of {reference.COMPUTE}")


def check(x, packed, block_scale, global_scale, bias, lora_a, lora_b, lora_splits) -> None:
    K, N = packed.shape[1] * 2, packed.shape[0]
    if x.shape[-1] != K:
        raise ValueError(
            f"x has {x.shape[-1]} columns, the weight {K} (packed {tuple(packed.shape)} holds two codes a byte)"
        )
    check_weight(packed, block_scale, global_scale)
    check_devices(packed.device, x=x, bias=bias, lora_a=lora_a, lora_b=lora_b)
    if bias is not None and bias.shape != (N,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; a weight of {N} rows needs {(N,)}")
    if (lora_a is None) != (lora_b is None):
        raise ValueError("an adapter needs both lora_a (S * r, K) and lora_b (N, r); one of them is None")
    if lora_a is not None:
        splits = reference.split_rows(lora_b, lora_splits)
        if lora_b.ndim != 2 or lora_b.shape[0] != N or sum(splits) != N:
            raise ValueError(
                f"lora_b has shape {tuple(lora_b.shape)} and lora_splits are {splits}; both must cover {N} rows"
            )
        if lora_a.shape != (len(splits) * lora_b.shape[1], K):
            raise ValueError(
                f"lora_a has shape {tuple(lora_a.shape)}; {len(splits)} shards of rank {lora_b.shape[1]} need "
                f"{(len(splits) * lora_b.shape[1], K)}"
            )


def check_backward(dy, packed, block_scale, global_scale) -> None:
    check_weight(packed, block_scale, global_scale)
    check_devices(packed.device, dy=dy)
    if dy.shape[-1] != packed.shape[0]:
        raise ValueError(f"dy has {dy.shape[-1]} columns, the weight {packed.shape[0]} rows")


def _linear(
    x, packed, block_scale, global_scale, bias=None, lora_a=None, lora_b=None, lora_splits=None,
    batch_invariant=False, compute="w4a16",
) -> torch.Tensor:  # fmt: skip
    check_compute(compute)
    K, fp8, x8 = packed.shape[1] * 2, compute == "w4a8", None
    if fp8 and x.shape[-1] == reference.wide_columns(K):
        x, *x8 = reference.wide_parts(x, K)
    check(x, packed, block_scale, global_scale, bias, lora_a, lora_b, lora_splits)
    _refuse_grad("linear", x, bias, lora_a, lora_b)
    bias = _unit_stride(bias)
    if lora_b is not None and not lora_b.shape[1]:  # of rank 0: there is nothing to add
        lora_a = lora_b = lora_splits = None
    if not x.is_cuda or not _runs_on(x) or x.dtype not in _HALF or (fp8 and not _fp8_fits(x, packed)):
        if batch_invariant:
            raise ValueError(
                f"batch_invariant needs bfloat16 or float16 on a GPU that the kernels are made for; x is {x.dtype} on {x.device}, where plain "
                f"PyTorch multiplies ({describe(x.device)})."
            )
        return reference.linear(x, packed, block_scale, global_scale, bias, lora_a, lora_b, lora_splits, compute)
    x_MK = _rows_of(x)
    M, N = x_MK.shape[0], packed.shape[0]
    out = torch.empty(M, N, device=x.device, dtype=x.dtype)
    with torch.cuda.device(x.device):
        arguments = (x_MK, packed, block_scale, global_scale, bias, lora_a, lora_b, lora_splits, out)
        if M and batch_invariant:
            product_in_any_batch(*arguments, fp8)
        elif M:
            index = x.device.index
            bf16 = x.dtype == torch.bfloat16 and use_gluon(index)
            rank, shards = (0, 1) if lora_b is None else (lora_b.shape[1], len(lora_splits or (N,)))
            config = choose(N, K, M, index, bf16, rank, shards, fp8)
            product_by_any(config, *arguments, x8)
    return out.view(*x.shape[:-1], N)


def _linear_backward(dy, packed, block_scale, global_scale, compute="w4a16") -> torch.Tensor:
    check_compute(compute)
    check_backward(dy, packed, block_scale, global_scale)
    _refuse_grad("linear_backward", dy)
    fp8 = compute == "w4a8"
    if not dy.is_cuda or not _runs_on(dy) or dy.dtype not in _HALF or (fp8 and not _fp8_fits(dy, packed)):
        return reference.linear_backward(dy, packed, block_scale, global_scale, compute)
    with torch.cuda.device(dy.device):
        return (backward_fp8 if fp8 else backward_dense)(dy, packed, block_scale, global_scale)


def backward_dense(dy, packed, block_scale, global_scale) -> torch.Tensor:
    """dx (..., K) = dy (..., N) W, through the dequantized weight."""
    N, K = packed.shape[0], packed.shape[1] * 2
    weight = _dense_weight(packed, block_scale, global_scale, dy.dtype)
    return (dy.reshape(-1, N) @ weight).view(*dy.shape[:-1], K)


def _converts_fp8(tensor: torch.Tensor) -> bool:
    """Whether the kernels can convert to float8_e4m3fn where a tensor is: from sm_89 on, or in Triton's interpreter."""
    return _runs_on(tensor) and (not _on_gpu(tensor) or device_properties(tensor.device.index)[2] >= (8, 9))


def _fp8_fits(x, packed) -> bool:
    """Whether cuBLAS or CUTLASS can multiply in FP8; where not, plain PyTorch computes by the same rule in float32."""
    return _converts_fp8(x) and packed.shape[0] % 16 == 0


def linear_fp8(x, packed, block_scale, global_scale, bias, lora_a, lora_b, splits, out) -> None:
    """out (M, N) = the product of "w4a8": x quantized by row, the whole weight decoded to e4m3, then cuBLAS or CUTLASS.

    A float16 `out` is rounded to bfloat16 first: torch._scaled_mm with a scale per row returns nothing else.
    """
    joined = bias if bias is not None and bias.dtype == out.dtype == torch.bfloat16 else None
    factor = reference.fp8_factor(global_scale)
    _scaled_product(_unit_stride(x), None, packed, block_scale, False, factor, joined, out)
    if bias is not joined:
        out += bias
    if lora_a is not None:
        _add_adapter(x, lora_a, lora_b, splits, out)


def backward_fp8(dy, packed, block_scale, global_scale) -> torch.Tensor:
    """dx (..., K) = dy (..., N) W with "w4a8": dy quantized by row, through the whole weight in e4m3, transposed."""
    dy_MN, factor = _unit_stride(_rows_of(dy)), reference.fp8_factor(global_scale)
    out = torch.empty(len(dy_MN), packed.shape[1] * 2, device=dy.device, dtype=dy.dtype)
    before, after = (factor, factor.new_ones(1)) if factor.numel() > 1 else (None, factor)
    if len(dy_MN):
        _scaled_product(dy_MN, before, packed, block_scale, True, after, None, out)
    return out.view(*dy.shape[:-1], out.shape[1])


def _scaled_product(x, before, packed, block_scale, transpose: bool, after, bias, out) -> None:
    """out (M, N) = (x (M, K) [* before (K,)], quantized by row) w8^T * after (N,) or (1,) [+ bias]; `transpose`: w8, not w8^T."""
    K, N = x.shape[1], out.shape[1]
    w8 = scratch(x.device, "w8", N * K, torch.float8_e4m3fn)[: N * K].view(N, K)
    dequantize_fp8_into(packed, block_scale, transpose, w8)
    x8, scale = x8_of(x, False, quantize_fp8_into, factor=before)
    y = out if out.dtype == torch.bfloat16 else torch.empty_like(out, dtype=torch.bfloat16)
    scales = scale[:, None], after.expand(1, N).contiguous()
    if not y.is_meta:  # compiled ahead: cuBLAS needs none of that
        torch._scaled_mm(x8, w8.t(), *scales, bias, out_dtype=y.dtype, use_fast_accum=True, out=y)  # adds as our kernel
    if y is not out:
        out.copy_(y)


_MAX_GRID_Y = 65535  # CUDA's limit
_PLAIN = "Plain PyTorch"

# --- streaming kernels ------------------------------------------------------------------------------------------------------------


def _stream(kernel, grid: tuple[int, ...], tensor, variant: tuple, *arguments, instead=_PLAIN, **options) -> bool:
    """Launch a kernel where a tensor is; False if it does not compile there, so that something else is used instead."""

    def start() -> None:
        with torch.cuda.device(tensor.device if tensor.is_cuda else -1):
            launcher(kernel, *grid)(*arguments, **options)

    return fallback.attempt(start, lambda: variant, instead, tensor.device.index)


def _pdl(tensor: torch.Tensor) -> dict[str, bool]:
    """Options of a kernel that runs in the interpreter too, and from sm_90 on by programmatic dependent launch."""
    pdl = _on_gpu(tensor) and device_properties(tensor.device.index)[2][0] >= 9
    return {"INTERP": portable.INTERPRET, "PDL": pdl} | ({"launch_pdl": True} if pdl else {})


def _dequantize(packed, block_scale, global_scale, dtype, out) -> torch.Tensor:
    scales = scale_bytes(block_scale)
    readable = (
        packed.stride(1) == 1 and packed.stride(0) % 4 == 0 and packed.data_ptr() % 4 == 0 and packed.shape[1] % 4 == 0
    )
    if not _runs_on(packed) or not readable or scales.stride(1) != 1 or out.stride(1) != 1:
        return reference.dequantize(packed, block_scale, global_scale, dtype, out)
    N, K = packed.shape[0], packed.shape[1] * 2
    BN, BK = 8, 512
    if N > BN * _MAX_GRID_Y:
        for first in range(0, N, BN * _MAX_GRID_Y):
            rows = slice(first, first + BN * _MAX_GRID_Y)
            gs = global_scale if global_scale.numel() == 1 else global_scale[rows]
            _dequantize(packed[rows], block_scale[rows], gs, dtype, out[rows])
        return out
    words = packed.view(torch.int32)
    gs, sgs = scale_args(global_scale)
    types = {
        torch.bfloat16: portable.tl.bfloat16,
        torch.float16: portable.tl.float16,
        torch.float32: portable.tl.float32,
    }

    grid, variant = (triton.cdiv(K, BK), triton.cdiv(N, BN)), ("dequantize", dtype)
    arguments = (words, scales, gs, out, N, K, words.stride(0), scales.stride(0), out.stride(0), sgs)
    options = {"BN": BN, "BK": BK, "DTYPE": types[dtype], "INTERP": portable.INTERPRET, "num_warps": 4}
    if not _stream(portable.dequantize_kernel, grid, packed, variant, *arguments, **options):
        return reference.dequantize(packed, block_scale, global_scale, dtype, out)
    return out


def dequantize_into(packed, block_scale, global_scale, dtype, out) -> torch.Tensor:
    check_weight(packed, block_scale, global_scale)
    shape = (packed.shape[0], packed.shape[1] * 2)
    if out.shape != shape or out.dtype != dtype or out.device != packed.device:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}; the weight needs {shape} {dtype} on {packed.device}"
        )
    if packed.is_cuda and dtype in (torch.bfloat16, torch.float16, torch.float32):
        with torch.cuda.device(packed.device):
            return _dequantize(packed, block_scale, global_scale, dtype, out)
    return reference.dequantize(packed, block_scale, global_scale, dtype, out)


def _dequantize_op(packed, block_scale, global_scale, dtype) -> torch.Tensor:
    out = torch.empty(packed.shape[0], packed.shape[1] * 2, device=packed.device, dtype=dtype)
    return dequantize_into(packed, block_scale, global_scale, dtype, out)


def quantize_fp8_into(x, x8, scale, ordered: bool = False, factor=None) -> None:
    """x (M, K) with unit stride, times `factor` (K,) float32 -> contiguous x8 (M, K), or as `reference.in_decode_order`, and scale (M,)."""

    def start() -> None:
        with torch.cuda.device(x.device if x.is_cuda else -1):
            quantize_x8(x, x8, scale, ordered, factor, _pdl(x)["PDL"])

    done = False
    if _converts_fp8(x) and x.dtype in _HALF:
        BK = triton.next_power_of_2(x.shape[1])
        done = fallback.attempt(
            start, lambda: ("quantize_fp8", ordered, factor is None, BK, x.dtype), _PLAIN, x.device.index
        )
    if not done:
        found, scales = reference.quantize_fp8(x if factor is None else x.float() * factor)
        x8.copy_(reference.in_decode_order(found) if ordered else found)
        scale.copy_(scales)


def _quantize_fp8(x, ordered: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    x8, scale = _fake_quantize_fp8(x, ordered)
    quantize_fp8_into(_unit_stride(x), x8, scale, ordered)
    return x8, scale


def dequantize_fp8_into(packed, block_scale, transpose: bool, out) -> torch.Tensor:
    """out, contiguous float8_e4m3fn (N, K) or (K, N), = e4m3(code * block_scale / 8)."""
    N, K, done = packed.shape[0], packed.shape[1] * 2, False
    whole = packed.stride(1) == 1 and packed.stride(0) % 8 == 0 and packed.data_ptr() % 8 == 0
    if _converts_fp8(packed) and whole and block_scale.stride(1) == 1 and not (transpose and N % 4):
        BN, BK = (128, 256) if transpose else (16, 1024)
        words, scales = packed.view(torch.int64), scale_bytes(block_scale)
        grid, variant = (triton.cdiv(N, BN) * triton.cdiv(K, BK),), ("dequantize_fp8", transpose)
        arguments = (words, scales, out.view(-1).view(torch.int32), N, K, words.stride(0), scales.stride(0))
        options = {"TRANSPOSE": transpose, "BN": BN, "BK": BK, "INTERP": portable.INTERPRET, "num_warps": 8}
        done = _stream(elementwise.dequantize_fp8_kernel, grid, packed, variant, *arguments, **options)
    return out if done else out.copy_(reference.dequantize_fp8(packed, block_scale, transpose))


def _dequantize_fp8(packed, block_scale, transpose: bool = False) -> torch.Tensor:
    if block_scale.shape != (packed.shape[0], packed.shape[1] // 8):
        raise ValueError(f"block_scale {tuple(block_scale.shape)} does not fit packed {tuple(packed.shape)}")
    return dequantize_fp8_into(packed, block_scale, transpose, _fake_dequantize_fp8(packed, block_scale, transpose))


def _quantize(weight, scale_rule: str, global_scale) -> tuple[torch.Tensor, torch.Tensor]:
    if scale_rule not in reference.SCALE_RULES:
        raise ValueError(f"scale_rule={scale_rule!r} is unknown; choose one of {reference.SCALE_RULES}")
    if weight.ndim != 2 or weight.shape[1] % 16 or not weight.is_floating_point():
        raise ValueError(
            f"quantize needs a float matrix (N, K) with K a multiple of 16; got {tuple(weight.shape)} {weight.dtype}"
        )
    check_global_scale(global_scale, weight.shape[0])
    if not _runs_on(weight) or weight.stride(1) != 1:
        return reference.quantize(weight, scale_rule, global_scale)
    N, K = weight.shape
    packed = torch.empty(N, K // 2, device=weight.device, dtype=torch.uint8)
    scales = torch.empty(N, K // 16, device=weight.device, dtype=torch.uint8)
    gs, sgs = scale_args(global_scale.to(weight.device, torch.float32).contiguous())
    streamed = scale_rule == "rtn" and weight.dtype == torch.bfloat16 and weight.is_contiguous() and _on_gpu(weight)
    if streamed and weight.data_ptr() % 4 == 0:
        blocks, BB = N * K // 16, 128
        grid, variant = (triton.cdiv(blocks, BB),), ("quantize_rtn", sgs > 0)
        arguments = (weight.view(torch.int32), packed.view(torch.int32), scales, gs, blocks, K // 16)
        options = {"instead": "The general quantize kernel", "PER_ROW": sgs > 0, "BB": BB, "num_warps": 4}
        if _stream(elementwise.quantize_rtn_kernel, grid, weight, variant, *arguments, **options):
            return packed, scales
    BN, BK = 4, 512

    def start() -> None:
        for first in range(0, N, BN * _MAX_GRID_Y):
            rows = slice(first, min(first + BN * _MAX_GRID_Y, N))
            with torch.cuda.device(weight.device if weight.is_cuda else -1):
                launcher(elementwise.quantize_kernel, triton.cdiv(K, BK), triton.cdiv(rows.stop - first, BN))(
                    weight[rows],
                    packed[rows],
                    scales[rows],
                    gs[rows] if sgs else gs,
                    rows.stop - first,
                    K,
                    weight.stride(0),
                    sgs,
                    BN=BN,
                    BK=BK,
                    RULE=reference.SCALE_RULES.index(scale_rule),
                    NARROW=weight.dtype in (torch.bfloat16, torch.float16),
                    INTERP=portable.INTERPRET,
                    num_warps=4,
                    enable_fp_fusion=False,
                )

    if not fallback.attempt(start, lambda: ("quantize", scale_rule, weight.dtype), _PLAIN, weight.device.index):
        return reference.quantize(weight, scale_rule, global_scale)
    return packed, scales


def _rms_norm(x, weight, eps: float, residual=None, wide: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    K = x.shape[-1]
    if weight.shape != (K,) or (residual is not None and residual.shape != x.shape):
        given = None if residual is None else tuple(residual.shape)
        raise ValueError(
            f"rms_norm of x {tuple(x.shape)} needs a weight {(K,)} and a residual of x's shape; got {tuple(weight.shape)}, {given}"
        )
    (y, h), done = _fake_rms_norm(x, weight, eps, residual, wide), False
    if (_converts_fp8 if wide else _runs_on)(x) and x.dtype in _HALF:
        x_MK = _unit_stride(x.reshape(-1, K))
        r_MK = x_MK if residual is None else _unit_stride(residual.reshape(-1, K))
        y_MK, *x8 = reference.wide_parts(y, K) if wide else (y, None, None)
        variant = ("rms_norm", residual is not None, wide, K, x.dtype)
        tensors = (x_MK, r_MK, _unit_stride(weight), y_MK, y if residual is None else h, *x8)
        options = {"RESIDUAL": residual is not None, "BK": max(128, triton.next_power_of_2(K)), **_pdl(x)}
        options |= {"K": K, "sx": x_MK.stride(0), "sr": r_MK.stride(0), "eps": eps, "num_warps": 4 if K <= 2048 else 8}
        done = _stream(elementwise.rms_norm_kernel, x_MK.shape[:1], x, variant, *tensors, **options)
    if not done:
        found = reference.rms_norm(x.contiguous(), weight, eps, None if residual is None else residual.contiguous())
        y, h = found if residual is not None else (found, h)
        y = reference.widened(y) if wide else y
    return y, h


def _swiglu(gate_up) -> torch.Tensor:
    wide, K = _fake_swiglu(gate_up), gate_up.shape[-1] // 2
    if _converts_fp8(gate_up) and gate_up.dtype in _HALF:
        x_MK, BK = _unit_stride(gate_up.reshape(-1, 2 * K)), 4096 if K > 8192 else 2048
        variant, tensors = ("swiglu", K, gate_up.dtype), (x_MK, *reference.wide_parts(wide, K))
        options = {"K": K, "sx": x_MK.stride(0), "CHUNKS": triton.cdiv(K, BK), "BK": BK, "num_warps": BK // 256}
        if _stream(elementwise.swiglu_kernel, x_MK.shape[:1], gate_up, variant, *tensors, **options, **_pdl(gate_up)):
            return wide
    return reference.widened(reference.swiglu(gate_up))


# --- registration -----------------------------------------------------------------------------------------------------------------

_NAMESPACE = add_op_namespace_prefix("linear").split("::")[0]
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


def _fake_linear(
    x, packed, block_scale, global_scale, bias=None, lora_a=None, lora_b=None, lora_splits=None,
    batch_invariant=False, compute="w4a16",
):  # fmt: skip
    _refuse_grad("linear", x, bias, lora_a, lora_b)  # torch.compile would never ask the implementation
    return x.new_empty(*x.shape[:-1], packed.shape[0])


def _fake_linear_backward(dy, packed, block_scale, global_scale, compute="w4a16"):
    _refuse_grad("linear_backward", dy)
    return dy.new_empty(*dy.shape[:-1], packed.shape[1] * 2)


def _fake_rms_norm(x, weight, eps, residual=None, wide=False):
    _refuse_grad("rms_norm", x, weight, residual)
    y = x.new_empty(*x.shape[:-1], reference.wide_columns(x.shape[-1]) if wide else x.shape[-1])
    return y, x.new_empty(0 if residual is None else x.shape)


def _fake_swiglu(gate_up):
    _refuse_grad("swiglu", gate_up)
    return gate_up.new_empty(*gate_up.shape[:-1], reference.wide_columns(gate_up.shape[-1] // 2))


def _fake_quantize_fp8(x, ordered=False):
    M, K = x.shape
    x8 = x.new_empty(M, (K + 127) // 128 * 128 if ordered else K, dtype=torch.float8_e4m3fn)
    return x8, x.new_empty(M, dtype=torch.float32)


def _fake_dequantize_fp8(packed, block_scale, transpose=False):
    N, K = packed.shape[0], packed.shape[1] * 2
    return packed.new_empty((K, N) if transpose else (N, K), dtype=torch.float8_e4m3fn)


def _register(schema: str, implementation, fake) -> None:
    """Library.define / impl instead of custom_op: a few microseconds less a call in eager mode."""
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)


_register(
    "linear(Tensor x, Tensor packed, Tensor block_scale, Tensor global_scale, Tensor? bias=None, Tensor? lora_a=None, "
    "Tensor? lora_b=None, int[]? lora_splits=None, bool batch_invariant=False, str compute='w4a16') -> Tensor",
    _linear,
    _fake_linear,
)
_register(
    "linear_backward(Tensor dy, Tensor packed, Tensor block_scale, Tensor global_scale, str compute='w4a16') -> Tensor",
    _linear_backward,
    _fake_linear_backward,
)
_register(
    "dequantize(Tensor packed, Tensor block_scale, Tensor global_scale, ScalarType dtype) -> Tensor",
    _dequantize_op,
    lambda packed, block_scale, global_scale, dtype: packed.new_empty(
        packed.shape[0], packed.shape[1] * 2, dtype=dtype
    ),
)
_register(
    "quantize(Tensor weight, str scale_rule, Tensor global_scale) -> (Tensor, Tensor)",
    _quantize,
    lambda weight, scale_rule, global_scale: (
        weight.new_empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8),
        weight.new_empty(weight.shape[0], weight.shape[1] // 16, dtype=torch.uint8),
    ),
)
_register("quantize_fp8(Tensor x, bool ordered=False) -> (Tensor, Tensor)", _quantize_fp8, _fake_quantize_fp8)
_register(
    "dequantize_fp8(Tensor packed, Tensor block_scale, bool transpose=False) -> Tensor",
    _dequantize_fp8,
    _fake_dequantize_fp8,
)
_register(
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor? residual=None, bool wide=False) -> (Tensor, Tensor)",
    _rms_norm,
    _fake_rms_norm,
)
_register("swiglu(Tensor gate_up) -> Tensor", _swiglu, _fake_swiglu)

ops = getattr(torch.ops, _NAMESPACE)
