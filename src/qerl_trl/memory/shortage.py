"""Out of memory, as a message that says where, which setting to change, and from what to go on."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import identity
from ..rollout.engine import RolloutError
from .formulas import model_bytes, shape_of
from .plan import GIB, MemoryPlan, relief

#: of PyTorch, CUDA, cuBLAS, and of vLLM when it starts
_SHORT = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|No available memory for the cache|Free memory on device|larger than the available KV cache"
)
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ([KMG])iB")
_UNITS = {"K": 2**10, "M": 2**20, "G": GIB}
#: what a change must free at least, where the message does not say what was wanted
_LEAST = GIB


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
        change = _change(trainer, error, "rollout")
        if trainer.memory_plan is None:
            return f"Out of memory while the model was loaded: {reason}. {change}"
        return f"Out of memory when the engine started: {reason}. {change}"
    inside = _functions(error)
    part = "rollout" if "_generate" in inside else "update"
    where = "the rewards" if "_calculate_rewards" in inside else f"{'a' if part == 'rollout' else 'an'} {part}"
    text = f"Out of memory in {where} at step {trainer.state.global_step}: {reason}."
    if "_calculate_rewards" in inside:
        return f"{text} What reward functions and reward models take is not planned: run them on another GPU. {_resume(trainer)}"
    return f"{text} {_change(trainer, error, part)} {_resume(trainer)}"


def _functions(error: BaseException) -> set[str]:
    names, trace = set(), error.__traceback__
    while trace is not None:
        names.add(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    return names


def _change(trainer: Any, error: Exception, part: str) -> str:
    """What to change, and by how much."""
    plan: MemoryPlan | None = trainer.memory_plan
    if plan is None:
        return "Use base_format='nvfp4', a smaller model or a larger GPU; `qerl-trl plan` says what fits."
    found = _WANTED.search(str(error))
    wanted = float(found[1]) * _UNITS[found[2]] if found else _LEAST
    missing = round(max(wanted, 0.02 * plan.gpu.total if plan.gpu else 0))
    if plan.work.utilization is not None:
        return f"Leave vllm_gpu_memory_utilization={plan.work.utilization:g} out, so that the KV cache is planned from what is free."
    if part == "rollout" and plan.kv_bytes - 2 * missing >= plan.kv_least > 0:
        return f"Give the engine less: vllm_engine_kwargs={{'kv_cache_memory_bytes': {plan.kv_bytes - 2 * missing}}} (it had {plan.kv_bytes})."
    model = trainer.accelerator.unwrap_model(trainer.model)
    settings = relief(plan, shape_of(model.config), model_bytes(model), part, missing)
    planned, less = (
        f"{_sentence(plan.summary())}.",
        f"{missing / GIB:.1f} GiB" if missing >= GIB else f"{missing / 2**20:.1f} MiB",
    )
    if not settings:
        engine = (
            ", use_vllm=True (its KV cache is planned)"
            if (part, plan.work.rollout) == ("rollout", "transformers")
            else ""
        )
        return f"{planned} No setting was found that takes {less} less: a shorter max_completion_length{engine}, a smaller model or a larger GPU."
    text = f"{planned} It takes at least {less} less with {' and '.join(settings)}"
    if not all(identity.may_differ(setting.partition(":")[0]) for setting in settings):
        text += ", and with allow_other_settings: true to go on from a checkpoint"
    return f"{text}."


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _resume(trainer: Any) -> str:
    saved = trainer._saved
    if saved is None:
        return "No checkpoint was written yet, so the run starts over."
    return f"The last whole checkpoint is {saved}: resume from it (resume_from_checkpoint=True)."
