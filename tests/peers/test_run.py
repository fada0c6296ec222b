"""The table of TRL's own tests on our trainers, and, where a clone of TRL is at hand (`QERL_TRL_CHECKOUT`), a few of them themselves."""

import json
import os
from pathlib import Path

import pytest

from tests.peers import run, stand_ins

TABLE = json.loads(run.RESULT.read_text())


def test_every_difference_is_on_the_list():
    assert run.unexplained(TABLE["tests"]) == []
    assert len(TABLE["tests"]) > 200
    for row in TABLE["tests"].values():
        for arm, words in row.get("why", {}).items():
            assert words == run.BETTER or words in {text for arms, _, text in run.DIFFERENCES if arm in arms}
        assert all(row[arm] == row["stock"] for arm in TABLE["counts"] if arm not in row.get("why", {}))


def test_full_is_stock():
    """All that stock does, in a trainer with the same weights."""
    assert {words for row in TABLE["tests"].values() for words in [row.get("why", {}).get("full")]} <= {
        None,
        run.BETTER,
    }


def test_a_difference_that_nobody_has_explained_is_found():
    rows = {
        "a": {
            "stock": {"outcome": "passed", "message": ""},
            "nvfp4": {"outcome": "failed", "message": "KeyError: 'x'"},
        },
        "b": {"stock": {"outcome": "passed", "message": ""}, "nvfp4": {"outcome": "passed", "message": ""}},
        "c": {"stock": {"outcome": "failed", "message": "no"}, "nvfp4": {"outcome": "passed", "message": ""}},
    }
    compared = run.compare(rows)
    (text,) = run.unexplained(compared)
    assert text.startswith("a [nvfp4]: passed in stock, failed here: KeyError")
    assert compared["b"] == {"stock": "passed", "nvfp4": "passed"}
    assert compared["c"]["why"] == {"nvfp4": run.BETTER}


def test_what_is_asked_of_the_adapter_has_a_column_of_its_own(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(run.ROOT / "benchmarks"))
    import peers_tables

    asked = {"outcome": run.ASKED_OF_THE_ADAPTER, "message": "the frozen base has not changed, all that is trained has"}
    passed, failed = ({"outcome": outcome, "message": "no"} for outcome in ("passed", "failed"))
    results = {"stock": {"a": passed, "b": passed, "c": failed}, "nvfp4": {"a": asked, "b": passed, "c": failed}}
    (tmp_path / "VERSION").write_text("0")
    record = run.record(results, tmp_path, "0000000")
    assert run.unexplained(record["tests"]) == []
    table = peers_tables.peers_of(record)
    assert "| trainers | passed | passed, asked of the adapter | failed | skipped | otherwise than in stock |" in table
    assert "| stock | 2 | 0 | 1 | 0 | 0 |" in table and "| nvfp4 | 1 | 1 | 1 | 0 | 0 |" in table
    assert "- nvfp4, 1 test: the test asks whether every weight has changed" in table


@pytest.mark.skipif("QERL_TRL_CHECKOUT" not in os.environ, reason="needs a clone of TRL (QERL_TRL_CHECKOUT)")
@pytest.mark.parametrize("arm", run.ARMS)
def test_a_few_of_them(arm, tmp_path):
    stand_ins.write(tmp_path / "home")
    checkout = Path(os.environ["QERL_TRL_CHECKOUT"])
    rows = run.run_arm(
        arm,
        checkout,
        tmp_path / "home",
        tmp_path,
        ["-k", "test_init_minimal or rollout_func_raises or test_train_multiple_iterations"],
    )
    trained = "passed" if arm in ("stock", "full") else run.ASKED_OF_THE_ADAPTER
    assert {test: row["outcome"] for test, row in rows.items()} == {
        test: trained if "test_train" in test else "passed" for test in rows
    }
