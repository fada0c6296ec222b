"""The kernels on a GPU as an engine uses them: random shapes, graphs between eager calls, several models."""

import functools
import itertools
import random

import pytest
import torch
from nvfp4_cases import Problem, leftovers, random_weight, relative_error

import qerl_nvfp4
from qerl_nvfp4 import bounds, cost, ops, select

pytestmark = [pytest.mark.gpu, pytest.mark.kernels_ci]
CASES = 500  # per kernel family
RANK = 32


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def cut(rng: random.Random, N: int, step: int) -> tuple[int, ...]:
    """N rows as one to three shards, with edges at multiples of `step`."""
    edges = sorted(rng.sample(range(step, N, step), min(rng.randrange(3), len(range(step, N, step)))))
    return tuple(b - a for a, b in itertools.pairwise((0, *edges, N)))


class Matrix:
    """A weight with bias and adapter, as a layer of an engine holds it."""

    def __init__(self, N: int, K: int, splits: tuple[int, ...], bias: bool = False) -> None:
        packed, scale, gs = random_weight(N, K, torch.seed() % 2**31, "cuda")
        self.packed = packed, qerl_nvfp4.align_scale_rows(scale), gs
        self.bias = normal(N) if bias else None
        self.a, self.b, self.splits = normal(len(splits) * RANK, K, scale=K**-0.5), normal(N, RANK), splits
        self.unit = (self.packed[2] * 0.02 / K**0.5).item()  # so that a chain of layers stays within bfloat16

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return qerl_nvfp4.linear(x, *self.packed, self.bias, self.a, self.b, self.splits)


def skinny(rng: random.Random) -> tuple[dict, int, int, int, int]:
    """Few variants: every K is compiled for itself."""
    BM, (WK, WN, R, late) = rng.choice((8, 16)), rng.choice(((4, 1, 2, False), (4, 1, 4, True)))
    K = rng.choice((1024, 3584))
    N = 16 * R * WN * rng.randint(1, 40)
    config = {"kernel": "skinny", "BM": BM, "WK": WK, "WN": WN, "R": R, "late": late, "grid": rng.randint(1, 100)}
    return config, rng.randint(1, BM), N, K, 16 * R * WN


def wgmma(rng: random.Random) -> tuple[dict, int, int, int, int]:
    tiles = ((16, 3, 4, True), (32, 2, 5, True), (64, 2, 4, True), (64, 3, 3, False), (128, 2, 2, False))
    BM, P, S, permute = rng.choice(tiles)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    config = {"kernel": "wgmma", "BM": BM, "P": P, "S": S, "permute": permute, "grid": rng.randint(1, sms)}
    config["tasks"] = rng.random() < 0.8
    if cost.can_be_natural(config):
        config["natural"] = rng.random() < 0.5
    return config, rng.randint(1, 3 * BM), 16 * rng.randint(5, 100), columns(rng), 64


def columns(rng: random.Random) -> int:
    """K for `wgmma` and `wide`: the last step whole, or a part of one."""
    return rng.choice((256 * rng.randint(2, 14), 32 * rng.randint(8, 112)))


def wide(rng: random.Random) -> tuple[dict, int, int, int, int]:
    """Tiles of one, two and three parts."""
    BM, P, S, X = rng.choice(cost.WIDE)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    config = {"kernel": "wide", "BM": BM, "P": P, "S": S, "X": X, "grid": rng.randint(1, sms)}
    config["tasks"] = rng.random() < 0.5
    if cost.can_be_natural(config):
        config["natural"] = rng.random() < 0.5
    M = rng.randint(1, min(3 * BM, 256) if config["tasks"] else 3 * BM)
    return config, M, 16 * rng.randint(5, 100), columns(rng), 64


