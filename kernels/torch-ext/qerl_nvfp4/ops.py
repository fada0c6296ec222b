"""The operators: argument checks, scratch memory, launches, registration with torch.library.

Nothing here allocates per call except the result.  Scratch memory (split-K tiles, permuted x, x A^T, one dequantized weight) is one
set a device, grown on demand and never shrunk: calls that could overlap on different streams of one device must not be made.
"""

import math

import torch

from . import reference
from ._compat import add_op_namespace_prefix
from .select import choose, device_properties

try:
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor as _  # noqa: F401  a Triton new enough for Hopper's copy engine

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

if HAS_TRITON:
    from . import elementwise, portable

_scratch: dict[tuple[torch.device, str], torch.Tensor] = {}
_captured: list[torch.Tensor] = []  # buffers that a CUDA graph may point to: kept when a larger one takes their place
_RANK_LIMIT = 256


def scratch(device: torch.device, name: str, numel: int, dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """A buffer of at least `numel` elements, the same one at every call."""
    key = (device, name)
    buffer = _scratch.get(key)
    if buffer is None or buffer.numel() < numel:
        if buffer is not None:
            _captured.append(buffer)
        buffer = (torch.zeros if zero else torch.empty)(numel, device=device, dtype=dtype)
        _scratch[key] = buffer
    return buffer


def gluon_available() -> bool:
    """Whether this Triton has what hopper.py uses."""
    try:
        from . import hopper  # noqa: F401
    except (ImportError, AttributeError, TypeError):
        return False
    return True


_gluon: bool | None = None


def use_hopper(index: int) -> bool:
    global _gluon
    if _gluon is None:
        _gluon = gluon_available()
    return _gluon and device_properties(index)[2][0] == 9


def is_available(device: torch.device | str | int | None = None) -> bool:
    """Whether the Triton kernels can run on `device` (default: the current CUDA device)."""
    if not HAS_TRITON or not torch.cuda.is_available() or torch.version.cuda is None:
        return False
    index = _device_index(device)
    return index is not None and device_properties(index)[2] >= (8, 0)


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
    from .select import load_table

    name, _, (major, minor) = device_properties(_device_index(device))
    path = "Hopper kernels (Gluon)" if use_hopper(_device_index(device)) else "portable Triton kernels"
    shapes = len({key[:2] for key in load_table(name)})
    tuned = f"table for {name}, {shapes} shapes; heuristic for others" if shapes else f"heuristic: no table for {name}"
    return f"qerl_nvfp4: {path}, sm_{major}{minor}, Triton {triton.__version__}, {tuned}"


# --- matrix product ---------------------------------------------------------------------------------------------------------------


class Lora:
    """What a kernel needs to add (x A^T) B^T in its last step."""

    def __init__(self, xa, b, rank, rows, padded, slices, edges):
        self.xa, self.b, self.rank, self.rows, self.padded, self.slices, self.edges = (
            xa,
            b,
            rank,
            rows,
            padded,
            slices,
            edges,
        )


def _scale_args(global_scale: torch.Tensor) -> tuple[torch.Tensor, int]:
    return global_scale, 0 if global_scale.numel() == 1 else global_scale.stride(0)


def _bytes(block_scale: torch.Tensor) -> torch.Tensor:
    return block_scale if block_scale.dtype == torch.uint8 else block_scale.view(torch.uint8)


def lora_plan(x, lora_a, lora_b, splits, tile_rows: int) -> Lora | None:
    """None when the adapter does not fit the fused path (more than three shards, shard edges inside a tile, rank above 256)."""
    M, K = x.shape
    rank, rows = lora_b.shape[1], lora_a.shape[0]
    splits = reference.split_rows(lora_b, splits)
    edges = [sum(splits[: i + 1]) for i in range(len(splits) - 1)]
    fits = len(splits) <= 3 and rank <= _RANK_LIMIT and all(e % tile_rows == 0 for e in edges)
    if (
        not fits
        or lora_a.dtype != x.dtype
        or lora_b.dtype != x.dtype
        or not (lora_a.is_contiguous() and lora_b.is_contiguous())
    ):
        return None
    edges = (edges + [2**31 - 1] * 2)[:2]
    slice_k = lora_slice(K)
    padded = math.ceil(M / 16) * 16
    slices = math.ceil(K / slice_k)
    xa = scratch(x.device, "lora", slices * rows * padded, torch.float32)
    return Lora(xa, lora_b, rank, rows, padded, slices, edges)


def lora_slice(K: int) -> int:
    """Columns of a slice of x A^T: at most eight slices, which the last step of the matrix product adds up."""
    return max(512, math.ceil(K / 8 / 512) * 512)


def prepare(x, lora_a, lora: Lora | None, permuted: torch.Tensor | None, late: bool, pdl: bool) -> None:
    """x A^T (in K slices) and the k-permuted copy of x, one launch."""
    M, K = x.shape
    BM = 16 if M <= 16 else 32 if M <= 32 else 64
    n_lora = rows = 0
    if lora is not None:
        rows = lora.rows
        n_lora = math.ceil(rows / 16) * math.ceil(M / BM) * lora.slices
    n_permute = 0 if permuted is None else math.ceil(M / 4) * (K // 128)
    portable.prepare_kernel[(n_lora + n_permute,)](
        x,
        x if lora is None else lora_a,
        x if lora is None else lora.xa,
        x if permuted is None else permuted,
        M,
        K,
        rows,
        x.stride(0),
        K,
        0 if lora is None else lora.padded,
        n_lora,
        KSLICE=lora_slice(K),
        BM=BM,
        BR=16,
        BK=128,
        EVEN_K=K % 128 == 0,
        LATE=late,
        PDL=pdl,
        INTERP=portable.INTERPRET,
        num_warps=4,
        num_stages=4,
        **({"launch_pdl": True} if pdl else {}),
    )


def tile_rows(config: dict) -> int:
    return 16 * config["R"] * config["WN"] if config["kernel"] == "skinny" else config["BN"]


def launch(
    config: dict, x, packed, block_scale, global_scale, bias, lora_a, lora_b, splits, out, pdl: bool = True
) -> None:
    """out (M, N) = x (M, K) W^T [+ bias] [+ LoRA] with one of the fused kernels."""
    lora = None
    if lora_a is not None:
        lora = lora_plan(x, lora_a, lora_b, splits, tile_rows(config))
    kernel = {"skinny": launch_skinny, "wgmma": launch_wgmma, "portable": launch_portable}[config["kernel"]]
    kernel(config, x, packed, block_scale, global_scale, bias, lora_a, lora, out, pdl)
    if lora_a is not None and lora is None:
        out += reference.lora(x, lora_a, lora_b, splits)


def _lora_args(lora: Lora | None) -> tuple[int, int, int, int]:
    """Rows of the stacked A's, padded tokens, two shard edges."""
    return (0, 0, 0, 0) if lora is None else (lora.rows, lora.padded, *lora.edges)


def launch_skinny(config, x, packed, block_scale, global_scale, bias, lora_a, lora: Lora | None, out, pdl) -> None:
    from . import hopper

    (M, K), N = x.shape, packed.shape[0]
    BM, WK, WN, R = config["BM"], config["WK"], config["WN"], config["R"]
    rows = 16 * R * WN
    steps = K // (128 * WK)
    units = N // rows * steps
    grid = min(config["grid"], units)
    words, scales = packed.view(torch.int32), _bytes(block_scale).view(torch.int16)
    # x A^T inside the kernel wants its first programs for it, and row strides that say what K is
    inside = lora is not None and words.stride(0) * 8 == K and config.get("inside", True)
    inside = inside and lora.slices * math.ceil(lora.rows / 16) <= grid
    late = lora is not None and not inside
    if late:
        prepare(x, lora_a, lora, None, True, pdl)
    gs, sgs = _scale_args(global_scale)
    partial = scratch(x.device, "partial", 2 * grid * rows * BM, torch.float32)
    resident = math.ceil(grid / device_properties(x.device.index)[1])
    registers = min(
        255, 65536 // (resident * WK * WN * 32) // 8 * 8
    )  # all programs at once, whatever the last step needs
    hopper.skinny_kernel[(grid,)](
        x,
        words,
        scales,
        gs,
        x if bias is None else bias,
        x if lora is None else lora_a,
        partial if lora is None else lora.xa,
        x if lora is None else lora.b,
        out,
        partial,
        scratch(x.device, "counters", 1 << 16, torch.int32, zero=True),
        scratch(x.device, "flags", 64, torch.int32, zero=True),
        M,
        x.stride(0),
        out.stride(0),
        sgs,
        *_lora_args(lora),
        steps,
        units,
        swn=words.stride(0),
        ssn=scales.stride(0),
        BM=BM,
        WK=WK,
        WN=WN,
        R=R,
        BIAS=bias is not None,
        RANK=0 if lora is None else lora.rank,
        KS=0 if lora is None else lora.slices,
        SLICE=lora_slice(K) if inside else 0,
        LATE=late,
        PDL=pdl,
        num_warps=WK * WN,
        maxnreg=registers,
        **({"launch_pdl": True} if pdl else {}),
    )


def launch_wgmma(config, x, packed, block_scale, global_scale, bias, lora_a, lora: Lora | None, out, pdl) -> None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from . import hopper

    (M, K), N = x.shape, packed.shape[0]
    BM, BN, NW, S = config["BM"], config["BN"], config["NW"], config["S"]
    mt, steps = math.ceil(M / BM), K // 256
    units = math.ceil(N / BN) * mt * steps
    grid = min(config["grid"], units)
    permuted = scratch(x.device, "permuted", M * K, x.dtype)[: M * K].view(M, K)
    prepare(x, lora_a, lora, permuted, False, pdl)
    gs, sgs = _scale_args(global_scale)
    words, scales = packed.view(torch.int32), _bytes(block_scale).view(torch.int16)
    partial = scratch(x.device, "partial", 2 * grid * BN * BM, torch.float32)
    hopper.wgmma_kernel[(grid,)](
        TensorDescriptor(permuted, [M, K], [K, 1], [BM, 128], hopper.X_SHARED),
        TensorDescriptor(words, [N, K // 8], [words.stride(0), 1], [BN, 16], hopper.W_SHARED),
        TensorDescriptor(scales, [N, K // 32], [scales.stride(0), 1], [BN, 8], hopper.S_SHARED),
        gs,
        x if bias is None else bias,
        partial if lora is None else lora.xa,
        x if lora is None else lora.b,
        out,
        partial,
        scratch(x.device, "counters", 1 << 16, torch.int32, zero=True),
        M,
        N,
        out.stride(0),
        sgs,
        *_lora_args(lora),
        steps,
        units,
        mt,
        BM=BM,
        BN=BN,
        NW=NW,
        S=S,
        BIAS=bias is not None,
        RANK=0 if lora is None else lora.rank,
        KS=0 if lora is None else lora.slices,
        PDL=pdl,
        num_warps=NW,
        **({"launch_pdl": True} if pdl else {}),
    )


def launch_portable(
    config, x, packed, block_scale, global_scale, bias, lora_a, lora: Lora | None, out, pdl=False
) -> None:
    (M, K), N = x.shape, packed.shape[0]
    BM, BN, BK = config["BM"], config["BN"], config["BK"]
    tiles, steps = math.ceil(M / BM) * math.ceil(N / BN), math.ceil(K / BK)
    per_split = math.ceil(steps / config["SK"])
    SK = math.ceil(steps / per_split)
    if lora is not None:
        prepare(x, lora_a, lora, None, False, False)
    gs, sgs = _scale_args(global_scale)
    words, scales = packed.view(torch.int32), _bytes(block_scale)
    partial = scratch(x.device, "partial", tiles * SK * BN * BM if SK > 1 else 1, torch.float32)
    rank = 0 if lora is None else lora.rank
    rows, padded, e1, e2 = _lora_args(lora)
    portable.gemm_kernel[(tiles, SK)](
        x,
        words,
        scales,
        gs,
        x if bias is None else bias,
        partial if lora is None else lora.xa,
        x if lora is None else lora.b,
        out,
        partial,
        scratch(x.device, "counters", max(1 << 16, tiles), torch.int32, zero=True),
        M,
        N,
        K,
        x.stride(0),
        words.stride(0),
        scales.stride(0),
        out.stride(0),
        sgs,
        rows,
        padded,
        0 if lora is None else lora.slices,
        e1,
        e2,
        per_split,
        SK,
        BM=BM,
        BN=BN,
        BK=BK,
        SPLIT=SK > 1,
        EVEN_K=K % BK == 0,
        MMA=config["MMA"],
        BIAS=bias is not None,
        RANK=rank,
        BRANK=max(16, 1 << (rank - 1).bit_length()) if rank else 16,
        INTERP=portable.INTERPRET,
        num_warps=config["NW"],
        num_stages=config["NS"],
    )


def _dense_weight(packed, block_scale, global_scale, dtype, rows: slice, columns: slice) -> torch.Tensor:
    """A piece of the dequantized weight in the shared scratch buffer."""
    packed = packed[rows, columns.start // 2 : columns.stop // 2]
    block_scale = block_scale[rows, columns.start // 16 : columns.stop // 16]
    gs = global_scale if global_scale.numel() == 1 else global_scale[rows]
    n, k = packed.shape[0], packed.shape[1] * 2
    out = scratch(packed.device, f"dense {dtype}", n * k, dtype)[: n * k].view(n, k)
    return _dequantize(packed, block_scale, gs, dtype, out)


def linear_dense(x, packed, block_scale, global_scale, bias, lora_a, lora_b, splits, out, pieces: int) -> None:
    N, K = packed.shape[0], x.shape[1]
    step = math.ceil(N / pieces / 256) * 256
    for n0 in range(0, N, step):
        rows = slice(n0, min(n0 + step, N))
        weight = _dense_weight(packed, block_scale, global_scale, x.dtype, rows, slice(0, K))
        if bias is None:
            torch.mm(x, weight.t(), out=out[:, rows])
        else:
            torch.addmm(bias[rows].to(x.dtype), x, weight.t(), out=out[:, rows])
    if lora_a is not None:
        rank = lora_b.shape[1]
        down = x @ lora_a.to(x.dtype).t()
        n0 = 0
        for i, n in enumerate(reference.split_rows(lora_b, splits)):
            part = out[:, n0 : n0 + n]
            part.addmm_(down[:, i * rank : (i + 1) * rank], lora_b[n0 : n0 + n].to(x.dtype).t())
            n0 += n


def _aligned(x, packed, block_scale) -> bool:
    """16-byte rows, which every fused kernel asks for."""
    return (
        x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and packed.stride(1) == 1
        and packed.stride(0) % 16 == 0
        and packed.data_ptr() % 16 == 0
        and block_scale.stride(1) == 1
        and block_scale.stride(0) % 16 == 0
        and block_scale.data_ptr() % 16 == 0
    )


def check(x, packed, block_scale, global_scale) -> None:
    K, N = packed.shape[1] * 2, packed.shape[0]
    if x.shape[-1] != K:
        raise ValueError(
            f"x has {x.shape[-1]} columns, the weight {K} (packed {tuple(packed.shape)} holds two codes a byte)"
        )
    if block_scale.shape != (N, K // 16):
        raise ValueError(
            f"block_scale has shape {tuple(block_scale.shape)}; a weight of {N} x {K} needs {(N, K // 16)}"
        )
    if global_scale.numel() not in (1, N):
        raise ValueError(f"global_scale has {global_scale.numel()} elements; give 1, or one for each of the {N} rows")


def _linear(
    x, packed, block_scale, global_scale, bias=None, lora_a=None, lora_b=None, lora_splits=None
) -> torch.Tensor:
    check(x, packed, block_scale, global_scale)
    if not x.is_cuda or not HAS_TRITON or x.dtype not in (torch.bfloat16, torch.float16):
        return reference.linear(x, packed, block_scale, global_scale, bias, lora_a, lora_b, lora_splits)
    N, K = packed.shape[0], x.shape[-1]
    x_MK = x.reshape(-1, K)
    M = x_MK.shape[0]
    out = torch.empty(M, N, device=x.device, dtype=x.dtype)
    if M:
        index = x.device.index
        bf16 = x.dtype == torch.bfloat16 and use_hopper(index)
        config = choose(N, K, M, index, bf16)
        if config["kernel"] in ("skinny", "wgmma") and not _aligned(x_MK, packed, block_scale):
            config = {"kernel": "dense", "pieces": 1}
        if config["kernel"] == "portable" and (packed.data_ptr() % 4 or packed.stride(0) % 4):
            config = {"kernel": "dense", "pieces": 1}
        with torch.cuda.device(x.device):
            if config["kernel"] == "dense":
                linear_dense(
                    x_MK, packed, block_scale, global_scale, bias, lora_a, lora_b, lora_splits, out, config["pieces"]
                )
            else:
                launch(config, x_MK, packed, block_scale, global_scale, bias, lora_a, lora_b, lora_splits, out)
    return out.view(*x.shape[:-1], N)


def _linear_backward(dy, packed, block_scale, global_scale) -> torch.Tensor:
    if not dy.is_cuda or not HAS_TRITON or dy.dtype not in (torch.bfloat16, torch.float16):
        return reference.linear_backward(dy, packed, block_scale, global_scale)
    N, K = packed.shape[0], packed.shape[1] * 2
    with torch.cuda.device(dy.device):
        weight = _dense_weight(packed, block_scale, global_scale, dy.dtype, slice(0, N), slice(0, K))
        return (dy.reshape(-1, N) @ weight).view(*dy.shape[:-1], K)


# --- streaming kernels ------------------------------------------------------------------------------------------------------------


def _dequantize(packed, block_scale, global_scale, dtype, out) -> torch.Tensor:
    scales = _bytes(block_scale)
    usable = (
        packed.stride(1) == 1 and packed.stride(0) % 4 == 0 and packed.data_ptr() % 4 == 0 and packed.shape[1] % 4 == 0
    )
    if (
        not HAS_TRITON
        or not (packed.is_cuda or portable.INTERPRET)
        or not usable
        or scales.stride(1) != 1
        or out.stride(1) != 1
    ):
        return reference.dequantize(packed, block_scale, global_scale, dtype, out)
    N, K = packed.shape[0], packed.shape[1] * 2
    words = packed.view(torch.int32)
    gs, sgs = _scale_args(global_scale)
    types = {
        torch.bfloat16: portable.tl.bfloat16,
        torch.float16: portable.tl.float16,
        torch.float32: portable.tl.float32,
    }
    BN, BK = 8, 512
    portable.dequantize_kernel[(triton.cdiv(K, BK), triton.cdiv(N, BN))](
        words,
        scales,
        gs,
        out,
        N,
        K,
        words.stride(0),
        scales.stride(0),
        out.stride(0),
        sgs,
        BN=BN,
        BK=BK,
        DTYPE=types[dtype],
        INTERP=portable.INTERPRET,
        num_warps=4,
    )
    return out


def _dequantize_op(packed, block_scale, global_scale, dtype) -> torch.Tensor:
    out = torch.empty(packed.shape[0], packed.shape[1] * 2, device=packed.device, dtype=dtype)
    if packed.is_cuda:
        with torch.cuda.device(packed.device):
            return _dequantize(packed, block_scale, global_scale, dtype, out)
    return reference.dequantize(packed, block_scale, global_scale, dtype, out)


def _quantize(weight, scale_rule: str, global_scale) -> tuple[torch.Tensor, torch.Tensor]:
    if scale_rule not in reference.SCALE_RULES:
        raise ValueError(f"scale_rule={scale_rule!r} is unknown; choose one of {reference.SCALE_RULES}")
    if weight.ndim != 2 or weight.shape[1] % 16 or not weight.is_floating_point():
        raise ValueError(
            f"quantize needs a float matrix (N, K) with K a multiple of 16; got {tuple(weight.shape)} {weight.dtype}"
        )
    if not HAS_TRITON or not (weight.is_cuda or portable.INTERPRET) or weight.stride(1) != 1:
        return reference.quantize(weight, scale_rule, global_scale)
    N, K = weight.shape
    packed = torch.empty(N, K // 2, device=weight.device, dtype=torch.uint8)
    scales = torch.empty(N, K // 16, device=weight.device, dtype=torch.uint8)
    gs, sgs = _scale_args(global_scale.to(weight.device, torch.float32))
    BN, BK = 4, 512
    with torch.cuda.device(weight.device if weight.is_cuda else -1):
        elementwise.quantize_kernel[(triton.cdiv(K, BK), triton.cdiv(N, BN))](
            weight,
            packed,
            scales,
            gs,
            N,
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
    return packed, scales


def _rms_norm(x, weight, eps: float, residual=None) -> tuple[torch.Tensor, torch.Tensor]:
    if not HAS_TRITON or not (x.is_cuda or portable.INTERPRET) or x.dtype == torch.float32:
        y = reference.rms_norm(x, weight, eps, residual)
        return y if residual is not None else (y, x.new_empty(0))
    K = x.shape[-1]
    x_MK = x.reshape(-1, K)
    y = torch.empty_like(x_MK, memory_format=torch.contiguous_format)
    h = torch.empty_like(y) if residual is not None else x.new_empty(0)
    r_MK = x_MK if residual is None else residual.reshape(-1, K)
    pdl = x.is_cuda and device_properties(x.device.index)[2][0] >= 9
    with torch.cuda.device(x.device if x.is_cuda else -1):
        elementwise.rms_norm_kernel[(x_MK.shape[0],)](
            x_MK,
            r_MK,
            weight,
            y,
            h if residual is not None else y,
            K,
            x_MK.stride(0),
            r_MK.stride(0),
            eps,
            RESIDUAL=residual is not None,
            BK=triton.next_power_of_2(K),
            PDL=pdl,
            INTERP=portable.INTERPRET,
            num_warps=4 if K <= 2048 else 8,
            **({"launch_pdl": True} if pdl else {}),
        )
    return y.view(x.shape), h.view(x.shape) if residual is not None else h


# --- registration -----------------------------------------------------------------------------------------------------------------

_NAMESPACE = add_op_namespace_prefix("linear").split("::")[0]
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


def _register(schema: str, implementation, fake) -> None:
    """Library.define / impl instead of custom_op: a few microseconds less a call in eager mode."""
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)


_register(
    "linear(Tensor x, Tensor packed, Tensor block_scale, Tensor global_scale, Tensor? bias=None, Tensor? lora_a=None, "
    "Tensor? lora_b=None, int[]? lora_splits=None) -> Tensor",
    _linear,
    lambda x, packed, *_, **__: x.new_empty(*x.shape[:-1], packed.shape[0]),
)
_register(
    "linear_backward(Tensor dy, Tensor packed, Tensor block_scale, Tensor global_scale) -> Tensor",
    _linear_backward,
    lambda dy, packed, *_: dy.new_empty(*dy.shape[:-1], packed.shape[1] * 2),
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
_register(
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor? residual=None) -> (Tensor, Tensor)",
    _rms_norm,
    lambda x, weight, eps, residual=None: (
        torch.empty_like(x),
        x.new_empty(0) if residual is None else torch.empty_like(x),
    ),
)

ops = getattr(torch.ops, _NAMESPACE)
