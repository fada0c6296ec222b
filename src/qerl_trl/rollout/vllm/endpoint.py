"""What a rollout server lets through: an ASGI middleware for `vllm serve --middleware`, in front of everything that vLLM serves.

The trainer's own calls end here (`CALL`, `RESET`): they reach the engine without vLLM's development mode, which is not needed and whose
paths are closed also where it is on. What is neither ours, nor generation, nor a harmless question is refused. Imports nothing of vLLM before
the trainer first asks for completions.

| path | who |
|---|---|
| `/health`, `/v1/models` and the other `STATUS` | everybody |
| generation | signed (rollout/signature.py), each signature once; everybody where `QERL_SERVER_OPEN_GENERATION=1` |
| `CALL`: methods of the worker extension, and then the prefix cache where asked; `RESET`: that alone | signed, each signature once |
| everything else | nobody |
"""

import asyncio
import hashlib
import hmac
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ..signature import HEADER, SignatureError, Verifier, secret
from ..wire import CALL, COMPLETIONS, MAX_MESSAGE, MESSAGE_TIMEOUT, RESET

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

logger = logging.getLogger("uvicorn.error")  # ours is not shown by vLLM

STATUS = frozenset(("/health", "/ping", "/version", "/load", "/metrics", "/metrics/", "/v1/models"))
GENERATION = frozenset(
    (
        COMPLETIONS,
        "/v1/chat/completions",
        "/v1/chat/completions/render",
        "/inference/v1/generate",
        "/tokenize",
        "/detokenize",
    )
)
OPEN = "QERL_SERVER_OPEN_GENERATION"
#: bytes of a signed request for generation: a rollout's prompts, all at once
MAX_PROMPTS = 512 * 2**20
#: bytes of an unsigned one, how many of them may be open, and seconds that one may take to arrive
MAX_OPEN_PROMPTS, MAX_OPEN_REQUESTS, OPEN_BODY_TIMEOUT = 16 * 2**20, 64, 60.0
_METHOD = re.compile(r"qerl_[a-z_]+", re.ASCII)


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class RolloutEndpoint:
    """See the module.

    Args:
        app: vLLM's application.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self._open = os.environ.get(OPEN) == "1"
        self._strangers = 0  # unsigned requests for generation that are under way
        self._verifier: Verifier | None = None
        self._problem = ""
        try:
            self._verifier = Verifier(secret())
        except RuntimeError as error:
            self._problem = str(error)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            if self._verifier is None:  # ends the start of the server
                await receive()
                await send({"type": "lifespan.startup.failed", "message": self._problem})
                return
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "closed on a rollout server"})
            return
        try:
            await self._serve(scope, receive, send)
        except Refusal as refusal:
            logger.warning("Refused %s %.200r: %s", scope["method"], scope["path"], refusal)
            await _answer(send, refusal.status, {"error": str(refusal)})

    async def _serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if self._verifier is None:
            raise Refusal(503, self._problem)
        if method == "GET" and path in STATUS:
            await self.app(scope, receive, send)
        elif method == "POST" and path in (CALL, RESET):
            body = await self._signed(scope, receive, MAX_MESSAGE)
            answer = await self._call(scope, body) if path == CALL else {"success": await self._reset(scope)}
            await _answer(send, 200, answer)
        elif method == "POST" and path in GENERATION:
            if self._open and not _headers(scope, HEADER):
                await self._stranger(scope, receive, send)
            else:
                body = await self._signed(scope, receive, MAX_PROMPTS)
                if path == COMPLETIONS:
                    _pack(scope)
                await self.app(scope, _again(bytes(body), receive), send)
        else:
            raise Refusal(403, f"{method} {path[:200]} is closed on a rollout server of qerl-trl.")

    async def _signed(self, scope: MutableMapping[str, Any], receive: Receive, limit: int) -> bytearray:
        """The body of a signed request; the signature is checked before anything is read.

        Raises:
            [`Refusal`]: not signed, too large, or another body than was signed.
        """
        assert self._verifier is not None
        query = scope.get("query_string", b"").decode("latin-1")
        target = scope["path"] + (f"?{query}" if query else "")
        given = _headers(scope, HEADER)
        try:
            digest = self._verifier.check(given[0] if len(given) == 1 else "", scope["method"], target)
        except SignatureError as error:
            raise Refusal(401, f"Not signed by this server's trainer: {error}.") from error
        body = await _read(receive, _length(scope, limit))
        large = len(body) > 2**20
        found = (
            await asyncio.to_thread(hashlib.sha256, body) if large else hashlib.sha256(body)
        )  # others are served meanwhile
        if not hmac.compare_digest(found.hexdigest(), digest):
            raise Refusal(401, "Not signed by this server's trainer: the body is another than the one that was signed.")
        return body

    async def _stranger(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        length = _length(scope, MAX_OPEN_PROMPTS)
        if self._strangers >= MAX_OPEN_REQUESTS:
            raise Refusal(
                429, f"{self._strangers} unsigned requests are under way, which is the limit: try again later."
            )
        self._strangers += 1
        try:
            try:
                body = await asyncio.wait_for(_read(receive, length), OPEN_BODY_TIMEOUT)
            except TimeoutError as error:
                raise Refusal(408, f"The request did not come whole within {OPEN_BODY_TIMEOUT:g} s.") from error
            await self.app(scope, _again(bytes(body), receive), send)
        finally:
            self._strangers -= 1

    async def _call(self, scope: MutableMapping[str, Any], body: bytearray) -> dict[str, Any]:
        """One method of the worker extension, on every rank. What follows the first line is its last argument, as bytes."""
        end = body.find(b"\n")
        line = body if end < 0 else body[:end]
        part = bytes(memoryview(body)[len(line) + 1 :])
        try:
            asked = json.loads(line)
            method, args, reset = asked["method"], asked["args"], asked.get("reset", False)
            well_formed = type(reset) is bool and _METHOD.fullmatch(method) and all(type(arg) is str for arg in args)
            args = [*args, part] if part else args
        except (ValueError, KeyError, TypeError) as error:
            raise Refusal(
                400, f"Expected a method and its args as a line of JSON: {type(error).__name__}: {error}."
            ) from error
        if not well_formed:
            raise Refusal(
                403,
                f"{method!r} is none of the worker extension's methods, its args are no list of texts, or reset is no yes or no.",
            )
        engine = _engine(scope)
        try:
            results = await engine.collective_rpc(method=method, timeout=MESSAGE_TIMEOUT, args=tuple(args))
        except Exception as error:
            logger.exception("%s failed", method)
            raise Refusal(500, f"{method} failed in the engine: {type(error).__name__}: {error}") from error
        return {"results": results, **({"reset": await self._reset(scope)} if reset else {})}

    async def _reset(self, scope: MutableMapping[str, Any]) -> bool:
        engine = _engine(scope)
        try:
            # with what a connector keeps elsewhere (--kv-offloading-size, LMCache), which is found by tokens alone too
            return await engine.reset_prefix_cache(reset_connector=True) is not False
        except Exception as error:
            logger.exception("resetting the prefix cache failed")
            raise Refusal(500, f"resetting the prefix cache failed: {type(error).__name__}: {error}") from error


def _engine(scope: MutableMapping[str, Any]) -> Any:
    """vLLM's engine client, where each of its own endpoints finds it."""
    engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    if engine is None:
        raise Refusal(503, "This vLLM has no engine where qerl-trl looks for it (app.state.engine_client).")
    return engine


