"""What stands in front of the server, without one: faults/test_s_server.py has the attacks."""

import asyncio
import json

import pytest

from qerl_trl.rollout.vllm import endpoint as module
from qerl_trl.rollout.wire import CALL, MAX_MESSAGE, RESET
from tests.rollout.asgi import FakeVLLM, ask, guarded, signed

NOISE = json.dumps({"method": "qerl_noise", "args": ["0.5", "1", "2", "3"]}).encode()


def test_signed_calls_reach_the_engine():
    vllm = FakeVLLM()
    served = guarded(vllm)
    assert ask(served, "POST", CALL, NOISE, signed("POST", CALL, NOISE)) == (200, {"results": [{"bytes": 1}]})
    assert ask(served, "POST", RESET, b"", signed("POST", RESET)) == (200, {"success": True})
    assert vllm.asked == [("qerl_noise", "0.5", "1", "2", "3"), ("reset",)] and vllm.reached == []


def test_a_call_may_end_with_a_reset_of_the_prefix_cache():
    vllm = FakeVLLM()
    body = json.dumps({"method": "qerl_noise", "args": ["0.5"], "reset": True}).encode()
    assert ask(guarded(vllm), "POST", CALL, body, signed("POST", CALL, body)) == (
        200,
        {"results": [{"bytes": 1}], "reset": True},
    )
    assert vllm.asked == [("qerl_noise", "0.5"), ("reset",)]
    vllm.answer = RuntimeError("EngineCore died")
    assert ask(guarded(vllm), "POST", CALL, body, signed("POST", CALL, body))[0] == 500
    assert vllm.asked[2:] == [("qerl_noise", "0.5")]


def test_bytes_after_the_line_are_the_last_argument():
    vllm, part = FakeVLLM(), bytes(range(256)) + b"\n\n"
    body = json.dumps({"method": "qerl_receive", "args": ["t", "0"]}).encode() + b"\n" + part
    assert ask(guarded(vllm), "POST", CALL, body, signed("POST", CALL, body), parts=3)[0] == 200
    assert vllm.asked == [("qerl_receive", "t", "0", part)]


@pytest.mark.parametrize("parts", [1, 7])
def test_signed_generation_arrives_whole_and_is_signed_again_where_it_is_repeated(parts):
    vllm, body = FakeVLLM(), bytes(range(256)) * 9
    served = guarded(vllm)
    for _ in range(2):  # as our client repeats what failed
        headers = signed("POST", "/v1/completions", body)
        assert ask(served, "POST", "/v1/completions", body, headers, parts)[0] == 200
        assert ask(served, "POST", "/v1/completions", body, headers, parts)[0] == 401
    assert vllm.bodies == [body, body]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"[]", 400), (b'{"method": "qerl_noise"}', 400), (b'{"method": 1, "args": []}', 400),
        (b'{"method": "qerl_noise", "args": [1]}', 403), (b'{"method": "sleep", "args": []}', 403),
        (b'{"method": "qerl_noise", "args": [], "reset": 1}', 403), (b'{"method": "_qerl_state", "args": []}', 403), (b'{"method": "qerl_noise\\n", "args": []}', 403),
    ],
)  # fmt: skip
def test_a_call_that_is_none_of_ours_is_refused(body, status):
    vllm = FakeVLLM()
    assert ask(guarded(vllm), "POST", CALL, body, signed("POST", CALL, body))[0] == status
    assert vllm.asked == vllm.reached == []


def test_a_failure_in_the_engine_is_told():
    served = guarded(FakeVLLM(RuntimeError("EngineCore died")))
    status, content = ask(served, "POST", CALL, NOISE, signed("POST", CALL, NOISE))
    assert status == 500 and content["error"] == "qerl_noise failed in the engine: RuntimeError: EngineCore died"


def test_a_vllm_that_keeps_its_engine_elsewhere_is_told():
    vllm = FakeVLLM()
    del vllm.state.engine_client
    status, content = ask(guarded(vllm), "POST", CALL, NOISE, signed("POST", CALL, NOISE))
    assert status == 503 and "app.state.engine_client" in content["error"]


def test_limits(monkeypatch):
    served, long = guarded(FakeVLLM()), bytes(MAX_MESSAGE + 1)
    assert ask(served, "POST", CALL, long, signed("POST", CALL, long))[0] == 413
    lying = {"Content-Length": "5", **signed("POST", CALL, long)}
    assert ask(served, "POST", CALL, long, lying, parts=3)[0] == 413
    for length in (None, "-1", "many"):
        assert ask(served, "POST", CALL, NOISE, {"Content-Length": length, **signed("POST", CALL, NOISE)})[0] == 411


def test_generation_can_be_left_open_within_limits(monkeypatch):
    vllm = FakeVLLM()
    served = guarded(vllm, QERL_SERVER_OPEN_GENERATION="1")
    assert ask(served, "POST", "/v1/completions", b"{}")[0] == 200
    assert ask(served, "POST", CALL, NOISE)[0] == 401
    too_long = {"Content-Length": str(module.MAX_OPEN_PROMPTS + 1)}
    assert ask(served, "POST", "/v1/completions", b"{}", too_long)[0] == 413
    monkeypatch.setattr(module, "MAX_OPEN_REQUESTS", 0)
    assert ask(served, "POST", "/v1/completions", b"{}")[0] == 429
    assert vllm.reached == ["POST /v1/completions"] and served._strangers == 0


def test_who_never_sends_what_he_announced_gives_his_place_back(monkeypatch):
    """64 such connections closed open generation to everybody, for as long as they liked."""
    monkeypatch.setattr(module, "OPEN_BODY_TIMEOUT", 0.05)
    vllm, sent = FakeVLLM(), []
    served = guarded(vllm, QERL_SERVER_OPEN_GENERATION="1")

    async def never():
        await asyncio.sleep(600)

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-length", b"2")],
    }
    asyncio.run(served(scope, never, send))
    assert sent[0]["status"] == 408 and b"did not come whole within 0.05 s" in sent[1]["body"]
    assert served._strangers == 0 and vllm.reached == []


@pytest.mark.parametrize(("key", "starts"), [("", False), ("short", False), ("0123456789abcdef", True)])
def test_without_a_secret_the_server_does_not_start(key, starts):
    sent = []

    async def receive():
        return {"type": "lifespan.startup"}

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        await send({"type": "lifespan.startup.complete"})

    served = guarded(app, key)
    asyncio.run(served({"type": "lifespan"}, receive, send))
    assert sent[0]["type"] == ("lifespan.startup.complete" if starts else "lifespan.startup.failed")
    if not starts:
        assert "export QERL_SERVER_SECRET=" in sent[0]["message"]
        assert ask(served, "GET", "/health")[0] == 503
