"""What the Kernel Hub asks of the folder, and the selection of configurations: no GPU needed."""

import ast
import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from qerl_nvfp4 import cost, select

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
    assert "license: apache-2.0" in (ROOT / "CARD.md").read_text()


@pytest.fixture
def pretend(monkeypatch):
    """pretend(name, multiprocessors, capability, shared memory in KiB): the GPU of the rest of the test."""
    from qerl_nvfp4 import ops

    def be(name: str, sms: int, capability: tuple[int, int], shared: int) -> None:
        for module in (select, ops):
            monkeypatch.setattr(module, "device_properties", lambda index: (name, sms, capability))
        monkeypatch.setattr(select, "shared_memory_limit", lambda index: shared * 1024)
        monkeypatch.setattr(ops, "is_available", lambda device: True)
        monkeypatch.setattr(cost, "factors", dict)  # test_kernels_cost.py is about the cost model
        select.explain.cache_clear()

    yield be
    select.explain.cache_clear()


@pytest.fixture
def h200(pretend):
    pretend("NVIDIA H200", 132, (9, 0), 227)


@pytest.mark.parametrize("path", sorted(select.CONFIG_FOLDER.glob("device_name=*.json")), ids=lambda p: p.stem)
def test_every_table_entry_fits_its_matrix(path):
    for entry in json.loads(path.read_text())["entries"]:
        config, N, K = entry["config"], entry["N"], entry["K"]
        assert select.can_run(config, N, K, entry["bucket"] or 2048, 132, 227 * 1024)
        if config["kernel"] == "skinny":
            assert select.skinny_fits(config, N, K)
            assert 0 < entry["bucket"] <= config["BM"]
        elif config["kernel"] in ("wgmma", "wide"):
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


def test_a_table_is_for_as_many_multiprocessors_as_it_was_tuned_with(pretend):
    assert not select.load_table("NVIDIA H200", 66)
    pretend("NVIDIA H200", 66, (9, 0), 227)
    assert select.choose(37888, 3584, 100, 0, True)["grid"] <= 66


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "NVIDIA H200 NVL"])
def test_a_hopper_with_as_many_multiprocessors_uses_the_h200s_table(pretend, name):
    from qerl_nvfp4 import ops

    pretend(name, 132, (9, 0), 227)
    assert select.explain(37888, 3584, 5, 0, True) == (
        select.load_table("NVIDIA H200", 132)[37888, 3584, 8],
        "table of NVIDIA H200",
    )
    assert f"table for NVIDIA H200, which has 132 multiprocessors like this {name}" in ops.describe(0)


@pytest.mark.parametrize(
    "name,sms,capability",
    [("NVIDIA H100 PCIe", 114, (9, 0)), ("NVIDIA H20", 78, (9, 0)), ("a Blackwell", 132, (10, 0))],
    ids=str,
)
def test_other_gpus_use_the_heuristic(pretend, name, sms, capability):
    from qerl_nvfp4 import ops

    pretend(name, sms, capability, 227)
    assert select.table_for(name, sms, capability) == ("", {})
    config, why = select.explain(37888, 3584, 64, 0, True)
    assert why == "heuristic"
    assert config["kernel"] == ("wgmma" if capability == (9, 0) else "portable")
    assert f"no table for {name} with {sms} multiprocessors" in ops.describe(0)


def test_a_gpus_own_table_comes_first(pretend, monkeypatch, tmp_path):
    own = {"device": "NVIDIA H100 80GB HBM3", "multiprocessors": 132}
    own["entries"] = [{"N": 64, "K": 256, "bucket": 8, "config": {"kernel": "dense", "pieces": 1}}]
    other = json.loads(select.table_path("NVIDIA H200").read_text())
    monkeypatch.setattr(select, "CONFIG_FOLDER", tmp_path)
    for table in (own, other):
        select.table_path(table["device"]).write_text(json.dumps(table))
    for cached in (select.load_table, select.table_for):
        cached.cache_clear()
    pretend(own["device"], 132, (9, 0), 227)
    assert select.explain(64, 256, 3, 0, True)[1] == "table of NVIDIA H100 80GB HBM3"
    for cached in (select.load_table, select.table_for):
        cached.cache_clear()


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
def test_hoppers_own_kernel_goes_to_no_other_gpu(pretend, capability, M):
    from qerl_nvfp4 import ops

    pretend("some GPU", 100, capability, 99)
    assert ops.use_gluon(0)
    assert select.choose(4096, 4096, M, 0, False)["kernel"] == ("portable" if M <= 128 else "dense")
    config = select.choose(4096, 4096, M, 0, True)
    few = "portable" if capability == (10, 0) else "mma"  # which cards bounds.py knows
    assert config["kernel"] == ("skinny" if M <= 16 else few if M <= 128 else "dense") or (few, M) == ("mma", 300)
    assert config["kernel"] != "wgmma"
    assert select.with_adapter(config)["kernel"] == config["kernel"]