def mma(rng: random.Random) -> tuple[dict, int, int, int, int]:
    BM, R = rng.choice(tuple(bounds.ISSUED))
    K, NS = 128 * rng.randint(1, 28), rng.randint(2, bounds.stages(BM, select.SMALLEST_SHARED_MEMORY))
    config = {"kernel": "mma", "BM": BM, "R": R, "NS": NS, "SK": rng.randint(1, min(8, K // 128))}
    return config, rng.randint(1, 3 * BM), rng.randint(65, 1600), K, 64


def portable(rng: random.Random) -> tuple[dict, int, int, int, int]:
    M, N, K = rng.randint(1, 128), rng.randint(1, 1500) | 1, 16 * rng.randint(1, 200)
    return select.without_gluon(N, K, M, 0), M, N, K, 128


def dense(rng: random.Random) -> tuple[dict, int, int, int, int]:
    M, N, K = rng.randint(1, 600), rng.randint(1, 1500), 16 * rng.randint(1, 128)
    return {"kernel": "dense"}, M, N, K, 128


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(skinny, marks=pytest.mark.gluon),
        pytest.param(wgmma, marks=pytest.mark.hopper),
        pytest.param(wide, marks=pytest.mark.hopper),
        pytest.param(mma, marks=pytest.mark.gluon),
        portable,
        dense,
    ],
    ids=lambda family: family.__name__,
)
def test_random_shapes(family):
    """Any number of tokens, rows, columns, programs, shards: right, the same bits twice, and nothing left behind."""
    seed = torch.seed() % 2**31
    rng = random.Random(seed)
    for case in range(CASES):
        config, M, N, K, step = family(rng)
        splits = cut(rng, N, step) if rng.random() < 0.5 else None
        bias, per_row = bool(splits) or family not in (portable, dense), rng.random() < 0.3
        more = {"device": "cuda", "bias": bias, "per_row": per_row, "aligned": family in (wgmma, wide)}
        problem = Problem(M, N, K, RANK if splits else 0, splits, seed=seed + case, **more)
        outs = [problem.by(config, multiply=ops.product) for _ in range(2)]
        where = f"seed {seed} case {case}: M={M} N={N} K={K} splits={splits} {more} {config}"
        assert relative_error(outs[0], problem.exact()) < 5e-3, where
        assert torch.equal(*outs), where
        if case % 20 == 19:
            assert not leftovers(), where


# --- layers of a model, in graphs of every size ---------------------------------------------------


class Layer:
    """qkv, something for attention, o, gate_up, down, norms: the launches of a model's layer in their order."""

    def __init__(self, hidden: int, inner: int, key: int) -> None:
        self.qkv = Matrix(hidden + 2 * key, hidden, (hidden, key, key), bias=True)
        self.o = Matrix(hidden, hidden, (hidden,))
        self.gate_up = Matrix(2 * inner, hidden, (inner, inner))
        self.down = Matrix(hidden, inner, (hidden,))
        self.hidden, self.inner = hidden, inner
        self.norms = [torch.rand(hidden, device="cuda") + 0.5 for _ in range(2)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.qkv(qerl_nvfp4.rms_norm(x, self.norms[0], 1e-6))[:, : self.hidden]
        y = self.o(y * self.qkv.unit)
        y, h = qerl_nvfp4.rms_norm(y * self.o.unit, self.norms[1], 1e-6, x)
        gate, up = self.gate_up(y).mul(self.gate_up.unit).split(self.inner, 1)
        return h + self.down(torch.nn.functional.silu(gate) * up) * self.down.unit


SEVEN = functools.cache(lambda: Layer(3584, 18944, 512))  # 7B: its shapes are in the H200's table
SMALL = functools.cache(lambda: Layer(1024, 2816, 256))  # by the heuristic
HALF = functools.cache(lambda: Layer(896, 4864, 128))  # 0.5B: K is no multiple of 256


def capture(call, x: torch.Tensor, pool=None) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """As vLLM does it: once without a graph, then the graph, in memory that all graphs share."""
    call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        y = call(x)
    return graph, y


@pytest.mark.gluon
@pytest.mark.parametrize("layer", [SEVEN, SMALL, HALF], ids=["table", "heuristic", "0.5B"])
def test_graphs_of_every_size_between_eager_calls_in_random_order(layer):
    """A ragged batch drains through all sizes, with prompts in between: always the bits of the first time."""
    layer = layer()
    seed = torch.seed() % 2**31
    rng = random.Random(seed)
    tokens, memory, graphs = normal(1100, layer.hidden), torch.cuda.graph_pool_handle(), {}
    for M in (*range(512, 7, -8), 4, 2, 1):  # the largest first
        x = tokens[:M].clone()
        graphs[M] = (*capture(layer, x, memory), x)
    torch.cuda.synchronize()
    first: dict[tuple[str, int], torch.Tensor] = {}
    since: list[str] = []
    for turn in range(1500):
        if rng.random() < 0.75:
            M = rng.choice(list(graphs))
            graph, y, x = graphs[M]
            alive, kind = rng.randint(max(1, M - 7), M), "graph"
            x[alive:] = float("nan")  # the rows of sequences that have ended hold anything
            y.fill_(float("nan"))
            graph.replay()
            x[alive:] = tokens[alive:M]
        else:
            M = alive = rng.randint(1, 300 if rng.random() < 0.9 else 1100)
            y, kind = layer(tokens[:M]), "eager"
        since.append(f"{kind} {M}, {alive} alive")
        before = first.get((kind, M))
        where = f"seed {seed} turn {turn}: {since}"
        assert torch.isfinite(y[:alive]).all(), where
        if before is not None:
            assert torch.equal(y[: min(alive, len(before))], before[:alive]), where
        if before is None or len(before) < alive:
            first[kind, M] = y[:alive].clone()
        if turn % 10 == 9:
            assert not (left := leftovers()), f"seed {seed} turn {turn}: {left} after {since}"
            since.clear()


@pytest.mark.gluon
def test_replays_without_waiting_give_the_same_bits():
    """Steps of a rollout follow each other on the device without a pause: nothing is read or compared in between."""
    layer = SEVEN()
    graphs = {}
    for M in (128, 72, 64, 56, 32, 16, 8):
        x = normal(M, layer.hidden)
        graphs[M] = (*capture(layer, x), x)  # the x of a graph must live as long as it
    first = {}
    for M, (graph, y, _) in graphs.items():
        graph.replay()
        first[M] = y.clone()
    torch.cuda.synchronize()
    rng = random.Random(torch.seed())
    for _ in range(20):
        order = [rng.choice(list(graphs)) for _ in range(100)]
        for M in order:
            graphs[M][0].replay()
        torch.cuda.synchronize()
        wrong = [M for M in set(order) if not torch.equal(graphs[M][1], first[M])]
        assert not wrong and not leftovers(), (wrong, leftovers(), order)
