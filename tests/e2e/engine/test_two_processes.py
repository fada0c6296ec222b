"""Two processes of a trainer: one engine of both, sharded weights, a shipped recipe under FSDP 2."""

import json
import os
import runpy
from pathlib import Path

import pytest
import torch
from accelerate.utils import gather_object

from qerl_trl.support.names import is_sharded, set_whole
from tests.e2e.engine.engines import DEVICE, EXACT, MEMORY, PROMPTS, gap, logs_of, randomize, trainer_of, write_model
from tests.e2e.sharding import FSDP, as_accelerators
from tests.e2e.test_recipes import EXAMPLES, INSTEAD, words, write_tiny_model
from tests.ranks import on_ranks

#: two processes that each spin on one core
ENVIRONMENT, ALONE, TWO_DEVICES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, True, True


def both(work) -> None:
    """`work(rank)` in each process, without an error."""
    for segment in Path("/dev/shm").glob("-tp:*cpushm_*"):  # of an earlier engine
        segment.unlink(missing_ok=True)
    for outcome in on_ranks(2, work, 500):
        assert outcome.answer is None, outcome


def check_steps(trainer) -> None:
    g, (clean, noisy) = trainer.vllm_generation, logs_of(trainer)
    assert g.probe_result.difference < EXACT and g.noise_result.difference < EXACT and not g.shared
    assert clean["sampling/sampling_logp_difference/max"] < 1e-3
    assert clean["aqn/sigma"] == clean["aqn/sigma_effective"] == 0 < noisy["aqn/sigma"]
    assert noisy["aqn/sigma_effective"] == pytest.approx(noisy["aqn/sigma"], rel=0.15)


def test_one_engine_of_both_draws_the_same_tokens(tmp_path):
    """Although the processes' generators differ, as after dropout or a reward model."""
    path = write_model(tmp_path)

    def work(rank):
        from vllm import SamplingParams

        trainer = trainer_of(tmp_path, path, vllm_tensor_parallel_size=2)
        trainer.train()
        check_steps(trainer)
        g, policy = trainer.vllm_generation, trainer.accelerator.unwrap_model(trainer.model).eval()
        randomize(policy, 5)
        g.sync_weights()
        g.sync_noise()
        assert gap(policy, g.llm) < EXACT
        torch.manual_seed(rank)
        state = torch.cuda.get_rng_state if DEVICE == "cuda" else torch.get_rng_state
        before, sampling = state(), SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
        (drawn,) = g.llm.generate([{"prompt_token_ids": PROMPTS[0]}], sampling, use_tqdm=False)
        one, other = gather_object([list(drawn.outputs[0].token_ids)])
        assert one == other and len(set(one)) > 1
        # the second process has its own generator again
        assert gather_object([not torch.equal(before, state())]) == [True, False]

    both(work)


def random_adapter(policy, seed: int) -> None:
    """The same in every process, on sharded parameters too."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            set_whole(parameter, torch.randn(parameter.shape, generator=generator) * 0.1)


def test_one_engine_of_a_sharded_trainer(tmp_path):
    """Built after accelerate has sharded the trainer by FSDP 2; an engine each: the recipe below."""
    path = write_model(tmp_path)

    def work(rank):
        os.environ |= FSDP
        as_accelerators()
        trainer = trainer_of(tmp_path, path, per_device_train_batch_size=4, vllm_tensor_parallel_size=2)
        trainer.train()
        check_steps(trainer)
        g, policy = trainer.vllm_generation, trainer.model.eval()
        _, down, _ = next(iter(g.trained.layers.values()))
        assert is_sharded(policy) and type(down.weight).__name__ == "DTensor"
        for seed in range(1, 3):
            random_adapter(policy, seed)
            g.sync_weights()
            g.sync_noise()
            assert gap(policy, g.llm) < EXACT

    both(work)


def test_a_recipe_under_fsdp_with_its_own_optimizer(tmp_path):
    """With an engine in each process, and held-out problems divided between them."""
    instead = {name: value for name, value in INSTEAD.items() if name != "optim"} | {
        "model_name_or_path": write_tiny_model("qwen2.5-3b", tmp_path / "model", hidden_size=128, head_dim=32),
        "output_dir": str(tmp_path / "run"),
        "vllm_engine_kwargs": json.dumps({"enforce_eager": True, **MEMORY}),
        "use_vllm": "true",
        "use_cpu": str(DEVICE == "cpu").lower(),
        "eval_problems": "3",
    }

    def work(rank):
        os.environ |= FSDP
        as_accelerators()
        runpy.run_path(str(EXAMPLES / "grpo_gsm8k.py"))["main"](["--config", "qwen2.5-3b", *words(instead)])

    both(work)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["steps"] == 2 and results["device"].endswith(" x 2")
    assert results["before"]["total"] == results["after"]["total"] == 3
    assert "optim" not in results["settings"]["options"], "the default, adamw_torch_fused"
    first, second = (entry for entry in results["log_history"] if "loss" in entry)
    assert 0 < first["grad_norm"] < float("inf") and 0 < second["grad_norm"] < float("inf")
    assert first["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=0.02)
