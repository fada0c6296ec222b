"""One engine for all: shared weights, adapter updates, noise and the probe."""

from unittest import mock

import pytest
import torch

from qerl_trl.noise.hooks import NoiseDraw, NormNoise
from qerl_trl.noise.norms import find_noisy_norms, multiplier_rms
from qerl_trl.rollout.engine import RolloutError
from tests.e2e.engine.engines import (
    DEVICE,
    EXACT,
    PROMPTS,
    adapter_on,
    gap,
    greedy,
    packed,
    randomize,
    stub_generation,
    write_model,
)

DRAW = NoiseDraw(5e-2, 7, 3, 1)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Policy, generation, and the parameters before the start."""
    policy = adapter_on(packed(write_model(tmp_path_factory.mktemp("live"))), rank=6, alpha=18)
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    return policy, stub_generation(policy), before


@pytest.fixture
def policy(started):
    return started[0]


@pytest.fixture
def g(started):
    return started[1]


def engine_of(g):
    from qerl_trl.rollout.vllm.engine import engine_model

    return engine_model(g.llm)


def put_noise(g, draw) -> None:
    g.trainer.aqn.draw = draw
    g.sync_noise()


def test_the_start_probes_and_leaves_no_trace(started):
    policy, g, before = started
    probe = g.probe_result
    assert probe.difference < EXACT and probe.base_difference < EXACT and probe.effect > 0.01
    assert all(torch.equal(before[n], p) for n, p in policy.named_parameters())


def check_shared(policy, g) -> None:
    mine, theirs = policy.get_base_model(), engine_of(g)
    layers, other = mine.model.layers, theirs.model.layers
    for a, b in (
        (layers[1].self_attn.q_proj.base_layer.weight_packed, other[1].self_attn.qkv_proj.weight_packed),
        (layers[1].mlp.down_proj.base_layer.weight_packed, other[1].mlp.down_proj.weight_packed),
        (layers[0].mlp.gate_proj.base_layer.weight_scale, other[0].mlp.gate_up_proj.weight_scale),
        (mine.model.embed_tokens.weight, theirs.model.embed_tokens.weight),
        (mine.lm_head.weight, theirs.lm_head.weight),
    ):
        assert a.data_ptr() == b.data_ptr()


def test_adapter_updates_reach_an_engine_in_the_trainers_memory(policy, g):
    check_shared(policy, g)
    buffers = [slot.layer.adapter_a.data_ptr() for slot in g.engine.state.slots.values()]
    for seed in range(1, 4):
        randomize(policy, seed)
        g.sync_weights()
        assert gap(policy, g.llm) < EXACT
    assert buffers == [slot.layer.adapter_a.data_ptr() for slot in g.engine.state.slots.values()]
    with policy.disable_adapter():
        assert gap(policy, g.llm) > 0.1  # as without the adapter
    check_shared(policy, g)


@pytest.mark.parametrize("scale", ["absolute", "relative"])
def test_noise_equals_the_trainers_and_sigma_zero_is_no_noise(policy, g, scale):
    norms = find_noisy_norms(policy)
    draw = DRAW if scale == "absolute" else DRAW._replace(scales=multiplier_rms(norms))
    g.sync_weights()
    g.engine.reset_prefix_cache()  # with cached prefixes the prefill would have another shape
    clean = greedy(g.llm)
    noise = NormNoise(norms)
    noise.set(draw)
    put_noise(g, draw)
    with noise.active():
        assert gap(policy, g.llm) < EXACT
    assert gap(policy, g.llm) > 0.1
    assert g.trainer.aqn.sigma_effective == pytest.approx(5e-2, rel=0.1)
    norms = g.engine.state.norms
    weights = {n: norms[n].weight.detach().clone() for n in g.trainer.aqn.norms}
    for name, weight in weights.items():
        assert torch.equal(weight, noise.norms[name].weight.float() + noise._noise[name].to(DEVICE))
    put_noise(g, draw._replace(step=4, generation=0))
    assert not any(torch.equal(weights[n], norms[n].weight) for n in weights), "another draw is another noise"
    put_noise(g, draw)
    assert all(torch.equal(weights[n], norms[n].weight) for n in weights), "the same draw is the same noise"
    put_noise(g, None)
    noise.remove()
    again = greedy(g.llm)
    assert clean[0] == again[0] and torch.equal(clean[1], again[1]), "sigma 0 is no noise, to the last bit"


def test_generate_puts_a_stale_adapter(policy, g):
    randomize(policy, 9)
    assert gap(policy, g.llm) > 0.1
    g.generate(PROMPTS, None, 1)
    assert gap(policy, g.llm) < EXACT


def test_the_probe_finds_a_wrong_engine(policy, g):
    scale = engine_of(g).model.layers[0].mlp.down_proj.weight_global_scale
    scale.mul_(3)
    with pytest.raises(RolloutError, match="other weights or norms"):
        g.run_probe()
    scale.div_(3)
    g.sync_weights()
    with mock.patch.object(g.engine.state, "load_adapter", lambda adapter, norms: len(adapter)):
        with pytest.raises(RolloutError, match="clean log-probabilities differ"):
            g.run_probe()
        for slot in g.engine.state.slots.values():
            slot.b_NR.zero_()
        with pytest.raises(RolloutError, match="the adapter acts otherwise"):
            g.run_probe()
    g.sync_weights()
    assert gap(policy, g.llm) < EXACT
