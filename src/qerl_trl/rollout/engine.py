"""The contract between a trainer and whatever generates for it. Everything in `rollout/` knows an engine by these methods only.

| implementation | where | when |
|---|---|---|
| `InProcessEngine` | vllm/engine.py | colocate mode: vLLM in this process, its weights shared with the trainer |
| `ServerEngine` | server.py | server mode, main process: `vllm serve` with our plugin |
| `RankWithoutEngine` | here | server mode, every other process: takes part where the main process asks the server |

Every process calls every method, in the same order. What changes an engine (`put_...`, `set_noise`) invalidates cached attention
states; `reset_prefix_cache` must follow before the next `generate`. `put` is all of it, which a server takes as one request.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from ..noise.hooks import NoiseDraw
from .wire import AdapterTensors, Update


class RolloutError(RuntimeError):
    """The engine died, hung, or holds something else than the trainer. Training cannot go on; resume from a checkpoint."""


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn: greedily by default. `seed`: prompt number i of a call is drawn with seed + i."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Seeds:
    """The seeds of a call's completions, as a function of `entropy`: which run, step and call it is."""

    entropy: tuple[int, ...]

    def of(self, count: int) -> list[int]:
        """`count` of them, each in [0, 2^63)."""
        return [int(seed) for seed in np.random.SeedSequence(self.entropy).generate_state(count, np.uint64) >> 1]


class Completion(NamedTuple):
    """Token ids (the end-of-sequence token included, if one came) and the log-probability of each, in nats."""

    tokens: list[int]
    logps: list[float]


class Contents(NamedTuple):
    """What an engine computes with.

    received: fingerprint (wire.py) of the latest update that it took, None before the first.
    damaged: names of the adapter buffers that do not hold what was put there.
    draw: the noise in force, None before the first.
    """

    received: str | None
    damaged: list[str]
    draw: NoiseDraw | None


class Engine(ABC):
    """One engine, as a process of the trainer sees it."""

    @abstractmethod
    def put_adapter(self, adapter: Mapping[str, AdapterTensors], norms: Mapping[str, torch.Tensor]) -> None:
        """Replace the adapter, by canonical layer names, and the clean weights of the trained norms. Layers that are not named have no
        adapter afterwards; noise in force stays in force, on top of the norms.

        Raises:
            `RuntimeError`, `ValueError`: the engine cannot take it; it then computes with what it had before, to the last bit.
        """

    def put_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace weights of a model that is trained without an adapter, by canonical names. Noise in force stays in force.

        Raises:
            [`RolloutError`]: the engine does not compute with them afterwards, or cannot take any.
        """
        raise RolloutError(
            f"{type(self).__name__} takes adapters only. Train every weight with vllm_mode='colocate' or use_vllm=False."
        )

    @abstractmethod
    def set_noise(self, norms: Sequence[str], draw: NoiseDraw) -> float | None:
        """Put the noise of `draw` on `norms` (canonical names, always the same ones); sigma 0 restores every bit.

        Returns:
            The rms of what was added to the weights that the engine computes with; None where this process has no engine.
        """

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget cached attention states.

        Raises:
            [`RolloutError`]: the engine refused.
        """

    def put(self, update: Update | None, noisy: Sequence[str] = (), draw: NoiseDraw | None = None) -> float | None:
        """`put_adapter`, where there is an update; then `set_noise` on the norms `noisy`, where there is a draw; then `reset_prefix_cache`.

        Returns:
            As `set_noise`; None without a draw.

        Raises:
            As these. An update or a draw that is refused has changed nothing.
        """
        if update is not None:
            self.put_adapter(update.adapter, update.norms)
        effective = None if draw is None else self.set_noise(noisy, draw)
        self.reset_prefix_cache()
        return effective

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """One completion for each of this process's prompts (token ids), with the adapter and the noise in force."""

    @abstractmethod
    def contents(self) -> Contents | None:
        """What the engine computes with, looked up where it computes; None where this process has no engine."""

    @abstractmethod
    def trl_attributes(self) -> dict[str, Any]:
        """What TRL's `VLLMGeneration.generate` reads from `self` for this engine: `llm` or `vllm_client`."""

    def sleep(self) -> None:  # noqa: B027  (most engines never sleep)
        """Give memory back that only generation needs. No other method but `wake` and `close` may be called until `wake`."""

    def wake(self) -> None:  # noqa: B027
        """Undo `sleep`. Does nothing when awake.

        Raises:
            [`RolloutError`]: other weights came back than went to sleep.
        """

    @abstractmethod
    def close(self) -> None:
        """Let the engine go. May be called twice."""


class RankWithoutEngine(Engine):
    """A process whose completions come from the main process's server."""

    def put_adapter(self, adapter: Mapping[str, AdapterTensors], norms: Mapping[str, torch.Tensor]) -> None:
        """The main process sends it."""

    def set_noise(self, norms: Sequence[str], draw: NoiseDraw) -> float | None:
        return None  # the main process sends the draw

    def contents(self) -> Contents | None:
        return None  # the main process asks

    def reset_prefix_cache(self) -> None:
        """The main process asks for it."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        counts, _ = gather_prompts(prompts)
        payload: list[list[Completion] | None] = [None]
        broadcast_object_list(payload, from_process=0)
        if payload[0] is None:
            raise RolloutError("The main process got no completions from the server; its error says why.")
        rank = PartialState().process_index
        start = sum(counts[:rank])
        return payload[0][start : start + counts[rank]]

    def trl_attributes(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Nothing is open."""


def gather_prompts(prompts: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """How many prompts each process has, and all of them in rank order."""
    return gather_object([len(prompts)]), gather_object([list(prompt) for prompt in prompts])
