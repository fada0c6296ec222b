import math
import re

import pytest
import torch
from datasets import Dataset
from peft import LoHaConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig

from qerl_trl import AQNCallback, NVFP4Config, QeRLGRPOTrainer, QeRLRLOOTrainer
from qerl_trl.checkpoint.settings import run_settings
from qerl_trl.model.lora import register_nvfp4_lora
from qerl_trl.nvfp4.linear import NVFP4Linear
from tests.faults.tiny_runs import PROMPTS, logged, spread_reward
from tests.repo.test_docs import metrics
from tests.trainers import float32_base, frozen_of, settings
from tests.update.models import LORA, adapter_of, assert_identical

#: prefixes of our keys of a log; the others are TRL's
OURS = ("aqn/", "rollout/", "seconds/", "memory/")
IDS = torch.arange(5, 15)[None]
grpo_and_rloo = pytest.mark.parametrize("trainer_class", [QeRLGRPOTrainer, QeRLRLOOTrainer], ids=["grpo", "rloo"])


def compute_dtypes(trainer) -> set[torch.dtype]:
    return {module.compute_dtype for module in trainer.model.modules() if isinstance(module, NVFP4Linear)}


@grpo_and_rloo
def test_trains_the_adapter_and_nothing_else(make_trainer, trainer_class, capsys, tmp_path):
    options = {"log_completions": True, "num_completions_to_print": 0}
    trainer = make_trainer(trainer_class=trainer_class, max_steps=4, **options)
    assert sum(isinstance(m, NVFP4Linear) for m in trainer.model.modules()) == 14
    frozen, adapter = frozen_of(trainer), adapter_of(trainer)
    trainer.train()
    said = capsys.readouterr().out
    assert said.count("unlike TRL") == 1 and "the base is frozen in nvfp4" in said and "planned peak" in said
    assert_identical(frozen_of(trainer), frozen)
    assert all(not torch.equal(value, adapter[name]) for name, value in adapter_of(trainer).items())
    sigma = logged(trainer, "aqn/sigma")
    assert sigma[:2] == [0.0, 0.0] and sigma[2] > 0
    # 4 norms of 128 values: sampling error 3 %
    assert logged(trainer, "aqn/sigma_effective") == pytest.approx(sigma, rel=0.15)
    for key in ("entropy", "reward", "memory/peak_gib", "seconds/rollout", "seconds/reward", "seconds/update"):
        values = logged(trainer, key)
        assert len(values) == 4 and all(math.isfinite(value) and value >= 0 for value in values), key
    assert sum(kl > 0 for kl in logged(trainer, "rollout/mismatch_kl")) == 2  # the two noisy steps
    ours = {key for entry in trainer.state.log_history for key in entry if key.startswith(OURS)}
    absent = {"rollout/truncated_fraction"} if trainer_class is QeRLRLOOTrainer else set()
    assert ours == {key for key in metrics() if key.startswith(OURS)} - absent  # as documented
    if trainer_class is QeRLGRPOTrainer:  # TRL's RLOO only prints them
        first, *others = sorted((tmp_path / "run" / "completions").glob("*.parquet"))
        table = Dataset.from_parquet(str(first), cache_dir=str(tmp_path / "cache"))
        assert len(others) == 3
        assert set(table.column_names) == {"step", "prompt", "completion", "spread_reward", "advantage"}
    trainer.create_model_card(model_name="m", tags=trainer._tag_names)
    card = (tmp_path / "run" / "README.md").read_text()
    name, other = ("grpo", "rloo") if trainer_class is QeRLGRPOTrainer else ("rloo", "grpo")
    for words in (f"| method | {name.upper()} with TRL", "rewards/spread_reward/mean", "2510.11696", f"- {name}\n"):
        assert words in card
    assert "- qerl\n" in card and "- nvfp4\n" in card and other not in card.lower() and "gsm8k" not in card.lower()


