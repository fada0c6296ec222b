"""AQNCallback in TRL's trainers, alone and with rollouts in `generation()`: scope, clean forwards, resume, logs."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.cache_utils import DynamicCache
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer.utils import add_fused_lm_head

from qerl_trl.noise.callback import SCALES, SCOPES, AQNCallback
from qerl_trl.noise.generator import standard_noise
from qerl_trl.noise.hooks import NoiseDraw
from qerl_trl.noise.norms import find_noisy_norms
from qerl_trl.noise.schedules import ExponentialSchedule
from tests.tiny_models import make_tiny_model

#: 4 stages in 4 steps: silent, 0.5, 0.22, 0.1; large enough to change what a tiny random model samples
NOISE = {"sigma_start": 0.5, "sigma_end": 0.1, "num_stages": 4}
STEPS = 4


def parity_reward(completion_ids, **kwargs):
    """Share of odd tokens: varies within every group of a random policy."""
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture
def trainer_for(tiny_tokenizer, tmp_path):
    """`trainer_for(callback, ...)`: a GRPO trainer on a tiny random fp32 Qwen2; the same every time."""

    def build(*callbacks, trainer_class=GRPOTrainer, config_class=GRPOConfig, peft_config=None, **settings):
        defaults = {
            "output_dir": str(tmp_path), "per_device_train_batch_size": 4, "num_generations": 4,
            "max_completion_length": 6, "max_steps": STEPS, "learning_rate": 1e-3, "logging_steps": 1,
            "save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False, "seed": 1,
            "disable_tqdm": True,
        }  # fmt: skip
        rows = Dataset.from_dict({"prompt": [f"{i}+{i + 1}=" for i in range(16)]})
        return trainer_class(
            make_tiny_model("qwen2", dtype=torch.float32),
            reward_funcs=parity_reward,
            args=config_class(**{**defaults, **settings}),
            train_dataset=rows,
            eval_dataset=rows.select(range(4)),
            processing_class=tiny_tokenizer,
            peft_config=peft_config,
            callbacks=list(callbacks),
        )

    return build


class Recorder:
    """Every forward of the policy during training: its arguments, what came out, and the step it belonged to."""

    def __init__(self, trainer):
        policy = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
        self.generated, self.scored, self.trained = [], [], []

        def record(module, args, kwargs, output):
            entry = SimpleNamespace(step=trainer.state.global_step, training=module.training, kwargs=kwargs)
            if kwargs.get("labels") is not None:
                entry.log_probs = output.log_probs.detach().clone()
                (self.trained if torch.is_grad_enabled() else self.scored).append(entry)
            elif kwargs.get("past_key_values") is not None and kwargs["input_ids"].shape[1] > 1:  # prefill
                entry.logits = output.logits.clone()
                self.generated.append(entry)

        policy.register_forward_hook(record, with_kwargs=True)


@torch.no_grad()
def reference(draw: NoiseDraw | None = None) -> nn.Module:
    """The model that `trainer_for` starts from, with the noise of `draw` written into its norm weights.

    No deepcopy of a trainer's model: TRL replaces its `forward`, and that of the copy would run the original.
    """
    model = make_tiny_model("qwen2", dtype=torch.float32)
    for name, norm in find_noisy_norms(model).items() if draw is not None else ():
        unit = standard_noise(draw.seed, draw.step, draw.generation, name, norm.weight.numel())
        norm.weight.add_(unit * draw.sigma)
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs",))
    return model


@torch.no_grad()
def assert_from(model: nn.Module, entry, different: nn.Module | None = None) -> None:
    """The recorded forward is that of `model`, and not of `different`."""
    kwargs = dict(entry.kwargs)
    output = "logits" if hasattr(entry, "logits") else "log_probs"
    results = []
    for each in (model, different or model):
        if kwargs.get("past_key_values") is not None:
            kwargs["past_key_values"] = DynamicCache(config=model.config)
        results.append(getattr(each(**kwargs), output))
    torch.testing.assert_close(getattr(entry, output), results[0], rtol=1e-5, atol=1e-6)
    assert different is None or (results[0] - results[1]).abs().max() > 1e-3


def sigma_at(step: int) -> float:
    return ExponentialSchedule(**NOISE).sigma(step, STEPS)


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same_weights(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def logged(trainer, key: str) -> list[float]:
    return [entry.get(key) for entry in trainer.state.log_history if "loss" in entry]


def history(trainer, *without) -> list[dict]:
    """The log, without times."""
    clock = ("time", "runtime", "per_second", *without)
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in clock)}
        for entry in trainer.state.log_history
    ]


class Bracketing(GRPOTrainer):
    """A trainer with its rollouts in `generation()`, as QeRLGRPOTrainer."""

    def __init__(self, *args, callbacks, **kwargs):
        self.aqn = callbacks[0]
        self.aqn.explicit = True
        super().__init__(*args, callbacks=callbacks, **kwargs)

    def _generate(self, prompts):
        with self.aqn.generation():
            return super()._generate(prompts)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("trainer_class", [GRPOTrainer, Bracketing], ids=["alone", "bracketing"])
def test_noise_acts_in_generation_and_by_scope_in_training(trainer_for, scope, trainer_class):
    """Two steps per rollout, so that TRL also scores the old policy; learning rate 0 keeps the policy known."""
    rhythm = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 2 * STEPS}
    callback = AQNCallback(**NOISE, scope=scope)
    trainer = trainer_for(callback, trainer_class=trainer_class, learning_rate=0.0, **rhythm)
    recorder = Recorder(trainer)
    trainer.train()
    steps = list(range(0, 2 * STEPS, 2))
    assert [entry.step for entry in recorder.generated] == steps
    assert [entry.step for entry in recorder.scored] == [step for step in steps for _ in range(2)]  # two micro-batches
    assert [entry.step for entry in recorder.trained] == list(range(2 * STEPS))
    for entry in (*recorder.generated, *recorder.scored, *recorder.trained):
        draw = NoiseDraw(sigma_at(entry.step // 2), 1, entry.step // 2 * 2, 0)
        if draw.sigma > 0 and (entry in recorder.generated or scope == "policy"):
            assert_from(reference(draw), entry, different=reference())
        else:
            assert_from(reference(), entry)


@pytest.mark.parametrize("scope", SCOPES)
def test_evaluation_is_clean(trainer_for, scope):
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "num_generations_eval": 2}
    callback = AQNCallback("constant", sigma_start=0.05, scope=scope)
    trainer = trainer_for(callback, learning_rate=0.0, per_device_eval_batch_size=4, **evaluation)
    recorder = Recorder(trainer)
    trainer.train()
    evaluated = [entry for entry in (*recorder.generated, *recorder.scored) if not entry.training]
    assert len(evaluated) >= 2 * (STEPS + 1)
    for entry in evaluated:
        assert_from(reference(), entry)
    assert not any("aqn" in key for entry in trainer.state.log_history if "eval_loss" in entry for key in entry)


def test_generation_of_other_callbacks_is_clean(trainer_for):
    """Between steps in training mode, as TRL's completion loggers."""
    seen, prompt = [], torch.tensor([[3, 4, 5]])
    options = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}

    class Sampler(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen.append(model.generate(prompt, **options).logits[0])

    callback = AQNCallback("constant", sigma_start=0.05, scope="policy")
    trainer_for(Sampler(), callback, learning_rate=0.0, gradient_accumulation_steps=2, max_steps=2).train()
    assert len(seen) == 2
    with torch.no_grad():
        expected = reference()(prompt).logits[:, -1]
    for logits in seen:
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("saved", [None, ["input_layernorm", "post_attention_layernorm"]], ids=["lora", "lora+norms"])
def test_noise_acts_under_peft(trainer_for, saved):
    # LoRA starts at zero and the learning rate is 0, so the policy is the reference
    config = LoraConfig(r=4, target_modules="all-linear", modules_to_save=saved)
    trainer = trainer_for(AQNCallback(**NOISE), peft_config=config, learning_rate=0.0)
    recorder = Recorder(trainer)
    trainer.train()
    assert [entry.step for entry in recorder.generated] == list(range(STEPS))
    for entry in recorder.generated:
        assert_from(reference(NoiseDraw(sigma_at(entry.step), 1, entry.step, 0)), entry)


@pytest.mark.parametrize("several", [False, True], ids=["without-cache", "several-in-a-step"])
def test_each_generation_has_one_draw(trainer_for, several):
    callback, seen = AQNCallback("constant", sigma_start=0.05), []
    draw = callback._new_draw
    callback._new_draw = lambda: seen.append(draw()) or seen[-1]
    rhythm = {"steps_per_generation": 1, "gradient_accumulation_steps": 3, "max_steps": 2}
    trainer_for(callback, **(rhythm if several else {"generation_kwargs": {"use_cache": False}})).train()
    expected = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)] if several else [(step, 0) for step in range(STEPS)]
    assert [(draw.step, draw.generation) for draw in seen] == expected
    assert {draw.seed for draw in seen} == {1}, "args.seed"


