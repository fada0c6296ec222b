"""Qwen2-shaped bf16 checkpoints with random weights, for measurements in which only shapes matter."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from qerl_trl import shards

SHAPES = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    "3b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
SHARD_BYTES = 4_000_000_000


def random_config(shape: str) -> Qwen2Config:
    return Qwen2Config(
        **SHAPES[shape], dtype="bfloat16", architectures=["Qwen2ForCausalLM"], eos_token_id=1, pad_token_id=0
    )


def write_checkpoint(shape: str, folder: Path, device: str) -> int:
    """Normally distributed weights, norms of one; returns the bytes of the tensors."""
    config = random_config(shape)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    def job(name: str, size: tuple[int, ...]) -> shards.Job:
        def make():
            if "norm" in name:
                return [torch.ones(size, dtype=torch.bfloat16)]
            return [(torch.randn(size, device=device) * 0.02).to(torch.bfloat16)]

        return shards.Job((shards.TensorSpec(name, torch.bfloat16, size),), make)

    jobs = [job(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    shards.write_shards(folder, jobs, {}, SHARD_BYTES, workers=8)
    return sum(job.nbytes for job in jobs)
