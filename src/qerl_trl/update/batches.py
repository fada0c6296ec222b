"""Which completions share a micro-batch, and which micro-batches share a pass over the model.

**Dealing.** TRL shuffles a rollout and cuts it into micro-batches of equal numbers of completions. Their gradients are added, so within one
optimizer step the order is free. [`deal`] brings completions of one prompt together (the prompt is then computed once, row.py) and evens out the
tokens of the micro-batches, since the largest sets the peak of memory; the largest comes first, on every process, so that processes that
wait for each other wait little. Which completions belong to which optimizer step stays TRL's shuffle. No random number is drawn.

**Joining.** Passes of a few tokens cost much: each decodes the weights, casts the adapter and launches every kernel. With [`TokenBudget`] the
first micro-batch of a group computes the log-probabilities of all of them in one packed row, of no more tokens than the memory plan counts for
one micro-batch. Each micro-batch's loss is TRL's own, in its own `training_step`, with its own normaliser, metrics and gradient accumulation: it
takes its lines of the joint log-probabilities, cut off from the model. Its backward leaves a gradient there, and the backward of the group's last
micro-batch takes all of them through the model at once. Gradients are the sums that they were, added in another order. Not with DeepSpeed,
whose backward wants every micro-batch for itself. With several processes the last micro-batch of an optimizer step, which exchanges gradients,
stays alone; and all processes form the same groups, of the largest that any of them has.

**Longest pass.** torch's allocator keeps freed blocks and gives them to requests that are no larger. Rows have another length each time, so the
blocks of all shorter rows are too small for a longer one, which takes the memory of its largest tensors anew: ragged completions of 7B reserved
half as much again as they allocated (`ours-7b-ragged` in benchmarks/results/step_h200.json), more than the plan has for pieces. A
shorter row takes the blocks of the longest. So [`LongestPass`] empties the cache before each new longest row, about ln(n) times in n passes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import row

#: log-probabilities (B, L), entropies (B, L) or None, load balance
Result = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
#: the result of any lines of `input_ids` and `attention_mask`, (B, W)
Compute = Callable[[torch.Tensor, torch.Tensor], Result]


def order_is_free(of: Any) -> bool:
    """Whether a loss is the same however the completions of a step are dealt: not where a micro-batch is its own measure, by its count of
    tokens (`"bnpo"`), by a quantile of its entropies, by their mean, or by the load of experts.

    Args:
        of: a trainer, or its settings. RLOO has only some of the fields, and settings do not know of experts.
    """
    said = vars(of)
    own_entropies = said.get("top_entropy_quantile", 1.0) < 1.0 or said.get("entropy_coef", 0.0) != 0.0
    own_entropies = own_entropies or said.get("use_adaptive_entropy", False)
    return not (said.get("loss_type") == "bnpo" or own_entropies or said.get("aux_loss_enabled", False))


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


# --- several micro-batches in one pass --------------------------------------------------------------------------------------------


class _Last(torch.autograd.Function):
    """The lines of a group's last micro-batch; their gradient brings along what the earlier ones have left at theirs."""

    @staticmethod
    def forward(ctx: Any, group: "_Group", *joint: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(values[group.earlier :].clone() for values in joint)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, ctx.group = ctx.group, None
        group.done = True
        before = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in group.leaves]
        return None, *(torch.cat(parts) for parts in zip(before, gradients, strict=True))


@dataclass
class _Group:
    """Micro-batches `first` to `last` of a rollout, and what was computed for them: log-probabilities and entropies of all their lines."""

    first: int
    last: int
    ids: torch.Tensor
    joint: tuple[torch.Tensor, torch.Tensor | None]
    #: lines of all micro-batches but the last
    earlier: int
    leaves: list[torch.Tensor]
    line: int = 0
    done: bool = False


