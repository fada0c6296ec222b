"""Prompts that two models are compared on."""

import pytest

from qerl_trl.publish.export import prompt_batches


def test_a_file_without_prompts_is_named_with_what_belongs_in_it(tmp_path, tiny_tokenizer):
    (tmp_path / "prompts.jsonl").write_text("")
    with pytest.raises(
        ValueError, match=r'prompts.jsonl is empty. Give it a line per prompt: \{"question": "\.\.\."\}'
    ):
        prompt_batches(tmp_path / "prompts.jsonl", tiny_tokenizer, 1)
