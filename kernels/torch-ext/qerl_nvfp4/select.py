"""Which kernel, with which configuration, for a matrix (N, K) and M tokens on a device.

In this order: the user's measurements of a model on this GPU (refine.py, kept by measured.py); above 16 tokens on Hopper, what was timed
for the cost model (cost.py) if faster, then the model; a table (configs/device_name=<name>.json, by a tuner that `qerl-trl tune` has
replaced), also for another Hopper GPU with as many multiprocessors; on Ampere, Ada and GeForce Blackwell arithmetic (bounds.py); a
heuristic.  The table comes before the model at the numbers of tokens at which it was tuned with an adapter.  A configuration is a small dict:

    {"kernel": "skinny", "BM", "WK", "WN", "R", "late", "grid"}    hopper.skinny_kernel, up to 16 tokens, sm_80 and newer
        "lora": {..., "cost"}                      differences with an adapter; K steps that a piece of x A^T counts as
    {"kernel": "wgmma", "BM", "P", "S", "permute", "grid"}         hopper_wgmma.wgmma_kernel, tiles of 64 P rows
        "lora": {"tasks", ...}                     whether tasks of the kernel compute x A^T, or cuBLAS before
        "natural"                                  x stays in its order
    {"kernel": "wide", "BM", "P", "S", "X", "grid"}                the same kernel, x in a ring of its own, BM any multiple of 16 up to 288
    {"kernel": "mma", "BM", "R", "NS", "SK"}                       ampere.mma_kernel, tiles of 64 R rows, more than 16 tokens, sm_80 and newer
    {"kernel": "portable", "BM", "BN", "BK", "SK", "NW", "NS", "MMA"}    portable.gemm_kernel
    {"kernel": "dense", "pieces"}                                  dequantize into a scratch buffer, then cuBLAS
    {"kernel": ..., "fp8": True}                                   W4A8: `wgmma` or `wide` with S and X, `portable`, or `dense` in e4m3

`portable_shared_memory` keeps the portable kernel below the card's limit per block.
"""

import functools
import json
import math
from pathlib import Path

import torch

from . import bounds, cost, measured

CONFIG_FOLDER = Path(__file__).parent / "configs"
BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024)  # M is rounded up to one of these; above the last: "dense"
MEASURED = "measured on this GPU"
SMALLEST_SHARED_MEMORY = 99 * 1024  # bytes per block; of the GPUs from sm_80 on, sm_86, sm_89 and sm_12x have the least


def table_path(device_name: str) -> Path:
    return CONFIG_FOLDER / f"device_name={device_name.replace(' ', '_')}.json"


@functools.cache
def load_table(device_name: str, sms: int) -> dict[tuple[int, int, int], dict]:
    """(N, K, bucket) -> configuration; empty when such a device with as many multiprocessors (MPS and green contexts may hide some) was
    never tuned. Bucket 0 stands for every larger M."""
    path = table_path(device_name)
    table = json.loads(path.read_text()) if path.is_file() else {}
    if table.get("multiprocessors") != sms:
        return {}
    return {(e["N"], e["K"], e["bucket"]): e["config"] for e in table["entries"]}


@functools.cache
def table_for(device_name: str, sms: int, capability: tuple[int, int]) -> tuple[str, dict[tuple[int, int, int], dict]]:
    """The device whose table is used, and the table: the device's own, or that of another Hopper with as many multiprocessors (an H100
    SXM or a GH200 has the H200's 132). ("", {}): none."""
    table = load_table(device_name, sms)
    if table:
        return device_name, table
    if capability[0] == 9:  # only Hopper GPUs are tuned
        for path in sorted(CONFIG_FOLDER.glob("device_name=*.json")):
            other = json.loads(path.read_text())["device"]
            table = load_table(other, sms)
            if table:
                return other, table
    return "", {}


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


def with_adapter(config: dict) -> dict:
    """The configuration for a product with an adapter."""
    return config | config.get("lora", {})


def bucket_of(M: int) -> int:
    return next((b for b in BUCKETS if b >= M), 0)


def skinny_fits(config: dict, N: int, K: int) -> bool:
    return N % (16 * config["R"] * config["WN"]) == 0 and K % (128 * config["WK"]) == 0


def wgmma_fits(N: int, K: int) -> bool:
    return cost.fits(N, K)


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
    if not wgmma_fits(N, K):
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


