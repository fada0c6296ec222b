"""The transformers quantizer behind `NVFP4Config`: hooks for loading and saving a model.

A dense checkpoint is quantized one tensor at a time, as each arrives on its device.
"""

import re
from typing import Any

import numpy
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, revert_weight_conversion
from transformers.integrations import is_fsdp_enabled
from transformers.quantizers import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from ..support.files import note_commit, reads_for_its_machine
from . import checkpoints, headers
from .format import NVFP4Tensor, dequantize_fp8, quantize
from .fused import fuse_storage
from .linear import NVFP4Linear

logger = logging.get_logger(__name__)

_BYTES_PER_WEIGHT = 0.5625


class _PackedPlaceholder(nn.Module):
    """Placeholder of a linear while a quantized checkpoint is loaded, with the checkpoint's names and dtypes."""

    def __init__(self, linear: nn.Linear, parts: dict[str, headers.TensorInfo]):
        super().__init__()
        for part, info in parts.items():
            if part != "bias":
                tensor = torch.empty(info.shape, dtype=headers.torch_dtype(info), device="meta")
                self.register_parameter(part, nn.Parameter(tensor, requires_grad=False))
        self.bias = linear.bias

    def to_nvfp4(self, layout: checkpoints.Layout, compute_dtype: torch.dtype) -> NVFP4Linear:
        packed, block_scale, global_scale = (self.get_parameter(part).detach() for part in layout.tensors)
        if not layout.divides:
            global_scale = 1.0 / global_scale
        return NVFP4Linear.from_nvfp4(NVFP4Tensor(packed, block_scale, global_scale), self.bias, compute_dtype)


