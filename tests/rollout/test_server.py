"""Server mode without a real server: completions of several processes, updates, and the comparison of weights.

A real server: tests/e2e/engine/test_server.py.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState

from qerl_trl.noise.hooks import NoiseDraw
from qerl_trl.rollout import server
from qerl_trl.rollout.engine import CALL, SECRET, Completion, RankWithoutEngine, RolloutError, Sampling, Seeds, Update
from qerl_trl.rollout.server import CONCURRENCY, Client, ServerEngine, differences
from qerl_trl.rollout.spec import EngineSpec
from qerl_trl.rollout.weights import SharedMemory, summary
from tests.ranks import on_ranks
from tests.rollout.asgi import KEY, FakeVLLM, bridged, guarded, http
from tests.rollout.workers import NORMS, everything, policy, update


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
        """Completions of rank + 2 prompts; returns the error of a failure."""
        state = PartialState(cpu=True)
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
    """Answers without a server, in vLLM's form; `asked` has the prompts and seed of each request."""

    def __init__(self, answers=lambda prompt, n: [prompt] * n):
        self.base_url, self.model, self.asked, self.answers = "http://here", "model", [], answers

    def _post(self, url, json):
        if isinstance(json.get("seed"), list):
            return super()._post(url, json=json)
        self.asked.append((json["prompt"], json.get("seed")))
        found = [(prompt, tokens) for prompt in json["prompt"] for tokens in self.answers(prompt, json["n"])]
        return {"choices": [self.choice(*one) for one in found]}

    def choice(self, prompt, tokens):
        names = [f"token_id:{token}" for token in tokens]
        logps = {"tokens": names, "token_logprobs": [-0.5] * len(names), "top_logprobs": [{n: -0.5} for n in names]}
        return {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": logps}


def test_seeded_prompts_are_single_requests_with_answers_in_order():
    client = Requests(lambda prompt, n: [[*prompt, i] for i in range(n)])
    prompts, seeds = [[i] for i in range(3 * CONCURRENCY)], Seeds((3, 5))
    output = client.generate(prompts, n=2, generation_kwargs={"seed": seeds, "ignore_eos": True})
    assert output["prompt_ids"] == prompts
    assert output["completion_ids"] == [[*prompt, i] for prompt in prompts for i in range(2)]
    assert {p[0][0]: seed for p, seed in client.asked} == dict(enumerate(seeds.of(len(prompts))))
    assert len({seed for _, seed in client.asked}) == len(prompts) and Seeds((3, 6)).of(1) != seeds.of(1)
    client.generate(prompts, generation_kwargs={"seed": 3})
    assert client.asked[-1] == (prompts, 3), "the user's own seed is for all"
    engine = ServerEngine.__new__(ServerEngine)
    engine.client = Requests()
    engine.generate([[1], [1], [2]], Sampling(4, temperature=1.0, seed=7))
    assert sorted(engine.client.asked) == [([[1]], 7), ([[1]], 8), ([[2]], 9)]


# --- updates ---


class OneWorker(FakeVLLM):
    """vLLM with one worker, behind the endpoint."""

    def __init__(self, extension):
        super().__init__()
        self.extension = extension

    async def collective_rpc(self, method, timeout, args):
        self.asked.append((method,))
        return [getattr(self.extension, method)(*args)]


@pytest.fixture
def connected(worker, monkeypatch):
    """A function that connects an engine (weights are not compared), the server behind it, and its requests."""
    from qerl_trl.rollout.vllm import worker as workers

    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
    monkeypatch.setattr(workers, "describe", lambda state, config: {"norms": len(state.clean_norms())})
    monkeypatch.setattr(server, "differences", lambda spec, model, ranks: [])
    monkeypatch.setenv(SECRET, KEY)
    vllm = OneWorker(worker)
    spec = SimpleNamespace(dtype="bfloat16", serve_command=lambda *_: "vllm serve")
    with http(bridged(guarded(vllm))) as (url, requests):
        yield lambda: ServerEngine(url, spec, None, 5), vllm, requests


@pytest.fixture(params=["/dev/shm", "network"])
def engine(request, connected, monkeypatch):
    """An engine after an update, on the same host or as if on another."""
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
    assert not Path("/dev/shm", worker._qerl_memory.name).exists(), "a SIGKILL would leave it"
    new, draw = Update(*update(1)), NoiseDraw(0.2, 1, 3, 0, {NORMS[0]: 0.3})
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


def test_a_refused_cache_reset_ends_the_rollout(engine, connected, monkeypatch):
    async def refuses(reset_connector):
        return False

    monkeypatch.setattr(connected[1], "reset_prefix_cache", refuses)
    for change in (Update(*update(1)), None):
        with pytest.raises(RolloutError, match="did not reset its prefix cache"):
            engine.put(change)


def test_a_new_trainer_finds_no_noise_of_an_earlier_one(engine, connected, worker):
    noisy = everything(worker)
    assert engine.contents().draw.sigma > 0
    connected[0]()
    assert engine.contents().draw.sigma == 0 and not all(map(torch.equal, noisy, everything(worker)))


# --- the comparison of weights and settings; of real engines: tests/e2e/engine/test_weights.py ---


def answers(model, ranks: int = 1, **changed) -> list[dict]:
    """Answers of `ranks` tensor-parallel ranks, with every matrix split by rows and the rest on each."""
    targets = [f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn.q_proj", "mlp.down_proj")]
    settings = {"dtype": "float32", "logprobs_mode": "processed_logprobs", "max_model_len": 256, "options": {}}
    settings |= {"batch_invariant": False, "adapter_ranks": dict.fromkeys(targets, 16)}
    weights = {}
    for name, parameter in model.get_base_model().named_parameters():
        name = name.replace(".base_layer", "").removesuffix(".weight")
        kind = "bias" if name.endswith(".bias") else "norm" if parameter.ndim == 1 else "dense"
        kind = "embedding" if name in ("lm_head", "model.embed_tokens") else kind
        if "lora_" not in name:
            shards = parameter.chunk(ranks) if parameter.ndim == 2 else [parameter] * ranks
            weights[name] = [list(summary(kind, shard)) for shard in shards]
    return [{"weights": {n: w[rank] for n, w in weights.items()}, **settings, **changed} for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_same_model_passes_with_any_number_of_shards(ranks):
    model = policy()
    assert differences(EngineSpec.of(model), model, answers(model, ranks)) == []


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"dtype": "bfloat16"}, "it computes in bfloat16, the trainer in float32"),
        ({"logprobs_mode": "raw_logprobs"}, "its log-probabilities are raw_logprobs, not processed_logprobs"),
        ({"max_model_len": 64}, "its longest sequence is 64 tokens, the trainer's 128"),
        ({"adapter_ranks": {}}, "no adapter buffers in model.layers.0.mlp.down_proj"),
        ({"batch_invariant": False}, "it was started without batch-invariant kernels"),
    ],
)
def test_other_settings_are_named(changed, named):
    model = policy()
    spec = EngineSpec.of(model, max_model_len=128, batch_invariant=True)
    (found,) = differences(spec, model, answers(model, **{"batch_invariant": True, **changed}))
    assert found.startswith(named)
