"""What the Kernel Hub asks of the folder, and the selection of configurations: no GPU needed."""

import ast
import json
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nvfp4_cases import launchable

from qerl_nvfp4 import cost, launch, ops, select

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torch-ext" / "qerl_nvfp4"
WIDEST = (37888, 3584)  # gate and up of 7B


def test_only_torch_triton_and_the_standard_library_are_imported():
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for top in (name.split(".")[0] for name in names):
                assert top in {"torch", "triton", *sys.stdlib_module_names}, f"{path.name} imports {top}"


def test_what_a_kernel_needs_comes_in_records_and_tuples():
    """Only older kernels have more than 15 parameters."""
    functions = [n for path in PACKAGE.glob("*.py") for n in ast.walk(ast.parse(path.read_text()))]
    counts = {n.name: len(n.args.args) for n in functions if isinstance(n, ast.FunctionDef)}
    many = {name: count for name, count in counts.items() if name.endswith("_kernel") and count > 15}
    assert "wgmma_kernel" in counts and many == {"skinny_kernel": 37, "mma_kernel": 32, "gemm_kernel": 37}


def test_build_description():
    build = tomllib.loads((ROOT / "build.toml").read_text())
    assert build["general"]["name"].replace("-", "_") == PACKAGE.name
    assert {"py", "json"} <= set(build["torch-noarch"]["pyext"])
    assert build["general"]["license"] == "Apache-2.0"
    assert not (ROOT / "__init__.py").exists(), "it would shadow the `kernels` library"
    assert "license: apache-2.0" in (ROOT / "CARD.md").read_text()


@pytest.fixture(autouse=True)
def no_cost_model(monkeypatch):
    """test_kernels_cost.py has its tests."""
    monkeypatch.setattr(cost, "factors", dict)


@pytest.fixture
def h200(pretend):
    pretend("NVIDIA H200", 132, (9, 0))


def test_every_shipped_entry_fits_its_matrix():
    for entry in cost.shipped()["entries"]:
        assert launchable(entry["config"], entry["N"], entry["K"], entry["tokens"], 132), entry


def test_measured_shapes_come_first_and_others_from_the_heuristic(h200):
    entries = select.measured_for(0).entries
    assert select.explain(*WIDEST, 5, 0, True) == entries[*WIDEST, 0, 8, False]
    assert select.explain(*WIDEST, 9, 0, True, 32) == entries[*WIDEST, 32, 16, False]
    assert select.explain(*WIDEST, 9, 0, True, 64) == entries[*WIDEST, 32, 16, False], "up to 16 tokens for all ranks"
    for N, K, M, bf16, kernel in (
        (*WIDEST, 4096, True, "dense"),
        (2560, 2048, 4, True, "skinny"),
        (2560, 2048, 40, True, "wgmma"),
        (2500, 2048, 4, True, "portable"),  # N not a multiple of 16
        (2560, 2064, 4, True, "portable"),  # K not a multiple of 128
        (2560, 2048, 4, False, "portable"),
        (*WIDEST, 5, False, "portable"),
        (*WIDEST, 500, False, "dense"),
    ):
        assert select.choose(N, K, M, 0, bf16)["kernel"] == kernel, (N, K, M, bf16)


@pytest.mark.parametrize("name,sms", [("NVIDIA H100 80GB HBM3", 132), ("NVIDIA H100 PCIe", 114)])
def test_a_hopper_with_as_many_multiprocessors_uses_the_h200s_measurements(pretend, name, sms):
    pretend(name, sms, (9, 0))
    why = "measured on NVIDIA H200" if sms == 132 else "heuristic"
    assert select.explain(*WIDEST, 96, 0, True, 32, 2)[1] == why
    assert (f"shapes {why}" if sms == 132 else f"nothing measured for {name} with {sms}") in ops.describe(0)


@pytest.mark.parametrize("M", [1, 9, 17, 65, 128])
@pytest.mark.parametrize("N,K", [(16, 128), (48, 256), (2304, 2048), (1024, 11008), (55296, 5120), (896, 896)])
def test_heuristics_are_valid_for_any_shape(h200, M, N, K):
    config = select.choose(N, K, M, 0, True)
    assert launchable(config, N, K, M, 132)
    if config["kernel"] not in ("skinny", "wgmma"):
        assert M <= 16 or not cost.fits(N, K), "Hopper's own kernel fits"
        assert config["kernel"] == "portable"


@pytest.mark.parametrize("M", [1, 17, 300])
@pytest.mark.parametrize("capability", [(8, 9), (10, 0)], ids=str)
def test_hoppers_own_kernel_goes_to_no_other_gpu(pretend, capability, M):
    pretend("some GPU", 100, capability, 99)
    assert ops.use_gluon(0)
    assert select.choose(4096, 4096, M, 0, False)["kernel"] == ("portable" if M <= 128 else "dense")
    config = select.choose(4096, 4096, M, 0, True)
    few = "portable" if capability == (10, 0) else "mma"  # which cards bounds.py knows
    assert config["kernel"] == ("skinny" if M <= 16 else few if M <= 128 else "dense") or (few, M) == ("mma", 300)


