"""What a rollout needs to know of the trainer's model: is it servable, what does its adapter look like, where are its tensors."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, cast

from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from ..checkpoint.fingerprint import stored_vocabulary
from ..model.lora import adapted_layers, changes_base
from ..nvfp4.architectures import in_tower
from ..nvfp4.checkpoints import pattern_of
from ..support.names import canonical_name


def active_adapter(model: nn.Module) -> str:
    """Name of the adapter that is trained and rolled out.

    Raises:
        `ValueError`: several adapters are active at once.
    """
    names = cast(PeftModel, model).active_adapters
    if len(names) != 1:
        raise ValueError(
            f"The adapters {', '.join(names)} are active at once, and vLLM rollouts carry one. Call set_adapter, or use_vllm=False."
        )
    return names[0]


def rollout_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """The layers that carry the active adapter, by canonical name."""
    adapter = active_adapter(model)
    return {canonical_name(n): layer for n, layer in adapted_layers(model).items() if adapter in layer.lora_A}


def check_servable(model: nn.Module) -> None:
    """Refuse adapters that our vLLM method does not compute.

    Raises:
        `ValueError`: DoRA, LoRA biases, adapters on parameters or embeddings, several of them, another PEFT method, or trained modules
            other than norms.
    """
    configs, adapter = cast(PeftModel, model).peft_config, active_adapter(model)
    config = configs[adapter]
    problems = []
    if set(configs) - {adapter, "ref"}:  # TRL's reference policy stays in the trainer
        problems.append(f"several adapters ({', '.join(configs)})")
    if not isinstance(config, LoraConfig):
        problems.append(f"{type(config).__name__}, not LoRA")
    else:
        problems += [
            f"{flag}={getattr(config, flag)!r}" for flag in ("use_dora", "lora_bias") if getattr(config, flag, False)
        ]
        if changes_base(model):  # a server loads the base as it is stored
            problems.append(f"bias={config.bias!r} with init_lora_weights={config.init_lora_weights!r}")
        problems += [name for name in ("trainable_token_indices", "target_parameters") if getattr(config, name, None)]
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and module.original_module.weight.ndim != 1:
            problems.append(f"modules_to_save with {canonical_name(name)}")
        if isinstance(module, LoraLayer) and adapter in module.lora_embedding_A:
            problems.append(f"an adapter on the embeddings {canonical_name(name)}")
    layers = [canonical_name(name) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    if towers := [name for name in layers if in_tower(name)]:
        tower = next(part for part in towers[0].split(".") if in_tower(part))
        problems.append(
            f"an adapter on {len(towers)} layers of a tower for pictures (set exclude_modules={pattern_of([tower])!r})"
        )
    if problems:
        raise ValueError(
            f"vLLM rollouts cannot carry this adapter: {'; '.join(problems)}. Use plain LoRA on linear target modules (norms may be in modules_to_save), "
            "or use_vllm=False."
        )


def check_vocabulary(model: nn.Module) -> None:
    """Refuse a model whose embeddings were resized: an engine is built from the files that it was loaded from.

    Raises:
        `ValueError`: says both sizes.
    """
    resized, stored = cast(Any, model.config).get_text_config().vocab_size, stored_vocabulary(model)
    if stored not in (None, resized):
        raise ValueError(
            f"The model has {resized} embeddings, and its checkpoint, which vLLM loads, has {stored}. Train from a folder to which the resized model is "
            "saved, or pass use_vllm=False."
        )


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a model, packed or dense, under adapters or not, by canonical name."""
    return {
        canonical_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    }


def short_names(chosen: Iterable[str], everything: Iterable[str]) -> list[str]:
    """The shortest list of names that means `chosen` among `everything`: a last component where all that share it are chosen."""
    chosen, by_leaf = set(chosen), defaultdict(set)
    for name in everything:
        by_leaf[name.rpartition(".")[2]].add(name)
    short: list[str] = []
    for leaf, names in sorted(by_leaf.items()):
        short += [leaf] if names <= chosen else sorted(names & chosen)
    return short


def adapter_buffers(model: nn.Module) -> dict[str, Any]:
    """The engine option `adapter` for this PEFT model: its largest rank, and the layers by the shortest names that work."""
    layers, adapter = rollout_layers(model), active_adapter(model)
    rank = max(layer.r[adapter] for layer in layers.values())
    return {"rank": rank, "targets": short_names(layers, linear_layers(model))}


def trained_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Norms that are trained (`modules_to_save`), by canonical name."""
    adapter = active_adapter(model)
    return {
        canonical_name(name): module.modules_to_save[adapter]
        for name, module in model.named_modules()
        if isinstance(module, ModulesToSaveWrapper)
        and module.original_module.weight.ndim == 1
        and adapter in module.modules_to_save
    }


def check_sharding(zero_stage: int, fsdp_version: int | None) -> None:
    """Refuse ways of sharding the trainer from which an engine cannot get whole tensors, layer by layer.

    Raises:
        `ValueError`: DeepSpeed ZeRO-3, or FSDP version 1.
    """
    if zero_stage == 3:
        raise ValueError(
            "vLLM rollouts do not work with DeepSpeed ZeRO-3, which partitions weights while they load. Use ZeRO-2, FSDP 2 (fsdp_version: 2) or plain data "
            "parallelism."
        )
    if fsdp_version == 1:
        raise ValueError(
            "vLLM rollouts do not work with FSDP version 1, which flattens a layer's weights into one parameter. Set fsdp_version: 2 in the accelerate "
            "configuration."
        )
