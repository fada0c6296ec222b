"""What a rollout needs to know of the trainer's model: is it servable, what does its adapter look like, where are its tensors."""

from typing import Any

import torch
from peft import LoraConfig
from peft.utils import ModulesToSaveWrapper
from torch import nn

from .lora import adapted_layers
from .norms import canonical_name


def check_servable(model: nn.Module) -> None:
    """Refuse adapters that our vLLM method does not compute.

    Raises:
        `ValueError`: DoRA, LoRA biases, several adapters, another PEFT method, or trained modules other than norms.
    """
    configs = model.peft_config
    config = configs.get("default")
    problems = []
    if len(configs) > 1 and set(configs) - {"default", "ref"}:
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
    layers = {canonical_name(name): layer for name, layer in adapted_layers(model).items()}
    by_leaf: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".lora_" not in name:
            clean = canonical_name(name)
            by_leaf.setdefault(clean.rpartition(".")[2], []).append(clean)
    targets: list[str] = []
    for leaf, names in sorted(by_leaf.items()):
        adapted = sorted(set(names) & set(layers))
        targets += [leaf] if adapted and len(adapted) == len(set(names)) else adapted
    return {"rank": max(layer.r["default"] for layer in layers.values()), "targets": targets}


def trained_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Norms that are trained (`modules_to_save`), by canonical name."""
    return {
        canonical_name(name): module.modules_to_save["default"]
        for name, module in model.named_modules()
        if isinstance(module, ModulesToSaveWrapper) and module.original_module.weight.ndim == 1
    }


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    tensor = parameter.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_sharded(model: nn.Module) -> bool:
    return any(hasattr(p, "full_tensor") or hasattr(p, "ds_id") for p in model.parameters())


def has_bitsandbytes(model: nn.Module) -> bool:
    return any(type(module).__module__.startswith("bitsandbytes") for module in model.modules())