def can_run(config: dict, N: int, K: int, M: int, sms: int, shared_memory: int) -> bool:
    """Whether a configuration is one that these kernels can be launched with for M tokens: another one could wait for programs that never
    start, or leave tokens out.

    For configurations that come from a file. `shared_memory`: bytes that a block may have.
    """
    config = with_adapter(config)
    fields = {name: value for name, value in config.items() if name not in ("kernel", "lora")}
    if not all(isinstance(value, int) for value in fields.values()):
        return False
    kernel, get = config.get("kernel"), fields.get
    if kernel == "dense":
        return 1 <= get("pieces", 0) <= 8
    if kernel == "skinny":
        known = {"BM", "WK", "WN", "R", "grid"} <= set(fields) <= {"BM", "WK", "WN", "R", "grid", "late", "cost"}
        warps = known and {get("WK"), get("WN")} <= {1, 2, 4, 8} and get("WK") * get("WN") <= 8
        return (
            warps
            and get("BM") in (8, 16)
            and get("BM") >= M  # a program computes all tokens
            and get("R") in (1, 2, 4)
            and 0 < get("grid") <= 16 * sms
            and 0 < get("cost", 1) <= 64
            and skinny_fits(config, N, K)
        )
    if kernel in ("wgmma", "wide"):
        if not 0 < get("grid", 0) <= sms or not wgmma_fits(N, K):
            return False
        tile = get("BM"), get("P")
        if kernel == "wgmma":
            known = (*tile, get("S"), get("permute")) in cost.WGMMA
        else:
            known = tile in cost.WIDE and (get("S"), get("X")) == cost.wide_stages(*tile)
        natural = not get("natural", False) or (known and cost.can_be_natural(config))
        return known and natural and (not get("tasks", False) or cost.can_be_beside(config))
    if kernel == "mma":
        tile, NS, SK = (get("BM"), get("R")), get("NS", 0), get("SK", 0)
        fits = K % 128 == 0 and 2 <= NS <= bounds.stages(get("BM"), shared_memory) if tile in bounds.ISSUED else False
        return fits and 1 <= SK <= K // 128
    if kernel == "portable":
        sizes = (get("BM") in (16, 32, 64), get("BN") in (64, 128), get("BK") == 128, get("NW") in (4, 8))
        counts = 1 <= get("NS", 0) <= 4 and 1 <= get("SK", 0) <= math.ceil(K / 128) and get("MMA") in (2, 3)
        return all(sizes) and counts and portable_shared_memory(config) <= shared_memory
    return False


@functools.cache
def measured_on(name: str, sms: int, shared_memory: int) -> measured.Found:
    """What the user measured on such a device; read once per process."""
    return measured.load(name, sms, lambda config, N, K, M: can_run(config, N, K, M, sms, shared_memory))


def measured_for(device_index: int | None) -> measured.Found:
    """The same for a device."""
    name, sms, _ = device_properties(device_index)
    return measured_on(name, sms, shared_memory_limit(device_index))


def forget_measured() -> None:
    """Read the user's measurements again."""
    measured_on.cache_clear()
    explain.cache_clear()


DENSE_FP8 = {"kernel": "dense", "pieces": 1, "fp8": True}


@functools.lru_cache(maxsize=4096)
def explain(
    N: int, K: int, M: int, device_index: int | None, bf16: bool, rank: int = 0, shards: int = 1, fp8: bool = False
) -> tuple[dict, str]:
    """The configuration for y (M, N) = x (M, K) W^T, and where it is from: measured by the user, the table of which device, the cost
    model, or the heuristic.

    bf16: whether x is bfloat16 and Triton has what the Gluon kernels use (ops.use_gluon). `rank` of the adapter, 0: none. `shards`, each
    with an adapter of this rank, on how many the rows of A depend.
    """
    if fp8:
        name, sms, capability = device_properties(device_index)
        if bf16 and capability[0] != 9 and cost.SIZES[-1] >= M:
            card, size = bounds.card_of(name, capability, sms), next(size for size in cost.SIZES if size >= M)
            ours, dense = bounds.fp8_us(card, N, K, size) if card else (M, 128)
            if ours <= dense:
                config = portable_heuristic(N, K, M, sms, False, shared_memory_limit(device_index))
                return config | {"fp8": True}, "W4A8"
        if not bf16 or capability[0] != 9 or cost.SIZES[-1] < M:
            return DENSE_FP8, "W4A8"
        timed = cost.fastest_timed(N, K, M, sms, rank * shards, fp8=True)
        priced = cost.cheapest(N, K, M, sms, rank * shards, fp8=True)
        return (timed[0] if timed else priced or DENSE_FP8), "W4A8"
    if bf16:
        found = measured_for(device_index).entries.get((N, K, measured.padded(rank), measured.covering(M)))
        if found is not None and (cost.WIDE_ALLOWED or found["kernel"] != "wide"):
            return found, MEASURED
    return shipped(N, K, M, device_index, bf16, rank, shards)


