"""Completions that two processes of a trainer get through the main process's connection; test_engine.py has a real server."""

import json
import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState

from qerl_trl.deadline import deadline
from qerl_trl.noise.hooks import NoiseDraw
from qerl_trl.rollout import channel, server, wire
from qerl_trl.rollout.channel import Channel
from qerl_trl.rollout.client import CONCURRENCY, Client
from qerl_trl.rollout.engine import Completion, RankWithoutEngine, RolloutError, Sampling, Seeds
from qerl_trl.rollout.layout import UpdateLayout
from qerl_trl.rollout.server import ServerEngine
from qerl_trl.rollout.shared_memory import SharedMemory
from qerl_trl.rollout.signature import SECRET
from qerl_trl.rollout.wire import CALL, RESET, Update
from tests.faults.test_s_updates import NORMS, everything, update, worker  # noqa: F401  (a fixture)
from tests.ranks import on_ranks
from tests.rollout.asgi import KEY, FakeVLLM, bridged, guarded, http
from tests.rollout.relay import flipped, relayed


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


class Requests(Client):
    """Without a server: keeps which prompts were asked for with which seed; `answers` makes the completions of a prompt."""

    def __init__(self, answers=lambda prompt, n: [prompt] * n):
        self.base_url, self.model, self.asked, self.answers = "http://here", "model", [], answers

    def _completions(self, url, json):
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


def test_a_request_that_hangs_or_fails_is_not_waited_for():
    hangs, failed = threading.Event(), []

    def answers(prompt, n):
        if prompt == [1]:
            raise RolloutError("refused")
        if prompt == [0]:
            failed.append(hangs.wait(60))
        return [prompt] * n

    client, began = Requests(answers), time.monotonic()
    with pytest.raises(RolloutError, match="refused"):
        client.generate([[0], [1]], generation_kwargs={"seed": [1, 2]})
    with pytest.raises(RolloutError, match="late"), deadline(0.2, lambda: RolloutError("late")):
        client.generate([[0], [2]], generation_kwargs={"seed": [1, 2]})
    assert time.monotonic() - began < 30 and not failed
    hangs.set()


class OnThisHost(ServerEngine):
    """Without a server: opens shared memory as its worker does."""

    def __init__(self):
        self._shared, self._channel, self.opened = None, None, []

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
        theirs = engine.opened[-1]
        assert not Path("/dev/shm", theirs.name).exists()
        engine._shared.data[100:] = 5
        assert theirs.data[100:].unique().tolist() == [5]


class OneWorker(FakeVLLM):
    """Behind the endpoint: a worker, without a model that computes."""

    def __init__(self, extension):
        super().__init__()
        self.extension = extension

    async def collective_rpc(self, method, timeout, args):
        self.asked.append((method,))
        return [getattr(self.extension, method)(*args)]


class Connected(ServerEngine):
    """With that worker, which is not compared with a model."""

    def __init__(self, url):
        from qerl_trl.rollout.client import Client

        self.url, self.client, self.spec = url, Client(url, KEY.encode(), 5), SimpleNamespace(dtype="bfloat16")
        self._ranks, self._noisy, self._sent = 1, (), (None, None)
        self._shared = self._channel = self._host = None
        self._layout, self._flat = UpdateLayout(()), torch.empty(0, dtype=torch.uint8)


@pytest.fixture
def connected(worker, monkeypatch):  # noqa: F811
    """Such an engine that has sent an update, and the paths that it has asked since."""
    pytest.importorskip("vllm")
    monkeypatch.setenv(SECRET, KEY)
    vllm = OneWorker(worker)
    with http(bridged(guarded(vllm))) as (url, _):
        engine = Connected(url)
        engine.put(Update(*update(0)), NORMS[:1], NoiseDraw(0.1, 1, 2, 3))
        assert engine._shared is not None
        asked, control = [], engine.client._control

        def counted(path, body):
            asked.append(path)
            return control(path, body)

        engine.client._control = counted
        vllm.asked.clear()
        yield engine, vllm, asked
        engine.close()


