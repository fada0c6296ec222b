"""Bytes of a run on its GPU, as functions of the model's shape and the workload.

The model class is built on the meta device, so all counts (quantized layers, widths) come from the model itself. M:
tokens of one backward pass (`Workload.tokens`), C: completion tokens among them, h: hidden width, f: MLP width, V:
vocabulary, q, kv: attention widths, T: longest prompt plus longest completion. A bf16 number has 2 bytes.
`benchmarks/memory.py` compares the sums with measurements on a GPU.
"""

import copy
import dataclasses
import math
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

from .delta_nets import DeltaNets
from .workload import MAX_BATCHED_TOKENS, Workload

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

# Measured on an H200 (benchmarks/results/memory_h200.json)
#: CUDA context, cuBLAS workspaces and loaded kernels of a process, outside torch's count (0.7 to 1.0 GiB measured),
#: and a margin of 0.5 GiB: the largest model's allocator fragments more than `ALLOCATOR_SLACK`
CONTEXT_BYTES = 1_530_000_000
#: used by NCCL in each of several processes (multi_gpu_h200x2.json: `ours-dp` against one process)
NCCL_BYTES = 770_000_000
#: used by DeepSpeed, outside torch's count (the same file: `ours-zero2` against `ours-dp`)
DEEPSPEED_BYTES = 2_770_000_000
#: vLLM without weights, adapter, KV cache and graphs: input and sampling buffers, attention workspaces
ENGINE_BYTES = 900_000_000
#: one captured CUDA graph, per decoder layer
GRAPH_BYTES = 400_000
#: torch's reserved but unallocated memory, as a share of transient memory; 0.5 of all allocated memory for rows of
#: varying length, if the longest one did not start with an empty cache (update/batches.py)
ALLOCATOR_SLACK = 0.08
#: additional share of the activations of layers without recomputation (benchmarks/results/step_h200.json)
KEPT_SLACK = 0.06
#: float32 copies of the logits that vLLM's sampler makes (logits, log-probabilities, random numbers)
SAMPLER_COPIES = 3

# On a CPU: resident memory, without the droppable pages of a checkpoint's file (docs/source/fit_and_speed.md)
#: Python, torch, transformers, TRL and their libraries in a training process
CPU_PROCESS_BYTES = 760_000_000
#: glibc's unallocated memory, as a share of transient memory
CPU_SLACK = 0.5
#: float32 copies of a tile that TRL's head makes in plain torch (`_backward_tile`)
CPU_TILE_COPIES = 8
#: vLLM's CPU engine without its KV cache
CPU_ENGINE_BYTES = 600_000_000

