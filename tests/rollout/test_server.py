"""Completions that two processes of a trainer get through the main process's connection; test_engine.py has a real server."""

import json

import pytest
from accelerate import PartialState

from qerl_trl.rollout.engine import Completion, RankWithoutEngine, RolloutError, Sampling
from qerl_trl.rollout.server import ServerEngine
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
