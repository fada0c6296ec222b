"""The memory plan of a run, for `qerl-trl plan`, the KV cache of a colocated engine and the start banner.

    plan = plan_run(shape_of("Qwen/Qwen2.5-7B"), Workload(completion_length=4096, rollout="colocate"), Gpu.of_gib(24))
    plan.check(); print(plan.table()); plan.kv_bytes, plan.peak

Updates and rollouts alternate, so a process's peak is the larger of the two plus the permanent memory. Only the KV
cache can shrink: it gets the need of all sequences at full length, or the rest. A run is refused only if less than two
sequences fit; the error lists settings under which it would fit.
"""

import dataclasses
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..support.recipes import meant
from . import formulas
from .formulas import ModelBytes, Shape
from .workload import LARGER_STEPS, Workload

if TYPE_CHECKING:
    import torch

GIB = 2**30
_KV_CACHE = "KV cache"
#: shortest completions, in tokens, to propose as a setting
_SHORTEST_COMPLETION = 256
#: share of the GPU left free by kept activations and larger steps, for unplanned use (reward models, fragmentation)
_LEFT_FREE = 0.1


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Memory of one GPU in bytes. `outside`: used, now or soon, outside of torch's allocator (CUDA, kernels, other
    processes). `free`: at present, for a running process."""

    total: int
    outside: int = formulas.CONTEXT_BYTES
    free: int | None = None

    @classmethod
    def of_gib(cls, gib: float) -> "Gpu":
        return cls(round(gib * GIB))

    @classmethod
    def of_machine(cls, gib: float | None = None) -> "Gpu":
        """Take this machine's memory (or `gib`), divided among its processes that train on the CPU."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if gib is None else round(gib * GIB)
        return cls(total // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), formulas.CPU_PROCESS_BYTES)

    @classmethod
    def current(cls, device: "torch.device") -> "Gpu":
        """Read the GPU's present state. torch's unused cache counts as free; half of `CONTEXT_BYTES` is yet to come."""
        import torch

        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device)
        outside = total - free - cached + formulas.CONTEXT_BYTES // 2
        return cls(total, max(formulas.CONTEXT_BYTES, outside), free + cached - torch.cuda.memory_allocated(device))


