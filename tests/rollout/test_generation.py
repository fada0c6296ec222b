"""What TRL's generation is told on our behalf. The engine is the stand-in."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from qerl_trl.noise.hooks import NoiseDraw
from tests.faults.stand_in import StandIn, make_trainer  # noqa: F401  (a fixture)


class Asked(StandIn):
    """Keeps the sampling arguments of its calls."""

    def _llm_generate(self, prompts, sampling_params, use_tqdm=False):
        self.asked = sampling_params
        return super()._llm_generate(prompts, sampling_params, use_tqdm)


@pytest.mark.parametrize(("chosen", "text"), [({"ignore_eos": True}, False), ({"stop": ["done"]}, True)], ids=str)
def test_vllm_makes_text_only_where_it_looks_for_words(make_trainer, chosen, text):  # noqa: F811
    """TRL reads tokens. For 64 sequences their text takes as long as a step of the GPU."""
    trainer = make_trainer(engine=Asked, generation_kwargs=chosen, max_steps=1)
    trainer.train()
    asked = trainer.vllm_generation.engine.asked
    assert asked.detokenize is text
    assert {name: getattr(asked, name) for name in chosen} == chosen
    assert trainer.args.generation_kwargs == chosen, "the user's settings stay as they are"


class Ends(Asked):
    """Keeps those of the greedy ones too."""

    def generate(self, prompts, sampling):
        self.greedy = sampling
        return super().generate(prompts, sampling)


@pytest.fixture
def other_end(tiny_tokenizer):
    """The tokenizer with an end token that the model's files do not name; its id."""
    before, tiny_tokenizer.eos_token = tiny_tokenizer.eos_token, "Z"
    yield tiny_tokenizer.eos_token_id
    tiny_tokenizer.eos_token = before


@pytest.mark.parametrize(
    ("chosen", "added"), [({}, []), ({"stop_token_ids": [7]}, [7]), ({"ignore_eos": True}, None)], ids=str
)
def test_vllm_ends_completions_where_the_trainer_does(make_trainer, other_end, chosen, added):  # noqa: F811
    """vLLM knows the checkpoint's end tokens alone, not those of another tokenizer nor the chat template's."""
    trainer = make_trainer(engine=Ends, generation_kwargs=chosen, max_steps=1)
    trainer.train()
    engine = trainer.vllm_generation.engine
    assert trainer.eos_token_ids == [other_end, 1, *(added or [])]
    assert (engine.asked.stop_token_ids or []) == ([] if added is None else trainer.eos_token_ids)
    trainer.vllm_generation.generate_greedily([[5, 6, 7]], 2)
    assert list(engine.greedy.stop_token_ids) == trainer.eos_token_ids, "a measurement ignores no end"


class Puts(StandIn):
    """Keeps what was put: whether weights, and under which noise."""

    def __init__(self, policy):
        super().__init__(policy)
        self.puts = []

    def put(self, update, noisy=(), draw=None):
        self.puts.append((update is not None, draw))
        return super().put(update, noisy, draw)


def test_weights_and_noise_of_a_rollout_are_put_at_once(make_trainer):  # noqa: F811
    """The first rollout's weights are those that the probe has left."""
    trainer = make_trainer(engine=Puts, max_steps=4)
    trainer.vllm_generation.engine.puts.clear()
    trainer.train()
    put = [(weights, draw and draw.step) for weights, draw in trainer.vllm_generation.engine.puts]
    assert put == [(True, None), (True, 2), (True, 3)]


def test_what_was_put_is_known_by_one_reading(make_trainer, monkeypatch):  # noqa: F811
    """Of weights that this process has whole, the fingerprint of what was put is what they are compared with afterwards; a step's other one was
    read to be found different, which the step's number says."""
    trainer = make_trainer(engine=Puts)
    generation, read = trainer.vllm_generation, []
    stamp = generation.trained.stamp
    monkeypatch.setattr(generation.trained, "stamp", lambda: read.append(stamp()) or read[-1])
    trainer.state.global_step += 1
    generation.engine.puts.clear()
    with generation._up_to_date():
        assert read == []
    with generation._up_to_date():
        assert len(read) == 1 and generation._stamp == (trainer.state.global_step, read[0])
    assert read[0] == generation._put and len(generation.engine.puts) == 1