@pytest.mark.parametrize(("base_format", "aqn"), [("bf16", False), ("full", True)])
def test_control_arms(make_trainer, base_format, aqn):
    trainer = make_trainer(base_format=base_format, aqn=aqn, max_steps=4, peft_config=None)
    assert not compute_dtypes(trainer)
    assert all(p.requires_grad for p in trainer.model.parameters()) is (base_format == "full")
    trainer.train()
    assert (max(logged(trainer, "aqn/sigma"), default=0) > 0) is aqn is ("aqn/sigma" in trainer.state.log_history[-2])


def test_nf4_arm(make_trainer):
    pytest.importorskip("bitsandbytes")
    trainer = make_trainer(base_format="nf4", model_init_kwargs={"dtype": "bfloat16"})
    assert trainer.model.is_loaded_in_4bit
    trainer.train()


def test_policy_scope_runs_on_policy(make_trainer):
    trainer = make_trainer(aqn_scope="policy", aqn_sigma_start=0.1, max_steps=4, gradient_checkpointing=True)
    trainer.train()
    assert max(logged(trainer, "aqn/sigma")) == 0.1
    assert not logged(trainer, "rollout/mismatch_kl")


@pytest.mark.parametrize(
    ("base_format", "init", "expected"),
    [
        ("nvfp4", {"torch_dtype": "bfloat16"}, torch.bfloat16),
        ("nvfp4", {"dtype": "auto"}, torch.bfloat16),
        ("full", {"dtype": "auto"}, torch.bfloat16),
    ],
)
def test_dtype_of_the_base(make_trainer, base_format, init, expected):
    """`torch_dtype` is transformers' older name of `dtype`."""
    peft_config = None if base_format == "full" else LORA
    trainer = make_trainer(base_format=base_format, peft_config=peft_config, model_init_kwargs=init)
    assert trainer.model.get_input_embeddings().weight.dtype == expected
    assert compute_dtypes(trainer) == (set() if base_format == "full" else {expected})


def test_instance_and_peft_model_equal_the_name(make_trainer, tiny_model_dir):
    by_name = make_trainer()
    by_name.train()
    assert by_name.args.model_init_kwargs == {"dtype": "float32"} and by_name.args.to_json_string()
    by_instance = make_trainer(model=float32_base(tiny_model_dir("qwen2")), model_init_kwargs=None)
    by_instance.train()
    assert_identical(adapter_of(by_instance), adapter_of(by_name))
    model = get_peft_model(float32_base(tiny_model_dir("qwen2")), register_nvfp4_lora(LORA))
    wrapped = make_trainer(model=model, peft_config=None, model_init_kwargs=None)
    wrapped.train()
    assert adapter_of(wrapped).keys() == adapter_of(by_name).keys()


def test_wrong_combinations_are_refused_with_the_remedy(make_trainer, tiny_model_dir, tmp_path):
    dense = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"), dtype=torch.float32)
    with pytest.raises(ValueError, match="pass the model's name"):
        make_trainer(model=dense)
    with pytest.raises(ValueError, match="base_format='full' trains every weight"):
        make_trainer(base_format="full")
    with pytest.raises(TypeError, match=r"got GRPOConfig.*QeRLConfig"):
        make_trainer(args=GRPOConfig(str(tmp_path), use_cpu=True, bf16=False))
    with pytest.raises(ValueError, match="LoHaConfig"):
        make_trainer(peft_config=LoHaConfig(target_modules=["q_proj"]))


def test_every_argument_of_trl_may_come_by_position(tiny_model_dir, tiny_tokenizer, tmp_path):
    trainer = QeRLGRPOTrainer(
        *(str(tiny_model_dir("qwen2")), spread_reward, settings(tmp_path), PROMPTS, None, tiny_tokenizer),
        *(None, None, (None, None), NVFP4Config(scale_rule="four_over_six", compute_dtype="float32"), LORA),
    )
    assert trainer.model.peft_config["default"].r == 4
    assert trainer.model.config.quantization_config.scale_rule == "four_over_six"


