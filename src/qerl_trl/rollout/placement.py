"""When the trainer's model is where it is trained: an engine in the same process is built then, and not before.

Without FSDP and DeepSpeed, transformers moves the model to its device while the trainer is built. With one of them it leaves the model on the CPU
(with `cpu_ram_efficient_loading` even empty in all processes but the first of a machine), and accelerate moves and shards it when training starts. An engine
that is built before that reads tensors that are about to be replaced, and a probe computes on another device than the engine's.
"""

from typing import TYPE_CHECKING

from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import TrainerCallback

if TYPE_CHECKING:
    from .generation import QeRLVLLMGeneration


def placed_in_training(accelerator: Accelerator) -> bool:
    """Whether the model gets to its device only with `accelerator.prepare`, which transformers calls when training starts."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


class StartsEngine(TrainerCallback):
    """Starts the engine between accelerate's preparation of the model and the first step."""

    def __init__(self, generation: "QeRLVLLMGeneration") -> None:
        self._generation = generation

    def on_train_begin(self, args, state, control, **kwargs):
        self._generation.start()