def test_no_noise_over_no_noise_is_not_put(make_trainer):  # noqa: F811
    trainer = make_trainer(engine=Puts)
    generation, puts = trainer.vllm_generation, trainer.vllm_generation.engine.puts
    trainer.train()
    puts.clear()
    trainer.model.eval()
    generation.sync_noise(NoiseDraw(0.5, 0, 0, 0))
    for _ in range(2):
        generation.generate_greedily([[5, 6, 7]], 2)
    generation.sync_noise(NoiseDraw(0.0, 0, 7, 0))
    assert [draw.sigma for _, draw in puts] == [0.5, 0.0]


class Counts(StandIn):
    """Counts the probes' calls."""

    probed = 0

    def generate(self, prompts, sampling):
        self.probed += 1
        return super().generate(prompts, sampling)


def test_the_noise_is_probed_on_what_the_first_probe_measured_of_the_same_model(make_trainer):  # noqa: F811
    """A fresh adapter adds nothing, so that the model without it is the model as it is; one that was loaded since is measured."""
    trainer = make_trainer(engine=Counts)
    generation, norms = trainer.vllm_generation, trainer.aqn.norms

    def since() -> int:
        count, generation.engine.probed = generation.engine.probed, 0
        return count

    known = generation.noise_result
    assert norms and since() == 3  # without and with the probe adapter, and under noise
    generation.probe_noise()
    assert since() == 1 and generation.noise_result == known
    with torch.no_grad():
        next(p for name, p in trainer.model.named_parameters() if "lora_B" in name).normal_(std=0.3)
    generation.sync_weights()
    generation.probe_noise()
    assert since() == 2 and generation.noise_result != known
    generation.run_probe()
    assert generation._clean is None  # the model without the adapter is another one


class Served(StandIn):
    """Behind TRL's client of a server; keeps the seeds of its completions."""

    def __init__(self, policy, base_fault=None):
        super().__init__(policy, base_fault)
        self.seeds = []

    def trl_attributes(self):
        info = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        return {"vllm_client": SimpleNamespace(generate=self.answer, get_server_info=lambda: info)}

    def answer(self, prompts, n, temperature, top_p, max_tokens, generation_kwargs, **others):
        """Completion i of a prompt is drawn with its seed + i, as vLLM does."""
        seeds = [seed + i for seed in generation_kwargs["seed"].of(len(prompts)) for i in range(n)]
        self.seeds.append(seeds)
        asked = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
        rows = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(n)]
        outputs = self._llm_generate(rows, [SimpleNamespace(**asked, seed=seed) for seed in seeds])
        completions = [output.outputs[0] for output in outputs]
        logps = [[[next(iter(step.values())).logprob] for step in each.logprobs] for each in completions]
        return {"prompt_ids": prompts, "completion_ids": [each.token_ids for each in completions], "logprobs": logps}


def logged(trainer):
    """The log but for times and memory."""
    left_out = ("seconds/", "step_time", "train_", "memory/", "eval_runtime", "eval_samples_per", "eval_steps_per")
    left_out += ("eval_step_time",)
    return [{k: v for k, v in log.items() if not k.startswith(left_out)} for log in trainer.state.log_history]


def test_on_a_server_a_run_is_resumed_exactly(make_trainer, tmp_path):  # noqa: F811
    """The server's generator is in no checkpoint. Rollouts of a step, and evaluations, draw other numbers."""
    options = {
        "vllm_mode": "server", "gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 4, "learning_rate": 1e-2,
        "aqn_num_stages": 3, "rollout_mismatch_threshold": None, "rollout_probe_steps": 0, "save_strategy": "steps", "save_steps": 1,
        "eval_strategy": "steps", "eval_steps": 1,
    }  # fmt: skip
    trainer = make_trainer(engine=Served, **options)
    trainer.train()
    seeds = trainer.vllm_generation.engine.seeds
    drawn = [seed for rollout in seeds for seed in rollout]
    assert len(seeds) > 8 and len(set(drawn)) == len(drawn)  # two rollouts in each of four steps, and the evaluations
    folder = tmp_path / "again"
    shutil.copytree(tmp_path / "run" / "checkpoint-2", folder / "checkpoint-2")
    again = make_trainer(engine=Served, **options | {"output_dir": str(folder), "save_steps": 100})
    again.vllm_generation.engine.generator.manual_seed(99)
    trained = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if ".lora_" in name}
    for _ in range(2):  # the second time by a trainer that was resumed before
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert logged(again) == logged(trainer)
        resumed = dict(again.model.named_parameters())
        assert all(torch.equal(resumed[name], value) for name, value in trained.items())
