"""Out of memory, as a message that says where, which setting to change, and from what to resume."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..checkpoint import settings as identity
from ..memory.formulas import model_bytes, shape_of
from ..memory.plan import GIB, MemoryPlan, relief
from ..rollout.engine import RolloutError

#: of PyTorch, CUDA, cuBLAS, and of vLLM when it starts
_SHORT = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|No available memory for the cache|Free memory on device|larger than the available KV cache"
)
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ([KMG])iB")
_UNITS = {"K": 2**10, "M": 2**20, "G": GIB}


@contextmanager
def naming(trainer: Any) -> Iterator[None]:
    """Around a trainer's start, or a training.

    Raises:
        `torch.OutOfMemoryError`: in place of another's; a [`RolloutError`] of an engine that ran out stays one, and says more.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and not _SHORT.search(str(error)):
            raise
        if isinstance(error, RolloutError):
            error.args = (f"{error} {_change(trainer, error, 'rollout')}",)
            raise
        raise torch.OutOfMemoryError(explain(trainer, error)) from error


def explain(trainer: Any, error: Exception) -> str:
    reason = ". ".join(str(error).strip().split("\n")[0].split(". ")[:2]).rstrip(".")
    if not hasattr(trainer, "_monitor"):  # it is set when the trainer is complete
        loading = trainer.memory_plan is None
        what = "Out of memory while the model was loaded" if loading else "Out of memory when the engine started"
        return f"{what}: {reason}. {_change(trainer, error, 'rollout')}"
    inside = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    saved = trainer._saved
    resume = "No checkpoint was written yet, so the run starts over."
    if saved is not None:
        resume = f"The last whole checkpoint is {saved}: resume from it (resume_from_checkpoint=True)."
    at = f"at step {trainer.state.global_step}: {reason}."
    if "_calculate_rewards" in inside:
        return f"Out of memory in the rewards {at} What reward functions and reward models take is not planned: run them on another GPU. {resume}"
    part = "rollout" if "_generate" in inside else "update"
    where = "a rollout" if part == "rollout" else "an update"
    return f"Out of memory in {where} {at} {_change(trainer, error, part)} {resume}"


def _change(trainer: Any, error: Exception, part: str) -> str:
    """What to change, and by how much."""
    plan: MemoryPlan | None = trainer.memory_plan
    if plan is None:
        return "Use base_format='nvfp4', a smaller model or a larger GPU; `qerl-trl plan` says what fits."
    found = _WANTED.search(str(error))
    wanted = float(found[1]) * _UNITS[found[2]] if found else GIB
    missing = round(max(wanted, 0.02 * plan.gpu.total if plan.gpu else 0))
    if plan.work.utilization is not None:
        return f"Leave vllm_gpu_memory_utilization={plan.work.utilization:g} out, so that the KV cache is planned from what is free."
    if part == "rollout" and plan.kv_bytes - 2 * missing >= plan.kv_least > 0:
        return f"Give the engine less: vllm_engine_kwargs={{'kv_cache_memory_bytes': {plan.kv_bytes - 2 * missing}}} (it had {plan.kv_bytes})."
    model = trainer.accelerator.unwrap_model(trainer.model)
    settings = relief(plan, shape_of(model.config), model_bytes(model), part, missing)
    planned = f"P{plan.summary()[1:]}."
    less = f"{missing / GIB:.1f} GiB" if missing >= GIB else f"{missing / 2**20:.1f} MiB"
    if not settings:
        engine = ", use_vllm=True" if (part, plan.work.rollout) == ("rollout", "transformers") else ""
        return f"{planned} No setting was found that takes {less} less: a shorter max_completion_length{engine}, a smaller model or a larger GPU."
    text = f"{planned} It takes at least {less} less with {' and '.join(settings)}"
    if not all(identity.may_differ(setting.partition(":")[0]) for setting in settings):
        text += ", and with allow_other_settings: true to resume a checkpoint"
    return f"{text}."
