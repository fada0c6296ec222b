"""Scratch memory and the launches of the fused matrix products."""

import math

import torch

from . import portable, reference
from .select import device_properties

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


def scale_args(global_scale: torch.Tensor) -> tuple[torch.Tensor, int]:
    return global_scale, 0 if global_scale.numel() == 1 else global_scale.stride(0)


def scale_bytes(block_scale: torch.Tensor) -> torch.Tensor:
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
    words, scales = packed.view(torch.int32), scale_bytes(block_scale).view(torch.int16)
    # x A^T inside the kernel wants its first programs for it, and row strides that say what K is
    inside = lora is not None and words.stride(0) * 8 == K and config.get("inside", True)
    inside = inside and lora.slices * math.ceil(lora.rows / 16) <= grid
    late = lora is not None and not inside
    if late:
        prepare(x, lora_a, lora, None, True, pdl)
    gs, sgs = scale_args(global_scale)
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

    from . import hopper_wgmma as hopper

    (M, K), N = x.shape, packed.shape[0]
    BM, BN, NW, S = config["BM"], config["BN"], config["NW"], config["S"]
    mt, steps = math.ceil(M / BM), K // 256
    units = math.ceil(N / BN) * mt * steps
    grid = min(config["grid"], units)
    permuted = scratch(x.device, "permuted", M * K, x.dtype)[: M * K].view(M, K)
    prepare(x, lora_a, lora, permuted, False, pdl)
    gs, sgs = scale_args(global_scale)
    words, scales = packed.view(torch.int32), scale_bytes(block_scale).view(torch.int16)
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
    gs, sgs = scale_args(global_scale)
    words, scales = packed.view(torch.int32), scale_bytes(block_scale)
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
