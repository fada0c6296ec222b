"""`NVFP4Config`, and loading of a model in NVFP4 from any checkpoint.

A bf16 checkpoint is quantized while loading, tensor by tensor, on the layer's device:

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-3B-Instruct", quantization_config=NVFP4Config())

An NVFP4 checkpoint (compressed-tensors or ModelOpt) has its own `quantization_config`, fixed in transformers.
`from_pretrained` reads either kind; if another library calls transformers' `from_pretrained`, pass it the arguments
from `pretrained_kwargs`, or the configuration from `load_config`.

`model.save_pretrained` always writes compressed-tensors, readable by stock transformers, vLLM and llm-compressor. Our
method "qerl_nvfp4" exists in memory only, and is not transformers' `NVFP4Config` ("nvfp4", inference on Blackwell).
"""

import copy
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.quantizers import register_quantization_config
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..support.files import named_in_errors
from . import checkpoints, headers, quantizer  # noqa: F401  (registers the quantizer)
from .format import SCALE_RULES

logger = logging.get_logger(__name__)


# --- the configuration ------------------------------------------------------------------------------------------------


@register_quantization_config(checkpoints.METHOD)
class NVFP4Config(QuantizationConfigMixin):
    """Configuration for quantizing a model to NVFP4 weights (W4A16) while loading.

    Args:
        scale_rule: "rtn" (plain rounding, the QeRL paper), "four_over_six" or "neighbor_sweep" (see `qerl_trl.nvfp4`).
        modules_to_not_convert: modules to leave in `compute_dtype`, besides the output head and tied embeddings: whole
            dotted names or parts ("down_proj", "model.layers.1"), shell patterns ("*.layers.[01].*"), regular
            expressions ("re:..."). See `qerl_trl.nvfp4.checkpoints.name_matches`.
        compute_dtype: dtype of the matmuls and of all unquantized tensors; becomes the model's `dtype`.
        source_format: layout of a quantized checkpoint, None for a dense one. Set by `load_config`.
        source_targets: quantized modules of such a checkpoint, in compressed-tensors' notation. Set by `load_config`.
        source_fp8: its FP8 modules, which become dense (`format.dequantize_fp8`). Set by `load_config`.
    """

    def __init__(
        self,
        scale_rule: str = "rtn",
        modules_to_not_convert: list[str] | None = None,
        compute_dtype: str | torch.dtype = "bfloat16",
        source_format: str | None = None,
        source_targets: list[str] | None = None,
        source_fp8: list[str] | None = None,
    ):
        if scale_rule not in SCALE_RULES:
            raise ValueError(f"scale_rule={scale_rule!r} is unknown. Pass one of {', '.join(map(repr, SCALE_RULES))}.")
        skipped = checkpoints.check_entries(modules_to_not_convert or (), "modules_to_not_convert")
        self.quant_method = checkpoints.METHOD  # type: ignore[assignment]  # transformers declares its own enum
        self.scale_rule = scale_rule
        self.modules_to_not_convert = list(skipped)
        self.compute_dtype = str(compute_dtype).removeprefix("torch.")
        self.source_format = source_format
        self.source_targets = ["Linear"] if source_targets is None else list(source_targets)
        self.source_fp8 = list(source_fp8 or ())
        self._dense_linears: list[str] | None = None  # set by linears_to_quantize

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.compute_dtype)

    @property
    def selection(self) -> checkpoints.Selection:
        """The selection of quantized layers."""
        names = (self.modules_to_not_convert, self.source_targets, self.source_fp8)
        return checkpoints.Selection(self.source_format, *map(tuple, names))

    @property
    def dense_linears(self) -> list[str] | None:
        """Sorted names of the dense linear layers; None before `linears_to_quantize` has seen a model."""
        return self._dense_linears

    def linears_to_quantize(self, model: PreTrainedModel) -> dict[str, nn.Linear]:
        """Return the linear layers of `model` to quantize, by name, and record the dense ones for config.json."""
        names = [*dict(model.named_modules()), *dict(model.named_parameters())]
        for entry in self.modules_to_not_convert if self.source_format is None else ():
            if not any(checkpoints.name_matches(name, entry) for name in names):
                logger.warning(f"modules_to_not_convert: {entry!r} matches no module of {type(model).__name__}.")
        quantized, dense = checkpoints.linears_to_quantize(model, self.selection)
        self._dense_linears = sorted(dense)
        return quantized

    def options(self) -> dict[str, Any]:
        """Return the constructor's arguments, with `quant_method`, for `from_dict`."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for config.json: in the form of compressed-tensors, readable without this package."""
        ignore = self.modules_to_not_convert if self.dense_linears is None else self.dense_linears
        return checkpoints.compressed_tensors_config(ignore)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any):
        """Build from `options()`, or from the `quantization_config` of an NVFP4 checkpoint."""
        if config_dict.get("quant_method") == checkpoints.METHOD:
            options = config_dict | kwargs
            config = cls(**{name: options[name] for name in options if name != "quant_method"})
        else:
            config = cls.from_checkpoint(config_dict, "quantization_config", **kwargs)
        return (config, {}) if return_unused_kwargs else config

    @classmethod
    def from_checkpoint(
        cls, quantization_config: dict[str, Any], where: str, modules_to_not_convert: Iterable[str] = (), **options: Any
    ) -> "NVFP4Config":
        """Translate a compressed-tensors or ModelOpt `quantization_config`; `where` names it in errors."""
        selection = checkpoints.parse_quantization_config(quantization_config, where).without(modules_to_not_convert)
        return cls(
            modules_to_not_convert=list(selection.ignore),
            source_format=selection.layout,
            source_targets=list(selection.targets),
            source_fp8=list(selection.fp8),
            **options,
        )

    def __repr__(self) -> str:
        options = (f"{name}={value!r}" for name, value in self.options().items() if name != "quant_method")
        return f"NVFP4Config({', '.join(options)})"


