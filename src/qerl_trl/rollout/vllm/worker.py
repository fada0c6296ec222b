"""Worker extension for `vllm serve`: takes the adapter and the noise of each step, on every tensor-parallel rank.

`EngineSpec.serve_command` (rollout/spec.py) gives the command that starts a server with it. vLLM mixes this class into its worker, and the
endpoint in front of the server (endpoint.py) calls its methods for the trainer. Arguments are text; nothing is unpickled.
"""

import functools
import json
import secrets
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig

from ...noise.hooks import NoiseDraw
from ..transport import SharedMemory, UpdateLayout, checksum_of
from .describe import describe
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
        """What this rank holds (handshake.py), without the noise of an earlier run, and whether it can open the shared memory `name`."""
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