@pytest.mark.parametrize("shared", [227, 163, 99, 64, 48])
@pytest.mark.parametrize("M", [17, 64, 128])
@pytest.mark.parametrize("N", [1024, 65536])
def test_kernels_keep_to_the_cards_shared_memory(pretend, shared, M, N):
    pretend("some GPU", 100, (8, 6), shared)
    ours = select.choose(N, 4096, M, 0, True)
    assert ours["kernel"] == "mma"
    assert ours["BM"] * 256 * ours["NS"] <= shared * 1024
    config = select.choose(N, 4096, M, 0, False)
    assert config["kernel"] == "portable"
    assert select.portable_shared_memory(config) <= shared * 1024
    assert config["NS"] >= (3 if shared >= 99 else 1), "fewer stages hide less latency"


def test_the_selection_is_listed(pretend, h200):
    from qerl_nvfp4 import ops

    rows = ops.selected(37888, 3584, (1, 64, 4096), 0, rank=32)
    assert [(row.tokens, row.kernel) for row in rows] == [(1, "skinny"), (64, "wgmma"), (4096, "dense")]
    assert all(row.why == "table of NVIDIA H200" for row in rows)
    assert rows[0].config == select.with_adapter(select.choose(37888, 3584, 1, 0, True))
    (line,) = ops.selected_text({"gate_up": (37888, 3584)}, 0)
    assert line == (
        "gate_up 37888 x 3584: skinny up to 8 tokens, wgmma up to 1024 tokens, dense for more (table of NVIDIA H200)"
    )
    (line,) = ops.selected_text({"gate_up": (37888, 3584)}, 0, rank=32, batch_invariant=True)
    assert line == "gate_up 37888 x 3584: wgmma (batch-invariant)"
    assert {row.kernel for row in ops.selected(2560, 2048, device=0, dtype=torch.float32)} == {"reference"}
    (line,) = ops.selected_text({"o": (4096, 4096)}, 0, dtype=torch.float16)
    assert line == "o 4096 x 4096: portable up to 128 tokens, dense for more (heuristic)"
    pretend("NVIDIA L40S", 142, (8, 9), 99)
    (line,) = ops.selected_text({"o": (4096, 4096)}, 0)
    assert (
        line
        == "o 4096 x 4096: skinny up to 16 tokens, mma up to 1536 tokens, dense for more (heuristic; bounds of L40S)"
    )


def test_a_triton_without_gluons_names_means_the_portable_kernels(monkeypatch):
    from qerl_nvfp4 import ops

    gl = pytest.importorskip("triton.experimental.gluon.language")
    assert ops.missing_from_gluon() is None
    for name in ("barrier", "thread_barrier"):
        monkeypatch.delattr(gl, name, raising=False)
    for name in ("gluon_names", "hopper", "hopper_adapt", "hopper_wgmma", "hopper_wide", "ampere"):
        monkeypatch.delitem(sys.modules, f"qerl_nvfp4.{name}")
    ops._gluon_lacks.cache_clear()
    for module in (select, ops):
        monkeypatch.setattr(module, "device_properties", lambda index: ("NVIDIA H200", 132, (9, 0)))
    monkeypatch.setattr(ops, "is_available", lambda device: True)
    assert not ops.use_gluon(0)
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
    del launch._captured[before:], launch._scratch[device, 0, "a test"]


def test_launches_that_may_run_at_the_same_time_share_no_scratch_memory(monkeypatch):
    from types import SimpleNamespace

    import torch

    from qerl_nvfp4 import launch

    class Device(SimpleNamespace):
        """A CUDA device as far as `scratch` asks; its memory is the CPU's."""

        __hash__ = object.__hash__

    state = {"stream": 7, "capturing": False}
    stand_in = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: state["stream"]))
    monkeypatch.setattr(launch, "driver", stand_in)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(launch, "_scratch", {})
    monkeypatch.setattr(launch, "_captured", [])
    empty, filled = torch.empty, []
    monkeypatch.setattr(torch, "empty", lambda numel, device, dtype: empty(numel, dtype=dtype))
    fill = torch.Tensor.fill_
    monkeypatch.setattr(
        torch.Tensor, "fill_", lambda self, value: filled.append(state["capturing"]) or fill(self, value)
    )
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


