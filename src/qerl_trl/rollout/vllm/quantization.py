"""The vLLM quantization config `qerl_nvfp4`: chooses our method (linear.py) for each layer, by the source of weights:

- `load_format="qerl_trainer"`: packed and dense layers as in the trainer's model;
- a compressed-tensors or ModelOpt NVFP4 checkpoint (taken over by `quantization="qerl_nvfp4"`): by its config;
- a bf16 checkpoint: quantized at load, except for the output head and `ignore`.

`nvfp4/checkpoints.py` decides the last two, as in the trainer, by transformers' layer names.

Options are in vLLM's own `additional_config` (`--additional-config` of `vllm serve`), under the key `qerl`:

    {"qerl": {"adapter": {"rank": 32, "targets": ["q_proj", ...]},   reserve buffers for one LoRA adapter
              "scale_rule": "rtn",                                    for quantization at load
              "ignore": ["re:.*mlp.gate$"],                           dense layers, as modules_to_not_convert
              "base": "nvfp4" | "dense",                              "dense": keep a bf16 checkpoint unchanged
              "compute": "w4a16" | "w4a8",                            "w4a8": NVFP4 products with FP8 operands
              "batch_invariant": true}}                               cache key only; set VLLM_BATCH_INVARIANT=1
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.utils import get_model_cls

from ...nvfp4.architectures import ROWS, dense_by_default, in_tower
from ...nvfp4.checkpoints import METHOD, Selection, check_entries, parse_quantization_config
from ..engine import WORKER_EXTENSION, secret
from . import loader, norm
from .linear import (
    AdaptedMethod,
    DenseMethod,
    EmbeddingMethod,
    ModelOptFP8Method,
    ModelOptNVFP4Method,
    NVFP4Method,
    OnlineNVFP4Method,
)
from .loader import Mapper, Renaming, split_fused, stacked, with_gap
from .nf4 import NF4Method

#: layout of a checkpoint (None: dense) -> method of its packed layers
_METHODS: dict[str | None, Callable[..., AdaptedMethod]] = {
    None: OnlineNVFP4Method,
    "compressed-tensors": NVFP4Method,
    "modelopt": ModelOptNVFP4Method,
}
#: format of the trainer's layer -> method of vLLM's
_SHARED_METHODS: dict[str, Callable[..., AdaptedMethod]] = {
    "nvfp4": NVFP4Method,
    "nf4": NF4Method,
    "dense": DenseMethod,
}


@dataclass(frozen=True)
class EngineOptions:
    """The options in `additional_config["qerl"]`, written by `EngineSpec.options`."""

    adapter: Mapping[str, Any] | None = None
    scale_rule: str = "rtn"
    base: str = "nvfp4"
    ignore: tuple[str, ...] = ()
    compute: str = "w4a16"
    batch_invariant: bool = False  # like `holds` only a key of vLLM's cache of compiled graphs
    holds: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ignore", check_entries(self.ignore, "qerl option ignore"))

    def rank_on(self, names: list[str]) -> int:
        """Return the adapter's rank on the layer fused from `names`; 0 if none of them has an adapter."""
        targets = self.adapter["targets"] if self.adapter else ()
        adapted = any(f".{name}".endswith(f".{target}") for name in names for target in targets)
        return self.adapter["rank"] if self.adapter and adapted else 0


def _model_type() -> str | None:
    """Return the text decoder's `model_type` of the engine under construction."""
    model = get_current_vllm_config().model_config
    return None if model is None else model.hf_text_config.model_type


def _format_of(name: str, columns: int, selection: Selection, options: EngineOptions) -> str:
    """Return the engine's format of the checkpoint's layer `name`: "nvfp4", "fp8" (dense once loaded) or "dense"."""
    if selection.is_fp8(name):
        return "fp8"
    return "nvfp4" if options.base == "nvfp4" and selection.is_quantized(name, columns) else "dense"


