"""What a rollout needs to know of the trainer's model: is it servable, what does its adapter look like, where are its tensors."""

from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from .lora import adapted_layers
from .norms import canonical_name


def active_adapter(model: nn.Module) -> str:
    """Name of the adapter that is trained and rolled out.

    Raises:
        `ValueError`: several adapters are active at once.
    """
    names = model.active_adapters
    if len(names) != 1:
        raise ValueError(
            f"The adapters {', '.join(names)} are active at once, and vLLM rollouts carry one. Call set_adapter with the one to "
            "train, or use_vllm=False."
        )
    return names[0]


def rollout_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """The layers that carry the active adapter, by canonical name."""
    adapter = active_adapter(model)
    return {canonical_name(n): layer for n, layer in adapted_layers(model).items() if adapter in layer.lora_A}


def check_servable(model: nn.Module) -> None:
    """Refuse adapters that our vLLM method does not compute.

    Raises:
        `ValueError`: DoRA, LoRA biases, several adapters, another PEFT method, or trained modules other than norms.
    """
    configs, adapter = model.peft_config, active_adapter(model)
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
        if config.bias != "none":
            problems.append(f"bias={config.bias!r}")
        if getattr(config, "trainable_token_indices", None):
            problems.append("trainable_token_indices")
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and module.original_module.weight.ndim != 1:
            problems.append(f"modules_to_save with {canonical_name(name)}")
    if problems:
        raise ValueError(
            f"vLLM rollouts cannot carry this adapter: {'; '.join(problems)}. Use plain LoRA (rank, alpha, rsLoRA and target "
            "modules are free; norms may be in modules_to_save), or use_vllm=False."
        )


def adapter_room(model: nn.Module) -> dict[str, Any]:
    """The engine option `adapter` for this PEFT model: its largest rank, and the layers by the shortest names that work."""
    layers, adapter = rollout_layers(model), active_adapter(model)
    by_leaf: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".lora_" not in name:
            clean = canonical_name(name)
            by_leaf.setdefault(clean.rpartition(".")[2], []).append(clean)
    targets: list[str] = []
    for leaf, names in sorted(by_leaf.items()):
        adapted = sorted(set(names) & set(layers))
        targets += [leaf] if adapted and len(adapted) == len(set(names)) else adapted
    return {"rank": max(layer.r[adapter] for layer in layers.values()), "targets": targets}


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
    """Refuse ways of sharding the trainer from which the adapter cannot be gathered layer by layer.

    Raises:
        `ValueError`: DeepSpeed ZeRO-3, or FSDP version 1.
    """
    if zero_stage == 3:
        raise ValueError(
            "vLLM rollouts do not work with DeepSpeed ZeRO-3 here: the frozen base is packed bytes that ZeRO-3 cannot partition "
            "while loading, and nothing but the adapter is trained. Use ZeRO-2, FSDP 2 (fsdp_version: 2), or plain data parallelism."
        )
    if fsdp_version == 1:
        raise ValueError(
            "vLLM rollouts do not work with FSDP version 1, which flattens the adapter with the packed base into one parameter. "
            "Set fsdp_version: 2 in the accelerate configuration, or use plain data parallelism."
        )


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    tensor = parameter.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_sharded(model: nn.Module) -> bool:
    return any(hasattr(p, "full_tensor") or hasattr(p, "ds_id") for p in model.parameters())


def has_bitsandbytes(model: nn.Module) -> bool:
    return any(type(module).__module__.startswith("bitsandbytes") for module in model.modules())
