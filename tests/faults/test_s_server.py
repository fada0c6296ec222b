"""A rollout server and strangers: what they may do (nothing), and what the trainer says to answers that make no sense."""

import asyncio
import importlib.util
import json

import pytest

from qerl_trl.noise.hooks import NoiseDraw
from qerl_trl.rollout.engine import RolloutError, Sampling
from qerl_trl.rollout.signature import HEADER, SECRET, sign
from qerl_trl.rollout.wire import CALL, CHUNK, RESET, Update
from tests.faults.catalog import fault, told
from tests.rollout.asgi import KEY, FakeVLLM, ask, bridged, guarded, http, signed

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="TRL's client asks for vLLM")


def call(method: str, *args: str) -> bytes:
    return json.dumps({"method": method, "args": args}).encode()


ACTIONS = {
    "set noise": ("POST", CALL, call("qerl_noise", "0.5", "1", "2", "3")),
    "set adapter": ("POST", CALL, call("qerl_apply", "x", "0" * 64)),
    "cancel a sync": ("POST", CALL, call("qerl_receive", "other", "0", "AAAA")),
    "fill memory": ("POST", CALL, call("qerl_receive", "x", "0", "A" * 3 * CHUNK)),
    "block a sync": ("POST", "/v1/completions", b'{"max_tokens": 100000}'),
    "reset the cache": ("POST", RESET, b""),
    # vLLM's development mode and its like
    "set noise there": ("POST", "/collective_rpc", call("qerl_noise", "0.5", "1", "2", "3")),
    "write to a path": ("POST", "/collective_rpc", call("save_sharded_state", "/tmp/x")),
    "sleep": ("POST", "/sleep?level=2", b""),
    "pause": ("POST", "/pause", b""),
    "abort": ("POST", "/abort_requests", b"{}"),
    "other weights": ("POST", "/update_weights", b"{}"),
    "reset the cache there": ("POST", "/reset_prefix_cache", b""),
    "load from a path": ("POST", "/v1/load_lora_adapter", b'{"lora_path": "/tmp/x"}'),
    "profile to a path": ("POST", "/start_profile", b""),
    "scale": ("POST", "/scale_elastic_ep", b"{}"),
    "sagemaker": ("POST", "/invocations", b"{}"),
    "read settings": ("GET", "/server_info", b""),
    "slash": ("POST", "/sleep/", b""),
    "double slash": ("POST", "//sleep", b""),
    "another method": ("PUT", CALL, b""),
    "preflight": ("OPTIONS", CALL, b""),
}


@fault("S.server_unauthenticated")
@pytest.mark.parametrize("action", ACTIONS)
def test_a_stranger_can_do_nothing(action):
    """Unsigned, signed with another secret, for another path, and a body that was exchanged: nothing reaches vLLM or its engine."""
    method, path, body = ACTIONS[action]
    vllm = FakeVLLM()
    served = guarded(vllm)
    attempts = [
        {},
        {HEADER: "v1 1 2 3 4"},
        {"Authorization": f"Bearer {KEY}"},
        {HEADER: sign(b"another secret, also long", method, path, body)},
        signed(method, "/health", body),
        signed(method, path, body + b" "),
    ]
    for headers in attempts:
        status, content = ask(served, method, path, body, headers)
        assert status in (401, 403, 413) and (
            "signed" in content["error"] or "closed" in content["error"] or status == 413
        )
    assert vllm.reached == [] and vllm.asked == []


@fault("S.server_unauthenticated")
@pytest.mark.parametrize("path", [CALL, "/v1/completions"])
def test_what_was_heard_cannot_be_said_again(path):
    """A rollout neither: an engine that is kept busy does not reset its prefix cache."""
    vllm = FakeVLLM()
    served, body = guarded(vllm), call("qerl_noise", "0.0", "1", "2", "3")
    headers = signed("POST", path, body)
    assert ask(served, "POST", path, body, headers)[0] == 200
    status, content = ask(served, "POST", path, body, headers)
    assert status == 401 and "received before" in content["error"] and len(vllm.asked + vllm.reached) == 1


@fault("S.server_unauthenticated")
def test_a_stranger_s_bytes_are_not_read():
    async def read():
        raise AssertionError("read")

    sent = []

    async def send(message):
        sent.append(message)

    for path in (CALL, "/v1/completions"):
        scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"content-length", b"1000")]}
        asyncio.run(guarded(FakeVLLM())(scope, read, send))
    assert [message["status"] for message in sent if "status" in message] == [401, 401]


