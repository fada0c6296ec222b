"""R4, rollout and sync: faults of an engine under the real trainer. The engine is a stand-in with the trainer's own weights; what only
vLLM's side can show runs on vLLM's side without an engine (test_s_updates.py)."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from qerl_trl.rollout.engine import Completion, RolloutError
from tests.faults.catalog import fault, told
from tests.faults.stand_in import StandIn, make_trainer  # noqa: F401  (a fixture)

pytestmark = pytest.mark.vllm  # TRL calls vLLM's classes beside the engine


class After(TrainerCallback):
    """Calls `action(engine)` once, after the first step."""

    def __init__(self, action):
        self.action = action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.action()


def train(trainer, action=None):
    """Train; after the first step `action(engine)` injects the fault."""
    if action is not None:
        trainer.add_callback(After(lambda: action(trainer.vllm_generation.engine)))
    trainer.train()
    return trainer


def ends_and_goes_on(make_trainer, action, *words, **options):  # noqa: F811
    """The fault after the first step ends the run and names `words`; that step is saved, and the same command goes on from it."""
    options |= {"save_strategy": "steps", "save_steps": 100}
    with told(RolloutError, *words, "Step 1 is saved"):
        train(make_trainer(**options), action)
    again = make_trainer(**options)
    again.train(resume_from_checkpoint=again.to_resume())
    assert again._resumed.global_step == 1 and again.state.global_step == 2


def test_a_sound_engine_trains_and_is_probed_again(make_trainer):  # noqa: F811
    trainer = train(make_trainer(rollout_probe_steps=1))
    assert trainer.state.global_step == 2 and trainer.vllm_generation._probed == 1
    engine = trainer.vllm_generation.engine
    contents = engine.contents()
    assert contents.received == trainer.vllm_generation._put and engine.sampled.sigma > 0 and not contents.damaged


def test_it_is_probed_again_where_no_multiple_begins_a_rollout(make_trainer):  # noqa: F811
    """At 760ddd1 only at common multiples: of 2 updates per rollout and 3 steps, every 6."""
    trainer = make_trainer(rollout_probe_steps=3, num_iterations=2, max_steps=10)
    generation, at = trainer.vllm_generation, []
    probed = generation._probe_if_due

    def noted():
        before = generation._probed
        probed()
        at.extend([generation._probed] * (generation._probed != before))

    generation._probe_if_due = noted
    train(trainer)
    assert at == [4, 6]


# -------------------------------------------------------------------------------------------------------------- weights


class Ignores(StandIn):
    def put_adapter(self, adapter, norms):
        super().put_adapter({}, norms)


@fault("R4.adapter_ignored")
def test_an_adapter_that_the_engine_ignores(make_trainer):  # noqa: F811
    with told(RolloutError, "the adapter acts otherwise", "report", "use_vllm=False", "rollout_probe='warn'"):
        make_trainer(engine=Ignores, rollout_probe="refuse")


@fault("R4.adapter_stale", recovered=True)
def test_an_update_that_never_arrives(make_trainer):  # noqa: F811
    def stale(engine):
        engine.put_adapter = lambda adapter, norms: None

    ends_and_goes_on(make_trainer, stale, "does not hold the trainer's latest weights", "stale policy", "resume")


@fault("R4.adapter_stale", recovered=True)
def test_a_change_that_leaves_no_trace_in_torch_is_put_all_the_same(make_trainer):  # noqa: F811
    """`.data` does not count versions: at 843f908 the engine kept the adapter of before."""
    trainer = make_trainer()
    generation, fill = trainer.vllm_generation, lambda p: p.data.fill_(0.5)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            fill(parameter)
    generation.generate([[5, 6, 7]], None, 1)
    ups = [p for name, p in generation.engine.policy.named_parameters() if "lora_B" in name]
    assert ups and all(bool((up == 0.5).all()) for up in ups)


@fault("R4.adapter_half_written", recovered=True)
def test_an_update_of_which_half_arrives(make_trainer):  # noqa: F811
    def half(engine):
        put = engine.put_adapter

        def lossy(adapter, norms):
            before = {name: p.clone() for name, p in engine.policy.named_parameters() if "layers.1" in name}
            put(adapter, norms)
            for name, parameter in engine.policy.named_parameters():
                if name in before:
                    parameter.data.copy_(before[name])

        engine.put_adapter = lossy

    ends_and_goes_on(make_trainer, half, "no longer holds what was put into it", "layers.1", "made by half", "resume")


@fault("R4.wake_without_weights", recovered=True)
def test_an_engine_that_wakes_up_without_its_weights(make_trainer):  # noqa: F811
    from qerl_trl.rollout.vllm.engine import InProcessEngine
    from qerl_trl.rollout.vllm.state import RolloutState

    def forgets(engine):
        state = engine.state = RolloutState.__new__(RolloutState)
        state.model = engine.policy
        engine.asleep, engine._slept = True, state.sums()
        weight = engine.policy.get_base_model().model.embed_tokens.weight
        engine._running = SimpleNamespace(wake_up=lambda: weight.data.zero_())
        engine.wake = lambda: InProcessEngine.wake(engine)

    words = ("woke up with other weights", "embed_tokens", "vllm_enable_sleep_mode")
    ends_and_goes_on(make_trainer, forgets, *words)


@fault("R4.drift_after_wake", recovered=True)
def test_an_engine_that_computes_otherwise_after_it_woke_up(make_trainer):  # noqa: F811
    """Every weight is in place and a cache of positions is not: only the probe sees that."""

    def drifts(engine):
        engine.policy.get_base_model().model.rotary_emb.inv_freq.mul_(3)

    words = ("vLLM and the trainer disagree", "nats", "Resume from the last checkpoint")
    ends_and_goes_on(make_trainer, drifts, *words, rollout_probe_steps=1, rollout_probe="refuse")


@fault("R4.prefix_cache_stale", recovered=True)
def test_a_prefix_cache_that_is_not_reset(make_trainer):  # noqa: F811
    from qerl_trl.rollout.vllm.engine import InProcessEngine

    def refuses(engine):
        engine.reset_prefix_cache = lambda: InProcessEngine.reset_prefix_cache(engine)
        engine._running = SimpleNamespace(reset_prefix_cache=lambda reset_connector: False)

    ends_and_goes_on(make_trainer, refuses, "refused to reset its prefix cache", "several threads", "resume")


@fault("R4.unknown_keys")
def test_an_update_with_names_that_the_engine_does_not_have(monkeypatch):
    from qerl_trl.rollout.engine import AdapterTensors
    from qerl_trl.rollout.vllm import state as states

    monkeypatch.setattr(states, "find_norms", lambda *args: {})
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(1))
    with told(ValueError, "have no buffers in vLLM", "model.elsewhere", "target modules"):
        states.RolloutState(model).load_adapter(
            {"model.elsewhere": AdapterTensors(torch.ones(1, 2), torch.ones(2, 1), 1.0)}, {}
        )


# ---------------------------------------------------------------------------------------------------------------- noise


@fault("R4.noise_left_on")
def test_noise_that_stays_on(make_trainer):  # noqa: F811
    def keeps(engine):
        put = engine.set_noise
        engine.set_noise = lambda norms, draw: put(norms, draw) if draw.sigma else 0.0

    trainer = make_trainer()
    train(trainer, keeps)
    with told(RolloutError, "noise was left on", "sigma 0.01", "resume"):
        trainer.vllm_generation.generate_greedily([[5, 6, 7]], 4)


@fault("S.noise_never_acts", recovered=True)
def test_noise_that_does_not_arrive(make_trainer):  # noqa: F811
    def ignores(engine):
        engine.set_noise = lambda norms, draw: draw.sigma

    ends_and_goes_on(make_trainer, ignores, "its noise is missing", "sigma 0.01", "resume")


# ---------------------------------------------------------------------------------------------------- the engine itself


@fault("R4.engine_dead", recovered=True)
def test_an_engine_that_dies(make_trainer):  # noqa: F811
    def dies(engine):
        def generate(*args, **kwargs):
            raise RuntimeError("EngineCore died")

        engine.llm.generate = generate

    ends_and_goes_on(make_trainer, dies, "EngineCore died", "resume_from_checkpoint=True")


@fault("R4.engine_hangs")
def test_an_engine_that_hangs(make_trainer):  # noqa: F811
    trainer = make_trainer(rollout_timeout=0.5)

    def forever(*args, **kwargs):
        while True:
            time.sleep(0.05)

    trainer.vllm_generation.engine.llm.generate = forever
    caught = []
    started = time.monotonic()
    try:
        trainer.vllm_generation.generate([[5, 6, 7]], None, 1)
    except RolloutError as error:
        caught.append(error)
    assert time.monotonic() - started < 15 and caught
    with told(RolloutError, "rollout_timeout=0.5", "hangs", "raise", "resume"):
        raise caught[0]


@fault("R4.engine_hangs", recovered=True)
def test_an_engine_that_hangs_in_the_middle_of_a_run(make_trainer):  # noqa: F811
    def hangs(engine):
        engine.llm.generate = lambda *args, **kwargs: time.sleep(30)

    ends_and_goes_on(make_trainer, hangs, "rollout_timeout=2", "hangs", "resume", rollout_timeout=2.0)


@fault("R4.completions_or_logps_bad")
def test_completions_of_a_rollout_function_that_cannot_be_trained_on(make_trainer):  # noqa: F811
    def rollout(prompts, trainer):
        return {"prompt_ids": [[5]] * 4, "completion_ids": [[5]] * 3 + [[]], "logprobs": [[-1.0]] * 3 + [[]]}

    with told(RolloutError, "Completion 3 of 4 from rollout_func has 0 tokens", "at least one token"):
        make_trainer(rollout).train()


@fault("R4.completions_or_logps_bad")
@pytest.mark.parametrize("logps", [[[-1.0], [-2.0]], [[-1.0, -3.0]] * 2], ids=["one", "several"])
def test_a_rollout_function_that_returns_the_engines_lists(make_trainer, logps):  # noqa: F811
    """TRL would make a third dimension of them, and the correction one number of all pairs of tokens."""

    def rollout(prompts, trainer):
        return {"prompt_ids": [[5]] * 4, "completion_ids": [[5, 6]] * 4, "logprobs": [logps] * 4}

    with told(RolloutError, "Completion 0 of 4 from rollout_func has 2 tokens", "shape (2, ", "value[0]"):
        make_trainer(rollout).train()


@pytest.mark.parametrize("make", [np.float32, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    "values",
    [[[-1.0], [-2.0]], [[-1.0, -2.0]], [[-1.0, -3.0], [-2.0, -4.0]]],
    ids=["column", "row", "several per token"],
)
def test_a_rollout_function_that_returns_arrays_of_another_shape(make_trainer, make, values):  # noqa: F811
    def rollout(prompts, trainer):
        return {"prompt_ids": [[5]] * 4, "completion_ids": [[5, 6]] * 4, "logprobs": [make(values)] * 4}

    shape = str(tuple(make(values).shape))
    with told(RolloutError, "Completion 0 of 4 from rollout_func has 2 tokens", shape, "one number"):
        make_trainer(rollout).train()


def test_a_rollout_function_whose_log_probabilities_are_a_half_tensor_trains(make_trainer):  # noqa: F811
    def rollout(prompts, trainer):
        ids = trainer.processing_class(text=prompts)["input_ids"]
        found = [trainer.vllm_generation.engine._complete(prompt, 4, 1.0) for prompt in ids]
        logps = [torch.tensor(one.logps, dtype=torch.bfloat16) for one in found]
        return {"prompt_ids": ids, "completion_ids": [one.tokens for one in found], "logprobs": logps}

    assert train(make_trainer(rollout)).state.global_step == 2


class Shifted(StandIn):
    def generate(self, prompts, sampling):
        return [Completion(c.tokens, [p + 0.3 for p in c.logps]) for c in super().generate(prompts, sampling)]


@fault("R4.logp_gap")
def test_log_probabilities_that_are_off_by_a_constant(make_trainer):  # noqa: F811
    with told(RolloutError, "clean log-probabilities differ", "nats", "other weights"):
        make_trainer(engine=Shifted, rollout_probe="refuse")


@pytest.mark.parametrize("mode", ["warn", "off", False])  # YAML reads off as false
def test_a_disagreement_at_start_ends_no_run_unless_asked(make_trainer, caplog, mode):  # noqa: F811
    with caplog.at_level("WARNING"):
        trainer = train(make_trainer(engine=Shifted, rollout_probe=mode, rollout_mismatch_threshold=None))
    assert trainer.state.global_step == 2
    assert caplog.text.count("vLLM and the trainer disagree, clean log-probabilities differ") == (mode == "warn")
    assert (trainer.vllm_generation.probe_result is None) == (mode != "warn")
