"""What the page says of GGUF is what was measured; where llama.cpp's tool is at hand (`QERL_GGUF_TOOL`), a merge is
converted."""

import json
import os
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.peers import gguf

TABLE = json.loads(gguf.RESULT.read_text())


def test_the_page_says_what_was_measured():
    page = (gguf.RESULT.parent / "source" / "publishing.md").read_text()
    assert TABLE["equal"] == TABLE["tensors"] > 0
    assert f"all {TABLE['tensors']} tensors" in page and f"gguf {TABLE['versions']['gguf']}" in page


def test_every_tensor_of_a_model_has_a_name_in_gguf(tiny_model_dir):
    with safe_open(tiny_model_dir("qwen2") / "model.safetensors", "pt") as file:
        names = list(file.keys())
    parts = {name.split(".", 3)[-1].rpartition(".")[0] for name in names if ".layers." in name}
    assert parts == set(gguf._IN_A_BLOCK.values())
    assert gguf.name_in_the_model("blk.1.attn_q.bias") == "model.layers.1.self_attn.q_proj.bias"
    assert gguf.name_in_the_model("token_embd.weight") == "model.embed_tokens.weight"


@pytest.mark.skipif("QERL_GGUF_TOOL" not in os.environ, reason="needs convert_hf_to_gguf.py (QERL_GGUF_TOOL)")
def test_a_merge_is_converted(tmp_path):
    found = gguf.convert(Path(os.environ["QERL_GGUF_TOOL"]), tmp_path)
    assert found == {name: TABLE[name] for name in found}
