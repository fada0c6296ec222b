"""Assign completions to micro-batches, and micro-batches to passes over the model.

**Dealing.** TRL shuffles a rollout and cuts it into micro-batches of equal numbers of completions. Their gradients are
added, so their order within an optimizer step is free. [`deal`] groups completions of one prompt (then computed once,
row.py) and balances the tokens of the micro-batches, as the largest sets the peak of memory. The largest comes first on
every process, so processes wait little for each other. Optimizer steps keep TRL's shuffle; no random number is drawn.

**Joining.** Short passes are expensive: each decodes the weights, casts the adapter and launches every kernel. With
[`TokenBudget`] the first micro-batch of a group computes the log-probabilities of all of them in one packed row, within
the memory plan's tokens of one micro-batch. Each micro-batch has TRL's own loss, `training_step`, normaliser, metrics
and gradient accumulation, on its lines of the joint log-probabilities, detached from the model. Its backward leaves a
gradient at these lines; the backward of the group's last micro-batch takes all gradients through the model at once.
The sums are the same, in another order. DeepSpeed needs a backward per micro-batch, so it is excluded. With several
processes an optimizer step's last micro-batch, which exchanges gradients, has its own pass; all form the same groups.

**Longest pass.** torch's allocator reuses freed blocks only for requests of at most their size. Rows differ in length,
so a longer row cannot use the blocks of shorter ones and allocates again: ragged completions of 7B reserved half as
much again as they allocated (`ours-7b-ragged` in benchmarks/results/step_h200.json), beyond the plan's slack. So
[`LongestPass`] empties the cache before each new longest row, about ln(n) times in n passes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import padded, row
from .one_pass import TOP_IDS

#: log-probabilities (B, L), entropies (B, L) or None, load-balancing loss or None
Result = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
#: computes a `Result` from lines of `input_ids` and `attention_mask`, (B, W)
Compute = Callable[..., Result]


def order_is_free(of: Any) -> bool:
    """Whether a loss is independent of the completions' order within a step: not if a micro-batch is normalised by its
    own token count (`"bnpo"`), entropy quantile, mean entropy, or load of experts.

    Args:
        of: a trainer, or its settings. RLOO has only some of the fields; settings do not show experts.
    """
    said = vars(of)
    own_entropies = said.get("top_entropy_quantile", 1.0) < 1.0 or said.get("entropy_coef", 0.0) != 0.0
    own_entropies = own_entropies or said.get("use_adaptive_entropy", False)
    return not (said.get("loss_type") == "bnpo" or own_entropies or said.get("aux_loss_enabled", False))


def optimizer_steps(batches: list[dict[str, Any]], per_step: int) -> list[slice]:
    """Return one slice of `per_step` micro-batches for each optimizer step of a rollout; [] to keep TRL's order: if
    steps and rollouts do not align, or with pictures."""
    count = len(batches)
    another_rhythm = count % per_step and per_step % count
    if another_rhythm or any(key in batches[0] for key in ("pixel_values", "num_images")):
        return []
    size = min(per_step, count)
    return [slice(start, start + size) for start in range(0, count, size)]


def deal(batches: list[dict[str, Any]], per_step: int) -> list[dict[str, Any]]:
    """Redistribute a rollout's completions over the micro-batches of each optimizer step.

    Args:
        batches: from TRL, each a dictionary of tensors and lists with one entry per completion, or one value for all.
        per_step: micro-batches per optimizer step. Unchanged if [`optimizer_steps`] is empty.
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
    """Assign completions to micro-batches of `size` each.

    Args:
        prompts, lengths: tokens of each completion's prompt, and number of completion tokens.

    Returns:
        Lines of each micro-batch, the one with the most tokens to compute first. Greedy: the largest remaining group
        goes to the least loaded micro-batch with room for all of it; without any such room, the group is cut.
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
    """Split a group larger than a micro-batch into as few parts as possible, of about equal tokens."""
    count = -(-len(lines) // size)
    parts: list[list[int]] = [[] for _ in range(count)]
    for line in sorted(lines, key=lambda line: (-lengths[line], line)):
        open_ones = [part for part in parts if len(part) < size]
        min(open_ones, key=lambda part: sum(lengths[x] for x in part)).append(line)
    return parts


class _Last(torch.autograd.Function):
    """Return the lines of a group's last micro-batch; its backward adds the gradients of the earlier micro-batches."""

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
    """Micro-batches `first` to `last` of a rollout, and the log-probabilities and entropies of all their lines."""

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
    """Forms groups of micro-batches that share a pass, and computes their joint log-probabilities."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        #: (first, last) micro-batch of the group, per micro-batch of the rollout
        self._groups: list[tuple[int, int]] = []
        self._open: _Group | None = None

    def plan(self, batches: list[dict[str, Any]], *, share: bool, free: bool) -> list[dict[str, Any]]:
        """Form the groups of a rollout.

        Args:
            batches: its micro-batches, as TRL buffers them.
            share: compute equal prompts of a row once.
            free: the order within an optimizer step may change; a single process then groups micro-batches by prompt.

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
        if not one_process:  # the largest tokens and keys of each micro-batch over all processes
            own = torch.tensor([_size(lines, share) for lines in sequences], device=trainer.accelerator.device)
            sizes = trainer.accelerator.gather(own[None]).amax(0).tolist()

        def size(first: int, last: int) -> tuple[int, int]:
            if one_process:
                return _size([line for lines in sequences[first : last + 1] for line in lines], share)
            tokens, keys = zip(*sizes[first : last + 1], strict=True)
            return sum(tokens), sum(keys)

        for step in steps:
            # with several processes, the micro-batch with the gradient exchange stays alone
            first, end = step.start, step.stop - (0 if one_process else 1)
            while first < end:
                last = first
                while last + 1 < end and all(a <= b for a, b in zip(size(first, last + 1), limits, strict=True)):
                    last += 1
                self._groups[first : last + 1] = [(first, last)] * (last + 1 - first)
                first = last + 1
        return batches

    def _limits(self) -> tuple[int, int] | None:
        """Return the most tokens and keys of one pass, planned for one micro-batch; `None` to share no pass."""
        trainer, plan = self._trainer, self._trainer.memory_plan
        if plan is None or trainer.is_deepspeed_enabled:
            return None
        work = replace(plan.work, packed=True)
        return work.tokens, work.keys

    def logps(self, compute: Compute, input_ids: torch.Tensor, width: int) -> Result | None:
        """Return the log-probabilities of this step's micro-batch from its group's pass; `None` without a group.

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
            return None  # other tokens than the sampled ones: `stepped` raises
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
        """Whether this optimizer step has fewer micro-batches (the last of an epoch) and could end within a group."""
        return self._trainer.current_gradient_accumulation_steps != self._trainer.args.gradient_accumulation_steps

    def _begin(self, compute: Compute, first: int, last: int, input_ids: torch.Tensor, width: int) -> bool:
        batches = self._trainer._buffered_inputs[first : last + 1]
        ids = torch.cat([_joined(batch, "ids") for batch in batches])
        if batches[0]["completion_ids"].shape[1] != width or not torch.equal(ids[: len(input_ids)], input_ids):
            return False
        top = {"top_ids": torch.cat([batch[TOP_IDS] for batch in batches])} if TOP_IDS in batches[0] else {}
        logps, entropies, _ = compute(ids, torch.cat([_joined(batch, "mask") for batch in batches]), **top)
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
        """Check the open group; call after each `training_step`.

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
                f"Micro-batches {group.first} to {group.last} are computed in one pass, and a loss did not use its "
                "log-probabilities, so gradients would be lost. With such a loss set padding_free=False."
            )


