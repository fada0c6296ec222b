"""The page shows this list of TRL's notebooks; with a clone of TRL (`QERL_TRL_CHECKOUT`) one of them is executed."""

import json
import os
from pathlib import Path

import pytest

from tests.peers import notebooks

TABLE = json.loads(notebooks.RESULT.read_text())


def test_the_page_is_of_this_list_and_all_of_it_ran():
    outcomes = {name: {"outcome": "passed"} for name in notebooks.NOTEBOOKS}
    assert {key: TABLE[key] for key in ("notebooks", "left out")} == json.loads(json.dumps(notebooks.table(outcomes)))


@pytest.mark.skipif("QERL_TRL_CHECKOUT" not in os.environ, reason="needs a clone of TRL (QERL_TRL_CHECKOUT)")
def test_one_of_them():
    assert notebooks.run("grpo_trl_lora_qlora", Path(os.environ["QERL_TRL_CHECKOUT"])) == {"outcome": "passed"}
