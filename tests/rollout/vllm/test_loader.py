"""The engine's loader: the trainer's dense layers in one storage, without memory for both."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from qerl_trl.nvfp4 import fused
from qerl_trl.rollout.vllm import loader
from qerl_trl.rollout.vllm.loader import fuse_dense_rows, fused_rows


def test_dense_layers_get_one_storage():
    layers = [nn.Linear(8, rows, bias=False) for rows in (6, 2, 2)]
    before = torch.cat([layer.weight.detach().clone() for layer in layers])
    fuse_dense_rows(layers)
    assert torch.equal(fused_rows([layer.weight.data for layer in layers], ["q", "k", "v"]), before)


def test_a_layer_that_the_trainer_does_not_have_is_refused(monkeypatch):
    config = SimpleNamespace(model_config=SimpleNamespace(architecture="OfVLLM"))
    monkeypatch.setattr(loader, "get_current_vllm_config", lambda: config)
    published = loader.Published(nn.Sequential(nn.Linear(8, 8)), alias=False)
    with pytest.raises(
        ValueError, match=r"a layer 'model\.up' that the trainer's Sequential does not have.*use_vllm=False"
    ):
        published.module("model.up")
    with pytest.raises(ValueError, match=r"vLLM's OfVLLM has a layer '' .*use_vllm=False"):
        published.module("")


@pytest.mark.parametrize("idle,given", [(fused.CACHED_BYTES + 1, 1), (fused.CACHED_BYTES, 0)])
def test_what_lies_idle_goes_back(monkeypatch, idle, given):
    calls = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**40 + idle)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**40)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    fused.give_back_cached(torch.device("cuda"))
    assert len(calls) == given
    fused.give_back_cached(torch.device("cpu"))
    assert len(calls) == given


@pytest.mark.gpu
def test_fusing_takes_no_memory_for_both():
    """24 groups of 2 x 64 MiB: what torch holds of the GPU grows by what may lie idle, not by the 3 GiB of them all."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    groups = [
        [nn.Linear(4096, 8192, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in range(24)
    ]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    for layers in groups:
        fuse_dense_rows(layers)
    assert torch.cuda.max_memory_reserved() - before < fused.CACHED_BYTES + 2**29
