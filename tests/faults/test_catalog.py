"""The list is complete, every mark is of a fault on it, and what the marks show meets the goals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import catalog, timed
from tests.faults.catalog import FAULTS, ITEMS, LISTED, NOT_HERE, NOT_THERE, at_843f908, shown


def test_the_list():
    assert len(LISTED) == 90 and len(set(FAULTS)) == len(FAULTS)
    assert not set(NOT_HERE) - set(FAULTS)
    assert not set(NOT_HERE) & set(shown()), "injected after all"


def test_the_goals():
    """No listed fault passes silently; of 88 a message that a test looks at says what to do; after 60 the same command goes on, after all of a
    resume."""
    found = shown()
    assert not [name for name in FAULTS if name not in found and name not in NOT_HERE]
    assert sum(found[name].remedy is True for name in LISTED if name in found) >= 88
    assert not [name for name, seen in found.items() if seen.remedy is None and not seen.recovered]
    recovered = {name for name in LISTED if name in found and found[name].recovered}
    assert len(recovered) >= 60
    assert not [name for name in LISTED if name.startswith("R6.") and name not in recovered]


def test_every_point_of_what_was_found_has_its_tests():
    named, tests = [name for faults in ITEMS.values() for name in faults.split()], catalog.tests_of()
    assert len(named) == len(set(named)) and not set(named) - set(FAULTS)
    assert not {name for name in FAULTS if name.startswith("S.")} - set(named)
    assert not [name for name in named if not tests.get(name)]
    assert not set(shown()) - set(tests), "a mark that no test carries"


def test_what_was_found_was_wrong_at_843f908():
    """Each point has a case that ran in a checkout of it, and whose product was wrong, gone, or not there without a cause; and is right since."""
    there = at_843f908()
    assert all(set(verdicts.split(", ")) <= {"silent", "lost", "crashed"} for verdicts in there.values())
    named = {name for faults in ITEMS.values() for name in faults.split()}
    assert named - set(there) == set(NOT_THERE)
    assert not [point for point, faults in ITEMS.items() if not set(faults.split()) & set(there)]
    assert all(set(said.split(", ")) <= {"told", "right", "no door"} for said in catalog.since()[1].values())


def test_a_fault_that_is_skipped_is_not_detected(tmp_path):
    """Its mark counts in the table whether or not it ran."""
    (tmp_path / "conftest.py").write_text("from tests.faults.conftest import pytest_runtest_makereport\n")
    (tmp_path / "test_faults.py").write_text(
        "import pytest\n"
        "def skipping(reason):\n"
        "    return pytest.mark.skipif(True, reason=reason)\n"
        "@pytest.mark.fault('R4.engine_dead')\n@skipping('needs vLLM')\ndef test_not_installed(): ...\n"
        "@pytest.mark.fault('R5.nan')\ndef test_inside(): pytest.skip('not today')\n"
        "@pytest.mark.fault('R1.no_cuda')\n@skipping('needs an NVIDIA GPU')\ndef test_gpu(): ...\n"
        "@pytest.mark.fault('R1.no_cuda')\n@skipping('set QERL_EXHAUSTIVE=1')\ndef test_opt_in(): ...\n"
        "@skipping('needs vLLM')\ndef test_of_no_fault(): ...\n"
        "@pytest.mark.fault('R5.nan')\ndef test_runs(): ...\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 1 and "1 failed, 1 passed, 3 skipped" in done.stdout and "1 error in" in done.stdout, (
        done.stdout
    )
    assert "R4.engine_dead: counted as detected, and not injected here (Skipped: needs vLLM)" in done.stdout
    assert "R5.nan: counted as detected" in done.stdout


def test_the_gate_was_timed():
    assert timed.summary("=== 3 failed, 578 passed, 2 skipped, 108 warnings, 1 error in 170.72s (0:02:50) ===") == {
        "passed": 578, "failed": 4, "skipped": 2, "seconds": 170.72,
    }  # fmt: skip
    record = json.loads(timed.RESULT.read_text())
    assert record["seconds"] <= timed.LIMIT_S and not record["failed"]


@pytest.mark.parametrize("printed", ["", "make: *** [Makefile:70: faults] Error 2"])
def test_a_gate_that_was_not_run_to_its_end_is_not_recorded(tmp_path, monkeypatch, printed):
    monkeypatch.setattr(timed, "RESULT", tmp_path / "timed.json")
    monkeypatch.setattr(timed, "commit", lambda: "f3db232")
    monkeypatch.setattr(timed.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 2, printed, ""))
    assert timed.main() == 2 and not timed.RESULT.exists()
