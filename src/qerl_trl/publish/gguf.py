"""GGUF files as models: unpacked once into a sealed bf16 folder, and written by llama.cpp's converter."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME
from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers import modeling_gguf_pytorch_utils as loader

from ..checkpoint import seal
from ..nvfp4.checkpoints import TensorSpec
from ..nvfp4.config import auto_class_of
from . import write

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
#: `tokenizer.ggml.pre` -> pieces of text, for vocabularies that transformers splits as GPT-2's
_PIECES = {
    "smollm": r"\p{N}",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def folder_of(model: str | os.PathLike) -> str:
    """Return the folder of an unpacked `.gguf` file, in Hugging Face's cache; any other `model` unchanged."""
    path = Path(model)
    if path.suffix != ".gguf" or not path.is_file():
        return str(model)
    if not loader.is_gguf_available():
        raise ImportError(f"{model} is a GGUF file, and the package gguf is missing: pip install 'qerl-trl[gguf]'.")
    sha256 = seal.sha256(path)
    folder = Path(HF_HOME, "qerl-trl", f"{path.name}-{sha256[:12]}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one rank unpacks, the others wait
        if not (folder / seal.MANIFEST_NAME).is_file():
            _unpack(path, folder, sha256)
    return str(folder)


def _unpack(path: Path, folder: Path, sha256: str) -> None:
    """Write the model tensor by tensor, in transformers' layout, tied and with special tokens as in the file."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config, tokenizer = AutoConfig.from_pretrained(path.parent, gguf_file=path.name), _tokenizer(path, reader.fields)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    config.dtype, config.gguf_sha256 = torch.bfloat16, sha256
    if _HEAD in tensors:
        stored = sorted((tensors[_EMBEDDING], tensors[_HEAD]), key=lambda tensor: tensor.n_bytes)
        one, other = (dequantize(tensor.data[::97], tensor.tensor_type) for tensor in stored)
        if one.shape == other.shape and ((one - other) ** 2).sum() < 0.01 * (other**2).sum():  # roundings of one matrix
            tensors[_EMBEDDING], config.tie_word_embeddings = stored[1], True
    if "rope_freqs.weight" in tensors:  # Llama 3.1's positions, which transformers leaves out
        scaled = {"factor": float(tensors["rope_freqs.weight"].data.max()), "original_max_position_embeddings": 8192}
        config.rope_parameters |= {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **scaled}
    with torch.device("meta"):
        model = auto_class_of(config).from_config(config)
    config.architectures = [type(model).__name__]
    kind = loader.TENSOR_PROCESSORS.get(reader.fields["general.architecture"].contents(), loader.TensorProcessor)
    processor = kind(config=config.to_dict())
    names = loader.get_gguf_hf_weights_map(model, processor)
    parts: dict[str, list[Any]] = {}
    for name, tensor in tensors.items():
        parts.setdefault(names.get(name, names.get(name.removesuffix(".weight"), "")), []).append(tensor)

    def make(stored: list[Any]) -> Iterator[torch.Tensor]:
        for tensor in stored:
            rows = 4096 if tensor.name in (_EMBEDDING, _HEAD) else len(tensor.data)  # these are never permuted
            for at in range(0, len(tensor.data), rows):
                dense = dequantize(tensor.data[at : at + rows], tensor.tensor_type)
                known = {"tensor_key_mapping": names, "parsed_parameters": {"tensors": {}}}
                yield torch.tensor(processor.process(weights=dense, name=tensor.name, **known).weights).bfloat16()

    specs = [TensorSpec(name, config.dtype, tuple(value.shape)) for name, value in model.named_parameters()]
    jobs = [write.Job((spec,), partial(make, parts[spec.name])) for spec in specs]
    run = {"kind": "gguf", "file": path.name, "sha256": sha256, "settings": {}}
    bar = tqdm(desc=f"unpacking {path.name}", total=sum(job.nbytes for job in jobs), unit="B", unit_scale=True)
    with write.staging(folder, run, resumable=True) as unfinished:
        write.write_shards(unfinished, jobs, {}, progress=bar.update)  # type: ignore[arg-type]
        for part in (config, GenerationConfig.from_model_config(config), tokenizer):
            part.save_pretrained(unfinished)


def _tokenizer(path: Path, fields: dict[str, Any]) -> Any:
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    found = {name.removeprefix("tokenizer.ggml."): field.contents() for name, field in fields.items()}
    if found["model"] == "gpt2":  # byte-level
        kinds = {text: kind for text, kind in zip(found["tokens"], found["token_type"], strict=True) if kind in (3, 4)}
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=kind == 3) for text, kind in kinds.items()])
        backend, split_as = tokenizer.backend_tokenizer, found.get("pre")
        if backend.model.byte_fallback:  # taken for SentencePiece's
            backend.model.byte_fallback = backend.model.fuse_unk = tokenizer.clean_up_tokenization_spaces = False
            backend.model.ignore_merges, backend.decoder = split_as == "llama-bpe", decoders.ByteLevel()
            if split_as in _PIECES:
                split = pre_tokenizers.Split(Regex(_PIECES[split_as]), "isolated")
                further = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_as == "smollm")
                backend.pre_tokenizer = pre_tokenizers.Sequence([split, further])
    ids = [int(found.get(f"{role}_token_id", found["eos_token_id"])) for role in ("eos", "padding")]
    tokenizer.eos_token, tokenizer.pad_token = tokenizer.convert_ids_to_tokens(ids)
    return tokenizer


@contextmanager
def converted(file: Path, outtype: str) -> Iterator[Path]:
    """Yield the place for a dense model's folder, which llama.cpp's tool then converts to `file`."""
    places = os.environ.get("LLAMA_CPP", ""), os.environ.get("PATH", "")
    if (tool := shutil.which("convert_hf_to_gguf.py", path=os.pathsep.join(places))) is None:
        raise ValueError(
            "--as gguf needs llama.cpp's convert_hf_to_gguf.py, not found on PATH. Name its folder in LLAMA_CPP, or "
            f"call it on a merge --as bf16: python convert_hf_to_gguf.py FOLDER --outfile {file.name}"
        )
    with tempfile.TemporaryDirectory(dir=file.absolute().parent) as temporary:
        yield (folder := Path(temporary, file.stem))
        words = [sys.executable, tool, str(folder), "--outtype", outtype, "--outfile", f"{folder}.gguf"]
        subprocess.run(words, check=True, stdout=2)  # no line of a result
        os.replace(f"{folder}.gguf", file)
