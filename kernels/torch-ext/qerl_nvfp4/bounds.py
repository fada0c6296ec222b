"""What bounds a product of 17 and more tokens on Ampere, Ada and GeForce Blackwell: arithmetic, not measurements.

Nobody has measured these kernels on such a card.  `mma_us` and `dense_us` count what a launch must move and issue (`mma_bounds`), divide by
what a card can do (`CARDS`, NVIDIA's figures), and take the largest as if everything else were hidden behind it; `OURS`, `LIBRARY` and
`STREAM` are what is usually reached of that.  select.py takes the mma kernel where it comes out cheaper than dequantize + cuBLAS.  `qerl-trl tune`
replaces it by measurements.
"""

import math
from typing import NamedTuple


class Card(NamedTuple):
    """What a device's name contains, and what it can do."""

    name: str
    capability: tuple[int, int]
    sms: int
    ghz: float
    gb_s: float
    macs: int  # bfloat16 multiply-adds with float32 sums, per clock and multiprocessor (GeForce: half of what Ada's workstation cards do)
    shared_kib: int  # of a multiprocessor


CARDS = (
    Card("A100", (8, 0), 108, 1.41, 2039, 1024, 164),
    Card("GeForce RTX 3090", (8, 6), 82, 1.695, 936, 256, 100),
    Card("GeForce RTX 4090", (8, 9), 128, 2.52, 1008, 256, 100),
    Card("L40S", (8, 9), 142, 2.52, 864, 512, 100),
    Card("GeForce RTX 5090", (12, 0), 170, 2.407, 1792, 256, 100),
)
#: per warp and 128 columns of its rows, counted in the machine code of sm_80, 86, 89 and 120, the most of them (tests/test_kernels_mma.py)
#: BM, R -> matrix instructions, on the integer pipe, on the multiply pipe, all of them
ISSUED = {
    (32, 1): (32, 158, 102, 332),
    (32, 2): (64, 244, 184, 539),
    (64, 1): (64, 229, 110, 460),
    (64, 2): (128, 317, 194, 725),
    (128, 2): (128, 317, 194, 725),
}
#: per thread, what the compiler is given: it spills nothing, and three or four programs of 32 tokens, three or two of 64 fit a multiprocessor
REGISTERS = {(32, 1): 128, (32, 2): 168, (64, 1): 168, (64, 2): 255, (128, 2): 255}
#: shares of a bound that are usually reached: by the mma and the portable kernel, by cuBLAS of the matrix units, of the memory by a stream
OURS, PORTABLE, LIBRARY, STREAM = 0.7, 0.6, 0.85, 0.85
L2_BYTES = 32  # per clock and multiprocessor
LAUNCH_US, START_US = 2.0, 1.5  # a launch in a CUDA graph without overlap; the first bytes of a program


def card_of(name: str, capability: tuple[int, int], sms: int) -> Card | None:
    """The card by its name, else one of its architecture, with its own multiprocessors; None: an architecture that is not listed."""
    alike = [card for card in CARDS if card.capability == capability]
    known = [card for card in alike if card.name in name]
    family = [card for card in alike if ("GeForce" in card.name) == ("GeForce" in name)]
    found = next(iter(known or family or alike), None)
    return found and found._replace(sms=sms)


def warps(BM: int) -> tuple[int, int]:
    """Of a program of the mma kernel, along the rows and along the tokens."""
    return 4, 2 if BM == 128 else 1


