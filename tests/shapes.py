"""Configurations with real shapes, for the memory model, and with random weights for benchmarks/."""

from typing import Any

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

from tests import architectures

NAMES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size"


def of(kind: type[PretrainedConfig], *shape: int, **more) -> Any:
    """A configuration with the shape (`NAMES`) in the model's own config.json."""
    return kind(**dict(zip(NAMES.split(), shape, strict=True)), **more)


def qwen2(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int = 152064) -> Qwen2Config:
    more = {"max_position_embeddings": 32768, "tie_word_embeddings": hidden <= 2048}
    names = [name for name in NAMES.split() if name != "head_dim"]
    shape = dict(zip(names, (hidden, mlp, layers, heads, kv_heads, vocabulary), strict=True))
    return Qwen2Config(**shape, **more)


HALF_B = qwen2(896, 4864, 24, 14, 2, 151936)
THREE_B = qwen2(2048, 11008, 36, 16, 2, 151936)
SEVEN_B = qwen2(3584, 18944, 28, 28, 4)
FOURTEEN_B = qwen2(5120, 13824, 48, 40, 8)
THIRTY_TWO_B = qwen2(5120, 27648, 64, 40, 8)
#: Llama-3's, in Qwen2's classes (benchmarks/models.py)
SEVENTY_B = qwen2(8192, 28672, 80, 64, 8, 128256)


#: Qwen3.5's pictures have positions in three directions
_QWEN_ROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
}  # fmt: skip
_GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
_LLAMA_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def rope(theta: float, **more) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, **more}


def seeing_qwen(hidden: int, *shape: int, **more) -> Qwen3_5Config:
    """With its tower for pictures."""
    more |= {"rope_parameters": _QWEN_ROPE, "max_position_embeddings": 262144, "mamba_ssm_dtype": "float32"}
    text = of(Qwen3_5TextConfig, hidden, *shape, **more)
    return Qwen3_5Config(text_config=text.to_dict(), vision_config={"out_hidden_size": hidden})


def seeing_gemma(*shape: int) -> Gemma3Config:
    text = of(Gemma3TextConfig, *shape, sliding_window=1024, rope_parameters=_GEMMA_ROPE)
    tower = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    return Gemma3Config(text_config=text.to_dict(), vision_config=tower | {"image_size": 896, "patch_size": 14})


_QWEN3 = rope(1e6, max_position_embeddings=40960)
_QWEN3_4B = rope(5e6, max_position_embeddings=262144, tie_word_embeddings=True)
_LLAMA = {"rope_parameters": _LLAMA_ROPE, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
_MISTRAL = rope(1e8, max_position_embeddings=32768, rms_norm_eps=1e-5, sliding_window=None)

#: recipe -> (configuration, parameters in billions)
NEWER = {
    "qwen3-4b": (of(Qwen3Config, 2560, 9728, 36, 32, 8, 128, 151936, **_QWEN3_4B), 4.0),
    "qwen3-8b": (of(Qwen3Config, 4096, 12288, 36, 32, 8, 128, 151936, **_QWEN3), 8.2),
    "qwen3-14b": (of(Qwen3Config, 5120, 17408, 40, 40, 8, 128, 151936, **_QWEN3), 14.8),
    "qwen3-32b": (of(Qwen3Config, 5120, 25600, 64, 64, 8, 128, 151936, **_QWEN3), 32.8),
    "qwen3.5-9b": (seeing_qwen(4096, 12288, 32, 16, 4, 256, 248320), 9.41),
    "qwen3.5-27b": (seeing_qwen(5120, 17408, 64, 24, 4, 256, 248320, linear_num_value_heads=48), 27.4),
    "llama3.1-8b": (of(LlamaConfig, 4096, 14336, 32, 32, 8, 128, 128256, **_LLAMA), 8.0),
    "gemma3-12b": (seeing_gemma(3840, 15360, 48, 16, 8, 256, 262208), 12.2),
    "mistral-small-24b": (of(MistralConfig, 5120, 32768, 40, 32, 8, 128, 131072, **_MISTRAL), 23.6),
}


def tiny(config: PretrainedConfig, **settings) -> PretrainedConfig:
    """`config` with its tower at the size of architectures.py. `settings`: of the decoder."""
    text = config.get_text_config()
    small = architectures.TINY_TEXT | architectures.TEXT[text.model_type]
    small |= {name: getattr(text, name) for name in ("rope_parameters", "max_position_embeddings")} | settings
    if "mrope_section" in text.rope_parameters:  # sections of half of the rotated width
        half = int(small["head_dim"] * text.rope_parameters["partial_rotary_factor"]) // 2
        small["rope_parameters"] = text.rope_parameters | {"mrope_section": [half - half // 2, half // 2, 0]}
    if text is config:
        return type(config)(**small)
    tower, _, further = architectures.VISION["qwen3_vl" if "qwen" in config.model_type else config.model_type]
    if "out_hidden_size" in tower:
        tower = tower | {"out_hidden_size": small["hidden_size"]}
    return type(config)(vision_config=tower, text_config=small, **further)
