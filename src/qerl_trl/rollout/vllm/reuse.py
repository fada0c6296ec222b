"""Whether vLLM reused attention states from before the last change of weights or noise.

Every request's output says how many tokens of its prompt came out of the prefix cache (`RequestOutput.num_cached_tokens`). What was computed
since the change may: of the requests with one prompt, the first that was scheduled can have reused no more than that prompt shares with
another prompt of the same call, or with what was sampled since.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from vllm import LLM
from vllm.outputs import RequestOutput

from ...processes import gathered
from ..engine import RolloutError


class PrefixReuse:
    """Looks at what comes out of an engine, and remembers it until the next change."""

    def __init__(self) -> None:
        #: prompts with their completions, token ids; `_order`: the same, sorted once, since a task of many turns asks many times between two changes
        self._computed: set[tuple[int, ...]] = set()
        self._order: list[tuple[int, ...]] = []

    def changed(self) -> None:
        """The engine has other weights or other noise now."""
        self._computed.clear()
        self._order.clear()

    def check(self, outputs: Iterable[Any]) -> None:
        """Look at all outputs of one call; those of pooling, of embeddings and of engines without a prefix cache say nothing.

        Raises:
            [`RolloutError`]: a prompt's states are from before the change.
        """
        reused: dict[tuple[int, ...], int] = {}
        #: sequence of this call -> the prompts that it came of, () for an earlier call
        owners: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        for output in outputs:
            if isinstance(output, RequestOutput) and output.prompt_token_ids and output.num_cached_tokens is not None:
                prompt = tuple(output.prompt_token_ids)
                # of several completions (n) vLLM says what the one that ended last has reused, which may be of the first one
                cached = output.num_cached_tokens if len(output.outputs) == 1 else 0
                reused[prompt] = min(reused.get(prompt, len(prompt)), cached)
                for completion in output.outputs:
                    owners.setdefault((*prompt, *completion.token_ids), set()).add(prompt)
        if not reused:
            return
        # not even the first of them all began with nothing
        stale = not self._computed and min(reused.values()) > 0
        for sequence in owners:
            if sequence in self._computed:
                owners[sequence].add(())
            else:
                insort(self._order, sequence)
        self._computed.update(owners)
        for prompt, count in reused.items():
            most = 0 if stale else _shared(prompt, self._order, owners)
            if count > most:
                raise RolloutError(
                    f"vLLM answered from attention states of other weights or other noise: of a prompt of {len(prompt)} tokens it took {count} from "
                    f"its prefix cache, where at most {most} can have been computed since the last update. The cache was not reset after it, or not "
                    "entirely. Restart the engine, or switch the cache off: vllm_engine_kwargs={'enable_prefix_caching': False}."
                )


def _shared(
    prompt: tuple[int, ...], order: Sequence[tuple[int, ...]], owners: Mapping[tuple[int, ...], set[tuple[int, ...]]]
) -> int:
    """Tokens that `prompt` begins with as a sequence of `order` does which is not one of its own: in sorted order, the nearest ones."""
    right = left = bisect_left(order, prompt)
    while right < len(order) and owners.get(order[right]) == {prompt}:
        right += 1
    near = [*order[max(0, left - 1) : left], *order[right : right + 1]]
    return max((_common(prompt, other) for other in near), default=0)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@contextmanager
def drawing_alike(group: "torch.distributed.ProcessGroup | None") -> Iterator[None]:
    """Inside, all processes of `group` draw what its first one draws, and the others go on from where they were afterwards.

    Each shard of an engine samples the whole batch by itself, from the generator of its process, and has to come to the same tokens. What runs
    between two rollouts moves these generators apart: dropout on batches of other lengths, a reward model that samples. Collective in `group`.
    """
    if group is None:
        yield
        return
    on_gpu = torch.cuda.is_available()  # where vLLM then is
    read, write = (
        (torch.cuda.get_rng_state, torch.cuda.set_rng_state) if on_gpu else (torch.get_rng_state, torch.set_rng_state)
    )
    own = read()
    first = torch.distributed.get_rank(group=group) == 0
    write(gathered(own, group)[0])
    try:
        yield
    finally:
        if not first:
            write(own)


def check_alike(group: "torch.distributed.ProcessGroup | None", outputs: Iterable[Any]) -> None:
    """All shards of an engine came to the same tokens; each keeps the attention states of its own. Collective in `group`.

    Raises:
        [`RolloutError`]: they did not.
    """
    if group is None:
        return
    tokens = [list(c.token_ids) for output in outputs if isinstance(output, RequestOutput) for c in output.outputs]
    sums = gathered(hashlib.sha256(repr(tokens).encode()).digest(), group)
    if len(set(sums)) > 1:
        raise RolloutError(
            f"The {len(sums)} shards of this engine sampled different tokens, so that each went on with another text than the others. What they are asked "
            "has to be the same on all processes: prompts, sampling parameters (a seed, logits processors), engine options. Without "
            "vllm_tensor_parallel_size each process has an engine of its own."
        )


class WatchedLLM(LLM):
    """vLLM's `LLM`, whose answers are looked at, whoever asks: TRL, a rollout function, the evaluation."""

    def __init__(self, *args: Any, group: "torch.distributed.ProcessGroup | None" = None, **kwargs: Any) -> None:
        """
        Args:
            group: the processes that this engine is one of the shards in, all of which ask it alike; none where it is whole.
        """
        self.reuse, self._group = PrefixReuse(), group
        super().__init__(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        return self._watched(super().generate, *args, **kwargs)

    def chat(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        return self._watched(super().chat, *args, **kwargs)

    def _watched(self, ask: Callable[..., list[RequestOutput]], *args: Any, **kwargs: Any) -> list[RequestOutput]:
        """What was asked is forgotten where it ends with an error (a limit of time, Ctrl-C): vLLM would go on with it in the next call, and answer that
        one with it."""
        try:
            with drawing_alike(self._group):
                outputs = ask(*args, **kwargs)
        except BaseException:
            with suppress(Exception):  # of an engine that may be dead; what it died of is on its way
                asked = list(self.llm_engine.output_processor.request_states)
                self.llm_engine.abort_request(asked, internal=True)
                # what they have computed is in the prefix cache, and was not looked at
                self.reset_prefix_cache(reset_connector=True)
                self.reuse.changed()
            raise
        check_alike(self._group, outputs)
        self.reuse.check(outputs)
        return outputs
