"""The table of the probe's separation, judged anew by the rules that ship, from the records of real engines on a
GPU."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import probe_separation  # noqa: E402

ROWS = {row["fault"]: row for row in probe_separation.table(json.loads(probe_separation.RESULT.read_text()))}


def test_no_healthy_engine_is_refused():
    assert ROWS["healthy"]["passed"] >= 90 and not ROWS["healthy"]["refused"]
    assert min(margin for margin in ROWS["healthy"]["margins"].values() if margin) >= 2


@pytest.mark.parametrize("fault", probe_separation.FAULTS)
def test_every_fault_is_refused(fault):
    row = ROWS[fault]
    assert row["refused"] >= 10 and not row["passed"]


def test_the_documentation_has_the_table():
    assert probe_separation.markdown().splitlines()[2] in (ROOT / "docs/source/rollout.md").read_text()
