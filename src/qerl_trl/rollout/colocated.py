"""An engine in the trainer's process: whether it shares the trainer's tensors, on which processes it lies, how much memory it may take."""

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
from trl.trainer.utils import ensure_master_addr_port

from ..memory.plan import MemoryPlan
from ..support.distributed import gathered
from ..support.names import is_sharded
from .engine import Engine
from .weights import TrainedAdapter

if TYPE_CHECKING:
    from .generation import QeRLVLLMGeneration

logger = logging.getLogger(__name__)


def in_process(generation: "QeRLVLLMGeneration") -> Engine:
    """The engine of this process; sets what TRL's `VLLMGeneration` reads of it."""
    from .vllm.engine import InProcessEngine

    accelerator, tp, args = generation.accelerator, generation.tensor_parallel_size, generation.trainer.args
    if accelerator.num_processes % tp:
        raise ValueError(
            f"vllm_tensor_parallel_size={tp} must divide the number of processes, {accelerator.num_processes}."
        )
    generation.tp_group = None
    if tp > 1:
        groups = [list(range(i, i + tp)) for i in range(0, accelerator.num_processes, tp)]
        generation.tp_group, _ = torch.distributed.new_subgroups_by_enumeration(groups)
    os.environ["RANK"] = str(accelerator.process_index)
    os.environ["LOCAL_RANK"] = str(accelerator.local_process_index)
    os.environ["WORLD_SIZE"] = str(accelerator.num_processes)
    ensure_master_addr_port()
    # weights that are trained themselves change while the engine is not looking, and are mostly float32
    wanted = args.share_weights and isinstance(generation.trained, TrainedAdapter)
    generation.shared = wanted and tp == 1 and not is_sharded(generation.model)
    if wanted and not generation.shared:
        logger.warning(
            "share_weights=True needs one unsharded process per engine: vLLM gets a copy. Set share_weights=False, or vllm_tensor_parallel_size=1.",
        )
    sleeps, generation.enable_sleep_mode = generation.enable_sleep_mode, False  # the parent would sleep at level 2
    placement = {
        "tensor_parallel_size": tp,
        "distributed_executor_backend": "external_launcher",
        # the same seed in a tensor-parallel group, so that its ranks sample the same tokens
        "seed": accelerator.process_index // tp,
    }
    arguments = placement | agreed(memory_arguments(generation), generation.tp_group) | (args.vllm_engine_kwargs or {})
    return InProcessEngine(generation.model, generation.spec, generation.shared, sleeps, generation.tp_group, arguments)


def agreed(arguments: dict[str, Any], group: "torch.distributed.ProcessGroup | None") -> dict[str, Any]:
    """The smallest of each number over all processes of one engine: each planned for its own GPU, and their schedulers have to decide alike.
    Collective in `group`; None: an engine of one process."""
    if group is None:
        return arguments
    every = gathered(arguments, group)
    names = {name: None for each in every for name in each}  # a plan with less room has more of them
    return {name: min(each[name] for each in every if name in each) for name in names}


def memory_arguments(generation: "QeRLVLLMGeneration") -> dict[str, Any]:
    """What `LLM` is told about memory: the user's share of the GPU, or a planned KV cache."""
    if generation.gpu_memory_utilization is not None:
        return {"gpu_memory_utilization": generation.gpu_memory_utilization}
    plan: MemoryPlan = generation.trainer.memory_plan
    plan.check()
    return plan.engine_arguments()