@fault("S.server_unauthenticated")
@pytest.mark.parametrize("opened", [{}, {"QERL_SERVER_OPEN_GENERATION": "1"}], ids=["closed", "open"])
def test_a_body_in_pieces_is_refused_whatever_length_it_says(opened):
    """h11 reads by Transfer-Encoding, where the limit looks at Content-Length."""
    vllm, body = FakeVLLM(), b"{}"
    headers = {"Transfer-Encoding": "chunked"} | ({} if opened else signed("POST", "/v1/completions", body))
    status, content = ask(guarded(vllm, **opened), "POST", "/v1/completions", body, headers)
    assert status == 411 and "Transfer-Encoding" in content["error"] and vllm.reached == []


@fault("S.server_unauthenticated")
def test_a_stranger_s_websocket_is_closed():
    vllm, sent = FakeVLLM(), []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message["type"])

    asyncio.run(guarded(vllm)({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send))
    assert sent == ["websocket.close"] and vllm.reached == []


@fault("S.server_unauthenticated")
@needs_vllm
def test_a_trainer_with_another_secret_is_told_what_to_do():
    from qerl_trl.rollout.client import Client

    vllm = FakeVLLM()
    with http(bridged(guarded(vllm))) as (url, _):
        client = Client(url, KEY.encode(), 5)
        assert client.call("qerl_noise", 0.5, 1, 2, 3) == [{"bytes": 1}]
        client.reset_prefix_cache()
        with told(RolloutError, url, "completions", "check the URL"):  # signed, but this vLLM has none
            client.generate([[1, 2]])
        stranger = Client(url, b"another secret, also long", 5)
        with told(RuntimeError, url, "401", f"the same {SECRET}"):
            stranger.call("qerl_noise", 0.5, 1, 2, 3)
        with told(RuntimeError, url, "401", f"the same {SECRET}"):
            stranger.generate([[1, 2]])
    assert len(vllm.asked) == 2 and vllm.reached.count("POST /v1/completions") == 1


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


# ------------------------------------------------------------------------------------------- answers that make no sense


def engine(url: str):
    from qerl_trl.rollout.server import ServerEngine
    from tests.rollout.test_handshake import policy

    model = policy()
    return ServerEngine(url, spec_of(model), model, 1)


def spec_of(model):
    from qerl_trl.rollout.spec import EngineSpec

    return EngineSpec.of(model)


def described(**changed) -> bytes:
    from tests.rollout.test_handshake import answers, policy

    (answer,) = answers(policy())
    return json.dumps({"results": [{**answer, **changed}]}).encode()


STARTS = {
    "HTML": (b"<html>hello</html>", "a JSON object", "<html>hello"),
    "truncated": (b'{"results": [{"weig', "a JSON object", "check the URL"),
    "a list": (b"[]", "a JSON object", "check the URL"),
    "empty": (b"", "a JSON object", "nothing"),
    "no results": (b"{}", "one result per rank", "check the URL"),
    "no ranks": (b'{"results": []}', "one result per rank", "check the URL"),
    "texts": (b'{"results": ["ok"]}', "one result per rank", "check the URL"),
    "another version": (b'{"results": [{"layers": 3}]}', "another version of qerl-trl", "vllm serve"),
}


@fault("S.engine_answer_garbage")
@needs_vllm
@pytest.mark.parametrize("case", STARTS)
def test_garbage_at_start_is_told(case, monkeypatch):
    monkeypatch.setenv(SECRET, KEY)
    content, *words = STARTS[case]

    def answer(method, path, headers, body):
        return 200, b'{"data": [{"id": "m"}]}' if path == "/v1/models" else content

    with http(answer) as (url, _), told(RuntimeError, url, "vllm serve", *words):
        engine(url)


@fault("S.engine_answer_garbage")
@needs_vllm
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", {"model.norm": "x"}), ("weights", {"model.norm": ["norm", 3, ["x"], 0.0]}), ("weights", 3),
        ("adapter_ranks", {"model.layers.0.mlp.up_proj": None}), ("dtype", None), ("max_model_len", "many"), ("options", []),
    ],
)  # fmt: skip
def test_a_description_of_wrong_form_is_told(field, value, monkeypatch):
    monkeypatch.setenv(SECRET, KEY)

    def answer(method, path, headers, body):
        return 200, b'{"data": [{"id": "m"}]}' if path == "/v1/models" else described(**{field: value})

    name = next(iter(value)) if isinstance(value, dict) else field
    with http(answer) as (url, _), told(RuntimeError, url, name, "expected", "vllm serve"):
        engine(url)


