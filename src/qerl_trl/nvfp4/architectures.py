"""Table of architectures, shared by trainer, engine and exporter.

`DECODER` is the row of most text decoders (Qwen 2 and 3, Llama, Mistral, Gemma 2 and 3), thanks to common names in
transformers. An architecture with other names has a row of its own in `ROWS`.

In every architecture `TOWERS` (pictures, sound) and `ROUTERS` (choice of experts) stay dense and get no adapter by
default, and output heads stay dense.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: parts of a multimodal model outside its text decoder, with the projections into the decoder
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
#: modules choosing among a layer's experts
ROUTERS = ("router", "mlp.gate", "block_sparse_moe.gate", "feed_forward.gate", "mixer.gate", "shared_expert_gate")

#: attention projections (plain, latent, linear): an adapter's "all linear layers" in a model with experts
ATTENTION = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("in_proj_qkv", "in_proj_qkvz", "in_proj_z", "linear_attn.out_proj"),
)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One row.

    Args:
        fused: vLLM's layer -> the checkpoint's linears in it, in row order. They share one storage and one global
            scale, so all of them are packed or none. A matrix fused in the checkpoint maps to itself.
        heads: names of output heads, never quantized: TRL computes log-probabilities from their weight.
        dense: further dense linears: gates with few outputs; their errors reach every token through a state.
        unadapted: further linears without an adapter by default, in addition to those in `dense`.
        outside_vllm: why vLLM cannot generate with the trainer's weights; empty if it can.
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
# a state-space mixer computes with out_proj.weight directly, ignoring an adapter there
_MAMBA = dataclasses.replace(DECODER, unadapted=("mamba.out_proj", "mixer.out_proj"))
_SHORT_CONVOLUTIONS = dataclasses.replace(
    DECODER,
    outside_vllm="vLLM builds the projections of its short convolutions as plain dense layers, which hold neither "
    "packed weights nor an adapter",
)
_GEMMA_NANO = dataclasses.replace(
    DECODER,
    dense=("altup", "laurel", "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"),
)
#: `model_type` of the text decoder -> its row, if not `DECODER`
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
    """Return the row for a `model_type`, of the whole model or of its text decoder."""
    return ROWS.get(model_type or "", DECODER)


def in_tower(name: str) -> bool:
    """True if a module, by its dotted name, is part of a tower."""
    return not set(TOWERS).isdisjoint(name.split("."))


def dense_by_default(model_type: str | None) -> tuple[str, ...]:
    """Return modules with linears that stay dense, besides the output head, unless a checkpoint has them packed."""
    return (*TOWERS, *ROUTERS, *architecture_of(model_type).dense)


def unadapted_by_default(config: "PretrainedConfig") -> tuple[str, ...]:
    """Return the modules that "all linear layers" of an adapter excludes, for this configuration."""
    text = config.get_text_config(decoder=True)
    row = architecture_of(text.model_type)
    towers = TOWERS if text is not config else ()
    routers = ROUTERS if has_experts(config) else ()
    return (*towers, *routers, *row.dense, *row.unadapted)


def delta_net_layers(config: "PretrainedConfig") -> tuple[int, ...]:
    """Return the indices of gated delta nets in the text decoder: layers with a state instead of keys and values."""
    text = config.get_text_config(decoder=True)
    if not hasattr(text, "linear_num_value_heads"):
        return ()
    return tuple(index for index, kind in enumerate(text.layer_types) if kind == "linear_attention")


def has_experts(config: "PretrainedConfig") -> bool:
    """True if a model with this configuration is a mixture of experts."""
    text = config.get_text_config(decoder=True)
    return any(
        getattr(text, name, None)
        for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    )
