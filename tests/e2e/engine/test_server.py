"""A real server, started with the printed command."""

import json

import pytest
import requests
import torch

from qerl_trl.noise.hooks import NoiseDraw, NormNoise
from qerl_trl.noise.norms import find_noisy_norms
from qerl_trl.nvfp4.linear import set_compute
from qerl_trl.rollout.engine import RolloutError
from qerl_trl.rollout.server import ServerEngine
from qerl_trl.rollout.spec import EngineSpec
from qerl_trl.rollout.weights import UpdateLayout
from tests.e2e.engine.engines import (
    EXACT,
    NEW,
    PROMPTS,
    Server,
    adapter_on,
    logs_of,
    packed,
    randomize,
    trainer_of,
    transformers_logps,
    write_model,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(path, tmp_path_factory):
    server = Server(EngineSpec.of(adapter_on(packed(path)), max_model_len=256), tmp_path_factory.mktemp("server"))
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def mode(server):
    return {"vllm_mode": "server", "vllm_server_base_url": server.url}


@pytest.fixture(scope="module")
def trainer(path, mode, tmp_path_factory):
    """After two steps, without noise."""
    trainer = trainer_of(tmp_path_factory.mktemp("run"), path, score_centering_top_k=5, **mode)
    trainer.train()
    trainer.model.eval()
    trainer.vllm_generation.sync_noise()
    return trainer


@pytest.fixture
def g(trainer):
    return trainer.vllm_generation


def gap(trainer) -> float:
    asked = {"n": 1, "temperature": 0.0, "max_tokens": NEW, "logprobs": 0, "generation_kwargs": {"ignore_eos": True}}
    output = trainer.vllm_generation.vllm_client.generate(PROMPTS, **asked)
    logps = torch.tensor([[step[0] for step in sequence] for sequence in output["logprobs"]])
    policy = trainer.accelerator.unwrap_model(trainer.model)
    return (transformers_logps(policy, output["completion_ids"]) - logps).abs().max().item()


def test_steps_and_updates(trainer, g):
    first, second = logs_of(trainer)
    assert g.probe_result.difference < EXACT and first["sampling/sampling_logp_difference/max"] < 1e-3
    assert 0.1 < first["score_centering/head_mass"] < 1
    assert second["aqn/sigma_effective"] == pytest.approx(second["aqn/sigma"], rel=0.15)
    assert g.engine._local  # shared memory
    for seed in range(4):
        if seed == 2:
            g.engine._local, g.engine._layout = False, UpdateLayout(())  # as between two hosts
        randomize(trainer.accelerator.unwrap_model(trainer.model), seed)
        g.sync_weights()
        assert gap(trainer) < EXACT


def test_a_resumed_run_draws_the_same(g):
    """Although the server has sampled more since."""
    calls = dict(g._calls)

    def drawn() -> list[list[int]]:
        return g.generate(PROMPTS, None, 1)[1]

    first, other = drawn(), drawn()
    g._calls = calls
    assert drawn() == first != other
    with pytest.raises(RolloutError, match="/v1/completions answered"):
        g.vllm_client.generate(PROMPTS, temperature=-1.0)


def test_noise_and_a_damaged_update_and_strangers(trainer, g, server):
    noise, draw = NormNoise(find_noisy_norms(trainer.accelerator.unwrap_model(trainer.model))), NoiseDraw(5e-2, 1, 2, 3)
    noise.set(draw)
    assert g.engine.put(None, tuple(noise.norms), draw) == pytest.approx(5e-2, rel=0.15)
    assert gap(trainer) > 0.1
    with noise.active():
        assert gap(trainer) < EXACT
        update = g.engine._deliver(g.trained._update(g.trained.parameters())) | {"checksum": "another"}
        with pytest.raises(RolloutError, match="arrived damaged"):
            g.engine.client.call("qerl_put", json.dumps({"update": update, "noisy": [], "draw": None}))
        assert gap(trainer) < EXACT
        check_strangers(server.url)
        assert gap(trainer) < EXACT


def check_strangers(url: str) -> None:
    """Requests without the secret are refused, with vLLM's development mode on."""
    noise = {"method": "qerl_put", "args": ['{"update": null, "noisy": [], "draw": [0.5, 1, 2, 3]}'], "reset": False}
    bodies = {"/qerl/call": noise, "/v1/completions": {"prompt": "x", "max_tokens": 1}, "/collective_rpc": noise}
    for path, body in {**bodies, "/sleep": {}}.items():
        assert requests.post(url + path, json=body, timeout=60).status_code == 401, path
    assert requests.get(url + "/health", timeout=60).status_code == 200


def test_a_server_with_other_weights_is_refused(server, path, mode, tmp_path):
    other = adapter_on(packed(path, "four_over_six"))
    set_compute(other, "w4a8")
    with pytest.raises(RuntimeError, match="scale_rule='rtn' there, 'four_over_six' in the trainer") as refused:
        ServerEngine(server.url, EngineSpec.of(other), other, timeout=10)
    words = ["QERL_SERVER_SECRET in the server's environment", "vllm serve", '"scale_rule": "four_over_six"']
    for word in (*words, "its NVFP4 products are w4a16, the trainer's w4a8", '"compute": "w4a8"'):
        assert word in str(refused.value)
    said = r'NVFP4 there and dense in the trainer: model\.layers\.0(.|\n)*"base": "dense"'
    with pytest.raises(RuntimeError, match=said):
        trainer_of(tmp_path, path, base_format="bf16", **mode)


def test_a_dead_server_ends_the_run(g, server):
    from requests.adapters import HTTPAdapter

    server.stop()
    g.trainer.args.rollout_timeout = 60
    g.vllm_client.session.adapters.clear()  # no retries: they only delay the answer
    g.vllm_client.session.mount("http://", HTTPAdapter())
    with pytest.raises(RolloutError, match="refused"):
        g.generate(PROMPTS, None, 1)
