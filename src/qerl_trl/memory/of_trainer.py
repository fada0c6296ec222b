"""The memory of a trainer: its plan, the number of recomputed layers, and the out-of-memory message.

Gradient checkpointing keeps each layer's input and recomputes the layer in the backward pass. If
`gradient_checkpointing` is left out, the plan (`plan.py`) exempts as many of the last layers as fit: their activations
are freed before the first layers recompute. transformers' switch per layer (`GradientCheckpointingLayer`) exempts them,
and all compiled layers: those recompute inside (`CompiledLayers.recompute`), at lower cost.
"""

import dataclasses
import logging
import re
import traceback
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from accelerate.utils import is_peft_model
from transformers.utils import is_flash_linear_attention_available

from ..checkpoint import settings as identity
from ..nvfp4.linear import compute_dtype
from ..update import compiled_layers, lora_linear, packing
from ..update.layer_function import decoder_layers, decoder_of
from .formulas import model_bytes, shape_of
from .plan import GIB, Gpu, MemoryPlan, plan_run, relief
from .workload import dtype_bytes_of, run_lengths, workload_of

logger = logging.getLogger(__name__)

#: out-of-memory messages of PyTorch, CUDA, cuBLAS, and of vLLM at its start
_SHORT = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|No available memory for the cache|Free memory on device"
    r"|larger than the available KV cache"
)
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ([KMG])iB")
_UNITS = {"K": 2**10, "M": 2**20, "G": GIB}


def plan_trainer(trainer: Any, gpu: Gpu | None = None) -> MemoryPlan:
    """Plan the memory of a trainer's process at the first call, and keep the plan as `trainer.memory_plan`.

    Args:
        gpu: replaces the trainer's current GPU (on a CPU: the machine's memory).

    Raises:
        `ValueError`: prompts cannot fit; see `run_lengths`.
        `RuntimeError`: a run on a CPU takes more than the machine's memory.
    """
    if trainer.memory_plan is not None:
        return trainer.memory_plan
    args, model, device = trainer.args, trainer.accelerator.unwrap_model(trainer.model), trainer.accelerator.device
    lengths = run_lengths(trainer)
    trainer.longest_sequence = lengths.prompt + lengths.completion if lengths.counted else None
    rank, dropout = 0, 0.0
    for config in model.peft_config.values() if is_peft_model(model) else ():
        rank, dropout = max(rank, config.r), max(dropout, config.lora_dropout)
    work = workload_of(
        args,
        lengths,
        lora_rank=rank,
        lora_dropout=dropout,
        dtype_bytes=dtype_bytes_of(compute_dtype(model), args.base_format),
        attention=model.config._attn_implementation or "sdpa",
    )
    if trainer.is_fsdp_enabled:  # it will shard what the engine would share
        work = work.under_fsdp()
    if gpu is None and device.type == "cpu":
        gpu, work = Gpu.of_machine(), work.on_a_cpu()
    # updates as expected by the settings, the device and the model
    work = dataclasses.replace(
        work,
        packed=args.padding_free is not False and packing.Packing(trainer).reason_against() is None,
        compiled=args.compile_layers is not False and compiled_layers.reason_against(trainer) is None,
        fused=args.fused_lora and lora_linear.fuses_all(model),
        delta_kernels=is_flash_linear_attention_available(),
        # the load of experts counts each completion's prompt
        generations=1 if trainer.aux_loss_enabled else work.generations,
    )
    if trainer.is_deepspeed_enabled:
        work = work.under_zero2()
    if gpu is None and device.type == "cuda":
        gpu = Gpu.current(device)
    if gpu is not None and gpu.free is not None:
        gpu = dataclasses.replace(gpu, free=gpu.free - _to_come([trainer.ref_model, *trainer.reward_funcs], device))
    shape = shape_of(model.config)
    made = plan_run(shape, work, gpu, model_bytes(model), args.vllm_max_model_length or lengths.engine)
    trainer.memory_plan = made
    if work.cpu:
        made.check()
    elif gpu is not None and trainer.accelerator.is_main_process:
        logger.log(logging.INFO if made.fits else logging.WARNING, "%s\n%s", made.table(), made.verdict())
    return made


def _to_come(models: Iterable[Any], device: torch.device) -> int:
    """Add up the bytes of reference and reward models not on the GPU yet: TRL moves them there after planning."""
    parameters = (p for model in models if isinstance(model, torch.nn.Module) for p in model.parameters())
    return sum(p.nbytes for p in parameters if p.device.type != device.type)


def prepare_updates(trainer: Any) -> None:
    """Speed up a built trainer's update, once model, adapter and noise are in place. The results stay the same; an
    unsupported part falls back to TRL's own code and logs this once.

    The order matters: first the forward of single modules; then packing, after a trial of the model; then compilation
    of the result; last the number of recomputed layers.
    """
    if trainer.args.fused_lora:
        lora_linear.fuse(trainer.accelerator.unwrap_model(trainer.model))
    trainer._packing = packing.Packing(trainer)
    trainer._packing.prepare()
    trainer._compiled = compiled_layers.compile_for(trainer)
    Recomputation(trainer).prepare()


