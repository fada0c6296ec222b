"""The Gluon kernels without a GPU: their source and inline assembly in an emulator, launched by launch.py itself.

`planted.py` lists the defects that these tests find.
"""

import ast
import inspect
import itertools
import os
import random

import gluon_emulator
import numpy as np
import ptx_emulator as ptx
import pytest
import torch
from nvfp4_cases import Problem, leftovers

from qerl_nvfp4 import elementwise, launch, reference

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
source = gluon_emulator.source()


def run(config, M, N, K, rank=0, splits=None, times=2, **more) -> None:
    """Each time events come in another order."""
    aligned = config["kernel"] in ("wgmma", "wide")
    Problem(M, N, K, rank, splits, seed=M * N + K, aligned=aligned, **more).check(config, times)


# --- decoding -------------------------------------------------------------------------------------


CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BYTES, SCALES = (a.reshape(-1).astype(np.uint64) for a in np.meshgrid(np.arange(256), np.arange(127)))


def scale_values(bytes_: np.ndarray) -> np.ndarray:
    return torch.from_numpy(bytes_.astype(np.uint8)).view(torch.float8_e4m3fn).double().numpy()


def scale_bits(bytes_: np.ndarray, factor: float = 2.0**118) -> np.ndarray:
    return ptx.bfloat16_bits(scale_values(bytes_) * factor).astype(np.uint64)


def pair(bits) -> tuple[np.ndarray, np.ndarray]:
    return tuple(ptx.bfloat16_value(((bits >> np.uint64(s)) & np.uint64(0xFFFF)).astype(np.uint16)) for s in (0, 16))


def check_pair(found, word, places, scale) -> None:
    """Two bfloat16 are the codes at these places of a word times the scale."""
    for part, n in zip(pair(found), places, strict=True):
        code = (word >> np.uint64(4 * n)) & np.uint64(15)
        value = CODES[code & np.uint64(7)] * np.where(code & np.uint64(8), -1.0, 1.0)
        assert (part == value * scale_values(scale) * 2.0**-8).all()


def test_every_scale_byte_is_decoded():
    bytes_ = np.arange(127, dtype=np.uint64)
    other = bytes_[::-1]
    hopper = source["hopper"]
    for name, factor in (("FOR_VALUES", 2.0**-8), ("FOR_BITS", 2.0**118)):
        expected = scale_values(bytes_) * factor
        lo, hi = ptx.run(hopper["scales_asm"](hopper[name]), 2, [bytes_ | other << np.uint64(8)])
        assert (ptx.bfloat16_value(lo.astype(np.uint16)) == expected).all()
        assert (ptx.bfloat16_value(hi.astype(np.uint16)) == expected[::-1]).all()
    tree = ast.parse((source.folder / "portable.py").read_text())
    (function,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "decode_scale"]
    (asm,) = [k.value for n in ast.walk(function) if isinstance(n, ast.Call) for k in n.keywords if k.arg == "asm"]
    word = bytes_ | other << np.uint64(8) | bytes_ << np.uint64(16) | other << np.uint64(24)
    for bits in ptx.run(ast.literal_eval(asm), 2, [word]):
        lo, hi = pair(bits)
        assert (lo == expected).all() and (hi == expected[::-1]).all()


def test_every_pair_of_codes_times_every_scale_is_exact():
    """All eight codes of a word, all bytes and all scales; by the bits, and by Blackwell's conversion."""
    word = sum((BYTES + np.uint64(37 * i) & np.uint64(255)) << np.uint64(8 * i) for i in range(4))
    for name, factor, step, apart in (("DECODE_WORD", 2.0**118, 1, 4), ("CONVERT_WORD", 2.0**-8, 2, 1)):
        for i, found in enumerate(ptx.run(source["hopper"][name], 4, [word, scale_bits(SCALES, factor)])):
            check_pair(found, word, (step * i, step * i + apart), SCALES)


