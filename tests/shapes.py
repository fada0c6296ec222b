"""Real shapes as configurations: what the memory model is asked about, without weights."""

from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)


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


def of(
    kind: type, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int, **more
):
    """A configuration of the shape that the model's own config.json gives."""
    config: PretrainedConfig = kind(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        **more,
    )
    return config


def seeing_qwen(hidden: int, *shape: int, **more) -> Qwen3_5Config:
    """With the tower for pictures, which is loaded with it."""
    text = of(Qwen3_5TextConfig, hidden, *shape, **more)
    return Qwen3_5Config(text_config=text.to_dict(), vision_config={"out_hidden_size": hidden})


def seeing_gemma(*shape: int) -> Gemma3Config:
    tower = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    return Gemma3Config(
        text_config=of(Gemma3TextConfig, *shape).to_dict(), vision_config=tower | {"image_size": 896, "patch_size": 14}
    )


#: recipe -> (configuration, parameters in billions)
NEWER = {
    "qwen3-4b": (of(Qwen3Config, 2560, 9728, 36, 32, 8, 128, 151936, tie_word_embeddings=True), 4.0),
    "qwen3-8b": (of(Qwen3Config, 4096, 12288, 36, 32, 8, 128, 151936), 8.2),
    "qwen3-14b": (of(Qwen3Config, 5120, 17408, 40, 40, 8, 128, 151936), 14.8),
    "qwen3-32b": (of(Qwen3Config, 5120, 25600, 64, 64, 8, 128, 151936), 32.8),
    "qwen3.5-9b": (seeing_qwen(4096, 12288, 32, 16, 4, 256, 248320), 9.41),
    "qwen3.5-27b": (seeing_qwen(5120, 17408, 64, 24, 4, 256, 248320, linear_num_value_heads=48), 27.4),
    "llama3.1-8b": (of(LlamaConfig, 4096, 14336, 32, 32, 8, 128, 128256), 8.0),
    "gemma3-12b": (seeing_gemma(3840, 15360, 48, 16, 8, 256, 262208), 12.2),
    "mistral-small-24b": (of(MistralConfig, 5120, 32768, 40, 32, 8, 128, 131072), 23.6),
}
