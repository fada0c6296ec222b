"""The table of TRL's own tests on our trainers, and with a clone of TRL (`QERL_TRL_CHECKOUT`) a few of the tests."""

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
            assert words == run.BETTER or (arm == "nvfp4" and words in {text for _, text in run.DIFFERENCES})
        assert all(row[arm] == row["stock"] for arm in TABLE["counts"] if arm not in row.get("why", {}))
        assert row.get("why", {}).get("full") in (None, run.BETTER)  # with the same weights, the same as stock


@pytest.mark.skipif("QERL_TRL_CHECKOUT" not in os.environ, reason="needs a clone of TRL (QERL_TRL_CHECKOUT)")
@pytest.mark.parametrize("arm", run.ARMS)
def test_a_few_of_them(arm, tmp_path):
    stand_ins.write(tmp_path / "home")
    checkout = Path(os.environ["QERL_TRL_CHECKOUT"])
    chosen = ["-k", "test_init_minimal or rollout_func_raises or test_train_multiple_iterations"]
    rows = run.run_arm(arm, checkout, tmp_path / "home", tmp_path, chosen)
    trained = "passed" if arm in ("stock", "full") else run.ASKED_OF_THE_ADAPTER
    for test, row in rows.items():
        assert row["outcome"] == (trained if "test_train" in test else "passed"), test
