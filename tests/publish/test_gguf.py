"""A GGUF file, written as llama.cpp does, becomes the folder that its model was made of."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_trl.checkpoint import seal
from qerl_trl.publish import gguf
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer

formats = pytest.importorskip("gguf")


def write_gguf(path, model) -> None:
    """Llama's permuted rows of queries and keys, and the tied head once more, in fewer bits."""
    writer, config, tokenizer = formats.GGUFWriter(path, "llama"), model.config, make_tiny_tokenizer()
    sizes = (config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads)
    for name, size in zip(("block_count", "embedding_length", "feed_forward_length", "head_count"), sizes, strict=True):
        getattr(writer, f"add_{name}")(size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    known = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    words = [*known, *(f"[{n}]" for n in range(len(known), config.vocab_size - 3)), "12", "34", "<think>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_chat_template(tokenizer.chat_template)
    writer.add_token_list(words)
    writer.add_token_types([3, 3, *[1] * (len(words) - 3), 4])
    writer.add_token_merges(["1 2", "3 4"])
    for role, number in (("bos", 0), ("eos", 1), ("pad", 0)):
        getattr(writer, f"add_{role}_token_id")(number)
    names = formats.get_tensor_name_map(formats.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        if (count := heads.get(name.split(".")[-2])) is not None:
            value = value.unflatten(0, (count, 2, -1)).transpose(1, 2).reshape(value.shape)
        value = value.half() if name == "lm_head.weight" else value.float()
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", value.contiguous().numpy())
    rope = model.model.rotary_emb  # of Llama 3.1
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    plain = config.rope_parameters["rope_theta"] ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    writer.add_tensor("rope_freqs.weight", (plain / rope.inv_freq).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_is_the_model_that_it_was_made_of(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "HF_HOME", tmp_path)
    llama_31 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0}
    llama_31 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = make_tiny_model("llama", tie_word_embeddings=True, rope_parameters=llama_31)
    write_gguf(tmp_path / "tiny.gguf", model)
    folder = gguf.folder_of(tmp_path / "tiny.gguf")
    again, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    expected = model.state_dict()
    assert again.config.tie_word_embeddings and again.state_dict().keys() == expected.keys()
    assert torch.allclose(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())
    ends = (again.generation_config.eos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert ends == (1, 1, 0) and tokenizer.chat_template and tokenizer.tokenize("<think>12") == ["<think>", "1", "2"]
    sha256 = seal.sha256(tmp_path / "tiny.gguf")
    assert seal.recorded_run(folder)["sha256"] == again.config.gguf_sha256 == sha256
    monkeypatch.setattr(gguf, "_unpack", None)  # once
    assert gguf.folder_of(tmp_path / "tiny.gguf") == folder and gguf.folder_of("user/name") == "user/name"