def test_rloo_alone(trainer_for):
    trainer = trainer_for(AQNCallback(**NOISE), trainer_class=RLOOTrainer, config_class=RLOOConfig, beta=0.0)
    trainer.train()
    assert logged(trainer, "aqn/sigma") == [sigma_at(step) for step in range(STEPS)]


def test_rollout_that_bypasses_the_model_is_an_error(trainer_for):
    class Elsewhere(Bracketing):
        def _generate(self, prompts):
            with self.aqn.generation():
                pass
            return super()._generate(prompts)

    trainer = trainer_for(AQNCallback("constant", sigma_start=0.05), trainer_class=Elsewhere)
    with pytest.raises(RuntimeError, match=r"sigma 0\.05 was drawn for 4 norms, but none of them ran"):
        trainer.train()


def test_from_args_takes_every_field():
    values = {"schedule": "entropy_target", "sigma_start": 0.3, "sigma_end": 0.1, "num_stages": 7}
    values |= {"entropy_target": 0.5, "scope": "policy", "scale": "relative", "target_kl": 0.2, "seed": 11}
    callback = AQNCallback.from_args(SimpleNamespace(use_vllm=True, **{f"aqn_{k}": v for k, v in values.items()}))
    schedule = callback.schedule
    assert (schedule.name, schedule.sigma_start, schedule.sigma_end) == ("entropy_target", 0.3, 0.1)
    assert (schedule.num_stages, schedule.target) == (7, 0.5)
    assert (callback.scale, callback.target_kl) == ("relative", 0.2)
    assert (callback.scope, callback.seed, callback.explicit, callback.engine) == ("policy", 11, True, True)


