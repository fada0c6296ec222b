"""A server's worker over a model of two layers and two norms, updates for it, and the weights of a tiny policy."""

import json
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from qerl_trl.rollout.engine import AdapterTensors, Update
from qerl_trl.rollout.weights import SharedMemory, UpdateLayout, checksum_of
from tests.tiny_models import make_tiny_model

RANK, K, WIDTHS = 4, 8, (6, 2)  # q_proj and k_proj, fused
NORMS = ("model.layers.0.input_layernorm", "model.norm")


def state_of(monkeypatch: Any, widths: dict[str, int], rank: int, columns: int, norms: dict[str, nn.Module]) -> Any:
    """`RolloutState` of a model with one fused layer of `widths`, buffers for an adapter of `rank`, and `norms`."""
    from qerl_trl.rollout.vllm import state as states
    from qerl_trl.rollout.vllm.linear import AdaptedMethod

    class Method(AdaptedMethod):
        def create_weights(self, *args, **kwargs): ...
        def apply(self, *args, **kwargs): ...

    model, layer, rows = nn.Module(), nn.Module(), sum(widths.values())
    model.qkv_proj, model.norms = layer, nn.ModuleList(norms.values())
    layer.quant_method = Method([*widths], rank)
    layer.weight = nn.Parameter(torch.randn(rows, columns), requires_grad=False)
    layer.qerl_splits, layer.input_size_per_partition = [*widths.values()], columns
    layer.tp_size, layer.tp_rank = 1, 0
    layer.register_buffer("adapter_a", torch.zeros(len(widths) * rank, columns, dtype=torch.bfloat16))
    layer.register_buffer("adapter_b", torch.zeros(rows, rank, dtype=torch.bfloat16))
    monkeypatch.setattr(states, "find_norms", lambda *args: norms)
    return states.RolloutState(model)


def worker_over(monkeypatch: Any) -> Any:
    """A worker with an adapter, trained norms and noise."""
    from qerl_trl.rollout.vllm.worker import QeRLWorkerExtension

    worker = QeRLWorkerExtension()
    worker.device = torch.device("cpu")
    norms = {name: nn.RMSNorm(K) for name in NORMS}
    widths = dict(zip(("q_proj", "k_proj"), WIDTHS, strict=True))
    worker._qerl_rollout_state = state_of(monkeypatch, widths, RANK, K, norms)
    assert taken(send(worker, *update())) == {"layers": 2, "norms": 1}
    assert put(worker, draw=(0.1, 1, 2, 3))["sigma_effective"] > 0.01
    return worker


def update(seed=0, **changes):
    """An adapter and a norm; `changes` replaces tensors, by a:NAME, b:NAME or norm:NAME."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "a:q_proj": (RANK, K),
        "b:q_proj": (WIDTHS[0], RANK),
        "a:k_proj": (RANK, K),
        "b:k_proj": (WIDTHS[1], RANK),
    }
    tensors[f"norm:{NORMS[1]}"] = (K,)
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
    sums = {"checksum": checksum, "fingerprint": checksum}
    return put(worker, {"layout": layout.text, "memory": memory.name, **sums}, draw)


def taken(answer: dict) -> dict:
    assert "error" not in answer
    return answer


def everything(worker) -> list[torch.Tensor]:
    model = worker._qerl_rollout_state.model
    return [tensor.clone() for tensor in [*model.parameters(), *model.buffers()]]


def policy(**lora):
    """A PEFT model of a checkpoint, for comparisons with a server."""
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **lora}
    model = make_tiny_model("qwen2").float()
    model.name_or_path = "a-checkpoint"
    return get_peft_model(model, LoraConfig(**settings))
