"""How a trainer's updates are computed: what is expected before they are prepared, for the plan of memory, and what became of it."""

from typing import Any

from transformers.utils import is_flash_linear_attention_available

from . import compiled_layers, lora_linear, packing


def computes(trainer: Any) -> dict[str, Any]:
    """`packed`, `compiled`, `fused` and `delta_kernels` of the plan's [`Workload`], before [`prepare`]: by the settings, the device and the model."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {
        "packed": trainer.args.padding_free is not False and packing.reason_against(trainer) is None,
        "compiled": compiled_layers.expected(trainer),
        "fused": trainer.args.fused_lora and lora_linear.fuses_all(model),
        "delta_kernels": is_flash_linear_attention_available(),
    }


def computed(trainer: Any) -> dict[str, Any]:
    """`packed` and `compiled` as they are now: a model may have failed its trial, a layer may not have compiled."""
    rows, layers = getattr(trainer, "_packing", None), getattr(trainer, "_compiled", None)
    return {"packed": rows is not None and rows.on, "compiled": layers is not None and not layers.failed}
