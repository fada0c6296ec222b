"""Server mode under FSDP 2: two processes share the trainer's weights out, and only the first one knows the server.

In place of the server there is a twin of the policy, copied before anything was sharded: it computes what it was sent,
so an adapter that was
gathered by half, an update that stayed away or noise on other norms is found by the checks of a real engine. A
collective operation in one
process alone ends in the limit of time.
"""

import copy
import os
from types import SimpleNamespace

import pytest
import torch

from qerl_trl.noise.hooks import NormNoise
from qerl_trl.noise.norms import find_noisy_norms
from qerl_trl.rollout import server
from qerl_trl.rollout.engine import Completion, Contents, Engine, Sampling, update_fingerprint
from qerl_trl.rollout.spec import LOGPROBS_MODE, active_adapter, rollout_layers
from qerl_trl.support.names import full_tensor, is_sharded
from tests.ranks import on_ranks
from tests.test_sharded import FSDP, as_accelerators

PROMPTS = [[10 + i, 20, 30, 40] for i in range(3)]


class TwinServer(server.ServerEngine):
    """A `ServerEngine` whose server is a whole copy of the trainer's model."""

    def __init__(self, url, spec, model, timeout):
        assert os.environ["RANK"] == "0", "only the main process has a connection"
        self.model = copy.deepcopy(model).eval()
        vars(self.model.get_base_model()).pop("forward", None)  # TRL's, which computes with the model that was copied
        self.layers, self.adapter = rollout_layers(self.model), active_adapter(self.model)
        self.noise = NormNoise(find_noisy_norms(self.model))
        told = {"model_config": {"logprobs_mode": LOGPROBS_MODE}}
        self.client = SimpleNamespace(generate=self.sampled, get_server_info=lambda: told)
        self.state = Contents(None, [], None)
        self.puts = 0

    @torch.no_grad()
    def put_adapter(self, adapter, norms):
        assert not norms and adapter.keys() == self.layers.keys()
        for name, tensors in adapter.items():
            layer = self.layers[name]
            assert tensors.scaling == layer.scaling[self.adapter]
            layer.lora_A[self.adapter].weight.copy_(tensors.a)  # of the whole shape, or this raises
            layer.lora_B[self.adapter].weight.copy_(tensors.b)
        self.puts += 1
        self.state = self.state._replace(received=update_fingerprint(adapter, norms))

    def set_noise(self, norms, draw):
        assert set(norms) == set(self.noise.norms)
        self.noise.set(draw)
        self.state = self.state._replace(draw=draw)
        self.logits([[5]])
        return self.noise.sigma_effective()

    put = Engine.put

    def contents(self):
        return self.state

    def reset_prefix_cache(self):
        """It has none."""

    @torch.no_grad()
    def logits(self, ids):
        with self.noise.active():
            return self.model(input_ids=torch.tensor(ids), use_cache=False).logits[:, -1].log_softmax(-1)

    def one(self, prompt, sampling):
        tokens, logps = [], []
        for _ in range(sampling.max_tokens):
            found = self.logits([[*prompt, *tokens]])[0]
            token = int(found.argmax() if sampling.temperature == 0 else torch.multinomial(found.exp(), 1))
            tokens.append(token)
            logps.append(float(found[token]))
        return Completion(tokens, logps)

    def _complete(self, prompts, sampling):
        return [self.one(prompt, sampling) for prompt in prompts]

    def sampled(self, prompts, n, temperature, max_tokens, **others):
        """As TRL's client: `n` completions of each prompt."""
        made = [self.one(prompt, Sampling(max_tokens, temperature)) for prompt in prompts for _ in range(n)]
        return {
            "prompt_ids": prompts,
            "completion_ids": [completion.tokens for completion in made],
            "logprobs": [[[logp] for logp in completion.logps] for completion in made],
        }

    def close(self):
        """Nothing is open."""


@torch.no_grad()
def logps_of(model, completions):
    ids = torch.tensor([prompt + c.tokens for prompt, c in zip(PROMPTS, completions, strict=True)])
    logits = model.eval()(input_ids=ids, use_cache=False).logits[:, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    return logits.gather(-1, ids[:, len(PROMPTS[0]) :, None]).squeeze(-1)


@pytest.fixture(scope="module")
def both(tiny_runs, tmp_path_factory):
    """What each process found."""
    folder = tmp_path_factory.mktemp("server")

    def work(rank):
        torch.set_num_threads(1)
        os.environ |= FSDP
        as_accelerators()
        server.ServerEngine = TwinServer
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
    for outcome in outcomes:
        assert isinstance(outcome.answer, dict), outcome
    return [outcome.answer for outcome in outcomes]


def test_only_the_main_process_has_a_connection(both):
    assert [found["engine"] for found in both] == ["TwinServer", "RankWithoutEngine"]
    assert all(found["sharded"] for found in both)
    assert both[0]["puts"] >= 4  # the probe's, and one for each step


def test_the_server_gets_the_whole_adapter(both):
    for found in both:
        assert found["probe"] < 1e-4 and found["gap"] < 1e-4
        assert found["logs"][0]["sampling/sampling_logp_difference/max"] < 1e-3  # no noise in the first stage
    for name, tensor in both[0]["adapter"].items():
        assert (tensor == both[1]["adapter"][name]).all()
        assert tensor.any(), f"{name} was not trained"


def test_the_noise_is_the_servers_too(both):
    assert both[0]["noise"] < 1e-4
    first, second = ([log["aqn/sigma"] for log in found["logs"]] for found in both)
    assert first == second and first[0] == 0 < first[1]
    effective = [log["aqn/sigma_effective"] for log in both[0]["logs"]]  # the other one has no engine that could tell
    assert effective[0] == 0 and effective[1] == pytest.approx(first[1], rel=0.2)
