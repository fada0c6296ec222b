"""Worker extension for `vllm serve`: receives the adapter and the noise of each step, on every tensor-parallel rank.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --quantization qerl_nvfp4 --host 127.0.0.1 \
        --additional-config '{"qerl": {"adapter": {"rank": 32, "targets": ["q_proj", ...]}}}' \
        --worker-extension-cls qerl_trl.vllm_worker.QeRLWorkerExtension \
        --logprobs-mode processed_logprobs --max-logprobs -1

vLLM mixes this class into its worker and calls the methods through `/collective_rpc`. Arguments are text: numbers, names, and
safetensors bytes in base64. Nothing is unpickled and no path is opened. The endpoint itself has no authentication, so the
server belongs on the loopback interface or behind a proxy that asks who is calling.
"""

import base64
import binascii
import functools
import hashlib
from collections.abc import Callable

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from .norm_noise import NoiseDraw
from .vllm_state import AdapterTensors, RolloutState

#: raw bytes of one message
CHUNK = 4 * 2**20
#: an adapter of rank 512 on a 70B model in bf16; more is not an adapter
MAX_TRANSFER = 16 * 2**30


def encode_update(adapter: dict[str, AdapterTensors], norms: dict[str, torch.Tensor], dtype: torch.dtype) -> bytes:
    """Serialize an adapter (alpha/r folded into B, both rounded to `dtype`) and clean norm weights (float32)."""
    tensors = {f"a:{name}": t.a.to("cpu", dtype).contiguous() for name, t in adapter.items()}
    tensors |= {f"b:{name}": (t.b.float() * t.scaling).to("cpu", dtype).contiguous() for name, t in adapter.items()}
    tensors |= {f"norm:{name}": weight.float().cpu().contiguous() for name, weight in norms.items()}
    return save(tensors)


def decode_update(data: bytes, device: torch.device) -> tuple[dict[str, AdapterTensors], dict[str, torch.Tensor]]:
    """
    Raises:
        `ValueError`: not what `encode_update` writes.
    """
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ValueError(f"The update of {len(data)} bytes is not a safetensors file: {error}") from error
    parts: dict[str, dict[str, torch.Tensor]] = {"a": {}, "b": {}, "norm": {}}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(":")
        if kind not in parts:
            raise ValueError(f"The update holds a tensor {key!r}; expected a:NAME, b:NAME or norm:NAME.")
        parts[kind][name] = tensor.to(device)
    if set(parts["a"]) != set(parts["b"]):
        raise ValueError(
            f"The update has only half of the adapter for {sorted(set(parts['a']) ^ set(parts['b']))[:4]}."
        )
    return {name: AdapterTensors(a, parts["b"][name], 1.0) for name, a in parts["a"].items()}, parts["norm"]


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
    """Methods that vLLM's worker gains. Each answers with a dict, one a rank; {"error": text} when it refused."""

    def _qerl_state(self) -> RolloutState:
        state = self.__dict__.get("_qerl_rollout_state")
        if state is None:
            state = self._qerl_rollout_state = RolloutState(self.model_runner.get_model())
        return state

    @_answers
    def qerl_describe(self) -> dict:
        """Which layers have adapter buffers, which norms can be noisy, and checksums of this rank's packed weights."""
        state = self._qerl_state()
        ranks = {int(slot.layer.adapter_b.shape[1]) for slot in state.slots.values()}
        return {
            "layers": sorted(state.slots),
            "norms": sorted(state.norms),
            "adapter_rank": min(ranks, default=0),
            "checksums": state.checksums(self.model_runner.get_model()),
        }

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
        layers = state.load_adapter(adapter)
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
