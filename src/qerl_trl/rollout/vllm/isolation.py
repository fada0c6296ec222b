"""Classes of its own for vLLM's Transformers backend.

For an architecture that vLLM has no code of its own for, it runs transformers' class, which it decorates in place for torch.compile. In
the trainer's process that is the class of the trainer's model, too, which would then look for attributes that only vLLM's instance has.
So vLLM is handed a configuration of another type, for which transformers' registry knows a subclass: that one is decorated.
"""

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import MODEL_MAPPING, AutoModel, PretrainedConfig
from vllm.model_executor.models import ModelRegistry

from ...nvfp4.checkpoints import METHOD
from ..spec import EngineSpec
from .loader import base_model

_BACKEND = ".transformers"


def arguments(model: nn.Module, spec: EngineSpec, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Further arguments of `LLM` that keep it away from the class of the trainer's `model`; none where vLLM has a class of its own.

    Raises:
        `ValueError`: the user overrides the configuration (`hf_overrides`) of a model that needs this.
    """
    config: Any = base_model(model).config
    if not _runs_transformers(config, chosen.get("model_impl", spec.model_impl)):
        return {}
    if chosen.get("hf_overrides"):
        raise ValueError(
            f"vllm_engine_kwargs has hf_overrides={chosen['hf_overrides']!r}, but {config.architectures} runs with transformers' code in vLLM. Change the "
            "model's config.json instead, or use use_vllm=False."
        )
    return {"hf_overrides": isolated}


def _runs_transformers(config: PretrainedConfig, model_impl: str) -> bool:
    if model_impl != "auto":
        return model_impl == "transformers"
    known = [ModelRegistry.models.get(name) for name in config.architectures or ()]
    return all(getattr(model, "module_name", _BACKEND).endswith(_BACKEND) for model in known)


def isolated(config: PretrainedConfig) -> PretrainedConfig:
    """`config`, of a type for which `AutoModel` builds a subclass of what it would build."""
    text = config.get_text_config()
    # vLLM also asks with a configuration of no model, and may ask twice
    if type(text) in MODEL_MAPPING and type(text).__module__ != __name__:
        theirs: Any = type(text)
        text.__class__ = _config_class(theirs)
        if getattr(config, "quantization_config", None) is None:
            # before 0.31 vLLM looks for a quantization that the configuration has not in `hf_overrides`, and takes no function there
            config.quantization_config = {"quant_method": METHOD}
    return config


@functools.cache
def _config_class(theirs: type[PretrainedConfig]) -> type[PretrainedConfig]:
    model: Any = MODEL_MAPPING[theirs]
    config = type(f"{theirs.__name__}InVLLM", (theirs,), {"__module__": __name__})
    AutoModel.register(config, type(model.__name__, (model,), {"__module__": __name__, "config_class": config}))
    return config
