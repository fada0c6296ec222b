"""Which completions of one optimizer step are computed in the same micro-batch, so that the least is computed.

TRL shuffles a rollout and cuts it into micro-batches of equal numbers of completions. Their gradients are added, so within one optimizer
step the order is free. Here completions of one prompt come together (the prompt is then computed once, row.py) and the tokens of the
micro-batches are evened out, since the largest sets the peak of memory; the largest comes first, on every process, so that processes that
wait for each other wait little. Which completions belong to which optimizer step stays TRL's shuffle. No random number is drawn.
"""

from typing import Any

import torch


def order_is_free(trainer: Any) -> bool:
    """Of a trainer or of its settings: whether a loss is the same however the completions of a step are dealt: not where a micro-batch is its own
    measure, by its count of tokens (`"bnpo"`), by a quantile of its entropies, by their mean, or by the load of experts, which only a trainer knows of."""
    own_count = getattr(trainer, "loss_type", None) == "bnpo"
    bonus = getattr(trainer, "entropy_coef", 0.0) != 0.0 or getattr(trainer, "use_adaptive_entropy", False)
    own_entropies = getattr(trainer, "top_entropy_quantile", 1.0) < 1.0 or bonus
    return not (own_count or own_entropies or getattr(trainer, "aux_loss_enabled", False))


def optimizer_steps(batches: list[dict[str, Any]], per_step: int) -> list[slice]:
    """The micro-batches of each optimizer step of a rollout, `per_step` of them; [] where each stays as TRL made it: with another rhythm than
    that of the rollouts, or with pictures."""
    count = len(batches)
    another_rhythm = count % per_step and per_step % count
    if another_rhythm or any(key in batches[0] for key in ("pixel_values", "num_images")):
        return []
    size = min(per_step, count)
    return [slice(start, start + size) for start in range(0, count, size)]


def deal(batches: list[dict[str, Any]], per_step: int) -> list[dict[str, Any]]:
    """The micro-batches of a rollout, dealt again within each optimizer step.

    Args:
        batches: TRL's, each a dictionary of tensors and lists with one entry per completion, or one value for all.
        per_step: micro-batches per optimizer step. Where [`optimizer_steps`] has none, nothing changes.
    """
    steps = optimizer_steps(batches, per_step)
    return [batch for step in steps for batch in _dealt(batches[step])] if steps else batches


def _dealt(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    size = len(batches[0]["prompt_ids"])
    if len(batches) < 2:
        return batches
    ids = torch.cat([batch["prompt_ids"] for batch in batches]).cpu()
    mask = torch.cat([batch["prompt_mask"] for batch in batches]).cpu()
    lengths = torch.cat([batch["completion_mask"] for batch in batches]).sum(1).tolist()
    prompts = [tuple(line[seen.bool()].tolist()) for line, seen in zip(ids, mask, strict=True)]
    order = assign(prompts, lengths, size)
    joined: dict[str, Any] = {}
    for key, first in batches[0].items():
        parts = [batch[key] for batch in batches]
        if isinstance(first, torch.Tensor) and first.ndim > 0:
            joined[key] = torch.cat(parts)
        elif isinstance(first, list):
            joined[key] = [value for part in parts for value in part]
        else:
            joined[key] = first

    def taken(value: Any, lines: list[int]) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim > 0:
            return value[torch.tensor(lines, device=value.device)]
        return [value[line] for line in lines] if isinstance(value, list) else value

    return [{key: taken(value, lines) for key, value in joined.items()} for lines in order]


def assign(prompts: list[tuple[int, ...]], lengths: list[int], size: int) -> list[list[int]]:
    """Completions to micro-batches of `size` each.

    Args:
        prompts, lengths: of each completion, the prompt's tokens and how many tokens follow.

    Returns:
        Lines of each micro-batch, the one with the most tokens to compute first. Greedy: the largest unfinished group goes to the
        micro-batch with the fewest tokens that has places for all of it, or is cut where none has.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for line, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(line)
    units = [part for lines in groups.values() for part in _parts(lines, lengths, size)]

    def cost(lines: list[int]) -> int:
        return len(prompts[lines[0]]) + sum(lengths[line] for line in lines)

    chosen: list[list[int]] = [[] for _ in range(len(prompts) // size)]
    loads = [0] * len(chosen)
    units.sort(key=lambda lines: (-cost(lines), lines[0]))
    while units:
        unit = units.pop(0)
        free = [size - len(lines) for lines in chosen]
        fitting = [place for place, count in enumerate(free) if count >= len(unit)]
        if fitting:
            place = min(fitting, key=lambda place: (loads[place], place))
        else:
            place = max(range(len(chosen)), key=lambda place: (free[place], -loads[place]))
            unit, rest = unit[: free[place]], unit[free[place] :]
            units.append(rest)
            units.sort(key=lambda lines: (-cost(lines), lines[0]))
        chosen[place] += unit
        loads[place] += cost(unit)
    return [chosen[place] for place in sorted(range(len(chosen)), key=lambda place: (-loads[place], place))]


def _parts(lines: list[int], lengths: list[int], size: int) -> list[list[int]]:
    """A group that is larger than a micro-batch, cut into as few parts as fit, of about equal tokens."""
    count = -(-len(lines) // size)
    parts: list[list[int]] = [[] for _ in range(count)]
    for line in sorted(lines, key=lambda line: (-lengths[line], line)):
        open_ones = [part for part in parts if len(part) < size]
        min(open_ones, key=lambda part: sum(lengths[x] for x in part)).append(line)
    return parts
