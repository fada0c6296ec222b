"""Completions that two processes of a trainer get through the main process's connection, and how updates reach a
server.

A real server: tests/e2e/engine/test_server.py.
"""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState

from qerl_trl.noise.hooks import NoiseDraw
from qerl_trl.rollout import server
from qerl_trl.rollout.engine import (
    CALL,
    SECRET,
    Completion,
    RankWithoutEngine,
    RolloutError,
    Sampling,
    Seeds,
    Update,
)
from qerl_trl.rollout.server import CONCURRENCY, Client, ServerEngine
from qerl_trl.rollout.weights import SharedMemory
from tests.ranks import on_ranks
from tests.rollout.asgi import KEY, FakeVLLM, bridged, guarded, http
from tests.rollout.workers import NORMS, everything, update


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
        except (OSError, AssertionError) as error:
            failure = f"{type(error).__name__}: {error}"
        state.wait_for_everyone()
        return failure

    first, second = (outcome.answer for outcome in on_ranks(2, work, timeout=180))
    assert first == "OSError: the server is gone"
    assert second.startswith("AssertionError: the main process got no completions")


class Requests(Client):
    """Without a server: keeps which prompts were asked for with which seed; `answers` makes the completions of a
    prompt."""

    def __init__(self, answers=lambda prompt, n: [prompt] * n):
        self.base_url, self.model, self.asked, self.answers = "http://here", "model", [], answers

    def _post(self, url, json):
        if isinstance(json.get("seed"), list):
            return super()._post(url, json=json)
        self.asked.append((json["prompt"], json.get("seed")))
        found = [(prompt, tokens) for prompt in json["prompt"] for tokens in self.answers(prompt, json["n"])]
        return {"choices": [choice(*one) for one in found]}


def choice(prompt, tokens):
    """In vLLM's own form."""
    names = [f"token_id:{token}" for token in tokens]
    logprobs = {
        "tokens": names,
        "token_logprobs": [-0.5] * len(names),
        "top_logprobs": [{name: -0.5} for name in names],
    }
    return {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": logprobs}


@pytest.mark.parametrize(
    ("sampling", "asked"),
    [
        (Sampling(4), [([[1], [1], [2]], None)]),
        (Sampling(4, temperature=1.0), [([[1], [1], [2]], None)]),
        (Sampling(4, temperature=1.0, seed=7), [([[1]], 7), ([[1]], 8), ([[2]], 9)]),
    ],
    ids=["greedy", "sampled", "seeded"],
)
def test_each_prompt_has_a_seed_of_its_own(sampling, asked):
    engine, prompts = ServerEngine.__new__(ServerEngine), [[1], [1], [2]]
    engine.client = Requests()
    assert [completion.tokens for completion in engine.generate(prompts, sampling)] == prompts
    assert sorted(engine.client.asked, key=json.dumps) == asked


def test_prompts_with_seeds_of_their_own_come_in_their_order():
    """Each is a request; a run's seeds are a function of what it is, and a user's own seed is for all."""
    client = Requests(lambda prompt, n: [[*prompt, i] for i in range(n)])
    prompts, seeds = [[i] for i in range(3 * CONCURRENCY)], Seeds((3, 5))
    output = client.generate(prompts, n=2, generation_kwargs={"seed": seeds, "ignore_eos": True})
    assert output["prompt_ids"] == prompts
    assert output["completion_ids"] == [[*prompt, i] for prompt in prompts for i in range(2)]
    assert {p[0][0]: seed for p, seed in client.asked} == dict(enumerate(seeds.of(len(prompts))))
    assert len({seed for _, seed in client.asked}) == len(prompts) and Seeds((3, 6)).of(1) != seeds.of(1)
    client.asked.clear()
    client.generate(prompts, generation_kwargs={"seed": 3})
    assert client.asked == [(prompts, 3)]


class OneWorker(FakeVLLM):
    """Behind the endpoint: a worker, without a model that computes."""

    def __init__(self, extension):
        super().__init__()
        self.extension = extension

    async def collective_rpc(self, method, timeout, args):
        self.asked.append((method,))
        return [getattr(self.extension, method)(*args)]


@pytest.fixture
def connected(worker, monkeypatch):
    """Connects an engine that is not compared with a model; and the server behind it, and the paths that were asked."""
    pytest.importorskip("vllm")
    from qerl_trl.rollout.vllm import worker as workers

    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
    monkeypatch.setattr(workers, "describe", lambda state, config: {"norms": len(state.clean_norms())})
    monkeypatch.setattr(server, "differences", lambda spec, model, ranks: [])
    monkeypatch.setenv(SECRET, KEY)
    vllm = OneWorker(worker)
    with http(bridged(guarded(vllm))) as (url, requests):

        def connect():
            spec = SimpleNamespace(dtype="bfloat16", serve_command=lambda *_: "vllm serve")
            return ServerEngine(url, spec, None, 5)

        yield connect, vllm, requests


@pytest.fixture(params=["/dev/shm", "network"])
def engine(request, connected, monkeypatch):
    """An engine that has put an update, on the same host or as if on another."""
    connect, vllm, requests = connected
    if request.param == "network":
        monkeypatch.setattr(SharedMemory, "is_here", lambda name: False)
    engine = connect()
    assert engine._local == (request.param != "network")
    engine.put(Update(*update(0)), NORMS[:1], NoiseDraw(0.1, 1, 2, 3))
    vllm.asked.clear()
    requests.clear()
    yield engine
    engine.close()


def test_update_noise_and_reset_are_one_request(engine, connected, worker):
    _, vllm, requests = connected
    new, draw = Update(*update(1)), NoiseDraw(0.2, 1, 3, 0)
    effective = engine.put(new, NORMS[:1], draw)
    assert [method for method, path, _ in requests if path == CALL] == [*["PUT"] * (not engine._local), "POST"]
    assert vllm.asked == [("qerl_put",), ("reset",)]
    found = engine.contents()
    assert found.received == new.fingerprint and found.draw == draw and not found.damaged
    at_once = everything(worker)

    engine.put(Update(*update(2)))
    engine.put(None, NORMS[:1], draw._replace(step=4))
    engine.put(new)
    assert engine.put(None, NORMS[:1], draw) == effective
    assert all(torch.equal(left, right) for left, right in zip(at_once, everything(worker), strict=True))


def test_a_process_that_is_killed_leaves_no_shared_memory_behind(engine, worker):
    """SIGKILL runs no clean-up, so from the first update on no file may be left."""
    assert not Path("/dev/shm", worker._qerl_memory.name).exists()


def test_a_cache_that_was_not_reset_ends_the_rollout(engine, connected, monkeypatch):
    async def refuses(reset_connector):
        return False

    monkeypatch.setattr(connected[1], "reset_prefix_cache", refuses)
    for change in (Update(*update(1)), None):
        with pytest.raises(RolloutError, match="did not reset its prefix cache"):
            engine.put(change)


def test_a_new_trainer_finds_no_noise_of_the_one_before(engine, connected, worker):
    noisy = everything(worker)
    assert engine.contents().draw.sigma > 0
    connected[0]()
    assert engine.contents().draw.sigma == 0 and not all(map(torch.equal, noisy, everything(worker)))


def test_the_secret_is_in_no_log_and_no_netrc_replaces_it(connected, caplog, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password else\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(SharedMemory, "is_here", lambda name: False)
    engine = connected[0]()
    engine.put(Update(*update(0)))
    engine.client._secret = "another"
    with pytest.raises(RolloutError, match="401") as refused:
        engine.contents()
    assert SECRET in str(refused.value) and KEY not in str(refused.value) + caplog.text and len(caplog.records) > 3
