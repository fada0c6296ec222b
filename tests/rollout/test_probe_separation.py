"""The table of the probe's separation, judged anew by the rules that ship, from the records of real engines on a
GPU."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import probe_separation  # noqa: E402

ENGINES = json.loads(probe_separation.RESULT.read_text())
ROWS = {row["fault"]: row for row in probe_separation.table(ENGINES)}


def test_no_healthy_engine_is_refused():
    healthy = ROWS["healthy"]
    assert healthy["engines"] >= 12 and healthy["passed"] >= 200 and not healthy["refused"]
    assert healthy["undecided"] <= 0.04 * healthy["passed"]
    at_start = probe_separation.table(ENGINES, lambda record: not record["updates"])[0]["margins"]
    assert min(margin for margin in at_start.values() if margin) >= 2


@pytest.mark.parametrize("fault", probe_separation.FAULTS)
def test_every_fault_is_refused(fault):
    row = ROWS[fault]
    assert row["refused"] >= 49 and row["undecided"] <= 3 and not row["passed"]
    assert min(margin for margin in row["margins"].values() if margin) >= 1.3


def test_the_documentation_has_the_table():
    assert probe_separation.markdown().splitlines()[2] in (ROOT / "docs/source/rollout.md").read_text()
