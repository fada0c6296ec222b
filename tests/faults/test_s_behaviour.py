"""The policy that samples is not the one that is trained: noise, wrong log-probabilities, an entropy that is steered blindly."""

import math
import statistics

import pytest
import torch
from safetensors.torch import load_file
from trl import GRPOConfig, GRPOTrainer

from qerl_trl import AQNCallback, QeRLConfig, QeRLRLOOConfig
from qerl_trl.rollout import mismatch
from qerl_trl.support.options import check_options
from tests.faults.catalog import fault, told
from tests.faults.stand_in import PROMPTS, StandIn
from tests.faults.stand_in import make_trainer as make_engine_trainer  # noqa: F401  (a fixture)
from tests.test_trainer import PROMPTS as DATA
from tests.test_trainer import adapter_of, assert_identical, logged, make_trainer, spread_reward  # noqa: F401  (a fixture)
from tests.tiny_models import make_tiny_model

NOISE = {"aqn_schedule": "constant", "aqn_sigma_start": 0.3, "max_steps": 1}


@fault("S.noise_uncorrected_in_transformers", remedy=None, recovered=True)
def test_noise_in_transformers_rollouts_is_corrected(make_trainer, tmp_path):  # noqa: F811
    """With every ratio cut to zero nothing is learned, in the saved adapter too: the ratio has entered the loss."""
    moved = {}
    for limit in (0.0, 3.0):
        trainer = make_trainer(**NOISE, output_dir=str(tmp_path / f"{limit}"), vllm_importance_sampling_clip_max=limit)
        trainer.train()
        assert logged(trainer, "sampling/importance_sampling_ratio/max")[0] <= limit
        trainer.save_model(str(tmp_path / f"adapter-{limit}"))
        saved = load_file(tmp_path / f"adapter-{limit}" / "adapter_model.safetensors")
        moved[limit] = sum(float(t.abs().sum()) for name, t in saved.items() if "lora_B" in name)
        assert all(torch.isfinite(t).all() for t in saved.values())
    assert moved[0.0] == 0.0 < moved[3.0]


@pytest.fixture(scope="module")
def peaked(tmp_path_factory, tiny_tokenizer):
    """Folder of a tiny model that knows one sentence by heart, so that noise makes it less sure (a random one is unsure anyway)."""
    folder = tmp_path_factory.mktemp("peaked")
    model = make_tiny_model("qwen2", dtype=torch.float32)
    ids = torch.tensor([tiny_tokenizer("say one two six ten " * 2)["input_ids"]])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


@fault("S.entropy_open_loop", remedy=None, recovered=True)
def test_sigma_is_steered_by_the_entropy_that_it_moves(make_trainer, peaked):  # noqa: F811
    """At learning rate 0 the clean policy never comes nearer to the target: an open loop drives sigma to its bound and past the target."""
    low, high, target = 0.01, 10.0, 0.5
    trainer = make_trainer(
        model=peaked,
        base_format="bf16",
        learning_rate=0.0,
        max_steps=24,
        max_completion_length=16,
        aqn_schedule="entropy_target",
        aqn_entropy_target=target,
        aqn_sigma_start=high,
        aqn_sigma_end=low,
        rollout_mismatch_threshold=None,
    )
    trainer.train()
    sigma, sampled, clean = (logged(trainer, key) for key in ("aqn/sigma", "rollout/entropy", "entropy"))
    assert all(low <= value <= high for value in sigma) and max(sigma) < 0.3 * high
    assert abs(sampled[0] - target) > 0.4 * target
    assert statistics.mean(sampled[-10:]) == pytest.approx(target, rel=0.35)
    assert len(sampled) == 24 and max(clean) < target


def tamper(trainer, change) -> None:
    """From now on the engine reports `change(tokens, log-probabilities, temperature)` as log-probabilities."""
    engine = trainer.vllm_generation.engine
    complete = engine._complete

    def complete_and_tamper(prompt, max_tokens, temperature, generator=None):
        tokens, logps = complete(prompt, max_tokens, temperature, generator)
        return type(complete(prompt, 1, 0.0))(tokens, change(logps))

    engine._complete = complete_and_tamper


