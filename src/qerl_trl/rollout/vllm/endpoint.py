"""In front of a rollout server: an ASGI middleware (`vllm serve --middleware`) that asks for the trainer's secret.

Open to everybody are `/health` and `/metrics`. With the secret come vLLM's own paths, and two for the trainer: `CALL` runs a method of the
worker extension on every rank and resets the prefix cache, `LISTEN` opens the port for updates from another host (transport.py).
"""

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ..transport import Receiver, is_allowed, secret
from ..wire import CALL, LISTEN, MESSAGE_TIMEOUT

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

logger = logging.getLogger("uvicorn.error")  # ours is not shown by vLLM


class RolloutEndpoint:
    """See the module; `app` is vLLM's application."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app, self._secret = app, secret()
        self._receiver: Receiver | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope.get("method"), scope.get("path")
        if scope["type"] == "lifespan" or (method == "GET" and path in ("/health", "/metrics", "/metrics/")):
            await self.app(scope, receive, send)
        elif not is_allowed(dict(scope["headers"]).get(b"authorization", b"").decode("latin-1"), self._secret):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await _answer(send, 401, {"error": "This rollout server takes requests of its trainer only."})
        elif method == "POST" and path in (CALL, LISTEN):
            try:
                await _answer(send, 200, await self._call(scope, receive) if path == CALL else self._listen(scope))
            except Exception as error:
                logger.exception("%s failed", path)
                await _answer(send, 400, {"error": f"{type(error).__name__}: {error}"})
        else:
            await self.app(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        message = await receive()
        body = message.get("body", b"")
        while message.get("more_body"):
            message = await receive()
            body += message.get("body", b"")
        asked, engine, answer = json.loads(body), scope["app"].state.engine_client, {}
        if method := asked["method"]:
            if not method.startswith("qerl_"):
                raise ValueError(f"{method!r} is not a method of the worker extension.")
            results = await engine.collective_rpc(method=method, timeout=MESSAGE_TIMEOUT, args=tuple(asked["args"]))
            answer["results"] = results
        if asked["reset"]:
            # with what a connector keeps elsewhere (--kv-offloading-size, LMCache)
            answer["reset"] = await engine.reset_prefix_cache(reset_connector=True) is not False
        if self._receiver is not None and self._receiver.memory is not None:
            self._receiver.memory.unlink()  # the workers have mapped it
        return answer

    def _listen(self, scope: Scope) -> dict[str, int]:
        if self._receiver is None:
            options = scope["app"].state.args
            self._receiver = Receiver(scope["server"][0], self._secret, options.ssl_certfile, options.ssl_keyfile)
        self._receiver.memory = None  # of an earlier trainer
        return {"port": self._receiver.server_port}


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