class _FP8Placeholder(_PackedPlaceholder):
    """Placeholder of an FP8 linear in a mixed checkpoint, replaced by a dense linear after loading."""

    def to_dense(self, compute_dtype: torch.dtype) -> nn.Linear:
        codes, scale = (self.get_parameter(part).detach() for part in ("weight", "weight_scale"))
        linear = nn.Linear(codes.shape[1], codes.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(dequantize_fp8(codes, scale, compute_dtype), requires_grad=False)
        linear.bias = self.bias
        return linear


class _Unread(nn.Module):
    """Placeholder of a linear for which this process reads the bias only ([`left_to_the_first`])."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.shape = (linear.in_features, linear.out_features)
        self.bias = linear.bias

    def to_nvfp4(self, compute_dtype: torch.dtype) -> NVFP4Linear:
        """Return a layer of zeros, without physical memory until written."""
        layer = NVFP4Linear(*self.shape, bias=False, device="meta", compute_dtype=compute_dtype)
        for name, parameter in list(layer.named_parameters()):
            zeros = torch.from_numpy(numpy.zeros(tuple(parameter.shape), numpy.uint8))  # torch.zeros would write
            setattr(layer, name, nn.Parameter(zeros, requires_grad=False))
        layer.unread = (layer.weight_packed,)
        layer.register_parameter("bias", self.bias)
        return layer


def left_to_the_first() -> bool:
    """True if accelerate broadcasts the weights to this process: under FSDP with `cpu_ram_efficient_loading`, on all
    ranks but the first of a machine. transformers leaves their dense weights empty too."""
    return is_fsdp_enabled() and not reads_for_its_machine()


class _QuantizeLinear(ConversionOps):
    """Quantize a dense tensor on arrival and replace its `nn.Linear` by an `NVFP4Linear`."""

    def __init__(self, quantizer: "NVFP4HfQuantizer"):
        self.quantizer = quantizer

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], *args: Any, model: Any = None, missing_keys: Any = None, **kwargs: Any
    ) -> dict[str, list[torch.Tensor]]:
        for key, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            name = key.removesuffix(".weight")
            try:
                quantized = quantize(weight, self.quantizer.quantization_config.scale_rule)
            except ValueError as error:
                # transformers only logs an exception here: keep it, and raise it when loading is over
                self.quantizer.errors.append(f"{self.quantizer.where(key)}: tensor {key!r}: {error}")
                quantized = quantize(torch.zeros_like(weight))
            bias = model.get_submodule(name).bias
            _replace(
                model, name, NVFP4Linear.from_nvfp4(quantized, bias, self.quantizer.quantization_config.torch_dtype)
            )
            missing_keys.discard(key)
        return {}


@register_quantizer(checkpoints.METHOD)
class NVFP4HfQuantizer(HfQuantizer):
    """Hooks called by transformers for loading and saving with `NVFP4Config`."""

    quantization_config: Any  # an NVFP4Config; not imported, config.py imports this file
    requires_calibration = False
    is_trainable = True  # with adapters: `is_qat_trainable` stays False, so Trainer insists on them

    def __init__(self, quantization_config: Any, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.errors: list[str] = []
        self._converted: dict[str, nn.Linear] = {}
        self._headers: dict[str, headers.TensorInfo] = {}
        self._unread = False

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        devices = {str(device) for device in device_map.values()} if isinstance(device_map, dict) else set()
        if "disk" in devices or ("cpu" in devices and len(devices) > 1):
            raise ValueError(
                f"device_map={device_map}: NVFP4 layers cannot be offloaded. Use whole devices, e.g. "
                f"device_map={{'': 0}}."
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
            and not self._unread
            and param_name.removesuffix(".weight") in self._converted
            and param_name.endswith(".weight")
        )

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        return _BYTES_PER_WEIGHT if self.param_needs_quantization(model, param_name) else param.element_size()

    def get_quantize_ops(self) -> _QuantizeLinear:
        return _QuantizeLinear(self)

    def _layout(self) -> checkpoints.Layout:
        assert self.quantization_config.source_format is not None, "set for every checkpoint that is quantized already"
        return checkpoints.LAYOUTS[self.quantization_config.source_format]

    def where(self, tensor_name: str) -> str:
        """Return the file that has a tensor, if known."""
        return str(self._headers[tensor_name].file) if tensor_name in self._headers else "checkpoint"

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        config = self.quantization_config
        self._converted = config.linears_to_quantize(model)
        self._unread = left_to_the_first()
        files = checkpoint_files or ()
        note_commit(model.config, files=files)
        self._headers = _in_memory(model, headers.read_headers(files))
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        packed: dict[str, dict[str, headers.TensorInfo]] = {}
        fp8: dict[str, Any] = {}
        if self.pre_quantized:
            dense = {name: model.get_submodule(name) for name in config.dense_linears or ()}
            fp8 = {name: module for name, module in dense.items() if config.selection.is_fp8(name)}
            packed = headers.check_headers(self._headers, self._layout(), self._converted, dense, ignored, fp8)
            ignored.add(r"\.[qkv]_scale$")  # of a quantized KV cache: on the attention module, not on a linear
        else:
            headers.check_dense_headers(self._headers, self._converted)
        # placeholders for tensors that fit no `nn.Linear`
        for name, module in self._converted.items():
            if self._unread:
                _replace(model, name, _Unread(module))
                ignored.add(rf"^{re.escape(name)}\.(?!bias$)")
            elif name in packed:
                _replace(model, name, _PackedPlaceholder(module, packed[name]))
        for name, module in fp8.items():
            _replace(model, name, _FP8Placeholder(module, packed[name]))
        if ignored:
            model._keys_to_ignore_on_load_unexpected = ignored
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        if self.errors:
            raise ValueError("\n".join(self.errors))
        # transformers fills parameters missing in the checkpoint with random numbers
        dense = self.quantization_config.dense_linears or []
        new_heads = [] if model.get_output_embeddings() is not None else dense
        missing = [
            name
            for name, parameter in model.named_parameters()
            if not getattr(parameter, "_is_hf_initialized", False) and name.rpartition(".")[0] not in new_heads
        ]
        if missing:
            raise ValueError(
                f"{model.config.name_or_path}: {len(missing)} tensors of {type(model).__name__} are missing in the "
                f"checkpoint, e.g. {missing[0]!r}. Complete the checkpoint, or load it with the class that it was "
                "saved from."
            )
        if self.pre_quantized:
            layout = self._layout()
            for name, module in list(model.named_modules()):
                if isinstance(module, _FP8Placeholder):
                    _replace(model, name, module.to_dense(self.quantization_config.torch_dtype))
                elif isinstance(module, _PackedPlaceholder):
                    block_scale, scale = (module.get_parameter(part).detach() for part in layout.tensors[1:])
                    headers.check_scales(name, block_scale, scale, layout, self.where(f"{name}.{layout.packed}"))
                    _replace(model, name, module.to_nvfp4(layout, self.quantization_config.torch_dtype))
        for name, module in list(model.named_modules()):
            if isinstance(module, _Unread):
                _replace(model, name, module.to_nvfp4(self.quantization_config.torch_dtype))
        headers.check_finite_module(model, self.where)
        self._converted.clear()
        self._headers.clear()
        if not self._unread:  # fusion would write zeros
            fuse_storage(model)
        return model

    # --- saving

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the state dict in the dtypes of compressed-tensors, as views of the parameters."""
        state = model.state_dict()
        if model._hf_peft_config_loaded:
            return state, {}  # transformers saves only the adapter
        packed = {name: module for name, module in model.named_modules() if isinstance(module, NVFP4Linear)}
        known = {*packed, *(self.quantization_config.dense_linears or ())}
        opened = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in known]
        inside = any(name.endswith(".base_layer") for name in packed)
        merged = not packed or (opened and self.quantization_config.dense_linears is not None)
        if inside or merged:
            raise RuntimeError(
                f"{type(model).__name__} would not load again from NVFP4: it is inside an adapter, or an adapter was "
                f"merged ({len(opened)} layers are dense now). Save the adapter, or call model.dequantize() first."
            )
        if any("expert" in str(each.source_patterns) for each in getattr(model, "_weight_conversions", None) or ()):
            raise RuntimeError(
                f"{type(model).__name__} has dense experts next to packed layers, which transformers would fill with "
                "random numbers when it loads. Save the adapter (PeftModel.save_pretrained), or call "
                "model.dequantize() first."
            )
        for name in packed:
            state[f"{name}.weight_scale"] = state[f"{name}.weight_scale"].view(torch.float8_e4m3fn)
            state[f"{name}.weight_global_scale"] = state[f"{name}.weight_global_scale"].view(torch.float32)
        return state, dict(checkpoints.WRITTEN_BY, scale_rule=self.quantization_config.scale_rule)

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        wanted = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
        packed = {name: module for name, module in model.named_modules() if isinstance(module, NVFP4Linear)}
        for name, module in packed.items():
            _replace(model, name, module.to_dense(wanted))
        if wanted is not None and any(module.compute_dtype != wanted for module in packed.values()):
            nn.Module.to(model, wanted)  # the rest too, or products of two dtypes fail
        return model


def _in_memory(model: PreTrainedModel, tensors: dict[str, headers.TensorInfo]) -> dict[str, headers.TensorInfo]:
    """Return `tensors` by their names in the loaded model; some checkpoints (Gemma 3) use others for linear layers."""
    renamed: dict[str, str] = {}
    there = {name.rpartition(".")[0] for name in tensors}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in there:
            found = revert_weight_conversion(model, {f"{name}.weight": torch.empty(0, device="meta")})
            stored = next(iter(found)).removesuffix(".weight") if len(found) == 1 else name
            if stored != name:
                renamed[stored] = name
    if not renamed:
        return tensors
    split = ((name.rpartition("."), info) for name, info in tensors.items())
    return {f"{renamed.get(module, module)}{dot}{last}": info for (module, dot, last), info in split}


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace module `name`, marked as loaded so that transformers does not initialize it."""
    module.train(model.training)
    for parameter in module.parameters():
        parameter._is_hf_initialized = not parameter.is_meta  # type: ignore[attr-defined]  # transformers' own mark
    model.set_submodule(name, module)
