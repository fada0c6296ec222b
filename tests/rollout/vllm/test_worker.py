"""The worker extension and the endpoint in front of a server; completions by vLLM's own route, with an engine that
answers what it is told.

Updates are in tests/faults/test_r4_server.py, a real server in tests/e2e/engine/test_server.py.
"""

import asyncio
import contextlib
import json
import math
import os
import socket
import struct
import threading
from types import SimpleNamespace

import pytest
import requests
import torch

from qerl_trl.rollout.engine import CALL, RolloutError
from qerl_trl.rollout.server import Client
from qerl_trl.rollout.weights import SharedMemory
from tests.rollout.asgi import KEY, FakeVLLM, allowed, ask, guarded

pytest.importorskip("vllm")

from qerl_trl.rollout.vllm.worker import QeRLWorkerExtension


def test_a_refusal_is_an_answer():
    """An exception would end a tensor-parallel engine."""
    worker = QeRLWorkerExtension()
    worker.device, worker._qerl_rollout_state = torch.device("cpu"), object()
    update = {"layout": json.dumps([["norm", "x", "float32", [4]]]), "memory": f"qerl-{'0' * 32}", "checksum": ""}
    for changed, words in (
        ({}, "No such file"),
        ({"memory": "../../etc/passwd"}, "No such file"),
        ({"layout": "[1]"}, "TypeError"),
        ({"layout": "no JSON"}, "Error"),
    ):
        text = json.dumps({"update": update | changed, "noisy": [], "draw": None})
        assert words in worker.qerl_put(text)["error"]
    assert "TypeError" in worker.qerl_put()["error"]


def test_engines_side_by_side_are_refused():
    """vLLM passes on what the first one answers: an update that another one refused was taken for applied."""
    worker = QeRLWorkerExtension()
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2))
    assert "--data-parallel-size 2 makes 2 engines" in worker.qerl_describe("")["error"]


# --- the endpoint ---


def call(method="qerl_put", args=("{}",)) -> bytes:
    return json.dumps({"method": method, "args": args}).encode()


@pytest.mark.parametrize("parts", [1, 7])
def test_calls_of_the_trainer_reach_the_engine(parts):
    vllm = FakeVLLM()
    served = guarded(vllm)
    for method in ("qerl_contents", "qerl_put"):
        answer = ask(served, "POST", CALL, call(method), allowed(), parts)
        assert answer == (200, {"results": [{"run": "1"}], "reset": True})
    assert vllm.asked == [("qerl_contents", "{}"), ("qerl_put", "{}"), ("reset",)] and vllm.reached == []


def test_vllms_own_paths_are_the_trainers_too():
    vllm = FakeVLLM()
    assert ask(guarded(vllm), "POST", "/v1/completions", b"{}", allowed())[0] == 200
    assert vllm.reached == ["POST /v1/completions"] and vllm.bodies == [b"{}"]


def test_a_failure_in_the_engine_is_reported():
    vllm = FakeVLLM(RuntimeError("EngineCore died"))
    status, content = ask(guarded(vllm), "POST", CALL, call(), allowed())
    assert (status, content["error"]) == (400, "RuntimeError: EngineCore died") and len(vllm.asked) == 1


@pytest.mark.parametrize("parts", [1, 7])
def test_an_update_from_another_host(parts):
    served, cpu = guarded(FakeVLLM()), torch.device("cpu")
    names = set()
    for _ in range(2):
        data = os.urandom(3 * 2**16)
        status, answer = ask(served, "PUT", CALL, data, allowed() | {"Content-Length": str(len(data))}, parts)
        assert status == 200 and bytes(SharedMemory(len(data), cpu, answer["memory"]).data.numpy()) == data
        names.add(answer["memory"])
    assert len(names) == 1  # the workers have mapped it
    assert ask(served, "PUT", CALL, data, {"Content-Length": str(len(data))})[0] == 401


def test_without_a_secret_the_server_does_not_start():
    with pytest.raises(RuntimeError, match="export QERL_SERVER_SECRET="):
        guarded(FakeVLLM(), "")


# --- completions ---

PROMPTS = [[1, 2, 3], [4]]


class Engine:
    """Each prompt gets the completions `told` (token ids and log-probabilities); keeps how it was asked."""

    errored = False

    def __init__(self) -> None:
        self.told = [([5, 6], [-0.5, -0.25])]
        self.finish, self.error, self.waits = "length", None, False
        self.asked: list = []
        self.cancelled = threading.Event()

    def check_admission(self, n):
        pass

    async def is_tracing_enabled(self):
        return False

    async def generate(self, prompt, params, request_id, **kwargs):
        from vllm.logprobs import Logprob
        from vllm.outputs import CompletionOutput, RequestOutput

        self.asked.append(params)
        if self.error is not None:
            raise self.error
        try:
            await asyncio.sleep(60 if self.waits else 0)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        outputs = [
            CompletionOutput(
                index=i,
                text="text" if params.detokenize else "",
                token_ids=tokens,
                cumulative_logprob=0.0,
                logprobs=[
                    {token: Logprob(logp, 1, "x")} | ({} if not params.logprobs else {99: Logprob(-3.0, 2, "y")})
                    for token, logp in zip(tokens, logps, strict=True)
                ],
                finish_reason=self.finish,
            )
            for i, (tokens, logps) in enumerate(self.told * params.n)
        ]
        ids, of_prompt = prompt["prompt_token_ids"], None
        if params.prompt_logprobs is not None:
            of_prompt = [None, *({token: Logprob(-1.0, 1, "x")} for token in ids[1:])]
        yield RequestOutput(request_id, "prompt", ids, of_prompt, outputs, finished=True)