@pytest.mark.vllm
@fault("S.engine_logps_nan")
def test_log_probabilities_that_are_all_nan_end_the_run(make_engine_trainer):  # noqa: F811
    """At 843f908 their KL was 0.0, the best there is."""
    trainer = make_engine_trainer()
    tamper(trainer, lambda logps: [math.nan] * len(logps))
    before = adapter_of(trainer)
    with told(RuntimeError, "no finite log-probability for 16 of the 16 tokens", "resume from the last checkpoint"):
        trainer.train()
    assert_identical(adapter_of(trainer), before)


@pytest.mark.vllm
@fault("S.engine_logps_nan")
def test_log_probabilities_of_which_many_are_nan_end_the_run(make_engine_trainer):  # noqa: F811
    """An engine on an H200 returned NaN from the middle of its completions on: 98 % of all tokens, and the run went on."""
    trainer = make_engine_trainer()
    tamper(trainer, lambda logps: [*logps[:-1], math.nan])
    before = adapter_of(trainer)
    with told(RuntimeError, "no finite log-probability for 4 of the 16 tokens", "resume from the last checkpoint"):
        trainer.train()
    assert_identical(adapter_of(trainer), before)


@pytest.mark.vllm
def test_single_nan_log_probabilities_are_counted(make_engine_trainer, monkeypatch):  # noqa: F811
    monkeypatch.setattr(mismatch, "_MISSING", 0.3)  # as in longer completions
    trainer = make_engine_trainer()
    tamper(trainer, lambda logps: [*logps[:-1], math.nan])
    trainer.train()
    assert logged(trainer, "rollout/nan_logps") == [4, 4]
    assert all(math.isfinite(value) for value in logged(trainer, "rollout/mismatch_kl") + logged(trainer, "grad_norm"))


@pytest.mark.vllm
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda logps: [value - 0.3 for value in logps], marks=fault("S.constant_logp_error")),
        pytest.param(lambda logps: [0.9 * value for value in logps], marks=fault("R4.logp_gap")),
    ],
    ids=["constant", "temperature"],
)
def test_log_probabilities_that_were_not_sampled_with_end_the_run(make_engine_trainer, change, caplog):  # noqa: F811
    """A constant 0.3 nats are a KL of 0.04, below every threshold."""
    trainer = make_engine_trainer(max_steps=6)
    tamper(trainer, change)
    with told(RuntimeError, "rollout/logp_gap", "3 rollouts in a row", "temperature", "Then resume"):
        trainer.train()
    assert trainer.state.global_step == 2  # told at once, ended in the third
    assert "The rollout's log-probabilities are not those" in caplog.text


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("error", "top_p"),
    [
        pytest.param(-0.3, 0.9, marks=fault("S.constant_logp_error")),
        pytest.param(0.3, 0.9, marks=fault("S.constant_logp_error")),
    ],
    ids=["too-low", "too-high"],
)
def test_a_constant_error_is_more_than_truncation_explains(make_engine_trainer, error, top_p):  # noqa: F811
    trainer = make_engine_trainer(max_steps=6, top_p=top_p, per_device_train_batch_size=16)
    tamper(trainer, lambda logps: [value + error for value in logps])
    with told(RuntimeError, "rollout/logp_gap", "tokens are left out", "Then resume"):
        trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.vllm
def test_truncation_alone_is_no_fault(make_engine_trainer, caplog):  # noqa: F811
    trainer = make_engine_trainer(max_steps=4, top_p=0.7, per_device_train_batch_size=16)
    trainer.train()
    gaps = logged(trainer, "rollout/logp_gap")
    assert min(gaps[:2]) > math.log(0.7) and max(gaps[:2]) < 0  # without noise
    assert "are not those its tokens" not in caplog.text


