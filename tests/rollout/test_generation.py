"""TRL's generation with our arguments, updates and seeds, in the stand-in engine of tests/faults."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from trl import GRPOTrainer

from qerl_trl.rollout.generation import agreed
from qerl_trl.update import one_pass
from tests.faults.stand_in import StandIn
from tests.faults.tiny_runs import logged
from tests.ranks import on_ranks


class Recording(StandIn):
    """Keeps the sampling arguments of its calls, and its updates: whether weights, and under which noise."""

    def __init__(self, policy):
        super().__init__(policy)
        self.puts = []

    def _llm_generate(self, prompts, sampling_params, use_tqdm=False):
        self.asked = sampling_params
        return super()._llm_generate(prompts, sampling_params, use_tqdm)

    def generate(self, prompts, sampling):
        self.greedy = sampling
        return super().generate(prompts, sampling)

    def put(self, update, noisy=(), draw=None):
        self.puts.append((update is not None, draw))
        return super().put(update, noisy, draw)


@pytest.fixture
def other_end(tiny_tokenizer):
    """Id of the tokenizer's end token, which is not in the model's files."""
    before, tiny_tokenizer.eos_token = tiny_tokenizer.eos_token, "Z"
    yield tiny_tokenizer.eos_token_id
    tiny_tokenizer.eos_token = before


@pytest.mark.parametrize(
    ("chosen", "added", "text"),
    [({"stop_token_ids": [7]}, [7], False), ({"ignore_eos": True}, None, False), ({"stop": ["done"]}, [], True)],
    ids=str,
)
def test_vllm_ends_completions_where_the_trainer_does(engine_trainer, other_end, chosen, added, text):
    """vLLM knows only the checkpoint's end tokens, and decodes text only to look for words."""
    trainer = engine_trainer(engine=Recording, generation_kwargs=chosen, max_steps=1)
    trainer.train()
    engine = trainer.vllm_generation.engine
    assert engine.asked.detokenize is text
    assert trainer.eos_token_ids == [other_end, 1, *(added or [])]
    assert (engine.asked.stop_token_ids or []) == ([] if added is None else trainer.eos_token_ids)
    assert trainer.args.generation_kwargs == chosen, "the user's settings are unchanged"
    trainer.vllm_generation.generate_greedily([[5, 6, 7]], 2)
    assert list(engine.greedy.stop_token_ids) == trainer.eos_token_ids, "a measurement ignores no end"


def test_weights_and_noise_of_a_rollout_are_one_update(engine_trainer):
    """The first rollout has the weights of the probe."""
    trainer = engine_trainer(engine=Recording, max_steps=4)
    trainer.vllm_generation.engine.puts.clear()
    trainer.train()
    put = [(weights, draw and draw.step) for weights, draw in trainer.vllm_generation.engine.puts]
    assert put == [(True, None), (True, 2), (True, 3)]


class Served(StandIn):
    """As TRL's client of a server; keeps the seeds of its completions."""

    def __init__(self, policy, base_fault=None):
        super().__init__(policy, base_fault)
        self.seeds = []

    def trl_attributes(self):
        info = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        return {"vllm_client": SimpleNamespace(generate=self.answer, get_server_info=lambda: info)}

    def answer(self, prompts, n, temperature, top_p, max_tokens, generation_kwargs, **others):
        """As vLLM: completion i of a prompt has its seed + i."""
        seeds = [seed + i for seed in generation_kwargs["seed"].of(len(prompts)) for i in range(n)]
        self.seeds.append(seeds)
        asked = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "logprobs": 0}
        rows = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(n)]
        outputs = self._llm_generate(rows, [SimpleNamespace(**asked, seed=seed) for seed in seeds])
        completions = [output.outputs[0] for output in outputs]
        logps = [[[next(iter(step.values())).logprob] for step in each.logprobs] for each in completions]
        return {"prompt_ids": prompts, "completion_ids": [each.token_ids for each in completions], "logprobs": logps}