@register_quantization_config(METHOD)
@dataclass(eq=False)
class QeRLQuantizationConfig(QuantizationConfig):
    """vLLM's quantization config for our kernels: the checkpoint's NVFP4 layers, and their layout."""

    selection: Selection = field(default_factory=Selection)  # a bf16 checkpoint: everything, quantized while it loads

    def __post_init__(self) -> None:
        super().__init__()
        self.renaming = Renaming()
        norm.install()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle in a worker process, and install our norm classes there."""
        self.__dict__.update(state)
        norm.install()

    def get_name(self) -> str:  # type: ignore[override]  # vLLM declares the names of its own methods only
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # without a config in the checkpoint vLLM calls cls(): bf16, quantized at load

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QeRLQuantizationConfig":
        """Build from a checkpoint's `quantization_config`."""
        if config == {"quant_method": METHOD}:  # a bf16 checkpoint
            return cls()
        return cls(parse_quantization_config(config, "quantization_config"))

    @classmethod
    def override_quantization_method(  # type: ignore[override]  # as get_name
        cls, hf_quant_cfg: dict[str, Any] | None, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take over another tool's NVFP4 checkpoint, only for `quantization="qerl_nvfp4"`."""
        return METHOD if user_quant == METHOD and hf_quant_cfg else None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Mapper) -> None:
        """Add the renaming rules of a model class; vLLM calls this for each, outermost first."""
        self.renaming.add(hf_to_vllm_mapper)

    def originals(self, prefix: str, known: Collection[str] = ()) -> list[str]:
        """Return the names in transformers of the layers fused in vLLM's layer `prefix`, in row order.

        vLLM lists fused layers in several places, and a class may inherit a wrong mapping (GLM has Llama's, but one
        `gate_up_proj`). The first with all layers in `known` wins; the first of all without `known`.
        """
        row, model = ROWS.get(_model_type() or ""), get_current_vllm_config().model_config
        leaf = prefix.rpartition(".")[2]
        # the class's own mapper has stacked rules, unlike the one in apply_vllm_mapper
        mapper = getattr(get_model_cls(model), "hf_to_vllm_mapper", None) if model and model.architectures else None
        said = [{} if row is None else row.fused, self.packed_modules_mapping, stacked(mapper)]
        found: list[str] = []
        for fused in [*(fused for fused in said if leaf in fused), {}]:  # after them, the layer itself
            names = [with_gap(self.renaming.original(name, known), known) for name in split_fused(prefix, fused)]
            if not known or all(name in known for name in names):
                return names
            found = found or names
        return found

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Choose a layer's method; None: vLLM's unquantized default. Raises `ValueError` for mixture-of-experts layers,
        and for fused layers of different formats."""
        shared = loader.published_for_current_engine()
        if isinstance(layer, VocabParallelEmbedding):
            return None if shared is None else EmbeddingMethod(deferred=shared.alias)
        if not isinstance(layer, LinearBase):
            if {"RoutedExperts", "FusedMoE"} & {cls.__name__ for cls in type(layer).__mro__}:
                raise ValueError(
                    f"{prefix} is a mixture-of-experts layer, which {METHOD} does not support. Use a dense model or "
                    "use_vllm=False."
                )
            return None
        if get_current_vllm_config().parallel_config.worker_extension_cls == WORKER_EXTENSION:
            secret()  # raise before the weights are loaded
        config = get_current_vllm_config().additional_config
        options = EngineOptions(**(config.get("qerl", {}) if isinstance(config, dict) else {}))
        known = () if shared is None else shared.modules
        method: Callable[..., AdaptedMethod]
        names = self.originals(prefix, known)
        if shared is not None and in_tower(prefix) and not all(name in known for name in names):
            # vLLM's class builds this tower in another form: copied by checkpoint names
            return UnquantizedLinearMethod()
        rank = options.rank_on(names)
        if shared is not None:
            formats = [shared.base_format(name) for name in names]
            method = _SHARED_METHODS[formats[0]]
            where = "the trainer's model"
        else:
            selection = self.selection.without(options.ignore)
            if selection.layout is None:
                selection = selection.without(dense_by_default(_model_type()))
            formats = [_format_of(name, layer.input_size, selection, options) for name in names]
            of_format: dict[str, Callable[..., AdaptedMethod]]
            of_format = {"nvfp4": _METHODS[selection.layout], "fp8": ModelOptFP8Method, "dense": DenseMethod}
            method = of_format[formats[0]]
            where = f"ignore={list(selection.ignore)!r} and targets={list(selection.targets)!r}"
        if len(set(formats)) > 1:
            raise ValueError(
                f"vLLM fuses {names} into {prefix}, but by {where} they are {formats}. Quantize all of them or none."
            )
        rows = None if shared is None else [getattr(shared.module(name), "out_features", 0) for name in names]
        deferred = shared is not None and shared.alias
        how: dict[str, Any] = {"scale_rule": options.scale_rule, "compute": options.compute}
        return method(names, rank, deferred=deferred, rows=rows, **how)
