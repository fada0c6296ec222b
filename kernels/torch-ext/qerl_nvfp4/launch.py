"""Scratch memory, and the launch of each fused matrix product: tensor descriptors, grid, registers, constants."""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton
from triton.runtime import driver

from . import bounds, cost, elementwise, portable, reference
from .select import device_properties

# Kernels that run at the same time must not share scratch memory, so every stream has its own, and CUDA graphs, which run on whatever
# stream they are replayed on, have one set for all of them: the graphs of a device must not be replayed on two streams at a time, nor one be
# captured from two.
_GRAPHS = -1  # in the place of a stream
_scratch: dict[tuple[torch.device, int, str], torch.Tensor] = {}
_captured: list[torch.Tensor] = []  # buffers that a CUDA graph may point to: kept when a larger one takes their place
_RANK_LIMIT = 256
_this_thread = threading.local()  # `only_compile`: another thread may launch meanwhile


@contextlib.contextmanager
def only_compile() -> Iterator[None]:
    """This thread's launches inside compile their kernel, for tensors on the meta device, and do nothing else (precompile.py)."""
    _this_thread.only_compiles = True
    try:
        yield
    finally:
        _this_thread.only_compiles = False
        meta = torch.device("meta")
        _captured[:] = [buffer for buffer in _captured if not buffer.is_meta]
        for key in [key for key in _scratch if key[0] == meta]:
            del _scratch[key]


def compiles(tensor: torch.Tensor) -> bool:
    """Whether what is launched for this tensor is only compiled."""
    return tensor.is_meta and _only_compiles()


def _only_compiles() -> bool:
    return getattr(_this_thread, "only_compiles", False)


def launcher(kernel, *grid: int) -> Callable[..., None]:
    """What starts a kernel on a grid: every launch goes through here, so that what is compiled ahead is what will be launched."""
    return functools.partial(kernel.warmup, grid=grid) if _only_compiles() else kernel[grid]


def launch_place(device: torch.device) -> int:
    """Whose scratch memory a launch on `device` takes, now and in this thread: its current stream's, or that of CUDA graphs."""
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return _GRAPHS
    return driver.active.get_current_stream(device.index)  # torch.cuda.current_stream builds an object: microseconds


def scratch(device: torch.device, name: str, numel: int, dtype: torch.dtype, fill: int | None = None) -> torch.Tensor:
    """A buffer of at least `numel` elements, the same one at every call from the same place (`launch_place`)."""
    place = launch_place(device)
    if fill is not None and place != _GRAPHS and device.type == "cuda":
        # while a graph is captured nothing is filled: what will be captured has run before, on whatever stream
        _buffer((device, _GRAPHS, name), numel, dtype, fill)
    return _buffer((device, place, name), numel, dtype, fill)


def _buffer(key: tuple[torch.device, int, str], numel: int, dtype: torch.dtype, fill: int | None) -> torch.Tensor:
    buffer = _scratch.get(key)
    if buffer is None or buffer.numel() < numel:
        if buffer is not None:
            _captured.append(buffer)
            numel = max(numel, 2 * buffer.numel())  # so that what is kept stays below what is used
        with torch.inference_mode(False):  # such a tensor could not be written outside of it
            buffer = torch.empty(numel, device=key[0], dtype=dtype)
            if fill is not None:
                buffer.fill_(fill)
        _scratch[key] = buffer
    return buffer


def forget_scratch() -> None:
    """After a launch that failed, whose counters and cells may be left half-way. Graphs captured before must not be replayed."""
    _scratch.clear()


class Lora(NamedTuple):
    """What every kernel needs to add (x A^T) B^T in its last step."""

    b: torch.Tensor
    rank: int
    rows: int  # of the stacked A's
    edges: list[int]  # where the second and the third shard of B begin


def scale_args(global_scale: torch.Tensor) -> tuple[torch.Tensor, int]:
    return global_scale, 0 if global_scale.numel() == 1 else global_scale.stride(0)


def scale_bytes(block_scale: torch.Tensor) -> torch.Tensor:
    return block_scale if block_scale.dtype == torch.uint8 else block_scale.view(torch.uint8)