# --- loading ----------------------------------------------------------------------------------------------------------


def load_config(
    model_id: str | os.PathLike, quantization_config: NVFP4Config | None = None, **kwargs: Any
) -> PretrainedConfig:
    """Call `AutoConfig.from_pretrained`, and replace an NVFP4 checkpoint's `quantization_config` by `NVFP4Config`.

    Pass the result as `config=` to any `from_pretrained`. The configuration of a dense checkpoint is unchanged.

    Args:
        model_id: folder or Hub repository.
        quantization_config: source of `compute_dtype` and further `modules_to_not_convert`.
        kwargs: `revision`, `token`, `subfolder`, `trust_remote_code`, ... for `AutoConfig.from_pretrained`.
    """
    if quantization_config is not None and not isinstance(quantization_config, NVFP4Config):
        cls = type(quantization_config)
        raise ValueError(
            f"quantization_config is a {cls.__module__}.{cls.__name__}; this function takes qerl_trl.NVFP4Config, "
            "not transformers' class of that name. For other methods call transformers' from_pretrained."
        )
    with named_in_errors(model_id):
        config = AutoConfig.from_pretrained(model_id, **kwargs)
    stored, where = stored_quantization(model_id, config, **kwargs)
    if stored is None:
        return config
    wanted = quantization_config or NVFP4Config()
    if wanted.scale_rule != "rtn":
        logger.warning(
            f"{model_id} is quantized already: scale_rule={wanted.scale_rule!r} has no effect on its weights."
        )
    ours = NVFP4Config.from_checkpoint(
        stored, where, modules_to_not_convert=wanted.modules_to_not_convert, compute_dtype=wanted.compute_dtype
    )
    config.quantization_config = ours.options()
    return config


def quantization_of(config: PretrainedConfig) -> Any:
    """Return the `quantization_config` in a model's configuration, or `None`."""
    return getattr(config, "quantization_config", None)


