"""What changes between rollouts, and how it travels to a server: adapter and trained norms as one safetensors message, in parts."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

#: raw bytes of one part of a message
CHUNK = 4 * 2**20
#: an adapter of rank 512 on a 70B model in bf16; more is not an adapter
MAX_TRANSFER = 16 * 2**30
#: the server's paths for the trainer alone (vllm/endpoint.py): a method of the worker extension, and the prefix cache
CALL, RESET = "/qerl/call", "/qerl/reset_prefix_cache"
#: bytes of one request to them: a line of JSON, and a part
MAX_MESSAGE = CHUNK + 2**20
#: seconds that one may take
MESSAGE_TIMEOUT = 300


@dataclass(frozen=True)
class AdapterTensors:
    """One adapted layer: `a` (r, K) and `b` (N, r) unsharded, and the factor alpha/r (or alpha/sqrt(r)) of its output."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


def encode_update(
    adapter: Mapping[str, AdapterTensors], norms: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> bytes:
    """Serialize an adapter (alpha/r folded into B, both rounded to `dtype`) and clean norm weights (float32)."""
    tensors = {f"a:{name}": t.a.to("cpu", dtype).contiguous() for name, t in adapter.items()}
    tensors |= {f"b:{name}": (t.b.float() * t.scaling).to("cpu", dtype).contiguous() for name, t in adapter.items()}
    tensors |= {f"norm:{name}": weight.float().cpu().contiguous() for name, weight in norms.items()}
    return save(tensors)


def decode_update(data: bytes, device: torch.device) -> tuple[dict[str, AdapterTensors], dict[str, torch.Tensor]]:
    """Adapter and norms of a message, on `device`.

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
