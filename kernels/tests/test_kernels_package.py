"""What the Kernel Hub asks of the folder, and the selection of configurations: no GPU needed."""

import ast
import json
import sys
import tomllib
from pathlib import Path

import pytest

from qerl_nvfp4 import select

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torch-ext" / "qerl_nvfp4"
ALLOWED = {"torch", "triton"}


def test_only_torch_triton_and_the_standard_library_are_imported():
    import sys

    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                top = name.split(".")[0]
                assert top in ALLOWED or top in sys.stdlib_module_names, f"{path.name} imports {name}"


def test_build_description():
    build = tomllib.loads((ROOT / "build.toml").read_text())
    assert build["general"]["name"].replace("-", "_") == PACKAGE.name
    assert {"py", "json"} <= set(build["torch-noarch"]["pyext"])
    assert build["general"]["license"] == "Apache-2.0"
    assert not (ROOT / "__init__.py").exists(), "it would shadow the `kernels` library"


def test_card_names_the_licence():
    assert "license: apache-2.0" in (ROOT / "CARD.md").read_text()


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(select, "device_properties", lambda index: ("NVIDIA H200", 132, (9, 0)))
    select.choose.cache_clear()
    yield
    select.choose.cache_clear()


@pytest.mark.parametrize("path", sorted(select.CONFIG_FOLDER.glob("*.json")), ids=lambda p: p.stem)
def test_every_table_entry_fits_its_matrix(path):
    for entry in json.loads(path.read_text())["entries"]:
        config, N, K = entry["config"], entry["N"], entry["K"]
        if config["kernel"] == "skinny":
            assert select.skinny_fits(config, N, K)
            assert 0 < entry["bucket"] <= config["BM"]
        elif config["kernel"] == "wgmma":
            assert select.wgmma_fits(N, K)
        else:
            assert config["kernel"] == "dense"


def test_tuned_shapes_come_from_the_table_and_others_from_the_heuristic(h200):
    table = select.load_table("NVIDIA H200", 132)
    assert select.choose(37888, 3584, 5, 0, True) == table[(37888, 3584, 8)]
    assert select.choose(37888, 3584, 9, 0, True) == table[(37888, 3584, 16)]
    assert select.choose(37888, 3584, 4096, 0, True)["kernel"] == "dense"
    assert select.choose(2560, 2048, 4, 0, True)["kernel"] == "skinny"
    assert select.choose(2560, 2048, 40, 0, True)["kernel"] == "wgmma"
    assert select.choose(2500, 2048, 4, 0, True)["kernel"] == "portable"  # N not a multiple of 16
    assert select.choose(2560, 2064, 4, 0, True)["kernel"] == "portable"  # K not a multiple of 128
    assert select.choose(2560, 2048, 4, 0, False)["kernel"] == "portable"  # float16


def test_hopper_kernels_are_for_bfloat16_only(h200):
    """An adapter may change the kernel of a table's entry."""
    table = select.load_table("NVIDIA H200", 132)
    assert any(c["kernel"] == "dense" and select.with_adapter(c)["kernel"] == "wgmma" for c in table.values())
    for N, K, bucket in table:
        for M in (max(1, bucket - 1), bucket or 5000):
            assert select.with_adapter(select.choose(N, K, M, 0, False))["kernel"] in ("dense", "portable")


def test_a_table_is_for_as_many_multiprocessors_as_it_was_tuned_with(monkeypatch):
    assert not select.load_table("NVIDIA H200", 66)
    monkeypatch.setattr(select, "device_properties", lambda index: ("NVIDIA H200", 66, (9, 0)))
    select.choose.cache_clear()
    assert select.choose(37888, 3584, 100, 0, True)["grid"] <= 66
    select.choose.cache_clear()


