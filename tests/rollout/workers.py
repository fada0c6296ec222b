"""A server's worker over a model of two layers and two norms, and updates for it."""

import json
from typing import Any

import torch
from torch import nn

from qerl_trl.rollout.engine import AdapterTensors, Update
from qerl_trl.rollout.weights import SharedMemory, UpdateLayout, checksum_of

RANK, K, WIDTHS = 4, 8, (6, 2)  # q_proj and k_proj, fused
NORMS = ("model.layers.0.input_layernorm", "model.norm")


def worker_over(monkeypatch: Any) -> Any:
    """A worker that holds an adapter, trained norms and noise."""
    from qerl_trl.rollout.vllm import state as states
    from qerl_trl.rollout.vllm.linear import AdaptedMethod
    from qerl_trl.rollout.vllm.worker import QeRLWorkerExtension

    class Method(AdaptedMethod):
        def create_weights(self, *args, **kwargs): ...
        def apply(self, *args, **kwargs): ...

    model, layer = nn.Module(), nn.Module()
    model.qkv_proj = layer
    layer.quant_method = Method(["q_proj", "k_proj"], RANK)
    layer.weight = nn.Parameter(torch.randn(sum(WIDTHS), K), requires_grad=False)
    layer.qerl_splits, layer.input_size_per_partition, layer.tp_size, layer.tp_rank = list(WIDTHS), K, 1, 0
    layer.register_buffer("adapter_a", torch.zeros(2 * RANK, K, dtype=torch.bfloat16))
    layer.register_buffer("adapter_b", torch.zeros(sum(WIDTHS), RANK, dtype=torch.bfloat16))
    norms = {name: nn.RMSNorm(K) for name in NORMS}
    model.norms = nn.ModuleList(norms.values())
    monkeypatch.setattr(states, "find_norms", lambda *args: norms)
    worker = QeRLWorkerExtension()
    worker.device = torch.device("cpu")
    worker._qerl_rollout_state = states.RolloutState(model)
    assert taken(send(worker, *update())) == {"layers": 2, "norms": 1}
    assert put(worker, draw=(0.1, 1, 2, 3))["sigma_effective"] > 0.01
    return worker


def update(seed=0, **changes):
    """An adapter and a norm; `changes` replaces tensors, by a:NAME, b:NAME or norm:NAME."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "a:q_proj": (RANK, K), "b:q_proj": (WIDTHS[0], RANK), "a:k_proj": (RANK, K), "b:k_proj": (WIDTHS[1], RANK),
        f"norm:{NORMS[1]}": (K,),
    }  # fmt: skip
    made = {name: torch.randn(shape, generator=generator) for name, shape in tensors.items()} | changes
    names = [name[2:] for name in made if name.startswith("a:")]
    adapter = {name: AdapterTensors(made[f"a:{name}"], made[f"b:{name}"], 2.0) for name in names}
    return adapter, {name[5:]: value for name, value in made.items() if name.startswith("norm:")}


def put(worker, update=None, draw=None) -> dict:
    return worker.qerl_put(json.dumps({"update": update, "noisy": NORMS[:1], "draw": draw}))


def send(worker, adapter, norms, draw=None, damage=0) -> dict:
    layout = UpdateLayout.of(made := Update(adapter, norms), torch.bfloat16)
    memory = SharedMemory(layout.nbytes, torch.device("cpu"))
    layout.pack(made, memory.data)
    checksum = checksum_of(memory.data)
    memory.data[5] ^= damage
    return put(
        worker, {"layout": layout.text, "memory": memory.name, "checksum": checksum, "fingerprint": checksum}, draw
    )


def taken(answer: dict) -> dict:
    assert "error" not in answer
    return answer


def everything(worker) -> list[torch.Tensor]:
    model = worker._qerl_rollout_state.model
    return [tensor.clone() for tensor in [*model.parameters(), *model.buffers()]]