def lora_plan(x, lora_a, lora_b, splits, tile_rows: int) -> Lora | None:
    """None when the adapter does not fit the fused path (more than three shards, shard edges inside a tile, rank above 256)."""
    rank = lora_b.shape[1]
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
    return Lora(lora_b, rank, lora_a.shape[0], (edges + [2**30 - 2] * 2)[:2])


def lora_down(x, lora_a, tile: int | None = None) -> tuple[torch.Tensor, int, int]:
    """x A^T, float32, in at most eight slices of K, which the last step of the portable product adds up; slices, tokens of each.

    `tile`: tokens that a program computes; by default by the number of tokens.
    """
    (M, K), rows = x.shape, lora_a.shape[0]
    slice_k = max(512, math.ceil(K / 8 / 512) * 512)
    slices, padded = math.ceil(K / slice_k), math.ceil(M / 16) * 16
    xa = scratch(x.device, "lora", slices * rows * padded, torch.float32)
    BM = tile or (16 if M <= 16 else 32 if M <= 32 else 64)
    launcher(portable.lora_down_kernel, math.ceil(rows / 16) * math.ceil(M / BM) * slices)(
        x_ptr=x,
        a_ptr=lora_a,
        xa_ptr=xa,
        M=M,
        K=K,
        RS=rows,
        sxm=x.stride(0),
        mp=padded,
        KSLICE=slice_k,
        BM=BM,
        BR=16,
        BK=128,
        EVEN_K=K % 128 == 0,
        INTERP=portable.INTERPRET,
        num_warps=4,
        num_stages=4,
    )
    return xa, slices, padded


