"""Of which code a committed table is."""

import subprocess
from pathlib import Path

from benchmarks import common

ROOT = Path(__file__).resolve().parents[1]
#: what decides a table; the tables themselves, the pages and what runs beside them do not
CODE = ("src", "tests", "kernels/torch-ext")


def commit() -> str:
    """Of what runs, shortened; with a `+` where `CODE` differs from it."""
    asked = ["git", "-C", str(ROOT), "status", "--porcelain", "--", *CODE]
    changed = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return (common.commit() or "unknown")[:7] + ("+" if changed else "")


def commits(known: list[str], whole: bool) -> list[str]:
    """Of a table that was made again, whole or in part."""
    return list(dict.fromkeys([*([] if whole else known), commit()]))
