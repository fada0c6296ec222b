"""Checkpoints with random weights in real shapes, for measurements in which only shapes matter.

    python random_checkpoint.py 7b FOLDER             # bf16, as a user's base that is quantized while it loads
    python random_checkpoint.py 32b FOLDER --packed   # NVFP4 in compressed-tensors' layout
    python random_checkpoint.py gemma3-12b FOLDER     # the model of the recipe examples/configs/gemma3-12b.yaml, tower included
    python random_checkpoint.py tiny-gemma3-12b FOLDER   # the same, small enough for a CPU

Shapes by size are Qwen2.5's; those by a recipe's name are tests/shapes.py's. The folder is complete: the embedded example's tokenizer and
chat template, and a generation_config.json in which one token id in `STOP_EVERY` ends a completion. So random weights sample completions
of `STOP_EVERY` tokens on average, some several times as long, as a model that has learned to stop does, and not each of the maximum length.
"""

import argparse
import copy
import json
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, Qwen2Config
from transformers.core_model_loading import revert_weight_conversion

from qerl_trl.nvfp4.checkpoints import Selection, TensorSpec, compressed_tensors_config, divided, packed_specs
from qerl_trl.publish import write
from qerl_trl.rollout.spec import linear_layers, short_names

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests import shapes

ASSETS = Path(__file__).resolve().parents[1] / "examples" / "assets" / "tiny-qwen2"
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
    "0.5b": _shape(896, 4864, 24, 14, 2, vocab=151936, tied=True),
    "1.5b": _shape(1536, 8960, 28, 12, 2, vocab=151936, tied=True),
    "3b": _shape(2048, 11008, 36, 16, 2, vocab=151936, tied=True),
    "7b": _shape(3584, 18944, 28, 28, 4),
    "14b": _shape(5120, 13824, 48, 40, 8),
    "32b": _shape(5120, 27648, 64, 40, 8),
    "70b": _shape(8192, 28672, 80, 64, 8, vocab=128256),  # Llama-3's, in Qwen2's classes
}
#: standard deviation of an embedding that is also the head, where it is not 0.02: Gemma multiplies embeddings by the root of its width, so the
#: token itself would outweigh what layers add, and greedy decoding repeat it to the maximum length
TIED = {"gemma3": 0.004}
SHARD_BYTES = 4_000_000_000
#: packed codes drawn uniformly have rms 2.9; block scales of 100 to 400 over this divisor give weights of about 0.02
DIVISOR = 2.0**15


#: a recipe's name -> its model's configuration, and the same at a tiny size
RECIPES: dict[str, PretrainedConfig] = {name: config for name, (config, _) in shapes.NEWER.items()}
RECIPES |= {f"tiny-{name}": shapes.tiny(config, vocab_size=512) for name, config in RECIPES.items()}
#: what a checkpoint whose model sees pictures says of them, by `model_type`: file -> content
PICTURES = {
    "gemma3": {
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "image_seq_length": 256,
            "size": {"height": 896, "width": 896},
        },
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 256},
    },
    "qwen3_5": {
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen3VLProcessor",
            "patch_size": 16,
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        },
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "processor_class": "Qwen3VLProcessor",
        },
    },
}


def random_config(shape: str) -> PretrainedConfig:
    if shape in SHAPES:
        config: PretrainedConfig = Qwen2Config(
            **SHAPES[shape],
            max_position_embeddings=32768,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
    else:
        config = copy.deepcopy(RECIPES[shape])
    text = config.get_text_config()
    text.bos_token_id, text.eos_token_id, text.pad_token_id = None, 1, 0
    config.dtype = text.dtype = "bfloat16"
    return config


def built(config: PretrainedConfig) -> nn.Module:
    """The model that is loaded from a checkpoint with this configuration, on the current device."""
    alone = config.get_text_config() is config
    model: nn.Module = (AutoModelForCausalLM if alone else AutoModelForImageTextToText).from_config(config)
    return model


def vectors(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """What norms and other vectors of such a model are before training, by their names without the layers' numbers."""
    return {
        _everywhere(name): parameter.detach()
        for name, parameter in built(shapes.tiny(config)).named_parameters()
        if parameter.ndim < 2 and not name.endswith(".bias")
    }


def _everywhere(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def write_checkpoint(shape: str, folder: Path, device: str, packed: bool = False) -> int:
    """Normally distributed weights (packed: random codes), norms as before training, with a tokenizer; returns the bytes of the tensors."""
    config, initial = random_config(shape), vectors(random_config(shape))
    with torch.device("meta"):
        model = built(config)
    config.architectures = [type(model).__name__]
    quantized, _ = divided(model, Selection()) if packed else ({}, None)
    if packed:
        linears = linear_layers(model)
        config.quantization_config = compressed_tensors_config(short_names(linears.keys() - quantized.keys(), linears))
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(ASSETS / name, folder)
    for name, content in PICTURES.get(config.model_type, {}).items():
        (folder / name).write_text(json.dumps(content))
    stops = list(range(1, config.get_text_config().vocab_size, STOP_EVERY))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops, "pad_token_id": 0}))

    def job(name: str, parameter: nn.Parameter) -> write.Job:
        (on_disk,) = revert_weight_conversion(model, {name: parameter.data})
        size = tuple(parameter.shape)
        if name.removesuffix(".weight") in quantized:
            return write.Job(packed_specs(on_disk, *size), lambda: _random_packed(*size, device))

        def make():
            known = initial.get(_everywhere(name))
            if known is not None:
                return [known.repeat(-(-size[0] // len(known)))[: size[0]].to(torch.bfloat16)]
            deviation = TIED.get(config.model_type, 0.02) if "embed_tokens" in name else 0.02
            return [torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0.0, deviation)]

        return write.Job((TensorSpec(on_disk, torch.bfloat16, size),), make)

    jobs = [job(name, parameter) for name, parameter in model.named_parameters()]
    write.write_shards(folder, jobs, {}, SHARD_BYTES, workers=8)
    return sum(job.nbytes for job in jobs)


def _random_packed(rows: int, columns: int, device: str) -> list[torch.Tensor]:
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
    scale = (torch.rand(rows, columns // 16, device=device) * 300 + 100).to(torch.float8_e4m3fn)
    return [codes, scale, torch.tensor([DIVISOR])]


def byte_pairs(size: int) -> Any:
    """A tokenizer of `size` tokens, all but 258 of them merged from others at random. w0 to w399, of which `plan_check` makes prompts, are a token each."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters, digits, draw = sorted(pre_tokenizers.ByteLevel.alphabet()), "0123456789", random.Random(0)
    vocabulary = {letter: index for index, letter in enumerate(["<eos>", "<pad>", *letters])}
    merges: list[tuple[str, str]] = []

    def merge(left: str, right: str) -> None:
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))

    for begun in ["w", *(f"w{digit}" for digit in digits), *(f"w{number}" for number in range(10, 40))]:
        for digit in digits:
            merge(begun, digit)
    known = list(vocabulary)[2:]
    while len(vocabulary) < size:
        pair = draw.choice(known[:1000]), draw.choice(known[:1000])
        known.append("".join(pair))
        merge(*pair)
    built = Tokenizer(models.BPE(vocabulary, merges))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=built, eos_token="<eos>", pad_token="<pad>", unk_token="<pad>", padding_side="left"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=[*SHAPES, *RECIPES])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    size = write_checkpoint(options.shape, options.folder, options.device, options.packed)
    print(f"{options.folder}: {size / 1e9:.1f} GB")
