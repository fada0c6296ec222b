"""Which kernel, with which configuration, for a matrix (N, K) and M tokens on a device.

In this order: what was measured (measured.py), by the user or shipped; what should take least, by the cost model (cost.py) on Hopper above
16 tokens and for W4A8, by arithmetic (bounds.py) on Ampere, Ada and GeForce Blackwell; a heuristic.  A configuration is a small dict:

    {"kernel": "skinny", "BM", "WK", "WN", "R", "late", "grid"}    hopper.skinny_kernel, up to 16 tokens, sm_80 and newer
        "cost"                                     K steps that a piece of x A^T counts as
    {"kernel": "wgmma", "BM", "P", "S", "permute", "grid"}         hopper_wgmma.wgmma_kernel, tiles of 64 P rows
        "tasks"                                    whether tasks of the kernel compute x A^T, or cuBLAS before
        "natural"                                  x stays in its order
    {"kernel": "wide", "BM", "P", "S", "X", "grid"}                the same kernel, x in a ring of its own, BM any multiple of 16 up to 256
    {"kernel": "mma", "BM", "R", "NS", "SK"}                       ampere.mma_kernel, tiles of 64 R rows, more than 16 tokens, sm_80 and newer
    {"kernel": "portable", "BM", "BN", "BK", "SK", "NW", "NS", "MMA"}    portable.gemm_kernel
    {"kernel": "dense"}                                            dequantize into a scratch buffer, then cuBLAS
    {"kernel": ..., "fp8": True}                                   W4A8: `wgmma` or `wide` with S and X, `portable`, or `dense` in e4m3

`portable_shared_memory` keeps the portable kernel below the card's limit per block.
"""

import functools
import math

import torch

from . import bounds, cost, measured

# numbers of tokens that are listed for a user; up to 8 and up to 16 `skinny` is not the same kernel
BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024)
SMALLEST_SHARED_MEMORY = 99 * 1024  # bytes per block; of the GPUs from sm_80 on, sm_86, sm_89 and sm_12x have the least


def device_properties(index: int | None) -> tuple[str, int, tuple[int, int]]:
    """Name, multiprocessors, compute capability; None, the index of the meta device: of the current CUDA device."""
    return _properties(torch.cuda.current_device() if index is None else index)


@functools.cache
def _properties(index: int) -> tuple[str, int, tuple[int, int]]:
    p = torch.cuda.get_device_properties(index)
    return p.name, p.multi_processor_count, (p.major, p.minor)


