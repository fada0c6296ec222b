"""Smaller micro-batches in place of recomputation.

Where not all activations of a micro-batch fit, layers recompute. But a packed row of half as many sequences keeps half as much, and computes
as fast, as long as it has some thousand tokens: the same update in more backward passes then needs no recomputation, in the same memory.
"""

import dataclasses

from .formulas import ModelBytes, Shape
from .plan import MemoryPlan, plan_run

#: what recomputing every layer adds to forward and backward (examples/benchmarks/results/update_speed_h200.json)
RECOMPUTATION = 0.32
#: tokens of a pass; in shorter ones, launching kernels and decoding weights begin to show
_FEWEST_TOKENS = 2048
#: share of an update that is worth a word
_WORTH = 0.05


def computed(shape: Shape, plan: MemoryPlan) -> float:
    """What an update computes, in tokens that go through the model forward and backward without recomputation."""
    work = plan.work
    kept = shape.layers if work.gradient_checkpointing is False else work.kept_layers
    return work.accumulation * work.tokens * (1 + RECOMPUTATION * (1 - kept / shape.layers))


def advice(shape: Shape, plan: MemoryPlan, model: ModelBytes | None = None) -> str | None:
    """The settings with which an update of a run that fits computes least, if that is less by a twentieth or more, as a sentence.

    Args:
        model: counted, where it is in memory already.
    """
    work, best = plan.work, plan
    left_open = work.gradient_checkpointing is None and work.kept_layers < shape.layers
    if not (left_open and work.packed and plan.fits and plan.gpu is not None):
        return None
    for batch in range(work.batch - 1, 0, -1):
        if work.batch % batch:
            continue
        smaller = dataclasses.replace(
            work, batch=batch, accumulation=work.accumulation * (work.batch // batch), kept_layers=0
        )
        if smaller.tokens < _FEWEST_TOKENS:
            break
        made = plan_run(shape, smaller, plan.gpu, model, plan.max_model_len)
        if made.fits and made.waves <= plan.waves and computed(shape, made) < computed(shape, best):
            best = made
    less = 1 - computed(shape, best) / computed(shape, plan)
    if less < _WORTH:
        return None
    recomputed = shape.layers - best.work.kept_layers
    return (
        f"per_device_train_batch_size: {best.work.batch} (gradient_accumulation_steps: {best.work.accumulation}) would recompute "
        f"{f'{recomputed} of {shape.layers} layers' if recomputed else 'no layer'} instead of {shape.layers - work.kept_layers}: updates then "
        f"compute about {less:.0%} less, in {best.update / 2**30:.1f} GiB."
    )