def test_the_cost_model_is_that_of_the_committed_measurement(monkeypatch):
    """Its factors, and what is said of how far its choices are from the fastest."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import fit

    from qerl_nvfp4 import cost

    result, shipped = (
        json.loads((ROOT / "benchmarks/results/every_size_h200.json").read_text()),
        json.loads(cost.FACTORS.read_text()),
    )
    model, quality = fit.fit(result["matrices"], result["multiprocessors"])
    assert quality == shipped["quality"] and model.keys() == shipped["factors"].keys()
    for name, factors in model.items():
        assert factors == pytest.approx(shipped["factors"][name], rel=1e-3), name
    table = select.load_table(result["device"], result["multiprocessors"])
    timed = fit.faster_than_chosen(result["matrices"], result["multiprocessors"], shipped["factors"], table)
    assert timed == shipped["timed"]
    row = result["matrices"][0]
    chosen = fit.losses([row | {"best_us": row["best_us"] / 2}], result["multiprocessors"], model)
    before = fit.losses([row], result["multiprocessors"], model)
    assert chosen[0][0] == pytest.approx(2 * before[0][0] + 1), "the fastest is that of all candidates"


def test_the_committed_compilations_are_of_every_triton_that_is_named_and_of_these_sources():
    """CARD.md and the README name 3.6 to 3.9; benchmarks/compile_matrix.py writes the file."""
    from qerl_nvfp4.measured import source_digest

    result = json.loads((ROOT / "benchmarks" / "results" / "compile.json").read_text())
    tritons = result["tritons"]
    assert result["kernels"] == dict.fromkeys(tritons, source_digest()), "run benchmarks/compile_matrix.py again"
    assert {version.rsplit(".", 1)[0] for version in tritons} >= {"3.6", "3.7", "3.8", "3.9"}
    for rows in tritons.values():
        assert {row["sm"] for row in rows} == {80, 86, 89, 90, 100, 120}
        assert all("error" not in row and row["shared"] <= row["shared_limit"] for row in rows)


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return (ROOT / "HOW_IT_WORKS.md").read_text()


def test_the_page_names_what_uses_stack(page):
    import compile_matrix

    table = compile_matrix.stacks(json.loads((ROOT / "benchmarks" / "results" / "compile.json").read_text()))
    assert table in page and not any(line.startswith("| `mma`") for line in table.splitlines())


def test_the_page_shows_what_is_expected_of_cards_that_were_not_measured(page):
    import expected

    assert expected.text("7B") in page


def test_blackwell_s_conversion_is_taken_where_it_was_assembled(page, monkeypatch):
    import fp4_conversion

    from qerl_nvfp4 import launch
    from qerl_nvfp4.measured import source_digest

    record = json.loads(fp4_conversion.RESULT.read_text())
    assert record["kernels"] == source_digest(), "run benchmarks/fp4_conversion.py again"
    for row in record["rows"]:
        monkeypatch.setattr(launch.triton, "__version__", row["triton"])
        assert launch.converts_fp4.__wrapped__((10, 0)) is bool(row["conversion"])


def test_layouts_that_a_kernel_cannot_read_are_recognised():
    import torch

    from qerl_nvfp4.ops import usable

    x = torch.zeros(2, 896, dtype=torch.bfloat16)
    packed, scale = torch.zeros(64, 448, dtype=torch.uint8), torch.zeros(64, 56, dtype=torch.uint8)
    assert usable({"kernel": "skinny"}, x, packed, scale)
    assert not usable({"kernel": "wgmma"}, x, packed, scale)  # 56 bytes of scales per row
    assert usable({"kernel": "portable"}, x, packed, scale)
    assert not usable({"kernel": "portable"}, x.t().contiguous().t(), packed, scale)
    wide = torch.zeros(64, 450, dtype=torch.uint8)[:, 1:449]
    assert not usable({"kernel": "portable"}, x, wide, scale)


def test_the_planted_defects_are_those_of_the_page_and_fit_the_sources():
    """planted.py has run since its defects or what they change was touched."""
    import planted

    rows = json.loads(planted.RESULT.read_text())["defects"]
    for row in rows:
        assert (PACKAGE / row["file"]).read_text().count(row["old"]) == 1, f"{row['defect']}: run tests/planted.py"
    assert sum(row["by"] is None for row in rows) <= 3
    assert planted.written(planted.PAGE.read_text(), rows) == planted.PAGE.read_text()


def test_the_edges_and_ranks_that_linear_names_are_fused(h200):
    """Its docstring: edges at multiples of 64, of 128 with `portable`; ranks that are multiples of 8, of 4 up to 16
    tokens.
    """
    import qerl_nvfp4
    from qerl_nvfp4 import launch

    said = " ".join(qerl_nvfp4.linear.__doc__.split())
    assert "multiples of 64 (of 128 where `portable` or the dense path multiplies)" in said
    assert "multiples of 8 (of 4 up to 16 tokens)" in said and "one set per stream" in said
    known = [select.with_adapter(config) for config in select.load_table("NVIDIA H200", 132).values()]
    known += [select.choose(N, 4096, M, 0, True) for N in (1024, 4608, 40960) for M in (3, 16, 17, 64, 300)]
    known += [select.choose(N, 4096, M, 0, False) for N in (1024, 40960) for M in (3, 64)]
    for config in known:
        if config["kernel"] == "dense":
            continue
        assert (128 if config["kernel"] == "portable" else 64) % launch.tile_rows(config) == 0
        for rank in (4, 8, 200, 256):
            K, shards = 256, 3
            x, a = torch.empty(3, K).bfloat16(), torch.empty(shards * rank, K).bfloat16()
            lora = launch.fused_adapter(config, x, a, torch.empty(384, rank).bfloat16(), (128, 128, 128))
            assert (lora is not None) == (rank % 8 == 0 or config["kernel"] not in ("wgmma", "wide"))
