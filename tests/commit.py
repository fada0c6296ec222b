"""The commit of a committed table."""

import subprocess
from pathlib import Path

from benchmarks import common

ROOT = Path(__file__).resolve().parents[1]
#: code with an effect on a table
CODE = ("src", "tests", "kernels/torch-ext")


def commit() -> str:
    """The current one, shortened, with a `+` if `CODE` was changed since."""
    asked = ["git", "-C", str(ROOT), "status", "--porcelain", "--", *CODE]
    changed = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return (common.commit() or "unknown")[:7] + ("+" if changed else "")


def commits(known: list[str], whole: bool) -> list[str]:
    """Commits of a table made again, whole or in part."""
    return list(dict.fromkeys([*([] if whole else known), commit()]))