@dataclasses.dataclass(frozen=True)
class Part:
    """Bytes of one item during an update and during a rollout."""

    name: str
    update: int
    rollout: int


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """A run's memory on its GPU, in bytes.

    `kv_bytes`: KV cache of a colocated engine; `kv_wanted`: enough for all its sequences at full length; `kv_least`:
    minimum to start. `sequences`: number of full length at a time; `most_running`: of any length (None: all).
    `max_model_len`: the engine's; None for the model's own. `changes`: settings under which the run fits.
    """

    work: Workload
    parts: tuple[Part, ...]
    gpu: Gpu | None
    kv_bytes: int
    kv_wanted: int
    kv_least: int
    sequences: int
    max_model_len: int | None
    changes: tuple[str, ...] = ()
    most_running: int | None = None

    @property
    def update(self) -> int:
        return sum(part.update for part in self.parts)

    @property
    def rollout(self) -> int:
        return sum(part.rollout for part in self.parts)

    @property
    def peak(self) -> int:
        return max(self.update, self.rollout)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the GPU, with a KV cache for two sequences of full length (or all, if fewer)."""
        return self.kv_bytes >= self.kv_least and (self.gpu is None or self.peak <= self.gpu.total)

    @property
    def waves(self) -> int:
        """How many times the engine fills up until all sequences are done, each at full length."""
        return -(-self.work.completions // max(1, self.sequences))

    def check(self) -> None:
        """Raise `RuntimeError` if the run does not fit, unless the KV cache's size was set by hand."""
        if self.fits or self.work.kv_limit is not None or self.work.utilization is not None:
            return
        raise RuntimeError(f"{self.table()}\n{self.verdict()}")

    def engine_arguments(self) -> dict[str, Any]:
        """Return memory arguments of `vllm.LLM`: exactly this KV cache; a small share of the GPU, which vLLM only
        compares with the free memory at its start, so other processes do not matter; and no more sequences than
        states, or vLLM would not capture CUDA graphs ("Mamba cache blocks")."""
        assert self.gpu is not None, "planned without a GPU"
        arguments: dict[str, Any] = {
            "kv_cache_memory_bytes": self.kv_bytes, "gpu_memory_utilization": 0.01,
            "max_num_batched_tokens": self.work.step_tokens,
        }  # fmt: skip
        if self.most_running is not None and self.most_running < self.work.completions:
            arguments["max_num_seqs"] = max(1, self.most_running)
        return arguments

    def summary(self) -> str:
        """Describe the peak and the engine's KV cache in one line."""
        work, when = self.work, "an update" if self.update >= self.rollout else "a rollout"
        of = f" of {self.gpu.total / GIB:.1f}" if self.gpu else ""
        text = f"planned peak {self.peak / GIB:.1f}{of} GiB, in {when}"
        if not work.colocated:
            return text
        text += f"; KV cache {self.kv_bytes / GIB:.1f} GiB{', freed in updates' if work.sleep else ''}"
        if not self.sequences:
            return f"{text}: not one sequence of {work.length} tokens at a time"
        waves = "1 wave" if self.waves == 1 else f"{self.waves} waves"
        return (
            f"{text}: {self.sequences} sequences of {work.length} tokens at a time, {work.completions} completions run "
            f"in {waves}"
        )

    def table(self) -> str:
        """Return a table of the parts, in GiB, in an update and in a rollout."""
        width = max(len(part.name) for part in self.parts)
        rows = [("memory, GiB" if self.work.cpu else "GPU memory, GiB", "update", "rollout")]
        parts = [part for part in self.parts if part.update or part.rollout]
        for part in (*parts, Part("sum", self.update, self.rollout)):
            rows.append((part.name, f"{part.update / GIB:.2f}", f"{part.rollout / GIB:.2f}"))
        lines = [f"{name:<{width}}{update:>9}{rollout:>9}" for name, update, rollout in rows]
        return "\n".join([*lines, self.summary()])

    def verdict(self) -> str:
        """Return a sentence: whether the run fits, and the settings to change."""
        if self.gpu is None:
            return "No GPU was named, so nothing limits this run."
        size = f"{self.gpu.total / GIB:.1f} GiB"
        if self.fits:
            return f"It fits into {size}."
        least = ", not even with a KV cache for two sequences" if self.work.colocated else ""
        text = f"It does not fit into {size}{least}."
        if self.changes:
            return f"{text} It fits with {' and '.join(self.changes)}."
        larger = "a machine with more memory" if self.work.cpu else "a larger GPU"
        return f"{text} No setting was found that helps: use {larger}, a smaller model, or shorter prompts."


def plan_run(
    shape: Shape,
    work: Workload,
    gpu: Gpu | None = None,
    model: ModelBytes | None = None,
    max_model_len: int | None = None,
) -> MemoryPlan:
    """Plan one process's GPU: add up the parts, leave the KV cache the rest, and if too little, try other settings.

    Args:
        gpu: None for no limit.
        model: counted bytes of a model in memory; None to predict them.
        max_model_len: the engine's, if above the workload's length; vLLM needs a KV cache for one such sequence.
    """
    if not shape.packs:
        work = dataclasses.replace(work, packed=False)
    plan = _add_up(shape, work, gpu, model, max_model_len)
    if work.gradient_checkpointing is None and gpu is not None and plan.fits:
        plan = _keeping_activations(shape, plan, gpu, model)
    if gpu is not None and work.colocated and plan.fits and plan.waves == 1:
        plan = _in_larger_steps(shape, plan, gpu, model)
    if gpu is None or plan.fits:
        return plan
    for settings, changed in _alternatives(work):
        if _add_up(shape, changed, gpu, model, max_model_len).fits:
            return dataclasses.replace(plan, changes=settings)
    return plan


