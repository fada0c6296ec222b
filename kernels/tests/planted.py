"""Defects planted in copies of the kernels, and which CPU tests find them. Not part of the tests: some minutes.

python kernels/tests/planted.py                 writes kernels/benchmarks/results/planted.json and the table in HOW_IT_WORKS.md
python kernels/tests/planted.py --only bias     runs those whose name contains a word, and writes nothing
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
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent
RESULT = KERNELS / "benchmarks" / "results" / "planted.json"
PAGE = KERNELS / "HOW_IT_WORKS.md"
BEGIN, END = "<!-- planted: written by tests/planted.py -->\n", "<!-- end of planted -->\n"
#: those that look at what kernels compute, and are quick; tests of compilation and of whole products in Triton's interpreter take minutes
TESTS = (
    "test_kernels_emulated.py",
    "test_kernels_interpreter.py::test_the_backward_product_goes_through_the_dequantized_weight",
)
FIRST = {
    "hopper_wgmma": "test_wgmma",
    "hopper_adapt": "test_wgmma",
    "hopper_wide": "test_wgmma",
    "cost": "test_wgmma_where_the_last_step_is_a_part_of_one",
    "ampere": "test_mma",
    "launch": "test_skinny",
}  # where a file's defects are found soonest
LIMIT_S = 900


class Defect(NamedTuple):
    """What is replaced, once, in a file of the package."""

    name: str
    file: str
    old: str
    new: str


CONTROL = Defect("none", "launch", "import math", "import math")
WAIT = 'while gl.atomic_add(cnt_ptr, 0, sem="acquire") < p1 - pid:'
DEFECTS = (
    Defect("the sign of two codes is lost", "portable", "and.b32 t, t, 0x81C081C0; fma.rn.bf16x2 $2", "and.b32 t, t, 0x01C001C0; fma.rn.bf16x2 $2"),
    Defect("half of a word's codes come from the wrong bits", "portable", "shr.u32 u, $4, 8;", "shr.u32 u, $4, 4;"),
    Defect("scales are halved (skinny, wgmma)", "hopper", 'gl.constexpr("0x7a807a80")', 'gl.constexpr("0x7a007a00")'),
    Defect("scales are halved (conversion)", "hopper", 'gl.constexpr("0x3b803b80")', 'gl.constexpr("0x3b003b00")'),
    Defect("x is put in another order (conversion)", "hopper", "pairs = x.reshape([WK, BM, 4, 4, 2, 2])", "pairs = x.reshape([WK, BM, 4, 4, 2, 2]).permute([0, 1, 2, 3, 5, 4])"),
    Defect("scales are halved (portable)", "portable", "mov.b32 c1, 0x7a807a80;", "mov.b32 c1, 0x7a007a00;"),
    Defect("two scales change places", "hopper", "mov.b32 {$0, $1}, t;", "mov.b32 {$1, $0}, t;"),
    Defect("the sign is lost in quantizing", "elementwise", "lop3.b32 c{i}, 0x08080808,", "lop3.b32 c{i}, 0x00080808,"),
    Defect("no bias (skinny)", "hopper", "y += bias.to(gl.float32)[:, None]", "pass"),
    Defect("no bias (wgmma)", "hopper_wgmma", "acc += bias.to(gl.float32)[:, None]", "pass"),
    Defect("no tensor scale (wgmma)", "hopper_wgmma", "gl.div_rn(gs * 0.0 + 256.0, gs)", "gl.div_rn(gs * 0.0 + 256.0, gs * 0.0 + 64.0)"),
    Defect("scales from the wrong stage of the ring", "hopper_wgmma", "scales = s_sh.index(st * P + part)", "scales = s_sh.index(part)"),
    Defect("x into the wrong stage of the ring", "hopper_wgmma", "arrived.index(st * B + b), x_sh.index(st * 2 + h))", "arrived.index(st * B + b), x_sh.index(h))"),
    Defect("the groups do not wait for a full stage", "hopper_wgmma", "mbarrier.wait(full.index(st * B + h), phase)", "pass"),
    Defect("the loading warp does not wait for an empty stage", "hopper_wgmma", "mbarrier.wait(empty.index(st * B + b), phase)", "pass"),
    Defect("the last stage of a tile is given back before it was read", "hopper_wgmma", "acc = warpgroup_mma_wait(0, deps=[acc])\n        mbarrier.arrive", "mbarrier.arrive"),
    Defect("a barrier with one arrival too many", "hopper_wgmma", "2 if i % B else 3", "3"),
    Defect("the phase does not turn", "hopper_wgmma", "            if st == S:\n                st = 0\n                phase ^= 1\n        acc =", "            if st == S:\n                st = 0\n        acc ="),
    Defect("x is put in another order (wgmma)", "hopper_wgmma", "x.permute([0, 2, 4, 5, 1, 3])", "x.permute([0, 2, 5, 4, 1, 3])"),
    Defect("a lane takes its neighbour's byte (natural order)", "hopper_wgmma", "+ 0x4440  # zeros", "+ 0x4441  # zeros"),
    Defect("a word takes its neighbour's scale (natural order)", "hopper_wgmma", 'if i == 2 else ""', 'if i == 3 else ""'),
    Defect("the sign of the upper code is lost (natural order)", "hopper_wgmma", "and.b32 c, c, 0x80008000;", "and.b32 c, c, 0x00008000;"),
    Defect("the scales of other columns (natural order)", "hopper_wgmma", "scales[i][0], scales[i][1], AL", "scales[i // 2][0], scales[i // 2][1], AL"),
    Defect("words and scales of a row change places (natural order)", "hopper_wgmma", "v1, v3 = gl.split(odd)\n    L:", "v3, v1 = gl.split(odd)\n    L:"),
    Defect("x is put in another order (permute_kernel)", "portable", ".permute(0, 1, 3, 5, 6, 2, 4).reshape(BM, BK)\n    tl.store", ".permute(0, 1, 3, 6, 5, 2, 4).reshape(BM, BK)\n    tl.store"),
    Defect("a split tile does not wait for its pieces (wgmma)", "hopper_wgmma", WAIT, WAIT.replace("p1 - pid", "p1 - pid - 1")),
    Defect("the last piece of a split tile is forgotten", "hopper_wgmma", "for p in range(pid + 1, p1 + 1):", "for p in range(pid + 1, p1):"),
    Defect("a tile's counter is not set to zero", "hopper_wgmma", "gl.store(cnt_ptr, 0)", "pass"),
    Defect("cells of pieces are not emptied (skinny)", "hopper", "off * 0 - 1, mask=p + i <= p1", "off * 0 - 1, mask=p + i < p1"),
    Defect("pieces are not waited for (skinny)", "hopper", "await_words(pieces[i], off, ws_ptr + (p + i) * SIZE, PACK)", "pieces[i]"),
    Defect("the second buffer of cells is not emptied", "hopper", "for c in range(task * (NW * 128), LORA_CELLS,", "for c in range(task * (NW * 128), LORA_CELLS // 2,"),
    Defect("the ticket is not set back", "hopper", "G - 1, 65536 - G,", "G, 65536 - G,"),
    Defect("the adapter does not wait for x A^T", "hopper_adapt", "< task_rows(M, m_tile, BM) * (", "< 0 * ("),
    Defect("the last columns' step of x A^T is forgotten", "hopper_adapt", "steps = (K + C - 1) // C", "steps = K // C"),
    Defect("x A^T reads beyond a row's last column", "hopper_adapt", "gl.minimum((ks + 1) * steps // KS * C, K)", "(ks + 1) * steps // KS * C"),
    Defect("the last columns' step of a tile is forgotten", "cost", "math.ceil(K / UNIT)", "K // UNIT"),
    Defect("the last 128 columns of x in order are not filled up", "portable", "columns = (K + 127) // 128 * 128", "columns = K"),
    Defect("a second tile is written over the first one's last tokens (wide)", "hopper_wide", "1 if size(BM, i) == 16 else 0, size", "0, size"),
    Defect("flags are not lowered", "hopper_adapt", "gl.store(flag_ptr + i, 0)", "pass"),
    Defect("tasks are not counted from zero again", "hopper_adapt", "blocks * KS + gl.num_programs(0) - 1:", "blocks * KS + gl.num_programs(0) - 2:"),
    Defect("the third shard takes the second one's adapter", "hopper_adapt", "(n >= shards[1])", "(n >= shards[1] + 2**20)"),
    Defect("x is read before the kernel before has ended (wgmma)", "hopper_wgmma", "    if PDL:\n        gdc_wait()\n    st = 0", "    st = 0"),
    Defect("x is read before the kernel before has ended (skinny)", "hopper", "    if PDL:\n        gdc_wait()\n    if RANK", "    if RANK"),
    Defect("x is read before the kernel before has ended (permute_kernel)", "portable", "        gdc_launch_dependents()\n        gdc_wait()\n    m_M = tl.program_id(0) * BM", "        gdc_launch_dependents()\n    m_M = tl.program_id(0) * BM"),
    Defect("two arguments of a launch change places", "launch", "        M=M,\n        N=N,\n        K=K,\n        sxm=given.stride(0),", "        M=N,\n        N=M,\n        K=K,\n        sxm=given.stride(0),"),
    Defect("more programs than are resident", "launch", "sms * min(16, 48 // (WK * WN))", "sms * 64"),
    Defect("scratch memory too small for x A^T", "launch", "\"lora down\", mt * BM * rows, x.dtype)[: mt * BM * rows]", "\"lora down\", M * rows, x.dtype)[: mt * BM * rows]"),
    Defect("a barrier that nobody waits for", "hopper_wgmma", "raw = full\n    if PERMUTE:\n", "raw = full\n    if True:\n"),
    Defect("a copy is not waited for (mma)", "ampere", "async_copy.wait_group(NS - 2)", "async_copy.wait_group(NS - 1)"),
    Defect("x into the wrong stage of the ring (mma)", "ampere", "gl.where(stage == 0, NS - 1, stage - 1)", "stage"),
    Defect("words of a slice that is not its own (mma)", "ampere", "(it0 * 16 + k_w)[None, :]", "k_w[None, :]"),
    Defect("words and x in different orders (mma)", "ampere", "P = P.permute([0, 1, 3, 2, 4])", "P = P.permute([0, 1, 2, 3, 4])"),
    Defect("the last piece of a sliced tile is forgotten (mma)", "ampere", "for piece in range(splits):", "for piece in range(splits - 1):"),
    Defect("a tile's counter is not set to zero (mma)", "ampere", "gl.store(cnt_ptr + pid, 0)", "pass"),
    Defect("rows beyond the last are stored (mma)", "ampere", " & (n_o < N)[:, None]", ""),
    Defect("the second shard takes the first one's adapter (mma)", "ampere", "(row0 >= e1).to(gl.int32) + ", ""),
    Defect("x is read before the kernel before has ended (mma)", "ampere", "    if PDL:\n        gdc_wait()\n", ""),
    Defect("dX is mirrored", "ops", "dy.reshape(-1, N) @ weight)", "dy.reshape(-1, N) @ weight.flip(1))"),
)  # fmt: skip


class First:
    """A plug-in of pytest: the first test that fails, and how."""

    def __init__(self) -> None:
        self.test = self.how = None

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed and self.test is None:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.test, self.how = (
                report.nodeid.rsplit("/", 1)[-1],
                (crash.message if crash else str(report.longrepr)).splitlines()[0][:120],
            )

    def pytest_collectreport(self, report) -> None:
        self.pytest_runtest_logreport(report)


def run_tests(package_folder: str, answer: Path, soonest: str | None) -> None:
    """In a process of its own, which ends here."""
    import pytest

    sys.path[:0] = [package_folder, str(HERE)]
    os.chdir(HERE)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.alarm(LIMIT_S)  # a defect that hangs is found too
    first = First()
    tests = (f"{TESTS[0]}::{soonest}", *TESTS) if soonest else TESTS
    pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests], plugins=[first])
    import qerl_nvfp4

    assert qerl_nvfp4.__file__.startswith(package_folder), "another package was tested"
    answer.write_text(json.dumps({"by": first.test, "how": first.how}))
    os._exit(0)


def findings(defect: Defect) -> dict:
    """Which test fails first, how."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "qerl_nvfp4"
        shutil.copytree(KERNELS / "torch-ext" / "qerl_nvfp4", package, ignore=shutil.ignore_patterns("__pycache__"))
        path = package / f"{defect.file}.py"
        text = path.read_text()
        if text.count(defect.old) != 1:
            raise SystemExit(
                f"{defect.name}: {defect.old!r} stands {text.count(defect.old)} times in {path.name}, not once. Mend the table."
            )
        path.write_text(text.replace(defect.old, defect.new))
        answer, begin = Path(folder) / "answer.json", time.time()
        child = os.fork()  # which has imported everything but our package
        if child == 0:
            try:
                run_tests(folder, answer, FIRST.get(defect.file))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if answer.is_file():
            found = json.loads(answer.read_text())
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
            found = {"by": "no end", "how": f"more than {LIMIT_S} s"}
        else:
            raise SystemExit(f"{defect.name}: the tests did not run")
    return {"defect": defect.name, "file": f"{defect.file}.py", **found, "seconds": round(time.time() - begin)}


