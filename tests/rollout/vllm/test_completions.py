"""vLLM's own route, handler and client connection, with an engine that answers what it is told; test_engine.py has a real one."""

import asyncio
import contextlib
import math
import socket
import threading
from types import SimpleNamespace
from unittest import mock

import pytest

from qerl_trl.rollout import packed
from qerl_trl.rollout.engine import RolloutError, Sampling
from tests.rollout.asgi import KEY, guarded

pytest.importorskip("vllm")

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
    from requests.adapters import HTTPAdapter

    from qerl_trl.rollout import client as module

    engine = Engine()
    with served(vllm_application(engine)) as url:
        client = module.Client(url, KEY.encode(), 10)
        client.session.mount("http://", HTTPAdapter())  # no retries: they only delay the answer
        answers, content_of = [], module.content_of

        def watched(response, url):
            answers.append(content_of(response, url))
            return answers[-1]

        with mock.patch.object(module, "content_of", watched):
            yield engine, client, answers
        client.close()


def both(client, prompts=PROMPTS, **kwargs):
    """What comes in arrays, and in vLLM's own form; an error is its class and text."""
    found = []
    for version in (packed.VERSION, "none"):
        client.session.close()  # uvicorn closes a connection after an error
        with mock.patch.object(packed, "VERSION", version):
            try:
                found.append(client.generate(prompts, **kwargs))
            except RuntimeError as error:
                found.append((type(error), str(error)))
    return found


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("told", [[([5, 6], [-0.5, -0.125])], [([5], [-math.inf])], [([], [])]], ids=["2", "1", "0"])
def test_arrays_say_what_vllm_says(connected, n, told):
    engine, client, answers = connected
    engine.told = told
    arrays, own = both(client, n=n, max_tokens=4, generation_kwargs={"seed": 3, "ignore_eos": True})
    assert packed.FIELD in answers[0] and packed.FIELD not in answers[1]
    assert arrays == own and list(arrays) == list(own) and arrays["prompt_ids"] == PROMPTS
    without_text, with_text = engine.asked[0], engine.asked[2]
    assert not without_text.detokenize and with_text.detokenize
    with_text.detokenize = False
    assert without_text == with_text and without_text.seed == 3 and without_text.ignore_eos and without_text.n == n


def test_nan_arrives(connected):
    from qerl_trl.rollout.server import ServerEngine

    engine, client, _ = connected
    engine.told = [([5, 6], [math.nan, -0.5])]
    assert client.generate(PROMPTS)["logprobs"] == [[[None], [-0.5]]] * 2  # as TRL's client tells NaN
    link = ServerEngine.__new__(ServerEngine)
    link.client = client
    first, _ = link._complete(PROMPTS, Sampling(4))
    assert first.tokens == [5, 6] and math.isnan(first.logps[0]) and first.logps[1] == -0.5


@pytest.mark.parametrize(
    ("kwargs", "further"),
    [
        ({"logprobs": 1}, {}),
        ({"logprobs": None}, {}),
        ({}, {"echo": True}),
        ({}, {"prompt_logprobs": 0}),
        ({}, {"return_token_ids": False}),
    ],
    ids=str,
)
def test_what_the_arrays_do_not_hold_comes_as_ever(connected, kwargs, further):
    engine, client, answers = connected
    arrays, own = both(client, **kwargs, generation_kwargs=further)
    assert arrays == own
    assert not any(packed.FIELD in answer for answer in answers)
    assert all(params.detokenize for params in engine.asked)


@pytest.mark.parametrize("more", [{"stream": True}, {"use_beam_search": True}, {"logprob_token_ids": [1]}], ids=str)
def test_these_fit_into_no_arrays(more):
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    from qerl_trl.rollout.vllm.completions import _fits

    asked = {"prompt": PROMPTS, "logprobs": 0, "return_token_ids": True}
    assert _fits(CompletionRequest(**asked)) and not _fits(CompletionRequest(**asked, **more))


def test_stop_strings_are_still_looked_for(connected):
    engine, client, answers = connected
    further = {"stop": ["."], "stop_token_ids": [7], "structured_outputs": {"regex": "a+"}}
    arrays, own = both(client, generation_kwargs=further)
    assert arrays == own and packed.FIELD in answers[0]
    assert engine.asked[0] == engine.asked[2] and engine.asked[0].detokenize and engine.asked[0].stop == ["."]


@pytest.mark.parametrize("broken", ["crashed", "refused", "unfinished", "parameter"])
def test_an_error_is_told_as_ever(connected, broken):
    engine, client, _ = connected
    kwargs = {}
    if broken in ("crashed", "refused"):
        engine.error = RuntimeError("out of memory") if broken == "crashed" else ValueError("the prompt is too long")
    elif broken == "unfinished":
        engine.finish = "error"
    else:
        kwargs = {"temperature": -1.0}
    arrays, own = both(client, **kwargs)
    assert arrays == own and arrays[0] is RolloutError and "/v1/completions answered" in arrays[1]
    assert broken != "refused" or "the prompt is too long" in arrays[1]


def test_an_answer_that_is_damaged_is_told(connected):
    _, client, _ = connected
    with (
        mock.patch.object(packed, "unpack", side_effect=ValueError("5 values")),
        pytest.raises(RolloutError, match=r"something else than completions.*5 values"),
    ):
        client.generate(PROMPTS)


def test_a_client_that_goes_away_ends_its_request(connected):
    import requests

    engine, client, _ = connected
    engine.waits = True
    post = client.session.post
    with (
        mock.patch.object(client.session, "post", lambda *args, **kwargs: post(*args, timeout=0.5, **kwargs)),
        pytest.raises(requests.RequestException),
    ):
        client.generate(PROMPTS)
    assert engine.cancelled.wait(10)


def test_a_stranger_gets_none(connected):
    import requests

    engine, client, _ = connected
    answer = requests.post(
        client.base_url + "/v1/completions",
        json={"prompt": PROMPTS, "logprobs": 0, "return_token_ids": True},
        headers={packed.HEADER: packed.VERSION},
        timeout=10,
    )
    assert answer.status_code == 401 and engine.asked == []


def test_the_handler_is_exchanged_once_and_only_vllms():
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    from qerl_trl.rollout.vllm.completions import HANDLER, PackedServing, install

    handler = OpenAIServingCompletion.__new__(OpenAIServingCompletion)
    handler.models = object()
    state = SimpleNamespace(**{HANDLER: handler})
    install(state)
    own = getattr(state, HANDLER)
    assert type(own) is PackedServing and own.models is handler.models and type(handler) is OpenAIServingCompletion
    install(state)
    assert getattr(state, HANDLER) is own
    for other in (SimpleNamespace(), SimpleNamespace(**{HANDLER: None}), None):
        install(other)