@pytest.mark.parametrize("scale", SCALES)
def test_sigma_is_found_for_a_kl_and_a_dominant_norm_is_named(scale):
    model = make_tiny_model("qwen2", dtype=torch.float32)
    small = model.model.layers[0].input_layernorm
    with torch.no_grad():
        small.weight.mul_(0.05)
        model.model.embed_tokens.weight.mul_(3)
    callback = AQNCallback(sigma_start=0.1, sigma_end=0.01, scale=scale, target_kl=1e-3)
    callback.attach(model)
    callback.measure(model, [[*range(start, start + 12)] for start in range(2, 50, 12)], temperature=0.7)
    assert callback.kl == pytest.approx(1e-3, rel=0.05)
    assert callback.schedule.sigma_start == pytest.approx(10 * callback.schedule.sigma_end)
    assert ("model.layers.0.input_layernorm" in callback.dominant) == (scale == "absolute")
    assert f"KL {callback.kl:.2g} nats" in str(callback) and small.weight.detach().abs().max() < 0.1
    if scale == "relative":
        assert callback.shares == [1.0] * 4


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, Bracketing], ids=["alone", "bracketing"])
@pytest.mark.parametrize("scope", SCOPES)
def test_sigma_0_is_the_run_without_the_callback(trainer_for, scope, trainer_class):
    plain = trainer_for()
    plain.train()
    zero = trainer_for(AQNCallback(sigma_start=0, sigma_end=0, scope=scope), trainer_class=trainer_class)
    zero.train()
    assert history(zero, "aqn") == history(plain)
    assert_same_weights(weights(zero), weights(plain))
    assert set(logged(zero, "aqn/sigma_effective")) == {0.0}