def stages(BM: int, shared_memory: int) -> int:
    """Stages of x that fit, up to four; less than two: none does."""
    return min(4 if BM == 32 else 3, shared_memory // (BM * 256))


def registers(BM: int, R: int, rank: int) -> int:
    """Per thread, for the compiler: adding an adapter of a large rank wants more."""
    return REGISTERS[BM, R] if rank <= 64 else 255


def resident(card: Card, BM: int, R: int, NS: int) -> int:
    """Programs that a multiprocessor holds at a time."""
    threads = 32 * math.prod(warps(BM))
    return max(
        1,
        min(card.shared_kib * 1024 // (NS * BM * 256 + 1024), 65536 // (threads * 8 * math.ceil(REGISTERS[BM, R] / 8))),
    )


def mma_bounds(card: Card, config: dict, N: int, K: int, M: int) -> dict[str, float]:
    """Microseconds that each resource is busy, at the least: memory, and on the busiest multiprocessor matrix units, integer pipe, multiply
    pipe, instruction issue, shared memory, the way from the second-level cache."""
    BM, R, SK = config["BM"], config["R"], config["SK"]
    tiles = math.ceil(M / BM) * math.ceil(N / (64 * R))
    along_rows, along_tokens = warps(BM)
    matrix, integer, multiply, issued = ISSUED[BM, R]
    units = math.ceil(tiles * SK / card.sms) * math.ceil(
        K / 128 / SK
    )  # 128 columns of a tile, on the busiest multiprocessor
    cycles_per_us = card.ghz * 1e3
    per_scheduler = units * along_rows * along_tokens / 4 / cycles_per_us
    parked = 8 * M * N * SK * (SK > 1)  # float32, written and read
    return {
        "memory": (N * K * 0.5625 + 2 * M * K + 2 * M * N + parked) / (card.gb_s * 1e3),
        "matrix units": per_scheduler * matrix * 2048 / (card.macs / 4),
        "integers": per_scheduler * integer * 2,  # 16 lanes per scheduler
        "multiplies": per_scheduler * multiply * 2,
        "issue": per_scheduler * issued,
        "shared memory": units * (BM * 256 * (1 + along_rows)) / 128 / cycles_per_us,
        "second-level cache": units * (64 * R * 72 + BM * 256) / L2_BYTES / cycles_per_us,
    }


def mma_us(card: Card, config: dict, N: int, K: int, M: int) -> float:
    """What the mma kernel should take."""
    tiles = math.ceil(M / config["BM"]) * math.ceil(N / (64 * config["R"]))
    rounds = math.ceil(tiles * config["SK"] / (card.sms * resident(card, config["BM"], config["R"], config["NS"])))
    return LAUNCH_US + START_US * rounds + max(mma_bounds(card, config, N, K, M).values()) / OURS


def bf16_us(card: Card, N: int, K: int, M: int) -> float:
    """What cuBLAS should take with a bfloat16 weight."""
    bytes_us = 2 * (N * K + M * K + M * N) / (card.gb_s * 1e3) / STREAM
    return LAUNCH_US + max(bytes_us, M * N * K / (card.sms * card.macs * card.ghz * 1e3) / LIBRARY)


def dense_us(card: Card, N: int, K: int, M: int) -> float:
    """What dequantizing and cuBLAS should take."""
    return LAUNCH_US + 2.5625 * N * K / (card.gb_s * 1e3) / STREAM + bf16_us(card, N, K, M)


def fp8_us(card: Card, N: int, K: int, M: int) -> tuple[float, float]:
    """What W4A8 should take by the portable kernel, and by decoding to e4m3 and cuBLAS; quantizing x is a launch of both."""
    byte, row = 1 / (card.gb_s * 1e3), N * K / (2 * card.sms * card.macs * card.ghz * 1e3)
    tokens = next((BM for BM in (16, 32) if M <= BM), math.ceil(M / 64) * 64)
    moved = (4 * M * K + 2 * M * N) * byte
    portable = 2 * LAUNCH_US + START_US + max(N * K * 0.5625 * byte + moved, tokens * row) / PORTABLE
    multiply = max((N * K * byte + moved) / STREAM, M * row / LIBRARY)
    return portable, 3 * LAUNCH_US + 1.5625 * N * K * byte / STREAM + multiply


def even_splits(steps: int, wanted: int) -> tuple[int, int]:
    """(steps along K of each split, splits): at most as many as `wanted`, and none of them empty."""
    each = math.ceil(steps / wanted)
    return each, math.ceil(steps / each)


def mma_candidates(N: int, K: int, M: int, sms: int, shared_memory: int) -> list[dict]:
    """Configurations of the mma kernel, K cut into at most eight slices."""
    found = []
    steps = K // 128
    for BM, R in ISSUED:
        NS = stages(BM, shared_memory)
        if NS < 2 or (BM > 32 and M <= BM // 2):
            continue
        tiles = math.ceil(M / BM) * math.ceil(N / (64 * R))
        slices = {even_splits(steps, SK)[1] for SK in range(1, min(8, steps) + 1)}
        found += [
            {"kernel": "mma", "BM": BM, "R": R, "NS": NS, "SK": SK}
            for SK in sorted(slices)
            if SK == 1 or tiles * (SK - 1) < 3 * sms
        ]
    return found


def priced(card: Card, N: int, K: int, M: int, shared_memory: int) -> list[tuple[float, dict]]:
    """(microseconds that it should take, configuration), the cheapest first, the dense path among them; empty where the mma kernel cannot
    be used. `shared_memory`: bytes that a block may have."""
    if K % 128:
        return []
    found = [(mma_us(card, c, N, K, M), c) for c in mma_candidates(N, K, M, card.sms, shared_memory)]
    found.append((dense_us(card, N, K, M), {"kernel": "dense"}))
    return sorted(found, key=lambda f: f[0])
