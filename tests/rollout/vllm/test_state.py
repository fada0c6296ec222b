"""Adapters and noise in the buffers of a vLLM model, tensor by tensor; against a real engine in test_engine.py."""

import pytest
import torch
from torch import nn

from qerl_trl.noise.generator import standard_noise
from qerl_trl.noise.hooks import NoiseDraw
from qerl_trl.rollout.engine import AdapterTensors

RANK, K, WIDTHS = 8, 16, (24, 8, 8)  # q_proj, k_proj and v_proj, fused
NAMES = ("q_proj", "k_proj", "v_proj")
NORMS = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")


@pytest.fixture
def state(monkeypatch):
    from qerl_trl.rollout.vllm import state as states
    from qerl_trl.rollout.vllm.linear import AdaptedMethod

    class Method(AdaptedMethod):
        def create_weights(self, *args, **kwargs): ...
        def apply(self, *args, **kwargs): ...

    torch.manual_seed(0)
    model, layer = nn.Module(), nn.Module()
    model.qkv_proj = layer
    layer.quant_method = Method(list(NAMES), RANK)
    layer.weight = nn.Parameter(torch.randn(sum(WIDTHS), K), requires_grad=False)
    layer.qerl_splits, layer.input_size_per_partition, layer.tp_size, layer.tp_rank = list(WIDTHS), K, 1, 0
    layer.register_buffer("adapter_a", torch.zeros(len(NAMES) * RANK, K, dtype=torch.bfloat16))
    layer.register_buffer("adapter_b", torch.zeros(sum(WIDTHS), RANK, dtype=torch.bfloat16))
    norms = {name: nn.RMSNorm(K + i).requires_grad_(False) for i, name in enumerate(NORMS)}  # odd lengths too
    model.norms = nn.ModuleList(norms.values())
    monkeypatch.setattr(states, "find_norms", lambda *args: norms)
    return states.RolloutState(model)


def adapter(ranks: dict[str, int], scaling: float = 3.0) -> dict[str, AdapterTensors]:
    return {
        name: AdapterTensors(torch.randn(rank, K), torch.randn(WIDTHS[NAMES.index(name)], rank), scaling)
        for name, rank in ranks.items()
    }


def expected(tensors: AdapterTensors, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What one layer's buffers have to hold: rounded once, alpha/r in B, zeros beyond the rank."""
    a, b = torch.zeros(RANK, K, dtype=torch.bfloat16), torch.zeros(rows, RANK, dtype=torch.bfloat16)
    rank = tensors.a.shape[0]
    a[:rank], b[:, :rank] = tensors.a.bfloat16(), (tensors.b * tensors.scaling).bfloat16()
    return a, b


@pytest.mark.parametrize("together", [1, 2**24], ids=["one by one", "at once"])
@pytest.mark.parametrize("scaling", [1.0, 3.0, 0.3])
def test_buffers_hold_the_latest_adapter_and_nothing_of_earlier_ones(state, monkeypatch, together, scaling):
    monkeypatch.setattr("qerl_trl.rollout.vllm.state._TOGETHER", together)
    updates = ({"q_proj": 8, "k_proj": 8, "v_proj": 8}, {"q_proj": 2, "v_proj": 5}, {"k_proj": 1, "q_proj": 8})
    for ranks in updates:
        sent = adapter(ranks, scaling)
        assert state.load_adapter(sent, {}) == len(ranks)
        for name, rows in zip(NAMES, WIDTHS, strict=True):
            slot = state.slots[name]
            none = AdapterTensors(torch.zeros(1, K), torch.zeros(rows, 1), 1.0)
            a, b = expected(sent.get(name, none), rows)
            assert torch.equal(slot.a_RK, a) and torch.equal(slot.b_NR, b), (ranks, name)
        assert state.contents().damaged == []


@pytest.mark.parametrize("half", ["a_RK", "b_NR"])
def test_a_buffer_that_changed_is_named(state, half):
    state.load_adapter(adapter({"q_proj": 8, "k_proj": 8, "v_proj": 8}), {})
    getattr(state.slots["k_proj"], half)[1, 1] += 1
    assert state.contents().damaged == [f"k_proj.lora_{half[0].upper()}"]


def test_noise_is_the_trainers_and_leaves_no_trace(state):
    clean = {name: norm.weight.clone() for name, norm in state.norms.items()}
    state.declare_noisy(NORMS[:2])
    draw = NoiseDraw(0.05, 1, 2, 3)
    for other in (draw._replace(seed=2), draw):
        state.set_noise(other)
    for name in NORMS[:2]:
        unit = standard_noise(1, 2, 3, name, clean[name].numel())
        assert torch.equal(state.norms[name].weight, clean[name] + unit * 0.05)
    assert torch.equal(state.norms[NORMS[2]].weight, clean[NORMS[2]])
    assert state.sigma_effective() == pytest.approx(0.05, rel=0.5)
    state.clear_noise()
    assert all(torch.equal(norm.weight, clean[name]) for name, norm in state.norms.items())
