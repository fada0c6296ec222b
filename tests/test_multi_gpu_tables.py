"""The table of several GPUs: a ratio of two commits reaches nothing and misses nothing."""

import json
import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RESULT = BENCHMARKS / "results/multi_gpu_h200x2.json"


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


@pytest.fixture
def page_of(tables, tmp_path, monkeypatch):
    """The page where a row has other values; `None` leaves it out."""

    def page(changed: dict, before: tuple[dict, ...] = ()) -> str:
        record = json.loads(RESULT.read_text())
        rows = {row["name"]: row for row in record["multi_gpu"]}
        for name, values in changed.items():
            rows[name] = None if values is None else rows.get(name, rows["ours-dp"]) | values
        record["multi_gpu"] = [row | {"name": name} for name, row in rows.items() if row is not None]
        record["before"] = list(before)
        (tmp_path / "rows.json").write_text(json.dumps(record))
        return tables.multi_gpu()

    monkeypatch.setattr(tables, "RESULT", tmp_path / "rows.json")
    monkeypatch.setattr(tables.speed_tables, "measured_by", lambda *_: "there")
    return page


def test_one_gpu_of_another_commit_decides_nothing(page_of):
    page = page_of(
        {"ours-one": {"commit": "another", "sequences_per_second": 4.0}, "ours-dp": {"sequences_per_second": 7.9}}
    )
    assert said(page, "8 completions per process: data")[3:5] == ["1.98", "open: of two commits"]
    same = {"commit": "one", "device": "two"}
    page = page_of({"ours-one": same | {"sequences_per_second": 4.0}, "ours-dp": same | {"sequences_per_second": 7.4}})
    assert said(page, "8 completions per process: data")[3:5] == ["1.85", "no"]
    page = page_of(
        {
            "ours-one-of-64": same | {"sequences_per_second": 10.0},
            "ours-dp-of-64": same | {"sequences_per_second": 19.5},
        }
    )
    assert said(page, "64 completions per process: data")[3:5] == ["1.95", "yes"], "rows of their own"


def test_stock_trl_stands_beside_ours_where_it_ran(page_of):
    page = page_of({"stock-dp": {"sequences_per_second": 2.0}, "ours-dp": {"sequences_per_second": 8.0}})
    assert said(page, "data parallel")[-2] == "4.00"
    page = page_of({"stock-dp": None})
    assert said(page, "data parallel")[2] == "not run" and said(page, "data parallel")[-2] == ""
    assert "| stock-one" not in page, "nothing is planned for stock TRL"


def test_rows_of_one_commit_stand_beside_each_other(page_of):
    """Where the newest of ours has no twin, an older pair is shown; and which rows are of one machine is said."""
    named = {"name": "ours-one", "commit": "former", "device": "two x 2", "sequences_per_second": 3.0}
    former = json.loads(RESULT.read_text())["multi_gpu"][0] | named
    newer = {"commit": "newer", "machine": "12ab"}
    page = page_of(
        {
            "ours-one": newer | {"beside": "stock-one on the other GPU"},
            "ours-tp2": newer,
            "stock-one": {"commit": "former", "device": "two x 4", "sequences_per_second": 2.0},
        },
        (former,),
    )
    line = said(page, "one GPU |")
    assert line[-2] == "1.50" and line[4].endswith("at newer)") and "(of commit" not in line[4]
    beside = "ours-one (newer, beside stock-one on the other GPU)"
    assert f"On one machine, one after the other unless it says beside: {beside}, ours-tp2 (newer)." in page


def test_an_aim_is_judged_by_the_newest_two_of_one_commit(page_of):
    many, one = "ours-dp-of-64", "ours-one-of-64"
    by_name = {row["name"]: row for row in json.loads(RESULT.read_text())["multi_gpu"]}
    former = [
        by_name[name] | {"commit": commit, "device": "two x 2", "sequences_per_second": rate}
        for commit, rates in (("older", (21.0, 10.0)), ("oldest", (30.0, 10.0)))
        for name, rate in zip((many, one), rates, strict=True)
    ]
    page = page_of({many: {"commit": "newer"}, one: {"commit": "other"}}, tuple(former))
    line = said(page, "64 completions per process: data parallel")
    assert line[3:5] == ["2.1", "yes"] and re.search(
        r"\(older; [\d.]+ sequences per second at newer, 21\.0 here\)$", line[5]
    )


def test_rows_of_other_numbers_have_names_of_their_own(tables):
    import several_gpus

    assert several_gpus.row_name("ours-dp", "7b") == "ours-dp"
    assert several_gpus.row_name("ours-dp", "70b", 64) == "ours-dp-70b-of-64"
    assert {several_gpus.row_name(mode, "tiny", 64).partition("-of-")[0] for mode in several_gpus.MODES} <= set(
        several_gpus.ORDER
    )


def test_a_start_of_two_is_judged_beside_that_of_one(page_of):
    same = {"commit": "one", "device": "two"}
    page = page_of({"ours-one-1.5b-cold": same | {"start": 100.0}, "ours-dp-1.5b-cold": same | {"start": 121.0}})
    assert said(page, "start of two processes")[2:5] == ["at most 1.2", "1.21", "no"]
    page = page_of({"ours-one-1.5b-cold": {"commit": "another", "start": 100.0}})
    assert said(page, "start of two processes")[4] == "open: of two commits"


def test_a_twin_of_another_machine_is_told(page_of):
    """A ratio of two machines stood there as one of ours and stock TRL's."""
    one = {"commit": "one", "device": "two", "machine": "first"}
    mark = "(on another machine than stock TRL)"
    for machine in ("first", "second"):
        page = page_of({"ours-one": one, "stock-one": one | {"machine": machine}})
        assert (mark in said(page, "one GPU |")[4]) is (machine == "second")


def test_what_ran_beside_another_run_is_told(tables):
    """The page of whole steps had such times without a word."""
    rows = [row for row in json.loads(tables.speed_tables.STEP.read_text())["step"] if "beside" in row]
    whole = (BENCHMARKS.parent / "docs/source/benchmarks.md").read_text()
    assert rows and all(f"{row['name'].partition('-')[2]}, beside {row['beside']}" in whole for row in rows)


def test_a_step_that_took_far_longer_is_told_beside_the_median(page_of, tables):
    steps = [{"step": seconds} for seconds in (9.0, 9.0, 4.0, 12.0, 4.0)]
    row = {"steps": steps, "median": {"step": 4.0}}
    assert tables.in_brackets(row) == " (a step of 12.0 s among those counted)"
    assert tables.in_brackets(row | {"steps": steps[:3], "beside": "x"}) == " (beside x)"
    assert tables.in_brackets(row | {"steps": steps[:3]}) == ""