def _tell_errors(app):
    """As vLLM does."""
    try:
        from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    except ModuleNotFoundError:  # of vLLM before 0.28
        from fastapi.exceptions import HTTPException, RequestValidationError
        from vllm.entrypoints.openai import api_server as server

        app.exception_handler(HTTPException)(server.http_exception_handler)
        app.exception_handler(RequestValidationError)(server.validation_exception_handler)
        app.exception_handler(Exception)(server.exception_handler)
    else:
        init_exception_handler(app)


def vllm_application(engine):
    """vLLM's route and errors, and its handler with as much of the server around it as completions need."""
    from fastapi import FastAPI
    from vllm.entrypoints.openai.completion.api_router import attach_router
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    handler = OpenAIServingCompletion.__new__(OpenAIServingCompletion)
    models = SimpleNamespace(lora_requests={}, model_name=lambda *_: "model", is_base_model=lambda name: True)

    async def render(request):
        return [{"type": "token", "prompt_token_ids": ids} for ids in request.prompt]

    vars(handler).update(
        engine_client=engine,
        models=models,
        online_renderer=SimpleNamespace(render_completion=render),
        renderer=SimpleNamespace(tokenizer=None),
        model_config=SimpleNamespace(max_model_len=64, is_encoder_decoder=False),
        request_logger=None,
        default_sampling_params={},
        override_max_tokens=None,
        return_tokens_as_token_ids=False,
        enable_prompt_tokens_details=False,
        enable_force_include_usage=False,
        enable_per_request_metrics=False,
        has_kv_connector=False,
        system_fingerprint=None,
        _is_model_supported=lambda name: True,
    )
    app = FastAPI()
    attach_router(app)
    _tell_errors(app)
    app.state.openai_serving_completion, app.state.args = handler, SimpleNamespace(log_error_stack=False)
    app.get("/health")(lambda: None)
    app.get("/v1/models")(lambda: {"data": [{"id": "model"}]})
    return app


@contextlib.contextmanager
def served(app):
    """`app` behind qerl-trl's endpoint, on a loopback port."""
    import uvicorn
    from starlette.middleware import Middleware

    app.user_middleware.append(Middleware(lambda inner: guarded(inner)))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join(10)


@pytest.fixture
def connected():
    """The engine, a client of its server, and the fields of the answers that came."""
    engine = Engine()
    with served(vllm_application(engine)) as url:
        client = Client(url, KEY, 10)
        client.session.get_adapter(url).max_retries = 0  # they only delay the answer
        yield engine, client
        client.session.close()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("logp", [-0.5, -1.2345678e-7, struct.unpack("f", b"\x01\x02\x03\xbf")[0]])
def test_token_ids_and_log_probabilities_come_to_the_last_bit(connected, n, logp):
    engine, client = connected
    engine.told = [([5, 6], [logp, -0.25])]
    output = client.generate(PROMPTS, n=n, max_tokens=4, generation_kwargs={"seed": 3, "ignore_eos": True})
    assert output["prompt_ids"] == PROMPTS and output["completion_ids"] == [[5, 6]] * 2 * n
    assert output["logprobs"] == [[[logp], [-0.25]]] * 2 * n
    assert all((asked.seed, asked.ignore_eos, asked.n) == (3, True, n) for asked in engine.asked)


def test_nan_is_an_error_of_the_server(connected):
    engine, client = connected
    engine.told = [([5, 6], [math.nan, -0.5])]
    with pytest.raises(RolloutError, match="/v1/completions answered 400"):
        client.generate(PROMPTS)


@pytest.mark.parametrize("broken", ["crashed", "refused", "unfinished", "parameter"])
def test_an_error_is_told(connected, broken):
    engine, client = connected
    kwargs = {}
    if broken in ("crashed", "refused"):
        engine.error = RuntimeError("out of memory") if broken == "crashed" else ValueError("the prompt is too long")
    elif broken == "unfinished":
        engine.finish = "error"
    else:
        kwargs = {"temperature": -1.0}
    with pytest.raises(RolloutError, match="/v1/completions answered") as raised:
        client.generate(PROMPTS, **kwargs)
    assert broken != "refused" or "the prompt is too long" in str(raised.value)


def test_a_client_that_goes_away_ends_its_request(connected):
    engine, client = connected
    engine.waits = True
    post = client.session.post
    client.session.post = lambda *args, **kwargs: post(*args, timeout=0.5, **kwargs)
    with pytest.raises(requests.RequestException):
        client.generate(PROMPTS)
    assert engine.cancelled.wait(10)
