"""The vLLM quantization config `qerl_nvfp4`: decides which of our methods (vllm_linear.py) a layer gets.

Where the weights come from decides first:
- `load_format="qerl_trainer"`: the trainer's own modules say which layer is packed and which is dense;
- a compressed-tensors or ModelOpt NVFP4 checkpoint (`quantization="qerl_nvfp4"` takes it over): its config says so;
- a bf16 checkpoint: quantized while it loads, except `lm_head` and what `ignore` names.

Options travel in vLLM's own `additional_config` (`--additional-config` of `vllm serve`), under the key `qerl`:

    {"qerl": {"adapter": {"rank": 32, "targets": ["q_proj", ...]},   reserve buffers for one LoRA adapter
              "scale_rule": "rtn",                                    when quantizing at load
              "ignore": ["lm_head", "re:.*mlp.gate$"],                layers that stay dense
              "base": "nvfp4" | "dense"}}                             "dense": keep a bf16 checkpoint as it is
"""

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from . import vllm_loader, vllm_norm
from .nvfp4 import SCALE_RULES
from .vllm_linear import (
    DenseMethod,
    ModelOptNVFP4Method,
    NVFP4Method,
    OnlineNVFP4Method,
    SharedEmbeddingMethod,
)

METHOD = "qerl_nvfp4"
DEFAULT_IGNORE = ("lm_head",)
BASES = ("nvfp4", "dense")


@dataclass(frozen=True)
class AdapterSpec:
    """Room for one LoRA adapter: `rank` columns in every layer whose name ends with one of `targets`."""

    rank: int
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.targets:
            raise ValueError(
                f"The qerl adapter option has rank={self.rank} and targets={list(self.targets)!r}; give a rank of at least 1 "
                "and at least one layer name."
            )

    def matches(self, name: str) -> bool:
        """Whether the layer `name` (a dotted path) is adapted."""
        return any(name == target or name.endswith("." + target) for target in self.targets)


@dataclass(frozen=True)
class EngineOptions:
    """`additional_config["qerl"]`, validated."""

    adapter: AdapterSpec | None = None
    scale_rule: str = "rtn"
    base: str = "nvfp4"
    ignore: tuple[str, ...] | None = None

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> "EngineOptions":
        """
        Raises:
            `ValueError`: an unknown option or value.
        """
        unknown = set(options) - {"adapter", "scale_rule", "base", "ignore"}
        if unknown:
            raise ValueError(f"Unknown qerl options {sorted(unknown)}; known are adapter, scale_rule, base and ignore.")
        rule, base = options.get("scale_rule", "rtn"), options.get("base", "nvfp4")
        if rule not in SCALE_RULES:
            raise ValueError(f"qerl option scale_rule={rule!r} is not one of {SCALE_RULES}.")
        if base not in BASES:
            raise ValueError(f"qerl option base={base!r} is not one of {BASES}.")
        adapter, ignore = options.get("adapter"), options.get("ignore")
        return cls(
            adapter=AdapterSpec(int(adapter["rank"]), tuple(adapter["targets"])) if adapter else None,
            scale_rule=rule,
            base=base,
            ignore=None if ignore is None else tuple(ignore),
        )

    @classmethod
    def current(cls) -> "EngineOptions":
        """The options of the engine that is being built."""
        config = get_current_vllm_config().additional_config
        return cls.from_dict(config.get("qerl", {}) if isinstance(config, dict) else {})