def _keeping_activations(shape: Shape, plan: MemoryPlan, gpu: Gpu, model: ModelBytes | None) -> MemoryPlan:
    """Let as many layers keep activations as fit next to the same KV cache and an unused `_LEFT_FREE`."""
    limit = _to_be_used(shape, plan, gpu, model)
    for kept in range(shape.layers, 0, -1):
        work = dataclasses.replace(plan.work, kept_layers=kept)
        other = _add_up(shape, work, gpu, model, plan.max_model_len)
        if other.update <= limit and other.kv_bytes >= plan.kv_bytes:
            return other
    return plan


def _in_larger_steps(shape: Shape, plan: MemoryPlan, gpu: Gpu, model: ModelBytes | None) -> MemoryPlan:
    """Use the largest engine steps that its prompts fill, next to the same KV cache and an unused `_LEFT_FREE`."""
    work = plan.work
    if work.batched_tokens is not None or work.utilization is not None:
        return plan
    limit, prompts = _to_be_used(shape, plan, gpu, model), work.completions * work.prompt_length
    for tokens in LARGER_STEPS:
        if prompts > tokens // 2:
            other = _add_up(shape, dataclasses.replace(work, batched_tokens=tokens), gpu, model, plan.max_model_len)
            if other.rollout <= limit and other.kv_bytes >= plan.kv_bytes:
                return other
    return plan


def _to_be_used(shape: Shape, plan: MemoryPlan, gpu: Gpu, model: ModelBytes | None) -> float:
    """Return the bytes of the GPU available for optional use."""
    counted = model or formulas.predicted_bytes(shape, plan.work)
    unplanned = 0  # this process's memory without the model
    if gpu.free is not None:
        unplanned = max(0, gpu.total - gpu.outside - gpu.free - counted.base - counted.trained)
    return gpu.total * (1 - _LEFT_FREE) - unplanned


