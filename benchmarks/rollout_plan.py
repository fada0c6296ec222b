"""What rollout_speed.py does when: stages of engines that fit a GPU side by side, and whose turn it is.

A stage holds the engines that are on the GPU at the same time. Within it they are measured in turns, batch by batch, beginning with
another one each time, so that what drifts (clocks, heat) meets all of a model alike.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

THEN = "then"  # between the cases of two stages
PROMPT, NEW = 256, 256
GIB = 2**30
#: of a GPU, what all engines together may be planned to take
USABLE = 0.95
#: GiB of one process beside weights, keys and values, by estimate: CUDA context, graphs, what a prefill and logits take
PROCESS_GIB = 5.0
#: engines of ours, whose steps process as many tokens as a plan chooses
PLANNED_STEPS = ("ours", "ours-dense")
#: and of one of these, in whose steps there is more of a prefill
LARGER_STEPS_GIB = 2.5


class Case(NamedTuple):
    """An engine and a model, `NAME:SIZE`, with the numbers of sequences that it rolls out, and those whose decode step is profiled."""

    name: str
    batches: tuple[int, ...]
    profiled: tuple[int, ...] = ()

    @property
    def size(self) -> str:
        return self.name.split(":")[1]


def numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(number) for number in text.split(",") if number}))


def stages_of(words: list[str], batches: str, profiled: str) -> list[list[Case]]:
    """The stages that a command line names; `batches` and `profiled` where a case says none.

    Raises:
        `ValueError`: a case is named twice, or is not NAME:SIZE.
    """
    stages: list[list[Case]] = [[]]
    for word in words:
        if word == THEN:
            stages.append([])
            continue
        engine, _, rest = word.partition(":")
        size, *said = rest.split(":")
        if not size:
            raise ValueError(f"{word!r} is no case; write NAME:SIZE, NAME:SIZE:BATCHES or NAME:SIZE:BATCHES:PROFILED.")
        chosen = [*said, *(batches, profiled)[len(said) :]]
        stages[-1].append(Case(f"{engine}:{size}", numbers(chosen[0]), numbers(chosen[1])))
    names = [case.name for stage in stages for case in stage]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)}: named more than once. A run measures a case once.")
    return [stage for stage in stages if stage]


def kv_cache_bytes(size: str, batch: int) -> int:
    """What keys and values of so many sequences at full length take, with room to spare."""
    from rollout_models import kv_bytes

    return max(8, batch) * (PROMPT + NEW + 32) * kv_bytes(size) + GIB


@functools.cache
def weights_bytes(case: str) -> int:
    """Of the weights of `NAME:SIZE`, one copy: ours is shared with the trainer's model. Adapters are not counted."""
    from rollout_models import folder

    from qerl_trl.memory.formulas import shape_of

    engine, size = case.split(":")
    shape = shape_of(folder(size))
    if engine in ("ours", "ours-slots"):
        return 2 * shape.dense_parameters + sum(n * k for n, k in shape.linears) * 9 // 16
    return 2 * shape.parameters


def case_gib(case: Case) -> float:
    """Memory of the process of a case, by estimate."""
    steps = LARGER_STEPS_GIB if case.name.split(":")[0] in PLANNED_STEPS else 0
    return (weights_bytes(case.name) + kv_cache_bytes(case.size, max(case.batches))) / GIB + PROCESS_GIB + steps


def fitting(
    stage: list[Case], room: float | None, gib: Callable[[Case], float] = case_gib
) -> tuple[list[Case], dict[str, dict[str, str]]]:
    """The stage with the largest batches left out until its engines fit side by side: of a model, from all of its cases, so that what is
    compared is built alike. And why, by case and number of sequences.

    Args:
        room: GiB; None: nothing is left out.
        gib: what a case takes.

    Raises:
        `ValueError`: it does not fit with the smallest batches either.
    """
    fitted = list(stage)
    left: dict[str, dict[str, str]] = {case.name: {} for case in stage}
    taken = sum(map(gib, fitted))
    while room is not None and taken > room:
        shrinking = [case for case in fitted if len(case.batches) > 1]
        if not shrinking:
            raise ValueError(
                f"{', '.join(case.name for case in stage)} would take {taken:.0f} GiB side by side, and {room:.0f} are usable. Write `{THEN}` "
                "between them."
            )

        def gain(case: Case) -> float:
            return gib(case) - gib(case._replace(batches=case.batches[:-1]))

        most = max(shrinking, key=gain)
        largest = most.batches[-1]
        why = f"the engines of its stage would take {taken:.0f} GiB, and {room:.0f} are usable"
        for i, case in enumerate(fitted):
            if case.size == most.size and case.batches[-1] == largest and len(case.batches) > 1:
                left[case.name][str(largest)] = why
                fitted[i] = case._replace(batches=case.batches[:-1])
        taken = sum(map(gib, fitted))
    return fitted, left


def turns(stage: list[Case]) -> list[tuple[str, int]]:
    """(case, sequences) in the order in which a stage is measured: model by model, batch by batch, beginning with another case each time."""
    order = []
    for size in dict.fromkeys(case.size for case in stage):
        cases = [case for case in stage if case.size == size]
        for i, batch in enumerate(sorted({batch for case in cases for batch in case.batches})):
            first = i % len(cases)
            order += [(case.name, batch) for case in (*cases[first:], *cases[:first]) if batch in case.batches]
    return order