def test_update_noise_and_reset_are_one_request(connected, worker):  # noqa: F811
    engine, vllm, asked = connected
    new, draw = Update(*update(1)), NoiseDraw(0.2, 1, 3, 0)
    effective = engine.put(new, NORMS[:1], draw)
    assert asked == [CALL] and vllm.asked == [("qerl_apply",), ("reset",)]
    found = engine.contents()
    assert found.received == new.fingerprint and found.draw == draw and not found.damaged
    at_once = everything(worker)

    engine.put_adapter(*update(2))
    engine.set_noise(NORMS[:1], draw._replace(step=4))
    engine.put_adapter(new.adapter, new.norms)
    assert engine.set_noise(NORMS[:1], draw) == effective
    assert all(torch.equal(left, right) for left, right in zip(at_once, everything(worker), strict=True))


def test_a_new_trainer_finds_no_noise_of_the_one_before(connected, worker, monkeypatch):  # noqa: F811
    """At f05be0c a second run on a server was refused for "other norms", or told that somebody else wrote into the engine."""
    from qerl_trl.rollout.vllm import worker as workers

    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
    monkeypatch.setattr(workers, "describe", lambda state, config: {"norms": len(state.clean_norms())})
    engine, _, _ = connected
    noisy = everything(worker)
    assert engine.contents().draw.sigma > 0
    Connected(engine.url).call("qerl_describe")
    assert engine.contents().draw.sigma == 0 and not all(map(torch.equal, noisy, everything(worker)))


@pytest.mark.parametrize("name", ["LocalHost", "127.0.0.1"])
def test_the_host_may_be_written_in_any_way(name, monkeypatch):
    """requests signs what it sends, where the host is in lower case."""
    pytest.importorskip("vllm")
    monkeypatch.setenv(SECRET, KEY)
    with http(bridged(guarded(FakeVLLM()))) as (url, _):
        client = Client(url.replace("127.0.0.1", name).replace("localhost", name), KEY.encode(), 5.0)
        assert client.call("qerl_contents") == [{"bytes": 1}]


def test_between_two_calls_no_connection_is_kept(monkeypatch, tmp_path):
    """A server closes one that nobody used for some seconds, and a call that crosses that ends the run. And a proxy's password is ~/.netrc's."""
    pytest.importorskip("vllm")
    seen = []

    def answer(method, path, headers, body):
        return 200, b'{"results": [{}], "data": [{"id": "model"}]}'

    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password ofaproxy\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with http(answer) as (url, _):
        client = Client(url, KEY.encode(), 5.0)
        send = client.control.send
        monkeypatch.setattr(
            client.control, "send", lambda request, **kw: seen.append(request.headers) or send(request, **kw)
        )
        client.call("qerl_contents")
    assert seen[0]["Connection"] == "close" and seen[0]["Authorization"].startswith("Basic ")


def test_what_is_asked_again_is_signed_again(monkeypatch):
    """A signature is good once, and for five minutes: a rollout may take longer before its connection breaks."""
    pytest.importorskip("vllm")
    from qerl_trl.rollout import client as module

    monkeypatch.setattr(module, "_WAITS", (0.0,) * 5)
    signatures, answers = [], [503, None, 200]

    def answer(method, path, headers, body):
        if path in ("/health", "/v1/models"):
            return 200, b'{"data": [{"id": "model"}]}'
        signatures.append(headers["X-Qerl-Signature"])
        if (status := answers[len(signatures) - 1]) is None:
            raise OSError("the connection breaks")
        return status, b"{}"

    with http(answer) as (url, _):
        assert Client(url, KEY.encode(), 5.0)._get(f"{url}/v1/elsewhere") == {}
    assert len(set(signatures)) == 3


def test_a_server_that_goes_silent_is_not_waited_for_for_ever(monkeypatch):
    pytest.importorskip("vllm")
    given = {}

    class Session:
        def get(self, url, **kwargs):
            given.update(kwargs)
            return SimpleNamespace(status_code=200, json=lambda: {}, text="{}", headers={}, content=b"{}")

    client = Client.__new__(Client)
    client.session = Session()
    client._get("http://127.0.0.1:1/v1/models")
    assert given == {"timeout": wire.MESSAGE_TIMEOUT}


