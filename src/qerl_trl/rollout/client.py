"""The trainer's end of the connection to a rollout server: signs every request, and tells what a refusal or an odd answer means."""

import contextlib
import json
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.auth import AuthBase, HTTPBasicAuth
from requests.utils import get_netrc_auth
from trl.generation.vllm_client import VLLMClient

from . import packed
from .engine import Completion, RolloutError, Seeds
from .signature import HEADER, SECRET, sign
from .wire import CALL, COMPLETIONS, MESSAGE_TIMEOUT, RESET

#: what to do about an answer, by its status
_REMEDIES = {
    401: f"Start server and trainer with the same {SECRET}, and keep their clocks within five minutes",
    403: "Start the server with the command of this version of qerl-trl",
    404: "It was not started with qerl-trl's endpoint: start it with the command that the trainer prints",
    405: "It was not started with qerl-trl's endpoint: start it with the command that the trainer prints",
    411: "Something between trainer and server takes the length off requests: connect them directly",
    413: "Send fewer prompts at a time (generation_batch_size), or raise the limit of the proxy in between",
    429: "Others are using this server: let it serve this trainer alone",
    500: "The server's log says more",
    502: "The server behind the proxy does not answer: see its log",
    503: "The server is not ready: see its log",
}
_SHOWN = 300
#: seconds before a request is repeated whose connection broke, or whose answer was one of `_TROUBLE`, that one no more than `_TROUBLED` times
_WAITS = (0.0, 4.0, 8.0, 16.0, 32.0)
_TROUBLE, _TROUBLED = (500, 502, 503), 3
#: requests at a time where each prompt has a seed of its own
CONCURRENCY = 256


class Signature(AuthBase):
    """Signs the requests of a session to the server at `url`; a password for a proxy before it comes from ~/.netrc, as without this one."""

    def __init__(self, secret: bytes, url: str) -> None:
        self._secret, self._before = secret, urlsplit(url).path.rstrip("/")

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        body = request.body or b""
        data = body.encode() if isinstance(body, str) else bytes(body)
        url = urlsplit(request.url or "")  # whose host is in lower case, however the user writes it
        target = url.path.removeprefix(self._before) + (f"?{url.query}" if url.query else "")
        request.headers[HEADER] = sign(self._secret, request.method or "", target, data)
        if (found := get_netrc_auth(request.url or "")) is not None:
            HTTPBasicAuth(*found)(request)
        return request


class AskingAgain(HTTPAdapter):
    """Asks again after what is usually over soon, as TRL's session does; each time with a signature of its own, which is good once and for five
    minutes. What the last answer says is what the user is told."""

    def __init__(self, signature: Signature) -> None:
        super().__init__(pool_maxsize=CONCURRENCY)
        self._signature = signature

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        for asked, wait in enumerate(_WAITS, 1):
            try:
                response = super().send(request, *args, **kwargs)
            except requests.ConnectionError:
                pass
            else:
                if response.status_code not in _TROUBLE or asked > _TROUBLED:
                    return response
                response.close()
            time.sleep(wait)
            self._signature(request)
        return super().send(request, *args, **kwargs)


