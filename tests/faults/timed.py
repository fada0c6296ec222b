"""How long the gate of the faults takes: `python -m tests.faults.timed` runs `make faults` on an otherwise idle machine and writes timed.json,
which the documentation shows."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.commit import ROOT, commit

RESULT = Path(__file__).with_name("timed.json")
#: seconds that the gate may take
LIMIT_S = 300
_SUMMARY = re.compile(r"(\d+) (passed|failed|skipped|errors?)|in (\d+(?:\.\d+)?)s")


def summary(line: str) -> dict[str, Any]:
    """Outcomes and seconds of pytest's last line, such as `3 failed, 700 passed in 201.30s (0:03:21)`."""
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0}
    for count, outcome, seconds in _SUMMARY.findall(line):
        if seconds:
            found["seconds"] = float(seconds)
        else:
            found["failed" if outcome.startswith("error") else outcome] += int(count)
    return found


def line() -> str:
    """The documentation's sentence."""
    record = json.loads(RESULT.read_text())
    return (
        f"`{record['command']}` took {record['seconds']:.0f} s on {record['cores']} cores (at most {LIMIT_S}): {record['passed']} passed, "
        f"{record['failed']} failed, {record['skipped']} skipped. Commit {record['commit']}, [timed.json](tests/faults/timed.json), by "
        "`python -m tests.faults.timed`."
    )


def main() -> int:
    of = commit()
    done = subprocess.run(["make", "faults"], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    print(*lines[-30:], done.stderr[-2000:], sep="\n")
    record = {"command": "make faults", "commit": of, "cores": os.cpu_count(), **summary(lines[-1] if lines else "")}
    if "seconds" not in record:
        print(f"{RESULT.name} is as it was: the tests were not run to their end.")
        return done.returncode or 1
    beside = RESULT.with_suffix(".tmp")
    beside.write_text(json.dumps(record, indent=2) + "\n")
    beside.replace(RESULT)
    return done.returncode or int(record["seconds"] > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
