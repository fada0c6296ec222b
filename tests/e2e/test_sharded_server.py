"""Server mode under FSDP 2: two processes with a sharded trainer, of which only the first knows the server.

The server is a stand-in over a copy of the model from before the sharding.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from qerl_trl.rollout import server
from qerl_trl.rollout.spec import LOGPROBS_MODE
from qerl_trl.support.names import full_tensor, is_sharded
from tests.e2e.sharding import FSDP, as_accelerators
from tests.faults.stand_in import StandIn
from tests.ranks import on_ranks


class StandInServer(server.ServerEngine):
    def __init__(self, url, spec, model, timeout):
        assert os.environ["RANK"] == "0", "only the main process has a connection"
        self.engine, self.puts = StandIn(model), 0
        info = {"model_config": {"logprobs_mode": LOGPROBS_MODE}}
        self.client = SimpleNamespace(generate=self.sampled, get_server_info=lambda: info)

    def put(self, update, noisy=(), draw=None):
        self.puts += update is not None
        return self.engine.put(update, noisy, draw)

    def contents(self):
        return self.engine.contents()

    def _complete(self, prompts, sampling):
        return self.engine.generate(prompts, sampling)

    def sampled(self, prompts, n, temperature, max_tokens, **others):
        """As TRL's client: `n` completions of each prompt."""
        made = [self.engine._complete(prompt, max_tokens, temperature) for prompt in prompts for _ in range(n)]
        logprobs = [[[logp] for logp in each.logps] for each in made]
        return {"prompt_ids": prompts, "completion_ids": [each.tokens for each in made], "logprobs": logprobs}

    def close(self):
        """Nothing is open."""


def test_one_connection_updates_and_serves_both_processes(tiny_runs, tmp_path):
    def work(rank):
        torch.set_num_threads(1)
        os.environ |= FSDP
        as_accelerators()
        server.ServerEngine = StandInServer
        options = {"use_vllm": True, "vllm_mode": "server", "max_completion_length": 6, "save_strategy": "no"}
        trainer = tiny_runs.trainer(tmp_path / "run", **options, aqn_sigma_start=5e-2)
        assert trainer.vllm_generation.waits
        trainer.train()
        generation, model = trainer.vllm_generation, trainer.model
        assert is_sharded(model) and generation.probe_result.difference < 1e-4
        assert generation.noise_result.difference < 1e-4 or rank
        assert type(generation.engine).__name__ == ("RankWithoutEngine" if rank else "StandInServer")
        assert rank or generation.engine.puts >= 4, "the probe's, and one for each step"
        clean, noisy = (log for log in trainer.state.log_history if "loss" in log)
        assert clean["sampling/sampling_logp_difference/max"] < 1e-3 and clean["aqn/sigma"] == 0 < noisy["aqn/sigma"]
        if not rank:  # known only with an engine
            assert clean["aqn/sigma_effective"] == 0
            assert noisy["aqn/sigma_effective"] == pytest.approx(noisy["aqn/sigma"], rel=0.2)
        adapter = {n: full_tensor(p).numpy() for n, p in model.named_parameters() if p.requires_grad}
        return noisy["aqn/sigma"], adapter

    outcomes = on_ranks(2, work, 400)
    assert all(isinstance(outcome.answer, tuple) for outcome in outcomes), outcomes
    (sigma, adapter), (other_sigma, other) = (outcome.answer for outcome in outcomes)
    assert sigma == other_sigma
    for name, tensor in adapter.items():
        assert (tensor == other[name]).all() and tensor.any(), name