class Client(VLLMClient):
    """TRL's client, whose requests are signed and whose answers are checked.

    Args:
        url: base URL of the server.
        secret: the server's.
        timeout: seconds to wait for the server to answer at all.

    Raises:
        `ConnectionError`: no server answers.
        [`RolloutError`]: what answers is no vLLM server.
    """

    def __init__(self, url: str, secret: bytes, timeout: float) -> None:
        url = url.rstrip("/")
        with understood(f"{url}/v1/models", "the served model's name"):
            super().__init__(base_url=url, connection_timeout=timeout)
        #: answer of `qerl_describe` that the trainer was compared with
        self.description: Mapping[str, Any] = {}
        signature = Signature(secret, self.base_url)
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, AskingAgain(signature))
        # our calls ask once, each by a connection of its own: between two of a step the server may have closed one that nobody used
        self.control = requests.Session()
        self.control.headers["Connection"] = "close"
        self.session.auth = self.control.auth = signature

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 1.0) -> None:
        """Wait until the server answers; TRL's waits for ever for one that hangs, or is no vLLM.

        Raises:
            `ConnectionError`: not within `total_timeout` seconds; says what came instead.
        """
        end = time.monotonic() + total_timeout
        while True:
            try:
                response = requests.get(f"{self.base_url}/health", timeout=max(5.0, end - time.monotonic()))
                if response.status_code == 200:
                    return
                found = f"/health answers {response.status_code}: {response.text[:_SHOWN].strip() or 'nothing'}"
            except requests.RequestException as error:
                found = f"{type(error).__name__}: {error}"
            if time.monotonic() >= end:
                raise ConnectionError(
                    f"No vLLM server answers at {self.base_url} within vllm_server_timeout={total_timeout:g} s ({found}). Start one, or "
                    "correct vllm_server_base_url."
                )
            time.sleep(retry_interval)

    def call(self, method: str, *args: Any, part: bytes | memoryview = b"", reset: bool = False) -> list[dict]:
        """One method of the worker extension; its answer from every rank.

        Args:
            part: bytes, which the method gets as its last argument.
            reset: whether the server has to forget its cached attention states afterwards.

        Raises:
            [`RolloutError`]: the server refused, with its words, or its answer makes no sense.
        """
        line = json.dumps({"method": method, "args": [str(arg) for arg in args], "reset": reset})
        content = self._control(CALL, b"".join((line.encode(), b"\n", part)))
        answers = content.get("results")
        if not isinstance(answers, list) or not answers or not all(isinstance(answer, dict) for answer in answers):
            raise odd(f"{self.base_url}{CALL}", f"one result per rank of {method}", f"{content}")
        refusals = [answer["error"] for answer in answers if "error" in answer]
        if refusals:
            raise RolloutError(f"vLLM refused {method}: {refusals[0]}")
        if reset:
            self._check_reset(CALL, content, "reset")
        return answers

    def reset_prefix_cache(self) -> None:
        """Let the server forget its cached attention states.

        Raises:
            [`RolloutError`]: it did not.
        """
        self._check_reset(RESET, self._control(RESET, b""), "success")

    def _check_reset(self, path: str, content: Mapping[str, Any], field: str) -> None:
        if not isinstance(content.get(field), bool):
            raise odd(f"{self.base_url}{path}", f'a field "{field}"', f"{content}")
        if not content[field]:
            raise RolloutError(
                f"The server at {self.base_url} refused to reset its prefix cache (requests are still running), so the next rollout would "
                "mix the new adapter with attention states of the old one. Let nobody else use this server; after a rollout that this process gave up, "
                "wait until the server has ended it."
            )

    def _control(self, path: str, body: bytes) -> dict[str, Any]:
        url = self.base_url + path
        return content_of(self.control.post(url, data=body, timeout=MESSAGE_TIMEOUT, allow_redirects=False), url)

    # ------------------------------------------------------------------ TRL's, checked

    def _get(self, url: str, **kwargs: Any) -> dict:
        return content_of(self.session.get(url, **{"timeout": MESSAGE_TIMEOUT, **kwargs}), url)

    def _post(self, url: str, **kwargs: Any) -> dict:
        if url != self.base_url + COMPLETIONS:
            return content_of(self.session.post(url, **kwargs), url)
        asked = kwargs.get("json") or {}
        if not isinstance(asked.get("seed"), list):
            return self._completions(url, **kwargs)
        # a request has one seed for all of its prompts
        each = [asked | {"prompt": [p], "seed": seed} for p, seed in zip(asked["prompt"], asked["seed"], strict=True)]
        contents = at_once(lambda part: self._completions(url, **kwargs | {"json": part}), each)
        return {"choices": [choice for content in contents for choice in content["choices"]]}

    def _completions(self, url: str, **kwargs: Any) -> dict:
        headers = {packed.HEADER: packed.VERSION}
        content = content_of(self.session.post(url, headers=headers, **kwargs), url)
        if packed.FIELD in content:
            prompts, completions = packed.unpack(content[packed.FIELD])
            each = len(completions) // max(1, len(prompts))
            # TRL takes log-probabilities apart token by token, and hands on token ids as they are: they go together, to `generate`
            content["choices"] = [
                {"prompt_token_ids": prompts[i // each], "token_ids": completion, "logprobs": None}
                for i, completion in enumerate(completions)
            ]
        return content

    def get_server_info(self) -> dict:
        """The part of vLLM's settings that TRL's trainer looks at, without the development mode that serves them."""
        return {"model_config": {"logprobs_mode": self.description["logprobs_mode"]}}

    def generate(self, prompts: list, *args: Any, **kwargs: Any) -> dict:
        """As TRL's. A `seed` in `generation_kwargs` may be a list, one for each prompt, or [`Seeds`]; completion number i of a prompt is drawn with
        its seed + i, as vLLM has it. With pictures, which TRL sends in requests without one, [`Seeds`] are left out.

        Raises:
            [`RolloutError`]: the server refused, or its answer makes no sense.
        """
        further = dict(kwargs.get("generation_kwargs") or {})
        if isinstance(seeds := further.get("seed"), Seeds):
            further |= {"seed": seeds.of(len(prompts)) if kwargs.get("features") is None else None}
            kwargs["generation_kwargs"] = {key: value for key, value in further.items() if value is not None}
        url = self.base_url + COMPLETIONS
        with understood(url, "completions with token ids and log-probabilities"):
            output = super().generate(prompts, *args, **kwargs)
            if isinstance(output["completion_ids"][0], Completion):
                output = _as_trl(output)
        found, wanted = len(output["completion_ids"]), len(prompts) * kwargs.get("n", 1)
        if found != wanted:
            raise odd(url, f"{wanted} completions", f"{found} completions with token ids and log-probabilities")
        return output

    def chat(self, messages: list, *args: Any, **kwargs: Any) -> dict:
        """As TRL's; raises as `generate` does."""
        with understood(f"{self.base_url}/v1/chat/completions", "completions with token ids and log-probabilities"):
            return super().chat(messages, *args, **kwargs)

    def close(self) -> None:
        """Close the connections; the server keeps running."""
        self.control.close()
        self.session.close()


def at_once(call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """`call` of each item, of several at a time in threads of which neither a limit of time nor the interpreter's end waits for one that hangs.

    Raises:
        the first error of a call; what has not begun then never does.
    """
    left, answers = deque(range(len(items))), dict[int, Any]()
    done = queue.SimpleQueue[tuple[int, Any, BaseException | None]]()

    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                index = left.popleft()
                try:
                    done.put((index, call(items[index]), None))
                except BaseException as error:
                    done.put((index, None, error))

    try:
        for _ in range(min(CONCURRENCY, len(items))):
            threading.Thread(target=work, daemon=True).start()
        while len(answers) < len(items):
            try:
                index, answer, error = done.get(timeout=1.0)  # a limit of time (deadline.py) acts between two turns
            except queue.Empty:
                continue
            if error is not None:
                raise error
            answers[index] = answer
    finally:
        left.clear()
    return [answers[index] for index in range(len(items))]


def _as_trl(output: dict[str, Any]) -> dict[str, Any]:
    """What TRL's client would have returned: one log-probability per token, None for NaN."""
    completions = output["completion_ids"]
    return output | {
        "completion_ids": [c.tokens for c in completions],
        "logprobs": [[[None if math.isnan(logp) else logp] for logp in c.logps] for c in completions],
        "logprob_token_ids": [[[token] for token in c.tokens] for c in completions],
    }


def content_of(response: requests.Response, url: str) -> dict[str, Any]:
    """The JSON object of an answer.

    Raises:
        [`RolloutError`]: a refusal, with the server's words and what to do; or no JSON object.
    """
    if response.status_code != 200:
        remedy = _REMEDIES.get(response.status_code, "See the server's log")
        raise RolloutError(
            f"{url} answered {response.status_code}: {response.text[:_SHOWN].strip() or 'nothing'}. {remedy}."
        )
    try:
        content = response.json()
    except ValueError as error:
        raise odd(url, "a JSON object", response.text or "nothing") from error
    if not isinstance(content, dict):
        raise odd(url, "a JSON object", response.text)
    return content


@contextlib.contextmanager
def understood(url: str, expected: str) -> Iterator[None]:
    """What goes wrong in the block while an answer is read is told by its URL and what was expected of it."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, requests.RequestException):
            raise
        raise odd(url, expected, f"{type(error).__name__}: {error}") from error


def odd(url: str, expected: str, found: str) -> RolloutError:
    """The error about an answer that makes no sense."""
    return RolloutError(
        f"{url} answered something else than {expected}: {found[:_SHOWN]}. What answers there is no rollout server of this qerl-trl, or "
        "a proxy in between changes its answers: check the URL, and start the server with the command that the trainer prints."
    )
