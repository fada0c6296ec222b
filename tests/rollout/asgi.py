"""Requests to an ASGI application, in process or over loopback HTTP, and a stand-in for vLLM behind our endpoint."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from unittest import mock

import httpx
import pytest

from qerl_trl.rollout.engine import SECRET

KEY = "a secret of the tests, long enough"


class FakeVLLM:
    """Answers every path with 200; `reached` and `bodies` are its requests, `asked` the calls of its engine."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        self.asked: list[tuple] = []
        self.state = SimpleNamespace(engine_client=self, args=SimpleNamespace(ssl_certfile=None, ssl_keyfile=None))

    async def __call__(self, scope, receive, send):
        self.reached.append(f"{scope['method']} {scope['path']}")
        content = {"data": [{"id": "model"}]} if scope["path"] == "/v1/models" else {}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(content).encode()})

    async def collective_rpc(self, method, timeout, args):
        self.asked.append((method, *args))
        return [{"run": "1"}]

    async def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        self.asked.append(("reset",))
        return True


def guarded(app):
    """qerl-trl's endpoint in front of `app`."""
    pytest.importorskip("vllm")
    from qerl_trl.rollout.vllm.worker import RolloutEndpoint

    with mock.patch.dict("os.environ", {SECRET: KEY}):
        return RolloutEndpoint(app)


def ask(endpoint, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None):
    """Status and content of an answer."""

    async def app(scope, receive, send):
        await endpoint(scope | {"app": getattr(endpoint, "app", None)}, receive, send)

    async def request():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.request(method, path, content=body, headers=headers)

    response = asyncio.run(request())
    return response.status_code, json.loads(response.content or "null")


def allowed(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextlib.contextmanager
def http(answer) -> Iterator[tuple[str, list]]:
    """URL of a server with `answer(method, path, headers, body)` -> (status, bytes), and its requests."""
    requests: list[tuple] = []

    class Handler(BaseHTTPRequestHandler):
        def do(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            requests.append((self.command, self.path, body))
            status, content = answer(self.command, self.path, dict(self.headers), body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()


def bridged(endpoint):
    """`answer` for [`http`]: an ASGI application."""

    def answer(method, path, headers, body):
        status, content = ask(endpoint, method, path, body, headers)
        return status, json.dumps(content).encode()

    return answer
