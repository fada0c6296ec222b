"""AQNCallback in real trainers: alone in TRL's, and where a trainer brackets its rollouts; where it acts, where it must not, and resume."""

import contextlib
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments
from transformers.cache_utils import DynamicCache
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer.utils import add_fused_lm_head

from qerl_trl.noise.callback import SCOPES, AQNCallback
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


@pytest.fixture(scope="module")
def tokenizer():
    symbols = ["<pad>", "<eos>", *"0123456789+="]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)} | {f"<{i}>": i for i in range(len(symbols), 320)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture
def trainer_for(tokenizer, tmp_path):
    """`trainer_for(callback, ...)`: a GRPO trainer on a tiny random fp32 Qwen2; the same every time."""

    def build(
        *callbacks, trainer_class=GRPOTrainer, config_class=GRPOConfig, peft_config=None, folder="run", **settings
    ):
        defaults = {
            "output_dir": str(tmp_path / folder),
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 6,
            "max_steps": STEPS,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "seed": 1,
            "disable_tqdm": True,
        }
        rows = Dataset.from_dict({"prompt": [f"{i}+{i + 1}=" for i in range(16)]})
        return trainer_class(
            make_tiny_model("qwen2", dtype=torch.float32),
            reward_funcs=parity_reward,
            args=config_class(**{**defaults, **settings}),
            train_dataset=rows,
            eval_dataset=rows.select(range(4)),
            processing_class=tokenizer,
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
    """The model that `trainer_for` starts from, untouched by TRL, with the noise of `draw` written into its norm weights.

    (A deepcopy of a trainer's model will not do: TRL replaces `forward` on the instance, and the copy's runs the original.)
    """
    model = make_tiny_model("qwen2", dtype=torch.float32)
    norms = find_noisy_norms(model)
    if draw is not None:
        for name, norm in norms.items():
            unit = standard_noise(draw.seed, draw.step, draw.generation, name, norm.weight.numel())
            norm.weight.add_(unit * draw.sigma)
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs",))
    return model


@torch.no_grad()
def replay(model: nn.Module, entry, output: str) -> torch.Tensor:
    """The recorded forward, once more, on another model."""
    kwargs = dict(entry.kwargs)
    if kwargs.get("past_key_values") is not None:
        kwargs["past_key_values"] = DynamicCache(config=model.config)
    return getattr(model(**kwargs), output)


def sigma_at(step: int) -> float:
    return ExponentialSchedule(**NOISE).sigma(step, STEPS)


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same_weights(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def history(trainer, *without) -> list[dict]:
    """The log without what depends on the clock."""
    clock = ("time", "runtime", "per_second", *without)
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in clock)}
        for entry in trainer.state.log_history
    ]


class Bracketing(GRPOTrainer):
    """A trainer that says itself when it generates, as QeRLGRPOTrainer does."""

    def __init__(self, *args, callbacks, **kwargs):
        self.aqn = callbacks[0]
        self.aqn.explicit = True
        super().__init__(*args, callbacks=callbacks, **kwargs)

    def _generate(self, prompts):
        with self.aqn.generation():
            return super()._generate(prompts)


