"""Qwen2-shaped checkpoints with random weights, for measurements in which only shapes matter.

    python random_checkpoint.py 7b FOLDER             # bf16, as a user's base that is quantized while it loads
    python random_checkpoint.py 32b FOLDER --packed   # NVFP4 in compressed-tensors' layout

The folder is complete: the embedded example's tokenizer and chat template, and a generation_config.json in which one token id in
`STOP_EVERY` ends a completion. So random weights sample completions of `STOP_EVERY` tokens on average, some several times as long, as a
model that has learned to stop does, and not each of the maximum length.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from qerl_trl.nvfp4.layouts import TensorSpec, compressed_tensors_config, packed_specs
from qerl_trl.publish import writer

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "tiny-qwen2"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
STOP_EVERY = 32


def _shape(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int = 152064, tied: bool = False
) -> dict:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
    }


SHAPES = {
    "tiny": _shape(128, 384, 3, 4, 2, vocab=512),
    "small": _shape(1024, 4096, 8, 8, 2, vocab=512),
    "3b": _shape(2048, 11008, 36, 16, 2, vocab=151936, tied=True),
    "7b": _shape(3584, 18944, 28, 28, 4),
    "14b": _shape(5120, 13824, 48, 40, 8),
    "32b": _shape(5120, 27648, 64, 40, 8),
    "70b": _shape(8192, 28672, 80, 64, 8, vocab=128256),  # Llama-3's, in Qwen2's classes
}
SHARD_BYTES = 4_000_000_000
#: packed codes drawn uniformly have rms 2.9; block scales of 100 to 400 over this divisor give weights of about 0.02
DIVISOR = 2.0**15


def random_config(shape: str) -> Qwen2Config:
    return Qwen2Config(
        **SHAPES[shape],
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        dtype="bfloat16",
        architectures=["Qwen2ForCausalLM"],
        eos_token_id=1,
        pad_token_id=0,
    )


def write_checkpoint(shape: str, folder: Path, device: str, packed: bool = False) -> int:
    """Normally distributed weights (packed: random codes), norms of one, with a tokenizer; returns the bytes of the tensors."""
    config = random_config(shape)
    if packed:
        config.quantization_config = compressed_tensors_config(["lm_head"])
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(ASSETS / name, folder)
    stops = list(range(1, config.vocab_size, STOP_EVERY))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops, "pad_token_id": 0}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(random_config(shape))

    def job(name: str, size: tuple[int, ...]) -> writer.Job:
        if packed and name.endswith("_proj.weight"):
            return writer.Job(packed_specs(name, *size), lambda: _random_packed(*size, device))

        def make():
            if "norm" in name:
                return [torch.ones(size, dtype=torch.bfloat16)]
            return [(torch.randn(size, device=device) * 0.02).to(torch.bfloat16)]

        return writer.Job((TensorSpec(name, torch.bfloat16, size),), make)

    jobs = [job(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    writer.write_shards(folder, jobs, {}, SHARD_BYTES, workers=8)
    return sum(job.nbytes for job in jobs)


def _random_packed(rows: int, columns: int, device: str) -> list[torch.Tensor]:
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
    scale = (torch.rand(rows, columns // 16, device=device) * 300 + 100).to(torch.float8_e4m3fn)
    return [codes, scale, torch.tensor([DIVISOR])]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    size = write_checkpoint(options.shape, options.folder, options.device, options.packed)
    print(f"{options.folder}: {size / 1e9:.1f} GB")
