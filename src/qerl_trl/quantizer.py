"""NVFP4 in `from_pretrained`: `NVFP4Config` and the transformers quantizer behind it.

A bf16 checkpoint is quantized while it is loaded, one tensor at a time, on the device where the layer will live; the dense model never
exists as a whole:

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-3B-Instruct", quantization_config=NVFP4Config())

A checkpoint that is NVFP4 already (compressed-tensors or ModelOpt) carries its own `quantization_config`, and transformers refuses to
replace one. `from_pretrained` below reads either kind; where another library calls transformers' `from_pretrained` (TRL's trainers,
`pipeline`), pass it the arguments from `pretrained_kwargs`, or the configuration from `load_config`:

    model = qerl_trl.from_pretrained(folder_or_id)
    model = AutoModelForCausalLM.from_pretrained(folder_or_id, config=load_config(folder_or_id))

`model.save_pretrained` writes compressed-tensors, always: stock transformers, vLLM and llm-compressor open it without this package.

Not transformers' own `NVFP4Config` (method "nvfp4": Blackwell only, inference only): ours is the method "qerl_nvfp4", in memory only.
Only hooks with one and the same signature from transformers 5.10.4 to 5.23 are overridden.
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
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from . import formats, headers, nvfp4
from .fused import fuse_storage
from .linear import NVFP4Linear, has_nvfp4
from .nvfp4 import NVFP4Tensor

logger = logging.get_logger(__name__)

QUANT_METHOD = "qerl_nvfp4"
_BYTES_PER_WEIGHT = 0.5625


# --- the configuration ------------------------------------------------------------------------------------------------------------


@register_quantization_config(QUANT_METHOD)
class NVFP4Config(QuantizationConfigMixin):
    """How to quantize a model to NVFP4 weights (W4A16) while loading it.

    Args:
        scale_rule: "rtn" (plain rounding, the QeRL paper), "four_over_six" or "neighbor_sweep" (see `qerl_trl.nvfp4`).
        modules_to_not_convert: modules to leave in `compute_dtype`, besides the output head and tied embeddings, which always stay:
            whole dotted names or parts ("down_proj", "model.layers.1"), shell patterns ("*.layers.[01].*"), regular expressions
            ("re:..."). See `qerl_trl.formats.name_matches`.
        compute_dtype: dtype of everything that is not quantized, and of the matmuls; the model's `dtype`.
        source_format: layout of a checkpoint that is quantized already, None for a dense one. Set by `load_config`.
        source_targets: which modules such a checkpoint quantizes, in compressed-tensors' notation. Set by `load_config`.
    """

    def __init__(
        self,
        scale_rule: str = "rtn",
        modules_to_not_convert: list[str] | None = None,
        compute_dtype: str | torch.dtype = "bfloat16",
        source_format: str | None = None,
        source_targets: list[str] | None = None,
        **unknown: Any,
    ):
        unknown.pop("quant_method", None)
        if unknown:
            raise ValueError(f"NVFP4Config has no option {', '.join(map(repr, sorted(unknown)))}.")
        if scale_rule not in nvfp4.SCALE_RULES:
            raise ValueError(
                f"scale_rule={scale_rule!r} is unknown; choose one of {', '.join(map(repr, nvfp4.SCALE_RULES))}."
            )
        if isinstance(modules_to_not_convert, str):
            raise ValueError(
                f"modules_to_not_convert={modules_to_not_convert!r} must be a list of names, e.g. ['down_proj']."
            )
        name = str(compute_dtype).removeprefix("torch.")
        if name not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"compute_dtype={compute_dtype!r} must be 'bfloat16', 'float16' or 'float32'.")
        if source_format is not None and source_format not in formats.LAYOUTS:
            raise ValueError(
                f"source_format={source_format!r} is unknown; choose one of {', '.join(map(repr, formats.LAYOUTS))}."
            )
        self.quant_method = QUANT_METHOD
        self.scale_rule = scale_rule
        self.modules_to_not_convert = list(modules_to_not_convert or ())
        self.compute_dtype = name
        self.source_format = source_format
        self.source_targets = list(source_targets or ("Linear",))
        self._dense_linears: list[str] | None = None  # known once a model was built

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.compute_dtype)

    def options(self) -> dict[str, Any]:
        """The constructor's arguments, with `quant_method`: what `from_dict` takes back."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def to_dict(self) -> dict[str, Any]:
        """What goes into config.json: compressed-tensors' description, readable without this package."""
        ignore = self.modules_to_not_convert if self._dense_linears is None else self._dense_linears
        return formats.compressed_tensors_config(ignore)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any):
        """Build from `options()`, or from the `quantization_config` of an NVFP4 checkpoint."""
        if config_dict.get("quant_method") == QUANT_METHOD:
            config = cls(**{**config_dict, **kwargs})
        else:
            config = cls.from_checkpoint(config_dict, "quantization_config", **kwargs)
        return (config, {}) if return_unused_kwargs else config

    @classmethod
    def from_checkpoint(
        cls, quantization_config: dict[str, Any], where: str, modules_to_not_convert: Iterable[str] = (), **options: Any
    ) -> "NVFP4Config":
        """Translate the `quantization_config` of a compressed-tensors or ModelOpt checkpoint; `where` names it in errors."""
        source = formats.parse_quantization_config(quantization_config, where)
        return cls(
            modules_to_not_convert=[*source.ignore, *modules_to_not_convert],
            source_format=source.layout,
            source_targets=list(source.targets),
            **options,
        )

    def __repr__(self) -> str:
        return f"NVFP4Config({', '.join(f'{name}={value!r}' for name, value in self.options().items() if name != 'quant_method')})"


