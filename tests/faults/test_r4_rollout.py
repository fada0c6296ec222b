"""Faults of a rollout under the real trainer, whose engine is a stand-in with the trainer's own weights.

Faults of vLLM's side are in test_r4_server.py and, with the real engine, in tests/e2e/engine.
"""

import math
import time
from types import SimpleNamespace

import pytest

from qerl_trl.rollout.engine import Completion, RolloutError
from tests.faults.catalog import fault, raises
from tests.faults.stand_in import StandIn
from tests.faults.tiny_runs import AfterStep

pytestmark = pytest.mark.vllm  # TRL calls vLLM's classes next to the engine


def train(trainer, action=None):
    """Train; `action(engine)` injects the fault after the first step."""
    if action is not None:
        trainer.add_callback(AfterStep(1, lambda model: action(trainer.vllm_generation.engine)))
    trainer.train()
    return trainer


def test_a_sound_engine_trains_and_is_probed_again(engine_trainer):
    trainer = train(engine_trainer(rollout_probe_steps=1))
    assert trainer.state.global_step == 2 and trainer.vllm_generation._probed == 1
    engine = trainer.vllm_generation.engine
    contents = engine.contents()
    assert contents.received == trainer.vllm_generation._put and engine.sampled.sigma > 0 and not contents.damaged


# --- a fault after the first step ---


def stale(engine):
    engine.put_adapter = lambda adapter, norms: None


def forgets(engine):
    """It wakes up without its weights."""
    from qerl_trl.rollout.vllm.engine import InProcessEngine
    from qerl_trl.rollout.vllm.state import RolloutState

    state = engine.state = RolloutState.__new__(RolloutState)
    state.model = engine.policy
    engine.asleep, engine._slept = True, state.sums()
    weight = engine.policy.get_base_model().model.embed_tokens.weight
    engine._running = SimpleNamespace(wake_up=lambda: weight.data.zero_())
    engine.wake = lambda: InProcessEngine.wake(engine)


def drifts(engine):
    """Every weight is in place, and a cache of positions is not: only the probe sees that."""
    engine.policy.get_base_model().model.rotary_emb.inv_freq.mul_(3)


def keeps_its_cache(engine):
    from qerl_trl.rollout.vllm.engine import InProcessEngine

    engine.reset_prefix_cache = lambda: InProcessEngine.reset_prefix_cache(engine)
    engine._running = SimpleNamespace(reset_prefix_cache=lambda reset_connector: False)


def ignores_noise(engine):
    engine.set_noise = lambda norms, draw: draw.sigma


def dies(engine):
    def generate(*args, **kwargs):
        raise RuntimeError("EngineCore died")

    engine.llm.generate = generate


def hangs(engine):
    engine.llm.generate = lambda *args, **kwargs: time.sleep(30)


ACTIONS = [
    pytest.param(stale, {}, ["put there last"], True, marks=fault("R4.adapter_stale", recovered=True)),
    pytest.param(
        forgets, {}, ["woke up with other weights", "embed_tokens"], False, marks=fault("R4.drift_after_wake")
    ),
    pytest.param(
        drifts,
        {"rollout_probe_steps": 1, "rollout_probe": "refuse"},
        ["trainer disagree", "nats"],
        False,
        marks=fault("R4.drift_after_wake"),
    ),
    pytest.param(keeps_its_cache, {}, ["refused to reset its prefix"], False, marks=fault("R4.prefix_cache_stale")),
    pytest.param(ignores_noise, {}, ["its noise is missing", "0.01"], False, marks=fault("R4.noise_never_acts")),
    pytest.param(dies, {}, ["EngineCore died"], True, marks=fault("R4.engine_dead", recovered=True)),
    pytest.param(
        hangs, {"rollout_timeout": 1.0}, ["rollout_timeout=1", "hangs"], False, marks=fault("R4.engine_hangs")
    ),
]


@pytest.mark.parametrize(("action", "options", "words", "again"), ACTIONS)
def test_the_run_ends_and_its_last_step_is_saved(action, options, words, again, engine_trainer):
    options = {**options, "save_strategy": "steps", "save_steps": 100}
    with raises(RolloutError, *words, "Step 1 is saved", "resume"):
        train(engine_trainer(**options), action)
    if again:
        trainer = engine_trainer(**options)
        trainer.train(resume_from_checkpoint=trainer.to_resume())
        assert trainer._resumed.global_step == 1 and trainer.state.global_step == 2


# --- weights ---


class Ignores(StandIn):
    def put_adapter(self, adapter, norms):
        super().put_adapter({}, norms)


class Shifted(StandIn):
    def generate(self, prompts, sampling):
        return [Completion(c.tokens, [p + 0.3 for p in c.logps]) for c in super().generate(prompts, sampling)]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        pytest.param(
            Ignores, ("the adapter acts otherwise", "rollout_probe='warn'"), marks=fault("R4.adapter_ignored")
        ),
        pytest.param(Shifted, ("clean log-probabilities differ", "other weights"), marks=fault("R4.logp_gap")),
    ],
)
def test_an_engine_that_disagrees_from_the_start(engine, words, engine_trainer):
    with raises(RolloutError, *words, "report", "use_vllm=False"):
        engine_trainer(engine=engine, rollout_probe="refuse")


