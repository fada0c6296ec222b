"""The table of several GPUs: a ratio of two sessions reaches nothing and misses nothing."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "examples/benchmarks"


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import multi_gpu_tables

    yield multi_gpu_tables
    sys.modules.pop("multi_gpu_tables")


def said(page: str, what: str) -> list[str]:
    return [
        cell.strip() for cell in next(line for line in page.splitlines() if line.startswith(f"| {what}")).split("|")
    ]


def test_one_gpu_of_another_session_decides_nothing(tables, tmp_path, monkeypatch):
    record = json.loads(tables.RESULT.read_text())
    record["multi_gpu"] = [row for row in record["multi_gpu"] if row["name"] != "ours-one"]
    (tmp_path / tables.RESULT.name).write_text(json.dumps(record))
    monkeypatch.setattr(tables, "RESULT", tmp_path / tables.RESULT.name)
    monkeypatch.setattr(tables.speed_tables, "measured_by", lambda *_: "there")
    page = tables.multi_gpu()
    assert said(page, "data parallel")[4] == said(page, "a server with")[4] == "open: of two sessions"
    assert said(page, "sync to a server")[4] == "yes" and "another session, machine and commit" in page

    dp = next(row for row in record["multi_gpu"] if row["name"] == "ours-dp")
    record["multi_gpu"] += [dp | {"name": "ours-one", "batch": 8, "median": dp["median"] | {"step": 2.2}}]
    record["multi_gpu"] += [dp | {"name": "ours-dp-of-64"}]  # a row of its own, in no comparison with 8
    stock = {key: value for key, value in dp.items() if key not in ("workload", "planned_gib", "parts_gib")}
    record["multi_gpu"] += [stock | {"name": "stock-dp"}, {"name": "stock-fsdp2", "failed": ["late"], "commit": "1"}]
    (tmp_path / tables.RESULT.name).write_text(json.dumps(record))
    page = tables.multi_gpu()
    assert said(page, "data parallel")[3:5] == ["1.96", "yes"] and said(page, "a server with")[4] == "no"
    assert "another session" not in page and "of-64" not in page
    assert "| stock" not in page, "nothing is planned for stock TRL, and what failed says nothing"


def test_rows_of_other_numbers_have_names_of_their_own(tables):
    import multi_gpu

    assert multi_gpu.row_name("ours-dp", "7b") == "ours-dp"
    assert multi_gpu.row_name("ours-dp", "70b", 64) == "ours-dp-70b-of-64"
    assert {multi_gpu.row_name(mode, "tiny", 64).partition("-of-")[0] for mode in multi_gpu.MODES} <= set(
        multi_gpu.ORDER
    )