# ------------------------------------------------------------------------------------------------------ where it acts


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("trainer_class", [GRPOTrainer, Bracketing], ids=["alone", "bracketing"])
def test_noise_acts_in_generation_and_by_scope_in_training(trainer_for, scope, trainer_class):
    # learning rate 0: the clean policy stays known; accumulation of half a rollout makes TRL score the old policy too
    trainer = trainer_for(
        AQNCallback(**NOISE, scope=scope),
        trainer_class=trainer_class,
        learning_rate=0.0,
        steps_per_generation=2,
        gradient_accumulation_steps=1,
        max_steps=2 * STEPS,
    )
    clean = reference()
    recorder = Recorder(trainer)
    trainer.train()
    steps = list(range(0, 2 * STEPS, 2))  # a rollout every second step
    assert [entry.step for entry in recorder.generated] == steps
    assert [entry.step for entry in recorder.scored] == [step for step in steps for _ in range(2)]  # two micro-batches
    assert [entry.step for entry in recorder.trained] == list(range(2 * STEPS))
    for entry in (*recorder.generated, *recorder.scored, *recorder.trained):
        rollout_step = entry.step // 2 * 2
        draw = NoiseDraw(sigma_at(entry.step // 2), 1, rollout_step, 0)
        noisy = reference(draw)
        generation = entry in recorder.generated
        output = "logits" if generation else "log_probs"
        found, expected, unperturbed = (
            getattr(entry, output),
            replay(noisy, entry, output),
            replay(clean, entry, output),
        )
        if not (generation or scope == "policy"):
            expected = unperturbed
        elif draw.sigma > 0:
            assert (expected - unperturbed).abs().max() > 1e-3  # there is something to see
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scope", SCOPES)
def test_evaluation_is_clean(trainer_for, scope):
    trainer = trainer_for(
        AQNCallback("constant", sigma_start=0.05, scope=scope),
        learning_rate=0.0,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        num_generations_eval=2,
        per_device_eval_batch_size=4,
    )
    clean = reference()
    recorder = Recorder(trainer)
    trainer.train()
    evaluated = [entry for entry in (*recorder.generated, *recorder.scored) if not entry.training]
    assert len(evaluated) >= 2 * (STEPS + 1)
    for entry in evaluated:
        output = "logits" if hasattr(entry, "logits") else "log_probs"
        torch.testing.assert_close(getattr(entry, output), replay(clean, entry, output), rtol=1e-5, atol=1e-6)
    assert not any("aqn" in key for entry in trainer.state.log_history if "eval_loss" in entry for key in entry)


def test_generation_of_other_callbacks_is_clean(trainer_for):
    """Sampling between steps, in training mode, as TRL's completion loggers do."""
    seen = []

    class Sampler(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            assert model.training
            out = model.generate(
                torch.tensor([[3, 4, 5]]),
                max_new_tokens=1,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            seen.append(out.logits[0])

    trainer = trainer_for(Sampler(), AQNCallback("constant", sigma_start=0.05, scope="policy"), learning_rate=0.0)
    clean = reference()
    trainer.train()
    with torch.no_grad():
        expected = clean(torch.tensor([[3, 4, 5]])).logits[:, -1]
    assert len(seen) == STEPS
    for logits in seen:
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


def test_evaluation_mode_within_a_step_is_clean(trainer_for):
    seen = []

    class Sampler(TrainerCallback):
        def on_substep_end(self, args, state, control, model=None, **kwargs):
            model.eval()
            out = model.generate(
                torch.tensor([[3, 4, 5]]),
                max_new_tokens=1,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            model.train()
            seen.append(out.logits[0])

    callback = AQNCallback("constant", sigma_start=0.05, scope="policy")
    trainer_for(Sampler(), callback, learning_rate=0.0, gradient_accumulation_steps=2, max_steps=2).train()
    with torch.no_grad():
        expected = reference()(torch.tensor([[3, 4, 5]])).logits[:, -1]
    assert len(seen) == 2
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
        expected = replay(reference(NoiseDraw(sigma_at(entry.step), 1, entry.step, 0)), entry, "logits")
        torch.testing.assert_close(entry.logits, expected, rtol=1e-5, atol=1e-6)


def test_one_draw_a_generation_without_a_cache(trainer_for):
    callback = AQNCallback("constant", sigma_start=0.05)
    draws = spy_on_draws(callback)
    trainer_for(callback, generation_kwargs={"use_cache": False}).train()
    assert [(draw.step, draw.generation) for draw in draws] == [(step, 0) for step in range(STEPS)]


def test_generations_within_a_step_are_numbered(trainer_for):
    callback = AQNCallback("constant", sigma_start=0.05)
    draws = spy_on_draws(callback)
    trainer_for(callback, steps_per_generation=1, gradient_accumulation_steps=3, max_steps=2).train()
    assert [(draw.step, draw.generation) for draw in draws] == [(step, n) for step in range(2) for n in range(3)]
    assert {draw.seed for draw in draws} == {1}  # args.seed


def spy_on_draws(callback) -> list[NoiseDraw]:
    draws, draw = [], callback._new_draw
    callback._new_draw = lambda: draws.append(draw()) or draws[-1]
    return draws


def test_rloo_alone(trainer_for):
    trainer = trainer_for(AQNCallback(**NOISE), trainer_class=RLOOTrainer, config_class=RLOOConfig, beta=0.0)
    trainer.train()
    assert [entry["aqn/sigma"] for entry in history(trainer) if "loss" in entry] == [sigma_at(i) for i in range(STEPS)]


# ------------------------------------------------------------------------------------------- one mechanism, two drivers


@pytest.mark.parametrize("scope", SCOPES)
def test_both_drivers_give_the_same_run(trainer_for, scope):
    runs = []
    for trainer_class in (GRPOTrainer, Bracketing):
        runs.append(trainer_for(AQNCallback(**NOISE, scope=scope), trainer_class=trainer_class))
        runs[-1].train()
    assert history(runs[0]) == history(runs[1])
    assert_same_weights(weights(runs[0]), weights(runs[1]))


@pytest.mark.parametrize("scope", SCOPES)
def test_noise_changes_the_run(trainer_for, scope):
    """Or every equality in this file would be empty."""
    plain = trainer_for()
    plain.train()
    noisy = trainer_for(AQNCallback(**NOISE, scope=scope))
    noisy.train()
    assert any(not torch.equal(a, b) for a, b in zip(weights(plain).values(), weights(noisy).values(), strict=True))


def test_engine_gets_the_draw_and_the_model_stays_clean(trainer_for):
    yielded, inside = [], []

    class WithEngine(Bracketing):
        def _generate(self, prompts):
            with self.aqn.generation() as draw:
                yielded.append(draw)
                inside.append(self.aqn.draw)
                self.aqn.sigma_effective = 0.125
                return GRPOTrainer._generate(self, prompts)

    callback = AQNCallback(**NOISE)
    callback.engine = True
    trainer = trainer_for(callback, trainer_class=WithEngine, learning_rate=0.0)
    clean = reference()
    recorder = Recorder(trainer)
    trainer.train()
    assert yielded == inside == [NoiseDraw(sigma_at(step), 1, step, 0) for step in range(STEPS)]
    assert callback.draw is None
    for entry in recorder.generated:
        torch.testing.assert_close(entry.logits, replay(clean, entry, "logits"), rtol=1e-5, atol=1e-6)
    assert [entry["aqn/sigma_effective"] for entry in history(trainer) if "loss" in entry] == [0.125] * STEPS


def test_engine_is_told_to_be_clean_in_evaluation(trainer_for):
    draws = []

    class WithEngine(Bracketing):
        def _generate(self, prompts):
            with self.aqn.generation() as draw:
                draws.append((self.model.training, draw.sigma))
                return GRPOTrainer._generate(self, prompts)

    callback = AQNCallback("constant", sigma_start=0.05)
    callback.engine = True
    trainer = trainer_for(
        callback, trainer_class=WithEngine, eval_strategy="steps", eval_steps=2, num_generations_eval=2, max_steps=2
    )
    trainer.train()
    trainer.evaluate()  # after training, when the callback is detached
    assert set(draws) == {(True, 0.05), (False, 0.0)}


def test_a_rollout_in_a_rollout_and_one_that_fails_leave_no_draw(trainer_for, monkeypatch):
    callback = AQNCallback("constant", sigma_start=0.05)
    callback.engine = True
    trainer_for(callback)
    with callback.generation() as draw, callback.generation():
        assert draw.sigma == 0  # outside a step
    callback.engine, failed = False, torch.OutOfMemoryError("noise")
    monkeypatch.setattr(callback, "_training", lambda: True)
    monkeypatch.setattr(callback, "_new_draw", lambda: NoiseDraw(0.05, 1, 0, 0))
    monkeypatch.setattr(callback, "_attached", lambda: SimpleNamespace(enter=lambda: (_ for _ in ()).throw(failed)))
    with pytest.raises(torch.OutOfMemoryError), callback.generation():
        pass
    assert callback.draw is None


def test_rollout_that_bypasses_the_model_is_an_error(trainer_for):
    class Elsewhere(Bracketing):
        def _generate(self, prompts):
            with self.aqn.generation():
                pass
            return super()._generate(prompts)

    trainer = trainer_for(AQNCallback("constant", sigma_start=0.05), trainer_class=Elsewhere)
    with pytest.raises(RuntimeError, match=r"sigma 0\.05 was drawn for 4 norms, but none of them ran"):
        trainer.train()


def test_noisy_shows_the_latest_draw(trainer_for):
    seen = []

    class Probe(Bracketing):
        def _generate(self, prompts):
            output = super()._generate(prompts)
            with self.aqn.noisy(), torch.no_grad():
                seen.append((self.aqn.sigma, self.model(torch.tensor([[3, 4, 5]])).logits))
            return output

    callback = AQNCallback(**NOISE)
    trainer = trainer_for(callback, trainer_class=Probe, learning_rate=0.0)
    trainer.train()
    for step, (sigma, logits) in enumerate(seen):
        assert sigma == sigma_at(step)
        with torch.no_grad():
            expected = reference(NoiseDraw(sigma, 1, step, 0))(torch.tensor([[3, 4, 5]])).logits
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


def test_from_args_takes_every_field():
    args = SimpleNamespace(
        aqn_schedule="entropy_target",
        aqn_sigma_start=0.3,
        aqn_sigma_end=0.1,
        aqn_num_stages=7,
        aqn_entropy_target=0.5,
        aqn_scope="policy",
        aqn_seed=11,
        use_vllm=True,
    )
    callback = AQNCallback.from_args(args)
    schedule = callback.schedule
    assert (schedule.name, schedule.sigma_start, schedule.sigma_end) == ("entropy_target", 0.3, 0.1)
    assert (schedule.num_stages, schedule.target) == (7, 0.5)
    assert (callback.scope, callback.seed, callback.explicit, callback.engine) == ("policy", 11, True, True)


# ------------------------------------------------------------------------------------- exactness: sigma 0, save, resume


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, Bracketing], ids=["alone", "bracketing"])
@pytest.mark.parametrize("scope", SCOPES)
def test_sigma_0_is_the_run_without_the_callback(trainer_for, scope, trainer_class):
    plain = trainer_for()
    plain.train()
    zero = trainer_for(AQNCallback(sigma_start=0, sigma_end=0, scope=scope), trainer_class=trainer_class)
    zero.train()
    assert history(zero, "aqn") == history(plain)
    assert_same_weights(weights(zero), weights(plain))
    assert {entry["aqn/sigma_effective"] for entry in zero.state.log_history if "loss" in entry} == {0.0}


@pytest.mark.parametrize("scope", SCOPES)
def test_checkpoints_never_contain_noise(trainer_for, scope):
    """At learning rate 0 a checkpoint must be the initial model, byte for byte, also when a draw is in force."""
    trainer = trainer_for(
        AQNCallback("constant", sigma_start=0.05, scope=scope),
        learning_rate=0.0,
        save_strategy="steps",
        save_steps=1,
        save_only_model=True,
        steps_per_generation=2,
        gradient_accumulation_steps=1,
    )
    trainer.model.save_pretrained(Path(trainer.args.output_dir) / "initial")
    initial = load_file(Path(trainer.args.output_dir) / "initial/model.safetensors")
    trainer.train()
    for step in range(1, STEPS + 1):
        assert_same_weights(load_file(Path(trainer.args.output_dir) / f"checkpoint-{step}/model.safetensors"), initial)


@pytest.mark.parametrize(
    ("schedule", "scope"), [("exponential", "rollout"), ("exponential", "policy"), ("entropy_target", "policy")]
)
def test_resume_continues_bit_for_bit(trainer_for, schedule, scope):
    options = {"sigma_start": 0.2, "sigma_end": 0.02, "num_stages": 4, "scope": scope}
    if schedule == "entropy_target":
        options["entropy_target"] = 4.0
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = trainer_for(AQNCallback(schedule, **options), **saving)
    whole.train()
    resumed = trainer_for(AQNCallback(schedule, **options), **saving)
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-2"))
    assert history(resumed, "train_loss") == history(whole, "train_loss")
    assert_same_weights(weights(resumed), weights(whole))
    sigmas = [entry["aqn/sigma"] for entry in whole.state.log_history if "loss" in entry]
    assert len(set(sigmas[2:])) == 2  # the schedule moved after the checkpoint


def test_entropy_target_follows_the_logged_entropy(trainer_for):
    schedule = {"sigma_start": 0.2, "sigma_end": 0.02, "entropy_target": 4.0, "scope": "policy"}
    trainer = trainer_for(AQNCallback("entropy_target", **schedule))
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    middle = math.sqrt(0.2 * 0.02)
    error = (4.0 - logs[0]["entropy"]) / 4.0
    assert error < 0  # a random policy is above the target
    assert [entry["aqn/sigma"] for entry in logs[:2]] == pytest.approx([middle, middle * math.exp(0.3 * error)])


def test_entropy_target_in_the_rollout_alone_is_refused_where_the_sampling_policy_is_not_logged(trainer_for):
    with pytest.raises(RuntimeError, match=r"'rollout/entropy', which this run does not log.*aqn_scope='policy'"):
        trainer_for(AQNCallback("entropy_target", entropy_target=4.0)).train()


@contextlib.contextmanager
def transformers_logs(caplog):
    """transformers' loggers do not propagate, so caplog's handler goes on ours directly."""
    from qerl_trl.noise.callback import logger

    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


# -------------------------------------------------------------------------------------------------------------- logging


def test_logged_in_the_history_and_in_the_checkpoint(trainer_for):
    trainer = trainer_for(AQNCallback(**NOISE), save_strategy="steps", save_steps=STEPS)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["aqn/sigma"] for entry in logs] == [sigma_at(step) for step in range(STEPS)]
    for entry in logs:
        assert entry["aqn/sigma_effective"] == pytest.approx(entry["aqn/sigma"], rel=5 / math.sqrt(2 * 4 * 128))
    saved = json.loads((Path(trainer.args.output_dir) / f"checkpoint-{STEPS}/trainer_state.json").read_text())
    assert [entry["aqn/sigma"] for entry in saved["log_history"]] == [sigma_at(step) for step in range(STEPS)]


def test_a_log_line_averages_its_draws(trainer_for):
    trainer = trainer_for(AQNCallback(**NOISE), logging_steps=2)
    trainer.train()
    logs = [entry["aqn/sigma"] for entry in trainer.state.log_history if "loss" in entry]
    assert logs == pytest.approx([(sigma_at(0) + sigma_at(1)) / 2, (sigma_at(2) + sigma_at(3)) / 2])


def test_trainers_own_values_win(trainer_for):
    class Logs(Bracketing):
        def _generate(self, prompts):
            output = super()._generate(prompts)
            self._metrics["train"]["aqn/sigma"].append(7.0)
            return output

    trainer = trainer_for(AQNCallback(**NOISE), trainer_class=Logs)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["aqn/sigma"] for entry in logs] == [7.0] * STEPS
    assert not any("aqn/sigma_effective" in entry for entry in logs)


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


# --------------------------------------------------------------------------------------------------------------- errors


def test_vllm_rollouts_are_refused_before_training():
    args = SimpleNamespace(use_vllm=True)
    with pytest.raises(ValueError, match=r"use_vllm=True .*QeRLGRPOTrainer"):
        AQNCallback().on_init_end(args, None, None)
    callback = AQNCallback()
    callback.explicit = True
    callback.on_init_end(args, None, None)


def test_continuous_batching_is_refused():
    args = SimpleNamespace(use_vllm=False, use_transformers_continuous_batching=True)
    with pytest.raises(ValueError, match="use_transformers_continuous_batching=True"):
        AQNCallback().on_init_end(args, None, None)


def test_two_callbacks_in_one_trainer_are_refused(trainer_for):
    with pytest.raises(ValueError, match="already carries"):
        trainer_for(AQNCallback(), AQNCallback()).train()


def test_a_trainer_that_never_generates_is_an_error(tmp_path):
    rows = [{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}] * 4
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = Trainer(
        make_tiny_model("qwen2", dtype=torch.float32), args, train_dataset=rows, callbacks=[AQNCallback()]
    )
    with pytest.raises(RuntimeError, match="saw no generation"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"scope": "train"}, "scope='train'"),
        ({"sigma_start": -1.0}, "-1.0"),
        ({"schedule": "entropy_target"}, "entropy_target=None"),
    ],
)
def test_impossible_options_are_refused_by_value(options, value):
    with pytest.raises(ValueError) as error:
        AQNCallback(**options)
    assert value in str(error.value)


# ----------------------------------------------------------------------------------------------------------------- life


def test_nothing_is_left_on_the_model(trainer_for):
    callback = AQNCallback(**NOISE, scope="policy")
    trainer = trainer_for(callback)
    trainer.train()
    assert our_hooks(trainer.model) == []
    assert callback.norms == ()


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
    assert our_hooks(trainer.model)  # nobody told the callback; starting again must not trip over them
    interrupt.armed = False
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert our_hooks(trainer.model) == []


def test_attached_early_the_model_is_traced_once(trainer_for, monkeypatch):
    """QeRLGRPOTrainer attaches before it makes trainable norms fp32; a second trace could then fail."""
    callback = AQNCallback(**NOISE)
    trainer = trainer_for(callback)
    callback.attach(trainer.model)
    names = callback.norms
    monkeypatch.setattr("qerl_trl.noise.callback.find_noisy_norms", lambda model: pytest.fail("traced again"))
    during = []

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            during.append(callback.norms)

    trainer.add_callback(Look())
    trainer.train()
    assert set(during) == {names}
