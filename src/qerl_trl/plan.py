"""Will it fit? Memory of a run from shapes alone: base, adapter, optimizer, activations, logits, KV cache.

The model class is built on the meta device, so that every count (which layers are quantized, how wide they are) is the model's own and
not a guess from its name. Formulas are in the functions' docstrings; M = B * T tokens are in one backward pass, h is the hidden width, f
the MLP's, V the vocabulary, and a bf16 number has 2 bytes. What is predicted is torch's peak of allocated memory in one process (what
`torch.cuda.max_memory_allocated` reports); CUDA itself takes `CONTEXT_BYTES` more, and vLLM `VLLM_BYTES` beside its KV cache.

`examples/benchmarks/plan_check.py` measures the same quantities on a GPU and compares.
"""

import dataclasses
import math
import os
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from .quantizer import NVFP4Config, NVFP4HfQuantizer

#: CUDA context, cuBLAS workspaces and allocator slack of a process: outside torch's count
CONTEXT_BYTES = 1_000_000_000
#: vLLM beside weights and KV cache: CUDA graphs, sampler and profiling peak. A rule of thumb, not measured by us
VLLM_BYTES = 2_500_000_000
#: bytes of optimizer state a trained parameter
OPTIMIZER_BYTES = {"adamw_torch": 8.0, "adamw_8bit": 2.1, "adafactor": 0.1, "sgd": 0.0}
#: tokens and vocabulary entries of one tile of TRL's output head (trl.kernels.chunked_logprob, TRL 1.16)
HEAD_TILE = (4096, 32768)
_NVFP4_BYTES = 0.5625
#: elements that the reference dequantization handles at once, and the float32 copies it makes of them
_DEQUANTIZE_CHUNK, _DEQUANTIZE_COPIES = 1 << 24, 3


@dataclasses.dataclass(frozen=True)
class Workload:
    """What one process does. `completions`: sequences sampled at a time; `batch`: sequences of one backward pass."""

    batch: int = 8
    prompt_length: int = 512
    completion_length: int = 1024
    completions: int = 64
    lora_rank: int = 32
    optimizer: str = "adamw_torch"
    gradient_checkpointing: bool = True
    base_format: str = "nvfp4"
    vllm: bool = False
    attention: str = "sdpa"

    @property
    def length(self) -> int:
        return self.prompt_length + self.completion_length


@dataclasses.dataclass(frozen=True)
class Shape:
    """The numbers of a model that memory depends on. `linears`: (N, K) of each layer that is quantized and adapted."""

    hidden: int
    mlp: int
    layers: int
    vocabulary: int
    query_width: int
    kv_width: int
    linears: tuple[tuple[int, int], ...]
    dense_parameters: int

    @property
    def parameters(self) -> int:
        return self.dense_parameters + sum(n * k for n, k in self.linears)


