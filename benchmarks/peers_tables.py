"""Tables of third-party code on this package: PEFT's tuners, TRL's tests and notebooks, other versions."""

import json
from collections import Counter
from pathlib import Path

from speed_tables import table
from tests import window as window_of_versions
from tests.peers.run import ASKED_OF_THE_ADAPTER

ROOT = Path(__file__).resolve().parents[1]
TUNERS = ROOT / "docs/peft.json"
PEERS = ROOT / "docs/peers.json"
NOTEBOOKS = ROOT / "docs/notebooks.json"
WINDOW = ROOT / "docs/window.json"


def tuners() -> str:
    """PEFT's tuners on packed layers, by equal results."""
    record = json.loads(TUNERS.read_text())
    cells = list(next(iter(record["tuners"].values())))
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, found in record["tuners"].items():
        alike.setdefault(tuple(value.partition(":")[0] for value in found.values()), []).append(name)
    source, rows = TUNERS.relative_to(ROOT), [[", ".join(names), *values] for values, names in alike.items()]
    by = f"\n\npeft {record['versions']['peft']}, [{source.name}]({source})."
    return table(["tuners", *cells], rows, left=1 + len(cells)) + by


def peers() -> str:
    """TRL's own tests on our trainers, and every difference in words."""
    record = json.loads(PEERS.read_text())
    known = ("passed", ASKED_OF_THE_ADAPTER, "failed", "skipped")
    asked = any(ASKED_OF_THE_ADAPTER in of for of in record["counts"].values())
    outcomes = [name for name in known if asked or name != ASKED_OF_THE_ADAPTER]
    rows, reasons = [], []
    for arm, counts in record["counts"].items():
        why = Counter(row["why"][arm] for row in record["tests"].values() if arm in row.get("why", {}))
        otherwise = why.total() - counts.get(ASKED_OF_THE_ADAPTER, 0)
        rows.append([arm, *(str(counts.get(outcome, 0)) for outcome in outcomes), str(otherwise)])
        reasons += [f"- {arm}, {count} test{'s' * (count > 1)}: {words}" for words, count in why.items()]
    versions, source = record["versions"], PEERS.relative_to(ROOT)
    differences = "\n".join(reasons)
    return table(["trainers", *outcomes, "otherwise than in stock"], rows) + (
        f"\n\nThe differences:\n\n{differences}\n\nTRL {versions['trl']} and the tests of {versions['tests of trl']}, "
        f"transformers {versions['transformers']}, peft {versions['peft']}, torch {versions['torch']}, on a CPU, "
        f"commit {record['commit']}, [{source.name}]({source})."
    )


def notebooks() -> str:
    """TRL's notebooks as runs of this package."""
    record = json.loads(NOTEBOOKS.read_text())
    ran = ", ".join(f"`{name}`: {row['outcome']}" for name, row in record["notebooks"].items())
    left = "; ".join(f"`{name}` ({why})" for name, why in record["left out"].items())
    versions, source = record["versions"], NOTEBOOKS.relative_to(ROOT)
    return (
        f"{ran}. Left out: {left}. TRL {versions['trl']} and the notebooks of {versions['notebooks of trl']}, "
        f"transformers {versions['transformers']}, peft {versions['peft']}, on a CPU, commit {record['commit']}; the "
        f"changed lines are in [{source.name}]({source})."
    )


def window() -> str:
    """Results of the tests on package versions other than the lock file's."""
    record = json.loads(WINDOW.read_text())
    optional = [p for p in window_of_versions.OPTIONAL if any(p in row["versions"] for row in record.values())]
    packages = [*window_of_versions.PACKAGES, *optional]
    rows = []
    for name, row in record.items():
        versions = [row["versions"].get(package, "" if package in optional else "not recorded") for package in packages]
        rows.append([name, *versions, str(row["passed"]), str(len(row["failed"])), str(row["skipped"])])
    failed = sorted({test for row in record.values() for test in row["failed"]})
    notes = [f"Failed: `{test.rpartition('::')[2]}`: {window_of_versions.KNOWN[test]}." for test in failed]
    notes.append(f"On a CPU; tests and commits are in [{WINDOW.name}]({WINDOW.relative_to(ROOT)}).")
    heads = ["", *packages, "passed", "failed", "skipped"]
    return table(heads, rows, left=1 + len(packages)) + "\n\n" + " ".join(notes)
