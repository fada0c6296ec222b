"""A row of y does not depend on how many other rows there are: the batch-invariant selection, bit for bit.

On a CPU the Hopper kernel runs in the emulator and the portable one in Triton's interpreter, which show what is added
to what; how a matrix instruction adds up within itself only the GPU tests see.
"""

import random

import pytest
import torch
from nvfp4_cases import leftovers, random_weight, relative_error
from test_kernels_emulated import SMS, emulated  # noqa: F401  a fixture

import qerl_nvfp4
from qerl_nvfp4 import cost, launch, ops, portable, precompile, reference, select

SHARED_MEMORY = 99 * 1024
CUDA = torch.cuda.is_available()
hopper_only = pytest.mark.skipif(
    not (CUDA and torch.cuda.get_device_capability()[0] == 9 and ops.use_gluon(0)),
    reason="needs compute capability 9.0 and a Triton with Gluon's names",
)


class Problem:
    """A weight with bias, and an adapter or none; tokens of which any number may be asked for. `aligned`: rows of
    scales as an engine's.
    """

    def __init__(
        self, N: int, K: int, tokens: int, rank: int, splits, device: str, dtype=torch.bfloat16, aligned: bool = True
    ) -> None:
        packed, scale, gs = random_weight(N, K, N + K, device, per_row=True)
        self.weight = packed, qerl_nvfp4.align_scale_rows(scale) if aligned else scale, gs
        g = torch.Generator(device=device).manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=g, device=device) * scale).to(dtype)

        self.x, self.bias = normal(tokens, K), normal(N, scale=30)
        self.a = self.b = self.splits = None
        if rank:
            self.a, self.b, self.splits = normal(len(splits) * rank, K, scale=0.5), normal(N, rank), splits

    def exact(self) -> torch.Tensor:
        y = reference.linear(self.x.double(), *self.weight, self.bias.double())
        return (
            y if self.a is None else y + reference.lora(self.x.double(), self.a.double(), self.b.double(), self.splits)
        )

    def by(self, config: dict, rows: slice) -> torch.Tensor:
        x = self.x[rows]
        out = torch.full((len(x), len(self.bias)), float("nan"), device=x.device, dtype=x.dtype)
        launch.launch(config, x, *self.weight, self.bias, self.a, self.b, self.splits, out)
        return out


ADAPTERS = pytest.mark.parametrize("rank,splits", [(0, None), (32, (128, 192))], ids=["base", "adapter"])


@ADAPTERS
@pytest.mark.parametrize("K", [2048, 2080])
@pytest.mark.usefixtures("emulated")
def test_wgmma_cuts_k_at_the_same_places_for_every_number_of_tokens(rank, splits, K):
    """All widths of the instruction, tiles that are cut, and one slice or several of x A^T."""
    N = 320
    problem = Problem(N, K, 70, rank, splits, "cpu")
    configs = {M: select.batch_invariant(N, K, M, SMS, True, True, SHARED_MEMORY)[0] for M in (1, 17, 40, 70)}
    assert [c["BM"] for c in configs.values()] == [16, 32, 64, 128] and configs[1]["slices"] == 2
    found = {M: problem.by(config, slice(0, M)) for M, config in configs.items()}
    assert relative_error(found[70], problem.exact()) < 4e-3
    for M, y in found.items():
        assert torch.equal(y, found[70][:M]), M
    # what is selected by speed does not agree: the comparison above sees a difference
    free = configs[70] | {"grid": 5, "slices": None}
    assert not torch.equal(problem.by(free, slice(0, 70)), found[70])


@pytest.mark.skipif(not portable.INTERPRET, reason="runs where there is no GPU, with TRITON_INTERPRET=1")
@ADAPTERS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_portable_in_the_interpreter(dtype, rank, splits):
    N, K = 320, 1040
    problem = Problem(N, K, 130, rank, splits, "cpu", dtype)
    whole = None
    for M in (130, 64, 17, 3, 1):
        config = select.batch_invariant(N, K, M, 7, False, False, SHARED_MEMORY)[0]
        assert config["kernel"] == "portable" and config["SK"] > 1
        y = problem.by(config, slice(0, M))
        whole = y if whole is None else whole
        assert torch.equal(y, whole[:M]), M
    assert torch.equal(problem.by(config, slice(77, 80)), whole[77:80]), "the same rows in another place"
    assert relative_error(whole, problem.exact()) < 4e-3