def _pack(scope: MutableMapping[str, Any]) -> None:
    """Let vLLM answer with arrays where it is asked for them, from now on (completions.py)."""
    from .completions import install

    install(getattr(scope.get("app"), "state", None))


def _headers(scope: MutableMapping[str, Any], name: str) -> list[str]:
    wanted = name.lower().encode()
    return [value.decode("latin-1") for key, value in scope["headers"] if key == wanted]


def _length(scope: MutableMapping[str, Any], limit: int) -> int:
    """How long a body says that it is. Refused: it does not say it, or is too long."""
    given = _headers(scope, "Content-Length")
    if _headers(scope, "Transfer-Encoding"):
        raise Refusal(411, "The request comes in pieces (Transfer-Encoding), whatever its Content-Length says.")
    if len(given) != 1 or not re.fullmatch(r"\d{1,15}", given[0], re.ASCII):
        raise Refusal(411, "The request does not say how long it is (Content-Length).")
    if int(given[0]) > limit:
        raise Refusal(413, f"The request has {given[0]} bytes, more than the {limit} that are allowed.")
    return int(given[0])


async def _read(receive: Receive, limit: int) -> bytearray:
    """The body of a request that says that it has `limit` bytes. Refused: it ends too early, or has more."""
    body, length = bytearray(limit), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "The connection ended before the request did.")
        piece = message.get("body", b"")
        length += len(piece)
        if length > len(body):
            raise Refusal(413, f"The request has more than the {len(body)} bytes that it says.")
        body[length - len(piece) : length] = piece  # what grew piece by piece would be copied again and again
        if not message.get("more_body", False):
            break
    del body[length:]
    return body


def _again(body: bytes, receive: Receive) -> Receive:
    """A `receive` that hands out `body` once, then what comes after it."""
    waiting = [body]

    async def replay() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replay


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