class Recomputation:
    """Let the planned number of layers keep their activations, checked at each update: fewer fit if layers did not
    compile or a row was not packed. The others recompute, compiled ones inside."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def prepare(self) -> None:
        trainer = self._trainer
        compiled = trainer._compiled if trainer.args.gradient_checkpointing else None
        model = trainer.accelerator.unwrap_model(trainer.model)
        layers = decoder_layers(model)
        count = 0
        if trainer.memory_plan is not None:
            self._follow()
            count = trainer.memory_plan.work.kept_layers
        if not count and compiled is None:
            return
        if len(layers) < count:
            logger.info("%s has no list of checkpointed layers, so all recompute.", type(model).__name__)
            count = 0
        kept = layers[len(layers) - count :]
        inside = [] if compiled is None else [layer for layer in layers if layer in compiled.layers]

        def divide() -> None:
            if compiled is not None:
                compiled.recompute([layer for layer in inside if layer not in kept])

        def take_out(*_: Any) -> None:
            if count and torch.is_grad_enabled():
                self._follow()
                too_many = max(0, len(kept) - trainer.memory_plan.work.kept_layers)
                for layer in kept[:too_many]:
                    layer.gradient_checkpointing = True
                del kept[:too_many]
                if too_many:
                    divide()
            # at each forward: TRL switches the whole model off and on again around each rollout
            for layer in (*kept, *inside):
                layer.gradient_checkpointing = False

        divide()
        decoder_of(model).register_forward_pre_hook(take_out)

    def _follow(self) -> None:
        """Plan again if updates differ from the plan: packing may have failed its trial, a layer may not have compiled.
        The engine keeps its KV cache and the tokens of its steps."""
        trainer, before = self._trainer, self._trainer.memory_plan
        packed, compiled = trainer._packing.on, trainer._compiled is not None and not trainer._compiled.failed
        if (packed, compiled) == (before.work.packed, before.work.compiled):
            return
        limit = before.kv_bytes if before.work.colocated and before.gpu is not None else before.work.kv_limit
        work = dataclasses.replace(
            before.work, packed=packed, compiled=compiled, kept_layers=0, kv_limit=limit,
            batched_tokens=before.work.step_tokens,
        )  # fmt: skip
        model = trainer.accelerator.unwrap_model(trainer.model)
        made = plan_run(shape_of(model.config), work, before.gpu, model_bytes(model), before.max_model_len)
        made = dataclasses.replace(made, work=dataclasses.replace(made.work, kv_limit=before.work.kv_limit))
        trainer.memory_plan = made
        logger.info("The memory plan changed with packing or compilation: %s. %s", made.summary(), made.verdict())


class OutOfMemory:
    """Explain out of memory in a trainer's start or training: the phase, the setting to change, how to resume."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def explain(self, error: Exception, of_engine: type[Exception]) -> NoReturn:
        """Re-raise a caught error, with advice added if memory ran out.

        Args:
            of_engine: error class of a failed engine; such an error keeps its type, and gets the advice in its text.

        Raises:
            `torch.OutOfMemoryError`: replaces any other error that reports too little memory.
        """
        short = isinstance(error, torch.OutOfMemoryError) or _SHORT.search(str(error))
        if short and not isinstance(error, of_engine):
            raise torch.OutOfMemoryError(self._explanation(error)) from error
        if short:
            error.args = (f"{error} {self._change(error, 'rollout')}",)
        raise error

    def _explanation(self, error: Exception) -> str:
        trainer = self._trainer
        reason = ". ".join(str(error).strip().split("\n")[0].split(". ")[:2]).rstrip(".")
        if "_monitor" not in vars(trainer):  # it is set when the trainer is complete
            loading = trainer.memory_plan is None
            what = "Out of memory while the model was loaded" if loading else "Out of memory when the engine started"
            return f"{what}: {reason}. {self._change(error, 'rollout')}"
        inside = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        resume = "No checkpoint was written yet, so the run starts over."
        if trainer._saved is not None:
            resume = f"The last whole checkpoint is {trainer._saved}: resume from it (resume_from_checkpoint=True)."
        at = f"at step {trainer.state.global_step}: {reason}."
        if "_calculate_rewards" in inside:
            return (
                f"Out of memory in the rewards {at} Reward functions and reward models are not planned: run them on "
                f"another GPU. {resume}"
            )
        part, where = ("rollout", "a rollout") if "_generate" in inside else ("update", "an update")
        return f"Out of memory in {where} {at} {self._change(error, part)} {resume}"

    def _change(self, error: Exception, part: str) -> str:
        """Return advice: the setting to change, and by how much."""
        plan: MemoryPlan | None = self._trainer.memory_plan
        if plan is None:
            return "Use base_format='nvfp4', a smaller model or a larger GPU; `qerl-trl plan` shows what fits."
        found = _WANTED.search(str(error))
        wanted = float(found[1]) * _UNITS[found[2]] if found else GIB
        missing = round(max(wanted, 0.02 * plan.gpu.total if plan.gpu else 0))
        if plan.work.utilization is not None:
            return (
                f"Leave vllm_gpu_memory_utilization={plan.work.utilization:g} out, so that the KV cache is planned "
                "from what is free."
            )
        if part == "rollout" and plan.kv_bytes - 2 * missing >= plan.kv_least > 0:
            return (
                "Use a smaller KV cache: "
                f"vllm_engine_kwargs={{'kv_cache_memory_bytes': {plan.kv_bytes - 2 * missing}}} (was {plan.kv_bytes})."
            )
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        settings = relief(plan, shape_of(model.config), model_bytes(model), part, missing)
        planned = f"P{plan.summary()[1:]}."
        less = f"{missing / GIB:.1f} GiB" if missing >= GIB else f"{missing / 2**20:.1f} MiB"
        if not settings:
            engine = ", use_vllm=True" if (part, plan.work.rollout) == ("rollout", "transformers") else ""
            return (
                f"{planned} No setting was found that saves {less}. Use a shorter max_completion_length{engine}, a "
                "smaller model or a larger GPU."
            )
        text = f"{planned} It takes at least {less} less with {' and '.join(settings)}"
        if not all(identity.may_differ(setting.partition(":")[0]) for setting in settings):
            text += ", and with allow_other_settings: true to resume a checkpoint"
        return f"{text}."
