"""Gated delta nets in a plan: against the bytes saved by autograd, and vLLM's own sums."""

import copy
import dataclasses
import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from qerl_trl.checks import environment
from qerl_trl.memory import formulas
from qerl_trl.memory.plan import Gpu, plan_run
from qerl_trl.memory.workload import Workload, workload_of_file
from tests.shapes import NEWER, SEVEN_B
from tests.update.models import saved_bytes

NINE_B = NEWER["qwen3.5-9b"][0]


@pytest.mark.parametrize(("key", "value", "heads"), [(128, 128, 32), (64, 128, 32), (128, 64, 32), (128, 128, 48)])
def test_activations_are_what_autograd_saves_at_full_width(key, value, heads):
    """transformers' own code on the meta device, bytes per token of one delta net with frozen projections."""
    config = copy.deepcopy(NINE_B.text_config)
    config.linear_key_head_dim, config.linear_value_head_dim, config.linear_num_value_heads = key, value, heads
    with torch.device("meta"):
        net = Qwen3_5GatedDeltaNet(config, 0).to(torch.bfloat16).requires_grad_(False)
        net.hidden = torch.nn.Parameter(torch.empty(2, 512, config.hidden_size, dtype=torch.bfloat16))  # not counted
        mask = torch.ones(2, 512, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        measured = saved_bytes(net, lambda: net(net.hidden, attention_mask=mask)) / 1024
    nets = formulas.DeltaNets.of(config)
    assert nets.activation_bytes(kernels=False) == pytest.approx(measured, rel=0.005)
    assert nets.activation_bytes(kernels=True) < measured / 2


def test_the_engines_cache_has_pages_for_attention_and_one_state_per_group():
    """vLLM on Qwen3.5-9B: blocks of 528 tokens, for states of 2,146,304 bytes; 8 layers of 32 attend."""
    shape, work = formulas.shape_of(NINE_B), Workload(prompt_length=123, completion_length=4096)
    block = 8 * 528 * 4096
    assert shape.attending == 8
    assert formulas.engine_kv_bytes(shape, work, 0) == block
    assert formulas.engine_kv_bytes(shape, work, 5) == (5 * (3 + 8) + 1) * block
    assert formulas.DeltaNets.of(SEVEN_B) is None


def test_an_engine_has_no_more_sequences_than_states():
    """vLLM refuses CUDA graphs of more: "max_num_seqs (128) exceeds available Mamba cache blocks (45)"."""
    shape = formulas.shape_of(NINE_B)
    work = workload_of_file(Path(__file__).parents[2] / "examples/configs/qwen3.5-9b.yaml", 123)[1]
    block = formulas.engine_kv_bytes(shape, work, 0)
    tight = plan_run(shape, dataclasses.replace(work, kv_limit=45 * block), Gpu.of_gib(80))
    assert (tight.sequences, tight.engine_arguments()["max_num_seqs"]) == (4, 11)
    assert "max_num_seqs" not in plan_run(shape, work, Gpu.of_gib(141)).engine_arguments()
    assert plan_run(formulas.shape_of(SEVEN_B), work, Gpu.of_gib(80)).most_running is None


@pytest.mark.parametrize(
    ("installed", "capability", "triton", "tilelang", "remedy"),
    [
        (False, (9, 0), "3.6.0", False, "pip install 'flash-linear-attention[tilelang]'"),
        (False, (9, 0), "3.7.1", False, "pip install flash-linear-attention"),
        (True, (9, 0), "3.6.0", False, "pip install tilelang"),
        (True, (9, 0), "3.6.0", True, None),
    ],
)
def test_missing_kernels_are_found_at_the_start(monkeypatch, installed, capability, triton, tilelang, remedy):
    """Without them, or with a wrong Triton, the first update on an H200 took minutes."""
    versions = importlib.metadata.version
    monkeypatch.setattr(environment, "is_flash_linear_attention_available", lambda: installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: triton if name == "triton" else versions(name))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: tilelang or None)
    found = environment.delta_nets()
    assert [(problem.remedy.startswith(remedy), problem.fatal) for problem in found] == [(True, installed)] * bool(
        remedy
    )