def table(rows: list[dict]) -> str:
    lines = [f"Of {len(rows)} planted defects {sum(r['by'] is not None for r in rows)} are found.", ""]
    lines += ["| defect | in | found by |", "|---|---|---|"]
    for row in rows:
        by = f"`{row['by'].removeprefix('test_kernels_')}`" if row["by"] else "**nothing**"
        lines.append(f"| {row['defect']} | `{row['file']}` | {by} |")
    return "\n".join(lines) + "\n"


def written(page: str, rows: list[dict]) -> str:
    """The page with the table of these rows."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table(rows) + END + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word in the names or files of the defects to run")
    parser.add_argument("--rows", type=Path, help="a file of results, one per line: those in it are not run again")
    given = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"
    for name in ("torch", "triton", "triton.experimental.gluon", "numpy", "pytest", "torch._dynamo"):
        importlib.import_module(name)
    known = {}
    if given.rows and given.rows.is_file():
        known = {row["defect"]: row for row in map(json.loads, given.rows.read_text().splitlines())}
    rows = []
    for defect in (CONTROL, *DEFECTS):
        if given.only not in f"{defect.name} {defect.file}.py":
            continue
        row = known.get(defect.name) or findings(defect)
        print(json.dumps(row), flush=True)
        if given.rows and defect.name not in known:
            with given.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
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
