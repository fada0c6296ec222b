"""A rollout server and strangers, who may do nothing; and what the trainer says when another service answers."""

import asyncio
import importlib.util
import json

import pytest

from qerl_trl.rollout.engine import CALL, SECRET, RolloutError
from tests.faults.catalog import fault, told
from tests.rollout.asgi import KEY, FakeVLLM, allowed, ask, bridged, guarded, http

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="TRL's client asks for vLLM")
BODY = json.dumps({"method": "qerl_put", "args": ["{}"], "reset": True}).encode()


@fault("S.server_unauthenticated")
@pytest.mark.parametrize(
    "path",
    [CALL, "/v1/completions", "/collective_rpc", "/sleep?level=2", "/reset_prefix_cache", "/invocations"],
)
@pytest.mark.parametrize(
    "headers", [{}, allowed("another secret"), {"Authorization": KEY}], ids=["none", "other", "bare"]
)
def test_a_stranger_can_do_nothing(path, headers):
    vllm = FakeVLLM()
    status, content = ask(guarded(vllm), "POST", path, BODY, headers)
    assert status == 401 and "its trainer only" in content["error"] and vllm.reached == vllm.asked == []


@fault("S.server_unauthenticated")
def test_a_stranger_s_websocket_is_closed():
    vllm, sent = FakeVLLM(), []

    async def send(message):
        sent.append(message["type"])

    asyncio.run(guarded(vllm)({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send))
    assert sent == ["websocket.close"] and vllm.reached == []


@fault("S.server_unauthenticated")
@needs_vllm
def test_a_trainer_with_another_secret_is_told_what_to_do():
    from qerl_trl.rollout.server import Client

    vllm = FakeVLLM()
    with http(bridged(guarded(vllm))) as (url, _):
        client = Client(url, KEY, 5)
        assert client.call("qerl_put", "{}") == [{"run": "1"}]
        with told(RuntimeError, url, "401", f"the same {SECRET}"):
            Client(url, "another secret", 5)
    assert len(vllm.asked) == 2


@fault("S.server_unauthenticated")
@needs_vllm
def test_a_trainer_without_a_secret_is_told_how_to_make_one(monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    with (
        http(bridged(guarded(FakeVLLM()))) as (url, requests),
        told(RuntimeError, f"export {SECRET}=", "vllm serve", "--middleware"),
    ):
        engine(url)
    assert requests == []


# ------------------------------------------------------------------------------------------- another service


def engine(url: str):
    from qerl_trl.rollout.server import ServerEngine
    from qerl_trl.rollout.spec import EngineSpec
    from tests.rollout.test_handshake import policy

    model = policy()
    return ServerEngine(url, EngineSpec.of(model), model, 1)


@fault("S.engine_answer_garbage")
@needs_vllm
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<html>hello</html>", ("<html>hello", "another service")),
        (b'{"results": [{"layers": 3}]}', ("does not serve this trainer", "KeyError")),
        (b'{"results": [{"error": "another version"}]}', ("refused qerl_describe", "another version")),
    ],
    ids=["a page", "another version", "a refusal"],
)
def test_an_answer_of_another_service_is_told(content, words, monkeypatch):
    monkeypatch.setenv(SECRET, KEY)

    def answer(method, path, headers, body):
        return 200, b'{"data": [{"id": "m"}]}' if path == "/v1/models" else content

    with http(answer) as (url, _), told(RuntimeError, url, "vllm serve", *words):
        engine(url)


@fault("S.engine_answer_garbage")
@needs_vllm
def test_another_service_on_the_port_is_told(monkeypatch):
    """TRL's client waits forever for it."""
    monkeypatch.setenv(SECRET, KEY)
    with (
        http(lambda *request: (404, b"not here")) as (url, _),
        told(ConnectionError, url, "404", "vllm_server_timeout", "vllm serve"),
    ):
        engine(url)
    with told(ConnectionError, url, "refused", "vllm_server_base_url", "vllm serve"):
        engine(url)


@fault("S.engine_answer_garbage")
@needs_vllm
def test_the_servers_own_words_are_told():
    """After TRL's session has asked again."""
    from qerl_trl.rollout.server import Client

    def answer(method, path, headers, body):
        return (200, b'{"data": [{"id": "m"}]}') if method == "GET" else (413, b"too large for the proxy")

    with http(answer) as (url, _), told(RolloutError, url, "413: too large for the proxy", "generation_batch_size"):
        Client(url, KEY, 5).generate([[1]])
