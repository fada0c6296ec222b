"""Write the README's tables from the committed measurements; `--check` only compares.

A table stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))

import embedded_arms  # noqa: E402

README = ROOT / "README.md"


def embedded() -> str:
    record = json.loads(embedded_arms.RESULTS.read_text())
    first = record["runs"][0]
    source = embedded_arms.RESULTS.relative_to(ROOT)
    return (
        f"{embedded_arms.table(record)}\n\n{first['steps']} steps, {first['before']['total']} held-out problems, accuracy in percent; "
        f"{first['device']}, torch {first['versions']['torch']}, trl {first['versions']['trl']}; commit {record['commit']}, "
        f"[{source.name}]({source})."
    )


TABLES: dict[str, Callable[[], str]] = {"embedded_arms": embedded}


def filled(text: str) -> str:
    """`text` with every known table replaced."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"README.md has no place for the table {name!r}: add its begin and end comments.")
        text = pattern.sub(lambda match, make=make: f"{match[1]}{make()}\n{match[2]}", text)
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    current = README.read_text()
    new = filled(current)
    if not check:
        README.write_text(new)
    elif new != current:
        sys.exit("README.md differs from the measurements; run python examples/benchmarks/readme_tables.py")
