"""Worker extension for `vllm serve`: receives the adapter and the noise of each step, on every tensor-parallel rank.

`EngineSpec.serve_command` (rollout/spec.py) gives the command that starts a server with it; a trainer that finds no such server
prints it. vLLM mixes this class into its worker and calls the methods through `/collective_rpc`. Arguments are text: numbers, names, and
safetensors bytes in base64. Nothing is unpickled and no path is opened. The endpoint itself has no authentication, so the
server belongs on the loopback interface or behind a proxy that asks who is calling.
"""

import base64
import binascii
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig

from ...noise.hooks import NoiseDraw
from ..wire import CHUNK, MAX_TRANSFER, decode_update
from .describe import describe
from .state import RolloutState


def _answers(method: Callable[..., dict]) -> Callable[..., dict]:
    """Turn refusals into an answer {"error": ...}: an exception in one worker would end a tensor-parallel engine."""

    @functools.wraps(method)
    def answering(self, *args: str) -> dict:
        try:
            return method(self, *args)
        except (ValueError, RuntimeError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    return answering


class QeRLWorkerExtension:
    """Methods that vLLM's worker gains. Each answers with one dict per rank; {"error": text} when it refused."""

    # the worker's own
    model_runner: Any
    vllm_config: VllmConfig
    device: torch.device

    def _qerl_state(self) -> RolloutState:
        state = self.__dict__.get("_qerl_rollout_state")
        if state is None:
            state = self._qerl_rollout_state = RolloutState(self.model_runner.get_model())
            state.watch(self.model_runner)
        return state

    @_answers
    def qerl_describe(self) -> dict:
        """What this rank holds, for the trainer to compare with (rollout/handshake.py)."""
        return describe(self._qerl_state(), self.vllm_config)

    @_answers
    def qerl_receive(self, transfer: str, index: str, chunk: str) -> dict:
        """Store part number `index` of the update `transfer`; parts arrive in order. Refused: out of order, too large, not base64."""
        pending = self.__dict__.setdefault("_qerl_pending", {})
        if int(index) == 0:
            pending.clear()
            pending[transfer] = bytearray()
        if transfer not in pending:
            raise ValueError(f"Part {index} of the unknown transfer {transfer!r}: start again with part 0.")
        data, expected = pending[transfer], len(pending[transfer]) // CHUNK
        if int(index) != expected or len(data) > MAX_TRANSFER:
            raise ValueError(
                f"Part {index} of transfer {transfer!r} came when part {expected} was due: start again with part 0."
            )
        try:
            data += base64.b64decode(chunk, validate=True)
        except binascii.Error as error:
            raise ValueError(f"Part {index} of transfer {transfer!r} is not base64: {error}") from error
        return {"bytes": len(data)}

    @_answers
    def qerl_apply(self, transfer: str, digest: str) -> dict:
        """Load the adapter (and trained norms) of the complete `transfer`, whose sha256 is `digest`.

        Refused: incomplete, damaged, or not for this model; the engine then keeps what it had.
        """
        data = bytes(self.__dict__.get("_qerl_pending", {}).pop(transfer, b""))
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError(f"Transfer {transfer!r} arrived damaged or incomplete ({len(data)} bytes): send it again.")
        state = self._qerl_state()
        adapter, norms = decode_update(data, self.device)
        layers = state.load_adapter(adapter) if adapter else 0
        if norms:
            state.update_clean(norms)
        return {"layers": layers, "norms": len(norms)}

    @_answers
    def qerl_noisy_norms(self, names: str) -> dict:
        """Declare which norms carry noise: their names, separated by spaces."""
        self._qerl_state().remember_clean(names.split())
        return {"norms": len(names.split())}

    @_answers
    def qerl_noise(self, sigma: str, seed: str, step: str, generation: str) -> dict:
        """Take the noise of this draw from now on; each rank computes it from these four numbers."""
        state = self._qerl_state()
        state.set_noise(NoiseDraw(float(sigma), int(seed), int(step), int(generation)))
        return {"sigma_effective": state.sigma_effective()}

    @_answers
    def qerl_sampled(self) -> dict:
        """The latest draw with noise under which this rank computed: sigma, seed, step, generation; None before the first."""
        sampled = self._qerl_state().sampled
        return {"sampled": sampled and [repr(sampled.sigma), *sampled[1:]]}
