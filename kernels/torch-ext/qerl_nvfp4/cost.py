"""Cost of a matrix product: candidates for a matrix (N, K) and M tokens, and microseconds predicted for each.

The prediction is a sum of a few terms of a launch (`terms`), with one set of factors per compiled variant of a kernel.  The factors are
fitted to measurements (kernels/benchmarks/fit.py, from the JSON of every_size.py) and kept in configs/cost_model.json, with the number
of tokens up to which each variant was measured; beyond it a variant has no price.
The model is for Hopper GPUs and products with an adapter, as in a rollout.  W4A8 variants have factors of their own.
"""

import functools
import json
import math
from pathlib import Path

FACTORS = Path(__file__).parent / "configs" / "cost_model.json"
SIZES = (
    *range(32, 513, 16),
    *range(576, 1537, 64),
)  # a number of tokens is priced as the next of these; more: not at all

# Tiles of 64 P rows and BM tokens, S stages of words.  Each was faster than all others by more than 3 % somewhere in
# benchmarks/results/every_size_h200.json, but for the one of 16 tokens, which batch-invariant products take
WGMMA = (  # BM, P, S, permute: x comes with the words
    (16, 3, 4, True),
    (32, 2, 5, True),
    (32, 3, 4, False),
    (64, 2, 4, True),
    (64, 3, 3, True),
    (64, 3, 3, False),
    (128, 2, 2, False),
    (128, 3, 2, False),
)
WIDE = (  # BM, P, S, X stages of x
    (80, 3, 3, 8),
    (96, 2, 3, 8),
    (144, 2, 3, 8),
    (144, 3, 3, 6),
    (160, 2, 3, 7),
    (192, 2, 3, 5),
    (192, 3, 2, 5),
    (208, 2, 3, 5),
    (224, 2, 2, 5),
    (256, 2, 2, 4),
)
# BM, P of tiles that also take x in its natural order, whose decoding takes half as many instructions more: from 128 tokens on they fill at
# most 0.7 of the cycles of the matrix units
NATURAL = ((128, 2), (144, 2), (144, 3), (160, 2), (256, 2))
FP8 = (  # BM, P, S, X of W4A8, from one sequence on; X = 0: x comes with the words
    (16, 2, 6, 0),
    (32, 2, 5, 0),
    (64, 2, 4, 0),
    (96, 2, 4, 8),
    (128, 2, 4, 0),
    (128, 3, 3, 0),
    (144, 2, 3, 7),
    (144, 3, 3, 6),
    (160, 2, 3, 6),
    (176, 2, 3, 6),
    (192, 2, 3, 5),
    (208, 2, 3, 5),
    (224, 2, 3, 5),
    (256, 2, 3, 4),
)
WITHOUT_ADAPTER = 64  # rows of A that a product without an adapter is priced with: only products with one were timed
UNIT = 256  # columns that a tile's programs go along K at a time
TASK = 16  # tokens, and rows of A, in a task of x A^T beside the product
STEP = 256  # columns of a step of a task: 128 a warp
TOKENS = "tokens"  # among a variant's factors: up to how many it was measured
WASTE = 1.35  # a tile is worth a try if it rounds the number of tokens up by no more than this


def size_of(M: int, fp8: bool = False) -> int:
    """The number of tokens as which M is priced; 0: not at all."""
    if fp8 and M <= 16:
        return 16
    return next((size for size in SIZES if size >= M), 0)


