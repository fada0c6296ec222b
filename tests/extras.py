"""Do the extras of pyproject.toml resolve with the versions in constraints/? `python -m tests.extras [EXTRA ...]`
(`make resolve`) asks pip's resolver, which needs a package index and installs nothing, and writes docs/extras.json.
"""

import argparse
import datetime
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "docs" / "extras.json"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: extra -> constraints: the lock, or (with vLLM's CUDA build) the versions that ran on a GPU
EXTRAS = dict.fromkeys(("bnb", "eval", "gguf", "reasoning-gym", "report", "track"), "cpu.txt") | {"vllm": "gpu.txt"}


def asked(extra: str) -> list[Requirement]:
    return [Requirement(text) for text in PROJECT["optional-dependencies"][extra]]


def resolve(extra: str) -> dict[str, Any]:
    """pip's choice for `extra`: the extra's own packages, and the number of all; or its error."""
    found: dict[str, Any] = {"beside": EXTRAS[extra], "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    found["pip"] = importlib.metadata.version("pip")
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "pip", "--quiet", "install", "--dry-run", "--ignore-installed"]
        command += ["--report", report.name, "--constraint", str(ROOT / "constraints" / EXTRAS[extra]), f".[{extra}]"]
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            return found | {"resolves": False, "error": done.stderr[-1000:]}
        entries = json.loads(Path(report.name).read_text())["install"]
    versions = {canonicalize_name(e["metadata"]["name"]): e["metadata"]["version"] for e in entries}
    own = {name: versions[name] for name in sorted(canonicalize_name(r.name) for r in asked(extra))}
    return found | {"resolves": True, "packages": own, "in all": len(versions)}


def recorded() -> dict[str, Any]:
    """The content of docs/extras.json."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", help=f"default: {' '.join(EXTRAS)}")
    good = True
    for extra in parser.parse_args().extras or EXTRAS:
        found = resolve(extra)
        good &= found["resolves"]
        print(extra, json.dumps(found), flush=True)
        known = recorded() | {extra: found}
        RESULT.write_text(json.dumps({name: known[name] for name in EXTRAS if name in known}, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