def stored_quantization(
    model_id: str | os.PathLike, config: PretrainedConfig | None = None, **kwargs: Any
) -> tuple[dict[str, Any] | None, str]:
    """Return (a checkpoint's own description of its quantization or `None`, the file and key that have it).

    Args:
        config: its configuration, if already loaded.
        kwargs: as for `load_config`.
    """
    if config is None:
        with named_in_errors(model_id):
            config = AutoConfig.from_pretrained(model_id, **kwargs)
    stored = quantization_of(config)
    if stored is None:
        return _modelopt_sidecar(model_id, **kwargs), f"{model_id}: hf_quant_config.json"
    return stored if isinstance(stored, dict) else stored.to_dict(), f"{model_id}: config.json: quantization_config"


def pretrained_kwargs(
    model_id: str | os.PathLike, quantization_config: NVFP4Config | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Return arguments of `AutoModelForCausalLM.from_pretrained(model_id, ...)` for an NVFP4 model.

    `{"quantization_config": ...}` for a dense checkpoint, `{"config": ...}` for an NVFP4 one. `kwargs` as for
    `load_config`.

    Raises:
        `ValueError`: incomplete checkpoint (see `headers.read_folder`); the message names a file.
    """
    if os.path.isdir(model_id):
        headers.read_folder(Path(model_id, kwargs.get("subfolder") or ""))
    config = load_config(model_id, quantization_config, **kwargs)
    if quantization_of(config) is None:
        return {"quantization_config": quantization_config or NVFP4Config()}
    return {"config": config}


def auto_class_of(config: PretrainedConfig, architecture: str | None = None) -> Any:
    """Return the auto class that TRL uses for a checkpoint with this configuration, with a vision tower if it has one.

    Args:
        architecture: name of the model's class; by default the first in the configuration.
    """
    named = architecture or next(iter(config.architectures or ()), None)
    pictures: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    remote = "AutoModelForImageTextToText" in (getattr(config, "auto_map", None) or {})
    with_tower = remote or (pictures is not None and pictures.__name__ == named)
    return AutoModelForImageTextToText if with_tower else AutoModelForCausalLM


def from_pretrained(
    model_id: str | os.PathLike,
    quantization_config: NVFP4Config | None = None,
    *,
    model_class: Any = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a model in NVFP4 from a dense, compressed-tensors or ModelOpt checkpoint (folder or Hub repository), by
    default as the class chosen by TRL ([`auto_class_of`]).

    As in transformers, `kwargs` go to `model_class.from_pretrained` (`device_map`, `attn_implementation`, `revision`,
    ...) or, for its fields (`num_labels`, ...), to the model's configuration.
    """
    hub = {
        key: kwargs[key]
        for key in ("revision", "token", "subfolder", "cache_dir", "trust_remote_code")
        if key in kwargs
    }
    chosen = pretrained_kwargs(model_id, quantization_config, **hub)
    if "config" in chosen and isinstance(kwargs.get("config"), PretrainedConfig):
        given = copy.deepcopy(kwargs["config"])
        given.quantization_config = chosen["config"].quantization_config
        chosen["config"] = given
    elif "config" in chosen:  # transformers does so for those it reads
        known = chosen["config"].to_dict().keys() - {"dtype"} | {"num_labels"}
        chosen["config"].update({key: kwargs.pop(key) for key in known & kwargs.keys()})
    if model_class is None:
        known = kwargs.get("config") or chosen.get("config") or AutoConfig.from_pretrained(model_id, **hub)
        model_class = auto_class_of(known)
    return model_class.from_pretrained(model_id, **{**kwargs, **chosen})


def _modelopt_sidecar(model_id: str | os.PathLike, **kwargs: Any) -> dict[str, Any] | None:
    """Read hf_quant_config.json: older ModelOpt exports have no `quantization_config` in config.json."""
    name = "hf_quant_config.json"
    if os.path.isdir(model_id):
        path = Path(model_id, kwargs.get("subfolder") or "", name)
        return json.loads(path.read_text()) if path.is_file() else None
    hub = {key: kwargs[key] for key in ("revision", "token", "subfolder", "cache_dir") if kwargs.get(key)}
    try:
        return json.loads(Path(hf_hub_download(str(model_id), name, **hub)).read_text())
    except EntryNotFoundError:  # or its subclass for "not in the cache, and offline"
        return None