def is_ignored(name: str, patterns: Iterable[str]) -> bool:
    """Whether `name` (a dotted path) matches: exactly, as a trailing part, `re:` a regular expression, or with `*`."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], name):
                return True
        elif "*" in pattern:
            if fnmatch.fnmatchcase(name, pattern):
                return True
        elif name == pattern or name.endswith("." + pattern):
            return True
    return False


@register_quantization_config(METHOD)
@dataclass(eq=False)
class QeRLQuantizationConfig(QuantizationConfig):
    """vLLM's view of a model on our kernels. `layout` names the checkpoint: "bf16", "compressed-tensors" or "modelopt"."""

    layout: str = "bf16"
    ignore: list[str] = field(default_factory=lambda: list(DEFAULT_IGNORE))

    def __post_init__(self) -> None:
        super().__init__()
        self.mapper = None
        vllm_norm.install()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A worker process receives this object pickled, and needs our norm class as well."""
        self.__dict__.update(state)
        vllm_norm.install()

    def get_name(self) -> str:
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
        """From the `quantization_config` of a checkpoint.

        Raises:
            `ValueError`: a compressed-tensors or ModelOpt checkpoint that is not plain NVFP4.
        """
        method = config.get("quant_method")
        if method == "compressed-tensors":
            groups = config.get("config_groups", {})
            formats = {config.get("format"), *(g.get("format") for g in groups.values() if g.get("format"))} - {None}
            if formats != {"nvfp4-pack-quantized"}:
                raise ValueError(
                    f"This compressed-tensors checkpoint holds {sorted(formats)}; {METHOD} reads 'nvfp4-pack-quantized' only. "
                    "Leave out quantization= and let vLLM load it."
                )
            return cls(layout="compressed-tensors", ignore=list(config.get("ignore") or []))
        if method == "modelopt" or "quantization" in config or "quant_algo" in config:
            inner = config.get("quantization", config)
            if inner.get("quant_algo") != "NVFP4" and inner.get("quant_algo") != "W4A16_NVFP4":
                raise ValueError(
                    f"This ModelOpt checkpoint has quant_algo={inner.get('quant_algo')!r}; {METHOD} reads 'NVFP4' only "
                    "(mixed precision is not supported). Leave out quantization= and let vLLM load it."
                )
            return cls(layout="modelopt", ignore=list(inner.get("exclude_modules") or inner.get("ignore") or []))
        if method == METHOD:
            return cls(layout="compressed-tensors", ignore=list(config.get("ignore") or DEFAULT_IGNORE))
        raise ValueError(f"{METHOD} cannot read a checkpoint with quant_method={method!r}.")

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any] | None, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take over an NVFP4 checkpoint of another tool, only when the user asked for our method."""
        if user_quant == METHOD and hf_quant_cfg:
            return METHOD
        return None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Translate checkpoint names into vLLM's, for architectures that rename modules."""
        self.mapper = hf_to_vllm_mapper
        self.ignore = [p if p.startswith("re:") else (hf_to_vllm_mapper.apply_list([p]) or [p])[0] for p in self.ignore]

    def shard_names(self, prefix: str) -> list[str]:
        """The checkpoint's layers that vLLM's layer `prefix` fuses, in order: qkv_proj -> q_proj, k_proj, v_proj."""
        parent, _, leaf = prefix.rpartition(".")
        shards = self.packed_modules_mapping.get(leaf, [leaf])
        return [f"{parent}.{shard}" if parent else shard for shard in shards]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of one layer; None for what vLLM should handle as if unquantized.

        Raises:
            `ValueError`: the shards of a fused layer disagree, or the layer is one we cannot serve.
        """
        shared = vllm_loader.published_for_current_engine()
        if isinstance(layer, VocabParallelEmbedding):
            return SharedEmbeddingMethod() if shared is not None and shared.alias else None
        if not isinstance(layer, LinearBase):
            if {"RoutedExperts", "FusedMoE"} & {cls.__name__ for cls in type(layer).__mro__}:
                raise ValueError(
                    f"{prefix} is a mixture-of-experts layer, which {METHOD} does not support. Roll out a dense model, or use "
                    "use_vllm=False."
                )
            return None
        options, names = EngineOptions.current(), self.shard_names(prefix)
        rank = options.adapter.rank if options.adapter and any(map(options.adapter.matches, names)) else 0
        if shared is not None:
            packed = [shared.is_packed(name) for name in names]
            method = NVFP4Method if all(packed) else DenseMethod
            where = "the trainer's model"
        else:
            ignore = self.ignore if options.ignore is None else options.ignore
            packed = [options.base == "nvfp4" and not is_ignored(name, ignore) for name in names]
            method = (
                {"bf16": OnlineNVFP4Method, "compressed-tensors": NVFP4Method, "modelopt": ModelOptNVFP4Method}[
                    self.layout
                ]
                if all(packed)
                else DenseMethod
            )
            where = f"ignore={list(ignore)!r}"
        if any(packed) and not all(packed):
            raise ValueError(
                f"vLLM fuses {names} into {prefix}, but by {where} only some of them are packed: "
                f"{dict(zip(names, packed, strict=True))}. Quantize all of them or none."
            )
        return method(names, rank, scale_rule=options.scale_rule, deferred=shared is not None and shared.alias)
