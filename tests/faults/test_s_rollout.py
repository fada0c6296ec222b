"""Rollouts that pass silently at 843f908: a stand-in engine (stand_in.py) under the real trainer, with one fault each."""

import pytest
from datasets import Dataset
from peft import LoraConfig

from qerl_trl.rollout.engine import RolloutError
from tests.faults.catalog import fault, told
from tests.faults.stand_in import StandIn

pytestmark = pytest.mark.vllm  # TRL calls vLLM's classes beside the engine

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
PROMPTS = Dataset.from_dict({"prompt": [f"say {word} " for word in ("one", "two", "six", "ten")] * 4})


def spread_reward(completions, **kwargs):
    return [float(sum(text.encode()) % 7) for text in completions]


@pytest.fixture
def make_trainer(tiny_model_dir, tiny_tokenizer, tmp_path, monkeypatch):
    """A GRPO trainer on bf16 NVFP4 weights whose vLLM is the stand-in; noise from the second step on."""
    from qerl_trl import QeRLConfig, QeRLGRPOTrainer
    from qerl_trl.rollout.generation import QeRLVLLMGeneration
    from qerl_trl.rollout.spec import EngineSpec

    def build(self):
        self.spec = EngineSpec.of(self.model, scale_rule="rtn", dtype=self._compute_dtype())
        return StandIn(self.model)

    monkeypatch.setattr(QeRLVLLMGeneration, "_build_engine", build)

    def make(rollout_func=None, peft_config=LORA, **options):
        defaults = {
            "output_dir": str(tmp_path / "run"), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 4, "num_generations": 4,
            "max_completion_length": 4, "max_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
            "gradient_checkpointing": False, "disable_tqdm": True, "aqn_num_stages": 2, "use_vllm": True, "vllm_mode": "colocate",
        }  # fmt: skip
        return QeRLGRPOTrainer(
            str(tiny_model_dir("qwen2")),
            spread_reward,
            QeRLConfig(**{**defaults, **options}),
            PROMPTS,
            processing_class=tiny_tokenizer,
            peft_config=peft_config,
            rollout_func=rollout_func,
        )

    return make


def answer(prompts, trainer, sample) -> dict:
    ids = trainer.processing_class(text=prompts)["input_ids"]
    sampled = [sample(one) for one in ids]
    return {"prompt_ids": ids, "completion_ids": [s[0] for s in sampled], "logprobs": [s[1] for s in sampled]}


def test_a_rollout_function_that_samples_from_the_engine_meets_the_noise(make_trainer):
    """At 843f908 it logged a sigma while the engine's norms were clean."""
    differ = []

    def rollout(prompts, trainer):
        from vllm import SamplingParams

        engine = trainer.vllm_generation.engine
        differ.append(any(not norm.weight.equal(engine.clean[name]) for name, norm in engine.norms.items()))
        parameters = SamplingParams(max_tokens=4, temperature=1.0, logprobs=0)

        def sample(ids):
            (output,) = trainer.vllm_generation.llm.generate([{"prompt_token_ids": ids}], parameters)
            tokens = output.outputs[0].token_ids
            return tokens, [step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)]

        return answer(prompts, trainer, sample)

    trainer = make_trainer(rollout)
    trainer.train()
    assert differ == [False, True]  # stage 0 has no noise
    engine = trainer.vllm_generation.engine
    rollouts = " ".join(engine.calls).split("sleep")[1:-1]  # the first slept after the probe
    assert len(rollouts) == 2
    assert all(calls.count("put_adapter") == (step > 0) for step, calls in enumerate(rollouts)), rollouts


@fault("S.noise_never_acts")
def test_a_rollout_function_that_asks_elsewhere_is_refused_once_noise_is_due(make_trainer):
    def rollout(prompts, trainer):
        return answer(prompts, trainer, lambda ids: ([5, 6, 7, 8], [-1.0] * 4))

    with told(RolloutError, "nothing was sampled", "rollout_func", "aqn=False", "sigma 0.01"):
        make_trainer(rollout).train()
