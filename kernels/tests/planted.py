"""Defects planted in copies of the kernels, and the CPU tests that find them. Not part of the tests: some minutes.

python kernels/tests/planted.py                 # results into results/planted.json, the table into HOW_IT_WORKS.md
python kernels/tests/planted.py --only bias     # defects with a word in their name or file; nothing is written

kernels/benchmarks/results/planted.json also defines the defects: `old` is in `file` once, and is replaced by `new`.
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent
RESULT = KERNELS / "benchmarks" / "results" / "planted.json"
PAGE = KERNELS / "HOW_IT_WORKS.md"
BEGIN, END = "<!-- planted: written by tests/planted.py -->\n", "<!-- end of planted -->\n"
#: the quick tests of the kernels' results; compilation and whole products in Triton's interpreter take minutes
TESTS = (
    "test_kernels_emulated.py",
    "test_kernels_interpreter.py::test_fp8_is_bit_equal",
    "test_kernels_interpreter.py::test_fp8_products",
    "test_kernels_interpreter.py::test_the_backward_product_goes_through_the_dequantized_weight",
    "test_kernels_interpreter.py::test_gemm[W4A8-one-token-bf16]",
)
FIRST = {
    "hopper_wgmma": "test_wgmma",
    "hopper_adapt": "test_wgmma",
    "cost": "test_wgmma_where_the_last_step_is_a_part_of_one",
    "ampere": "test_mma",
    "launch": "test_skinny",
    "ops": "test_kernels_interpreter",
    "portable": "W4A8",
}  # by file, the test that finds its defects soonest
LIMIT_S = 900
CONTROL = {"defect": "none", "file": "launch.py", "old": "import math", "new": "import math"}


class First:
    """A plug-in of pytest: the tests with a word in their name first; the first that fails, and how."""

    def __init__(self, word: str) -> None:
        self.word, self.test, self.how = word, None, None

    def pytest_collection_modifyitems(self, items) -> None:
        items.sort(key=lambda item: (self.word not in item.nodeid, "interpreter" in item.nodeid))

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed and self.test is None:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.test = report.nodeid.rsplit("/", 1)[-1]
            self.how = (crash.message if crash else str(report.longrepr)).splitlines()[0][:120]

    pytest_collectreport = pytest_runtest_logreport


def run_tests(package_folder: str, answer: Path, soonest: str) -> None:
    """In a process of its own, which ends here."""
    import pytest

    sys.path[:0] = [package_folder, str(HERE)]
    os.chdir(HERE)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.alarm(LIMIT_S)  # a defect that hangs is found too
    first = First(soonest)
    pytest.main(["-q", "-x", "-p", "no:cacheprovider", *TESTS], plugins=[first])
    import qerl_nvfp4

    assert qerl_nvfp4.__file__.startswith(package_folder), "another package was tested"
    answer.write_text(json.dumps({"by": first.test, "how": first.how}))
    os._exit(0)


def findings(defect: dict[str, Any]) -> dict[str, Any]:
    """The defect with the first test that fails, and how."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "qerl_nvfp4"
        shutil.copytree(KERNELS / "torch-ext" / "qerl_nvfp4", package, ignore=shutil.ignore_patterns("__pycache__"))
        path = package / defect["file"]
        text = path.read_text()
        if text.count(defect["old"]) != 1:
            raise SystemExit(f"{defect['defect']}: `old` is not in {path.name} once. Mend {RESULT.name}.")
        path.write_text(text.replace(defect["old"], defect["new"]))
        answer, begin = Path(folder) / "answer.json", time.time()
        child = os.fork()  # which has imported everything but our package
        if child == 0:
            try:
                run_tests(folder, answer, FIRST.get(path.stem, ""))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if answer.is_file():
            found = json.loads(answer.read_text())
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
            found = {"by": "no end", "how": f"more than {LIMIT_S} s"}
        else:
            raise SystemExit(f"{defect['defect']}: the tests did not run")
    return {**defect, **found, "seconds": round(time.time() - begin)}


def table(rows: list[dict]) -> str:
    """Defects by file; each one's test is in the JSON."""
    lines = [f"Of {len(rows)} planted defects {sum(r['by'] is not None for r in rows)} are found.", ""]
    lines += ["| file | planted | found |", "|---|---:|---:|"]
    for file in sorted({row["file"] for row in rows}):
        found = [row["by"] is not None for row in rows if row["file"] == file]
        lines.append(f"| `{file}` | {len(found)} | {sum(found)} |")
    lines += [f"| not found: {row['defect']} | | |" for row in rows if not row["by"]]
    return "\n".join(lines) + "\n"


def written(page: str, rows: list[dict]) -> str:
    """The page with the table of these rows."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table(rows) + END + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word in the names or files of the defects to run")
    given = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"
    for name in ("torch", "triton", "triton.experimental.gluon", "numpy", "pytest", "torch._dynamo"):
        importlib.import_module(name)
    record = json.loads(RESULT.read_text())
    rows = []
    for defect in (CONTROL, *record["defects"]):
        if given.only not in f"{defect['defect']} {defect['file']}":
            continue
        row = findings(defect)
        print(row["defect"], row["by"], row["seconds"], flush=True)
        if defect is not CONTROL:
            rows.append(row)
        elif row["by"]:
            raise SystemExit("A test fails without any defect.")
    print(f"{sum(row['by'] is not None for row in rows)} of {len(rows)} found")
    if not given.only:
        RESULT.write_text(json.dumps({"tests": TESTS, "defects": rows}, indent=1) + "\n")
        PAGE.write_text(written(PAGE.read_text(), rows))


if __name__ == "__main__":
    main()
