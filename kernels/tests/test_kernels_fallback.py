"""A kernel that does not compile is replaced by a slower one with one warning; other errors are not touched."""

import warnings

import pytest
import torch
from nvfp4_cases import Problem, random_weight, relative_error

pytest.importorskip("triton")
from triton.runtime.errors import OutOfResources, PTXASError

from qerl_nvfp4 import fallback, ops, portable, reference, select

pytestmark = pytest.mark.skipif(not portable.INTERPRET, reason="the kernels run in Triton's interpreter")

WGMMA = {"kernel": "wgmma", "BM": 32, "P": 2, "S": 5, "permute": True, "grid": 8}


@pytest.fixture(autouse=True)
def hopper(pretend):
    pretend("some Hopper", 100, (9, 0))
    fallback.forget()
    yield
    fallback.forget()


def failing(monkeypatch, errors: dict[str, Exception]) -> list[str]:
    """Launches of these kernels fail; the list names the kernels that were tried."""
    tried, launch = [], ops.launch

    def failing_launch(config, *arguments):
        tried.append(config["kernel"])
        if config["kernel"] in errors:
            raise errors[config["kernel"]]
        launch(config, *arguments, pdl=False)

    monkeypatch.setattr(ops, "launch", failing_launch)
    return tried


def multiply(config, M=20, K=512):
    """The relative error of a product with an adapter."""
    problem = Problem(M, 96, K, 16, bias=False)
    return relative_error(problem.by(config, multiply=ops.product_by_any), problem.exact())


def test_wgmma_falls_back_to_the_portable_kernel_and_says_so_once(monkeypatch):
    tried = failing(monkeypatch, {"wgmma": PTXASError("ptxas fatal: Unsupported .version 9.0")})
    with pytest.warns(RuntimeWarning, match=r"the wgmma kernel .* \(PTXASError: .*Unsupported .version.*The portable"):
        assert multiply(WGMMA) < 5e-3
    assert tried == ["wgmma", "portable"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert multiply(WGMMA) < 5e-3
    assert tried == ["wgmma", "portable", "portable"], "a refused kernel is not tried again"


@pytest.mark.parametrize("M,more", [(20, {}), (130, {"BM": 128, "permute": False, "S": 2})], ids=["few", "many"])
def test_the_dense_path_if_neither_kernel_compiles(monkeypatch, M, more):
    """Above 128 tokens the portable kernel is not tried."""
    errors = {kernel: OutOfResources(200_000, 101_376, "shared memory") for kernel in ("wgmma", "portable")}
    tried = failing(monkeypatch, errors)
    with pytest.warns(RuntimeWarning, match="The dense path") as said:
        assert multiply(WGMMA | more, M=M) < 5e-3
    assert tried == (["wgmma", "portable"] if M == 20 else ["wgmma"])
    assert [str(w.message).split()[2] for w in said] == tried


@pytest.mark.parametrize("M,expected", [(20, ["portable"]), (130, [])], ids=["few", "many"])
@pytest.mark.parametrize("product", ["product", "product_by_any"])
def test_scales_that_the_copy_engine_cannot_read_take_the_portable_kernel(monkeypatch, M, expected, product):
    """Contiguous rows of 56 bytes: up to 128 tokens that kernel, above them the dense path, and nothing is said."""
    tried = failing(monkeypatch, {})
    if product == "product":
        monkeypatch.setattr(ops, "product_by_any", ops.product)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert multiply(WGMMA, M, 896) < 5e-3
    assert tried == expected and not fallback.refused


@pytest.mark.parametrize("N,K", [(96, 896), (96, 288), (112, 1152)])
def test_aligned_scales_are_the_same_scales(N, K):
    packed, scale, gs = random_weight(N, K)
    aligned = ops.align_scale_rows(scale)
    assert torch.equal(aligned, scale) and aligned.shape == scale.shape
    assert aligned.stride() == ((K + 255) // 256 * 16, 1) and aligned.data_ptr() % 16 == 0
    assert ops.align_scale_rows(aligned) is aligned, "nothing is copied twice"
    x = torch.zeros(20, K, dtype=torch.bfloat16)
    for rows in (slice(16, 80), slice(0, N)):
        assert ops.usable(WGMMA, x, packed[rows], aligned[rows]) and not ops.usable(WGMMA, x, packed, scale)
    assert torch.equal(reference.dequantize(packed, aligned, gs), reference.dequantize(packed, scale, gs))


def test_without_any_kernel_there_is_plain_pytorch(monkeypatch):
    def refuse(kernel, *grid):
        raise PTXASError("no")

    failing(monkeypatch, {"portable": PTXASError("no")})
    monkeypatch.setattr(ops, "launcher", refuse)
    config = select.portable_heuristic(96, 512, 20, 100, hopper=False)
    with pytest.warns(RuntimeWarning) as said:
        assert multiply(config) < 5e-3
    assert {str(w.message).split()[2] for w in said} == {"portable", "dequantize", "lora_up"}
    weight, gs = torch.randn(4, 32), torch.tensor([64.0])
    x, w = torch.randn(3, 64).bfloat16(), torch.ones(64)
    with pytest.warns(RuntimeWarning, match="Plain PyTorch"):
        packed, _ = ops._quantize(weight, "four_over_six", gs)
    with pytest.warns(RuntimeWarning, match="Plain PyTorch"):
        y, h = ops._rms_norm(x, w, 1e-6, x)
    assert torch.equal(packed, reference.quantize(weight, "four_over_six", gs)[0])
    assert torch.equal(y, reference.rms_norm(x, w, 1e-6, x)[0])
    assert torch.equal(h, 2 * x)


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, ValueError])
def test_errors_that_are_not_the_compilers_are_raised(monkeypatch, error):
    failing(monkeypatch, {"wgmma": error("an illegal memory access")})
    with pytest.raises(error, match="an illegal"):
        multiply(WGMMA)
    assert not fallback.refused


def test_any_error_raised_in_the_compiler_counts_as_its_own():
    namespace = {"__name__": "triton.compiler.compiler"}
    exec("def compile(): raise RuntimeError('PassManager::run failed')", namespace)  # as MLIR raises it
    with pytest.raises(RuntimeError) as found:
        namespace["compile"]()
    assert fallback.of_the_compiler(found.value)
    assert not fallback.of_the_compiler(RuntimeError("PassManager::run failed"))


def test_refused_kernels_are_listed(monkeypatch):
    monkeypatch.setattr(select.cost, "factors", dict)
    select.explain.cache_clear()
    config = select.choose(4096, 4096, 64, 0, True)

    def listed(device):
        return [(row.kernel, row.why) for row in ops.selected(4096, 4096, (64,), device)]

    assert listed(0) == [("wgmma", "heuristic")]
    fallback.refused[0, ops._variant(config, 0, torch.bfloat16)] = "PTXASError: no"
    assert listed(0) == [("portable", "wgmma does not compile: PTXASError: no")]
    assert "wgmma does not compile: PTXASError: no" in ops.describe(0)
    assert listed(1) == [("wgmma", "heuristic")], "another GPU"
    assert "does not compile" not in ops.describe(1)