# --- loading ----------------------------------------------------------------------------------------------------------------------


def load_config(
    model_id: str | os.PathLike, quantization_config: NVFP4Config | None = None, **kwargs: Any
) -> PretrainedConfig:
    """`AutoConfig.from_pretrained`, with an NVFP4 checkpoint's `quantization_config` replaced by ours.

    Pass the result as `config=` to any `from_pretrained`. For a checkpoint that is not quantized the plain configuration comes back:
    there, `quantization_config=NVFP4Config()` goes to `from_pretrained` itself (`pretrained_kwargs` knows which).

    Args:
        model_id: folder or Hub repository.
        quantization_config: `compute_dtype` and further `modules_to_not_convert` are taken from it; a scale rule has no effect on
            weights that are quantized already, which is said in a warning.
        kwargs: `revision`, `token`, `subfolder`, `trust_remote_code`, ... for `AutoConfig.from_pretrained`.
    """
    _check_is_ours(quantization_config)
    config = AutoConfig.from_pretrained(model_id, **kwargs)
    stored = getattr(config, "quantization_config", None)
    where = f"{model_id}: config.json: quantization_config"
    if stored is None:
        stored = _modelopt_sidecar(model_id, **kwargs)
        where = f"{model_id}: hf_quant_config.json"
    if stored is None:
        return config
    if not isinstance(stored, dict):
        stored = stored.to_dict()
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


def pretrained_kwargs(
    model_id: str | os.PathLike, quantization_config: NVFP4Config | None = None, **kwargs: Any
) -> dict[str, Any]:
    """The arguments that make `AutoModelForCausalLM.from_pretrained(model_id, ...)` give an NVFP4 model, whatever `model_id` holds.

    `{"quantization_config": ...}` for a dense checkpoint, `{"config": ...}` for an NVFP4 one. `kwargs` as for `load_config`.
    """
    config = load_config(model_id, quantization_config, **kwargs)
    if getattr(config, "quantization_config", None) is None:
        return {"quantization_config": quantization_config or NVFP4Config()}
    return {"config": config}


