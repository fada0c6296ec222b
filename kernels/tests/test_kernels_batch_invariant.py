"""A row of y does not depend on how many other rows there are: the batch-invariant selection, bit for bit.

On a CPU the Hopper kernel runs in the emulator and the portable one in Triton's interpreter, which show the order of
sums; how a matrix instruction adds up within itself only the GPU tests see.
"""

import itertools

import pytest
import torch
from nvfp4_cases import Problem, random_weight, relative_error

import qerl_nvfp4
from qerl_nvfp4 import portable, precompile, select

SMS, SHARED_MEMORY = 5, 99 * 1024


def problem_of(M, N, K, rank, splits, device="cpu", aligned=True, **more) -> Problem:
    """With rows of scales as an engine's, or not."""
    problem = Problem(M, N, K, rank, splits, seed=N + K, device=device, per_row=True, **more)
    if aligned:
        packed, scale, gs = problem.weight
        problem.weight = packed, qerl_nvfp4.align_scale_rows(scale), gs
    return problem


ADAPTERS = pytest.mark.parametrize("rank,splits", [(0, None), (32, (128, 192))], ids=["base", "adapter"])


@ADAPTERS
@pytest.mark.parametrize("K,fp8", [(2048, False), (2080, False), (2080, True)])
@pytest.mark.usefixtures("emulated")
def test_wgmma_cuts_k_at_the_same_places_for_every_number_of_tokens(rank, splits, K, fp8):
    """All widths of the instruction, tiles that are cut, and one slice or several of x A^T."""
    problem = problem_of(70, 320, K, rank, splits)
    configs = {M: select.batch_invariant(320, K, M, SMS, True, True, SHARED_MEMORY, fp8)[0] for M in (1, 17, 40, 70)}
    assert [c["BM"] for c in configs.values()] == [16, 32, 64, 128] and configs[1]["slices"] == 2
    found = {M: problem.by(config, slice(0, M)) for M, config in configs.items()}
    assert relative_error(found[70], problem.exact("w4a8" if fp8 else "w4a16")) < 4e-3
    for M, y in found.items():
        assert torch.equal(y, found[70][:M]), M
    # a selection by speed does not agree: the comparison above sees a difference (sums of e4m3 products are exact here)
    assert fp8 or not torch.equal(problem.by(configs[70] | {"grid": 5, "slices": None}), found[70])


@pytest.mark.skipif(not portable.INTERPRET, reason="runs where there is no GPU, with TRITON_INTERPRET=1")
@ADAPTERS
@pytest.mark.parametrize(
    "dtype,compute",
    [(torch.bfloat16, "w4a16"), (torch.float16, "w4a16"), (torch.bfloat16, "w4a8")],
    ids=["bf16", "fp16", "W4A8"],
)
def test_portable_in_the_interpreter(dtype, compute, rank, splits):
    problem, whole = problem_of(80, 320, 1040, rank, splits, dtype=dtype), None
    for M in (80, 17, 1):
        config = select.batch_invariant(320, 1040, M, 7, False, False, SHARED_MEMORY, compute == "w4a8")[0]
        assert config["kernel"] == "portable" and config["SK"] > 1
        y = problem.by(config, slice(0, M))
        whole = y if whole is None else whole
        assert torch.equal(y, whole[:M]), M
    assert torch.equal(problem.by(config, slice(77, 80)), whole[77:80]), "the same rows in another place"
    assert relative_error(whole, problem.exact(compute)) < 4e-3


@pytest.mark.parametrize(
    "N,K", [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (896, 896), (896, 912), (1001, 48)]
)
def test_the_cuts_depend_on_the_matrix_alone(N, K):
    """Not on the tokens, not on the multiprocessors; and no program computes parts of two tiles."""
    cuts = set()
    for M in (*range(1, 130, 3), 128, 129, 500, 1024):
        for sms, fp8 in itertools.product((78, 132, 148), (False, True)):
            for config in select.batch_invariant(N, K, M, sms, True, True, 227 * 1024, fp8):
                assert config.get("fp8", False) == fp8
                if config["kernel"] == "portable":
                    cuts.add(("portable", *(config[k] for k in ("BM", "BN", "BK", "SK", "MMA", "down"))))
                    continue
                tiles = -(-N // (64 * config["P"])) * -(-M // config["BM"])
                assert config["grid"] % tiles == 0 or tiles % config["grid"] == 0
                cuts.add(("wgmma", max(1, config["grid"] // tiles), config["slices"]))
                assert config["grid"] <= 8 * tiles and config["BM"] >= min(M, 128)
    assert len(cuts) == (2 if K % 32 == 0 and N % 16 == 0 else 1)


def test_batch_invariance_without_a_gpu_is_an_error():
    weight = random_weight(64, 64)
    with pytest.raises(ValueError, match="batch_invariant needs bfloat16 or float16 on a GPU"):
        qerl_nvfp4.linear(torch.randn(2, 64), *weight, batch_invariant=True)


# --- on a GPU -------------------------------------------------------------------------------------

SIZES = (512, 2, 3, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 160, 200, 256, 257, 384, 511, 1025, 1500)


@pytest.mark.gpu
@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "dtype,compute", [(torch.bfloat16, "w4a16"), (torch.float16, "w4a16"), (torch.bfloat16, "w4a8")]
)
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
def test_a_row_alone_is_the_same_row_in_any_batch(N, K, rank, splits, dtype, compute):
    problem = problem_of(max(SIZES), N, K, rank, splits, "cuda", dtype=dtype)
    ahead = precompile.Weight(N, K, splits or (N,), rank, bias=True, aligned=True)
    assert not precompile.precompile([ahead], SIZES, dtype=dtype, batch_invariant=True, compute=compute).failed
    whole = problem.linear(batch_invariant=True, compute=compute)
    assert relative_error(whole, problem.exact(compute)) < 5e-3
    alone = [slice(m, m + 1) for m in (0, 1, 7, 100, 511, max(SIZES) - 1)]
    for rows in (*alone, *(slice(0, M) for M in SIZES), slice(301, 340)):
        y = problem.linear(rows, batch_invariant=True, compute=compute)
        wrong = (y != whole[rows]).any(1).nonzero().flatten().tolist()
        assert not wrong, f"{rows}: rows {wrong[:8]}"
