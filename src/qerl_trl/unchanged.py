"""What does not change while an adapter is trained: the frozen base, and the numbers that scale the adapter. Looked at before anything is saved.

Merging an adapter into weights of 16 bits and taking it out again leaves others than there were (`merge_adapter`, `unmerge_adapter` in a callback or
another library), and a scale that was set by hand stands in no file: what is saved would be another policy than the one that was trained.
"""

import math
from typing import Any

from accelerate.utils import is_peft_model
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import get_pattern_key
from torch import nn

from .base_identity import base_sha256
from .names import canonical_name

MERGED = "The adapter is merged into the model already. Call unmerge_adapter() first, then export."
#: of a base on a CPU, which reads some 100 MB/s for it
_SLOW_BYTES = 1 << 28


def check_scales(model: nn.Module) -> None:
    """
    Raises:
        `RuntimeError`: a layer scales its adapter by another number than the adapter's configuration, which is what is saved, makes of it.
    """
    for adapter, config in getattr(model, "peft_config", {}).items():
        if not isinstance(config, LoraConfig):
            continue
        wrong = [
            (name, layer.scaling[adapter], scale)
            for name, layer in model.named_modules()
            if isinstance(layer, LoraLayer)
            and adapter in layer.scaling
            and not math.isclose(layer.scaling[adapter], scale := _scale(config, canonical_name(name)), rel_tol=1e-6)
        ]
        if wrong:
            name, found, scale = wrong[0]
            raise RuntimeError(
                f"{canonical_name(name)} scales its adapter {adapter!r} by {found:g} ({len(wrong)} such layers), and the adapter's configuration, from which "
                f"whoever loads it computes that number, says {scale:g} (lora_alpha={config.lora_alpha}, r={config.r}). Nothing was saved. Set lora_alpha "
                f"instead, and build the adapter anew; or put the number back: layer.scaling[{adapter!r}] = {scale:g}."
            )


def _scale(config: LoraConfig, name: str) -> float:
    """As PEFT computes it for a layer of that name."""
    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    rank = ranks.get(get_pattern_key(list(ranks), name), config.r)
    alpha = alphas.get(get_pattern_key(list(alphas), name), config.lora_alpha)
    return float(alpha / math.sqrt(rank) if config.use_rslora else alpha / rank)


def check_base(model: nn.Module, began_with: str | None) -> None:
    """
    Args:
        began_with: fingerprint of the base when the run began, `None` where nobody had it whole.

    Raises:
        `RuntimeError`: the adapter is merged, or a frozen weight is another one than then.
    """
    if any(isinstance(module, BaseTunerLayer) and module.merged for module in model.modules()):
        raise RuntimeError(MERGED)
    now = None if began_with is None else base_sha256(model)
    if now not in (None, began_with):
        raise RuntimeError(
            f"The frozen base has other weights (fingerprint {str(now)[:12]}) than when the run began ({str(began_with)[:12]}), so a merge would not be "
            "the policy that was trained. Merging an adapter and unmerging it again does that, in 16 bits. The adapter is whole: save it "
            "(save_adapter), and merge from its folder: qerl-trl merge <folder> <destination>."
        )


def check(trainer: Any, in_the_middle: bool = False) -> None:
    """Both, before a trainer saves. Nothing is said of what processes share out between them, or of a base that is trained.

    Args:
        in_the_middle: a checkpoint, of which there are many: the fingerprint takes milliseconds on a GPU, and of a large base on a CPU is left to the end.

    Raises:
        `RuntimeError`: see above.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_peft_model(model):
        return
    check_scales(model)
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return
    slow = model.device.type == "cpu" and sum(p.nbytes for p in model.parameters()) > _SLOW_BYTES
    try:
        check_base(model, None if in_the_middle and slow else trainer.base_sha256)
    except RuntimeError as error:
        error.add_note(
            f"Step {trainer.state.global_step} was not saved as the run's. If steps were trained since, they were trained on other weights: take the merge "
            "out of what runs while training, and resume from the last checkpoint (resume_from_checkpoint=True)."
        )
        raise