def test_the_selection_is_listed(h200):
    rows = ops.selected(*WIDEST, (1, 96, 4096), 0, rank=32)
    assert [(row.tokens, row.kernel) for row in rows] == [(1, "skinny"), (96, "wgmma"), (4096, "dense")]
    assert [row.why for row in rows] == ["measured on NVIDIA H200"] * 2 + ["heuristic"]
    assert rows[0].config == select.choose(*WIDEST, 1, 0, True, 32)
    assert {row.kernel for row in ops.selected(2560, 2048, device=0, dtype=torch.float32)} == {"reference"}
    wide = {"gate_up": WIDEST}
    said = "skinny up to 8 tokens, wgmma up to 1024 tokens, dense for more (measured on NVIDIA H200; heuristic)"
    assert ops.selected_text(wide, 0) == [f"gate_up 37888 x 3584: {said}"]
    invariant = ops.selected_text(wide, 0, rank=32, batch_invariant=True)
    assert invariant == ["gate_up 37888 x 3584: wgmma (batch-invariant)"]


def test_a_triton_without_gluons_names_means_the_portable_kernels(monkeypatch, h200):
    gl = pytest.importorskip("triton.experimental.gluon.language")
    assert ops.missing_from_gluon() is None
    for name in ("barrier", "thread_barrier"):
        monkeypatch.delattr(gl, name, raising=False)
    for name in ("gluon_names", "hopper", "hopper_tile", "hopper_decode", "hopper_adapt", "hopper_wgmma", "ampere"):
        monkeypatch.delitem(sys.modules, f"qerl_nvfp4.{name}", raising=False)
    ops._gluon_lacks.cache_clear()
    assert not ops.use_gluon(0)
    assert "none of ('barrier', 'thread_barrier')" in ops.describe(0)
    ops._gluon_lacks.cache_clear()


def test_scratch_memory_outlives_inference_mode_and_stays_small():
    device, before = torch.device("cpu"), len(launch._captured)
    with torch.inference_mode():
        launch.scratch(device, "a test", 100, torch.float32)
    launch.scratch(device, "a test", 100, torch.float32).zero_()
    for numel in range(100, 5000, 10):
        buffer = launch.scratch(device, "a test", numel, torch.float32)
    assert buffer.numel() < 2 * 5000
    assert sum(kept.numel() for kept in launch._captured[before:]) < buffer.numel()
    del launch._captured[before:], launch._scratch[device, 0, "a test"]


class Device(SimpleNamespace):
    """A CUDA device as far as `scratch` asks; its memory is the CPU's."""

    __hash__ = object.__hash__


def test_launches_that_may_run_at_the_same_time_share_no_scratch_memory(monkeypatch):
    state = {"stream": 7, "capturing": False}
    active = SimpleNamespace(get_current_stream=lambda index: state["stream"])
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(launch, "_scratch", {})
    monkeypatch.setattr(launch, "_captured", [])
    empty, fill_, filled = torch.empty, torch.Tensor.fill_, []
    monkeypatch.setattr(torch, "empty", lambda numel, device, dtype: empty(numel, dtype=dtype))
    record = lambda self, value: filled.append(state["capturing"]) or fill_(self, value)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "fill_", record)
    device = Device(type="cuda", index=0)

    def buffer(stream, capturing=False, numel=10, fill=None, name="dense"):
        state.update(stream=stream, capturing=capturing)
        return launch.scratch(device, name, numel, torch.int32, fill).data_ptr()

    trainer, engine, graphs = buffer(7), buffer(8), buffer(9, capturing=True)
    assert len({trainer, engine, graphs}) == 3
    assert (buffer(7), buffer(8)) == (trainer, engine)
    assert buffer(8, capturing=True) == graphs, "whatever stream they are captured on: they are replayed on another"
    # counters that a kernel leaves as it found them are filled before anything is captured, on whatever stream that ran
    before = buffer(7, fill=0, name="counters")
    assert buffer(9, capturing=True, fill=0, name="counters") != before
    assert buffer(7, numel=100, fill=0, name="counters") != before
    buffer(9, capturing=True, numel=100, fill=0, name="counters")
    assert filled == [False] * 4


def test_the_planted_defects_are_those_of_the_page_and_fit_the_sources():
    """planted.py has run since its defects or the lines they change were touched."""
    import planted

    rows = json.loads(planted.RESULT.read_text())["defects"]
    for row in rows:
        assert (PACKAGE / row["file"]).read_text().count(row["old"]) == 1, f"{row['defect']}: run tests/planted.py"
    assert sum(row["by"] is None for row in rows) <= 3
    assert planted.written(planted.PAGE.read_text(), rows) == planted.PAGE.read_text()