@fault("S.engine_answer_garbage")
@needs_vllm
@pytest.mark.parametrize("models", [b"<html>", b"{}", b'{"data": []}', b'{"data": [null]}', b"null"])
def test_what_is_no_vllm_is_told(models, monkeypatch):
    monkeypatch.setenv(SECRET, KEY)
    with http(lambda *request: (200, models)) as (url, _), told(RuntimeError, f"{url}/v1/models", "check the URL"):
        engine(url)


@fault("S.engine_answer_garbage")
@needs_vllm
def test_another_service_on_the_port_is_told(monkeypatch):
    """TRL's client waits for ever for it."""
    monkeypatch.setenv(SECRET, KEY)
    words = ("404: not here", "vllm_server_timeout", "vllm serve")
    with http(lambda *request: (404, b"not here")) as (url, _), told(ConnectionError, url, *words):
        engine(url)
    with told(ConnectionError, url, "refused", "vllm_server_base_url", "vllm serve"):
        engine(url)


NOISE, GREEDY = NoiseDraw(0.5, 1, 2, 3), Sampling(4)
CALLS = {
    "put": (lambda e: e.put_adapter({}, {}), {"results": [{"layers": 7}]}, "written on each rank"),
    "ranks": (lambda e: e.put_adapter({}, {}), {"results": [{}, {}]}, "each of 1 ranks"),
    "contents": (lambda e: e.contents(), {"results": [{"received": None, "damaged": 3}]}, "what each rank holds"),
    "noise": (lambda e: e.set_noise((), NOISE), {"results": [{"sigma_effective": None}]}, "sigma_effective"),
    "noise text": (lambda e: e.set_noise((), NOISE), {"results": ["0.5"]}, "one result per rank"),
    "put and reset": (lambda e: e.put(Update({}, {})), {"results": [{"layers": 0, "norms": 0}], "reset": "maybe"}, '"reset"'),
    "put, no reset": (lambda e: e.put(Update({}, {})), {"results": [{"layers": 0, "norms": 0}], "reset": False}, "refused to reset its prefix cache"),
    "put and noise": (lambda e: e.put(Update({}, {}), (), NOISE), {"results": [{"layers": 0, "norms": 0}], "reset": True}, "sigma_effective"),
    "draw of the contents": (lambda e: e.contents(), {"results": [{"received": "", "damaged": [], "draw": [1], "sampled": None}]}, "what each rank holds"),
    "reset": (lambda e: e.reset_prefix_cache(), {"success": "maybe"}, '"success"'),
    "no completions": (lambda e: e._complete([[1]], GREEDY), {"choices": None}, "completions with token ids"),
    "no fields": (lambda e: e._complete([[1]], GREEDY), {"choices": [{}]}, "completions with token ids"),
    "no logps": (lambda e: e._complete([[1]], GREEDY), {"choices": [CHOICE := {"prompt_token_ids": [1], "token_ids": [2], "logprobs": None}]}, "log-probabilit"),
    "too many": (lambda e: e._complete([[1]], GREEDY), {"choices": [CHOICE, CHOICE]}, "1 completions"),
    "busy": (lambda e: e._complete([[1]], GREEDY), 429, "serve this trainer alone"),
    "too large": (lambda e: e._complete([[1]], GREEDY), 413, "generation_batch_size"),
    "fails": (lambda e: e._complete([[1]], GREEDY), (500, b"no structured outputs here"), "500: no structured outputs here"),
    "gone": (lambda e: e.put_adapter({}, {}), 404, "start it with the command"),
}  # fmt: skip


@fault("S.engine_answer_garbage")
@needs_vllm
@pytest.mark.parametrize("case", CALLS)
def test_garbage_during_the_run_is_told(case, monkeypatch):
    monkeypatch.setenv(SECRET, KEY)
    monkeypatch.setattr("qerl_trl.rollout.client._WAITS", (0.0,) * 5)
    action, content, words = CALLS[case]
    healthy = [True]

    def answer(method, path, headers, body):
        if path == "/v1/models":
            return 200, b'{"data": [{"id": "m"}]}'
        if healthy[0]:
            return 200, described()
        if isinstance(content, tuple):
            return content
        return (content, b"{}") if isinstance(content, int) else (200, json.dumps(content).encode())

    with http(answer) as (url, _):
        connected = engine(url)
        healthy[0] = False
        with told(RolloutError, url, words):
            action(connected)
