"""Worker extension for `vllm serve`: receives the adapter and the noise of each step, on every tensor-parallel rank.

`EngineSpec.serve_command` (rollout/spec.py) gives the command that starts a server with it; a trainer that finds no such server
prints it. vLLM mixes this class into its worker, and the endpoint in front of the server (endpoint.py) calls the methods for who knows
its secret. Arguments are text, numbers and names, and the bytes of an update. Nothing is unpickled, and no path is opened but that of a
piece of memory which a process of the same user on the same host made (shared_memory.py): the trainer, or the first rank for one that is on
another host (channel.py).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig

from ...noise.hooks import NoiseDraw
from ..channel import PORT, Receiver
from ..layout import UpdateLayout, as_tensor, mark
from ..shared_memory import SharedMemory
from ..signature import secret
from ..transfers import Transfers
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


def _draw(sigma: str, seed: str, step: str, generation: str) -> NoiseDraw:
    return NoiseDraw(float(sigma), int(seed), int(step), int(generation))


class QeRLWorkerExtension:
    """Methods that vLLM's worker gains. Each answers with one dict per rank; {"error": text} when it refused."""

    # the worker's own
    model_runner: Any
    vllm_config: VllmConfig
    device: torch.device
    rank: int

    def _qerl_state(self) -> RolloutState:
        state = self.__dict__.get("_qerl_rollout_state")
        if state is None:
            quantization: Any = self.vllm_config.quant_config  # ours
            state = self._qerl_rollout_state = RolloutState(self.model_runner.get_model(), quantization.renaming)
        return state

    def _qerl_largest_update(self) -> int:
        """Bytes that adapter and norms of this engine can have: all buffers in float32, as if no rank shared them."""
        state = self._qerl_state()
        buffers = sum(slot.a_RK.numel() + slot.b_NR.numel() for slot in state.slots.values())
        norms = sum(weight.numel() for weight in state.clean_norms().values())
        return 4 * (buffers * self.vllm_config.parallel_config.tensor_parallel_size + norms) + _NAMES

    @_answers
    def qerl_describe(self) -> dict:
        """What this rank holds, for a trainer that begins to compare with (rollout/handshake.py), without the noise of a run that was here before.
        Refused: engines side by side, of which the first alone would answer, so that nobody would know what the others refused or hold."""
        if (engines := self.vllm_config.parallel_config.data_parallel_size) > 1:
            raise ValueError(
                f"--data-parallel-size {engines} makes {engines} engines, and vLLM passes on the answers of the first one only: an update that "
                "another one refuses would be lost. Start the server without it."
            )
        self._qerl_state().clear_noise()  # a run that was killed has not taken it off
        return describe(self._qerl_state(), self.vllm_config)

    @_answers
    def qerl_layout(self, text: str) -> dict:
        """What every update from now on consists of (layout.py). Refused: more than this engine can hold."""
        layout, most = UpdateLayout.parse(text), self._qerl_largest_update()
        if layout.nbytes > most:
            raise ValueError(
                f"Updates of {layout.nbytes} bytes are announced, and adapter and norms of this engine have at most {most}. Start the "
                "server for this trainer's adapter, with the command that the trainer prints."
            )
        self._qerl_hang_up()
        self.__dict__.pop("_qerl_transfers", None)  # of a trainer that was killed while it sent
        self._qerl_form = layout
        self._qerl_buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=self.device)
        return {"bytes": layout.nbytes}

    @_answers
    def qerl_listen(self, address: str) -> dict:
        """Let the trainer connect, and write updates into memory of this rank (channel.py); `qerl_open` opens it here and in the others.

        Refused: the port is taken, or this host has no memory to share. Only the first rank listens; the others answer nothing.

        Args:
            address: of the loopback interface; "" for all interfaces.
        """
        size = self._qerl_layout_now().nbytes
        self._qerl_hang_up()
        if self.rank != 0:
            return {}
        try:
            self._qerl_receiver = Receiver(size, address, secret())
        except OSError as error:
            raise ValueError(
                f"No port or no memory for updates: {error}. {PORT} in the server's environment chooses the port, and /dev/shm has to have "
                f"{size} bytes left (docker run --shm-size)."
            ) from error
        return {"port": self._qerl_receiver.port, "name": self._qerl_receiver.name}

    def _qerl_hang_up(self) -> None:
        """Nobody writes into this rank's memory any more."""
        self.__dict__.pop("_qerl_shared", None)
        receiver = self.__dict__.pop("_qerl_receiver", None)
        if receiver is not None:
            receiver.close()

    @_answers
    def qerl_open(self, name: str) -> dict:
        """Take updates from the shared memory `name` from now on: the trainer's, or the first rank's. Refused: this host has none."""
        self._qerl_shared = SharedMemory.open(name, self._qerl_layout_now().nbytes, self.device)
        return {"proof": self._qerl_shared.proof()}

    @_answers
    def qerl_receive(self, transfer: str, index: str, part: bytes) -> dict:
        """Store part number `index` of the update `transfer`. Refused: too large, or twice."""
        transfers = self.__dict__.get("_qerl_transfers")
        if transfers is None:
            transfers = self._qerl_transfers = Transfers(self._qerl_largest_update())
        return {"bytes": transfers.receive(transfer, int(index), part)}

    @_answers
    def qerl_apply(self, transfer: str, expected: str, *noise: str) -> dict:
        """Load the adapter (and trained norms) of the complete `transfer`, whose `mark` is `expected`; "shared" is the shared memory.

        Refused: incomplete, damaged, or not for this model; the engine then keeps what it had.

        Args:
            noise: of a draw that is to lie on the norms from now on, as `qerl_noise` takes it; without one the noise stays as it is.
        """
        layout = self._qerl_layout_now()
        flat = self._qerl_buffer
        if transfer == "shared":
            shared = self.__dict__.get("_qerl_shared")
            if shared is None or shared.size != layout.nbytes:
                raise ValueError(
                    "This engine shares no memory with the trainer for such updates: call qerl_open first."
                )
            flat.copy_(shared.data, non_blocking=shared.pinned)
        else:
            start = 0
            for part in self.__dict__.get("_qerl_transfers", _NO_TRANSFERS).take(transfer, layout.nbytes):
                flat[start : start + len(part)].copy_(as_tensor(bytearray(part)))
                start += len(part)
        found = mark(flat)
        if found != expected:
            raise ValueError(f"Update {transfer!r} arrived damaged (mark {found}, not {expected[:80]}): send it again.")
        adapter, norms = layout.unpack(flat)
        state, draw = self._qerl_state(), _draw(*noise) if noise else None
        if draw is not None:
            state.check_draw(draw)  # before anything changes
        written = {"layers": state.load_adapter(adapter, norms, received=expected), "norms": len(norms)}
        return written if draw is None else {**written, **self._qerl_set_noise(draw)}

    def _qerl_layout_now(self) -> UpdateLayout:
        layout = self.__dict__.get("_qerl_form")
        if layout is None:
            raise ValueError("This engine was not told what updates consist of: call qerl_layout first.")
        return layout

    @_answers
    def qerl_noisy_norms(self, names: str) -> dict:
        """Declare which norms carry noise: their names, separated by spaces."""
        self._qerl_state().remember_clean(names.split())
        return {"norms": len(names.split())}

    @_answers
    def qerl_noise(self, sigma: str, seed: str, step: str, generation: str) -> dict:
        """Take the noise of this draw from now on; each rank computes it from these four numbers."""
        return self._qerl_set_noise(_draw(sigma, seed, step, generation))

    def _qerl_set_noise(self, draw: NoiseDraw) -> dict:
        state = self._qerl_state()
        state.set_noise(draw)
        return {"sigma_effective": state.sigma_effective()}

    @_answers
    def qerl_contents(self) -> dict:
        """What this rank computes with (`Contents` in rollout/engine.py); `received` is the latest update's sha256."""
        return self._qerl_state().contents()._asdict()