@pytest.mark.vllm
@fault("R4.noise_left_on")
def test_noise_that_stays_on_in_evaluation_ends_the_run(make_engine_trainer, monkeypatch):  # noqa: F811
    def only_on(engine, norms, draw):
        if draw.sigma or not (engine.draw and engine.draw.sigma):
            set_noise(engine, norms, draw)
        added = torch.cat([engine.norms[name].weight - engine.clean[name] for name in norms])
        return float(added.square().mean().sqrt())

    trainer = make_engine_trainer(per_device_eval_batch_size=4)
    set_noise = StandIn.set_noise
    monkeypatch.setattr(StandIn, "set_noise", only_on)
    trainer.train()  # its second step is noisy
    with told(RuntimeError, "sigma 0 was asked for", "left on", "restart the engine"):
        trainer.evaluate(PROMPTS)


@pytest.mark.vllm
@fault("R4.noise_left_on")
def test_noise_that_adds_up_ends_the_run(make_engine_trainer, monkeypatch):  # noqa: F811
    def accumulate(engine, norms, draw):
        before = {name: engine.norms[name].weight - engine.clean[name] for name in norms}
        set_noise(engine, norms, draw)
        for name in norms:
            engine.norms[name].weight.data += before[name]
        added = torch.cat([engine.norms[name].weight - engine.clean[name] for name in norms])
        return float(added.square().mean().sqrt())

    set_noise = StandIn.set_noise
    trainer = make_engine_trainer(max_steps=4)
    monkeypatch.setattr(StandIn, "set_noise", accumulate)
    with told(RuntimeError, "sigma 0.01 was asked for", "left on or adds up", "resume from the last checkpoint"):
        trainer.train()


# --- another policy than the one that is scored -----------------------------------------------------------------------------------


def arguments(kind, **generation):
    args = kind("out", use_cpu=True, bf16=False, generation_kwargs=generation)
    check_options(args)
    return args


@pytest.mark.parametrize("kind", [QeRLConfig, QeRLRLOOConfig])
@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("temperature", 5.0, "Set temperature instead"),
        ("do_sample", False, "Leave it out"),
        ("num_beams", 4, "Leave it out"),
        ("guidance_scale", 2.0, "Leave it out"),
        ("max_new_tokens", 999, "Set max_completion_length instead"),
        ("n", 3, "Set num_generations instead"),
    ],
)
def test_arguments_of_a_rollout_that_contradict_its_scores(kind, name, value, remedy, caplog):
    """TRL puts them over its own: sampled at a temperature of 5, scored at 1."""
    arguments(kind, **{name: value})
    assert f"generation_kwargs={{{name!r}: {value!r}}}" in caplog.text and remedy in caplog.text


def test_arguments_of_a_rollout_that_trl_has_no_word_for():
    """And those that say what the configuration says."""
    legal = {
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "top_k": 5,
        "min_new_tokens": 2,
        "ignore_eos": True,
        "stop": ["x"],
        "logit_bias": {1: 2.0},
    }
    same = {"temperature": 1.0, "do_sample": True, "num_beams": 1, "n": 1, "max_tokens": None}
    assert arguments(QeRLConfig, **legal, **same).generation_kwargs == legal | same


@fault("S.noise_uncorrected_in_transformers")
@pytest.mark.parametrize("scope", ["rollout", "policy"])
def test_noise_alone_in_trls_trainer_says_that_nothing_corrects_it(
    scope, tiny_model_dir, tiny_tokenizer, tmp_path, monkeypatch
):
    said = []
    monkeypatch.setattr("qerl_trl.noise.callback.logger.warning_once", said.append)
    args = GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=4, num_generations=4, report_to="none"
    )
    callback = AQNCallback(scope=scope)
    GRPOTrainer(
        str(tiny_model_dir("qwen2")), spread_reward, args, DATA, processing_class=tiny_tokenizer, callbacks=[callback]
    )
    words = ("noisy completions", "Use QeRLGRPOTrainer", "scope='policy'")
    assert [all(word in text for word in words) for text in said] == [True] * (scope == "rollout")
