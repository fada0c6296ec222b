"""A GGUF file, written as llama.cpp does, becomes the folder that its model was made of."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_trl.checkpoint import seal
from qerl_trl.publish import gguf
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer

formats = pytest.importorskip("gguf")


def write_gguf(path, model) -> None:
    """Llama's permuted rows of queries and keys, Llama 3.1's positions, and the tied head once more, in fewer bits."""
    config, tokenizer = model.config, make_tiny_tokenizer()
    known, theta = tokenizer.convert_ids_to_tokens(range(len(tokenizer))), config.rope_parameters["rope_theta"]
    words = [*known, *(f"[{n}]" for n in range(len(known), config.vocab_size - 3)), "12", "34", "<think>"]
    fields = {"block_count": config.num_hidden_layers, "embedding_length": config.hidden_size, "rope_freq_base": theta}
    fields |= {"feed_forward_length": config.intermediate_size, "layer_norm_rms_eps": config.rms_norm_eps}
    fields |= {"head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads}
    fields |= {"tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "chat_template": tokenizer.chat_template}
    fields |= {"token_list": words, "token_types": [3, 3, *[1] * (len(words) - 3), 4], "token_merges": ["1 2", "3 4"]}
    fields |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "key_length": config.head_dim}
    writer = formats.GGUFWriter(path, "llama")
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    names = formats.get_tensor_name_map(formats.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        if (count := heads.get(name.split(".")[-2])) is not None:
            value = value.unflatten(0, (count, 2, -1)).transpose(1, 2).reshape(value.shape)
        value = value.half() if name == "lm_head.weight" else value.float()
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", value.contiguous().numpy())
    plain = theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()


def test_a_gguf_is_the_model_that_it_was_made_of(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "HF_HOME", tmp_path)
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model, file = make_tiny_model("llama", tie_word_embeddings=True, rope_parameters=rope), tmp_path / "tiny.gguf"
    write_gguf(file, model)
    folder, expected = gguf.folder_of(file), model.state_dict()
    again, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert again.config.tie_word_embeddings and again.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())
    assert torch.allclose(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    ends = (again.generation_config.eos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert ends == (1, 1, 0) and tokenizer.chat_template and tokenizer.tokenize("<think>12") == ["<think>", "1", "2"]
    assert seal.recorded_run(folder)["sha256"] == again.config.gguf_sha256 == seal.sha256(file)
    monkeypatch.setattr(gguf, "_unpack", None)  # once
    assert gguf.folder_of(file) == folder and gguf.folder_of("user/name") == "user/name"
