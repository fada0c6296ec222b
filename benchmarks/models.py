"""Random models in real shapes, on disk and in memory, without downloads.

Shapes by size are Qwen2.5's; recipe names are those of tests/shapes.py (`tiny-gemma3-12b`: small enough for a CPU).
Folders have the tokenizer and chat template of the embedded example. Their generation_config.json makes one in
`STOP_EVERY` token ids an end token, so random weights stop after that many tokens on average.

`packed_model(size)`: base of a trainer, NVFP4 linear layers with q|k|v and gate|up in one storage each.
`policy(size)`: the same with a LoRA adapter. `folder(size)`: for stock vLLM with random bf16 weights.
"""

import copy
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    Qwen2Config,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qerl_trl.nvfp4.checkpoints import Selection, TensorSpec, compressed_tensors_config, divided, packed_specs
from qerl_trl.publish import write
from qerl_trl.rollout.spec import linear_layers, short_names

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from tests import shapes  # noqa: E402

ASSETS = ROOT / "examples" / "assets" / "tiny-qwen2"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
STOP_EVERY = 32
SHARD_BYTES = 4_000_000_000
#: uniform codes have rms 2.9: block scales of 100 to 400 over this divisor give weights of about 0.02
DIVISOR = 2.0**15
_FIELDS = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size".split()


def _shape(*numbers: int, tied: bool = False) -> dict[str, Any]:
    return dict(zip(_FIELDS, numbers, strict=True)) | {"tie_word_embeddings": tied}


SHAPES = {
    "tiny": _shape(128, 384, 3, 4, 2, 512),
    "small": _shape(1024, 4096, 8, 8, 2, 512),
    "0.5b": _shape(896, 4864, 24, 14, 2, 151936, tied=True),
    "1.5b": _shape(1536, 8960, 28, 12, 2, 151936, tied=True),
    "3b": _shape(2048, 11008, 36, 16, 2, 151936, tied=True),
    "7b": _shape(3584, 18944, 28, 28, 4, 152064),
    "14b": _shape(5120, 13824, 48, 40, 8, 152064),
    "32b": _shape(5120, 27648, 64, 40, 8, 152064),
    "70b": _shape(8192, 28672, 80, 64, 8, 128256),  # Llama-3's, in Qwen2's classes
}
#: recipe -> model configuration; `tiny-` recipes are small
RECIPES: dict[str, PretrainedConfig] = {name: config for name, (config, _) in shapes.NEWER.items()}
RECIPES |= {f"tiny-{name}": shapes.tiny(config, vocab_size=512) for name, config in RECIPES.items()}
#: standard deviation of tied embeddings, if not 0.02: Gemma scales them by the root of the width, and greedy decoding
#: would repeat one token
TIED = {"gemma3": 0.004}
#: files of checkpoints with a vision tower, by `model_type`: file -> content
PICTURES = {
    "gemma3": {
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor",
            "image_seq_length": 256, "size": {"height": 896, "width": 896},
        },
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 256},
    },
    "qwen3_5": {
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor", "patch_size": 16,
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        },
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen3VLVideoProcessor", "processor_class": "Qwen3VLProcessor",
        },
    },
}  # fmt: skip

# --- on disk --------------------------------------------------------------------------------------


def random_config(shape: str) -> PretrainedConfig:
    if shape in SHAPES:
        rope = {"rope_type": "default", "rope_theta": 1e6}
        config: PretrainedConfig = Qwen2Config(**SHAPES[shape], max_position_embeddings=32768, rope_parameters=rope)
    else:
        config = copy.deepcopy(RECIPES[shape])
    text = config.get_text_config()
    text.bos_token_id, text.eos_token_id, text.pad_token_id = None, 1, 0
    config.dtype = text.dtype = "bfloat16"
    return config


def built(config: PretrainedConfig) -> nn.Module:
    """Model of this configuration, on the current device."""
    alone = config.get_text_config() is config
    model: nn.Module = (AutoModelForCausalLM if alone else AutoModelForImageTextToText).from_config(config)
    return model


