"""The plan of a trainer's process: what its model, its data and its settings say, and the GPU as it is."""

import dataclasses
import logging
from typing import Any

import torch

from ..checks import environment
from ..nvfp4.linear import compute_dtype
from .formulas import model_bytes, shape_of
from .plan import Gpu, MemoryPlan, plan_run
from .workload import dtype_bytes_of, run_lengths, workload_of

logger = logging.getLogger(__name__)


def _still_to_come(trainer: Any, device: torch.device) -> int:
    """Bytes of reference and reward models that are not on the GPU yet: TRL puts them there after the engine was planned."""
    models = [getattr(trainer, "ref_model", None), *trainer.reward_funcs]
    parameters = (p for model in models if isinstance(model, torch.nn.Module) for p in model.parameters())
    return sum(p.nbytes for p in parameters if p.device.type != device.type)


def plan_trainer(trainer: Any, gpu: Gpu | None = None) -> MemoryPlan:
    """The plan of a trainer's process, made at its first call and kept as `trainer.memory_plan`.

    Args:
        gpu: in place of the trainer's own, as it is now; of a trainer on a CPU, the machine's memory.

    Raises:
        `ValueError`: prompts that cannot fit; see `run_lengths`.
        `RuntimeError`: a run on a CPU takes more than the machine's memory.
    """
    from ..update import how  # the compiler takes a second to import

    made: MemoryPlan | None = getattr(trainer, "memory_plan", None)
    if made is None:
        args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
        lengths = run_lengths(trainer)
        trainer.longest_sequence = lengths.prompt + lengths.completion if lengths.counted else None
        configs = getattr(model, "peft_config", None) or {}
        work = workload_of(
            args,
            lengths,
            lora_rank=max((config.r for config in configs.values()), default=0),
            lora_dropout=max((getattr(config, "lora_dropout", 0.0) for config in configs.values()), default=0.0),
            dtype_bytes=dtype_bytes_of(compute_dtype(model), args.base_format),
            attention=getattr(model.config, "_attn_implementation", None) or "sdpa",
        )
        if trainer.is_fsdp_enabled:  # it will shard what the engine would share
            work = work.under_fsdp()
        device = trainer.accelerator.device
        if gpu is None and device.type == "cpu":
            gpu, work = Gpu.of_machine(), work.on_a_cpu()
        work = dataclasses.replace(work, **how.computes(trainer))
        if getattr(trainer, "aux_loss_enabled", False):  # experts' load is counted, of each completion's own prompt too
            work = dataclasses.replace(work, generations=1)
        if trainer.is_deepspeed_enabled:
            work = work.under_zero2()
        if gpu is None and device.type == "cuda":
            gpu = Gpu.current(device)
        if gpu is not None and gpu.free is not None:
            gpu = dataclasses.replace(gpu, free=gpu.free - _still_to_come(trainer, device))
        shape = shape_of(model.config)
        if shape.delta_nets is not None:
            environment.tell(environment.delta_nets())
        made = plan_run(shape, work, gpu, model_bytes(model), args.vllm_max_model_length or lengths.engine)
        trainer.memory_plan = made
        if work.cpu:
            made.check()
        elif gpu is not None and trainer.accelerator.is_main_process:
            logger.log(logging.INFO if made.fits else logging.WARNING, "%s\n%s", made.table(), made.verdict())
    return made


def plan_again(trainer: Any, **changed: Any) -> None:
    """Plan a trainer's updates anew, which turned out to be computed in another way (`packed`, `compiled`); the engine stays as it is, its KV
    cache and the tokens of its steps."""
    before: MemoryPlan = trainer.memory_plan
    limit = before.kv_bytes if before.work.colocated and before.gpu is not None else before.work.kv_limit
    work = dataclasses.replace(
        before.work, **changed, kept_layers=0, kv_limit=limit, batched_tokens=before.work.step_tokens
    )
    model = trainer.accelerator.unwrap_model(trainer.model)
    made = plan_run(shape_of(model.config), work, before.gpu, model_bytes(model), before.max_model_len)
    made = dataclasses.replace(made, work=dataclasses.replace(made.work, kv_limit=before.work.kv_limit))
    trainer.memory_plan = made
    if made.gpu is not None and trainer.accelerator.is_main_process:
        logger.warning("Planned again, as updates are computed in another way: %s. %s", made.summary(), made.verdict())