@pytest.mark.parametrize(
    "N,K", [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (896, 896), (896, 912), (1001, 48)]
)
def test_what_decides_the_bits_depends_on_the_matrix_alone(N, K):
    """Not on the tokens, not on the multiprocessors; and no program computes parts of two tiles."""
    cuts = set()
    for M in (*range(1, 130), 500, 1024):
        for sms in (78, 132, 148):
            for config in select.batch_invariant(N, K, M, sms, True, True, 227 * 1024):
                if config["kernel"] == "portable":
                    cuts.add(("portable", *(config[k] for k in ("BM", "BN", "BK", "SK", "MMA", "down"))))
                    continue
                tiles = -(-N // (64 * config["P"])) * -(-M // config["BM"])
                assert config["grid"] % tiles == 0 or tiles % config["grid"] == 0
                cuts.add(("wgmma", max(1, config["grid"] // tiles), config["slices"]))
                assert config["grid"] <= 8 * tiles and config["BM"] >= min(M, 128)
    assert len(cuts) == (2 if K % 32 == 0 and N % 16 == 0 else 1)


def test_it_is_an_error_where_it_cannot_be_had():
    weight = random_weight(64, 64)
    with pytest.raises(ValueError, match="batch_invariant needs bfloat16 or float16 on a GPU"):
        qerl_nvfp4.linear(torch.randn(2, 64), *weight, batch_invariant=True)


# --- on a GPU -------------------------------------------------------------------------------------

SIZES = (512, 2, 3, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 160, 200, 256, 257, 384, 511, 1025, 1500)


@pytest.mark.gpu
@pytest.mark.kernels_ci
@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "N,K,rank,splits",
    [
        (4608, 3584, 0, None),
        (4608, 3584, 32, (3584, 512, 512)),
        (3584, 18944, 32, (3584,)),
        (37888, 3584, 32, (18944, 18944)),
        (1152, 896, 16, (896, 128, 128)),  # the last step is a part of one; in float16 the portable kernel's
        (4608, 3584, 32, (4480, 64, 64)),
    ],
    ids=["qkv_base", "qkv", "down", "gate_up", "small", "shards_of_64"],
)
def test_a_row_alone_is_the_same_row_in_any_batch(N, K, rank, splits, dtype):
    problem = Problem(N, K, max(SIZES), rank, splits, "cuda", dtype)
    ahead = precompile.Weight(N, K, splits or (N,), rank, bias=True, aligned=True)
    assert not precompile.precompile([ahead], SIZES, dtype=dtype, batch_invariant=True).failed

    def rows(where: slice) -> torch.Tensor:
        adapter = (problem.a, problem.b, problem.splits)
        return qerl_nvfp4.linear(problem.x[where], *problem.weight, problem.bias, *adapter, batch_invariant=True)

    whole = rows(slice(0, max(SIZES)))
    exact = problem.exact()
    assert relative_error(whole, exact) < 5e-3
    for m in (0, 1, 7, 100, 511, max(SIZES) - 1):
        assert torch.equal(rows(slice(m, m + 1))[0], whole[m]), f"row {m} alone"
    for M in SIZES:
        y = rows(slice(0, M))
        assert torch.equal(y, whole[:M]), f"{M} tokens: rows {(y != whole[:M]).any(1).nonzero().flatten().tolist()[:8]}"
    assert torch.equal(rows(slice(301, 340)), whole[301:340]), "the same rows in another place"


@pytest.mark.gpu
@pytest.mark.kernels_ci
@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
def test_random_shapes():
    """Right, and the same bits for the rows from any place on, alone or with others: 500 matrices of any shape that
    there are kernels for.
    """
    seed = torch.seed() % 2**31
    rng = random.Random(seed)
    for case in range(500):
        N, K = 64 * rng.randint(2, 40), 256 * rng.randint(1, 14) if rng.random() < 0.8 else 16 * rng.randint(3, 100)
        edge = 64 * rng.randint(1, N // 64 - 1)
        rank, splits = rng.choice(((0, None), (32, (N,)), (32, (edge, N - edge))))
        M = rng.randint(2, 300)
        problem = Problem(N, K, M, rank, splits, "cuda", aligned=rng.random() < 0.5)
        first = rng.randrange(M)
        rows = slice(first, rng.randint(first + 1, M))
        adapter = (problem.a, problem.b, problem.splits)
        y, some = (
            qerl_nvfp4.linear(problem.x[r], *problem.weight, problem.bias, *adapter, batch_invariant=True)
            for r in (slice(0, M), rows)
        )
        where = f"seed {seed} case {case}: N={N} K={K} M={M} {rows} splits={splits}"
        assert relative_error(y, problem.exact()) < 5e-3, where
        assert torch.equal(some, y[rows]), where
        if case % 20 == 19:
            assert not leftovers(), where


@pytest.mark.gpu
@pytest.mark.kernels_ci
@hopper_only
@pytest.mark.parametrize("rank,splits", [(0, None), (32, (3584, 512, 512))], ids=["base", "adapter"])
def test_widths_of_the_instruction_agree(rank, splits):
    """The mode takes 16 to 128 tokens per wgmma; one after the other, so that a failure says which width adds up
    otherwise.
    """
    N, K = 4608, 3584
    problem = Problem(N, K, 128, rank, splits, "cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    configs = [select.batch_invariant(N, K, M, sms, True, True, SHARED_MEMORY)[0] for M in (16, 32, 64, 128)]
    found = {config["BM"]: problem.by(config, slice(0, 16)) for config in configs}
    S, X = cost.wide_stages(160, 2)
    wide = {
        "kernel": "wide",
        "BM": 160,
        "P": 2,
        "S": S,
        "X": X,
        **{k: configs[-1][k] for k in ("grid", "tasks", "slices")},
    }
    found["160, wide"] = problem.by(wide, slice(0, 16))
    differ = {BM: (y != found[16]).float().mean().item() for BM, y in found.items() if not torch.equal(y, found[16])}
    assert not differ, f"share of values that differ from 16 tokens per instruction: {differ}"


@pytest.mark.gpu
@pytest.mark.kernels_ci
@hopper_only
def test_in_graphs_of_several_sizes():
    """As an engine calls it: graphs of other sizes before and after, launches without a pause, one set of scratch
    memory.
    """
    N, K, splits = 3584, 18944, (3584,)
    problem = Problem(N, K, 256, 32, splits, "cuda")

    def rows(M: int) -> torch.Tensor:
        adapter = (problem.a, problem.b, problem.splits)
        return qerl_nvfp4.linear(problem.x[:M], *problem.weight, problem.bias, *adapter, batch_invariant=True)

    whole, graphs = rows(256), {}
    for M in (256, 136, 64, 24, 8, 1):
        rows(M)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = rows(M)
        graphs[M] = graph, y
    for _ in range(50):
        for graph, y in graphs.values():
            y.fill_(float("nan"))
            graph.replay()
    torch.cuda.synchronize()
    for M, (_, y) in graphs.items():
        assert torch.equal(y, whole[:M]), M