def test_every_pair_of_codes_in_place_times_every_scale_is_exact():
    """The two codes of a byte, for each of a word's four and all scales; nothing of the word's other bytes gets in."""
    words = [
        sum((BYTES * np.uint64(i + 3) + np.uint64(37 * n + i) & np.uint64(255)) << np.uint64(8 * n) for n in range(4))
        for i in range(4)
    ]
    scales = [SCALES, (SCALES + np.uint64(5)) % np.uint64(127)]
    for lane in range(4):
        inputs = [*words, np.full_like(BYTES, 0x4440 + lane), *map(scale_bits, scales)]
        for i, found in enumerate(ptx.run(source["hopper_decode"]["DECODE_BYTES"], 4, inputs)):
            check_pair(found, words[i], (2 * lane, 2 * lane + 1), scales[i // 2])


def test_every_pair_of_codes_times_every_scale_is_the_nearest_e4m3():
    """By Hopper's kernel and by Triton's: codes of a word and two scales."""
    other = (SCALES + np.uint64(5)) % np.uint64(127)
    tables = ptx.run(source["hopper_decode"]["TABLES"], 4, [SCALES | other << np.uint64(8)])
    word = sum((BYTES + np.uint64(37 * i) & np.uint64(255)) << np.uint64(8 * i) for i in range(4))
    codes = [word >> np.uint64(4 * i) & np.uint64(15) for i in range(8)]
    for scale, low, high in ((SCALES, *tables[:2]), (other, *tables[2:])):
        values = [CODES[c & np.uint64(7)] * np.where(c & np.uint64(8), -1.0, 1.0) * scale_values(scale) for c in codes]
        expected = [sum(ptx.e4m3_bits(values[i + j] / 8) << np.uint64(8 * j) for j in range(4)) for i in (0, 4)]
        assert np.array_equal(ptx.run(source["hopper_decode"]["DECODE_E4M3"], 2, [word, low, high]), expected)
        assert np.array_equal(ptx.run(source["portable"]["DECODE_BLOCK"], 4, [word, word, scale]), expected * 2)


def test_quantize_to_rtn_is_bit_equal():
    """Weights of every size, ties of the grid, and divisors that are powers of two and others."""
    torch.manual_seed(0)
    N, K = 24, 64
    kernel = source.kernel("quantize_rtn_kernel")
    parameters = list(inspect.signature(kernel).parameters)
    assert parameters == list(inspect.signature(elementwise.quantize_rtn_kernel.fn).parameters)
    for gs, per_row in ((torch.tensor([64.0]), False), (torch.tensor([37.5]), False), (torch.rand(N) * 300 + 1, True)):
        x = torch.randn(N, K) * torch.exp2(torch.randint(-9, 4, (N, 1)).float())
        x[::3] = torch.randint(-28, 28, (N // 3, K)) * 0.25  # ties
        x[5] = 0
        x = x.bfloat16()
        packed, scales = torch.empty(N, K // 2, dtype=torch.uint8), torch.empty(N, K // 16, dtype=torch.uint8)
        blocks = N * K // 16
        values = (x.view(torch.int32), packed.view(torch.int32), scales, gs, blocks, K // 16, per_row, 32)
        arguments = dict(zip(parameters, values, strict=True))
        gluon_emulator.machine.launch(kernel, (-(-blocks // 32),), arguments, 0, 10**6, [])
        expected = reference.quantize(x, "rtn", gs)
        assert torch.equal(packed, expected[0]) and torch.equal(scales, expected[1])


# --- the kernels ----------------------------------------------------------------------------------

SKINNY = {"kernel": "skinny", "BM": 8, "WK": 2, "WN": 1, "R": 2, "grid": 5}
WIDE = {"kernel": "wide", "BM": 48, "P": 2, "S": 2, "X": 3, "grid": 2}
MMA = {"kernel": "mma", "BM": 32, "R": 2, "NS": 3, "SK": 1}


def wgmma(BM, P, S, permute, grid, **more) -> dict:
    return {"kernel": "wgmma", "BM": BM, "P": P, "S": S, "permute": permute, "grid": grid, **more}


@pytest.mark.parametrize(
    "config,M,N,K,rank,splits",
    [
        (SKINNY, 3, 96, 768, 0, None),
        (SKINNY | {"R": 1, "grid": 7, "WK": 1}, 8, 64, 512, 16, (32, 16, 16)),
        (SKINNY | {"R": 1, "WK": 1, "BM": 8, "grid": 200}, 2, 768, 256, 0, None),
        (SKINNY | {"late": True, "BM": 16, "R": 4, "WK": 1, "grid": 3}, 11, 128, 512, 36, None),
    ],
    ids=["base", "adapter", "many", "late"],
)
def test_skinny(emulated, config, M, N, K, rank, splits):
    run(config, M, N, K, rank, splits, per_row=rank == 0, times=3)
    assert set(emulated["launches"]) == {"skinny_kernel"}


@pytest.mark.parametrize(
    "config,M,N,K,rank,splits",
    [
        (wgmma(16, 2, 3, True, 4), 13, 256, 1536, 0, None),
        (wgmma(16, 3, 3, True, 3), 16, 400, 768, 32, (64, 192, 144)),
        (wgmma(32, 2, 2, False, 4), 37, 128, 1024, 32, None),
        (wgmma(16, 2, 2, False, 2), 33, 128, 512, 0, None),
        (wgmma(16, 2, 3, True, 3, tasks=False), 20, 192, 512, 40, None),
        (WIDE, 53, 128, 768, 32, (64, 64)),
        (WIDE, 53, 192, 768, 0, None),
        (WIDE | {"BM": 112}, 150, 320, 768, 32, (128, 128, 64)),
        (wgmma(32, 2, 2, False, 3, natural=True), 37, 192, 1024, 32, (64, 128)),
        (wgmma(16, 2, 3, False, 3, natural=True), 21, 192, 768, 0, None),
        (WIDE | {"natural": True}, 53, 192, 768, 32, None),
    ],
    ids="split adapter halves whole cublas wide wide-two-tiles three-parts natural-halves natural natural-wide".split(),
)
def test_wgmma(emulated, config, M, N, K, rank, splits):
    """Fewer programs resident than there are: nobody may wait for one that has not started."""
    emulated["resident"] = 2
    run(config, M, N, K, rank, splits, per_row=rank == 0)
    permutes = set() if config.get("permute") or config.get("natural") else {"permute_kernel"}
    assert set(emulated["launches"]) == {"wgmma_kernel"} | permutes


def fp8(BM, P, S, X, grid, **more) -> dict:
    return {"kernel": "wide" if X else "wgmma", "BM": BM, "P": P, "S": S, "X": X, "grid": grid, "fp8": True, **more}


@pytest.mark.parametrize(
    "config,M,N,K,rank,splits",
    [
        (fp8(32, 2, 2, 0, 4), 37, 128, 1024, 0, None),
        (fp8(16, 2, 3, 0, 4), 33, 256, 1536, 32, (64, 192)),
        (fp8(32, 3, 3, 0, 3), 70, 400, 768, 32, (64, 192, 144)),
        (fp8(16, 2, 2, 0, 5, tasks=False), 33, 208, 896, 16, None),
        (fp8(48, 2, 2, 3, 2), 100, 192, 1056, 32, (64, 128)),
        (fp8(96, 3, 2, 3, 2, tasks=False), 100, 192, 1312, 0, None),
        (fp8(128, 3, 3, 0, 2), 100, 320, 512, 32, (128, 128, 64)),
    ],
    ids="halves adapter three cublas wide wide-three a-hundred".split(),
)
def test_w4a8(emulated, config, M, N, K, rank, splits):
    emulated["resident"] = 2
    run(config, M, N, K, rank, splits, per_row=rank == 0, stride=K % 3)
    problem = Problem(M, N, K, rank, splits, aligned=True)
    expected = problem.by(config)
    problem.x, *x8 = reference.wide_parts(reference.widened(problem.x), K)
    assert torch.equal(problem.by(config, x8=x8), expected) and emulated["launches"][-2:] == ["wgmma_kernel"] * 2


def skinny_case(rng: random.Random) -> tuple[dict, int, int, int, int, int]:
    """Configuration, tokens, rows, columns, rows of a tile, and a divisor of the rank."""
    WK, R = rng.choice((1, 2, 4)), rng.choice((1, 2, 4))
    BM, grid = rng.choice((8, 16)), rng.randint(1, 12)
    config = SKINNY | {"BM": BM, "WK": WK, "R": R, "late": rng.random() < 0.5, "grid": grid}
    return config, rng.randint(1, BM), 16 * R * rng.randint(1, 8), 128 * WK * rng.randint(1, 5), 16 * R, 4


def wgmma_case(rng: random.Random) -> tuple[dict, int, int, int, int, int]:
    BM, P, S, permute = rng.choice(((16, 2, 3, True), (16, 3, 3, True), (32, 2, 2, False), (16, 2, 2, False)))
    config = wgmma(BM, P, S, permute, rng.randint(1, 6), tasks=rng.random() < 0.7)
    if not permute:
        config["natural"] = rng.random() < 0.5
    return config, rng.randint(1, 2 * BM), 16 * rng.randint(4, 20), 32 * rng.randint(8, 40), 64, 8


def wide_case(rng: random.Random) -> tuple[dict, int, int, int, int, int]:
    """More units for each program than a ring has stages, else the emulator reports a barrier without a waiter."""
    config = WIDE | {"BM": rng.choice((16, 48, 80)), "grid": rng.randint(1, 2)}
    config |= {"tasks": rng.random() < 0.5, "natural": rng.random() < 0.5}
    return config, rng.randint(1, 2 * config["BM"]), 16 * rng.randint(12, 20), 32 * rng.randint(24, 40), 64, 8


def mma_case(rng: random.Random) -> tuple[dict, int, int, int, int, int]:
    BM, R = rng.choice(((32, 1), (32, 2), (64, 1)))
    steps = rng.randint(1, 6)
    config = MMA | {"BM": BM, "R": R, "NS": rng.randint(2, 3), "SK": rng.randint(1, min(3, steps))}
    return config, rng.randint(1, 2 * BM), rng.randint(65, 260), 128 * steps, 64, 1


@pytest.mark.parametrize(
    "case,converts",
    [(skinny_case, False), (skinny_case, True), (wgmma_case, False), (wide_case, False), (mma_case, False)],
    ids=["skinny", "conversion", "wgmma", "wide", "mma"],
)
def test_random_shapes_shards_and_ranks(emulated, monkeypatch, case, converts):
    """On a GPU there are 500 of each family, of one rank (gpu_mixed.py)."""
    monkeypatch.setattr(launch, "converts_fp4", lambda capability: converts)
    seed = torch.seed() % 2**31
    rng = random.Random(seed)
    for number in range(int(os.environ.get("QERL_CASES", "3"))):
        config, M, N, K, step, multiple = case(rng)
        rank = multiple * rng.randint(1, 72 // multiple) if rng.random() < 0.8 else 0
        edges = sorted(rng.sample(range(step, N, step), min(rng.randrange(3), len(range(step, N, step)))))
        splits = tuple(b - a for a, b in itertools.pairwise((0, *edges, N)))
        emulated["resident"] = 10**6 if config["kernel"] == "skinny" else rng.choice((2, 10**6))
        more = {"bias": rng.random() < 0.5, "per_row": rng.random() < 0.3}
        try:
            run(config, M, N, K, rank, splits if rank else None, **more)
        except Exception as error:
            case = f"seed {seed}, case {number}: M={M} N={N} K={K} rank={rank} splits={splits} {config}"
            raise AssertionError(case) from error


@pytest.mark.parametrize("K,stride", [(288, 8), (896, 3), (960, 0)])
@pytest.mark.parametrize(
    "config,M,rank",
    [
        (wgmma(16, 2, 3, True, 3), 19, 32),
        (wgmma(32, 2, 2, False, 2, slices=2), 21, 16),
        (wgmma(16, 2, 2, False, 5, tasks=False), 33, 16),
        (wgmma(32, 3, 3, True, 1, tasks=False), 21, 0),
        (WIDE | {"grid": 3}, 53, 32),
        (WIDE | {"BM": 16, "S": 3, "X": 5, "tasks": False}, 17, 16),
        (wgmma(32, 2, 2, False, 2, natural=True), 21, 16),
        (WIDE | {"grid": 3, "natural": True}, 53, 0),
    ],
    ids=["permute", "halves", "halves-cublas", "whole", "wide", "wide-cublas", "natural", "natural-wide"],
)
def test_wgmma_where_the_last_step_is_a_part_of_one(emulated, config, M, rank, K, stride):
    """K no multiple of 256; rows of x followed by NaN, or that the copy engine cannot read: an odd stride."""
    emulated["resident"] = 2
    run(config, M, 208, K, rank, stride=stride)


@pytest.mark.parametrize(
    "M,N,K,rank,splits,more",
    [
        (19, 70, 384, 0, None, {"R": 1}),
        (40, 192, 640, 40, (64, 64, 64), {"SK": 3}),
        (130, 128, 256, 16, None, {"BM": 128, "NS": 2}),
        (65, 200, 128, 32, (128, 72), {"BM": 64, "R": 1, "NS": 4}),
    ],
    ids=["odd", "split", "two-halves", "one-step"],
)
def test_mma(emulated, M, N, K, rank, splits, more):
    run(MMA | more, M, N, K, rank, splits, per_row=rank == 0, stride=M % 2)
    assert set(emulated["launches"]) == {"mma_kernel"}


@pytest.mark.parametrize(
    "config,K",
    [
        (SKINNY, 512),
        (wgmma(16, 2, 3, True, 3), 544),
        (wgmma(16, 2, 2, False, 2), 480),
        (wgmma(16, 2, 2, False, 2, natural=True), 480),
        (MMA | {"SK": 2}, 512),
    ],
    ids=["skinny", "wgmma-544", "wgmma-480", "natural-480", "mma"],
)
def test_nan_in_one_token_touches_no_other(emulated, config, K):
    """An engine's batch is padded with rows of anything."""
    problem, others, outs = Problem(6, 128, K, 16, aligned=True), [0, 1, 3, 4, 5], []
    for value in (1.0, float("nan"), float("inf")):
        problem.x[2] = value
        outs.append(problem.by(config))
        assert not leftovers()
    assert all(torch.equal(out[others], outs[0][others]) for out in outs[1:])
    assert outs[1][2].isnan().all()
