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


@pytest.mark.skipif("QERL_TRL_CHECKOUT" not in os.environ, reason="needs a clone of TRL (QERL_TRL_CHECKOUT)")
@pytest.mark.parametrize("arm", run.ARMS)
def test_a_few_of_them(arm, tmp_path):
    stand_ins.write(tmp_path / "home")
    checkout = Path(os.environ["QERL_TRL_CHECKOUT"])
    rows = run.run_arm(arm, checkout, tmp_path / "home", tmp_path, ["-k", "test_init_minimal or rollout_func_raises"])
    assert {row["outcome"] for row in rows.values()} == {"passed"}
