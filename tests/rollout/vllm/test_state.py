"""Adapters and noise in the buffers of a vLLM model, tensor by tensor; in a real engine: tests/e2e/engine."""

import pytest
import torch
from torch import nn

from qerl_trl.noise.generator import standard_noise
from qerl_trl.noise.hooks import NoiseDraw
from qerl_trl.rollout.engine import AdapterTensors
from tests.rollout.workers import state_of

pytest.importorskip("vllm")

RANK, K, WIDTHS = 8, 16, (24, 8, 8)  # q_proj, k_proj and v_proj, fused
NAMES = ("q_proj", "k_proj", "v_proj")
NORMS = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")


@pytest.fixture
def state(monkeypatch):
    torch.manual_seed(0)
    norms = {name: nn.RMSNorm(K + i).requires_grad_(False) for i, name in enumerate(NORMS)}  # odd lengths too
    return state_of(monkeypatch, dict(zip(NAMES, WIDTHS, strict=True)), RANK, K, norms)


def adapter(ranks: dict[str, int], scaling: float = 3.0) -> dict[str, AdapterTensors]:
    return {
        name: AdapterTensors(torch.randn(rank, K), torch.randn(WIDTHS[NAMES.index(name)], rank), scaling)
        for name, rank in ranks.items()
    }


def expected(tensors: AdapterTensors, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers of one layer: rounded once, alpha/r in B, zeros beyond the rank."""
    a, b = torch.zeros(RANK, K, dtype=torch.bfloat16), torch.zeros(rows, RANK, dtype=torch.bfloat16)
    rank = tensors.a.shape[0]
    a[:rank], b[:, :rank] = tensors.a.bfloat16(), (tensors.b * tensors.scaling).bfloat16()
    return a, b


@pytest.mark.parametrize("together", [1, 2**24], ids=["one by one", "at once"])
@pytest.mark.parametrize("scaling", [1.0, 0.3])
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
