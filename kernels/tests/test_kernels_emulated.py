"""The Hopper kernels without a GPU: their source and their inline assembly in an emulator, launched by launch.py
itself.

`planted.py` says which defects these tests find.
"""

import ast
import inspect
import itertools
import os
import random
from pathlib import Path

import gluon_emulator
import numpy as np
import ptx_emulator as ptx
import pytest
import torch
from nvfp4_cases import in_aligned_rows, leftovers, random_weight, relative_error

import qerl_nvfp4
from qerl_nvfp4 import launch, reference

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
FOLDER = Path(qerl_nvfp4.__file__).parent
source = gluon_emulator.Source(FOLDER)
SMS = 5


@pytest.fixture
def emulated(monkeypatch):
    """launch.launch on CPU tensors, in the emulator; the answer holds how many launches there were of each kernel."""
    monkeypatch.setattr(launch, "device_properties", lambda index: ("a Hopper", SMS, (9, 0)))
    monkeypatch.setattr(launch, "_scratch", {})
    monkeypatch.setattr(launch, "_captured", [])
    state = {"seed": 0, "resident": 10**6, "launches": []}

    def launcher(kernel, *grid):
        def start(*args, **kwargs):
            parameters = inspect.signature(kernel.fn).parameters
            options = {k: kwargs.pop(k) for k in [*kwargs] if k not in parameters}
            arguments = inspect.signature(kernel.fn).bind(*args, **kwargs).arguments
            assert set(arguments) == set(parameters), "an argument is missing, or has no parameter"
            assert options.get("launch_pdl", False) == arguments.get("PDL", False)
            name, later = kernel.fn.__name__, []
            arguments |= {"INTERP": False} if "INTERP" in arguments else {}
            fn = source.kernel(name)
            assert list(inspect.signature(fn).parameters) == list(parameters)
            if (
                name == "skinny_kernel"
            ):  # a program waits for later ones, so registers and warps must do for all of them
                programs, threads = -(-grid[0] // SMS), options["num_warps"] * 32
                assert (
                    programs <= 16
                    and programs * threads <= 48 * 32
                    and programs * threads * options["maxnreg"] <= 65536
                )
            if options.get("launch_pdl"):
                later = [t for t in (arguments["x_ptr"], *launch._scratch.values()) if t.is_contiguous()]
            gluon_emulator.machine.launch(fn, grid, arguments, state["seed"], state["resident"], later)
            state["launches"].append(name)
            state["seed"] += 1

        return start

    monkeypatch.setattr(launch, "launcher", launcher)
    return state


def run(state, config, M, N, K, rank=0, splits=None, bias=True, per_row=False, times=2, stride=0) -> None:
    packed, scale, gs = random_weight(N, K, 7, per_row=per_row)
    scale = in_aligned_rows(scale) if config["kernel"] in ("wgmma", "wide") else scale
    torch.manual_seed(M * N + K)
    x = torch.randn(M, K + stride, dtype=torch.bfloat16)
    x[:, K:] = float("nan")
    x = x[:, :K]
    if not stride:
        x = x.contiguous()
    b_N = 30 * torch.randn(N, dtype=torch.bfloat16) if bias else None
    a = b = None
    if rank:
        a = (torch.randn(len(splits or (N,)) * rank, K) * 0.5).bfloat16()
        b = torch.randn(N, rank, dtype=torch.bfloat16)
    exact = reference.linear(x.double(), packed, scale, gs, None if b_N is None else b_N.double())
    if rank:
        exact += reference.lora(x.double(), a.double(), b.double(), splits)
    first = None
    for _ in range(times):  # by another lot each time
        out = torch.full((M, N), float("nan"), dtype=torch.bfloat16)
        launch.launch(config, x, packed, scale, gs, b_N, a, b, splits, out)
        assert relative_error(out, exact) < 4e-3
        first = out if first is None else first
        assert torch.equal(out, first), "results do not depend on timing"
        assert not leftovers()


# --- decoding -------------------------------------------------------------------------------------


def literal(file: str, function: str) -> str:
    """The inline assembly of a function that has one."""
    tree = ast.parse((FOLDER / f"{file}.py").read_text())
    (found,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function]
    (asm,) = [k.value for n in ast.walk(found) if isinstance(n, ast.Call) for k in n.keywords if k.arg == "asm"]
    return ast.literal_eval(asm)


CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def scale_values(bytes_: np.ndarray) -> np.ndarray:
    return torch.from_numpy(bytes_.astype(np.uint8)).view(torch.float8_e4m3fn).double().numpy()


def pair(bits) -> tuple[np.ndarray, np.ndarray]:
    return tuple(ptx.bfloat16_value(((bits >> np.uint64(s)) & np.uint64(0xFFFF)).astype(np.uint16)) for s in (0, 16))


def test_every_scale_byte_is_decoded():
    bytes_ = np.arange(127, dtype=np.uint64)
    other = bytes_[::-1]
    hopper = source["hopper"]
    for name, factor in (("FOR_VALUES", 2.0**-8), ("FOR_BITS", 2.0**118)):
        expected = scale_values(bytes_) * factor
        lo, hi = ptx.run(hopper["scales_asm"](hopper[name]), 2, [bytes_ | other << np.uint64(8)])
        assert (ptx.bfloat16_value(lo.astype(np.uint16)) == expected).all()
        assert (ptx.bfloat16_value(hi.astype(np.uint16)) == expected[::-1]).all()
    word = bytes_ | other << np.uint64(8) | bytes_ << np.uint64(16) | other << np.uint64(24)
    for bits in ptx.run(literal("portable", "decode_scale"), 2, [word]):
        lo, hi = pair(bits)
        assert (lo == expected).all() and (hi == expected[::-1]).all()


def test_every_pair_of_codes_times_every_scale_is_exact():
    """Sign, magnitude and place of all eight codes of a word, for all values of a byte and all scales; by the bits, and
    by Blackwell's conversion.
    """
    byte, scale = (a.reshape(-1).astype(np.uint64) for a in np.meshgrid(np.arange(256), np.arange(127)))
    word = sum((byte + np.uint64(37 * i) & np.uint64(255)) << np.uint64(8 * i) for i in range(4))
    for name, factor, places in (
        ("DECODE_WORD", 2.0**118, lambda i: (i, i + 4)),
        ("CONVERT_WORD", 2.0**-8, lambda i: (2 * i, 2 * i + 1)),
    ):
        bits = ptx.bfloat16_bits(scale_values(scale) * factor).astype(np.uint64)
        found = ptx.run(source["hopper"][name], 4, [word, bits])
        for i, p in enumerate(found):
            for part, n in zip(pair(p), places(i), strict=True):
                code = (word >> np.uint64(4 * n)) & np.uint64(15)
                value = CODES[code & np.uint64(7)] * np.where(code & np.uint64(8), -1.0, 1.0)
                assert (part == value * scale_values(scale) * 2.0**-8).all()


def test_every_pair_of_codes_in_place_times_every_scale_is_exact():
    """The two codes of a byte, for each of a word's four and all scales; nothing of the word's other bytes gets in."""
    byte, scale = (a.reshape(-1).astype(np.uint64) for a in np.meshgrid(np.arange(256), np.arange(127)))
    words = [
        sum((byte * np.uint64(i + 3) + np.uint64(37 * n + i) & np.uint64(255)) << np.uint64(8 * n) for n in range(4))
        for i in range(4)
    ]
    scales = [scale, (scale + np.uint64(5)) % np.uint64(127)]
    bits = [ptx.bfloat16_bits(scale_values(s) * 2.0**118).astype(np.uint64) for s in scales]
    for lane in range(4):
        selector = np.full_like(byte, 0x4440 + lane)
        found = ptx.run(source["hopper_wgmma"]["DECODE_BYTES"], 4, [*words, selector, *bits])
        for i, p in enumerate(found):
            for part, n in zip(pair(p), (2 * lane, 2 * lane + 1), strict=True):
                code = (words[i] >> np.uint64(4 * n)) & np.uint64(15)
                value = CODES[code & np.uint64(7)] * np.where(code & np.uint64(8), -1.0, 1.0)
                assert (part == value * scale_values(scales[i // 2]) * 2.0**-8).all()


def test_quantize_to_rtn_is_bit_equal():
    """Weights of every size, ties of the grid, and divisors that are powers of two and others."""
    from qerl_nvfp4 import elementwise

    torch.manual_seed(0)
    N, K = 24, 64
    fn, parameters = (
        source.kernel("quantize_rtn_kernel"),
        list(inspect.signature(source.kernel("quantize_rtn_kernel")).parameters),
    )
    assert parameters == list(inspect.signature(elementwise.quantize_rtn_kernel.fn).parameters)
    for gs, per_row in ((torch.tensor([64.0]), False), (torch.tensor([37.5]), False), (torch.rand(N) * 300 + 1, True)):
        x = torch.randn(N, K) * torch.exp2(torch.randint(-9, 4, (N, 1)).float())
        x[::3] = torch.randint(-28, 28, (N // 3, K)) * 0.25  # ties
        x[5] = 0
        x = x.bfloat16()
        packed, scales = torch.empty(N, K // 2, dtype=torch.uint8), torch.empty(N, K // 16, dtype=torch.uint8)
        blocks = N * K // 16
        arguments = (x.view(torch.int32), packed.view(torch.int32), scales, gs, blocks, K // 16, per_row, 32)
        gluon_emulator.machine.launch(
            fn, (-(-blocks // 32),), dict(zip(parameters, arguments, strict=True)), 0, 10**6, []
        )
        expected = reference.quantize(x, "rtn", gs)
        assert torch.equal(packed, expected[0]) and torch.equal(scales, expected[1])


# --- the kernels ----------------------------------------------------------------------------------

SKINNY = {"kernel": "skinny", "BM": 8, "WK": 2, "WN": 1, "R": 2, "grid": 5}


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
    run(emulated, config, M, N, K, rank, splits, per_row=rank == 0, times=3)
    assert set(emulated["launches"]) == {"skinny_kernel"}


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("rank", [0, 36])
def test_skinny_by_the_conversion_of_codes(emulated, monkeypatch, rank, late):
    """As on Blackwell, where pairs are neighbours."""
    monkeypatch.setattr(launch, "converts_fp4", lambda capability: True)
    config = SKINNY | {"BM": 16, "late": late}
    run(emulated, config, 11, 96, 768, rank, (64, 32) if rank else None, times=2)
    assert set(emulated["launches"]) == {"skinny_kernel"}


def test_who_converts(monkeypatch):
    """A GPU that has the instruction, and an assembler that knows it."""
    for version, capability, converts in (
        ("3.8.0", (10, 0), True),
        ("3.10.1", (12, 0), True),
        ("3.7.1", (10, 0), False),
        ("3.9.0", (9, 0), False),
    ):
        monkeypatch.setattr(launch.triton, "__version__", version)
        assert launch.converts_fp4.__wrapped__(capability) is converts


def wgmma(BM, P, S, permute, grid, **more) -> dict:
    return {"kernel": "wgmma", "BM": BM, "P": P, "S": S, "permute": permute, "grid": grid, **more}


@pytest.mark.parametrize(
    "config,M,N,K,rank,splits",
    [
        (wgmma(16, 2, 3, True, 4), 13, 256, 1536, 0, None),
        (wgmma(16, 3, 3, True, 3), 16, 400, 768, 32, (64, 192, 144)),
        (wgmma(32, 2, 2, False, 4), 37, 128, 1024, 32, None),
        (wgmma(16, 2, 2, False, 2), 33, 128, 512, 0, None),
        (wgmma(16, 2, 3, True, 3, tasks=False), 20, 192, 512, 40, None),
        ({"kernel": "wide", "BM": 48, "P": 2, "S": 2, "X": 3, "grid": 2}, 53, 128, 768, 32, (64, 64)),
        ({"kernel": "wide", "BM": 48, "P": 2, "S": 2, "X": 3, "grid": 2}, 53, 192, 768, 0, None),
        (wgmma(32, 2, 2, False, 3, natural=True), 37, 192, 1024, 32, (64, 128)),
        (wgmma(16, 2, 3, False, 3, natural=True), 21, 192, 768, 0, None),
        ({"kernel": "wide", "BM": 48, "P": 2, "S": 2, "X": 3, "grid": 2, "natural": True}, 53, 192, 768, 32, None),
    ],
    ids="split adapter halves whole cublas wide wide-two-tiles natural-halves natural natural-wide".split(),
)
def test_wgmma(emulated, config, M, N, K, rank, splits):
    """Fewer programs resident than there are: nobody may wait for one that has not started."""
    emulated["resident"] = 2
    run(emulated, config, M, N, K, rank, splits, per_row=rank == 0)
    beside = set() if config.get("permute") or config.get("natural") else {"permute_kernel"}
    assert set(emulated["launches"]) == {f"{config['kernel']}_kernel"} | beside


def skinny_case(rng: random.Random) -> tuple[dict, int, int, int, int, int]:
    """Configuration, tokens, rows, columns, rows of a tile, and what the rank is a multiple of."""
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
    """With more units for each program than a ring of words has stages: the emulator takes a barrier that nobody waits
    for to be one that nobody could.
    """
    BM = rng.choice((16, 48, 80))
    config = {
        "kernel": "wide",
        "BM": BM,
        "P": 2,
        "S": 2,
        "X": 3,
        "grid": rng.randint(1, 2),
        "tasks": rng.random() < 0.5,
        "natural": rng.random() < 0.5,
    }
    return config, rng.randint(1, 2 * BM), 16 * rng.randint(12, 20), 32 * rng.randint(24, 40), 64, 8


def mma_case(rng: random.Random) -> tuple[dict, int, int, int, int, int]:
    BM, R = rng.choice(((32, 1), (32, 2), (64, 1)))
    steps = rng.randint(1, 6)
    config = {"kernel": "mma", "BM": BM, "R": R, "NS": rng.randint(2, 3), "SK": rng.randint(1, min(3, steps))}
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
        what = f"seed {seed}, case {number}: M={M} N={N} K={K} rank={rank} splits={splits} {config}"
        try:
            run(
                emulated,
                config,
                M,
                N,
                K,
                rank,
                splits if rank else None,
                rng.random() < 0.5,
                rng.random() < 0.3,
                times=2,
            )
        except Exception as error:
            raise AssertionError(what) from error


@pytest.mark.parametrize(
    "BM,P,M",
    [
        (208, 2, 200), (224, 2, 230), (256, 2, 250), (144, 2, 280), (192, 3, 300), (176, 3, 170), (208, 3, 400),
        (272, 2, 264), (288, 2, 280),
    ],
)  # fmt: skip
def test_x_a_of_many_tokens(emulated, BM, P, M):
    """The widest tiles, and more than 256 tokens, of which each tile waits for a flag of its own where x A^T is
    computed beside.
    """
    from qerl_nvfp4 import cost

    S, X = cost.wide_stages(BM, P)
    config = {"kernel": "wide", "BM": BM, "P": P, "S": S, "X": X, "grid": 3}
    config["tasks"] = cost.can_be_beside(config)
    config["natural"] = P == 3 or BM > 256
    run(emulated, config, M, 320, 1280, 32, (128, 128, 64), times=1)
    assert set(emulated["launches"]) == {"wide_kernel"} | ({"permute_kernel"} if not config["natural"] else set())


@pytest.mark.parametrize("K,stride", [(288, 8), (896, 8), (960, 0), (1152, 0)])
@pytest.mark.parametrize(
    "config,M,rank",
    [
        (wgmma(16, 2, 3, True, 3), 19, 32),
        (wgmma(32, 2, 2, False, 2, slices=2), 21, 16),
        (wgmma(16, 2, 2, False, 5, tasks=False), 33, 16),
        (wgmma(32, 3, 3, True, 1, tasks=False), 21, 0),
        ({"kernel": "wide", "BM": 48, "P": 2, "S": 2, "X": 3, "grid": 3}, 53, 32),
        ({"kernel": "wide", "BM": 16, "P": 2, "S": 3, "X": 5, "grid": 2, "tasks": False}, 17, 16),
        (wgmma(32, 2, 2, False, 2, natural=True), 21, 16),
        ({"kernel": "wide", "BM": 48, "P": 2, "S": 2, "X": 3, "grid": 3, "natural": True}, 53, 0),
    ],
    ids=["permute", "halves", "halves-cublas", "whole", "wide", "wide-cublas", "natural", "natural-wide"],
)
def test_wgmma_where_the_last_step_is_a_part_of_one(emulated, config, M, rank, K, stride):
    """K no multiple of 256, nor of 128: the copy engine reads nothing of what lies behind a row, be it NaN."""
    emulated["resident"] = 2
    run(emulated, config, M, 208, K, rank, None, stride=stride)


@pytest.mark.parametrize(
    "M,N,K,rank,splits,more",
    [
        (19, 70, 384, 0, None, {"BM": 32, "R": 1, "NS": 3}),
        (40, 192, 640, 40, (64, 64, 64), {"BM": 32, "R": 2, "SK": 3}),
        (130, 128, 256, 16, None, {"BM": 128, "R": 2, "NS": 2}),
        (65, 200, 128, 32, (128, 72), {"BM": 64, "R": 1, "NS": 4}),
    ],
    ids=["odd", "split", "two-halves", "one-step"],
)
def test_mma(emulated, M, N, K, rank, splits, more):
    run(emulated, {"kernel": "mma", "SK": 1, "NS": 3} | more, M, N, K, rank, splits, per_row=rank == 0, stride=M % 2)
    assert set(emulated["launches"]) == {"mma_kernel"}


@pytest.mark.parametrize(
    "config,M",
    [
        (SKINNY, 7),
        (wgmma(16, 2, 3, True, 4), 7),
        ({"kernel": "wide", "BM": 48, "P": 2, "S": 2, "X": 3, "grid": 2}, 53),
        ({"kernel": "mma", "BM": 32, "R": 1, "NS": 3, "SK": 1}, 7),
    ],
    ids=["skinny", "wgmma", "wide", "mma"],
)
def test_an_adapter_of_rank_0_is_none(emulated, config, M):
    """Its rows of A are none, among which the multiprocessors were divided."""
    N, K = 192, 768
    packed, scale, gs = random_weight(N, K)
    x, a, b = torch.randn(M, K).bfloat16(), torch.empty(0, K).bfloat16(), torch.empty(N, 0).bfloat16()
    outs = [torch.empty(M, N, dtype=torch.bfloat16) for _ in range(2)]
    launch.launch(config, x, packed, in_aligned_rows(scale), gs, None, a, b, (128, 64), outs[0])
    launch.launch(config, x, packed, in_aligned_rows(scale), gs, None, None, None, None, outs[1])
    assert torch.equal(*outs) and relative_error(outs[0], reference.linear(x.double(), packed, scale, gs)) < 4e-3
    assert not leftovers()


def test_rows_of_x_that_the_copy_engine_cannot_read(emulated):
    run(emulated, wgmma(16, 2, 3, True, 2), 5, 128, 512, stride=3, times=1)


MMA = {"kernel": "mma", "BM": 32, "R": 2, "NS": 3, "SK": 2}


@pytest.mark.parametrize(
    "config,K",
    [
        (SKINNY, 512), (wgmma(16, 2, 3, True, 3), 512), (wgmma(16, 2, 3, True, 3), 544),
        (wgmma(16, 2, 2, False, 2), 480), (wgmma(16, 2, 2, False, 2, natural=True), 480), (MMA, 512),
    ],
    ids=["skinny", "wgmma", "wgmma-544", "wgmma-480", "natural-480", "mma"],
)  # fmt: skip
def test_nan_in_one_token_touches_no_other(emulated, config, K):
    """An engine's batch is padded with rows of anything."""
    M, N, rank = 6, 128, 16
    packed, scale, gs = random_weight(N, K)
    scale = in_aligned_rows(scale)
    x, a, b = torch.randn(M, K).bfloat16(), torch.randn(rank, K).bfloat16(), torch.randn(N, rank).bfloat16()
    outs = []
    for value in (1.0, float("nan"), float("inf")):
        x[2] = value
        out = torch.empty(M, N, dtype=torch.bfloat16)
        launch.launch(config, x, packed, scale, gs, None, a, b, None, out)
        assert not leftovers()
        outs.append(out)
    others = [0, 1, 3, 4, 5]
    assert all(torch.equal(out[others], outs[0][others]) for out in outs[1:])
    assert outs[1][2].isnan().all()