def _joined(batch: dict[str, Any], what: str) -> torch.Tensor:
    return torch.cat([batch[f"prompt_{what}"], batch[f"completion_{what}"]], dim=1)


def _sequences(batch: dict[str, Any]) -> list[row.Sequence]:
    return row.sequences(_joined(batch, "ids"), _joined(batch, "mask"), batch["completion_ids"].shape[1])


def _by_prompt(sequences: list[list[row.Sequence]], start: int, end: int) -> list[int]:
    """Return the indices `start` to `end` of micro-batches, grouped by first prompt, otherwise in order."""
    places: dict[bytes, int] = {}
    for index in range(start, end):
        places.setdefault(sequences[index][0].key, index)
    return sorted(range(start, end), key=lambda index: (places[sequences[index][0].key], index))


def _size(sequences: list[row.Sequence], share: bool) -> tuple[int, int]:
    """Count the tokens to compute, and the keys to attend to, in one row of these sequences."""
    seen: set[bytes] = set()
    tokens = keys = 0
    for sequence in sequences:
        tokens += sequence.further if share and sequence.key in seen else sequence.tokens
        keys += sequence.tokens
        seen.add(sequence.key)
    return padded(tokens), padded(keys)


@dataclass
class LongestPass:
    """Keeps the most tokens in one forward and backward pass so far, and empties the cache before a longer one."""

    tokens: int = 0

    def begin(self, tokens: int, device: torch.device) -> None:
        """Note a forward pass of `tokens`; call before it. A pass without gradients is ignored."""
        if not torch.is_grad_enabled() or tokens <= self.tokens:
            return
        self.tokens = tokens
        if device.type == "cuda":
            torch.cuda.empty_cache()