def from_pretrained(
    model_id: str | os.PathLike,
    quantization_config: NVFP4Config | None = None,
    *,
    model_class: type = AutoModelForCausalLM,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a model in NVFP4 from a dense, compressed-tensors or ModelOpt checkpoint (folder or Hub repository).

    `kwargs` go to `model_class.from_pretrained` (`device_map`, `attn_implementation`, `revision`, ...).
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
    return model_class.from_pretrained(model_id, **{**kwargs, **chosen})


def _check_is_ours(quantization_config: Any) -> None:
    if quantization_config is None or isinstance(quantization_config, NVFP4Config):
        return
    cls = type(quantization_config)
    raise ValueError(
        f"quantization_config is a {cls.__module__}.{cls.__name__}; this function takes qerl_trl.NVFP4Config (transformers has another "
        "class of that name, for inference on Blackwell). For other methods call transformers' from_pretrained."
    )


def _modelopt_sidecar(model_id: str | os.PathLike, **kwargs: Any) -> dict[str, Any] | None:
    """hf_quant_config.json, where older ModelOpt exports describe the quantization instead of in config.json."""
    name = "hf_quant_config.json"
    if os.path.isdir(model_id):
        path = Path(model_id, kwargs.get("subfolder") or "", name)
        return json.loads(path.read_text()) if path.is_file() else None
    hub = {key: kwargs[key] for key in ("revision", "token", "subfolder", "cache_dir") if kwargs.get(key)}
    try:
        return json.loads(Path(hf_hub_download(str(model_id), name, **hub)).read_text())
    except EntryNotFoundError:  # also its subclass for "not in the cache, and offline"
        return None


# --- the quantizer ----------------------------------------------------------------------------------------------------------------


class _PackedPlaceholder(nn.Module):
    """Stands in for a linear while a quantized checkpoint is loaded: its parameters have the checkpoint's names and dtypes."""

    def __init__(self, linear: nn.Linear, parts: dict[str, headers.TensorInfo]):
        super().__init__()
        for part, info in parts.items():
            if part != "bias":
                tensor = torch.empty(info.shape, dtype=headers.torch_dtype(info), device="meta")
                self.register_parameter(part, nn.Parameter(tensor, requires_grad=False))
        self.bias = linear.bias

    def to_nvfp4(self, layout: formats.Layout, compute_dtype: torch.dtype) -> NVFP4Linear:
        packed, block_scale, global_scale = (self.get_parameter(part).detach() for part in layout.tensors)
        if not layout.divides:
            global_scale = 1.0 / global_scale
        return NVFP4Linear.from_nvfp4(NVFP4Tensor(packed, block_scale, global_scale), self.bias, compute_dtype)


class _QuantizeLinear(ConversionOps):
    """A dense checkpoint tensor arrives on its device: quantize it and put an `NVFP4Linear` in the place of its `nn.Linear`."""

    def __init__(self, quantizer: "NVFP4HfQuantizer"):
        self.quantizer = quantizer

    @torch.no_grad()
    def convert(self, input_dict, model=None, missing_keys=None, **kwargs):
        for key, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            name = key.removesuffix(".weight")
            try:
                quantized = nvfp4.quantize(weight, self.quantizer.quantization_config.scale_rule)
            except ValueError as error:
                # transformers turns an exception here into a log entry: keep it, and raise it when loading is over
                self.quantizer.errors.append(f"{self.quantizer.where(key)}: tensor {key!r}: {error}")
                quantized = nvfp4.quantize(torch.zeros_like(weight))
            bias = model.get_submodule(name).bias
            _replace(
                model, name, NVFP4Linear.from_nvfp4(quantized, bias, self.quantizer.quantization_config.torch_dtype)
            )
            missing_keys.discard(key)
        return {}


@register_quantizer(QUANT_METHOD)
class NVFP4HfQuantizer(HfQuantizer):
    """What transformers calls while it loads and saves a model with `NVFP4Config`."""

    requires_calibration = False
    is_trainable = True  # with adapters; `is_qat_trainable` stays False, so Trainer insists on them

    def __init__(self, quantization_config: NVFP4Config, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.errors: list[str] = []
        self._converted: dict[str, nn.Linear] = {}
        self._headers: dict[str, headers.TensorInfo] = {}

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        devices = {str(device) for device in device_map.values()} if isinstance(device_map, dict) else set()
        if "disk" in devices or ("cpu" in devices and len(devices) > 1):
            raise ValueError(
                f"device_map={device_map}: NVFP4 layers cannot be offloaded. Use whole devices, e.g. device_map={{'': 0}}."
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        wanted = self.quantization_config.torch_dtype
        if dtype != wanted:
            logger.warning_once(
                f"dtype={dtype} is replaced by NVFP4Config's compute_dtype={wanted}; set that to choose another."
            )
        return wanted

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        return (
            not self.pre_quantized
            and param_name.removesuffix(".weight") in self._converted
            and param_name.endswith(".weight")
        )

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        return _BYTES_PER_WEIGHT if self.param_needs_quantization(model, param_name) else param.element_size()

    def get_quantize_ops(self) -> _QuantizeLinear:
        return _QuantizeLinear(self)

    def where(self, tensor_name: str) -> str:
        """The file that holds a tensor, as far as known."""
        return str(self._headers[tensor_name].file) if tensor_name in self._headers else "checkpoint"

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        config = self.quantization_config
        linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
        kept = self.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules, add_default_skips=True)
        skipped = {name for name in linears if formats.matches_any(name, [*kept, *config.modules_to_not_convert])}
        if config.source_format is not None:
            skipped |= {name for name in linears if not _is_target(name, config.source_targets)}
        else:
            self._warn_unmatched(model)
        self._converted = {name: module for name, module in linears.items() if name not in skipped}
        config._dense_linears = sorted(skipped)
        self._refuse_unsupported(model)
        self._headers = headers.read_headers(checkpoint_files or ())
        if not self.pre_quantized:
            if self._headers:
                headers.check_dense_headers(self._headers, self._converted)
            return model
        layout = formats.LAYOUTS[config.source_format]
        packed = headers.check_headers(
            self._headers, layout, self._converted, skipped, model._keys_to_ignore_on_load_unexpected or ()
        )
        headers.check_values(packed, layout)
        for name, module in self._converted.items():
            _replace(model, name, _PackedPlaceholder(module, packed[name]))
        # scales of a quantized KV cache sit on the attention module, not on a linear
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, r"\.[qkv]_scale$"}
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        if self.errors:
            raise ValueError("\n".join(self.errors))
        self._refuse_missing(model)
        if self.pre_quantized:
            layout = formats.LAYOUTS[self.quantization_config.source_format]
            for name, module in list(model.named_modules()):
                if isinstance(module, _PackedPlaceholder):
                    _replace(model, name, module.to_nvfp4(layout, self.quantization_config.torch_dtype))
        self._converted.clear()
        self._headers.clear()
        fuse_storage(model)
        return model

    def _refuse_unsupported(self, model: PreTrainedModel) -> None:
        if not self._converted:
            raise ValueError(
                f"no nn.Linear of {type(model).__name__} is left to quantize (modules_to_not_convert="
                f"{self.quantization_config.modules_to_not_convert}). Load it without NVFP4Config, or skip less."
            )
        for name, module in self._converted.items():
            if module.in_features % nvfp4.BLOCK_SIZE:
                raise ValueError(
                    f"{name}: in_features={module.in_features} is not a multiple of {nvfp4.BLOCK_SIZE}, the NVFP4 block. Add {name!r} to "
                    "NVFP4Config(modules_to_not_convert=[...])."
                )
        experts = [
            name
            for name, parameter in model.named_parameters()
            if parameter.ndim == 3
            and "expert" in name
            and not formats.matches_any(name, self.quantization_config.modules_to_not_convert)
        ]
        if experts:
            raise ValueError(
                f"{len(experts)} mixture-of-experts tensors, e.g. {experts[0]!r}, hold most of {type(model).__name__}'s weights and cannot "
                "be quantized by qerl_trl yet: transformers stores them as 3-D parameters, not as linears. To leave them in "
                f"{self.quantization_config.compute_dtype}, say so: NVFP4Config(modules_to_not_convert=['experts'])."
            )

    def _refuse_missing(self, model: PreTrainedModel) -> None:
        """transformers fills parameters that the checkpoint lacks with random numbers and logs it; for a trained model that is damage."""
        new_heads = [] if model.get_output_embeddings() is not None else self.quantization_config._dense_linears
        missing = [
            name
            for name, parameter in model.named_parameters()
            if not getattr(parameter, "_is_hf_initialized", False) and name.rpartition(".")[0] not in new_heads
        ]
        if missing:
            raise ValueError(
                f"{model.config.name_or_path}: {len(missing)} tensors of {type(model).__name__} are missing in the checkpoint, e.g. "
                f"{missing[0]!r}. Complete the checkpoint, or load it with the class that it was saved from."
            )

    def _warn_unmatched(self, model: PreTrainedModel) -> None:
        names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
        for entry in self.quantization_config.modules_to_not_convert:
            if not any(formats.name_matches(name, entry) for name in names):
                logger.warning(f"modules_to_not_convert: {entry!r} matches no module of {type(model).__name__}.")

    # --- saving

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The state dict in compressed-tensors' dtypes. Views only: nothing is copied but the global scales' shape."""
        state = model.state_dict()
        if not has_nvfp4(model):
            raise RuntimeError(
                "No layer of this model is NVFP4 any more (an adapter was merged?), but its configuration says so, and such a folder "
                "could not be read. Call model.dequantize() first: it makes the configuration agree."
            )
        for name, module in model.named_modules():
            if isinstance(module, NVFP4Linear):
                if f"{name}.weight_packed" not in state or name.endswith(".base_layer"):
                    raise RuntimeError(
                        f"{name} is inside an adapter: the base would be saved under names that nothing can load. Save the adapter "
                        "(PeftModel.save_pretrained), or unload it first (PeftModel.unload())."
                    )
                state[f"{name}.weight_scale"] = state[f"{name}.weight_scale"].view(torch.float8_e4m3fn)
                state[f"{name}.weight_global_scale"] = state[f"{name}.weight_global_scale"].view(torch.float32)
        return state, dict(formats.WRITTEN_BY, scale_rule=self.quantization_config.scale_rule)

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        for name, module in list(model.named_modules()):
            if isinstance(module, NVFP4Linear):
                _replace(model, name, module.to_dense(dtype))
        return model


def _is_target(name: str, targets: Iterable[str]) -> bool:
    """compressed-tensors' targets: the class name Linear, a module's exact name, or "re:" and a regular expression."""
    return any(target == "Linear" or formats.name_matches(name, target) for target in targets)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of `name`, marked as loaded so that transformers does not initialize it."""
    module.train(model.training)
    for parameter in module.parameters():
        parameter._is_hf_initialized = not parameter.is_meta
    model.set_submodule(name, module)
