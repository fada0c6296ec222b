"""The vLLM loader `qerl_trainer`: weights come from the trainer's model in the same process, not from a folder.

    publish(model, alias=True)                            in the trainer
    LLM(..., load_format="qerl_trainer", quantization="qerl_nvfp4")

With `alias` (one process per engine) vLLM's packed linears, embeddings and head *are* the trainer's tensors: its q|k|v
and gate|up are row slices of one storage, vLLM's fused layer. Only norms and biases are copied, through vLLM's own name
mapping. Without `alias` (tensor parallelism, `share_weights=False`, or a trained base) each rank copies its shard of
all tensors. Aliased tensors must not move during the engine's life: no `.to()`, no offloading, no rebinding.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.nn import Parameter
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import ModelConfig, get_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from ...nvfp4.architectures import in_tower
from ...nvfp4.fused import give_back_cached, one_storage
from ...nvfp4.linear import PACKED, NVFP4Linear
from ...support.names import full_tensor
from .linear import AdaptedMethod, DenseMethod, Layer
from .nf4 import NF4Method, is_nf4
from .norm import make_noisy, make_wide

LOAD_FORMAT = "qerl_trainer"


def base_model(model: Any) -> nn.Module:
    """Return the transformers model inside PEFT's wrapper."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


@dataclass
class Published:
    """The trainer's model as vLLM's loader reads it: modules and tensors by their checkpoint names."""

    model: nn.Module
    alias: bool
    modules: dict[str, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, module in base_model(self.model).named_modules():
            parts = name.split(".")
            if "modules_to_save" in parts or any(part.startswith("lora_") for part in parts):
                continue
            clean = ".".join(p for p in parts if p not in ("base_layer", "original_module"))
            # PEFT's wrappers come first, so the wrapped module replaces them under the same name
            self.modules[clean] = module

    def module(self, name: str) -> Any:
        """Return the trainer's layer `name`. Raises `ValueError` if there is none."""
        if not name or name not in self.modules:
            raise ValueError(
                f"vLLM's {get_current_vllm_config().model_config.architecture} has a layer {name!r} that the trainer's "
                f"{type(base_model(self.model)).__name__} does not have. Use use_vllm=False for this architecture."
            )
        return self.modules[name]

    def base_format(self, name: str) -> str:
        """Return a layer's format: "nvfp4", "nf4" or "dense". Raises `ValueError` for other layers of bitsandbytes."""
        module = self.module(name)
        if isinstance(module, NVFP4Linear):
            return "nvfp4"
        if is_nf4(module):
            return "nf4"
        if type(module).__module__.startswith("bitsandbytes"):
            raise ValueError(
                f"{name} is a {type(module).__name__} of bitsandbytes, which the engine cannot read. Use load_in_4bit, "
                "bf16 or NVFP4."
            )
        return "dense"

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors except those packed by bitsandbytes, by compressed-tensors names (towers: checkpoint
        names), whole on every rank, tied ones once."""
        seen: set[int] = set()
        for name, module in self.modules.items():
            for key, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen or (key == "weight" and is_nf4(module)):
                    continue
                seen.add(id(parameter))
                tensor = full_tensor(parameter)
                if isinstance(module, NVFP4Linear) and key == "weight_scale":
                    tensor = tensor.view(torch.float8_e4m3fn)
                elif isinstance(module, NVFP4Linear) and key == "weight_global_scale":
                    tensor = tensor.view(torch.float32)
                full = f"{name}.{key}" if name else key
                yield self._on_disk(full, tensor) if in_tower(name) else full, tensor

    def _on_disk(self, name: str, tensor: torch.Tensor) -> str:
        """Return a tensor's name in the checkpoint; transformers may build the tower in another form."""
        stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        model: Any = base_model(self.model)
        reverted = revert_weight_conversion(model, {name: stand_in})
        return next(iter(reverted)) if len(reverted) == 1 else name


_PUBLISHED: Published | None = None


def publish(model: nn.Module | None, alias: bool = True) -> None:
    """Publish `model` for the next engine of this process with `load_format="qerl_trainer"`; None withdraws it."""
    global _PUBLISHED
    _PUBLISHED = None if model is None else Published(model, alias)


def published_for_current_engine() -> Published | None:
    """Return the trainer's model if the engine under construction loads from it, else None."""
    if get_current_vllm_config().load_config.load_format != LOAD_FORMAT:
        return None
    return _require_published()


def _require_published() -> Published:
    if _PUBLISHED is None:
        raise RuntimeError(
            f"load_format={LOAD_FORMAT!r} takes the weights from a trainer in the same process, and this process has "
            "none. Set VLLM_ENABLE_V1_MULTIPROCESSING=0; with `vllm serve`, leave load_format out."
        )
    return _PUBLISHED


def fused_rows(tensors: list[torch.Tensor], names: list[str]) -> torch.Tensor:
    """Join consecutive row slices of one storage without a copy. Raises `RuntimeError` for any other `tensors`."""
    first, rows = tensors[0], 0
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        start = first.storage_offset() + rows * first.stride(0)
        if not same or not tensor.is_contiguous() or tensor.storage_offset() != start:
            raise RuntimeError(
                f"The trainer's {names} are not slices of one storage any more, so vLLM cannot read them as one layer: "
                "something moved the model. Pass share_weights=False."
            )
        rows += tensor.shape[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


@torch.no_grad()
def fuse_dense_rows(modules: list[nn.Linear]) -> None:
    """Move the bf16 weights of vLLM's fused layers into one storage, as `fuse_storage` does for packed ones."""
    weight = torch.cat([module.weight.detach() for module in modules])
    row = 0
    for module in modules:
        module.weight.data = weight[row : row + module.out_features]
        row += module.out_features
    give_back_cached(weight.device)


@register_model_loader(LOAD_FORMAT)
class TrainerLoader(BaseModelLoader):
    """Alias or copy the published model's tensors into vLLM's model."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: the weights are in this process."""

    @torch.no_grad()
    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        published = _require_published()
        make_noisy(model)
        make_wide(model)
        renaming = get_current_vllm_config().quant_config.renaming  # type: ignore[union-attr]  # ours
        taken: set[str] = set()  # aliased parameters of the trainer
        aliased: set[str] = set()  # aliased parameters of vLLM
        for name, layer in model.named_modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, NF4Method):
                method.set_weights(layer, [published.module(name) for name in method.names], published.alias)
            elif published.alias:
                if isinstance(method, AdaptedMethod):
                    taken |= self._alias_linear(layer, published)
                    aliased |= {f"{name}.{key}" for key, _ in layer.named_parameters(recurse=False) if key != "bias"}
                elif isinstance(layer, VocabParallelEmbedding):
                    original = renaming.original(name, published.modules)
                    taken |= self._alias_embedding(original, layer, published)
                    aliased.add(f"{name}.weight")
        rest = ((name, tensor) for name, tensor in published.tensors() if name not in taken)
        loaded = set(model.load_weights(rest) or ()) | aliased
        missing = {name for name, _ in model.named_parameters()} - loaded
        if missing:
            raise RuntimeError(
                f"{len(missing)} parameters of vLLM's model got no value from the trainer ({sorted(missing)[:4]}). Use "
                "share_weights=False or use_vllm=False for this architecture."
            )

    @staticmethod
    def _alias_linear(layer: Layer, published: Published) -> set[str]:
        names = layer.quant_method.names
        modules = [published.module(name) for name in names]
        if isinstance(layer.quant_method, DenseMethod):
            if len(modules) > 1:
                fuse_dense_rows(modules)
            layer.weight = Parameter(fused_rows([m.weight.data for m in modules], names), requires_grad=False)
            return {f"{name}.weight" for name in names}
        if len(modules) > 1 and not all(module.fused_rows for module in modules):
            one_storage(modules)  # only fused in this architecture
        scales = torch.stack([module.global_scale.flatten()[0] for module in modules])
        layer.quant_method.set_weights(
            layer,
            fused_rows([m.weight_packed.data for m in modules], names),
            fused_rows([m.weight_scale.data for m in modules], names),
            layer.quant_method.row_scale(scales, layer.qerl_splits),
        )
        return {f"{name}.{key}" for name in names for key in PACKED}

    @staticmethod
    def _alias_embedding(name: str, layer: Layer, published: Published) -> set[str]:
        source = published.module(name).weight
        data = source.data
        if (data.shape, data.dtype) != (layer.weight.shape, layer.weight.dtype):  # vLLM pads the vocabulary
            data = torch.zeros(layer.weight.shape, dtype=layer.weight.dtype, device=source.device)
            data[: source.shape[0]].copy_(source)
        layer.weight = Parameter(data, requires_grad=False)
        return {f"{name}.weight"}


#: usual prefix of the model below the head in transformers
_BASE_PREFIX = "model."
#: vLLM's `WeightsMapper`: renaming rules, each from a checkpoint's spelling to vLLM's
Mapper = Any


@dataclass
class Renaming:
    """Translates an engine's layer names to transformers' names by the mappers of its model classes, outermost first.
    vLLM fuses layers and renames modules; ignore lists, adapters and the trainer use transformers' names. No inverse,
    since an entry of an ignore list may be a pattern."""

    mappers: list[Mapper] = field(default_factory=list)

    def add(self, mapper: Mapper) -> None:
        if mapper not in self.mappers:
            self.mappers.append(mapper)

    def original(self, name: str, known: Collection[str] = ()) -> str:
        """Return the name in transformers of vLLM's layer `name`. Among several candidates, one in `known` wins. Raises
        `ValueError` if no candidate maps back."""
        for mapper in reversed(self.mappers):
            spellings = list(_spellings(name, mapper))
            if not spellings:
                raise ValueError(
                    f"vLLM's class renames its layer {name!r} in a way that cannot be turned back. Use use_vllm=False "
                    "for this architecture."
                )
            name = next((spelling for spelling in spellings if spelling in known), spellings[0])
        return name


def _spellings(name: str, mapper: Mapper) -> Iterator[str]:
    """Yield checkpoint names that `mapper` turns into vLLM's layer `name`, the likeliest first.

    Prefix rules may give several. vLLM's classes list names of transformers 5 before those of older checkpoints; a name
    with the prefix "model." belongs to a text model and needs no rule.
    """
    weight = f"{name}.weight"
    renamed = [
        old + weight.removeprefix(new)
        for old, new in mapper.orig_to_new_prefix.items()
        if new is not None and weight.startswith(new)
    ]
    for whole in [weight, *renamed] if weight.startswith(_BASE_PREFIX) else [*renamed, weight]:
        for spelling in [*_with_parts(whole, mapper), whole]:
            if spelling.endswith(".weight") and mapper.apply_list([spelling]) == [weight]:
                yield spelling.removesuffix(".weight")


def _with_parts(weight: str, mapper: Mapper) -> Iterator[str]:
    """Yield `weight` with one substring or suffix rule reversed, for each rule."""
    for old, new in mapper.orig_to_new_substr.items():
        if new and new.strip(".") and new in weight:
            yield weight.replace(new, old, 1)
    for old, new in mapper.orig_to_new_suffix.items():
        if new and weight.endswith(new):
            yield weight.removesuffix(new) + old


def split_fused(name: str, packed_modules_mapping: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names of the layers fused in vLLM's layer `name`, in row order; for an unfused layer [name]."""
    parent, _, leaf = name.rpartition(".")
    shards = packed_modules_mapping.get(leaf, [leaf])
    return [f"{parent}.{shard}" if parent else shard for shard in shards]


def stacked(mapper: Any) -> dict[str, list[str]]:
    """Return the fused layers in a vLLM class's `hf_to_vllm_mapper`, in the form of a `packed_modules_mapping`."""
    fused: dict[str, list[str]] = {}
    for part, (whole, _) in (getattr(mapper, "orig_to_new_stacked", None) or {}).items():
        part, whole = part.strip("."), whole.strip(".")
        if "." not in part and "." not in whole:
            fused.setdefault(whole, []).append(part)
    return fused


def with_gap(name: str, known: Collection[str]) -> str:
    """Return `name` if known, else the only known name with further parts before its last: vLLM's Falcon-H1 has
    `layers.0.q_proj` for `layers.0.self_attn.q_proj`. A wrong guess fails in the probe at start."""
    if not known or name in known:
        return name
    parent, _, leaf = name.rpartition(".")
    longer = [other for other in known if parent and other.startswith(f"{parent}.") and other.endswith(f".{leaf}")]
    return longer[0] if len(longer) == 1 else name