# Constants of upstream code
#: tokens and vocabulary entries of one tile of TRL's output head (trl.kernels.chunked_logprob, TRL 1.16)
HEAD_TILE = (4096, 32768)
#: tokens of a block of vLLM's KV cache
KV_BLOCK, CPU_KV_BLOCK = 16, 128
#: an optimizer's float32 numbers per trained parameter, by the family in its name (transformers' `OptimizerNames`)
_OPTIMIZER_MOMENTS = {
    "ademamix": 3, "lomo": 0, "sgd": 0, "adafactor": 0.03, "adagrad": 1, "rmsprop": 1, "lion": 1, "adam": 2,
}  # fmt: skip
#: bytes per number of the optimizer's state, by name: 8-bit ones have a float32 scale per block of 256
_OPTIMIZER_WIDTHS = {"4bit": 0.53, "8bit": 1.02, "adamw_bnb": 1.02}
#: bytes per weight of a linear layer, by base format; nf4 with double quantization
_WEIGHT_BYTES = {"nvfp4": 0.5625, "nf4": 0.516}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model. `linears`: (N, K) of each quantized and adapted layer; `norms`: of the hidden width, per
    decoder layer; `head_norms`: queries and keys have norms of their own; `packs`: sequences can form one row
    (`update/packing.py`); `delta_nets`: layers without keys and values; `experts`: has experts with dense weights."""

    hidden: int
    mlp: int
    layers: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    linears: tuple[tuple[int, int], ...]
    dense_parameters: int
    norms: int = 2
    head_norms: bool = False
    packs: bool = True
    delta_nets: DeltaNets | None = None
    experts: bool = False

    @property
    def parameters(self) -> int:
        return self.dense_parameters + sum(map(math.prod, self.linears))

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attending(self) -> int:
        """Number of layers with keys and values."""
        return self.layers - (self.delta_nets.layers if self.delta_nets else 0)


#: names of the width of an MLP; the fallback is 4 times the hidden width
_MLP = ("intermediate_size", "ffn_dim", "n_inner")


def shape_of(model: "str | os.PathLike | PretrainedConfig", **kwargs: Any) -> Shape:
    """Read a model's shape from its configuration (folder, Hub id or config object). No weights are read."""
    import torch
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        PretrainedConfig,
    )

    from ..nvfp4.architectures import delta_net_layers
    from ..nvfp4.checkpoints import Selection, divided, expert_tensors
    from ..support.files import named_in_errors
    from ..update import packing

    config = model
    if not isinstance(config, PretrainedConfig):
        with named_in_errors(config, "config.json"):
            config = AutoConfig.from_pretrained(config, **kwargs)
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    pictures = text is not config and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto = AutoModelForImageTextToText if pictures else AutoModelForCausalLM  # as TRL loads it, tower included
    with torch.device("meta"):
        built = auto.from_config(config)
    # unsupported ones too: base_format="full" takes any model
    linears, _ = divided(built, Selection())
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    norms = [p.numel() for name, p in built.named_parameters() if p.ndim == 1 and name.endswith("norm.weight")]
    return Shape(
        hidden=text.hidden_size,
        mlp=next(filter(None, (getattr(text, name, None) for name in _MLP)), 4 * text.hidden_size),
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
        heads=text.num_attention_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=head_dim,
        norms=max(2, norms.count(text.hidden_size) // text.num_hidden_layers),
        packs=packing.why_not(built) is None,
        delta_nets=DeltaNets.of(config) if delta_net_layers(config) else None,
        experts=bool(expert_tensors(built)),
        head_norms=head_dim != text.hidden_size and head_dim in norms,
        linears=tuple((layer.out_features, layer.in_features) for layer in linears.values()),
        dense_parameters=built.num_parameters() - sum(layer.weight.numel() for layer in linears.values()),
    )


@dataclasses.dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model's frozen and trained parameters; `trained_parameters` counts them."""

    base: int
    trained: int
    trained_parameters: int


def model_bytes(model: "nn.Module") -> ModelBytes:
    """Count the bytes of a model in memory; storage shared by tensors counts once."""
    storages: dict[tuple[int, str], tuple[int, bool]] = {}
    sizes, trained_parameters = {False: 0, True: 0}, 0
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        storages[(storage.data_ptr(), str(parameter.device))] = (storage.nbytes(), parameter.requires_grad)
        trained_parameters += parameter.numel() * parameter.requires_grad
    for size, trained in storages.values():
        sizes[trained] += size
    return ModelBytes(sizes[False], sizes[True], trained_parameters)


def sharded_bytes(shape: Shape, work: Workload, model: ModelBytes) -> ModelBytes:
    """Count one process's share of a model under FSDP 2, plus gathered parameters (bf16 before torch 2.13): embeddings,
    head and three layers (current, next, and previous, which another stream may not have freed yet)."""
    dense = work.dtype_bytes * shape.dense_parameters
    bytes_each = 2 if work.base_format == "nvfp4" else 1
    gathered = dense + 3 * bytes_each * max(0, model.base - dense) // shape.layers
    return ModelBytes(
        base=min(model.base, -(-model.base // work.processes) + gathered),
        trained=-(-model.trained // work.processes),
        trained_parameters=-(-model.trained_parameters // work.processes),
    )


def base_bytes(shape: Shape, base_format: str = "nvfp4", dtype_bytes: int = 2) -> int:
    """Count weights: 4.5 bits per quantized one (+ 4 bytes per layer), `dtype_bytes` for embeddings, head and norms."""
    quantized = sum(map(math.prod, shape.linears))
    if base_format in ("bf16", "full"):
        return dtype_bytes * shape.parameters
    scales = 4 * len(shape.linears) if base_format == "nvfp4" else 0
    return round(quantized * _WEIGHT_BYTES[base_format] + scales + dtype_bytes * shape.dense_parameters)


def adapter_parameters(shape: Shape, rank: int) -> int:
    """Count the parameters of LoRA on every linear layer, r (N + K) each."""
    return rank * sum(map(sum, shape.linears))


def predicted_bytes(shape: Shape, work: Workload) -> ModelBytes:
    """Predict `model_bytes`: a frozen base and a float32 adapter, or with base_format="full" no frozen part."""
    if work.base_format == "full":
        return ModelBytes(0, work.dtype_bytes * shape.parameters, shape.parameters)
    adapter = adapter_parameters(shape, work.lora_rank)
    return ModelBytes(base_bytes(shape, work.base_format, work.dtype_bytes), 4 * adapter, adapter)


def optimizer_bytes(optimizer: str, model: ModelBytes) -> int:
    """Count the optimizer's state by its name: in the parameter's dtype, or 8 or 4 bits; unknown ones as AdamW."""
    moments = next((count for family, count in _OPTIMIZER_MOMENTS.items() if family in optimizer), 2)
    width = model.trained / max(1, model.trained_parameters)
    for name, narrow in _OPTIMIZER_WIDTHS.items():
        if name in optimizer and "32bit" not in optimizer:
            width = narrow
    return round(moments * width * model.trained_parameters)


def engine_copy_bytes(shape: Shape, work: Workload) -> int:
    """Count a colocated engine's own weights, split over tensor-parallel ranks; 0 if it reads the trainer's."""
    if work.shares_weights:
        return 0
    return base_bytes(shape, "bf16" if work.base_format == "full" else work.base_format) // work.tensor_parallel


def aligned_scale_bytes(shape: Shape, tensor_parallel: int = 1) -> int:
    """Count the second copy of block scales on each rank of an engine, in aligned rows for Hopper's kernels, of layers
    with K not a multiple of 256. Ranks may split rows or columns; the larger of the two counts."""

    def held(n: int, k: int) -> int:
        if k % 256 == 0:
            return 0
        import torch

        import qerl_nvfp4

        scales = torch.empty(n, k // 16, dtype=torch.uint8, device="meta")
        aligned = qerl_nvfp4.align_scale_rows(scales)
        return 0 if aligned is scales else aligned.untyped_storage().nbytes()

    return sum(
        layers * max(held(n // tensor_parallel, k), held(n, k // tensor_parallel))
        for (n, k), layers in Counter(shape.linears).items()
    )


def engine_fixed_bytes(shape: Shape, work: Workload) -> int:
    """Count a colocated engine without weights and KV cache: adapter in bf16 (rank padded to 16), copied block scales,
    `ENGINE_BYTES`, CUDA graphs for 1, 2, 4, multiples of 8 to 256, of 16 to 512 sequences (to 2 `max_num_seqs`)."""
    adapter = 0
    if work.base_format != "full":
        adapter = 2 * adapter_parameters(shape, -(-work.lora_rank // 16) * 16) // work.tensor_parallel
    if work.base_format == "nvfp4":
        adapter += aligned_scale_bytes(shape, work.tensor_parallel)
    most = min(2 * work.completions, 512)
    sizes = 3 + min(most, 256) // 8 + max(0, most - 256) // 16 if work.graphs else 0
    return adapter + sizes * shape.layers * GRAPH_BYTES + (CPU_ENGINE_BYTES if work.cpu else ENGINE_BYTES)


def layer_activation_bytes(shape: Shape, work: Workload) -> int:
    """Count the activations of one decoder layer kept for its backward pass, under bf16 autocast with LoRA, M tokens:

        norms       2 h each      (their inputs; 4 h without compilation, in float32)
        inputs      4 h           (of q|k|v and gate|up, once per group; without compilation one is kept by the norm)
        attention   4 q + 4 kv    (q, k, v and the output, read by o; 8 q with a mask: PyTorch's attention then expands
                                  k and v to all heads. A packed row has k and v of a prompt once per completion)
        MLP         6 f           (gate, up, activated gate, read by down; 2 f more without compilation)
        LoRA        2 r           per linear layer (x A^T); compiled also A and B in bf16, once
        mask        2 T           (as bf16; of the softmax in "eager" attention 8 T per head)

    The base's linear layers keep nothing: their backward needs only the weight. Unfused LoRA layers keep their own
    inputs: 2 h if compiled, else a bf16 copy each, 2 K. Models without packing count as not compiled. With gated delta
    nets, it is the larger of their layer and an attention layer.
    """
    compiled = work.compiled and shape.packs
    per_layer = shape.linears[: len(shape.linears) // shape.layers]
    adapter = work.lora_rank * sum(map(sum, per_layer))
    masked = work.padded and not work.packed and work.attention == "sdpa"
    token = 6 * shape.mlp
    token += (2 * shape.norms + 4 if compiled else 4 * shape.norms + 2) * shape.hidden
    attention = 8 * shape.query_width
    if not masked:
        attention = 4 * shape.query_width + 4 * shape.kv_width * work.keys // work.tokens
    attention += 2 * (shape.query_width + shape.kv_width) if shape.head_norms else 0
    token += attention
    token += 4 * shape.heads
    if work.base_format == "full":
        token += 0 if compiled else 4 * shape.hidden + 2 * shape.mlp
    else:
        token += 2 * work.lora_rank * len(per_layer)
        if work.fused:
            token += 0 if compiled else 2 * shape.hidden + 2 * shape.mlp
        else:
            token += 2 * shape.hidden if compiled else sum(2 * k for _, k in per_layer)
    token += {"sdpa": 2 if masked else 0, "eager": 8 * shape.heads}.get(work.attention, 0) * work.length
    cast = 2 * adapter if compiled and work.base_format != "full" else 0
    if shape.delta_nets is not None:
        token += max(0, shape.delta_nets.activation_bytes(work.delta_kernels) - attention)
    return work.tokens * token * work.dtype_bytes // 2 + cast


def mask_bytes(work: Workload) -> int:
    """Count the boolean mask (T x T per sequence) shared by all layers, and a bf16 copy if T is no multiple of 8."""
    if not work.padded or work.packed or work.attention not in ("sdpa", "eager"):
        return 0
    return work.batch * work.length**2 * (1 if work.length % 8 == 0 else 3)


def checkpoint_bytes(shape: Shape, work: Workload) -> int:
    """Count what gradient checkpointing keeps, around layers or inside compiled ones: their input, 2 h per token."""
    return shape.layers * work.tokens * work.dtype_bytes * shape.hidden


def head_bytes(shape: Shape, work: Workload) -> int:
    """Count the output head of an update. TRL never builds the logits: it projects tiles of `HEAD_TILE`, tokens x
    vocabulary (2 bytes each). For the C completion tokens it keeps the hidden state (2 h), its gradient summed in
    float32 (4 h) and rounded (2 h); the gradient is then scattered to all M tokens (2 x 2 h)."""
    tokens, columns = HEAD_TILE
    completion = work.batch * work.completion_length
    tile = 2 * min(tokens, completion) * min(columns, shape.vocabulary)
    if work.cpu:  # and the tile's part of the weight in float32, twice
        tile = (work.dtype_bytes + 4 * CPU_TILE_COPIES) * tile // 2 + 8 * shape.hidden * min(columns, shape.vocabulary)
    return tile + 8 * shape.hidden * completion + 4 * shape.hidden * work.tokens


def layer_backward_bytes(shape: Shape, work: Workload) -> int:
    """Count the peak of a layer's backward pass on top of its activations. At the MLP: gradients of gate and up (2 f
    each; that of their product replaces it), of the layer's input and output (2 h each). Unfused LoRA layers add the
    base's share to their own: 4 f more. After gate and up: their decoded weight (both if fused) and the gradients."""
    summed = 0 if work.fused or work.base_format == "full" else 4 * shape.mlp
    gradients = work.tokens * (4 * shape.mlp + 4 * shape.hidden + summed) * work.dtype_bytes // 2
    if not work.fused:
        return gradients + scratch_bytes(shape, work)
    return max(gradients, gradients - work.tokens * 6 * shape.mlp * work.dtype_bytes // 2 + scratch_bytes(shape, work))


def inside_bytes(shape: Shape, work: Workload) -> int:
    """Count the extra bytes of a compiled layer that recomputes inside its single function: the product of gate and up
    next to its gradient (2 f), and the residual in float32 (4 h). On a dense base the compiler keeps both terms of gate
    and up, from the base and from LoRA: 4 f (counted already for unfused LoRA)."""
    if not (work.compiled and shape.packs):
        return 0
    summed = 4 * shape.mlp if work.base_format == "bf16" and work.fused else 0
    return work.tokens * (2 * shape.mlp + 4 * shape.hidden + summed) * work.dtype_bytes // 2


def scratch_bytes(shape: Shape, work: Workload) -> int:
    """Count the largest weight, dequantized to bf16 for a product with many tokens; if fused, gate and up."""
    if work.base_format in ("bf16", "full"):
        return 0
    return 2 * max(map(math.prod, shape.linears)) * (2 if work.fused else 1)


def scoring_bytes(shape: Shape, work: Workload) -> int:
    """Count the forward pass without gradients for the old log-probabilities, in batches of an update's size, without
    shared prompts: residual and norm (8 h), the MLP (gate, up, their product and LoRA's sum, 8 f), the completions'
    hidden states (2 h) and the head's tile. Compiled layers allocate an update's activations, and drop them."""
    alone = dataclasses.replace(work, generations=1)
    tile = 2 * min(HEAD_TILE[0], work.batch * work.completion_length) * min(HEAD_TILE[1], shape.vocabulary)
    token = (10 * shape.hidden + 8 * shape.mlp) * work.dtype_bytes // 2
    layer = alone.tokens * token
    if work.compiled:
        layer = layer_activation_bytes(shape, alone) + alone.tokens * 6 * shape.hidden * work.dtype_bytes // 2
    return layer + tile + 3 * mask_bytes(work) + scratch_bytes(shape, work)


def kept_bytes(shape: Shape, work: Workload) -> int:
    """Count the activations of the layers without recomputation."""
    keeping = shape.layers if work.gradient_checkpointing is False else min(work.kept_layers, shape.layers)
    return keeping * layer_activation_bytes(shape, work)


def update_bytes(shape: Shape, work: Workload) -> int:
    """Count the transient memory of an update. It peaks in the backward of the head (all checkpoints and kept
    activations) or of a layer, or (never with these shapes) in the forward pass for the old log-probabilities. Only the
    last layers keep activations, freed before the first layer recomputes. Weights trained in float32 are cast to bf16
    too. All layers share the rotary tables and the sequence boundaries."""
    layer = layer_activation_bytes(shape, work)
    keeping = shape.layers if work.gradient_checkpointing is False else min(work.kept_layers, shape.layers)
    checkpoints = checkpoint_bytes(shape, work) * (shape.layers - keeping) // shape.layers
    kept = checkpoints + keeping * layer
    recomputed = checkpoints + layer + inside_bytes(shape, work) if keeping < shape.layers else 0
    inside = max(kept, recomputed) + layer_backward_bytes(shape, work)
    casts = 2 * shape.parameters if work.base_format == "full" and work.dtype_bytes > 2 else 0
    shared = mask_bytes(work) + work.tokens * (4 * shape.head_dim + 64)
    return casts + max(shared + max(kept + head_bytes(shape, work), inside), scoring_bytes(shape, work))


def kv_bytes(shape: Shape, sequences: int, length: int) -> int:
    """Count keys and values, 2 bytes each, 4 kv per attention layer and token; plus the states of delta nets."""
    states = shape.delta_nets.cached_bytes() if shape.delta_nets else 0
    return sequences * (4 * shape.kv_width * shape.attending * length + states)


def engine_kv_bytes(shape: Shape, work: Workload, sequences: int) -> int:
    """Count vLLM's KV cache for `sequences` of full length on one tensor-parallel rank, plus its reserved block."""
    width = max(1, shape.kv_heads // work.tensor_parallel) * shape.head_dim
    if shape.delta_nets is not None:
        sizes = width, shape.attending, work.length, work.tensor_parallel, work.kv_dtype_bytes
        block, each = shape.delta_nets.blocks(*sizes)
        return block * (sequences * each + 1)
    block = CPU_KV_BLOCK if work.cpu else KV_BLOCK
    blocks = sequences * -(-work.length // block) + 1
    return 2 * work.kv_dtype_bytes * width * shape.layers * blocks * block


def transformers_rollout_bytes(shape: Shape, work: Workload) -> int:
    """Count transformers' generate. In the prompts' pass: their KV cache, the activated gate and up (2 f each), LoRA's
    float32 output with its sum (4 f each), residual, norm output and its float32 copy (8 h). At the last token: the
    whole KV cache (one layer's twice, as it grows by concatenation) and two float32 logits per sequence."""
    prompts = kv_bytes(shape, work.completions, work.prompt_length)
    prompts += work.completions * work.prompt_length * (12 * shape.mlp + 8 * shape.hidden)
    cache = kv_bytes(shape, work.completions, work.length)
    last = cache + cache // shape.layers + 2 * 4 * work.completions * shape.vocabulary
    return max(prompts, last) + scratch_bytes(shape, work)


def engine_rollout_bytes(shape: Shape, work: Workload) -> int:
    """Count vLLM's transient memory: a step with prompts (gate, up and their product, 6 f per token; residual, norms, 8
    h; in steps over `MAX_BATCHED_TOKENS` 24 h per further token, a quarter above measurements of 1.5B and 3B), gate and
    up dequantized together, and the sampler's float32 logits."""
    tokens = min(work.step_tokens, work.completions * work.prompt_length)
    prompts = tokens * (6 * shape.mlp // work.tensor_parallel + 8 * shape.hidden)
    prompts += max(0, tokens - MAX_BATCHED_TOKENS) * 16 * shape.hidden
    scratch = 4 * shape.mlp * shape.hidden // work.tensor_parallel if work.base_format in ("nvfp4", "nf4") else 0
    return prompts + scratch + SAMPLER_COPIES * 4 * work.completions * shape.vocabulary
