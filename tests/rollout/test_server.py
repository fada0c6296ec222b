"""Completions that two processes of a trainer get through the main process's connection; test_engine.py has a real server."""

import json
from pathlib import Path

import pytest
import torch
from accelerate import PartialState

from qerl_trl.rollout.engine import Completion, RankWithoutEngine, RolloutError, Sampling
from qerl_trl.rollout.layout import UpdateLayout
from qerl_trl.rollout.server import ServerEngine
from qerl_trl.rollout.shared_memory import SharedMemory
from tests.ranks import on_ranks


class Echo(ServerEngine):
    """A "server" that answers a prompt with its own tokens, or fails."""

    def __init__(self):
        pass

    def _complete(self, prompts, sampling):
        if sampling.temperature == 9:
            raise OSError("the server is gone")
        return [Completion(prompt, [0.5]) for prompt in prompts]


def test_each_process_gets_its_own_completions():
    def work(rank: int) -> str:
        """Rank r has r + 2 prompts; what it is told in the end."""
        state = PartialState(cpu=True)
        assert state.process_index == rank
        engine = Echo() if state.is_main_process else RankWithoutEngine()
        mine = [[rank, i] for i in range(rank + 2)]
        assert [c.tokens for c in engine.generate(mine, Sampling(4))] == mine
        assert engine.generate([], Sampling(4)) == []
        try:
            engine.generate(mine, Sampling(4, temperature=9))
        except (OSError, RolloutError) as error:
            failure = f"{type(error).__name__}: {error}"
        state.wait_for_everyone()
        return failure

    first, second = (outcome.answer for outcome in on_ranks(2, work, timeout=180))
    assert first == "OSError: the server is gone"
    assert second.startswith("RolloutError: The main process got no completions")


class Requests(ServerEngine):
    """Without a server: keeps what was asked for."""

    def __init__(self):
        self.asked: list[tuple[int, int | None]] = []

    def _request(self, prompts, sampling, seed):
        self.asked.append((len(prompts), seed))
        return [Completion(prompt, [0.0]) for prompt in prompts]


@pytest.mark.parametrize(
    ("sampling", "asked"),
    [
        (Sampling(4), [(3, None)]),
        (Sampling(4, temperature=1.0), [(3, None)]),
        (Sampling(4, temperature=1.0, seed=7), [(1, 7), (1, 8), (1, 9)]),
    ],
    ids=["greedy", "sampled", "seeded"],
)
def test_each_prompt_has_a_seed_of_its_own(sampling, asked):
    engine = Requests()
    prompts = [[1], [1], [2]]
    assert [completion.tokens for completion in engine.generate(prompts, sampling)] == prompts
    assert sorted(engine.asked, key=json.dumps) == asked


class OnThisHost(ServerEngine):
    """Without a server: opens shared memory as its worker does."""

    def __init__(self):
        self._shared, self.opened = None, []

    def call(self, method, *args, part=b""):
        if method != "qerl_open":
            return [{}]
        self.opened.append(SharedMemory.open(args[0], self._layout.nbytes, torch.device("cpu")))
        return [{"proof": self.opened[-1].proof()}]


def test_a_trainer_that_is_killed_leaves_no_shared_memory_behind():
    """SIGKILL runs no clean-up, so from the first update on there must be nothing that has a name."""
    engine = OnThisHost()
    for size in (1000, 2000):  # a second layout replaces the first one's memory
        engine._announce(UpdateLayout((("norm", "model.norm", "float32", (size,)),)), torch.device("cpu"))
        worker = engine.opened[-1]
        assert not Path("/dev/shm", worker.name).exists()
        engine._shared.data[100:] = 5
        assert worker.data[100:].unique().tolist() == [5]