@pytest.mark.parametrize("mode", ["warn", "off", False])  # YAML reads off as false
def test_a_disagreement_at_start_ends_no_run_unless_asked(engine_trainer, caplog, mode):
    with caplog.at_level("WARNING"):
        trainer = train(engine_trainer(engine=Shifted, rollout_probe=mode, rollout_mismatch_threshold=None))
    assert trainer.state.global_step == 2
    assert caplog.text.count("Rollout probe: vLLM and the trainer disagree") == (mode == "warn")
    assert (trainer.vllm_generation.probe_result is None) == (mode != "warn")


# --- noise ---


@fault("R4.noise_left_on")
def test_noise_that_stays_on(engine_trainer):
    def keeps(engine):
        put = engine.set_noise
        engine.set_noise = lambda norms, draw: put(norms, draw) if draw.sigma else 0.0

    trainer = train(engine_trainer(), keeps)
    with raises(RolloutError, "noise was left on", "sigma 0.01", "resume"):
        trainer.vllm_generation.generate_greedily([[5, 6, 7]], 4)


def test_a_rollout_function_that_samples_from_the_engine_meets_the_noise(engine_trainer):
    differ = []

    def rollout(prompts, trainer):
        from vllm import SamplingParams

        engine = trainer.vllm_generation.engine
        differ.append(any(not norm.weight.equal(engine.clean[name]) for name, norm in engine.norms.items()))
        ids = trainer.processing_class(text=prompts)["input_ids"]
        parameters = SamplingParams(max_tokens=4, temperature=1.0, logprobs=0)
        found = trainer.vllm_generation.llm.generate([{"prompt_token_ids": row} for row in ids], parameters)
        tokens = [output.outputs[0].token_ids for output in found]
        steps = [zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True) for output in found]
        logps = [[step[token].logprob for step, token in row] for row in steps]
        return {"prompt_ids": ids, "completion_ids": tokens, "logprobs": logps}

    trainer = train(engine_trainer(rollout))
    assert differ == [False, True]  # stage 0 has no noise
    rollouts = " ".join(trainer.vllm_generation.engine.calls).split("sleep")[2:-1]  # two slept after the probes
    assert [calls.count("put_adapter") for calls in rollouts] == [0, 1]


# --- completions and their log-probabilities ---


@fault("R4.completions_or_logps_bad")
@pytest.mark.parametrize(
    ("tokens", "logps", "words"),
    [
        ([[5, 6]] * 4, [[[-1.0], [-2.0]]] * 4, ("completion 0 has 2 tokens", "(2, ")),
        ([[5]] * 3 + [[]], [[-1.0]] * 3 + [[]], ("completion 3 has 0 tokens", "per token")),
    ],
)
def test_a_rollout_function_that_does_not_return_a_number_per_token(engine_trainer, tokens, logps, words):
    """TRL would make a third dimension of several numbers."""

    def rollout(prompts, trainer):
        return {"prompt_ids": [[5]] * 4, "completion_ids": tokens, "logprobs": logps}

    with raises(RolloutError, *words, "rollout_func", "a number"):
        engine_trainer(rollout).train()


def tamper(trainer, change) -> None:
    """From now on the engine reports `change(log-probabilities)`."""
    engine = trainer.vllm_generation.engine
    complete = engine._complete

    def tampered(*args):
        found = complete(*args)
        return Completion(found.tokens, change(found.logps))

    engine._complete = tampered


@fault("R4.completions_or_logps_bad")
@pytest.mark.parametrize(
    ("change", "missing"),
    [(lambda logps: [math.nan] * len(logps), 16), (lambda logps: [*logps[:-1], math.nan], 4)],
    ids=["all", "many"],
)
def test_log_probabilities_that_are_nan_end_the_run(change, missing, engine_trainer):
    trainer = engine_trainer()
    tamper(trainer, change)
    words = (f"no finite log-probability for {missing} of the 16 tokens", "resume from the last checkpoint")
    with raises(RuntimeError, *words):
        trainer.train()
    assert not any(p.any() for name, p in trainer.model.named_parameters() if "lora_B" in name)


@fault("R4.logp_gap")
@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda logps: [value - 0.3 for value in logps], {}, ("3 rollouts in a row", "temperature")),
        (lambda logps: [value + 0.3 for value in logps], {"top_p": 0.9}, ("tokens are left out",)),
    ],
    ids=["constant", "truncated"],
)
def test_log_probabilities_that_were_not_sampled_with_end_the_run(change, options, words, engine_trainer, caplog):
    """A constant 0.3 nats are a KL of 0.04, below every threshold."""
    trainer = engine_trainer(max_steps=6, **({"per_device_train_batch_size": 16} if options else {}), **options)
    tamper(trainer, change)
    with raises(RuntimeError, "rollout/logp_gap", *words, "Then resume"):
        trainer.train()
    assert trainer.state.global_step == 2  # warned of at once, ended in the third
    assert "The rollout's log-probabilities are not those" in caplog.text