def shape_of(model: str | os.PathLike | PretrainedConfig, **kwargs: Any) -> Shape:
    """Read a model's shape from its configuration (folder, Hub id or config object). No weights are read."""
    config = model if isinstance(model, PretrainedConfig) else AutoConfig.from_pretrained(model, **kwargs)
    text = config.get_text_config()
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    quantizer = NVFP4HfQuantizer(NVFP4Config(), pre_quantized=False)
    quantizer._process_model_before_weight_loading(built, checkpoint_files=None)
    linears: dict[str, nn.Linear] = quantizer._converted
    quantized = {f"{name}.weight" for name in linears}
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Shape(
        hidden=text.hidden_size,
        mlp=text.intermediate_size,
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
        query_width=text.num_attention_heads * head_dim,
        kv_width=(getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head_dim,
        linears=tuple((layer.out_features, layer.in_features) for layer in linears.values()),
        dense_parameters=sum(p.numel() for name, p in built.named_parameters() if name not in quantized),
    )


# --- the parts --------------------------------------------------------------------------------------------------------------------


def base_bytes(shape: Shape, base_format: str = "nvfp4") -> int:
    """Frozen weights: 4.5 bits a quantized weight (+ 4 bytes a layer), 2 bytes for everything else (embeddings, head, norms)."""
    per_weight = {"nvfp4": _NVFP4_BYTES, "nf4": 0.52, "bf16": 2.0}[base_format]
    weights = sum(n * k for n, k in shape.linears)
    return round(weights * per_weight + 4 * len(shape.linears) + 2 * shape.dense_parameters)


def adapter_parameters(shape: Shape, rank: int) -> int:
    """LoRA on every linear layer: r (N + K) parameters each."""
    return sum(rank * (n + k) for n, k in shape.linears)


def adapter_bytes(shape: Shape, work: Workload) -> dict[str, int]:
    """The adapter in float32 (4 bytes), its gradients (4), the optimizer's state (8 for AdamW, two float32 moments)."""
    count = adapter_parameters(shape, work.lora_rank)
    return {
        "adapter": 4 * count,
        "gradients": 4 * count,
        "optimizer": round(OPTIMIZER_BYTES[work.optimizer] * count),
    }


def layer_activation_bytes(shape: Shape, work: Workload) -> int:
    """What one decoder layer keeps for its backward pass, under bf16 autocast with LoRA, M tokens:

        norms       2 x 4 h         (float32 copies of their inputs)
        residual    2 h
        attention   4 q + 4 kv      (q, k, v and its output)
        MLP         6 f             (gate, up, activated gate)
        LoRA        2 K + 2 r       a linear layer (its own bf16 copy of the input; x A^T)

    The base's linear layers keep nothing: their backward needs only the packed weight.
    """
    per_layer = shape.linears[: len(shape.linears) // shape.layers]
    lora = sum(2 * k + 2 * work.lora_rank for _, k in per_layer)
    token = 8 * shape.hidden + 2 * shape.hidden + 4 * shape.query_width + 4 * shape.kv_width + 6 * shape.mlp + lora
    return work.batch * work.length * token


def activation_bytes(shape: Shape, work: Workload) -> int:
    """All layers: with gradient checkpointing the input of each (2 h a token) and one layer in full, else every layer in full."""
    full = layer_activation_bytes(shape, work)
    if not work.gradient_checkpointing:
        return shape.layers * full
    return shape.layers * work.batch * work.length * 2 * shape.hidden + full


def logit_bytes(shape: Shape, work: Workload) -> int:
    """The output head of an update. TRL never builds the logits: it projects tiles of `HEAD_TILE` tokens x vocabulary (2 bytes each),
    and for the C completion tokens it keeps the hidden state (2 h), its gradient summed in float32 (4 h) and rounded (2 h); the
    gradient is then scattered back to all M tokens (2 x 2 h)."""
    tokens, columns = HEAD_TILE
    completion = work.batch * work.completion_length
    tile = 2 * min(tokens, completion) * min(columns, shape.vocabulary)
    return tile + 8 * shape.hidden * completion + 4 * shape.hidden * work.batch * work.length


def scratch_bytes(shape: Shape, work: Workload) -> int:
    """The largest weight, dequantized to bf16 for a matrix product with many tokens, and what the reference dequantization needs."""
    if work.base_format != "nvfp4":
        return 0
    largest = max(n * k for n, k in shape.linears)
    return 2 * largest + 4 * _DEQUANTIZE_COPIES * min(largest, _DEQUANTIZE_CHUNK)


def mlp_backward_bytes(shape: Shape, work: Workload) -> int:
    """Gradients alive while a layer's MLP is walked backwards, 2 bytes each: of gate, up and their product, the last of them twice, since
    the base's share and LoRA's are summed."""
    return 4 * 2 * work.batch * work.length * shape.mlp


def kv_bytes(shape: Shape, sequences: int, length: int) -> int:
    """Key and value, 2 bytes each, for every layer: 4 kv L a token."""
    return 4 * shape.kv_width * shape.layers * sequences * length


def prefill_bytes(shape: Shape, work: Workload) -> int:
    """The prompts' pass through one MLP in transformers' generate, which runs outside autocast: the activated gate and up (2 f each), and
    LoRA's float32 output with its sum (4 f each); residual, norm output and its float32 copy (8 h)."""
    return work.completions * work.prompt_length * (12 * shape.mlp + 8 * shape.hidden)


def generation_bytes(shape: Shape, work: Workload) -> int:
    """transformers' generate: at the prompts' pass, their KV cache and `prefill_bytes`; at the last token, the whole KV cache (one layer's
    twice, while it grows by concatenation) and two float32 logits a sequence.

    With vLLM the KV cache is vLLM's, and takes what is left.
    """
    if work.vllm:
        return 0
    prompts = kv_bytes(shape, work.completions, work.prompt_length) + prefill_bytes(shape, work)
    cache = kv_bytes(shape, work.completions, work.length)
    return max(prompts, cache + cache // shape.layers + 2 * 4 * work.completions * shape.vocabulary)


# --- the sum ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes of the parts, and what they add up to: peak of an update, of a rollout, of both, and `total` with CUDA and vLLM."""

    parts: dict[str, int]
    update: int
    rollout: int
    peak: int
    total: int
    gpu_bytes: int | None
    kv_left: int
    kv_sequences: int

    @property
    def fits(self) -> bool | None:
        return None if self.gpu_bytes is None else self.total <= self.gpu_bytes


def predict(shape: Shape, work: Workload, gpu_gib: float | None = None) -> Plan:
    """Peak of one process: what always stays, plus the larger of one update and one rollout; they do not happen together.

    An update peaks either at the logits' backward (all checkpoints, no layer in full yet) or inside a layer's.

    Args:
        gpu_gib: memory of the GPU in GiB, for `fits` and for what is left as vLLM's KV cache.
    """
    if work.optimizer not in OPTIMIZER_BYTES:
        raise ValueError(f"optimizer={work.optimizer!r} is unknown here; known are {', '.join(OPTIMIZER_BYTES)}.")
    parts = {"base": base_bytes(shape, work.base_format), **adapter_bytes(shape, work)}
    kept = activation_bytes(shape, work) - (layer_activation_bytes(shape, work) if work.gradient_checkpointing else 0)
    parts["activations"] = activation_bytes(shape, work)
    parts["logits"] = logit_bytes(shape, work)
    parts["scratch"] = scratch_bytes(shape, work)
    parts["generation"] = generation_bytes(shape, work)
    static = parts["base"] + parts["adapter"] + parts["gradients"] + parts["optimizer"]
    in_layer = parts["activations"] + mlp_backward_bytes(shape, work) + parts["scratch"]
    update = max(kept + parts["logits"], in_layer)
    update, rollout = static + update, static + parts["generation"] + parts["scratch"]
    peak = max(update, rollout)
    total = peak + CONTEXT_BYTES + (VLLM_BYTES if work.vllm else 0)
    gpu = None if gpu_gib is None else round(gpu_gib * 2**30)
    left = max(0, (gpu or 0) - total)
    one = kv_bytes(shape, 1, work.length)
    return Plan(parts, update, rollout, peak, total, gpu, left if work.vllm else 0, left // one if work.vllm else 0)


def suggest(shape: Shape, work: Workload, gpu_gib: float) -> tuple[Workload, Plan] | None:
    """The largest power-of-two batch that fits (with room for 16 sequences in vLLM's cache); None if not even one sequence does."""
    for exponent in range(int(math.log2(max(work.batch, 64))), -1, -1):
        candidate = dataclasses.replace(work, batch=2**exponent)
        plan = predict(shape, candidate, gpu_gib)
        if plan.fits and (not work.vllm or plan.kv_sequences >= min(16, work.completions)):
            return candidate, plan
    return None