@functools.cache
def shared_memory_limit(index: int | None) -> int:
    """Bytes of shared memory that a block may have."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return getattr(properties, "shared_memory_per_block_optin", SMALLEST_SHARED_MEMORY)


def skinny_fits(config: dict, N: int, K: int) -> bool:
    return N % (16 * config["R"] * config["WN"]) == 0 and K % (128 * config["WK"]) == 0


def skinny_heuristic(N: int, K: int, M: int, sms: int) -> dict | None:
    """Rows and K split such that every multiprocessor gets about equal work and, for small matrices, tiles need not be shared."""
    BM = 8 if M <= 8 else 16
    for WK, WN, R in ((4, 1, 2), (4, 1, 1), (2, 2, 1), (2, 1, 1), (1, 4, 1), (1, 1, 1)):
        config = {"kernel": "skinny", "BM": BM, "WK": WK, "WN": WN, "R": R}
        if skinny_fits(config, N, K):
            return config | {"grid": sms * (4 if BM == 8 else 3) * (1 if WK * WN == 4 else 2)}
    return None


def wgmma_heuristic(N: int, K: int, M: int, sms: int) -> dict | None:
    """Tiles of 192 rows where there are plenty, else of 128; few tiles are split along K so that each program has one piece."""
    if not cost.fits(N, K):
        return None
    BM, S = (32, 5) if M <= 32 else (64, 4) if M <= 64 else (128, 2)
    P = 3 if M > 64 and math.ceil(N / 192) * math.ceil(M / BM) > sms else 2
    tiles = math.ceil(N / (64 * P)) * math.ceil(M / BM)
    grid = sms if tiles > sms else tiles * max(1, min(sms // tiles, K // 512))
    return {"kernel": "wgmma", "BM": BM, "P": P, "S": S, "permute": M <= 64, "grid": grid}


def portable_shared_memory(config: dict) -> int:
    """Bytes, at most, per block of portable.gemm_kernel: words, scales and x of all stages but one, a tile of decoded weights, barriers.

    An adapter needs less, of any rank: it is added 64 ranks at a time, when the stages are done.
    """
    BM, BN, BK = config["BM"], config["BN"], config["BK"]
    return (config["NS"] - 1) * (BN * BK * 9 // 16 + BM * BK * 2) + BN * BK * 2 + 64


def portable_heuristic(
    N: int, K: int, M: int, sms: int, hopper: bool, shared_memory: int = SMALLEST_SHARED_MEMORY
) -> dict:
    """As many stages, up to four, as `shared_memory` bytes hold."""
    BM = 16 if M <= 16 else 32 if M <= 32 else 64
    BN = 64 if N * math.ceil(M / BM) <= 64 * sms else 128
    tiles = math.ceil(N / BN) * math.ceil(M / BM)
    steps = math.ceil(K / 128)
    _, SK = bounds.even_splits(steps, max(1, min(steps, round(2 * sms / tiles))))
    config = {"kernel": "portable", "BM": BM, "BN": BN, "BK": 128, "SK": SK, "NW": 4, "MMA": 3 if hopper else 2}
    stages = range(4 if BM < 64 else 3, 1, -1)
    fitting = (NS for NS in stages if portable_shared_memory(config | {"NS": NS}) <= shared_memory)
    return config | {"NS": next(fitting, 1)}


def measured_for(device_index: int | None, own: bool = True) -> measured.Found:
    """The measurements for a device, without the user's if not `own`."""
    return measured.load(*device_properties(device_index), own)


def forget_measured() -> None:
    """Read the user's measurements again."""
    measured.load.cache_clear()
    explain.cache_clear()


DENSE_FP8 = {"kernel": "dense", "fp8": True}


@functools.lru_cache(maxsize=4096)
def explain(
    N: int,
    K: int,
    M: int,
    device_index: int | None,
    bf16: bool,
    rank: int = 0,
    shards: int = 1,
    fp8: bool = False,
    own: bool = True,
) -> tuple[dict, str]:
    """The configuration for y (M, N) = x (M, K) W^T, and where it is from: measured where, a price, or the heuristic.

    bf16: whether x is bfloat16 and Triton has what the Gluon kernels use (ops.use_gluon). `rank` of the adapter, 0: none. `shards`, each
    with an adapter of this rank, on how many the rows of A depend. `own`: whether the user's measurements count.
    """
    name, sms, capability = device_properties(device_index)
    hopper, found = capability[0] == 9, None
    if bf16 and (best := measured_for(device_index, own).fastest(N, K, M, rank, fp8)):
        return best
    if bf16 and hopper and (M > 16 or fp8):
        priced = cost.cheapest(N, K, M, sms, rank * shards, fp8=fp8)
        if priced is not None:
            return priced, "cost model"
    # None where no price is asked for; no Hopper is listed
    card = bounds.card_of(name, capability, sms) if bf16 and cost.SIZES[-1] >= M else None
    if fp8:
        config = DENSE_FP8
        ours, dense = bounds.fp8_us(card, N, K, cost.size_of(M)) if card else (M, 128)
        if bf16 and not hopper and ours <= dense:
            config = portable_heuristic(N, K, M, sms, False, shared_memory_limit(device_index)) | {"fp8": True}
        return config, f"bounds of {card.name}" if card else "heuristic"
    if bf16 and M <= 16 and capability >= (8, 0):
        found = skinny_heuristic(N, K, M, sms)
    elif bf16 and hopper:
        found = wgmma_heuristic(N, K, M, sms) if M <= 512 else None
    elif card:
        # between two of these sizes nothing changes, and nothing else is compiled
        prices = bounds.priced(card, N, K, cost.size_of(M), shared_memory_limit(device_index))
        if prices:
            return prices[0][1], f"bounds of {card.name}"
    return found or without_gluon(N, K, M, device_index), "heuristic"


