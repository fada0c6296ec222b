"""Worker extension for `vllm serve`: applies the adapter and the noise of each step on every tensor-parallel rank.

`EngineSpec.serve_command` starts a server with it. vLLM mixes `QeRLWorkerExtension` into its worker. `RolloutEndpoint`,
an ASGI middleware, checks the trainer's secret for all paths except `/health` and `/metrics`: vLLM's own, and `CALL`
for the trainer. There POST runs a method of the worker extension on every rank, and PUT receives an update from another
host. Arguments are text; nothing is unpickled.
"""

import functools
import hmac
import json
import logging
from collections.abc import Callable
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from ...noise.hooks import NoiseDraw
from ..engine import CALL, MESSAGE_TIMEOUT, batch_invariant, secret
from ..weights import SharedMemory, UpdateLayout, WeightSummary, checksum_of, summary
from .linear import DenseMethod
from .state import RolloutState

logger = logging.getLogger("uvicorn.error")  # vLLM does not show `qerl_trl` loggers


def _answers(method: Callable[..., dict]) -> Callable[..., dict]:
    """Return errors as {"error": ...}: an exception in one worker would kill a tensor-parallel engine."""

    @functools.wraps(method)
    def answering(self, *args: str) -> dict:
        try:
            return method(self, *args)
        except (ValueError, RuntimeError, TypeError, KeyError, OSError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    return answering


class QeRLWorkerExtension:
    """Methods added to vLLM's worker. Each returns one dict per rank; {"error": text} for a refusal."""

    # attributes of vLLM's worker
    model_runner: Any
    vllm_config: VllmConfig
    device: torch.device

    _qerl_rollout_state: RolloutState | None = None
    _qerl_memory: SharedMemory | None = None

    def _qerl_state(self) -> RolloutState:
        if self._qerl_rollout_state is None:
            quantization: Any = self.vllm_config.quant_config  # QeRLQuantizationConfig
            self._qerl_rollout_state = RolloutState(self.model_runner.get_model(), quantization.renaming)
        return self._qerl_rollout_state

    @_answers
    def qerl_describe(self, name: str) -> dict:
        """[`describe`] this rank, after clearing old noise; `same_host`: it can open the shared memory `name`."""
        if (engines := self.vllm_config.parallel_config.data_parallel_size) > 1:
            raise ValueError(
                f"--data-parallel-size {engines} makes {engines} engines, and vLLM answers for the first only, so an "
                "update refused by another engine would be lost. Start the server without this option."
            )
        self._qerl_state().clear_noise()
        return describe(self._qerl_state(), self.vllm_config) | {"same_host": SharedMemory.is_here(name)}

    @_answers
    def qerl_put(self, text: str) -> dict:
        """Load an adapter (and trained norms), set the noise, or both. A refused update changes nothing.

        Args:
            text: JSON with "update" ({"layout", "memory", "checksum", "fingerprint"} or None), "noisy" (names of norms)
                and "draw" (or None).
        """
        asked = json.loads(text)
        state, answer = self._qerl_state(), dict[str, Any]()
        draw = asked["draw"] and NoiseDraw(*asked["draw"])
        if draw:
            state.declare_noisy(asked["noisy"])
        if update := asked["update"]:
            layout = UpdateLayout.parse(update["layout"])
            flat = self._qerl_read(update["memory"], layout.nbytes)
            if checksum_of(flat) != update["checksum"]:
                raise ValueError(
                    f"The update of {layout.nbytes} bytes arrived damaged, and nothing changed. Send it again."
                )
            adapter, norms = layout.unpack(flat)
            layers = state.load_adapter(adapter, norms, received=update["fingerprint"])
            answer = {"layers": layers, "norms": len(norms)}
        if draw:
            state.set_noise(draw)
            answer["sigma_effective"] = state.sigma_effective()
        return answer

    def _qerl_read(self, name: str, size: int) -> torch.Tensor:
        """Read the update from the shared memory `name` onto this rank's device."""
        if self._qerl_memory is None or self._qerl_memory.name != name:
            self._qerl_memory = SharedMemory(size, self.device, name)
            self._qerl_flat = torch.empty(size, dtype=torch.uint8, device=self.device)
        if self.device.type == "cpu":
            return self._qerl_memory.data
        return self._qerl_flat.copy_(self._qerl_memory.data, non_blocking=self._qerl_memory.pinned)

    @_answers
    def qerl_contents(self) -> dict:
        """Return this rank's `Contents` (rollout/engine.py); `received` is the latest update's fingerprint."""
        return self._qerl_state().contents()._asdict()


def describe(state: RolloutState, config: VllmConfig) -> dict[str, Any]:
    """Make the answer of `qerl_describe`, for JSON: settings, adapter buffers, a `WeightSummary` per weight."""
    weights: dict[str, WeightSummary] = {}
    for name, (layer, shard) in state.shards.items():
        start = sum(layer.qerl_splits[:shard])
        rows = slice(start, start + layer.qerl_splits[shard])
        if isinstance(layer.quant_method, DenseMethod):
            weights[name] = summary("dense", layer.weight[rows])
        else:
            scales = layer.weight_global_scale.flatten()
            scale = float(scales[start if scales.numel() > 1 else 0])
            weights[name] = summary("nvfp4", layer.weight_packed[rows], layer.weight_scale[rows], divisor=scale)
        if layer.bias is not None:
            weights[f"{name}.bias"] = summary("bias", layer.bias[rows])
    for name, module in state.model.named_modules():
        if isinstance(module, VocabParallelEmbedding):
            # vLLM pads the vocabulary with zeros; they add 0 to the sums
            weight = module.get_parameter("weight")
            count = module.shard_indices.num_org_elements * weight.shape[1]
            weights[state.original(name)] = summary("embedding", weight)._replace(numel=count)
    weights |= {name: summary("norm", weight) for name, weight in state.clean_norms().items()}
    options = config.additional_config if isinstance(config.additional_config, dict) else {}
    return {
        "weights": weights,
        "adapter_ranks": {name: int(slot.layer.adapter_b.shape[1]) for name, slot in state.slots.items()},
        "options": options.get("qerl", {}),
        "batch_invariant": batch_invariant(),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "logprobs_mode": str(config.model_config.logprobs_mode),
        "max_model_len": int(config.model_config.max_model_len),
    }


class RolloutEndpoint:
    """Middleware of `vllm serve` around its application `app`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app, self._allowed = app, f"Bearer {secret()}".encode("latin-1")
        self._memory: SharedMemory | None = None  # of updates from another host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path, kind = scope.get("method"), scope.get("path"), scope["type"]
        if kind == "lifespan" or (method == "GET" and path in ("/health", "/metrics", "/metrics/")):
            await self.app(scope, receive, send)
        elif not hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._allowed):
            refusal = {"error": "This server serves its trainer only. Send the trainer's secret as a bearer token."}
            await (WebSocketClose(1008) if kind == "websocket" else JSONResponse(refusal, 401))(scope, receive, send)
        elif path == CALL and method in ("POST", "PUT"):
            request = Request(scope, receive)
            try:
                found = await (self._call if method == "POST" else self._take)(request)
                answer = Response(json.dumps(found), media_type="application/json")  # with NaN, unlike JSONResponse
            except Exception as error:
                logger.exception("%s %s failed", method, path)
                answer = JSONResponse({"error": f"{type(error).__name__}: {error}"}, 400)
            await answer(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _call(self, request: Request) -> dict[str, Any]:
        asked, engine = await request.json(), request.app.state.engine_client
        method = asked["method"]
        results = await engine.collective_rpc(method=method, timeout=MESSAGE_TIMEOUT, args=tuple(asked["args"]))
        if method == "qerl_describe":
            self._memory = None  # of an earlier trainer
        if method != "qerl_put":
            return {"results": results, "reset": True}
        if self._memory is not None:
            self._memory.unlink()  # the workers have mapped it
        # including a connector's cache (--kv-offloading-size, LMCache)
        return {"results": results, "reset": await engine.reset_prefix_cache(reset_connector=True) is not False}

    async def _take(self, request: Request) -> dict[str, Any]:
        """Write an update into shared memory of this host, for the workers."""
        size, start = int(request.headers["content-length"]), 0
        if self._memory is None or self._memory.size != size:
            self._memory = SharedMemory(size, torch.device("cpu"))
        data = self._memory.data.numpy().data
        async for part in request.stream():
            data[start : start + len(part)] = part
            start += len(part)
        return {"memory": self._memory.name}
