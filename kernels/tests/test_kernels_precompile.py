"""Compiling ahead, for a faked H200: what is compiled is what a launch looks up, in this process and in the next."""

import functools
import json
import os
from types import SimpleNamespace

import pytest
import torch
from nvfp4_cases import in_a_fresh_process

triton = pytest.importorskip("triton")
# the interpreter replaces triton.jit when triton is imported, so compilation happens in a fresh process
INSIDE = os.environ.get("QERL_PRECOMPILE_TEST", "")
inside = pytest.mark.skipif(not INSIDE, reason="run by test_in_fresh_processes")

N, K, RANK, SPLITS = 512, 512, 16, (256, 128, 128)
TOKENS = (1, 8, 100, 2048)  # skinny, wgmma, dense


class FakeDriver:
    """An H200 whose kernels do nothing when they are launched."""

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
def h200(monkeypatch):
    from triton.runtime import driver

    from qerl_nvfp4 import cost, launch, ops, select

    for module in (select, launch, ops):
        monkeypatch.setattr(module, "device_properties", lambda index: ("an H200", 132, (9, 0)))
    monkeypatch.setattr(select, "shared_memory_limit", lambda index: 227 * 1024)
    monkeypatch.setattr(ops, "_made_for", lambda index: True)
    monkeypatch.setattr(ops, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(ops, "is_available", lambda device=None: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(cost, "factors", dict)
    select.explain.cache_clear()
    driver.set_active(FakeDriver())
    yield driver.active
    driver.set_active(None)
    select.explain.cache_clear()


@pytest.fixture
def compilations(monkeypatch):
    """(kernel, whether it came from the disk) of everything that Triton compiles or loads."""
    seen: list[tuple[str, bool]] = []

    def listener(src, metadata, metadata_group, times, cache_hit) -> None:
        seen.append((src.name, cache_hit))

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    return seen


def launch_everything() -> None:
    """The products themselves, with tensors that have an address, as an engine calls them."""
    from qerl_nvfp4 import ops, select

    weight = torch.zeros(N, K // 2, dtype=torch.uint8), torch.zeros(N, K // 16, dtype=torch.uint8), torch.ones(1)
    a, b = torch.zeros(len(SPLITS) * RANK, K, dtype=torch.bfloat16), torch.zeros(N, RANK, dtype=torch.bfloat16)
    bias = torch.zeros(N, dtype=torch.bfloat16)
    for M in (*TOKENS, 3, 5, 65, 128, 1025):  # other numbers of tokens run the same kernels
        x, out = torch.zeros(M, K, dtype=torch.bfloat16), torch.zeros(M, N, dtype=torch.bfloat16)
        ops.product(select.choose(N, K, M, 0, True), x, *weight, bias, a, b, SPLITS, out)
    ops._rms_norm(torch.zeros(3, K, dtype=torch.bfloat16), torch.ones(K), 1e-6)
    ops._rms_norm(x[:3], torch.ones(K), 1e-6, x[:3].clone())


@inside
def test_a_launch_compiles_nothing(h200, compilations):
    from qerl_nvfp4 import launch
    from qerl_nvfp4.precompile import Weight, precompile

    said: list[str] = []
    weight = Weight(N, K, SPLITS, RANK, bias=True)
    result = precompile([weight, weight], TOKENS, norms=[K], threads=2, tell=said.append)
    kernels = sorted(name for name, _ in compilations)
    assert not result.failed
    assert result.kernels == len(compilations) == h200.loaded, "each once, and loaded"
    assert {"skinny_kernel", "wgmma_kernel", "permute_kernel", "dequantize_kernel", "lora_up_kernel"} <= set(kernels)
    assert kernels.count("rms_norm_kernel") == 2
    assert all(hit == (INSIDE == "warm") for _, hit in compilations), "what is on disk is not compiled again"
    if INSIDE == "cold":
        assert said[0].startswith("Compiling ") and "on 2 threads (first start only)" in said[0]
        assert said[1].startswith("... ")
    assert not h200.launched, "nothing ran"
    assert not [key for key in launch._scratch if key[0].type == "meta"], "no buffer is left behind"

    compilations.clear()
    launch_everything()
    assert set(h200.launched) == set(kernels)
    assert not compilations, "found in memory"


@inside
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "contiguous"])
def test_rows_of_scales_are_compiled_for_as_they_will_lie(h200, compilations, aligned):
    """An engine's, and those of whoever calls with plain contiguous ones."""
    from qerl_nvfp4 import ops, select
    from qerl_nvfp4.precompile import Weight, precompile

    columns, rank, tokens = 896, 48, (1, 40, 100)  # a rank of its own: nothing is in memory yet
    result = precompile([Weight(N, columns, SPLITS, rank, aligned=aligned)], tokens, threads=2, tell=lambda text: None)
    assert not result.failed
    found = {name for name, _ in compilations}
    assert ("wgmma_kernel" in found) == aligned and ("gemm_kernel" in found) != aligned
    compilations.clear()
    scale = torch.zeros(N, columns // 16, dtype=torch.uint8)
    scale = ops.align_scale_rows(scale) if aligned else scale
    a, b = torch.zeros(len(SPLITS) * rank, columns, dtype=torch.bfloat16), torch.zeros(N, rank, dtype=torch.bfloat16)
    weight = torch.zeros(N, columns // 2, dtype=torch.uint8), scale, torch.ones(1)
    for M in tokens:
        x, out = torch.zeros(M, columns, dtype=torch.bfloat16), torch.zeros(M, N, dtype=torch.bfloat16)
        ops.product_by_any(select.choose(N, columns, M, 0, True), x, *weight, None, a, b, SPLITS, out)
    assert set(h200.launched) == found and not compilations, "found in memory"


@inside
def test_sums_are_compiled_with_them(h200, compilations):
    from qerl_nvfp4.precompile import precompile
    from qerl_nvfp4.sums import rounded_sums, sums, words_of

    def launch(device: str) -> None:
        tensor = torch.zeros(64, device=device)
        sums([words_of(tensor)], 1, tensor.device)
        rounded_sums([tensor, tensor], [1.0, 2.0], torch.bfloat16)

    result = precompile([], also=lambda: launch("meta"))
    assert result.kernels == 2 and not result.failed
    assert sorted(name for name, _ in compilations) == ["rounded_sums_kernel", "sums_kernel"]
    compilations.clear()
    launch("cpu")
    assert h200.launched == ["sums_kernel", "rounded_sums_kernel"]
    assert not compilations, "found in memory"


@inside
def test_the_batch_invariant_mode_compiles_its_own(h200, compilations):
    from qerl_nvfp4 import ops
    from qerl_nvfp4.precompile import Weight, precompile

    result = precompile([Weight(N, K, SPLITS, RANK)], [1, 100, 2048], threads=2, batch_invariant=True)
    assert not result.failed
    assert [name for name, _ in compilations if name != "permute_kernel"] == ["wgmma_kernel"] * 2
    compilations.clear()
    weight = torch.zeros(N, K // 2, dtype=torch.uint8), torch.zeros(N, K // 16, dtype=torch.uint8), torch.ones(1)
    a, b = torch.zeros(len(SPLITS) * RANK, K, dtype=torch.bfloat16), torch.zeros(N, RANK, dtype=torch.bfloat16)
    for M in (3, 128, 2048):
        x, out = torch.zeros(M, K, dtype=torch.bfloat16), torch.zeros(M, N, dtype=torch.bfloat16)
        ops.product_in_any_batch(x, *weight, None, a, b, SPLITS, out)
    assert h200.launched.count("wgmma_kernel") == 4, "2048 tokens are two pieces"
    assert not compilations, "found in memory"


@inside
def test_candidates_are_compiled_before_they_are_timed(h200, compilations):
    """What refine.py measures; one that cannot be launched is named, and stops nobody."""
    from qerl_nvfp4 import refine, tune
    from qerl_nvfp4.precompile import Weight

    weight = Weight(N, K, SPLITS, RANK)
    tried = {
        8: [{"kernel": "skinny", "BM": 8, "WK": 4, "WN": 1, "R": 2, "grid": 64, "cost": 3}],
        64: [{"kernel": "wgmma", "BM": 64, "P": 2, "S": 4, "permute": True, "grid": 4, "tasks": True}],
        128: [{"kernel": "dense", "pieces": 1}],
    }
    said: list[str] = []
    refine.compile_ahead([(weight, tried | {72: [{"kernel": "wgmma", "BM": 64, "P": "2", "S": 4}]})], said.append)
    assert any("not compiled ahead" in line and "'P': '2'" in line for line in said)
    assert {"skinny_kernel", "wgmma_kernel"} <= {name for name, _ in compilations}
    compilations.clear()
    matrix = tune.Matrix(N, K, SPLITS, 1, RANK, "cpu")
    for M, configs in tried.items():
        x, out = matrix.problem(M)
        for config in configs:
            matrix.call(config, x, out, True)(0)
    assert "wgmma_kernel" in h200.launched and not compilations, "found in memory"


def variants(weight, tokens, batch_invariant: bool = False) -> set:
    """Triton's keys of what these numbers of tokens would compile; nothing is compiled."""
    from qerl_nvfp4 import launch, precompile

    collector = precompile._Collector()
    with triton.AsyncCompileMode(collector, ignore_errors=True) as mode:
        with launch.only_compile():
            precompile._launch_all([weight], tokens, [], torch.bfloat16, 0, batch_invariant)
        collector.cancel()
    return set(mode.future_kernels)


@inside
@pytest.mark.parametrize(
    "gpu", [("NVIDIA H200", 132, (9, 0)), ("an H100", 114, (9, 0)), ("an RTX", 128, (8, 9))], ids=lambda g: g[0]
)
@pytest.mark.parametrize("rank", [0, 32])
@pytest.mark.parametrize("splits,columns", [((3584, 512, 512), 3584), ((3584,), 18944)], ids=["7B qkv", "7B down"])
def test_no_other_number_of_tokens_runs_another_kernel(h200, monkeypatch, gpu, rank, splits, columns):
    from qerl_nvfp4 import cost, launch, ops, precompile, select

    monkeypatch.setattr(cost, "factors", functools.cache(lambda: json.loads(cost.FACTORS.read_text())["factors"]))
    for module in (select, launch, ops):
        monkeypatch.setattr(module, "device_properties", lambda index: gpu)
    select.explain.cache_clear()
    weight = precompile.Weight(sum(splits), columns, splits, rank, bias=True)
    ahead = variants(weight, precompile.TOKENS)
    assert variants(weight, [*range(1, 1025, 7), 1500, 5000]) <= ahead


@inside
def test_no_other_number_of_tokens_runs_another_batch_invariant_kernel(h200):
    from qerl_nvfp4 import precompile

    weight = precompile.Weight(4608, 3584, (3584, 512, 512), 32, bias=True)
    ahead = variants(weight, precompile.TOKENS, True)
    assert len(ahead) > 4 and variants(weight, [*range(1, 1025, 7), 1500, 5000], True) <= ahead


@inside
def test_a_kernel_that_does_not_load_is_named_and_left_to_its_launch(h200, monkeypatch):
    from qerl_nvfp4.precompile import precompile

    def refuse(*args):
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(h200, "launcher_cls", refuse)
    result = precompile([], [], norms=[4 * K], tell=lambda text: None)
    assert result.kernels == 0
    assert result.failed == ["RuntimeError: out of shared memory"] * 2


@inside
def test_an_error_before_compilation_ends_the_mode(h200, compilations, monkeypatch):
    from qerl_nvfp4 import precompile, select

    def fail(N, K, M, *rest):
        return select.choose(N, K, M, *rest) if M == 9 else 1 // 0

    monkeypatch.setattr(precompile, "choose", fail)
    for _ in range(2):  # the second time Triton would say that a mode is active
        with pytest.raises(ZeroDivisionError):
            precompile.precompile([precompile.Weight(N, K, SPLITS)], [9, 10])
    assert not compilations


def test_without_a_gpu_it_does_nothing():
    from qerl_nvfp4.precompile import Weight, precompile

    assert precompile([Weight(N, K, SPLITS)], [8]).kernels == 0


@pytest.mark.skipif(bool(INSIDE), reason="the outer test")
def test_in_fresh_processes(tmp_path):
    # what the second process finds on the disk is for those that compile; the others would only repeat what they said
    for state, chosen, passed in (("cold", [], 23), ("warm", ["-k", "not no_other_number_of_tokens"], 10)):
        variables = {"QERL_PRECOMPILE_TEST": state, "TRITON_CACHE_DIR": str(tmp_path)}
        result = in_a_fresh_process(__file__, 600, "--noconftest", *chosen, **variables)
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
        assert f"{passed} passed" in result.stdout


@inside
def test_another_thread_launches_while_this_one_only_compiles():
    """It would have returned what was never written."""
    import threading

    from qerl_nvfp4 import launch

    class Kernel:
        def warmup(self, *args, grid):
            return "only compiled"

        def __getitem__(self, grid):
            return lambda *args: "launched"

    found = []
    with launch.only_compile():
        other = threading.Thread(target=lambda: found.append(launch.launcher(Kernel(), 1)()))
        other.start()
        other.join()
        found.append(launch.launcher(Kernel(), 1)())
    assert found == ["launched", "only compiled"] and launch.launcher(Kernel(), 1)() == "launched"