def _add_up(shape: Shape, work: Workload, gpu: Gpu | None, model: ModelBytes | None, max_len: int | None) -> MemoryPlan:
    model = model or formulas.predicted_bytes(shape, work)
    if work.sharded:
        model = formulas.sharded_bytes(shape, work, model)
    parts, of_engine = _parts(shape, work, gpu, model)
    if not work.colocated:
        return MemoryPlan(work, tuple(parts), gpu, 0, 0, 0, work.completions, max_len)
    wanted = kv = formulas.engine_kv_bytes(shape, work, work.completions)
    least = formulas.engine_kv_bytes(shape, work, min(2, work.completions))
    if max_len is not None:
        longest = dataclasses.replace(work, prompt_length=max(0, max_len - work.completion_length))
        least = max(least, formulas.engine_kv_bytes(shape, longest, 1))
    what_is_left = False
    if work.kv_limit is not None:
        kv = work.kv_limit
    elif work.utilization is not None and gpu is not None:  # as in vLLM
        kv = max(0, round(work.utilization * gpu.total) - of_engine)
    elif gpu is not None:
        taken = max(sum(part.rollout for part in parts), 0 if work.sleep else sum(part.update for part in parts))
        kv = max(0, min(max(wanted, least), gpu.total - taken))
        what_is_left = least < kv < wanted
    one_block = formulas.engine_kv_bytes(shape, work, 0)
    one = formulas.engine_kv_bytes(shape, work, 1) - one_block
    sequences = min(work.completions, max(0, kv - one_block) // one)
    if what_is_left:
        # a remainder below one sequence is useless, and each new size makes vLLM 0.25 compile its graphs again
        kv = max(least, one_block + sequences * one)
    parts.append(Part(_KV_CACHE, 0 if work.sleep else kv, kv))
    running = None
    if shape.delta_nets is not None:  # a sequence has states, and a block of keys and values
        running = (kv // one_block - 1) // (shape.delta_nets.state_blocks(shape.attending) + 1)
    return MemoryPlan(work, tuple(parts), gpu, kv, wanted, least, sequences, max_len, most_running=running)


def _parts(shape: Shape, work: Workload, gpu: Gpu | None, model: ModelBytes) -> tuple[list[Part], int]:
    """Return all parts except the KV cache, and the engine's bytes among them."""
    gradients = model.trained * (2 if work.processes > 1 else 1)  # DDP's buckets are a second copy
    # a rollout in the middle of an update
    between = work.batch * work.accumulation > work.completions // work.tensor_parallel
    slack = 1 + (formulas.CPU_SLACK if work.cpu else formulas.ALLOCATOR_SLACK)
    optimizer = formulas.optimizer_bytes(work.optimizer, model)
    copy = fixed = transient = 0
    if work.colocated:
        copy, fixed = formulas.engine_copy_bytes(shape, work), formulas.engine_fixed_bytes(shape, work)
        transient = formulas.engine_rollout_bytes(shape, work)
    elif work.rollout == "transformers":
        transient = formulas.transformers_rollout_bytes(shape, work)
    activations = slack * formulas.update_bytes(shape, work)
    if not work.cpu:
        activations += formulas.KEPT_SLACK * formulas.kept_bytes(shape, work)
    name = f"activations of {f'{work.tokens} packed' if work.packed else f'{work.batch} x {work.length}'} tokens"
    if work.kept_layers:
        name += f", {work.kept_layers} of {shape.layers} layers not recomputed"
    if shape.delta_nets is not None and not work.delta_kernels:
        name += ", without flash-linear-attention"
    trained = "trained weights" if work.base_format == "full" else f"adapter, rank {work.lora_rank}"
    context = formulas.CPU_PROCESS_BYTES if work.cpu else formulas.CONTEXT_BYTES
    context += formulas.NCCL_BYTES if work.processes > 1 else 0  # perhaps yet to come
    context += formulas.DEEPSPEED_BYTES if work.deepspeed else 0
    outside = max(gpu.outside, context) if gpu else context
    rollout = round(slack * transient)
    parts = [
        Part("Python and its libraries" if work.cpu else "CUDA and whatever else is on the GPU", outside, outside),
        Part(f"frozen base, {work.base_format}", model.base, model.base),
        Part(trained, model.trained, model.trained),
        Part(f"optimizer, {work.optimizer}", optimizer, optimizer),
        Part("gradients", gradients, gradients if between else gradients - model.trained),
        Part("the engine's copy of the weights", 0 if work.sleep else copy, copy),
        Part("the engine's adapter, CUDA graphs and buffers", fixed, fixed),
        Part(name, round(activations), 0),
        Part("activations of a rollout" + f", steps of {work.step_tokens} tokens" * work.colocated, 0, rollout),
    ]
    return parts, copy + fixed + rollout


def _alternatives(work: Workload) -> Iterator[tuple[tuple[str, ...], Workload]]:
    """Yield (settings, workload with them), the cheapest first: each setting alone, then added up."""
    sleeping = [{"sleep": True}] if work.colocated and not work.sleep else []
    batches = [
        {"batch": batch, "accumulation": work.accumulation * (work.batch // batch)}
        for batch in range(work.batch - 1, 0, -1)
        if work.batch % batch == 0
    ]
    recomputed = work.gradient_checkpointing is True or (work.gradient_checkpointing is None and not work.kept_layers)
    checkpointing = [] if recomputed else [{"gradient_checkpointing": True, "kept_layers": 0}]
    small = work.sharded or "8bit" in work.optimizer or "4bit" in work.optimizer
    optimizers = [] if small else [{"optimizer": "adamw_8bit"}]
    halves = (work.completion_length >> i for i in range(1, work.completion_length.bit_length()))
    completions = [{"completion_length": length} for length in halves if length >= _SHORTEST_COMPLETION]
    groups: list[list[dict[str, Any]]] = [sleeping, batches, checkpointing, optimizers, completions]
    yield from ((_settings(change), dataclasses.replace(work, **change)) for group in groups[:4] for change in group)
    piled: dict[str, Any] = {}
    for group in groups:
        for change in group:
            yield _settings(piled | change), dataclasses.replace(work, **(piled | change))
        piled |= group[-1] if group else {}


def relief(plan: MemoryPlan, shape: Shape, model: ModelBytes, part: str, missing: int) -> tuple[str, ...]:
    """Find the cheapest settings that save `missing` bytes in `part` ("update" or "rollout") of a run planned to fit.
    The KV cache keeps its size, so freed memory goes to the missing bytes."""

    def taken(made: MemoryPlan) -> int:
        cache = 0 if part == "update" and made.work.sleep else plan.kv_bytes
        return (
            sum(row.update if part == "update" else row.rollout for row in made.parts if row.name != _KV_CACHE) + cache
        )

    for settings, changed in _alternatives(plan.work):
        if taken(plan) - taken(_add_up(shape, changed, plan.gpu, model, plan.max_model_len)) >= missing:
            return settings
    return ()


def _settings(change: dict[str, Any]) -> tuple[str, ...]:
    """Translate a change of the workload into settings of a configuration."""
    names = {
        "sleep": "vllm_enable_sleep_mode: true",
        "batch": f"per_device_train_batch_size: {change.get('batch')} "
        f"(gradient_accumulation_steps: {change.get('accumulation')})",
        "gradient_checkpointing": "gradient_checkpointing: true",
        "optimizer": f"optim: {change.get('optimizer')}",
        "completion_length": f"max_completion_length: {change.get('completion_length')}",
    }
    return tuple(text for name, text in names.items() if name in change)


#: GB by a card's trade name; from Ampere on, required by the kernels and bf16
CARDS = {
    "RTX 3060": 12, "RTX 4080": 16, "RTX 5080": 16, "RTX 3090": 24, "RTX 4090": 24, "A10": 24, "L4": 24, "RTX 5090": 32,
    "A100 40GB": 40, "A6000": 48, "L40S": 48, "A100": 80, "H100": 80, "RTX PRO 6000": 96, "H200": 141, "B200": 180,
}  # fmt: skip
#: cards without a row in the documentation's tables
OTHERS = {
    "RTX 4060": 8, "RTX 5060": 8, "RTX 4070": 12, "RTX 5070": 12, "RTX 4060 Ti": 8, "RTX 5070 Ti": 16, "A10G": 24,
    "A30": 24, "A40": 48, "L40": 48, "RTX 6000 Ada": 48, "H100 NVL": 94, "GH200": 96, "B300": 288,
}  # fmt: skip
_SIZE = r"\b(\d+) ?gi?b\b"
_NO_MATTER = r"\b(nvidia|geforce|tesla|generation|laptop|gpu|pcie|sxm\d?|hbm\d?e?)\b|\brtx(?=\W|\d)"


def gpu_of_card(name: str) -> Gpu:
    """Look up a card's memory by its name in shops, clouds or nvidia-smi ("NVIDIA H100 80GB HBM3", "a10g", "4090").

    A GB is 10^9 bytes, about a binary one minus the driver's share.

    Raises:
        `ValueError`: unknown card.
    """
    known = {_plain(card): size for card, size in (CARDS | OTHERS).items()}
    plain, said = _plain(name), re.search(_SIZE, name.lower())
    if plain in known:
        return Gpu((int(said[1]) if said else known[plain]) * 10**9)
    raise ValueError(
        f"--card {name!r} is older than Ampere (compute capability 8.0, for bf16), or is none of "
        f"{', '.join(CARDS | OTHERS)}.{meant(name, CARDS | OTHERS)} Give --gpu-gib instead."
    )


def _plain(name: str) -> str:
    """Reduce a card's name: without its memory size and words common to all cards."""
    return "".join(re.findall(r"[a-z0-9]+", re.sub(rf"{_SIZE}|{_NO_MATTER}", " ", name.lower())))
