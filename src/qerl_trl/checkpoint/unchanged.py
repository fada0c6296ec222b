"""The frozen base does not change while an adapter is trained. Checked before anything is saved.

Merging an adapter into 16-bit weights and taking it out again (`merge_adapter`, `unmerge_adapter` in a callback or another library) leaves other
weights, and a merge of what is saved would be another policy than the one that was trained.
"""

from typing import Any

from accelerate.utils import is_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from .fingerprint import base_sha256

MERGED = "The adapter is merged into the model already. Call unmerge_adapter() first, then export."
#: of a base on a CPU, of which 100 MB are read per second
_SLOW_BYTES = 1 << 28


def check_base(model: nn.Module, began_with: str | None) -> None:
    """
    Args:
        began_with: fingerprint of the base when the run began, `None` where it is unknown.

    Raises:
        `RuntimeError`: the adapter is merged, or a frozen weight changed.
    """
    if any(isinstance(module, BaseTunerLayer) and module.merged for module in model.modules()):
        raise RuntimeError(MERGED)
    now = None if began_with is None else base_sha256(model)
    if now not in (None, began_with):
        raise RuntimeError(
            f"The frozen base has other weights ({str(now)[:12]}) than when the run began ({str(began_with)[:12]}), as after a merge and unmerge. "
            "Save the adapter (save_adapter), and merge from its folder."
        )


def check(trainer: Any, in_the_middle: bool = False) -> None:
    """Check the base of a trainer that saves, unless it is sharded.

    Args:
        in_the_middle: a checkpoint: the fingerprint of a large base on a CPU is left to the end.

    Raises:
        `RuntimeError`: as [`check_base`].
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_peft_model(model) or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return
    slow = model.device.type == "cpu" and sum(p.nbytes for p in model.parameters()) > _SLOW_BYTES
    try:
        check_base(model, None if in_the_middle and slow else trainer.base_sha256)
    except RuntimeError as error:
        error.add_note(
            f"Step {trainer.state.global_step} was not saved. Take the merge out of the training, and resume from the last checkpoint."
        )
        raise
