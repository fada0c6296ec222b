"""Adapters in the buffers of a vLLM model, tensor by tensor; in a real engine: tests/e2e/engine."""

import pytest
import torch
from torch import nn

from qerl_trl.rollout.engine import AdapterTensors
from tests.rollout.workers import state_of

pytest.importorskip("vllm")

RANK, K, WIDTHS = 8, 16, (24, 8, 8)  # q_proj, k_proj and v_proj, fused
NAMES = ("q_proj", "k_proj", "v_proj")


@pytest.fixture
def state(monkeypatch):
    torch.manual_seed(0)
    return state_of(monkeypatch, dict(zip(NAMES, WIDTHS, strict=True)), RANK, K, {"model.norm": nn.RMSNorm(K)})


def adapter(ranks: dict[str, int]) -> dict[str, AdapterTensors]:
    return {
        name: AdapterTensors(torch.randn(rank, K), torch.randn(WIDTHS[NAMES.index(name)], rank), 0.3)
        for name, rank in ranks.items()
    }


def expected(tensors: AdapterTensors, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers of one layer: rounded once, alpha/r in B, zeros beyond the rank."""
    a, b = torch.zeros(RANK, K, dtype=torch.bfloat16), torch.zeros(rows, RANK, dtype=torch.bfloat16)
    rank = tensors.a.shape[0]
    a[:rank], b[:, :rank] = tensors.a.bfloat16(), (tensors.b * tensors.scaling).bfloat16()
    return a, b


@pytest.mark.parametrize("together", [1, 2**24], ids=["one by one", "at once"])
def test_buffers_hold_the_latest_adapter_and_nothing_of_earlier_ones(state, monkeypatch, together):
    monkeypatch.setattr("qerl_trl.rollout.vllm.state._TOGETHER", together)
    updates = ({"q_proj": 8, "k_proj": 8, "v_proj": 8}, {"q_proj": 2, "v_proj": 5}, {"k_proj": 1, "q_proj": 8})
    for ranks in updates:
        sent = adapter(ranks)
        assert state.load_adapter(sent, {}) == len(ranks)
        for name, rows in zip(NAMES, WIDTHS, strict=True):
            slot = state.slots[name]
            none = AdapterTensors(torch.zeros(1, K), torch.zeros(rows, 1), 1.0)
            a, b = expected(sent.get(name, none), rows)
            assert torch.equal(slot.a_RK, a) and torch.equal(slot.b_NR, b), (ranks, name)
        assert state.contents().damaged == []