def test_a_resumed_run_on_a_server_draws_the_same(engine_trainer, tmp_path):
    """No checkpoint has the server's generator. Every rollout and evaluation draws other numbers."""
    options = {"vllm_mode": "server", "gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 3}
    options |= {"learning_rate": 1e-2, "aqn_num_stages": 3, "rollout_mismatch_threshold": None}
    options |= {"rollout_probe_steps": 0, "save_strategy": "steps", "save_steps": 1, "max_completion_length": 2}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 1}
    trainer = engine_trainer(engine=Served, **options)
    trainer.train()
    seeds = trainer.vllm_generation.engine.seeds
    drawn = [seed for rollout in seeds for seed in rollout]
    assert len(seeds) > 6 and len(set(drawn)) == len(drawn)  # two rollouts in each of three steps, and an evaluation
    folder = tmp_path / "again"
    shutil.copytree(tmp_path / "run" / "checkpoint-1", folder / "checkpoint-1")
    again = engine_trainer(engine=Served, **options | {"output_dir": str(folder), "save_steps": 100})
    again.vllm_generation.engine.generator.manual_seed(99)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    for key in ("loss", "reward", "eval_reward", "rollout/mismatch_kl", "aqn/sigma_effective"):
        assert len(logged(trainer, key)) > 0 and logged(again, key) == logged(trainer, key), key
    resumed = dict(again.model.named_parameters())
    assert all(torch.equal(resumed[name], p) for name, p in trainer.model.named_parameters() if ".lora_" in name)


ROOM = {"kv_cache_memory_bytes": 8 << 30, "gpu_memory_utilization": 0.01, "max_num_batched_tokens": 16384}
LESS = ROOM | {"kv_cache_memory_bytes": 2 << 30, "max_num_batched_tokens": 4096, "max_num_seqs": 11}


def test_processes_of_one_engine_agree_on_their_memory():
    """Each runs a scheduler: with other steps than its neighbour's it would hang, or sample other tokens."""

    def work(rank):
        PartialState(cpu=True)
        return agreed([ROOM, LESS][rank], torch.distributed.group.WORLD)

    one, two = (outcome.answer for outcome in on_ranks(2, work))
    assert one == two == LESS and agreed(ROOM, None) is ROOM


CENTERED = {"score_centering_top_k": 20, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize("corrected", [True, False])
def test_score_centering_in_a_run(engine_trainer, monkeypatch, corrected):
    """Two rollouts of two updates: the engine's candidates meet their completions and the trainer's logits."""
    seen, terms, term, loss = [], [], one_pass.centering_term, GRPOTrainer._compute_loss

    def compute_loss(trainer, model, batch):
        ids, mask = (torch.cat([batch[f"prompt_{of}"], batch[f"completion_{of}"]], 1) for of in ("ids", "mask"))
        with torch.no_grad():
            p = model(ids, attention_mask=mask).logits[:, batch["prompt_ids"].shape[1] - 1 : -1].log_softmax(-1)
        q, top, sampled = batch["sampler_top_logps"], batch["sampler_top_ids"], batch["sampling_per_token_logps"]
        known = top == batch["completion_ids"][..., None]
        assert known.any() and torch.equal(q[known], sampled[..., None].expand_as(q)[known])
        seen.append((p.gather(-1, top), q, batch["completion_mask"].bool()))
        return loss(trainer, model, batch)

    def watched(trained, sampled, weight):
        p, q, mask = seen[-1]
        torch.testing.assert_close(trained[mask], p[mask], rtol=1e-4, atol=1e-4)
        assert torch.equal(sampled, q) and weight.high == (3.0 if corrected else 1.0)
        terms.append(term(trained, sampled, weight))
        return terms[-1]

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", compute_loss)
    monkeypatch.setattr(one_pass, "centering_term", watched)
    options = {"vllm_importance_sampling_correction": corrected, "padding_free": corrected, "steps_per_generation": 4}
    options |= {"aqn_schedule": "constant", "aqn_sigma_start": 0.1, "model_init_kwargs": {"dtype": "float32"}}
    trainer = engine_trainer(**CENTERED | options, max_steps=4)
    trainer.train()
    assert len(terms) == 8 and all(0.05 < share < 1 for share in logged(trainer, "score_centering/head_mass"))
    largest = max(each.abs().max() for each in terms[4:])
    assert largest < 1e-5 if corrected else largest > 0.01, "a weighted score is centered if no weight is cut off"


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_score_centering_is_averaged_as_the_loss(engine_trainer, monkeypatch, loss_type):
    """With a term of 1 per token, and TRL's of -1, their means with the advantages cancel."""
    monkeypatch.setattr(one_pass, "centering_term", lambda trained, *_: torch.ones_like(trained[..., 0]))
    options = {"loss_type": loss_type, "vllm_importance_sampling_correction": False, "max_completion_length": 9}
    trainer = engine_trainer(**CENTERED | options, steps_per_generation=2, max_steps=2, aqn=False)
    trainer.train()
    assert logged(trainer, "loss") == pytest.approx([0.0, 0.0], abs=1e-6) and any(logged(trainer, "reward_std"))
