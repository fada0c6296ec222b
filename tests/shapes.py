"""Real Qwen2.5 shapes as configurations: what the memory model is asked about, without weights."""

from transformers import Qwen2Config


def qwen2(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int = 152064) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=hidden == 2048,
    )


THREE_B = qwen2(2048, 11008, 36, 16, 2, 151936)
SEVEN_B = qwen2(3584, 18944, 28, 28, 4)
FOURTEEN_B = qwen2(5120, 13824, 48, 40, 8)
THIRTY_TWO_B = qwen2(5120, 27648, 64, 40, 8)