# --- batch-invariant -----------------------------------------------------------------------------------------------------------------

INVARIANT_TOKENS = 1024  # more are computed in pieces, which changes no bit here
_NOMINAL = 132  # multiprocessors for which K is cut; a constant, because the cut decides the bits
_FP8_TILES = ((16, 2, 6), (32, 2, 5), (64, 2, 4), (128, 2, 4))  # BM, P, S
_WGMMA_TILES = ((16, 3, 4, True), (32, 2, 5, True), (64, 2, 4, True), (128, 2, 2, False))  # BM, P, S, permute


def fixed_split(tiles: int, steps: int) -> int:
    """Into how many pieces K is cut in every tile, by the matrix alone; `tiles` of the rows, `steps` along K."""
    return max(1, min(8, _NOMINAL // tiles, steps // 2))


def whole_tiles_grid(tiles: int, sms: int) -> int:
    """Programs of a launch that cuts no tile: several tiles each where that takes no more rounds, else one each."""
    largest = next(g for g in range(min(tiles, sms), 0, -1) if tiles % g == 0)
    return largest if tiles // largest <= math.ceil(tiles / sms) else tiles


def batch_invariant(
    N: int, K: int, M: int, sms: int, hopper: bool, bf16: bool, shared_memory: int, fp8: bool = False
) -> list[dict]:
    """Configurations, the fastest first, of which each computes a row of y (M, N) by the same sums in the same order for every M up to
    `INVARIANT_TOKENS`: which one is launched must not depend on M.

    wgmma: every tile's columns are cut at the same places, for x A^T too; widths of the matrix instruction differ, the order of k within
    does not.  portable: one tile for all.  `skinny` and cuBLAS add up in another order than these, and are never taken.
    """
    found, more = [], {"fp8": True} if fp8 else {}
    if bf16 and hopper and cost.fits(N, K):
        sizes = [(*t, False) for t in _FP8_TILES] if fp8 else _WGMMA_TILES
        BM, P, S, permute = next((t for t in sizes if t[0] >= M), sizes[-1])
        split = fixed_split(math.ceil(N / 128), cost.units_along(K))
        tiles = math.ceil(N / (64 * P)) * math.ceil(M / BM)
        grid = tiles * split if split > 1 else whole_tiles_grid(tiles, sms)
        config = {"kernel": "wgmma", "BM": BM, "P": P, "S": S, "permute": permute, "grid": grid}
        found.append(config | {"tasks": True, "slices": max(1, K // 1024)} | more)
    steps, BM, BN = math.ceil(K / 128), 64, 64
    config = {"kernel": "portable", "BM": BM, "BN": BN, "BK": 128, "NW": 4, "MMA": 3 if hopper else 2, "down": 16}
    config["SK"] = fixed_split(math.ceil(N / BN), steps)
    stages = (NS for NS in (3, 2) if portable_shared_memory(config | {"NS": NS}) <= shared_memory)
    return [*found, config | {"NS": next(stages, 1)} | more]


def choose(
    N: int, K: int, M: int, device_index: int | None, bf16: bool, rank: int = 0, shards: int = 1, fp8: bool = False
) -> dict:
    """The configuration for y (M, N) = x (M, K) W^T, with an adapter of this rank (0: none) on each of so many shards."""
    return explain(N, K, M, device_index, bf16, rank, shards, fp8)[0]


def without_gluon(N: int, K: int, M: int, device_index: int | None) -> dict:
    """The portable kernel, or for many tokens the dense path."""
    if M > 128:
        return {"kernel": "dense"}
    _, sms, capability = device_properties(device_index)
    return portable_heuristic(N, K, M, sms, capability[0] == 9, shared_memory_limit(device_index))
