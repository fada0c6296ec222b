"""When the trainer's model is where it is trained: an engine in the same process is built then, and not before.

Without FSDP and DeepSpeed, transformers moves the model to its device while the trainer is built. With one of them it leaves the model on the CPU
(with `cpu_ram_efficient_loading` even empty in all processes but the first of a machine), and accelerate moves and shards it when training starts. An engine
that is built before that reads tensors that are about to be replaced, and a probe computes on another device than the engine's.

And which optimizer steps parameters of which a process then has a part.
"""

import logging
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import TrainerCallback

from ..checkpoint import seal
from ..memory.workload import optimizer_under_fsdp
from ..support.distributed import fsdp_version

if TYPE_CHECKING:
    from .generation import QeRLVLLMGeneration

logger = logging.getLogger(__name__)


def placed_in_training(accelerator: Accelerator) -> bool:
    """Whether the model gets to its device only with `accelerator.prepare`, which transformers calls when training starts."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


class StartsEngine(TrainerCallback):
    """Starts the engine between accelerate's preparation of the model and the first step."""

    def __init__(self, generation: "QeRLVLLMGeneration") -> None:
        self._generation = generation

    def on_train_begin(self, args, state, control, **kwargs):
        self._generation.start()


def settle_optimizer(args: Any) -> None:
    """Under FSDP, an optimizer that can step what it shares out ([`optimizer_under_fsdp`]) in place of one that would stop at the first step.

    Raises:
        `ValueError`: there is none that computes the same.
    """
    if fsdp_version(args) is None:
        return
    wanted = str(getattr(args.optim, "value", args.optim))
    used = optimizer_under_fsdp(wanted)
    if used != wanted:
        logger.warning(
            "optim=%r is bitsandbytes', which cannot step parameters that FSDP shards. This run uses %r: the same AdamW, with a sharded state in float32.",
            wanted,
            used,
        )
        args.optim = type(args.optim)(used)
    if used == "sgd" and seal.can_go_on(args):
        logger.warning(
            "optim='sgd' under FSDP cannot resume from its checkpoints: torch does not load an optimizer without a state. Use optim='adamw_torch_fused'."
        )