def test_a_second_noise_callback_is_an_error(make_trainer):
    with pytest.raises(ValueError, match=r"already carries .*QeRL trainers bring their own"):
        make_trainer(callbacks=[AQNCallback()], aqn=True).train()


def test_sigma_zero_equals_no_noise_bit_for_bit(make_trainer):
    adapters = []
    for noise in ({"aqn_sigma_start": 0.0, "aqn_sigma_end": 0.0}, {"aqn": False}, {"aqn_sigma_start": 0.5}):
        trainer = make_trainer(**noise, max_steps=4)
        trainer.train()
        adapters.append(adapter_of(trainer))
    silent, without, noisy = adapters
    assert_identical(silent, without)
    assert any(not torch.equal(value, without[name]) for name, value in noisy.items())


class SaveCheck(TrainerCallback):
    """Compares the norms with the clean ones at every event at which somebody could save them."""

    clean, seen = None, 0

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        norms = {name: value.clone() for name, value in model.state_dict().items() if "norm" in name}
        self.clean = self.clean or norms
        assert_identical(norms, self.clean)
        self.seen += 1

    on_step_end = on_save = on_log = on_train_end = on_step_begin


def test_no_event_ever_sees_a_noisy_weight(make_trainer, tiny_model_dir):
    check = SaveCheck()
    options = {"aqn_scope": "policy", "aqn_sigma_start": 0.5, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(callbacks=[check], **options)
    trainer.train()
    assert check.seen >= 12
    with torch.no_grad(), trainer.model.disable_adapter():
        expected = float32_base(tiny_model_dir("qwen2"))(IDS).logits
        assert torch.equal(trainer.model.eval()(IDS).logits, expected)


def test_effective_arguments_are_recorded(make_trainer):
    """TRL copies most arguments when it is built, and does not read them again (#46)."""
    trainer = make_trainer(epsilon=0.3, beta=0.0, learning_rate=1e-4)
    before = run_settings(trainer)
    trainer.args.epsilon, trainer.args.epsilon_high, trainer.args.temperature, trainer.args.beta = 0.1, 0.5, 0.1, 0.5
    assert run_settings(trainer) == before and before["options"]["epsilon"] == 0.3
    trainer.epsilon_low, trainer.args.learning_rate = 0.25, 1e-3  # these act
    after = run_settings(trainer)
    assert after["options"]["epsilon"] == 0.25 and after["learning_rate"] == 1e-3


@grpo_and_rloo
def test_bad_runs_are_warned_of_once(make_trainer, caplog, trainer_class):
    """The random model never ends a completion, and its rewards are equal."""
    reward = lambda completions, **kwargs: [1.0] * len(completions)  # noqa: E731
    make_trainer(trainer_class=trainer_class, reward=reward, max_steps=8, max_completion_length=2).train()
    for words in ("got the same reward in the last 6 rollouts", "have no end within max_completion_length="):
        assert sum(words in message for message in caplog.messages) == 1


def test_rewards_equal_in_each_group_alone_are_warned_of(make_trainer, caplog):
    """With "batch" TRL logs the spread of the whole batch."""

    def by_prompt(completions, prompts, **kwargs):
        return [float(sum(prompt.encode())) for prompt in prompts]

    make_trainer(reward=by_prompt, scale_rewards="batch", zero_advantage_patience=2).train()
    assert "in the last 2 rollouts" in caplog.text


@pytest.mark.parametrize(
    ("problems", "given", "words"),
    [
        (3, {"steps_per_generation": 2}, "3 training problems are fewer than the 4 prompts of a rollout"),
        (None, {"max_steps": 0}, "max_steps=0"),
    ],
)
def test_a_training_of_no_step_is_refused(make_trainer, tmp_path, problems, given, words):
    """After YuLan-IR#5 and trl#3477: an untrained adapter was saved as if it were trained."""
    trainer = make_trainer(**given)
    trainer.train_dataset = PROMPTS if problems is None else PROMPTS.select(range(problems))
    with pytest.raises(ValueError, match=re.escape(words)):
        trainer.train()
    assert not [*(tmp_path / "run").glob("*.safetensors")]