@pytest.mark.parametrize("url", ["http://0.0.0.0:8000", "http://[::]:8000", "http://localhost:1", "http://127.0.0.3:1"])
def test_this_machines_own_interface(url):
    """TRL's default address is one of them."""
    assert server._is_loopback(url)
    assert not server._is_loopback("http://10.0.0.1:8000") and not server._is_loopback("http://gpu-node1:8000")


def test_noise_and_reset_are_one_request(connected):
    engine, vllm, asked = connected
    assert engine.put(None, NORMS[:1], NoiseDraw(0.0, 1, 3, 0)) == 0
    engine.put(None)
    assert asked == [CALL, RESET] and vllm.asked == [("qerl_noise",), ("reset",), ("reset",)]


@pytest.fixture
def elsewhere(connected, monkeypatch, caplog):
    """As `connected`, with the server on another host; it has sent an update there over connections of their own."""
    engine, vllm, asked = connected
    caplog.set_level(logging.INFO, logger="qerl_trl")

    class Nothing:
        @staticmethod
        def create(size, device):
            raise OSError("another host")

    monkeypatch.setattr(server, "SharedMemory", Nothing)
    engine._announce(engine._layout, torch.device("cpu"))
    assert engine._shared is None and engine._channel is not None and "over connections of their own" in caplog.text
    engine.put(Update(*update(0)))
    caplog.clear()
    asked.clear()
    vllm.asked.clear()
    yield engine, vllm, asked


def put_and_check(engine, worker, seed: int) -> None:  # noqa: F811
    """An update lands as it does through shared memory."""
    new = Update(*update(seed))
    engine.put(new, NORMS[:1], NoiseDraw(0.2, 1, 3, seed))
    found = engine.contents()
    assert found.received == new.fingerprint and not found.damaged
    layer = worker._qerl_rollout_state.model.qkv_proj
    assert torch.equal(layer.adapter_a[: new.adapter["q_proj"].a.shape[0]], new.adapter["q_proj"].a.bfloat16())


def told(caplog, level: int = logging.WARNING) -> list[str]:
    """By the trainer's end."""
    records = [record for record in caplog.records if record.name == server.logger.name]
    return [record.getMessage() for record in records if record.levelno >= level]


def test_between_hosts_an_update_is_one_request_too(elsewhere, worker, caplog):  # noqa: F811
    engine, vllm, asked = elsewhere
    put_and_check(engine, worker, 1)
    assert asked[0] == CALL and vllm.asked[:2] == [("qerl_apply",), ("reset",)]
    assert told(caplog) == []


def test_without_connections_it_is_one_request_more_per_part(elsewhere, worker):  # noqa: F811
    engine, vllm, _ = elsewhere
    engine._leave()
    put_and_check(engine, worker, 1)
    assert vllm.asked[:3] == [("qerl_receive",), ("qerl_apply",), ("reset",)]


def test_connections_that_are_lost_are_made_anew(elsewhere, worker, caplog):  # noqa: F811
    engine, vllm, _ = elsewhere
    first = engine._channel
    worker._qerl_receiver.close()
    put_and_check(engine, worker, 1)
    assert [method for (method, *_) in vllm.asked][:3] == ["qerl_listen", "qerl_open", "qerl_apply"]
    assert engine._channel not in (None, first)
    (said,) = told(caplog)
    assert "broke" in said and "made anew" in said
    put_and_check(engine, worker, 2)
    assert len(told(caplog)) == 1


def through(relay_to, monkeypatch):
    """Connections from now on pass somebody who changes them."""
    relays = []

    def connect(host, port, secret, name):
        relays.append(relay_to(port))
        return Channel(host, relays[-1].__enter__().port, secret, name)

    monkeypatch.setattr(server, "Channel", connect)
    return relays


