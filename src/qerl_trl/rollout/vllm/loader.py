"""The vLLM loader `qerl_trainer`: weights come from the trainer's model, which is in the same process, not from a folder.

    publish(model, alias=True)                            in the trainer
    LLM(..., load_format="qerl_trainer", quantization="qerl_nvfp4")

With `alias` (one process per engine) vLLM's packed linears, embeddings and head *are* the trainer's tensors: q|k|v and
gate|up are row slices of one storage there, and vLLM's fused layer is that storage. Nothing is allocated a second time;
what remains (norms, biases) is copied through vLLM's own name mapping. Without `alias` (tensor parallelism, `share_weights=False`, or
a base that is trained itself) the same tensors are copied, each rank taking its shard. Aliased tensors must stay where they are
while the engine lives: no `.to()`, no offloading, no rebinding.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
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
from .linear import AdaptedMethod, DenseMethod, Layer
from .nf4 import NF4Method, is_nf4
from .norm import make_noisy

LOAD_FORMAT = "qerl_trainer"


def base_model(model: Any) -> nn.Module:
    """The transformers model inside PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@dataclass
class Published:
    """The trainer's model as the loader sees it: frozen layers by the name that a checkpoint would give them."""

    model: nn.Module
    alias: bool
    modules: dict[str, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, module in base_model(self.model).named_modules():
            parts = name.split(".")
            if "modules_to_save" in parts or any(part.startswith("lora_") for part in parts):
                continue
            clean = ".".join(p for p in parts if p not in ("base_layer", "original_module"))
            # PEFT's wrappers come before what they wrap, which is stored last under the same name
            self.modules[clean] = module

    def module(self, name: str) -> Any:
        """
        Raises:
            `ValueError`: the trainer's model has no such layer.
        """
        if not name:
            raise ValueError(
                f"vLLM's {get_current_vllm_config().model_config.architecture} builds a layer without a name, so nothing says which of the trainer's it "
                "is. Use use_vllm=False for this architecture."
            )
        if name not in self.modules:
            raise ValueError(
                f"vLLM's model has a layer {name!r} that the trainer's {type(base_model(self.model)).__name__} does not have. Use use_vllm=False for "
                "this architecture."
            )
        return self.modules[name]

    def base_format(self, name: str) -> str:
        """What the trainer's layer holds: "nvfp4", "nf4" or "dense".

        Raises:
            `ValueError`: no such layer, or one of bitsandbytes' 8-bit layers.
        """
        module = self.module(name)
        if isinstance(module, NVFP4Linear):
            return "nvfp4"
        if is_nf4(module):
            return "nf4"
        if type(module).__module__.startswith("bitsandbytes"):
            raise ValueError(
                f"{name} is a {type(module).__name__} of bitsandbytes, which the engine cannot read. Use load_in_4bit, bf16 or NVFP4, or use_vllm=False."
            )
        return "dense"

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor under its compressed-tensors name (those of towers under their checkpoint's), full on every rank, a tied one once; not what bitsandbytes packed."""
        seen: set[int] = set()
        for name, module in self.modules.items():
            for key, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen or (key == "weight" and is_nf4(module)):
                    continue
                seen.add(id(parameter))
                tensor = parameter.detach()
                tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                if isinstance(module, NVFP4Linear) and key == "weight_scale":
                    tensor = tensor.view(torch.float8_e4m3fn)
                elif isinstance(module, NVFP4Linear) and key == "weight_global_scale":
                    tensor = tensor.view(torch.float32)
                full = f"{name}.{key}" if name else key
                yield self._on_disk(full, tensor) if in_tower(name) else full, tensor

    def _on_disk(self, name: str, tensor: torch.Tensor) -> str:
        """What a checkpoint calls this tensor, where transformers builds a tower in another form than it was published in."""
        stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        model: Any = base_model(self.model)
        reverted = revert_weight_conversion(model, {name: stand_in})
        return next(iter(reverted)) if len(reverted) == 1 else name


_PUBLISHED: Published | None = None


def publish(model: nn.Module | None, alias: bool = True) -> None:
    """Make `model` visible to the next engine that is built in this process with `load_format="qerl_trainer"`; None ends it."""
    global _PUBLISHED
    _PUBLISHED = None if model is None else Published(model, alias)


def published_for_current_engine() -> Published | None:
    """The trainer's model, if the engine that is being built loads from it.

    Raises:
        `RuntimeError`: it wants to, but no trainer runs in this process.
    """
    if get_current_vllm_config().load_config.load_format != LOAD_FORMAT:
        return None
    return _require_published()


def _require_published() -> Published:
    if _PUBLISHED is None:
        raise RuntimeError(
            f"load_format={LOAD_FORMAT!r} takes the weights from a trainer in the same process, and there is none here. Set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0; with `vllm serve`, leave load_format out."
        )
    return _PUBLISHED


def fused_rows(tensors: list[torch.Tensor], names: list[str]) -> torch.Tensor:
    """The one tensor whose consecutive row slices are `tensors`, without a copy.

    Raises:
        `RuntimeError`: they are not neighbours in one storage.
    """
    first, rows = tensors[0], 0
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if (
            not same
            or not tensor.is_contiguous()
            or tensor.storage_offset() != first.storage_offset() + rows * first.stride(0)
        ):
            raise RuntimeError(
                f"The trainer's {names} are not consecutive slices of one storage, so vLLM cannot read them as one layer: something moved the model "
                "after it was loaded. Pass share_weights=False."
            )
        rows += tensor.shape[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


@torch.no_grad()
def fuse_dense_rows(modules: list[nn.Linear]) -> None:
    """Put the bf16 weights of layers that vLLM fuses into one storage, as `fuse_storage` does for packed ones."""
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
        """Nothing to download."""

    @torch.no_grad()
    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        published = _require_published()
        make_noisy(model)
        renaming = get_current_vllm_config().quant_config.renaming  # type: ignore[union-attr]  # ours
        taken: set[str] = set()  # parameters of the trainer that need no copy
        aliased: set[str] = set()  # parameters of vLLM that need no load
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
                f"{len(missing)} parameters of vLLM's model got no value from the trainer ({sorted(missing)[:4]}). Use share_weights=False or "
                "use_vllm=False for this architecture."
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
            one_storage(modules)  # a group of this architecture alone
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
        if source.requires_grad:
            raise ValueError(
                f"{name} is trained, but vLLM would read the trainer's tensor. Freeze it (LoRA does), or pass share_weights=False."
            )
        if source.shape == layer.weight.shape and source.dtype == layer.weight.dtype:
            layer.weight = Parameter(source.data, requires_grad=False)
            return {f"{name}.weight"}
        padded = torch.zeros(
            layer.weight.shape, dtype=layer.weight.dtype, device=source.device
        )  # vLLM pads the vocabulary
        padded[: source.shape[0]].copy_(source)
        layer.weight = Parameter(padded, requires_grad=False)
        return {f"{name}.weight"}