def vectors(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Initial norms and other vectors, by name without layer number."""
    return {
        _everywhere(name): parameter.detach()
        for name, parameter in built(shapes.tiny(config)).named_parameters()
        if parameter.ndim < 2 and not name.endswith(".bias")
    }


def _everywhere(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def write_checkpoint(shape: str, folder: Path, device: str, packed: bool = False) -> int:
    """Write normally distributed weights (packed: random codes) and a tokenizer; return the tensors' bytes."""
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
            return write.Job(packed_specs(on_disk, *size), lambda: [*_packed(*size, device), torch.tensor([DIVISOR])])

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


def _packed(rows: int, columns: int, device: str) -> list[torch.Tensor]:
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
    scale = (torch.rand(rows, columns // 16, device=device) * 300 + 100).to(torch.float8_e4m3fn)
    return [codes, scale]


# --- in memory ------------------------------------------------------------------------------------


def _fields(config: PretrainedConfig, **instead) -> dict[str, Any]:
    """Shape fields of config.json, some replaced."""
    names = ("model_type", *_FIELDS, "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters")
    names += ("tie_word_embeddings",)
    return {name: getattr(config, name) for name in names} | instead


_ENDS = {"bos_token_id": 0, "eos_token_id": 0}
#: fields of config.json; defaults are Qwen2.5's
CONFIGS: dict[str, dict[str, Any]] = {
    "dry": _shape(64, 128, 2, 2, 1, 512) | _ENDS,
    "tiny": _shape(512, 1024, 4, 8, 2, 152064),
    **{size: SHAPES[size] for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b")},
    "70b": SHAPES["70b"] | _ENDS,
    "llama-3-8b": _fields(  # the shape of 3.1, without its stretched positions
        RECIPES["llama3.1-8b"], rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        max_position_embeddings=8192, bos_token_id=128000, eos_token_id=128001,
    ),
    "qwen3-8b": _fields(RECIPES["qwen3-8b"]),
}  # fmt: skip
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def model_config(size: str) -> dict[str, Any]:
    shape = CONFIGS[size]
    kind = shape.get("model_type", "qwen2")
    common = {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]], "model_type": kind, "hidden_act": "silu",
        "dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
    }  # fmt: skip
    if kind == "qwen2":
        common |= {
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
            "use_sliding_window": False,
        }  # fmt: skip
    return common | shape


def head_dim(config: dict[str, Any]) -> int:
    """Width of a head; the heads need not add up to the hidden width."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def linear_shapes(size: str) -> dict[str, tuple[int, int]]:
    """Name in the layer -> (outputs, inputs) of the seven projections of a decoder layer."""
    c = model_config(size)
    hidden, inner, head = c["hidden_size"], c["intermediate_size"], head_dim(c)
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    return {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip


def kv_bytes(size: str) -> int:
    """Bytes of the keys and values of one token in bf16."""
    c = model_config(size)
    return 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * head_dim(c) * 2


def folder(size: str) -> str:
    """A folder with config.json only; safe for several processes at a time."""
    path = Path(tempfile.gettempdir()) / f"shape-{size}"
    path.mkdir(exist_ok=True)
    partial = path / f"config.json.{os.getpid()}"
    partial.write_text(json.dumps(model_config(size)))
    partial.replace(path / "config.json")
    return str(path)


@torch.no_grad()
def packed_model(size: str, device: str = "cuda", dense: bool = False) -> nn.Module:
    """Frozen transformers model with random NVFP4 linear layers (or dense bf16 ones) in fused storage."""
    from qerl_trl.nvfp4.linear import NVFP4Linear

    config = {k: v for k, v in model_config(size).items() if k not in ("architectures", "model_type", "dtype")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_config(size)["model_type"]](**config))
        model = model.to(torch.bfloat16)
    model.name_or_path = folder(size)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            group = next((g for g in FUSED if name in g), (name,))
            if type(child) is not nn.Linear or name == "lm_head" or dense or name != group[0]:
                continue
            layers = [getattr(parent, member) for member in group]
            codes, scale = _packed(sum(layer.out_features for layer in layers), layers[0].in_features, device)
            scale, row = scale.view(torch.uint8), 0
            for member, layer in zip(group, layers, strict=True):
                rows = slice(row, row + layer.out_features)
                row = rows.stop
                bias = layer.bias
                bias = None if bias is None else torch.randn(layer.out_features, device=device).bfloat16() * 0.02
                divisor = torch.tensor([DIVISOR], device=device)
                packed = NVFP4Linear.from_nvfp4((codes[rows], scale[rows], divisor), bias=bias)
                packed.fused_rows = codes.shape[0] if len(group) > 1 else None
                setattr(parent, member, packed)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type == "meta":
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                norm = parameter.ndim == 1 and "norm" in type(module).__name__.lower()
                value.fill_(1.0) if norm else value.normal_(0, 0.02)
                setattr(module, name, nn.Parameter(value, requires_grad=False))
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    return model.requires_grad_(False).eval()


def policy(size: str, rank: int = 32, device: str = "cuda", dense: bool = False) -> nn.Module:
    """`packed_model` with a random rank-`rank` LoRA adapter on all seven projections, in float32 as in training."""
    from peft import LoraConfig, get_peft_model

    from qerl_trl.model.lora import register_nvfp4_lora

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(packed_model(size, device, dense), config if dense else register_nvfp4_lora(config))
    randomize(model)
    return model


@torch.no_grad()
def randomize(model: nn.Module, scale: float = 0.01) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_(0, scale)


def seconds(function, device: str = "cuda") -> float:
    """Wall time of one call, with device synchronization before and after."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
