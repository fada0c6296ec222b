"""Rollouts that pass silently at 843f908: a stand-in engine (stand_in.py) under the real trainer, with one fault each."""

import copy

import pytest
from peft import LoraConfig

from qerl_trl.nvfp4.linear import NVFP4Linear
from qerl_trl.rollout.engine import Sampling
from tests.faults.catalog import fault, told
from tests.faults.stand_in import make_trainer  # noqa: F401  (a fixture)
from tests.rollout import test_probe as probes
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.vllm  # TRL calls vLLM's classes beside the engine


def answer(prompts, trainer, sample) -> dict:
    ids = trainer.processing_class(text=prompts)["input_ids"]
    sampled = [sample(one) for one in ids]
    return {"prompt_ids": ids, "completion_ids": [s[0] for s in sampled], "logprobs": [s[1] for s in sampled]}


def test_a_rollout_function_that_samples_from_the_engine_meets_the_noise(make_trainer):  # noqa: F811
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
    rollouts = " ".join(engine.calls).split("sleep")[2:-1]  # the first two slept after the probes
    assert len(rollouts) == 2
    assert all(calls.count("put_adapter") == (step > 0) for step, calls in enumerate(rollouts)), rollouts


@pytest.mark.parametrize("then", [None, "greedily"])
def test_complete_in_a_rollout_function_meets_the_noise(make_trainer, then):  # noqa: F811
    """At 760ddd1 it always sampled without, and the run ended with the advice to do just that; so it did when clean completions came last."""
    draws = []

    def rollout(prompts, trainer):
        generation = trainer.vllm_generation

        def sample(ids):
            (completion,) = generation.complete([ids], Sampling(4, 1.0))
            draws.append(generation.engine.sampled)
            return completion.tokens, completion.logps

        found = answer(prompts, trainer, sample)
        if then == "greedily":
            generation.generate_greedily([[5, 6, 7]], 2)
        return found

    trainer = make_trainer(rollout)
    trainer.train()
    assert [draw.sigma > 0 for draw in draws[:: len(draws) // 2]] == [False, True]
    trainer.model.eval()
    generation = trainer.vllm_generation
    generation.complete([[5, 6, 7]], Sampling(2, 1.0))
    assert generation.engine.sampled.sigma == 0, "outside of a rollout of training there is none"


def test_without_noise_completions_may_come_from_anywhere(make_trainer):  # noqa: F811
    trainer = make_trainer(
        lambda prompts, trainer: answer(prompts, trainer, lambda ids: ([5, 6, 7, 8], [-1.0] * 4)),
        aqn_sigma_start=0.0,
        aqn_sigma_end=0.0,
        rollout_mismatch_threshold=None,
    )
    trainer.train()
    assert trainer.state.global_step == 2


@fault("S.embedding_adapter_unsent")
def test_an_adapter_on_the_embeddings_is_refused_before_training(make_trainer):  # noqa: F811
    """At 843f908 the probe passed at 0.0000, and after 6 steps engine and trainer were 1.61 nats apart."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM")
    with told(
        ValueError, "embed_tokens", "vLLM rollouts cannot carry this adapter", "target_modules", "use_vllm=False"
    ):
        make_trainer(peft_config=lora)


def unquantized(dense):
    def put_in(base):
        layers = dict(dense.named_modules())
        for name, module in list(base.named_modules()):
            if isinstance(module, NVFP4Linear):
                parent = base.get_submodule(name.rpartition(".")[0])
                parent.base_layer = copy.deepcopy(layers[name.removesuffix(".base_layer")])

    return put_in


IN_BF16 = {
    "adapter doubled": probes.scaled(2.0),
    "adapter halved": probes.scaled(0.5),
    "half of the layers lost": probes.without(lambda name: int(name.split(".")[2]) % 2),
    "all MLPs lost": probes.without(lambda name: ".mlp." in name),
    "k and v exchanged": probes.exchanged,
}


@pytest.fixture(scope="module")
def dense():
    """Four layers whose outputs are as large as those of a wide model with weights of 0.02."""
    return make_tiny_model("qwen2", num_hidden_layers=4, initializer_range=0.1)


@pytest.fixture(scope="module")
def policy(dense):
    return probes.with_adapter(probes.quantized(dense))


@fault("S.probe_in_bf16")
@pytest.mark.parametrize("case", IN_BF16)
def test_a_wrong_adapter_is_found_in_bf16(policy, case):
    """At 843f908 each of them passed: 0.35 nats were allowed."""
    assert "the adapter" in probes.run(probes.FakeEngine(policy, IN_BF16[case]), policy).fault


@fault("S.probe_in_bf16")
def test_an_unquantized_server_is_found_in_bf16(dense, policy):
    assert "other weights" in probes.run(probes.FakeEngine(policy, base_fault=unquantized(dense)), policy).fault
