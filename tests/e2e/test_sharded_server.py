"""Server mode under FSDP 2: two processes with a sharded trainer, of which only the first knows the server.

The server is a stand-in over a copy of the model from before the sharding: a half-gathered adapter, a lost update or
other noise fails the checks of a real engine; a collective operation in one process only ends in the time limit.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from qerl_trl.rollout import server
from qerl_trl.rollout.engine import Completion, Sampling
from qerl_trl.rollout.spec import LOGPROBS_MODE
from qerl_trl.support.names import full_tensor, is_sharded
from tests.e2e.sharding import FSDP, as_accelerators
from tests.faults.stand_in import StandIn
from tests.ranks import on_ranks

PROMPTS = [[10 + i, 20, 30, 40] for i in range(3)]


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


@torch.no_grad()
def logps_of(model, completions):
    ids = torch.tensor([prompt + c.tokens for prompt, c in zip(PROMPTS, completions, strict=True)])
    logits = model.eval()(input_ids=ids, use_cache=False).logits[:, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    return logits.gather(-1, ids[:, len(PROMPTS[0]) :, None]).squeeze(-1)


@pytest.fixture(scope="module")
def both(tiny_runs, tmp_path_factory):
    """Results of each process."""
    folder = tmp_path_factory.mktemp("server")

    def work(rank):
        torch.set_num_threads(1)
        os.environ |= FSDP
        as_accelerators()
        server.ServerEngine = StandInServer
        options = {"use_vllm": True, "vllm_mode": "server", "max_completion_length": 6, "save_strategy": "no"}
        trainer = tiny_runs.trainer(folder / "run", **options, aqn_sigma_start=5e-2)
        assert trainer.vllm_generation.waits
        trainer.train()
        generation, model = trainer.vllm_generation, trainer.model
        completions = generation.complete(PROMPTS[: 3 - rank], Sampling(5))  # another number in each process
        padded = completions + [Completion([2] * 5, [0.0] * 5)] * rank  # a forward of both: it gathers
        logps = logps_of(model, padded)[: 3 - rank]
        return {
            "engine": type(generation.engine).__name__,
            "puts": getattr(generation.engine, "puts", None),
            "sharded": is_sharded(model),
            "probe": generation.probe_result.difference,
            "noise": generation.noise_result.difference,
            "gap": (logps - torch.tensor([c.logps for c in completions])).abs().max().item(),
            "logs": [log for log in trainer.state.log_history if "loss" in log],
            "adapter": {n: full_tensor(p).numpy() for n, p in model.named_parameters() if p.requires_grad},
        }

    outcomes = on_ranks(2, work, 400)
    assert all(isinstance(outcome.answer, dict) for outcome in outcomes), outcomes
    return [outcome.answer for outcome in outcomes]


def test_only_the_main_process_has_a_connection(both):
    assert [found["engine"] for found in both] == ["StandInServer", "RankWithoutEngine"]
    assert all(found["sharded"] for found in both)
    assert both[0]["puts"] >= 4  # the probe's, and one for each step


def test_the_server_gets_the_whole_adapter(both):
    for found in both:
        assert found["probe"] < 1e-4 and found["gap"] < 1e-4
        assert found["logs"][0]["sampling/sampling_logp_difference/max"] < 1e-3  # no noise in the first stage
    for name, tensor in both[0]["adapter"].items():
        assert (tensor == both[1]["adapter"][name]).all() and tensor.any(), name


def test_the_server_gets_the_same_noise(both):
    assert both[0]["noise"] < 1e-4
    first, second = ([log["aqn/sigma"] for log in found["logs"]] for found in both)
    assert first == second and first[0] == 0 < first[1]
    effective = [log["aqn/sigma_effective"] for log in both[0]["logs"]]  # known only with an engine
    assert effective[0] == 0 and effective[1] == pytest.approx(first[1], rel=0.2)