def permute_columns(x, out, pdl: bool) -> None:
    """out (M, ceil(K / 128) * 128) = x (M, K) in the order in which the wgmma kernel decodes weights, with zeros for columns that there
    are not; a few hundred programs, or 16 rows each."""
    M, K = x.shape
    rows = max(1, min(16, M * (K // 128) // 1024))
    rows = 1 << (rows.bit_length() - 1)
    launcher(portable.permute_kernel, math.ceil(M / rows), math.ceil(K / 512))(
        x, out, M, K, x.stride(0), BM=rows, BK=512, PDL=pdl, num_warps=4, **({"launch_pdl": True} if pdl else {})
    )


def quantize_x8(x, x8, scale, ordered: bool, factor=None, pdl: bool = False) -> None:
    """x (M, K) [* factor (K,)] -> x8 (M, K or more) e4m3, `ordered` as words are decoded, and scale (M,) float32."""
    M, K = x.shape
    BK = max(128, triton.next_power_of_2(K))
    launcher(elementwise.quantize_fp8_kernel, M)(
        x,
        scale if factor is None else factor,
        x8.view(torch.uint8),
        scale,
        K,
        x8.shape[1],
        x.stride(0),
        FACTOR=factor is not None,
        ORDER=ordered,
        BK=BK,
        PDL=pdl,
        INTERP=portable.INTERPRET,
        num_warps=min(32, max(4, BK // 2048)),
        **({"launch_pdl": True} if pdl else {}),
    )


def x8_of(x, ordered: bool, quantize=quantize_x8, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """x8 and scale of x (M, K), in scratch memory, by `quantize_x8` or what takes the same arguments."""
    M, K = x.shape
    columns = math.ceil(K / 128) * 128 if ordered else K
    x8 = scratch(x.device, "x8", M * columns, torch.float8_e4m3fn)[: M * columns].view(M, columns)
    scale = scratch(x.device, "x8 scale", M, torch.float32)[:M]
    quantize(x, x8, scale, ordered, **options)
    return x8, scale


def tile_rows(config: dict) -> int:
    return (
        16 * config["R"] * config["WN"]
        if config["kernel"] == "skinny"
        else 64
        if config["kernel"] in ("wgmma", "wide", "mma")
        else config["BN"]
    )


def fused_adapter(config: dict, x, lora_a, lora_b, splits) -> Lora | None:
    """What the kernel of a configuration is told of an adapter; None: there is none, or the kernel cannot add it."""
    if lora_a is None or (config["kernel"] == "skinny" and lora_b.shape[1] % 4):
        return None
    if config["kernel"] in ("wgmma", "wide") and (lora_b.shape[1] % 8 or lora_b.data_ptr() % 16):
        return None  # the copy engine wants rows of 16-byte pieces
    return lora_plan(x, lora_a, lora_b, splits, tile_rows(config))


def launch(
    config: dict, x, packed, block_scale, global_scale, bias, lora_a, lora_b, splits, out, x8=None, pdl: bool = True
) -> None:
    """out (M, N) = x (M, K) W^T [+ bias] [+ LoRA] with one of the fused kernels; `x8`: for `launch_wgmma`, others ignore it."""
    if lora_b is not None and not lora_b.shape[1]:  # of rank 0: there is nothing to add
        lora_a = lora_b = None
    lora = fused_adapter(config, x, lora_a, lora_b, splits)
    wgmma = functools.partial(launch_wgmma, x8=x8)
    launches = {"skinny": launch_skinny, "wgmma": wgmma, "wide": wgmma, "mma": launch_mma}
    kernel = launches.get(config["kernel"], launch_portable)
    kernel(config, x, packed, block_scale, global_scale, bias, lora_a, lora, out, pdl)
    if lora_a is not None and lora is None:
        out += reference.lora(x, lora_a, lora_b, splits)


def adapter_work(config: dict, units: int, tasks: int, sms: int) -> tuple[int, int]:
    """Programs of a launch with an adapter, and how many units of work a task of x A^T counts for.

    Programs of their own for the tasks where they still fit beside the others; else a task counts as much as it takes, about 3 units.
    """
    if "cost" in config:
        return min(config["grid"], units + tasks * config["cost"]), config["cost"]
    grid = min(config["grid"], units)
    if math.ceil((grid + tasks) / sms) == math.ceil(grid / sms):
        return grid + tasks, max(1, units // grid)
    return grid, min(3, math.ceil(units / grid))


@functools.cache
def converts_fp4(capability: tuple[int, int]) -> bool:
    """Whether a GPU has an instruction from e2m1 to bfloat16, and Triton's assembler knows it: ptxas of CUDA 13.2 and newer, which Triton 3.8 brings."""
    return capability >= (10, 0) and triton_version() >= (3, 8)


def triton_version() -> tuple[int, int]:
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def launch_skinny(config, x, packed, block_scale, global_scale, bias, lora_a, lora: Lora | None, out, pdl) -> None:
    from . import hopper

    (M, K), N = x.shape, packed.shape[0]
    BM, WK, WN, R = config["BM"], config["WK"], config["WN"], config["R"]
    rows = 16 * R * WN
    steps = K // (128 * WK)
    units = N // rows * steps
    _, sms, capability = device_properties(x.device.index)
    pdl = pdl and capability >= (9, 0)  # programmatic dependent launch
    # programs wait for others of the launch, so all must be resident: any GPU from sm_80 on takes 16 programs and 48 warps at once
    config = config | {"grid": min(config["grid"], sms * min(16, 48 // (WK * WN)))}
    words, scales = packed.view(torch.int32), scale_bytes(block_scale).view(torch.int16)
    grid, tasks, cost, slice_k, slices = min(config["grid"], units), 0, 1, 0, None
    if lora is not None:
        slice_k = 128 * WK * WN * (1 if K <= 8192 else 2)
        tasks = math.ceil(K / slice_k) * math.ceil(lora.rows / 16)
        grid, cost = adapter_work(config, units, tasks, sms)
        slices = scratch(x.device, "slices", tasks * 16 * BM, torch.float32)
    gs, sgs = scale_args(global_scale)
    pieces = scratch(x.device, "pieces", max(1 << 20, grid * rows * BM), torch.int32, fill=-1)
    # and registers for all of them, whatever the last step needs
    registers = min(255, 65536 // (math.ceil(grid / sms) * WK * WN * 32) // 8 * 8)
    launcher(hopper.skinny_kernel, grid)(
        x_ptr=x,
        w_ptr=words,
        s_ptr=scales,
        gs_ptr=gs,
        bias_ptr=x if bias is None else bias,
        a_ptr=x if lora is None else lora_a,
        b_ptr=x if lora is None else lora.b,
        xa_ptr=scratch(x.device, "cells", 2 * 16 * 384, torch.int32, fill=-1),
        slice_ptr=gs if slices is None else slices,
        ticket_ptr=scratch(x.device, "ticket", 1, torch.int32, fill=0),
        y_ptr=out,
        ws_ptr=pieces,
        cnt_ptr=scratch(x.device, "counters", 1 << 16, torch.int32, fill=0),
        M=M,
        sxm=x.stride(0),
        sym=out.stride(0),
        sgs=sgs,
        RS=0 if lora is None else lora.rows,
        e1=0 if lora is None else lora.edges[0],
        e2=0 if lora is None else lora.edges[1],
        tiles=N // rows,
        steps=steps,
        tasks=tasks,
        cost=cost,
        swn=words.stride(0),
        ssn=scales.stride(0),
        BM=BM,
        WK=WK,
        WN=WN,
        R=R,
        BIAS=bias is not None,
        RANK=0 if lora is None else lora.rank,
        K=K if lora is not None else 0,
        SLICE=slice_k,
        LATE=config.get("late", False),
        PDL=pdl,
        CONVERT=converts_fp4(capability),
        num_warps=WK * WN,
        maxnreg=registers,
        **({"launch_pdl": True} if pdl else {}),
    )


def launch_wgmma(
    config, x, packed, block_scale, global_scale, bias, lora_a, lora: Lora | None, out, pdl, x8=None
) -> None:
    """`x8`: x in e4m3 bytes and decode order, and its scales, where "fp8" finds them made."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from . import hopper_tile as hopper
    from .hopper_wgmma import wgmma_kernel

    (M, K), N, fp8 = x.shape, packed.shape[0], config.get("fp8", False)
    BM, P, S = config["BM"], config["P"], config["S"]
    mt, steps = math.ceil(M / BM), cost.units_along(K)
    if x.stride(0) % 8 or x.data_ptr() % 16:  # the copy engine wants rows of 16-byte pieces
        x = scratch(x.device, "aligned x", M * K, x.dtype)[: M * K].view(M, K).copy_(x)
    given, sms = x, device_properties(x.device.index)[1]
    order = "permute" if config.get("permute") else "natural" if config.get("natural") else "decoded"
    rank, rows, up, down = 0, 0, x, x
    if lora is not None:
        rank, rows, up = lora.rank, lora.rows, lora.b
        down = scratch(x.device, "lora down", mt * BM * rows, x.dtype)[: mt * BM * rows].view(mt * BM, rows)
    token_scale = gs = scale_args(global_scale)[0]
    if fp8:
        x, token_scale = x8 or x8_of(given, True, pdl=pdl)
        x = x.view(torch.float8_e4m3fn)
    elif order == "decoded":  # the kernel wants x in the order of its weights
        columns = math.ceil(K / 128) * 128
        x = scratch(x.device, "permuted", M * columns, x.dtype)[: M * columns].view(M, columns)
        permute_columns(given, x, pdl)
    y = out
    if out.stride(0) % 8 or out.data_ptr() % 16:
        y = scratch(x.device, "aligned y", M * N, out.dtype)[: M * N].view(M, N)
    tiles = math.ceil(N / (64 * P)) * mt
    counters = scratch(x.device, "counters", max(1 << 16, tiles * P), torch.int32, fill=0)
    grid, helpers, slices, slice_sums, counts = min(config["grid"], tiles * steps), 0, 1, gs, counters
    tasks = lora is not None and cost.beside(config, M)
    if lora is not None:  # the same scratch memory for every M, so that a graph of fewer tokens finds it there
        blocks, slices = cost.adapter_tasks(K, M, sms, rows)
        slices = config.get("slices") or slices
        sums = max(sms, blocks * slices)
        slice_sums = scratch(x.device, "lora slices", sums * cost.TASK**2, torch.float32)
        counts = scratch(x.device, "lora counts", max(1 << 12, blocks), torch.int32, fill=0)
        if tasks:
            helpers = cost.helping(grid, blocks * slices, sms)
        else:
            torch.mm(given, lora_a.t(), out=down[:M])
    whole = tiles // grid - (1 if tiles % grid and tiles > grid else 0)  # tiles of its own that a program computes
    words, scales = packed.view(torch.int32), scale_bytes(block_scale).view(torch.int16)
    average, *registers = hopper.registers(BM, P, order == "permute", tasks)
    variant = hopper.variant(
        BM, P, S, config.get("X", 0), order, fp8, bias is not None, rank, tasks, pdl, *registers
    )  # fmt: skip

    def rows_of(tensor: torch.Tensor, box: list[int], layout) -> TensorDescriptor:
        return TensorDescriptor(tensor, list(tensor.shape), [tensor.stride(0), 1], box, layout)

    sgs, edges = scale_args(global_scale)[1], (0, 0) if lora is None else lora.edges
    sizes = (M, sgs, rows // 8, helpers, slices, *edges, steps, (tiles - whole * grid) * steps, mt, whole)
    boxes, x_layout = hopper.boxes_of(BM), hopper.X8_SHARED if fp8 else hopper.X_SHARED
    launcher(wgmma_kernel, grid + helpers)(
        *(rows_of(x, [box, variant.C], x_layout) if box else None for box in boxes),
        TensorDescriptor(
            words, [N, K // 8], [words.stride(0), 1], [64, 32 // variant.B], hopper.words_shared(variant.B)
        ),
        TensorDescriptor(scales, [N, K // 32], [scales.stride(0), 1], [64, 8], hopper.S_SHARED),
        rows_of(up, [64, 32], hopper.L_SHARED) if rank else None,
        *(rows_of(down, [box, 32], hopper.L_SHARED) if box and rank else None for box in boxes),
        rows_of(y, [16, 64], hopper.X_SHARED),
        (
            given,
            given if lora is None else lora_a,
            slice_sums,
            down,
            scratch(x.device, "lora flags", max(64, mt), torch.int32, fill=0),
            scratch(x.device, "lora done", 1, torch.int32, fill=0),
            scratch(x.device, "lora taken", 1, torch.int32, fill=0),
            counts,
            gs,
            given if bias is None else bias,
            token_scale,
            scratch(x.device, "partial", grid * 64 * P * BM if tiles > whole * grid else 1, torch.float32),
            counters,
        ),
        (N, K, given.stride(0)),
        tuple(number << 32 | 0x80000003 for number in sizes),
        variant,
        num_warps=4,
        maxnreg=average,
        **({"launch_pdl": True} if pdl else {}),
    )
    if y is not out:
        out.copy_(y)


def _split(
    device: torch.device, rows: tuple[int, int], columns: tuple[int, int], steps: int, wanted: int
) -> tuple[int, int, int, torch.Tensor, torch.Tensor]:
    """A product in tiles whose splits along K are added up by the last of each tile to end.

    Args:
        rows, columns: how many the output has, and a tile.

    Returns:
        tiles, steps of each split, splits, the float32 cells where they are parked, the counters of the tiles that tell who is last.
    """
    tiles = math.ceil(rows[0] / rows[1]) * math.ceil(columns[0] / columns[1])
    each, splits = bounds.even_splits(steps, wanted)
    partial = scratch(device, "partial", tiles * splits * rows[1] * columns[1] if splits > 1 else 1, torch.float32)
    return tiles, each, splits, partial, scratch(device, "counters", max(1 << 16, tiles), torch.int32, fill=0)


def launch_mma(config, x, packed, block_scale, global_scale, bias, lora_a, lora: Lora | None, out, pdl) -> None:
    from . import ampere

    (M, K), N = x.shape, packed.shape[0]
    BM, BN, warps = config["BM"], 64 * config["R"], bounds.warps(config["BM"])
    if x.stride(0) % 16 or x.data_ptr() % 16:  # copied 16 bytes at a time
        x = scratch(x.device, "aligned x", M * K, x.dtype)[: M * K].view(M, K).copy_(x)
    steps = K // 128
    tiles, per_split, SK, partial, counters = _split(x.device, (M, BM), (N, BN), steps, config["SK"])
    gs, sgs = scale_args(global_scale)
    words, scales = packed.view(torch.int32), scale_bytes(block_scale).view(torch.int16)
    pdl = pdl and device_properties(x.device.index)[2] >= (9, 0)  # programmatic dependent launch
    down = x
    if lora is not None:
        down = scratch(x.device, "lora down", M * lora.rows, x.dtype)[: M * lora.rows].view(M, lora.rows)
        torch.mm(x, lora_a.t(), out=down)
    launcher(ampere.mma_kernel, tiles, SK)(
        x_ptr=x,
        w_ptr=words,
        s_ptr=scales,
        gs_ptr=gs,
        bias_ptr=x if bias is None else bias,
        xa_ptr=down,
        b_ptr=x if lora is None else lora.b,
        y_ptr=out,
        ws_ptr=partial,
        cnt_ptr=counters,
        M=M,
        N=N,
        sxm=x.stride(0),
        swn=words.stride(0),
        ssn=scales.stride(0),
        sym=out.stride(0),
        sxa=down.stride(0),
        sgs=sgs,
        e1=0 if lora is None else lora.edges[0],
        e2=0 if lora is None else lora.edges[1],
        steps=steps,
        per_split=per_split,
        splits=SK,
        BM=BM,
        R=config["R"],
        WN=warps[0],
        WT=warps[1],
        NS=config["NS"],
        SPLIT=SK > 1,
        BIAS=bias is not None,
        RANK=0 if lora is None else lora.rank,
        PDL=pdl,
        num_warps=warps[0] * warps[1],
        maxnreg=bounds.registers(BM, config["R"], 0 if lora is None else lora.rank),
        **({"launch_pdl": True} if pdl else {}),
    )


def launch_portable(
    config, x, packed, block_scale, global_scale, bias, lora_a, lora: Lora | None, out, pdl=False
) -> None:
    (M, K), N = x.shape, packed.shape[0]
    BM, BN, BK = config["BM"], config["BN"], config["BK"]
    tiles, per_split, SK, partial, counters = _split(x.device, (M, BM), (N, BN), math.ceil(K / BK), config["SK"])
    gs, sgs = scale_args(global_scale)
    fp8, given, token_scale = config.get("fp8", False), x, gs
    words, scales = packed.view(torch.int64 if fp8 else torch.int32), scale_bytes(block_scale)
    if fp8:
        x8, token_scale = x8_of(given, False)
        x = x8.view(torch.uint8)
    rank, rows, edges, xa, slices, padded = 0, 0, (0, 0), partial, 0, 0
    if lora is not None:
        rank, rows, edges = lora.rank, lora.rows, lora.edges
        xa, slices, padded = lora_down(given, lora_a, config.get("down"))
    launcher(portable.gemm_kernel, tiles, SK)(
        x_ptr=x,
        token_ptr=token_scale,
        w_ptr=words,
        s_ptr=scales,
        gs_ptr=gs,
        bias_ptr=given if bias is None else bias,
        xa_ptr=xa,
        b_ptr=given if lora is None else lora.b,
        y_ptr=out,
        ws_ptr=partial,
        cnt_ptr=counters,
        M=M,
        N=N,
        K=K,
        sxm=x.stride(0),
        swn=words.stride(0),
        ssn=scales.stride(0),
        sym=out.stride(0),
        sgs=sgs,
        RS=rows,
        mp=padded,
        ks_n=slices,
        e1=edges[0],
        e2=edges[1],
        iters_per_split=per_split,
        num_splits=SK,
        BM=BM,
        BN=BN,
        BK=BK,
        SPLIT=SK > 1,
        EVEN_K=K % BK == 0,
        MMA=config["MMA"],
        BIAS=bias is not None,
        RANK=rank,
        BRANK=max(16, min(64, 1 << (rank - 1).bit_length())) if rank else 16,
        FP8=fp8,
        INTERP=portable.INTERPRET,
        num_warps=config["NW"],
        num_stages=config["NS"],
    )
