"""Architectures beyond their module classes: one table of data, read by trainer, engine and exporter.

`DECODER` is the row of most text decoders (Qwen 2 and 3, Llama, Mistral, Gemma 2 and 3): transformers names the
projections alike. An architecture that differs has a row of its own in `ROWS`.

Three things hold for every architecture. `TOWERS` see pictures and sound, and `ROUTERS` choose experts: both stay
dense, and adapters stay out of them unless they are asked for. Output heads stay dense.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: what a model of pictures, video or sound has beside its text decoder, projections into it included
TOWERS = (
    "visual",
    "vision_tower",
    "vision_model",
    "vision_encoder",
    "audio_tower",
    "audio_model",
    "audio_encoder",
    "multi_modal_projector",
    "multimodal_projector",
    "vision_projection",
    "connector",
    "aligner",
    "embed_vision",
    "embed_audio",
    "vqmodel",
)
#: what chooses among a layer's experts
ROUTERS = ("router", "mlp.gate", "block_sparse_moe.gate", "feed_forward.gate", "mixer.gate", "shared_expert_gate")

#: projections of attention, plain, latent or linear: what an adapter means by "all linear layers" beside experts
ATTENTION = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("in_proj_qkv", "in_proj_qkvz", "in_proj_z", "linear_attn.out_proj"),
)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One row.

    Args:
        fused: vLLM's layer -> the checkpoint's linears that it runs as one matrix, in row order. They share one storage
            and one global scale, so they are packed all or none. Itself alone, where the checkpoint's matrix is fused
            already.
        heads: names of output heads. They are never quantized: TRL computes log-probabilities from their weight.
        dense: further linears that stay dense: gates of a few outputs, whose errors reach every token of a state.
        unadapted: further linears that get no adapter by default. Those in `dense` get none either.
        outside_vllm: why vLLM cannot roll it out on the trainer's weights; empty where nothing is known against it.
    """

    fused: Mapping[str, tuple[str, ...]]
    heads: tuple[str, ...]
    dense: tuple[str, ...] = ()
    unadapted: tuple[str, ...] = ()
    outside_vllm: str = ""

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        return tuple(self.fused.values())


DECODER = Architecture(
    fused=MappingProxyType({"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}),
    heads=("lm_head", "score"),
)

_ONE_MLP = dataclasses.replace(DECODER, fused=MappingProxyType({**DECODER.fused, "gate_up_proj": ("gate_up_proj",)}))
_ONE_EACH = dataclasses.replace(_ONE_MLP, fused=MappingProxyType({**_ONE_MLP.fused, "qkv_proj": ("qkv_proj",)}))
_DELTA_NET = dataclasses.replace(DECODER, dense=("in_proj_a", "in_proj_b", "in_proj_ba"))
# a state-space mixer computes with out_proj.weight itself, so an adapter there would never act
_MAMBA = dataclasses.replace(DECODER, unadapted=("mamba.out_proj", "mixer.out_proj"))
_SHORT_CONVOLUTIONS = dataclasses.replace(
    DECODER,
    outside_vllm="vLLM builds the projections of its short convolutions as plain dense layers, which hold neither packed "
    "weights nor an adapter",
)
_GEMMA_NANO = dataclasses.replace(
    DECODER,
    dense=("altup", "laurel", "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"),
)
#: the text decoder's `model_type` -> its row, where it is not `DECODER`
ROWS: Mapping[str, Architecture] = MappingProxyType(
    {
        "phi3": _ONE_EACH,
        "glm": _ONE_MLP,
        "glm4": _ONE_MLP,
        "qwen3_next": _DELTA_NET,
        "qwen3_5": _DELTA_NET,
        "qwen3_5_text": _DELTA_NET,
        "qwen3_5_moe": _DELTA_NET,
        "qwen3_5_moe_text": _DELTA_NET,
        "falcon_h1": _MAMBA,
        "nemotron_h": _MAMBA,
        "bamba": _MAMBA,
        "granitemoehybrid": _MAMBA,
        "lfm2": _SHORT_CONVOLUTIONS,
        "lfm2_moe": _SHORT_CONVOLUTIONS,
        "gemma3n": _GEMMA_NANO,
        "gemma3n_text": _GEMMA_NANO,
        "gemma4": _GEMMA_NANO,
        "gemma4_text": _GEMMA_NANO,
    }
)


def architecture_of(model_type: str | None) -> Architecture:
    """The row of a `model_type`, of the whole model or of its text decoder."""
    return ROWS.get(model_type or "", DECODER)


def in_tower(name: str) -> bool:
    """Whether a module, by its dotted name, is part of a tower."""
    return not set(TOWERS).isdisjoint(name.split("."))


def dense_by_default(model_type: str | None) -> tuple[str, ...]:
    """Names of modules whose linears stay dense, besides the output head, unless a checkpoint brings them packed."""
    return (*TOWERS, *ROUTERS, *architecture_of(model_type).dense)


def unadapted_by_default(config: "PretrainedConfig") -> tuple[str, ...]:
    """Names of modules that "all linear layers" leaves out, of those that a model with this configuration can have."""
    text = config.get_text_config(decoder=True)
    row = architecture_of(text.model_type)
    towers = TOWERS if text is not config else ()
    routers = ROUTERS if has_experts(config) else ()
    return (*towers, *routers, *row.dense, *row.unadapted)


def delta_net_layers(config: "PretrainedConfig") -> tuple[int, ...]:
    """Which layers of the text decoder are gated delta nets, which carry a state in place of keys and values."""
    text = config.get_text_config(decoder=True)
    if not hasattr(text, "linear_num_value_heads"):
        return ()
    return tuple(index for index, kind in enumerate(text.layer_types) if kind == "linear_attention")


def has_experts(config: "PretrainedConfig") -> bool:
    """Whether a model with this configuration is a mixture of experts."""
    text = config.get_text_config(decoder=True)
    return any(
        getattr(text, name, None)
        for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    )