def by_price(N: int, K: int, M: int, sms: int, rows: int, tuned: dict | None, model: dict | None = None) -> dict | None:
    """For more than 16 tokens on a Hopper GPU: the table's entry, if it was tuned with an adapter for just so many; else what the cost model
    finds cheapest, the entry among it; None: it knows nothing. `rows` of the stacked A's, `tuned`: the table's entry for up to M tokens."""
    if tuned is not None and bucket_of(M) == M and "lora" in tuned:
        return tuned
    return cost.cheapest(N, K, M, sms, rows, () if tuned is None else (with_adapter(tuned),), model)


def shipped(
    N: int, K: int, M: int, device_index: int | None, bf16: bool, rank: int = 0, shards: int = 1
) -> tuple[dict, str]:
    """The same without what the user measured."""
    name, sms, capability = device_properties(device_index)
    hopper = capability[0] == 9
    bucket = bucket_of(M)
    owner, table = table_for(name, sms, capability)
    tuned = table.get((N, K, bucket))
    if bf16 and hopper and M > 16:
        timed = cost.fastest_timed(N, K, M, sms, rank * shards)
        if timed is not None:
            return timed[0], f"timed on {timed[1]}"
        found = by_price(N, K, M, sms, rank * shards, tuned)
        if found is not None and found is not tuned:
            return found, "cost model"
    if tuned is not None and bf16:
        return tuned, f"table of {owner}"
    if tuned is not None and tuned["kernel"] == "dense":
        # with an adapter it may be another kernel, which takes bfloat16 only
        return {k: v for k, v in tuned.items() if k != "lora"}, f"table of {owner}"
    found = None
    if bf16 and M <= 16 and capability >= (8, 0):
        found = skinny_heuristic(N, K, M, sms)
    elif bf16 and hopper:
        found = wgmma_heuristic(N, K, M, sms) if M <= 512 else None
    elif bf16 and M <= cost.SIZES[-1]:  # noqa: SIM300
        card = bounds.card_of(name, capability, sms)
        # between two of these sizes nothing changes, and nothing else is compiled
        size = next(size for size in cost.SIZES if size >= M)
        prices = bounds.priced(card, N, K, size, shared_memory_limit(device_index)) if card else []
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
    found = []
    if bf16 and hopper and wgmma_fits(N, K):
        sizes = [(*t, False) for t in _FP8_TILES] if fp8 else _WGMMA_TILES
        BM, P, S, permute = next((t for t in sizes if t[0] >= M), sizes[-1])
        split = fixed_split(math.ceil(N / 128), cost.units_along(K))
        tiles = math.ceil(N / (64 * P)) * math.ceil(M / BM)
        grid = tiles * split if split > 1 else whole_tiles_grid(tiles, sms)
        config = {"kernel": "wgmma", "BM": BM, "P": P, "S": S, "permute": permute, "grid": grid}
        found.append(config | {"tasks": True, "slices": max(1, K // 1024)} | ({"fp8": True} if fp8 else {}))
    if fp8:
        return found
    steps, BM, BN = math.ceil(K / 128), 64, 64
    config = {"kernel": "portable", "BM": BM, "BN": BN, "BK": 128, "NW": 4, "MMA": 3 if hopper else 2, "down": 16}
    config["SK"] = fixed_split(math.ceil(N / BN), steps)
    stages = (NS for NS in (3, 2) if portable_shared_memory(config | {"NS": NS}) <= shared_memory)
    return [*found, config | {"NS": next(stages, 1)}]


def choose(
    N: int, K: int, M: int, device_index: int | None, bf16: bool, rank: int = 0, shards: int = 1, fp8: bool = False
) -> dict:
    """The configuration for y (M, N) = x (M, K) W^T, with an adapter of this rank (0: none) on each of so many shards."""
    return explain(N, K, M, device_index, bf16, rank, shards, fp8)[0]


def without_gluon(N: int, K: int, M: int, device_index: int | None) -> dict:
    """The portable kernel, or for many tokens the dense path."""
    if M > 128:
        return {"kernel": "dense", "pieces": 1}
    _, sms, capability = device_properties(device_index)
    return portable_heuristic(N, K, M, sms, capability[0] == 9, shared_memory_limit(device_index))
