"""The decoder layers of a trainer's model: what is compiled one by one (compiled.py) and recomputed one by one (recompute.py)."""

from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..support.names import unwrap


def base_of(model: nn.Module) -> PreTrainedModel:
    """The model of transformers, without what wraps it: DDP, DeepSpeed, PEFT."""
    inner = unwrap(model)
    return inner if isinstance(inner, PreTrainedModel) else cast(Any, inner).get_base_model()


def decoder_of(model: nn.Module) -> nn.Module:
    """A model's text part: towers of other modalities are left alone."""
    return base_of(model).get_decoder()


def decoder_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers of a model's text part that can be checkpointed one by one, the first one first; [] where it has no list of such."""
    lists = [child for child in decoder_of(model).children() if isinstance(child, nn.ModuleList)]
    return [layer for part in lists for layer in part if isinstance(layer, GradientCheckpointingLayer)]