def test_entropy_target_follows_the_logged_entropy(trainer_for):
    schedule = {"sigma_start": 0.2, "sigma_end": 0.02, "entropy_target": 4.0, "scope": "policy"}
    trainer = trainer_for(AQNCallback("entropy_target", **schedule))
    trainer.train()
    middle = math.sqrt(0.2 * 0.02)
    error = (4.0 - logged(trainer, "entropy")[0]) / 4.0
    assert error < 0, "a random policy is above the target"
    assert logged(trainer, "aqn/sigma")[:2] == pytest.approx([middle, middle * math.exp(0.3 * error)])


def test_entropy_target_without_a_logged_entropy_is_refused(trainer_for):
    with pytest.raises(RuntimeError, match=r"'rollout/entropy', which this run does not log.*aqn_scope='policy'"):
        trainer_for(AQNCallback("entropy_target", entropy_target=4.0)).train()


def test_logged_in_the_history_and_in_the_checkpoint(trainer_for):
    trainer = trainer_for(AQNCallback(**NOISE), save_strategy="steps", save_steps=STEPS)
    trainer.train()
    expected = [sigma_at(step) for step in range(STEPS)]
    assert logged(trainer, "aqn/sigma") == expected
    assert logged(trainer, "aqn/sigma_effective") == pytest.approx(expected, rel=5 / math.sqrt(2 * 4 * 128))
    saved = json.loads((Path(trainer.args.output_dir) / f"checkpoint-{STEPS}/trainer_state.json").read_text())
    assert [entry["aqn/sigma"] for entry in saved["log_history"]] == expected


def test_a_log_line_averages_its_draws(trainer_for):
    trainer = trainer_for(AQNCallback(**NOISE), logging_steps=2)
    trainer.train()
    means = [(sigma_at(0) + sigma_at(1)) / 2, (sigma_at(2) + sigma_at(3)) / 2]
    assert logged(trainer, "aqn/sigma") == pytest.approx(means)


@pytest.mark.parametrize("first", [False, True], ids=["as-added", "log_first"])
def test_reporting_integrations_see_the_values_after_log_first(trainer_for, first):
    """Trainer puts `report_to` integrations before the user's callbacks; `log_first` is the way around."""
    seen = []

    class Integration(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append("aqn/sigma" in logs)

    callback = AQNCallback(**NOISE)
    trainer = trainer_for(Integration(), callback)
    if first:
        callback.log_first(trainer)
    trainer.train()
    assert seen == [first] * STEPS + [False]  # the last line is the summary of the run


@pytest.mark.parametrize("option", ["use_vllm", "use_transformers_continuous_batching"])
def test_rollouts_out_of_reach_are_refused_before_training(option):
    args = SimpleNamespace(**{"use_vllm": False, "use_transformers_continuous_batching": False, option: True})
    with pytest.raises(ValueError, match=f"{option}=True"):
        AQNCallback().on_init_end(args, None, None)
    callback = AQNCallback()
    callback.explicit = True
    if option == "use_vllm":
        callback.on_init_end(args, None, None)


def test_a_trainer_that_never_generates_is_an_error(tmp_path):
    rows = [{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}] * 4
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = Trainer(
        make_tiny_model("qwen2", dtype=torch.float32), args, train_dataset=rows, callbacks=[AQNCallback()]
    )
    with pytest.raises(RuntimeError, match="saw no generation"):
        trainer.train()


def test_an_unknown_scope_is_refused():
    with pytest.raises(ValueError, match="scope='train' is not one of"):
        AQNCallback(scope="train")


def our_hooks(model) -> list[str]:
    hooks = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return [hook.__qualname__ for hook in hooks if hook.__module__.startswith("qerl_trl")]


def test_an_interrupted_run_can_be_started_again(trainer_for):
    class Interrupt(TrainerCallback):
        armed = True

        def on_substep_end(self, args, state, control, **kwargs):
            if self.armed:
                raise KeyboardInterrupt

    interrupt, callback = Interrupt(), AQNCallback("constant", sigma_start=0.05)
    trainer = trainer_for(interrupt, callback, gradient_accumulation_steps=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert our_hooks(trainer.model), "left by the exception"
    interrupt.armed = False
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert our_hooks(trainer.model) == [] and callback.norms == ()