class TokenBudget:
    """Which micro-batches of a trainer share a pass, and their joint log-probabilities."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        #: (first, last) micro-batch of the group, per micro-batch of the rollout
        self._groups: list[tuple[int, int]] = []
        self._open: _Group | None = None

    def plan(self, batches: list[dict[str, Any]], *, share: bool, free: bool) -> list[dict[str, Any]]:
        """Form the groups of a rollout.

        Args:
            batches: its micro-batches, as TRL buffers them.
            share: whether equal prompts of a row are computed once.
            free: whether the micro-batches of an optimizer step may be put in another order. One process then puts those of one prompt together.

        Returns:
            The micro-batches, perhaps in another order within each optimizer step.
        """
        trainer = self._trainer
        self._groups = [(index, index) for index in range(len(batches))]
        steps = optimizer_steps(batches, trainer.args.gradient_accumulation_steps)
        limits = self._limits()
        if limits is None or len(batches) < 2 or not steps:
            return batches
        sequences = [_sequences(batch) for batch in batches]
        one_process = trainer.accelerator.num_processes == 1
        if one_process and free:
            order = [index for step in steps for index in _by_prompt(sequences, step.start, step.stop)]
            batches, sequences = [batches[i] for i in order], [sequences[i] for i in order]
        sizes: list[list[int]] = []
        if not one_process:  # of each micro-batch, the largest tokens and keys that any process has there
            own = torch.tensor([_size(lines, share) for lines in sequences], device=trainer.accelerator.device)
            sizes = trainer.accelerator.gather(own[None]).amax(0).tolist()

        def size(first: int, last: int) -> tuple[int, int]:
            if one_process:
                return _size([line for lines in sequences[first : last + 1] for line in lines], share)
            tokens, keys = zip(*sizes[first : last + 1], strict=True)
            return sum(tokens), sum(keys)

        for step in steps:
            # with several processes the one in which gradients are exchanged stays alone
            first, end = step.start, step.stop - (0 if one_process else 1)
            while first < end:
                last = first
                while last + 1 < end and all(a <= b for a, b in zip(size(first, last + 1), limits, strict=True)):
                    last += 1
                self._groups[first : last + 1] = [(first, last)] * (last + 1 - first)
                first = last + 1
        return batches

    def _limits(self) -> tuple[int, int] | None:
        """Tokens and keys of one pass, as the memory plan counts them for one micro-batch; `None` where none is to be shared."""
        trainer, plan = self._trainer, self._trainer.memory_plan
        if plan is None or trainer.is_deepspeed_enabled:
            return None
        work = replace(plan.work, packed=True)
        return work.tokens, work.keys

    def logps(self, compute: Compute, input_ids: torch.Tensor, width: int) -> Result | None:
        """Of the micro-batch of this step, from its group's pass; `None` where it has a pass of its own.

        Args:
            input_ids: (B, W) of this micro-batch. width: columns of its completions.
        """
        trainer = self._trainer
        index = trainer._step % trainer.args.steps_per_generation
        first, last = self._groups[index] if index < len(self._groups) else (index, index)
        if self._open is None:
            if first == last or index != first or self._is_short_step():
                return None
            if not self._begin(compute, first, last, input_ids, width):
                return None
        group = self._open
        assert group is not None
        here = slice(group.line, group.line + len(input_ids))
        if (group.first, group.last) != (first, last) or not torch.equal(group.ids[here], input_ids):
            return None  # of other tokens than were sampled: `stepped` sees that the group is not done
        group.line = here.stop
        if index == last:
            return self._last(group)
        leaves = iter(group.leaves)
        logps, entropies = (
            values if values is None else (next(leaves) if values.requires_grad else values)[here]
            for values in group.joint
        )
        assert logps is not None
        return logps, entropies, None

    def _is_short_step(self) -> bool:
        """Whether this optimizer step, the last of an epoch, has fewer micro-batches and could end within a group."""
        return self._trainer.current_gradient_accumulation_steps != self._trainer.args.gradient_accumulation_steps

    def _begin(self, compute: Compute, first: int, last: int, input_ids: torch.Tensor, width: int) -> bool:
        batches = self._trainer._buffered_inputs[first : last + 1]
        ids = torch.cat([_joined(batch, "ids") for batch in batches])
        if batches[0]["completion_ids"].shape[1] != width or not torch.equal(ids[: len(input_ids)], input_ids):
            return False
        logps, entropies, _ = compute(ids, torch.cat([_joined(batch, "mask") for batch in batches]))
        earlier = len(ids) - len(batches[-1]["prompt_ids"])
        graded = [values for values in (logps, entropies) if values is not None and values.requires_grad]
        leaves = [values[:earlier].detach().requires_grad_() for values in graded]
        self._open = _Group(first, last, ids, (logps, entropies), earlier, leaves)
        return True

    def _last(self, group: _Group) -> Result:
        taken = iter(_Last.apply(group, *(v for v in group.joint if v is not None and v.requires_grad)))
        logps, entropies = (
            values if values is None else next(taken) if values.requires_grad else values[group.earlier :]
            for values in group.joint
        )
        assert logps is not None
        return logps, entropies, None

    def stepped(self) -> None:
        """After each `training_step`.

        Raises:
            `RuntimeError`: an optimizer step would miss the gradients of a group.
        """
        group = self._open
        if group is None:
            return
        if group.done:
            self._open = None
        elif group.line == len(group.ids) or self._trainer.accelerator.sync_gradients:
            raise RuntimeError(
                f"Micro-batches {group.first} to {group.last} are computed in one pass, and their losses are not of its log-probabilities. With such a "
                "loss set padding_free=False."
            )


def _joined(batch: dict[str, Any], what: str) -> torch.Tensor:
    return torch.cat([batch[f"prompt_{what}"], batch[f"completion_{what}"]], dim=1)


def _sequences(batch: dict[str, Any]) -> list[row.Sequence]:
    return row.sequences(_joined(batch, "ids"), _joined(batch, "mask"), batch["completion_ids"].shape[1])


def _by_prompt(sequences: list[list[row.Sequence]], start: int, end: int) -> list[int]:
    """Micro-batches `start` to `end`, those whose first prompt is equal after each other, otherwise in their order."""
    places: dict[bytes, int] = {}
    for index in range(start, end):
        places.setdefault(sequences[index][0].key, index)
    return sorted(range(start, end), key=lambda index: (places[sequences[index][0].key], index))


def _size(sequences: list[row.Sequence], share: bool) -> tuple[int, int]:
    """Tokens to compute, and keys to attend to, of one row of these."""
    seen: set[bytes] = set()
    tokens = keys = 0
    for sequence in sequences:
        tokens += sequence.further if share and sequence.key in seen else sequence.tokens
        keys += sequence.tokens
        seen.add(sequence.key)
    return row.padded(tokens), row.padded(keys)


class LongestPass:
    """The most tokens that went through a model forward and backward at a time."""

    def __init__(self) -> None:
        self.tokens = 0

    def begin(self, tokens: int, device: torch.device) -> None:
        """Before a forward pass of so many tokens, with or without gradients: nothing is kept of one without."""
        if not torch.is_grad_enabled() or tokens <= self.tokens:
            return
        self.tokens = tokens
        if device.type == "cuda":
            torch.cuda.empty_cache()
