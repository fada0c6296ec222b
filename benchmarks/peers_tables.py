"""Tables of third-party code on this package: PEFT's tuners, TRL's tests and notebooks, other versions."""

import json
from pathlib import Path

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
    rows = [f"| tuners | {' | '.join(cells)} |", f"|---|{'---|' * len(cells)}"]
    rows += [f"| {', '.join(names)} | {' | '.join(values)} |" for values, names in alike.items()]
    source = TUNERS.relative_to(ROOT)
    return "\n".join(rows) + f"\n\npeft {record['versions']['peft']}, [{source.name}]({source})."


def peers() -> str:
    """TRL's own tests on our trainers, and every difference in words."""
    record = json.loads(PEERS.read_text())
    known = ("passed", ASKED_OF_THE_ADAPTER, "failed", "skipped")
    asked = any(ASKED_OF_THE_ADAPTER in of for of in record["counts"].values())
    outcomes = [name for name in known if asked or name != ASKED_OF_THE_ADAPTER]
    rows = [f"| trainers | {' | '.join(outcomes)} | otherwise than in stock |", "|---" * (len(outcomes) + 2) + "|"]
    reasons: dict[tuple[str, str], int] = {}
    for arm, counts in record["counts"].items():
        why = [row["why"][arm] for row in record["tests"].values() if arm in row.get("why", {})]
        otherwise = len(why) - counts.get(ASKED_OF_THE_ADAPTER, 0)
        rows.append(f"| {arm} | {' | '.join(str(counts.get(outcome, 0)) for outcome in outcomes)} | {otherwise} |")
        for words in why:
            reasons[arm, words] = reasons.get((arm, words), 0) + 1
    versions, source = record["versions"], PEERS.relative_to(ROOT)
    rows += ["", "The differences, all of them:", ""]
    rows += [f"- {arm}, {count} test{'s' * (count > 1)}: {words}" for (arm, words), count in reasons.items()]
    return "\n".join(rows) + (
        f"\n\nTRL {versions['trl']} and the tests of {versions['tests of trl']}, transformers "
        f"{versions['transformers']}, peft {versions['peft']}, torch {versions['torch']}, on a CPU, "
        f"commit {record['commit']}, [{source.name}]({source})."
    )


def notebooks() -> str:
    """TRL's notebooks as runs of this package, and their changed lines."""
    record = json.loads(NOTEBOOKS.read_text())
    common, *more = [list(map(tuple, row["diff"])) for row in record["notebooks"].values()]
    shared = [pair for pair in common if all(pair in other for other in more)]
    parts = ["The lines that all of them change:", _diff(shared)]
    for name, row in record["notebooks"].items():
        own = [tuple(pair) for pair in row["diff"] if tuple(pair) not in shared]
        parts.append(f"`{name}`: {row['outcome']}" + (", with these lines changed as well:" if own else "."))
        parts += [_diff(own)] if own else []
    left = "; ".join(f"`{name}` ({why})" for name, why in record["left out"].items())
    versions, source = record["versions"], NOTEBOOKS.relative_to(ROOT)
    return "\n\n".join(parts) + (
        f"\n\nLeft out: {left}. TRL {versions['trl']} and the notebooks of {versions['notebooks of trl']}, "
        f"transformers {versions['transformers']}, peft {versions['peft']}, on a CPU, commit {record['commit']}, "
        f"[{source.name}]({source})."
    )


def _diff(pairs: list[tuple[str, str]]) -> str:
    lines: list[str] = []
    for old, new in pairs:
        before, after = old.strip("\n").splitlines(), new.strip("\n").splitlines()
        lines += [f"-{line}" for line in before if line.strip() and line not in after]
        lines += [f"+{line}" for line in after if line.strip() and line not in before]
    return "\n".join(["```diff", *lines, "```"])


def window() -> str:
    """Results of the tests on package versions other than the lock file's."""
    record = json.loads(WINDOW.read_text())
    optional = [p for p in window_of_versions.OPTIONAL if any(p in row["versions"] for row in record.values())]
    packages = [*window_of_versions.PACKAGES, *optional]
    rows = [f"| | {' | '.join(packages)} | passed | failed | skipped |", "|" + "---|" * (len(packages) + 4)]
    ran: dict[tuple[str, str], list[str]] = {}
    for name, row in record.items():
        counts = [str(row["passed"]), str(len(row["failed"])), str(row["skipped"])]
        versions = [row["versions"].get(package, "" if package in optional else "not recorded") for package in packages]
        rows.append(f"| {' | '.join([name, *versions, *counts])} |")
        tests = ", ".join(f"`{test}`" for test in sorted(row["tests"]))
        ran.setdefault((tests, row["commit"]), []).append(name)
    failed = sorted({test for row in record.values() for test in row["failed"]})
    why = "".join(f"- `{test.rpartition('::')[2]}`: {window_of_versions.KNOWN[test]}\n" for test in failed)
    of = "".join(f"- {' and '.join(names)}: {tests}, commit {commit}\n" for (tests, commit), names in ran.items())
    return "\n".join(rows) + (
        (f"\n\nWhat failed:\n\n{why}" if failed else "\n")
        + f"\nThe tests, on a CPU ([{WINDOW.name}]({WINDOW.relative_to(ROOT)})):\n\n{of}"
    ).rstrip("\n")
