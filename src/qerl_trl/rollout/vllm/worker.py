"""Worker extension for `vllm serve`: receives the adapter and the noise of each step, on every tensor-parallel rank.

`EngineSpec.serve_command` (rollout/spec.py) gives the command that starts a server with it; a trainer that finds no such server
prints it. vLLM mixes this class into its worker, and the endpoint in front of the server (endpoint.py) calls the methods for who knows
its secret. Arguments are text: numbers, names, and safetensors bytes in base64. Nothing is unpickled and no path is opened.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig

from ...noise.hooks import NoiseDraw
from ..transfers import Transfers
from ..wire import decode_update
from .describe import describe
from .state import RolloutState

_NO_TRANSFERS = Transfers()
#: bytes that the names in an update may take
_NAMES = 16 * 2**20


def _answers(method: Callable[..., dict]) -> Callable[..., dict]:
    """Turn refusals into an answer {"error": ...}: an exception in one worker would end a tensor-parallel engine."""

    @functools.wraps(method)
    def answering(self, *args: str) -> dict:
        try:
            return method(self, *args)
        except (ValueError, RuntimeError, TypeError) as error:  # TypeError: other arguments than it has
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

    def _qerl_largest_update(self) -> int:
        """Bytes that adapter and norms of this engine can have: all buffers in float32, as if no rank shared them."""
        state = self._qerl_state()
        buffers = sum(slot.a_RK.numel() + slot.b_NR.numel() for slot in state.slots.values())
        norms = sum(weight.numel() for weight in state.clean_norms().values())
        return 4 * (buffers * self.vllm_config.parallel_config.tensor_parallel_size + norms) + _NAMES

    @_answers
    def qerl_describe(self) -> dict:
        """What this rank holds, for the trainer to compare with (rollout/handshake.py)."""
        return describe(self._qerl_state(), self.vllm_config)

    @_answers
    def qerl_receive(self, transfer: str, index: str, chunk: str) -> dict:
        """Store part number `index` of the update `transfer`; parts arrive in order. Refused: out of order, too large, not base64."""
        transfers = self.__dict__.get("_qerl_transfers")
        if transfers is None:
            transfers = self._qerl_transfers = Transfers(self._qerl_largest_update())
        return {"bytes": transfers.receive(transfer, int(index), chunk)}

    @_answers
    def qerl_apply(self, transfer: str, digest: str) -> dict:
        """Load the adapter (and trained norms) of the complete `transfer`, whose sha256 is `digest`.

        Refused: incomplete, damaged, or not for this model; the engine then keeps what it had.
        """
        data = self.__dict__.get("_qerl_transfers", _NO_TRANSFERS).take(transfer, digest)
        adapter, norms = decode_update(data, self.device)
        layers = self._qerl_state().load_adapter(adapter, norms, received=digest)
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
    def qerl_held(self) -> dict:
        """What this rank computes with (`Held` in rollout/engine.py); `received` is the latest update's sha256."""
        return self._qerl_state().held()._asdict()