@pytest.mark.parametrize("M", [1, 9, 17, 33, 65, 128])
@pytest.mark.parametrize("N,K", [(16, 128), (48, 256), (2304, 2048), (1024, 11008), (55296, 5120), (896, 896)])
def test_heuristics_are_valid_for_any_shape(h200, M, N, K):
    config = select.choose(N, K, M, 0, True)
    if config["kernel"] == "skinny":
        assert select.skinny_fits(config, N, K)
        assert config["BM"] >= M
    elif config["kernel"] == "wgmma":
        assert select.wgmma_fits(N, K)
        assert config["grid"] >= 1
    else:
        assert config["kernel"] == "portable" or M > 128
        assert M <= 16 or not select.wgmma_fits(N, K), "Hopper's own kernel fits"
    if config["kernel"] == "portable":
        assert 1 <= config["SK"] <= -(-K // config["BK"])


@pytest.mark.parametrize("M", [1, 16, 17, 128, 300, 4096])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
def test_kernels_for_hopper_go_to_no_other_gpu(monkeypatch, capability, M):
    from qerl_nvfp4 import ops

    for module in (select, ops):
        monkeypatch.setattr(module, "device_properties", lambda index: ("some GPU", 100, capability))
    select.choose.cache_clear()
    assert not ops.use_hopper(0)
    for bf16 in (False, True):  # choose() must not rely on its caller's question
        assert select.choose(4096, 4096, M, 0, bf16)["kernel"] in ("portable", "dense")
    select.choose.cache_clear()


def test_a_triton_without_gluons_names_means_the_portable_kernels(monkeypatch):
    from qerl_nvfp4 import ops

    gl = pytest.importorskip("triton.experimental.gluon.language")
    assert ops.missing_from_gluon() is None
    for name in ("barrier", "thread_barrier"):
        monkeypatch.delattr(gl, name, raising=False)
    for name in ("gluon_names", "hopper", "hopper_adapt", "hopper_wgmma"):
        monkeypatch.delitem(sys.modules, f"qerl_nvfp4.{name}")
    ops._gluon_lacks.cache_clear()
    for module in (select, ops):
        monkeypatch.setattr(module, "device_properties", lambda index: ("NVIDIA H200", 132, (9, 0)))
    monkeypatch.setattr(ops, "is_available", lambda device: True)
    assert not ops.use_hopper(0)
    assert "none of ('barrier', 'thread_barrier')" in ops.describe(0)
    ops._gluon_lacks.cache_clear()


def test_scratch_memory_outlives_inference_mode_and_what_is_kept_stays_small():
    import torch

    from qerl_nvfp4 import launch

    device, before = torch.device("cpu"), len(launch._captured)
    with torch.inference_mode():
        launch.scratch(device, "a test", 100, torch.float32)
    launch.scratch(device, "a test", 100, torch.float32).zero_()
    for numel in range(100, 5000, 10):
        buffer = launch.scratch(device, "a test", numel, torch.float32)
    assert buffer.numel() < 2 * 5000
    assert sum(kept.numel() for kept in launch._captured[before:]) < buffer.numel()
    del launch._captured[before:], launch._scratch[device, "a test"]


def test_the_table_renders():
    import subprocess
    import sys

    result = ROOT / "benchmarks" / "results" / "h200.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "table.py"), str(result)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "| 7B | 1 |" in text
    assert "NVIDIA H200" in text


def test_layouts_that_a_kernel_cannot_read_are_recognised():
    import torch

    from qerl_nvfp4.ops import usable

    x = torch.zeros(2, 896, dtype=torch.bfloat16)
    packed, scale = torch.zeros(64, 448, dtype=torch.uint8), torch.zeros(64, 56, dtype=torch.uint8)
    assert usable({"kernel": "skinny"}, x, packed, scale)
    assert not usable({"kernel": "wgmma"}, x, packed, scale)  # 56 bytes of scales a row
    assert usable({"kernel": "portable"}, x, packed, scale)
    assert not usable({"kernel": "portable"}, x.t().contiguous().t(), packed, scale)
    wide = torch.zeros(64, 450, dtype=torch.uint8)[:, 1:449]
    assert not usable({"kernel": "portable"}, x, wide, scale)
