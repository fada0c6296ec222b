"""Compiling ahead, for a faked H200: a launch finds it, in this process and in the next."""

from types import SimpleNamespace

import pytest
import torch
from nvfp4_cases import COMPILING, in_a_fresh_process

pytest.importorskip("triton")
import triton

from qerl_nvfp4 import cost, launch, ops, precompile, select
from qerl_nvfp4.precompile import Weight

N, K, RANK, SPLITS = 512, 512, 16, (256, 128, 128)
TOKENS = (1, 8, 100, 2048)  # skinny, wgmma, dense
BF16 = torch.bfloat16


class FakeDriver:
    """An H200 on which launches do nothing."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.loaded = 0
        driver = self

        class Launcher:
            def __init__(self, src, metadata) -> None:
                self.name = metadata.name

            def __call__(self, *args) -> None:
                driver.launched.append(self.name)

        self.launcher_cls = Launcher
        self.utils = SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda device: {"max_shared_mem": 227 * 1024}
        )

    def _load(self, *args):
        self.loaded += 1
        return object(), object(), 0, 0, 1024

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def h200(monkeypatch, pretend):
    from triton.runtime import driver

    monkeypatch.setattr(ops, "_made_for", lambda index: True)
    monkeypatch.setattr(ops, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(cost, "factors", dict)
    pretend("an H200", 132, (9, 0))
    driver.set_active(FakeDriver())
    yield driver.active
    driver.set_active(None)


@pytest.fixture
def compilations(monkeypatch):
    """(kernel, whether it came from the disk) of everything that Triton compiles or loads."""
    seen: list[tuple[str, bool]] = []

    def listener(src, metadata, metadata_group, times, cache_hit) -> None:
        seen.append((src.name, cache_hit))

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    return seen


def launch_products(tokens, multiply) -> None:
    """Products of tensors that have an address, as an engine calls them; multiply(M, x, ..., out)."""
    weight = torch.zeros(N, K // 2, dtype=torch.uint8), torch.zeros(N, K // 16, dtype=torch.uint8)
    a, b = torch.zeros(len(SPLITS) * RANK, K, dtype=BF16), torch.zeros(N, RANK, dtype=BF16)
    for M in tokens:
        x, out = torch.zeros(M, K, dtype=BF16), torch.zeros(M, N, dtype=BF16)
        multiply(M, x, *weight, torch.ones(1), torch.zeros(N, dtype=BF16), a, b, SPLITS, out)


@pytest.mark.compiled
def test_a_launch_compiles_nothing(h200, compilations):
    said: list[str] = []
    weight = Weight(N, K, SPLITS, RANK, bias=True)
    result = precompile.precompile([weight, weight], TOKENS, norms=[K], threads=2, tell=said.append)
    kernels = sorted(name for name, _ in compilations)
    assert not result.failed
    assert result.kernels == len(compilations) == h200.loaded, "each once, and loaded"
    assert {"skinny_kernel", "wgmma_kernel", "permute_kernel", "dequantize_kernel", "lora_up_kernel"} <= set(kernels)
    assert kernels.count("rms_norm_kernel") == 2
    assert all(hit == (COMPILING == "warm") for _, hit in compilations), "files on disk are not compiled again"
    if COMPILING == "cold":
        assert said[0].startswith("Compiling ") and "on 2 threads (first start only)" in said[0]
        assert said[1].startswith("... ")
    assert not h200.launched, "nothing ran"
    assert not [key for key in launch._scratch if key[0].type == "meta"], "no buffer is left behind"

    compilations.clear()
    tokens = (*TOKENS, 3, 5, 65, 128, 1025)  # other numbers of tokens run the same kernels
    launch_products(tokens, lambda M, *given: ops.product(select.choose(N, K, M, 0, True), *given))
    x = torch.zeros(3, K, dtype=BF16)
    ops._rms_norm(x, torch.ones(K), 1e-6)
    ops._rms_norm(x, torch.ones(K), 1e-6, x.clone())
    assert set(h200.launched) == set(kernels)
    assert not compilations, "found in memory"


def variants(weight, tokens, invariant: bool, fp8: bool) -> set:
    """Triton's keys of the kernels for these numbers of tokens; nothing is compiled."""
    collector = precompile._Collector()
    with triton.AsyncCompileMode(collector, ignore_errors=True) as mode:
        with launch.only_compile():
            precompile._launch_all([weight], tokens, [], BF16, 0, invariant, fp8)
        collector.cancel()
    return set(mode.future_kernels)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "gpu,how",
    [
        (("NVIDIA H200", 132, (9, 0)), (False, False)),
        (("NVIDIA H200", 132, (9, 0)), (True, False)),
        (("NVIDIA H200", 132, (9, 0)), (False, True)),
        (("an H100", 114, (9, 0)), (False, False)),
        (("an RTX", 128, (8, 9)), (False, False)),
        (("an RTX", 128, (8, 9)), (False, True)),
    ],
    ids=["H200", "H200 invariant", "H200 W4A8", "H100", "RTX", "RTX W4A8"],
)
def test_no_other_number_of_tokens_runs_another_kernel(h200, pretend, monkeypatch, gpu, how):
    monkeypatch.setattr(cost, "factors", lambda: cost.shipped()["factors"])
    pretend(*gpu)
    weight = Weight(4608, 3584, (3584, 512, 512), 32, bias=True)
    ahead = variants(weight, None, *how)
    assert len(ahead) > 4 and variants(weight, [*range(1, 1025, 11), 1500, 5000], *how) <= ahead


@pytest.mark.compiled
def test_w4a8_is_compiled_ahead(h200, compilations):
    """Its dense path too, of which cuBLAS has nothing to compile."""
    assert not precompile.precompile([Weight(N, K, SPLITS, RANK)], TOKENS, compute="w4a8").failed
    assert {"quantize_fp8_kernel", "dequantize_fp8_kernel"} <= {name for name, _ in compilations}


@pytest.mark.skipif(bool(COMPILING), reason="the outer test")
def test_in_fresh_processes(tmp_path):
    """The second one finds the first one's kernels on the disk."""
    in_a_fresh_process(__file__, "cold", TRITON_CACHE_DIR=str(tmp_path))
    in_a_fresh_process(__file__, "warm", "-k", "a_launch_compiles_nothing", TRITON_CACHE_DIR=str(tmp_path))
