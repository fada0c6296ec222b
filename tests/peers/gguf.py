"""The merged policy as GGUF, converted with llama.cpp's own tool; every tensor equals the merged model's.

    pip install gguf sentencepiece
    git clone https://github.com/ggml-org/llama.cpp
    python -m tests.peers.gguf llama.cpp/convert_hf_to_gguf.py       # writes docs/gguf.json

The policy is a tiny Qwen 2 with a SentencePiece vocabulary trained here: the tool knows byte-level ones by digest only.
"""

import argparse
import importlib.metadata
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from qerl_trl.publish import export
from tests.faults.tiny_runs import make_policy
from tests.tiny_models import make_tiny_model

RESULT = Path(__file__).resolve().parents[2] / "docs" / "gguf.json"
#: GGUF's names of Qwen 2's and Llama's tensors
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_A_BLOCK = {
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def name_in_the_model(name: str) -> str:
    """blk.0.attn_q.weight -> model.layers.0.self_attn.q_proj.weight."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{_TOP[stem]}.{kind}"
    _, number, part = stem.split(".")
    return f"model.layers.{number}.{_IN_A_BLOCK[part]}.{kind}"


def convert(tool: Path, folder: Path) -> dict[str, Any]:
    """Merge, convert, compare. Raises `RuntimeError` if the tool fails or a tensor is missing or differs."""
    from gguf import GGUFReader

    make_tiny_model("qwen2").save_pretrained(folder / "base")
    policy = make_policy(folder / "base")
    before = {name: value.clone() for name, value in policy.merge_and_unload().state_dict().items()}
    export.save_merged(make_policy(folder / "base"), folder / "merged", dtype=torch.float32)
    _vocabulary(folder / "merged" / "tokenizer.model")
    made = folder / "merged.gguf"
    command = [sys.executable, str(tool), str(folder / "merged"), "--outtype", "f32", "--outfile", str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool.name} failed: {done.stderr[-1500:]}")
    merged = load_file(folder / "merged" / "model.safetensors")
    found = {name_in_the_model(each.name): torch.tensor(each.data) for each in GGUFReader(made).tensors}
    different = [name for name in merged if name not in found or not torch.equal(found[name], merged[name].float())]
    unlike = [name for name in merged if not torch.allclose(merged[name], before[name].float(), atol=1e-5)]
    if different or unlike or found.keys() - merged.keys():
        raise RuntimeError(f"Different: {different}; not the policy's: {unlike}; more: {found.keys() - merged.keys()}")
    return {"architecture": "qwen2", "outtype": "f32", "tensors": len(found), "equal": len(merged)}


def _vocabulary(path: Path) -> None:
    import sentencepiece

    made = io.BytesIO()
    words = iter(f"{a} and {b} make {a + b}" for a in range(20) for b in range(20))
    options = {"vocab_size": 60, "model_type": "bpe", "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=words, model_writer=made, **options)
    path.write_bytes(made.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", type=Path, help="convert_hf_to_gguf.py of llama.cpp")
    tool = parser.parse_args().tool.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        found = convert(tool, Path(temporary))
    versions = {name: importlib.metadata.version(name) for name in ("gguf", "transformers")}
    result = {"command": "python -m tests.peers.gguf convert_hf_to_gguf.py", "versions": versions, **found}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
