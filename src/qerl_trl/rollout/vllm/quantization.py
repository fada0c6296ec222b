"""The vLLM quantization config `qerl_nvfp4`: decides which of our methods (linear.py) a layer gets.

Where the weights come from decides first:
- `load_format="qerl_trainer"`: the trainer's own modules say which layer is packed and which is dense;
- a compressed-tensors or ModelOpt NVFP4 checkpoint (`quantization="qerl_nvfp4"` takes it over): its config says so;
- a bf16 checkpoint: quantized while it loads, but for the output head and what `ignore` means.

The last two are read and decided by `nvfp4/checkpoints.py`, as in the trainer, on the layers' names in transformers.

Options travel in vLLM's own `additional_config` (`--additional-config` of `vllm serve`), under the key `qerl`:

    {"qerl": {"adapter": {"rank": 32, "targets": ["q_proj", ...]},   reserve buffers for one LoRA adapter
              "scale_rule": "rtn",                                    when quantizing at load
              "ignore": ["re:.*mlp.gate$"],                           layers that stay dense, as modules_to_not_convert
              "base": "nvfp4" | "dense",                              "dense": keep a bf16 checkpoint as it is
              "batch_invariant": true}}                               compiled graphs of their own; VLLM_BATCH_INVARIANT=1 is the switch
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

#: layout of a packed checkpoint (None: dense) -> what a packed layer gets
_METHODS: dict[str | None, Callable[..., AdaptedMethod]] = {
    None: OnlineNVFP4Method,
    "compressed-tensors": NVFP4Method,
    "modelopt": ModelOptNVFP4Method,
}
#: what the trainer's layer holds -> what vLLM's gets
_SHARED_METHODS: dict[str, Callable[..., AdaptedMethod]] = {
    "nvfp4": NVFP4Method,
    "nf4": NF4Method,
    "dense": DenseMethod,
}


@dataclass(frozen=True)
class EngineOptions:
    """`additional_config["qerl"]`, as `EngineSpec.options` writes it."""

    adapter: Mapping[str, Any] | None = None
    scale_rule: str = "rtn"
    base: str = "nvfp4"
    ignore: tuple[str, ...] = ()
    batch_invariant: bool = False  # this and the next are for vLLM's cache of compiled graphs: not read here
    holds: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ignore", check_entries(self.ignore, "qerl option ignore"))

    def rank_on(self, names: list[str]) -> int:
        """Rank of the adapter on a layer that fuses `names`; 0 where it is on none of them."""
        targets = self.adapter["targets"] if self.adapter else ()
        adapted = any(f".{name}".endswith(f".{target}") for name in names for target in targets)
        return self.adapter["rank"] if self.adapter and adapted else 0

    @classmethod
    def current(cls) -> "EngineOptions":
        """The options of the engine that is being built."""
        config = get_current_vllm_config().additional_config
        return cls(**(config.get("qerl", {}) if isinstance(config, dict) else {}))


def _model_type() -> str | None:
    """The text decoder's `model_type` of the engine that is being built."""
    model = get_current_vllm_config().model_config
    return None if model is None else model.hf_text_config.model_type


def _format_of(name: str, columns: int, selection: Selection, options: EngineOptions) -> str:
    """What the checkpoint's layer `name` is in the engine: "nvfp4", "fp8" (dense once it is loaded) or "dense"."""
    if selection.is_fp8(name):
        return "fp8"
    return "nvfp4" if options.base == "nvfp4" and selection.is_quantized(name, columns) else "dense"


@register_quantization_config(METHOD)
@dataclass(eq=False)
class QeRLQuantizationConfig(QuantizationConfig):
    """vLLM's view of a model on our kernels: which of its layers the checkpoint says are NVFP4, in which layout."""

    selection: Selection = field(default_factory=Selection)  # a bf16 checkpoint: everything, quantized while it loads

    def __post_init__(self) -> None:
        super().__init__()
        self.renaming = Renaming()
        norm.install()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A worker process receives this object pickled, and needs our norm class as well."""
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
        return []  # no config in the checkpoint: vLLM then calls cls(), which means "bf16, quantize at load"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QeRLQuantizationConfig":
        """From the `quantization_config` of a checkpoint."""
        if config == {"quant_method": METHOD}:  # of a bf16 checkpoint
            return cls()
        return cls(parse_quantization_config(config, "quantization_config"))

    @classmethod
    def override_quantization_method(  # type: ignore[override]  # as get_name
        cls, hf_quant_cfg: dict[str, Any] | None, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take over an NVFP4 checkpoint of another tool, only when the user asked for our method."""
        return METHOD if user_quant == METHOD and hf_quant_cfg else None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Mapper) -> None:
        """vLLM announces how the model class that it is about to build renames modules."""
        self.renaming.add(hf_to_vllm_mapper)

    def originals(self, prefix: str, known: Collection[str] = ()) -> list[str]:
        """The checkpoint's layers that vLLM's layer `prefix` runs as one, in row order, by transformers' names.

        Several places say what vLLM fuses, and a class may inherit a mapping that is another's (GLM has Llama's, and one `gate_up_proj`).
        The first that gives layers in `known` is right; where nothing is known, the first.
        """
        row, model = ROWS.get(_model_type() or ""), get_current_vllm_config().model_config
        leaf = prefix.rpartition(".")[2]
        # with what vLLM leaves out when it announces the class that it is about to build
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
        """The method of one layer; None for what vLLM should handle as if unquantized."""
        shared = loader.published_for_current_engine()
        if isinstance(layer, VocabParallelEmbedding):
            return None if shared is None else EmbeddingMethod(deferred=shared.alias)
        if not isinstance(layer, LinearBase):
            if {"RoutedExperts", "FusedMoE"} & {cls.__name__ for cls in type(layer).__mro__}:
                raise ValueError(
                    f"{prefix} is a mixture-of-experts layer, which {METHOD} does not support. Use a dense model or use_vllm=False."
                )
            return None
        if get_current_vllm_config().parallel_config.worker_extension_cls == WORKER_EXTENSION:
            secret()  # a server without one would load its weights first, and refuse to start afterwards
        options = EngineOptions.current()
        known = () if shared is None else shared.modules
        method: Callable[..., AdaptedMethod]
        names = self.originals(prefix, known)
        if shared is not None and in_tower(prefix) and not all(name in known for name in names):
            # of a class that builds its towers otherwise: copied under the names of the checkpoint
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
        return method(names, rank, scale_rule=options.scale_rule, deferred=deferred, rows=rows)