def grids(tiles: int, steps: int, sms: int) -> list[int]:
    """Numbers of programs: all multiprocessors; where that cuts tiles, also whole tiles, or equal shares of each."""
    if tiles >= sms:
        waves = math.ceil(tiles / sms)
        return sorted({sms, math.ceil(tiles / waves)}) if tiles % sms else [sms]
    return sorted({sms, tiles * max(1, min(sms // tiles, steps // 2))})


def fits(N: int, K: int) -> bool:
    """Whether `wgmma` and `wide` take a matrix: rows of words of whole 16 bytes, and at least a unit of columns.

    Where K is no multiple of 256, the rows of the scales have to be aligned too (`ops.align_scale_rows`), which `ops.usable` looks at.
    """
    return N % 16 == 0 and K % 32 == 0 and K >= UNIT


def units_along(K: int) -> int:
    """Units of a tile; of the last one, the copy engine fills what lies beyond K with zeros."""
    return math.ceil(K / UNIT)


def adapter_tasks(K: int, M: int, sms: int, rows: int) -> tuple[int, int]:
    """Blocks of x A^T beside a product, and slices of K, each of which is a task in each block; `rows` of the stacked A's."""
    blocks = math.ceil(M / TASK) * math.ceil(rows / TASK)
    return blocks, max(1, min(math.ceil(K / STEP), sms // blocks))


def helping(grid: int, tasks: int, sms: int) -> int:
    """Programs that do nothing but tasks of x A^T, on multiprocessors that the tiles leave idle."""
    return max(0, min(sms - grid, tasks))


def layouts(N: int, K: int, M: int) -> list[dict]:
    """Configurations without `tasks` and `grid`, for more than 16 tokens."""
    found = []
    for BM, P, S, permute in WGMMA:
        # on small matrices more tiles of few tokens keep more multiprocessors busy
        if M / 4 <= BM < 2 * max(M, 17) and (BM > 16) and (BM == 128 or BM >= M or N * K < 2**27):
            found.append({"kernel": "wgmma", "BM": BM, "P": P, "S": S, "permute": permute})
    for BM, P, S, X in WIDE:
        if math.ceil(M / BM) * BM <= WASTE * M:
            found.append({"kernel": "wide", "BM": BM, "P": P, "S": S, "X": X})
    return found + [config | {"natural": True} for config in found if can_be_natural(config)]


def layouts_fp8(M: int) -> list[dict]:
    """The same for W4A8 and any number of tokens."""
    found = []
    for BM, P, S, X in FP8:
        little_waste = math.ceil(M / BM) * BM <= WASTE * M
        if min(M / 4, 128) <= BM and (little_waste or min(2 * max(M, 16), 129) > BM):
            found.append({"kernel": "wide" if X else "wgmma", "BM": BM, "P": P, "S": S, "X": X, "fp8": True})
    return found


def beside(config: dict, M: int) -> bool:
    """Whether x A^T is computed beside the product of a configuration of `wgmma` or `wide`, with M tokens."""
    return config.get("tasks", M <= 128)


def can_be_natural(config: dict) -> bool:
    """Whether a configuration may leave x as it is, instead of putting it in order in a launch of its own."""
    tile = config["kernel"] in ("wgmma", "wide") and not config.get("fp8")
    return tile and (config["BM"], config["P"]) in NATURAL


def candidates(N: int, K: int, M: int, sms: int, fp8: bool = False) -> list[dict]:
    """Everything worth a thought for M tokens (more than 16 unless `fp8`) and an adapter, be there a price for it or not."""
    found = []
    for config in [] if not fits(N, K) else layouts_fp8(M) if fp8 else layouts(N, K, M):
        tiles = math.ceil(N / (64 * config["P"])) * math.ceil(M / config["BM"])
        # x A^T beside the product, or before it; beside the widest tiles of W4A8 it has too few registers
        beside_it = (M <= 512 or N * K < 2**25) and not (fp8 and config["BM"] > 208)
        tasks = [True] * beside_it + [False] * (M > 64 and config["BM"] > 64)
        found += [config | {"tasks": t, "grid": g} for t in tasks for g in grids(tiles, units_along(K), sms)]
    if not found or (256 if fp8 else 63) < M:
        found.append({"kernel": "dense"} | ({"fp8": True} if fp8 else {}))
    return found


def variant(config: dict, M: int = 0) -> str:
    """The name under which factors are kept: what is compiled, and where x A^T is computed."""
    if config["kernel"] in ("wgmma", "wide"):
        config = {name: value for name, value in config.items() if name != "natural" or value}
        config = config | {"tasks": beside(config, M)}
        names = ("BM", "P", "S", "X", "permute", "natural", "fp8", "tasks")
        return " ".join([config["kernel"], *(f"{n}={config[n]:d}" for n in names if n in config)])
    return config["kernel"] + (" fp8=1" if config.get("fp8") else "")


def terms(config: dict, N: int, K: int, M: int, sms: int, rows: int) -> dict[str, float]:
    """What a product pays for; `rows` of the stacked A's."""
    if config["kernel"] in ("wgmma", "wide"):
        BM, P, steps = config["BM"], config["P"], units_along(K)
        along, across = math.ceil(N / (64 * P)), math.ceil(M / BM)
        tiles = along * across
        grid = min(config["grid"], tiles * steps)
        whole = tiles // grid - (1 if tiles % grid and tiles > grid else 0)
        rest = math.ceil((tiles - whole * grid) * steps / grid)  # units of the tiles that are cut
        rounds = 0.0
        if beside(config, M):
            blocks, slices = adapter_tasks(K, M, sms, rows)
            programs = grid + helping(grid, blocks * slices, sms)
            rounds = math.ceil(blocks * slices / programs) * K / slices * 1e-3
        return {
            "launch": 1.0,
            "units": whole * steps + rest,  # 256 columns of a tile
            "units of tokens that are not": along * steps * (across - M / BM) / grid,
            "tiles": math.ceil(tiles / grid),
            "pieces": whole + (math.ceil((rest - 1) / steps) + 1 if tiles % grid else 0),  # of tiles, in a program
            "split": float(tiles % grid != 0),
            "shares": max(0, math.ceil(grid / tiles) - 1),  # of a tile, which one program adds up
            "MB of weights": N * K * 0.5625e-6,
            "MB of x": M * K * 2e-6,
            "MB of y": M * N * 2e-6,
            "MFLOP of x A^T": M * K * rows * 1e-6,
            "rounds of x A^T": rounds,  # thousands of columns, one task after the other
        }
    rounds = math.ceil(math.ceil(M / 128) * math.ceil(N / 256) / sms)
    return {
        "launch": 1.0,
        "weights": N * K * 1e-6,
        "rounds": rounds * K * 1e-3,
        "GFLOP": M * N * K * 1e-9,
        "MB of x": M * K * 2e-6,
        "MB of y": M * N * 2e-6,
        "MFLOP of x A^T": M * K * rows * 1e-6,
    }


@functools.cache
def shipped() -> dict:
    """What was fitted and measured: "factors", "device", "multiprocessors", "entries" (see measured.py)."""
    return json.loads(FACTORS.read_text())


def factors() -> dict[str, dict[str, float]]:
    """variant -> term -> microseconds, and `TOKENS` -> up to how many it was measured."""
    return shipped()["factors"]


def predicted_us(config: dict, N: int, K: int, M: int, sms: int, rows: int, model: dict) -> float:
    """Microseconds of a product with an adapter; infinity for a variant that was never measured, or not with so many tokens."""
    own = model.get(variant(config, M))
    if own is None or own.get(TOKENS, M) < M:
        return math.inf
    return sum(own.get(name, 0.0) * value for name, value in terms(config, N, K, M, sms, rows).items())


def cheapest(N: int, K: int, M: int, sms: int, rows: int, model: dict | None = None, fp8: bool = False) -> dict | None:
    """The candidate that should take least; None where nothing is known about any. `rows` of the stacked A's (0: no adapter).

    The answer changes at `SIZES` only (with `fp8` at 16 too), so that what must be compiled ahead is known.
    """
    M = size_of(M, fp8)
    found = priced(N, K, M, sms, rows, model, fp8) if M else []
    return found[0][1] if found else None


def priced(
    N: int, K: int, M: int, sms: int, rows: int, model: dict | None = None, fp8: bool = False
) -> list[tuple[float, dict]]:
    """(microseconds predicted, candidate) of those about which something is known, the cheapest first; `rows` as above."""
    if not fits(N, K):
        return []
    model = factors() if model is None else model
    some = candidates(N, K, M, sms, fp8)
    found = [(predicted_us(c, N, K, M, sms, rows or WITHOUT_ADAPTER, model), c) for c in some]
    # stable: the first of equals stays first
    return sorted((f for f in found if math.isfinite(f[0])), key=lambda f: f[0])
