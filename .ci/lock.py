"""Write every installed distribution as a pip constraint: `python .ci/lock.py FILE` (see `make lock`)."""

import importlib.metadata
import platform
import sys
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

#: ourselves, and what installs
LEFT_OUT = {"pip", "qerl-trl"}


def constraints() -> list[str]:
    """`name==version`, sorted, without local parts: the constraint `torch==2.13.0` admits the build `2.13.0+cpu`."""
    versions = {
        canonicalize_name(d.metadata["Name"]): Version(d.version).public for d in importlib.metadata.distributions()
    }
    return [f"{name}=={version}" for name, version in sorted(versions.items()) if name not in LEFT_OUT]


if __name__ == "__main__":
    header = [
        "# The CPU environment of `make demo` and `make test`, complete: `pip install -c constraints/cpu.txt ...`.",
        f"# Written by `make lock` on Python {platform.python_version()}, {platform.system()} {platform.machine()}; "
        "do not edit.",
    ]
    Path(sys.argv[1]).write_text("\n".join([*header, *constraints()]) + "\n")
