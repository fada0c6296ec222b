"""The page's figures of GGUF are the measured ones; with llama.cpp's folder (`LLAMA_CPP`) SmolLM2 is converted."""

import json
import os

import pytest

from tests.peers import gguf

TABLE = json.loads(gguf.RESULT.read_text())


def test_the_page_says_what_was_measured():
    page = (gguf.RESULT.parent / "source" / "checkpoints.md").read_text()
    assert TABLE["equal"] == TABLE["tensors"] > 0 and all(TABLE["same"].values())
    assert f"all {TABLE['tensors']} tensors" in page and f"gguf {TABLE['versions']['gguf']}" in page


@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="needs llama.cpp, see peers.gguf")
def test_a_merge_is_converted(tmp_path):
    found = gguf.convert(tmp_path)
    assert found == {name: TABLE[name] for name in found}
