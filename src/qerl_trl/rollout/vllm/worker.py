"""Worker extension for `vllm serve`: takes the adapter and the noise of each step, on every tensor-parallel rank.

`EngineSpec.serve_command` gives the command that starts a server with it. vLLM mixes `QeRLWorkerExtension` into its worker. `RolloutEndpoint`, an
ASGI middleware in front of the server, asks for the trainer's secret and calls these methods. Arguments are text; nothing is unpickled.

Open to everybody are `/health` and `/metrics`. With the secret come vLLM's own paths, and two for the trainer: `CALL` runs a method of the
worker extension on every rank and resets the prefix cache, `LISTEN` opens the port for updates from another host.
"""

import functools
import json
import logging
import os
import secrets
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from ...noise.generator import sample as noise_sample
from ...noise.hooks import NoiseDraw
from ..engine import CALL, LISTEN, MESSAGE_TIMEOUT, PORT, is_allowed, secret
from ..weights import SharedMemory, UpdateLayout, WeightSummary, checksum_of, summary
from .linear import DenseMethod
from .state import RolloutState

#: another one after a restart
_RUN = secrets.token_hex(8)


def _answers(method: Callable[..., dict]) -> Callable[..., dict]:
    """Turn refusals into an answer {"error": ...}: an exception in one worker would end a tensor-parallel engine."""

    @functools.wraps(method)
    def answering(self, *args: str) -> dict:
        try:
            return method(self, *args) | {"run": _RUN}
        except (ValueError, RuntimeError, TypeError, KeyError, OSError) as error:
            return {"error": f"{type(error).__name__}: {error}", "run": _RUN}

    return answering


class QeRLWorkerExtension:
    """Methods that vLLM's worker gains. Each answers with one dict per rank; {"error": text} when it refused."""

    # the worker's own
    model_runner: Any
    vllm_config: VllmConfig
    device: torch.device

    _qerl_rollout_state: RolloutState | None = None
    _qerl_memory: SharedMemory | None = None

    def _qerl_state(self) -> RolloutState:
        if self._qerl_rollout_state is None:
            quantization: Any = self.vllm_config.quant_config  # ours
            self._qerl_rollout_state = RolloutState(self.model_runner.get_model(), quantization.renaming)
        return self._qerl_rollout_state

    @_answers
    def qerl_describe(self, name: str) -> dict:
        """What this rank holds ([`describe`]), without the noise of an earlier run, and whether it can open the shared memory `name`."""
        if (engines := self.vllm_config.parallel_config.data_parallel_size) > 1:
            raise ValueError(
                f"--data-parallel-size {engines} makes {engines} engines, and vLLM passes on the answers of the first only, so an update that "
                "another refuses would be lost. Start the server without it."
            )
        self._qerl_state().clear_noise()
        return describe(self._qerl_state(), self.vllm_config) | {"same_host": SharedMemory.is_here(name)}

    @_answers
    def qerl_put(self, text: str) -> dict:
        """Load an adapter (and trained norms), set the noise, or both. A refused update changes nothing.

        Args:
            text: JSON with "update": {"layout", "memory", "checksum", "fingerprint"} or None, and "noisy" (names of norms) and "draw", or None.
        """
        asked = json.loads(text)
        state, answer = self._qerl_state(), dict[str, Any]()
        draw = asked["draw"] and NoiseDraw(*asked["draw"])
        if draw:
            state.declare_noisy(asked["noisy"])
            state.check_draw(draw)
        if update := asked["update"]:
            layout = UpdateLayout.parse(update["layout"])
            flat = self._qerl_read(update["memory"], layout.nbytes)
            if checksum_of(flat) != update["checksum"]:
                raise ValueError(
                    f"The update of {layout.nbytes} bytes arrived damaged (another checksum), and nothing changed."
                )
            adapter, norms = layout.unpack(flat)
            layers = state.load_adapter(adapter, norms, received=update["fingerprint"])
            answer = {"layers": layers, "norms": len(norms)}
        if draw:
            state.set_noise(draw)
            answer["sigma_effective"] = state.sigma_effective()
        return answer

    def _qerl_read(self, name: str, size: int) -> torch.Tensor:
        """The update in the shared memory `name`, on this rank's device."""
        if self._qerl_memory is None or self._qerl_memory.name != name:
            self._qerl_memory = SharedMemory(size, self.device, name)
            self._qerl_flat = torch.empty(size, dtype=torch.uint8, device=self.device)
        if self.device.type == "cpu":
            return self._qerl_memory.data
        return self._qerl_flat.copy_(self._qerl_memory.data, non_blocking=self._qerl_memory.pinned)

    @_answers
    def qerl_contents(self) -> dict:
        """What this rank computes with (`Contents` in rollout/engine.py); `received` is the latest update's fingerprint."""
        return self._qerl_state().contents()._asdict()