@pytest.mark.parametrize("times", [1, 2])
def test_an_update_that_is_changed_on_its_way_is_not_applied(elsewhere, worker, monkeypatch, caplog, times):  # noqa: F811
    """Once: it is sent again. Twice: it goes as requests, and so do those after it."""
    engine, vllm, _ = elsewhere
    before = everything(worker)
    relays = through(lambda port: relayed(port, *[flipped(64 + 80 + 5)] * (len(relays) < times)), monkeypatch)
    engine._leave()
    engine._connect()
    asked = vllm.collective_rpc

    async def watched(method, timeout, args):
        if method == "qerl_apply":  # nothing before it has changed the engine
            assert all(torch.equal(left, right) for left, right in zip(before, everything(worker), strict=True))
        return await asked(method, timeout, args)

    monkeypatch.setattr(vllm, "collective_rpc", watched)
    put_and_check(engine, worker, 1)
    monkeypatch.setattr(vllm, "collective_rpc", asked)
    assert (engine._channel is None) == (times == 2) == (("qerl_receive",) in vllm.asked)
    assert len(told(caplog)) == times and "go as requests" in [*told(caplog), "go as requests"][1]
    put_and_check(engine, worker, 2)
    assert len(told(caplog)) == times
    for relay in relays:
        relay.__exit__(None, None, None)


def test_where_no_connection_can_be_made_updates_go_as_requests(elsewhere, worker, monkeypatch, caplog):  # noqa: F811
    """As behind a firewall; said once, with what can be done."""
    engine, vllm, _ = elsewhere
    taken = channel.socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    taken.close()
    monkeypatch.setattr(server, "Channel", lambda host, _, *rest: Channel(host, port, *rest))
    engine._announce(engine._layout, torch.device("cpu"))
    for seed in (1, 2):
        put_and_check(engine, worker, seed)
    (said,) = told(caplog)
    assert "refused" in said and channel.PORT in said
    assert vllm.asked.count(("qerl_receive",)) == 2 and vllm.asked.count(("qerl_listen",)) == 1


def test_ranks_that_do_not_see_the_same_memory_get_requests(elsewhere, worker, monkeypatch, caplog):  # noqa: F811
    engine, vllm, _ = elsewhere
    monkeypatch.setattr(worker, "qerl_open", lambda name: {"error": "ValueError: No memory is shared with this host"})
    engine._announce(engine._layout, torch.device("cpu"))
    put_and_check(engine, worker, 1)
    (said,) = told(caplog)
    assert "No memory is shared" in said and ("qerl_receive",) in vllm.asked


def test_an_encrypted_server_gets_nothing_in_clear(elsewhere, worker, caplog):  # noqa: F811
    engine, vllm, _ = elsewhere
    engine._leave()
    engine.url = "https://" + engine.url.removeprefix("http://")
    engine._connect()
    put_and_check(engine, worker, 1)
    assert engine._channel is None and vllm.asked[0] == ("qerl_receive",)
    assert "would not be encrypted" in told(caplog, logging.INFO)[0] and told(caplog) == []


def test_a_draw_that_is_refused_leaves_the_adapter_as_it_was(connected, worker):  # noqa: F811
    engine, _, _ = connected
    before, contents = everything(worker), engine.contents()
    with pytest.raises(RolloutError, match="finite and not negative"):
        engine.put(Update(*update(1)), NORMS[:1], NoiseDraw(float("nan"), 1, 3, 0))
    assert all(torch.equal(left, right) for left, right in zip(before, everything(worker), strict=True))
    assert engine.contents() == contents


def test_the_fingerprint_is_computed_once_and_while_the_server_is_busy(connected, monkeypatch):
    engine, _, _ = connected
    call, running, order = engine.client.call, threading.Event(), []
    fingerprint = wire.update_fingerprint

    def slow(*args, **kwargs):
        running.set()
        answer = call(*args, **kwargs)
        order.append("answer")
        return answer

    def watched(*args):
        assert running.wait(10)
        order.append("fingerprint")
        return fingerprint(*args)

    monkeypatch.setattr(engine.client, "call", slow)
    monkeypatch.setattr(wire, "update_fingerprint", watched)
    new = Update(*update(1))
    engine.put(new)
    assert new.fingerprint == fingerprint(new.adapter, new.norms) == engine._sent[1]
    assert sorted(order) == ["answer", "fingerprint"]