class Receiver(ThreadingHTTPServer):
    """Takes updates from a trainer on another host, as the body of a PUT, and answers with the name of the memory that holds it. Listens on
    address `host`; `certificate` and `key` are files for TLS."""

    def __init__(self, host: str, secret: str, certificate: str | None = None, key: str | None = None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, int(os.environ.get(PORT) or 0)), _Upload)
        if certificate:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(certificate, key)
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.secret = secret
        self.memory: SharedMemory | None = None
        threading.Thread(target=self.serve_forever, name="qerl-receiver", daemon=True).start()


class _Upload(BaseHTTPRequestHandler):
    server: Receiver
    timeout = 60

    def do_PUT(self) -> None:
        if not is_allowed(self.headers.get("Authorization"), self.server.secret):
            return self.send_error(401)
        size, memory = int(self.headers["Content-Length"]), self.server.memory
        if memory is None or memory.size != size:
            memory = self.server.memory = SharedMemory(size, torch.device("cpu"))
        if self.rfile.readinto(memory.data.numpy().data) == size:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(memory.name.encode())

    def log_message(self, *args: object) -> None:
        """Nothing: one line per update would fill the log."""


def describe(state: RolloutState, config: VllmConfig) -> dict[str, Any]:
    """Answer of `qerl_describe`: settings, adapter buffers, and `WeightSummary` per weight under the checkpoint's names. JSON-able."""
    weights: dict[str, WeightSummary] = {}
    for name, (layer, shard) in state.shards.items():
        start = sum(layer.qerl_splits[:shard])
        rows = slice(start, start + layer.qerl_splits[shard])
        if isinstance(layer.quant_method, DenseMethod):
            weights[name] = summary("dense", layer.weight[rows])
        else:
            divisor = layer.weight_global_scale.flatten()
            divisor = divisor[start] if divisor.numel() > 1 else divisor[0]
            weights[name] = summary(
                "nvfp4", layer.weight_packed[rows], layer.weight_scale[rows], divisor=float(divisor)
            )
        if getattr(layer, "bias", None) is not None:
            weights[f"{name}.bias"] = summary("bias", layer.bias[rows])
    for name, module in state.model.named_modules():
        if isinstance(module, VocabParallelEmbedding):
            # vLLM pads the vocabulary with zeros, which add nothing to the sums
            weight = module.get_parameter("weight")
            count = module.shard_indices.num_org_elements * weight.shape[1]
            weights[state.original(name)] = summary("embedding", weight)._replace(numel=count)
    weights |= {name: summary("norm", weight) for name, weight in state.clean_norms().items()}
    options = config.additional_config if isinstance(config.additional_config, dict) else {}
    return {
        "weights": weights,
        "adapter_ranks": {name: int(slot.layer.adapter_b.shape[1]) for name, slot in state.slots.items()},
        "options": options.get("qerl", {}),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "logprobs_mode": str(config.model_config.logprobs_mode),
        "max_model_len": int(config.model_config.max_model_len),
        "noise": noise_sample(next(state.model.parameters()).device),
    }


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
logger = logging.getLogger("uvicorn.error")  # ours is not shown by vLLM


class RolloutEndpoint:
    """Middleware of `vllm serve` around its application `app`."""

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
