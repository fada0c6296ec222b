import copy
import json
import logging
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoHaConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig

from qerl_trl import (
    AQNCallback,
    NVFP4Config,
    QeRLConfig,
    QeRLGRPOTrainer,
    QeRLRLOOConfig,
    QeRLRLOOTrainer,
    last_checkpoint,
)
from qerl_trl.checkpoint.seal import MANIFEST_NAME, order_of
from qerl_trl.checkpoint.settings import run_settings
from qerl_trl.model.lora import register_nvfp4_lora
from qerl_trl.nvfp4.linear import NVFP4Linear
from qerl_trl.run.publishing import PublishingMixin
from tests.test_docs import metrics

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
PROMPTS = Dataset.from_dict({"prompt": [f"say {word} " for word in ("one", "two", "six", "ten")] * 4})

#: of the keys that a run logs, those that are not TRL's
OURS = ("aqn/", "rollout/", "seconds/", "memory/")


def spread_reward(completions, **kwargs):
    """Differs between completions, so that every step has a gradient."""
    return [float(sum(text.encode()) % 7) for text in completions]


def settings(tmp_path, config=QeRLConfig, **kwargs):
    defaults = {
        "output_dir": str(tmp_path / "run"),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 3,
        "aqn_num_stages": 2,
        "model_init_kwargs": {"dtype": "float32"},
    }
    return config(**{**defaults, **kwargs})


@pytest.fixture
def make_trainer(tiny_model_dir, tiny_tokenizer, tmp_path):
    def make(
        model=None,
        trainer_class=QeRLGRPOTrainer,
        reward=spread_reward,
        callbacks=None,
        peft_config=LORA,
        args=None,
        eval_dataset=None,
        **kwargs,
    ):
        config = QeRLConfig if trainer_class is QeRLGRPOTrainer else QeRLRLOOConfig
        return trainer_class(
            model if model is not None else str(tiny_model_dir("qwen2")),
            reward,
            args=args if args is not None else settings(tmp_path, config, **kwargs),
            train_dataset=PROMPTS,
            eval_dataset=eval_dataset,
            processing_class=tiny_tokenizer,
            peft_config=peft_config,
            callbacks=callbacks,
        )

    return make


def adapter_of(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name}


def frozen_of(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}


def assert_identical(left: dict, right: dict):
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


def logged(trainer, key: str) -> list:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


# --- the run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer_class", [QeRLGRPOTrainer, QeRLRLOOTrainer], ids=["grpo", "rloo"])
def test_trains_the_adapter_and_nothing_else(make_trainer, trainer_class, capsys, tmp_path):
    options = {"log_completions": True, "num_completions_to_print": 0}
    trainer = make_trainer(trainer_class=trainer_class, max_steps=4, **options)
    assert sum(isinstance(m, NVFP4Linear) for m in trainer.model.modules()) == 14
    frozen, adapter = frozen_of(trainer), adapter_of(trainer)
    trainer.train()
    said = capsys.readouterr().out  # what was planned, in a script of three changed lines too
    assert said.count("unlike TRL") == 1 and "the base is frozen in nvfp4" in said and "planned peak" in said
    assert_identical(frozen_of(trainer), frozen)
    changed = [name for name, value in adapter_of(trainer).items() if not torch.equal(value, adapter[name])]
    assert len(changed) == len(adapter)
    sigma = logged(trainer, "aqn/sigma")
    assert sigma[:2] == [0.0, 0.0]  # stage 0
    assert sigma[2] > 0
    for aimed, landed in zip(sigma, logged(trainer, "aqn/sigma_effective"), strict=True):
        assert landed == pytest.approx(aimed, rel=0.15)  # 4 norms of 128 values: sampling error 3 %
    for key in ("entropy", "reward", "memory/peak_gib", "seconds/rollout", "seconds/reward", "seconds/update"):
        values = logged(trainer, key)
        assert len(values) == 4, key
        assert all(math.isfinite(value) and value >= 0 for value in values), key
    assert sum(kl > 0 for kl in logged(trainer, "rollout/mismatch_kl")) == 2  # the two noisy steps
    ours = {key for entry in trainer.state.log_history for key in entry if key.startswith(OURS)}
    documented = {key for key in metrics() if key.startswith(OURS)}
    # frozen: a dashboard of today reads the runs of tomorrow
    absent = {"rollout/truncated_fraction"} if trainer_class is QeRLRLOOTrainer else set()
    assert ours == documented - absent
    if trainer_class is QeRLGRPOTrainer:  # TRL's RLOO only prints them
        first, *others = sorted((tmp_path / "run" / "completions").glob("*.parquet"))
        assert len(others) == 3
        table = Dataset.from_parquet(str(first), cache_dir=str(tmp_path / "cache"))
        assert set(table.column_names) == {"step", "prompt", "completion", "spread_reward", "advantage"}


@pytest.mark.parametrize("aqn", [False, True], ids=["quiet", "noisy"])
@pytest.mark.parametrize("base_format", ["bf16", "full"])
def test_control_arms(make_trainer, base_format, aqn):
    trainer = make_trainer(base_format=base_format, aqn=aqn, max_steps=4, peft_config=None)
    assert not any(isinstance(m, NVFP4Linear) for m in trainer.model.modules())
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in trainer.model.parameters())
    assert trained == total if base_format == "full" else trained < total
    trainer.train()
    assert ("aqn/sigma" in trainer.state.log_history[-2]) is aqn
    assert (max(logged(trainer, "aqn/sigma"), default=0) > 0) is aqn


def test_nf4_arm(make_trainer):
    pytest.importorskip("bitsandbytes")
    trainer = make_trainer(base_format="nf4", model_init_kwargs={"dtype": "bfloat16"})
    assert trainer.model.is_loaded_in_4bit
    trainer.train()


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo"])
def test_losses_of_trl_work(make_trainer, loss_type):
    trainer = make_trainer(loss_type=loss_type, max_steps=1, epsilon_high=0.28)
    before = adapter_of(trainer)
    trainer.train()
    assert any(not torch.equal(value, before[name]) for name, value in adapter_of(trainer).items())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "gradient-checkpointing"])
def test_policy_scope_runs_on_policy(make_trainer, checkpointing):
    trainer = make_trainer(aqn_scope="policy", aqn_sigma_start=0.1, max_steps=4, gradient_checkpointing=checkpointing)
    trainer.train()
    assert max(logged(trainer, "aqn/sigma")) == 0.1
    assert not logged(trainer, "rollout/mismatch_kl")


def test_older_name_of_dtype_is_read(make_trainer):
    trainer = make_trainer(model_init_kwargs={"torch_dtype": "bfloat16"})
    assert {m.compute_dtype for m in trainer.model.modules() if isinstance(m, NVFP4Linear)} == {torch.bfloat16}
    trainer = make_trainer(model_init_kwargs={"torch_dtype": "bfloat16", "dtype": "float32"})
    assert {m.compute_dtype for m in trainer.model.modules() if isinstance(m, NVFP4Linear)} == {torch.float32}


def test_bf16_autocast_run(make_trainer):
    trainer = make_trainer(bf16=True, model_init_kwargs=None, max_steps=2, gradient_checkpointing=True)
    assert {m.compute_dtype for m in trainer.model.modules() if isinstance(m, NVFP4Linear)} == {torch.bfloat16}
    trainer.train()
    assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))


def test_trainable_norms(make_trainer):
    peft_config = copy.deepcopy(LORA)
    peft_config.modules_to_save = ["input_layernorm", "post_attention_layernorm"]
    trainer = make_trainer(peft_config=peft_config, max_steps=4, bf16=True, model_init_kwargs=None)
    norms = {n: p for n, p in trainer.model.named_parameters() if "modules_to_save" in n}
    before = {n: p.detach().clone() for n, p in norms.items()}
    trainer.train()
    assert all(p.dtype == torch.float32 for p in norms.values())
    assert all(not torch.equal(p, before[n]) for n, p in norms.items())
    assert max(logged(trainer, "aqn/sigma")) > 0


# --- what may be passed as a model -----------------------------------------------------------------------------------


def test_instance_and_peft_model_equal_the_name(make_trainer, tiny_model_dir):
    def fresh():
        return AutoModelForCausalLM.from_pretrained(
            tiny_model_dir("qwen2"), quantization_config=NVFP4Config(compute_dtype="float32"), dtype=torch.float32
        )

    by_name = make_trainer()
    by_name.train()
    by_instance = make_trainer(model=fresh(), model_init_kwargs=None)
    by_instance.train()
    assert_identical(adapter_of(by_instance), adapter_of(by_name))
    torch.manual_seed(0)
    wrapped = make_trainer(
        model=get_peft_model(fresh(), register_nvfp4_lora(LORA)), peft_config=None, model_init_kwargs=None
    )
    wrapped.train()
    assert adapter_of(wrapped).keys() == adapter_of(by_name).keys()


def test_saved_nvfp4_folder_trains_like_its_source(make_trainer, tiny_model_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir("qwen2"), quantization_config=NVFP4Config(compute_dtype="float32"), dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "nvfp4")
    from_bf16, from_nvfp4 = make_trainer(), make_trainer(model=str(tmp_path / "nvfp4"))
    packed = {n: p for n, p in frozen_of(from_bf16).items() if p.dtype == torch.uint8}
    assert_identical(packed, {n: p for n, p in frozen_of(from_nvfp4).items() if p.dtype == torch.uint8})


def test_wrong_combinations_are_refused_with_the_remedy(make_trainer, tiny_model_dir, tmp_path):
    dense = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"), dtype=torch.float32)
    with pytest.raises(ValueError, match="quantization_config=NVFP4Config"):
        make_trainer(model=dense)
    with pytest.raises(ValueError, match="base_format='full' trains every weight"):
        make_trainer(base_format="full")
    with pytest.raises(TypeError, match=r"replace GRPOConfig\(\.\.\.\) by QeRLConfig"):
        make_trainer(args=GRPOConfig(str(tmp_path), use_cpu=True, bf16=False))


def test_every_argument_of_trl_may_come_by_position(tiny_model_dir, tiny_tokenizer, tmp_path):
    trainer = QeRLGRPOTrainer(
        *(str(tiny_model_dir("qwen2")), spread_reward, settings(tmp_path), PROMPTS, None, tiny_tokenizer),
        *(None, None, (None, None), NVFP4Config(scale_rule="four_over_six", compute_dtype="float32"), LORA),
    )
    assert trainer.model.peft_config["default"].r == 4
    assert trainer.model.config.quantization_config.scale_rule == "four_over_six"
    with pytest.raises(TypeError, match="multiple values"):
        QeRLGRPOTrainer("model", spread_reward, settings(tmp_path), PROMPTS, train_dataset=PROMPTS)


@pytest.mark.parametrize("base_format", ["nvfp4", "bf16", "full"])
def test_dtype_auto_is_the_checkpoints(make_trainer, base_format):
    peft_config = None if base_format == "full" else LORA
    trainer = make_trainer(base_format=base_format, peft_config=peft_config, model_init_kwargs={"dtype": "auto"})
    assert trainer.model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert all(m.compute_dtype == torch.bfloat16 for m in trainer.model.modules() if isinstance(m, NVFP4Linear))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_trained_in_16_bits_are_reported(make_trainer, caplog, dtype):
    with caplog.at_level(logging.WARNING):
        make_trainer(base_format="full", peft_config=None, model_init_kwargs={"dtype": dtype})
    assert ("lost to rounding" in caplog.text) is (dtype == "bfloat16")


@pytest.mark.parametrize("base_format", ["nvfp4", "bf16"])
def test_other_adapters_are_refused_with_the_reason(make_trainer, base_format):
    with pytest.raises(ValueError, match="LoHaConfig"):
        make_trainer(base_format=base_format, peft_config=LoHaConfig(target_modules=["q_proj"]))


def test_an_adapter_that_matches_nothing_is_an_error(make_trainer):
    with pytest.raises(ValueError, match="no_such_layer"):
        make_trainer(peft_config=LoraConfig(target_modules=["no_such_layer"]))


@pytest.mark.parametrize("aqn", [True, False])
def test_a_noise_callback_beside_the_trainers_own_is_an_error(make_trainer, aqn):
    with pytest.raises(ValueError, match=rf"AQNCallback was added .*aqn={aqn}.*Leave it out"):
        make_trainer(callbacks=[AQNCallback()], aqn=aqn)
    trainer = make_trainer(aqn=aqn)
    trainer.add_callback(AQNCallback("constant", sigma_start=0.3, scope="policy"))
    with pytest.raises(ValueError, match="set the aqn_ arguments"):
        trainer.train()


def test_model_init_kwargs_are_restored(make_trainer):
    trainer = make_trainer()
    assert trainer.args.model_init_kwargs == {"dtype": "float32"}
    trainer.args.to_json_string()


@pytest.mark.parametrize(
    ("trainer_class", "name", "other"),
    [(QeRLGRPOTrainer, "grpo", "rloo"), (QeRLRLOOTrainer, "rloo", "grpo")],
    ids=["grpo", "rloo"],
)
def test_tags_and_card(make_trainer, tmp_path, trainer_class, name, other):
    trainer = make_trainer(trainer_class=trainer_class, max_steps=2)
    trainer.train()
    trainer.create_model_card(model_name="m", tags=trainer._tag_names)
    card = (tmp_path / "run" / "README.md").read_text()
    for tag in ("qerl", "nvfp4", name):
        assert f"- {tag}\n" in card
    assert f"| method | {name.upper()} with TRL" in card
    assert other not in card.lower()
    assert "rewards/spread_reward/mean" in card  # the reward that was given, by its own name
    for word in ("math word problems", "gsm8k", "correctness"):
        assert word not in card.lower()
    assert "2510.11696" in card


# --- noise and exactness ---------------------------------------------------------------------------------------------


def test_sigma_zero_equals_no_noise_bit_for_bit(make_trainer, tmp_path):
    silent = make_trainer(aqn_sigma_start=0.0, aqn_sigma_end=0.0, max_steps=4)
    silent.train()
    without = make_trainer(aqn=False, max_steps=4)
    without.train()
    assert_identical(adapter_of(silent), adapter_of(without))
    noisy = make_trainer(aqn_sigma_start=0.5, aqn_sigma_end=0.5, max_steps=4)
    noisy.train()
    assert any(not torch.equal(v, adapter_of(without)[n]) for n, v in adapter_of(noisy).items())


class SaveCheck(TrainerCallback):
    """Compares the frozen weights with the clean ones at every event at which somebody could save them."""

    def __init__(self):
        self.clean = None
        self.seen = 0

    def _look(self, model):
        norms = {name: value.clone() for name, value in model.state_dict().items() if "norm" in name}
        if self.clean is None:
            self.clean = norms
        assert_identical(norms, self.clean)
        self.seen += 1

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self._look(model)

    on_step_end = on_save = on_log = on_train_end = on_step_begin


@pytest.mark.parametrize("scope", ["rollout", "policy"])
def test_no_event_ever_sees_a_noisy_weight(make_trainer, scope):
    check = SaveCheck()
    trainer = make_trainer(
        callbacks=[check], aqn_scope=scope, aqn_sigma_start=0.5, max_steps=4, save_strategy="steps", save_steps=1
    )
    trainer.train()
    assert check.seen >= 12
    with torch.no_grad():  # and the model computes what the clean one computes
        ids = torch.arange(5, 15)[None]
        fresh = AutoModelForCausalLM.from_pretrained(
            trainer.model.config._name_or_path,
            quantization_config=NVFP4Config(compute_dtype="float32"),
            dtype=torch.float32,
        )
        with trainer.model.disable_adapter():
            assert torch.equal(trainer.model.eval()(ids).logits, fresh(ids).logits)


def test_merged_and_saved_files_do_not_know_of_the_noise(make_trainer, tmp_path):
    """With learning rate 0 nothing is learned, so whatever a noisy run writes must equal what was there before it."""
    trainer = make_trainer(
        learning_rate=0.0, aqn_scope="policy", aqn_sigma_start=0.5, max_steps=4, save_strategy="steps"
    )
    trainer.save_merged(tmp_path / "before")
    trainer.save_base(tmp_path / "base-before")
    trainer.train()
    assert max(logged(trainer, "aqn/sigma")) == 0.5
    trainer.save_merged(tmp_path / "after")
    trainer.save_base(tmp_path / "base-after")
    for left, right in (("before", "after"), ("base-before", "base-after")):
        assert_identical(*(load_file(tmp_path / folder / "model.safetensors") for folder in (left, right)))


# --- checkpoints -----------------------------------------------------------------------------------------------------


RESUME_CASES = {
    "plain": {},
    "accumulation-and-later-epoch": {"gradient_accumulation_steps": 2},  # 4 steps an epoch
    "inside-later-epoch": {"gradient_accumulation_steps": 4},  # 2 steps an epoch
    "policy-scope": {"aqn_scope": "policy"},
    "two-iterations": {"num_iterations": 2},
    "entropy-target": {"aqn_schedule": "entropy_target", "aqn_entropy_target": 5.0},
}


@pytest.mark.parametrize("case", RESUME_CASES)
def test_resume_continues_the_same_trajectory(make_trainer, tmp_path, case):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "aqn_sigma_start": 0.1, **RESUME_CASES[case]}
    whole = make_trainer(**options)
    whole.train()
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoint-6")
    assert last_checkpoint(run) == str(run / "checkpoint-4")
    resumed = make_trainer(**options)
    resumed.train(resume_from_checkpoint=True)
    assert_identical(adapter_of(resumed), adapter_of(whole))
    assert resumed.state.global_step == 6
    saved = load_file(run / "checkpoint-6" / "adapter_model.safetensors")
    assert len(saved) == len(adapter_of(whole))


def test_rotation_keeps_the_new_checkpoint_beside_a_half_written_one_of_a_later_step(make_trainer, tmp_path):
    run = tmp_path / "run"
    half = run / "checkpoint-99"
    half.mkdir(parents=True)
    (half / "trainer_state.json").write_text("{}")
    make_trainer(max_steps=4, save_strategy="steps", save_steps=2, save_total_limit=1).train()
    assert last_checkpoint(run) == str(run / "checkpoint-4")
    assert not half.exists()


def test_who_goes_back_goes_on_from_the_own_checkpoints(make_trainer, tmp_path):
    options, run = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}, tmp_path / "run"
    make_trainer(**options).train()

    shutil.rmtree(run / "checkpoint-6")
    back = make_trainer(**options)
    back.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    shutil.rmtree(run / "checkpoint-6")
    assert last_checkpoint(run) == str(run / "checkpoint-4")
    assert order_of(run / "checkpoint-4") > order_of(run / "checkpoint-2") + 1  # the one before had that number


def test_resume_of_a_peft_model_with_its_reference(make_trainer, tiny_model_dir, tmp_path):
    """With beta > 0 TRL keeps the adapter that was passed in as a second one, "ref": both come back."""

    def trained_before():
        base = AutoModelForCausalLM.from_pretrained(
            tiny_model_dir("qwen2"), quantization_config=NVFP4Config(compute_dtype="float32"), dtype=torch.float32
        )
        torch.manual_seed(0)
        model = get_peft_model(base, register_nvfp4_lora(LORA))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        return model

    options = {"peft_config": None, "model_init_kwargs": None, "beta": 0.1, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(model=trained_before(), max_steps=4, **options)
    whole.train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    resumed = make_trainer(model=trained_before(), max_steps=4, **options)
    resumed.train(resume_from_checkpoint=True)
    assert sum(".ref." in name for name in adapter_of(whole)) == len(adapter_of(whole)) / 2
    assert_identical(adapter_of(resumed), adapter_of(whole))
    assert logged(resumed, "kl") == logged(whole, "kl")


def test_a_torn_checkpoint_is_skipped_and_the_run_still_ends_identically(make_trainer, tmp_path):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(**options)
    whole.train()
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoint-6")
    (run / "checkpoint-4" / MANIFEST_NAME).unlink()  # killed before it was sealed
    resumed = make_trainer(**options)
    resumed.train(resume_from_checkpoint=True)
    assert_identical(adapter_of(resumed), adapter_of(whole))


def test_damaged_checkpoint_named_by_the_user_is_refused(make_trainer, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    make_trainer(**options).train()
    weights = tmp_path / "run" / "checkpoint-2" / "optimizer.pt"
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"optimizer\.pt has"):
        make_trainer(**options).train(resume_from_checkpoint=str(weights.parent))
    with pytest.raises(ValueError, match="no whole checkpoint"):
        make_trainer(**options).train(resume_from_checkpoint=True)


def test_a_longer_run_goes_on_and_other_settings_only_where_they_are_allowed(make_trainer, tmp_path, caplog):
    options = {"save_strategy": "steps", "save_steps": 2}
    make_trainer(**options).train()
    other = {**options, "aqn_seed": 9, "max_steps": 4}
    with pytest.raises(ValueError, match=r"aqn_seed: 3 then, 9 now.*another output_dir.*allow_other_settings"):
        make_trainer(**other).train(resume_from_checkpoint=True)
    with caplog.at_level(logging.WARNING):
        make_trainer(**other, allow_other_settings=True).train(resume_from_checkpoint=True)
    assert "aqn_seed: 3 then, 9 now" in caplog.text
    assert "max_steps: 2 then, 4 now" in caplog.text
    run = json.loads((tmp_path / "run" / "checkpoint-4" / MANIFEST_NAME).read_text())["run"]
    assert run["changed"] == ["aqn_seed: 3 then, 9 now"]
    with pytest.raises(ValueError, match=r"belongs to a run with other settings.*aqn_seed: 9 then, 3 now"):
        make_trainer(**options, allow_other_settings=True).train()  # a fresh start between another run's checkpoints


@pytest.mark.parametrize(
    "then", [{"eval_strategy": "epoch"}, {"eval_strategy": "no"}, {"eval_strategy": "steps", "eval_steps": 1}], ids=str
)
def test_evaluations_are_no_part_of_the_trajectory(make_trainer, tmp_path, then):
    """The checkpoint of an epoch's last step is written before the epoch's evaluation, whose samples are drawn from the same generator."""
    options = {"max_steps": 10, "save_strategy": "steps", "save_steps": 8, "eval_dataset": PROMPTS.select(range(4))}
    whole = make_trainer(**options, eval_strategy="epoch")
    whole.train()
    assert next(entry["step"] for entry in whole.state.log_history if "eval_loss" in entry) == 8, "8 steps an epoch"
    shutil.rmtree(tmp_path / "run" / "checkpoint-10")
    resumed = make_trainer(**options, **then)
    resumed.train(resume_from_checkpoint=True)
    assert_identical(adapter_of(resumed), adapter_of(whole))


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_every_way_to_scale_rewards_warns_of_advantages_that_are_zero(make_trainer, caplog, scale):
    """With "batch" TRL's own number, of the whole batch's spread, stays 0 where each group's rewards are equal."""

    def by_prompt(completions, prompts, **kwargs):
        return [float(sum(prompt.encode())) for prompt in prompts]

    trainer = make_trainer(reward=by_prompt, scale_rewards=scale, zero_advantage_patience=2, max_steps=2)
    trainer.train()
    assert "in the last 2 rollouts" in caplog.text


def test_saves_wait_for_the_end_of_a_rollout(make_trainer, tmp_path):
    trainer = make_trainer(num_iterations=3, max_steps=7, save_strategy="steps", save_steps=2)
    trainer.train()
    steps = sorted(int(p.name.split("-")[1]) for p in (tmp_path / "run").glob("checkpoint-*"))
    assert steps == [3, 6, 7]  # asked for at 2, 4, 6 and the end


def test_so_do_those_that_a_callback_asks_for(make_trainer, tmp_path):
    """It was added after construction, so it was asked after whoever looked at what was asked for."""

    class SaveAtOne(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save |= state.global_step == 1

    trainer = make_trainer(num_iterations=3, max_steps=4, save_strategy="no")
    trainer.add_callback(SaveAtOne())
    trainer.train()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]


@pytest.mark.parametrize("event", ["on_step_end", "on_log"])
def test_the_end_of_a_training_waits_with_the_checkpoint_that_was_asked_for(make_trainer, tmp_path, caplog, event):
    """As a job that is told to leave asks: save, then stop. The save would be lost."""

    def leave(args, state, control, **kwargs):
        if state.global_step == 1:
            control.should_save = control.should_training_stop = True

    trainer = make_trainer(num_iterations=3, max_steps=9, save_strategy="no", logging_steps=1)
    trainer.add_callback(type("Leaves", (TrainerCallback,), {event: staticmethod(leave)})())
    trainer.train()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
    assert trainer.state.global_step == 3 and "It ends with that checkpoint" in caplog.text


def test_an_end_without_a_checkpoint_waits_for_nothing(make_trainer):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    trainer = make_trainer(num_iterations=3, max_steps=9, save_strategy="no")
    trainer.add_callback(Stops())
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("save_strategy", ["steps", "best"])
def test_the_best_checkpoint_is_one_that_was_evaluated_between_rollouts(make_trainer, tmp_path, save_strategy):
    trainer = make_trainer(
        num_iterations=2,
        max_steps=4,
        save_strategy=save_strategy,
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=PROMPTS.select(range(4)),
        load_best_model_at_end=True,
        metric_for_best_model="eval_num_tokens",
        greater_is_better=False,  # so the first evaluation is the best
    )
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [2, 4]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-2")
    saved = load_file(tmp_path / "run" / "checkpoint-2" / "adapter_model.safetensors")
    loaded = {name.replace(".default", ""): value for name, value in adapter_of(trainer).items()}
    assert_identical({name: saved[name] for name in loaded}, loaded)


def test_evaluations_that_decide_nothing_stay_where_they_are(make_trainer):
    trainer = make_trainer(
        num_iterations=2, eval_strategy="steps", eval_steps=1, eval_dataset=PROMPTS.select(range(4)), max_steps=3
    )
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [1, 2, 3]


def test_an_adapter_may_have_any_name_and_targets_may_be_a_pattern(make_trainer, tiny_model_dir, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir("qwen2"), quantization_config=NVFP4Config(compute_dtype="float32"), dtype=torch.float32
    )
    pattern = r".*\.(q_proj|up_proj)"
    model = get_peft_model(base, register_nvfp4_lora(LoraConfig(r=2, target_modules=pattern)), adapter_name="policy")
    trainer = make_trainer(model=model, peft_config=None, model_init_kwargs=None, save_strategy="steps", save_steps=2)
    trainer.train()
    run = json.loads((tmp_path / "run" / "checkpoint-2" / MANIFEST_NAME).read_text())["run"]
    assert run["lora"] == {"r": 2, "alpha": 8, "targets": pattern}


def test_a_second_training_starts_over(make_trainer):
    options = {"gradient_accumulation_steps": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    make_trainer(**options).train()
    trainer = make_trainer(**options)
    trainer.train(resume_from_checkpoint=True)
    assert len(logged(trainer, "loss")) == 4  # as it ended, and no step more
    trainer.train()
    assert trainer._resumed is None
    assert len(logged(trainer, "loss")) == 4


def test_old_checkpoints_go_only_after_the_new_one_is_sealed(make_trainer, tmp_path, monkeypatch):
    from qerl_trl.checkpoint import seal as checkpoint

    run, seal, present = tmp_path / "run", checkpoint.seal, []

    def watching(folder, settings, **order):
        present.append(sorted(p.name for p in run.glob("checkpoint-*")))
        seal(folder, settings, **order)

    monkeypatch.setattr(checkpoint, "seal", watching)
    make_trainer(max_steps=3, save_strategy="steps", save_steps=1, save_total_limit=1).train()
    assert present == [["checkpoint-1"], ["checkpoint-1", "checkpoint-2"], ["checkpoint-2", "checkpoint-3"]]
    assert [p.name for p in run.glob("checkpoint-*")] == ["checkpoint-3"]
    assert torch.load(run / "checkpoint-3" / "training_args.bin", weights_only=False).save_total_limit == 1


def test_a_checkpoint_is_pushed_only_once_it_is_sealed(make_trainer, tmp_path, monkeypatch):
    pushed = []

    def push(trainer, folder):
        pushed.append((Path(folder).name, (Path(folder) / MANIFEST_NAME).is_file()))

    monkeypatch.setattr(PublishingMixin, "_push_from_checkpoint", push)
    monkeypatch.setattr(QeRLGRPOTrainer, "init_hf_repo", lambda self, token=None: None)
    trainer = make_trainer(save_strategy="steps", save_steps=1, push_to_hub=True)
    monkeypatch.setattr(trainer, "push_to_hub", lambda *args, **kwargs: None)
    trainer.train()
    assert pushed == [("checkpoint-1", True), ("checkpoint-2", True)]


def test_manifest_describes_the_run(make_trainer, tmp_path):
    make_trainer(save_strategy="steps", save_steps=2).train()
    manifest = json.loads((tmp_path / "run" / "checkpoint-2" / MANIFEST_NAME).read_text())
    assert manifest["run"]["lora"]["r"] == 4
    assert {"adapter_model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state.pth"} <= manifest[
        "files"
    ].keys()


def test_what_acts_is_recorded_not_what_the_arguments_were_set_to_afterwards(make_trainer):
    """TRL copies most arguments when it is built, and does not read them again (#46)."""
    trainer = make_trainer(epsilon=0.3, beta=0.0, learning_rate=1e-4)
    before = run_settings(trainer)
    trainer.args.epsilon, trainer.args.epsilon_high, trainer.args.temperature, trainer.args.beta = 0.1, 0.5, 0.1, 0.5
    assert run_settings(trainer) == before and before["options"]["epsilon"] == 0.3
    trainer.epsilon_low, trainer.args.learning_rate = 0.25, 1e-3  # these act
    after = run_settings(trainer)
    assert after["options"]["epsilon"] == 0.25 and after["learning_rate"] == 1e-3


# --- guards ----------------------------------------------------------------------------------------------------------


def test_infinite_reward_stops_before_any_weight_changes(make_trainer):
    def broken(completions, **kwargs):
        return [0.0] * (len(completions) - 1) + [math.inf]

    trainer = make_trainer(reward=broken)
    before = adapter_of(trainer)
    with pytest.raises(ValueError, match="'broken' returned inf for completion 7"):
        trainer.train()
    assert_identical(adapter_of(trainer), before)


def test_after_an_exception_the_model_is_clean(make_trainer):
    calls = []

    def fails_in_the_noise(completions, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("user code")
        return spread_reward(completions)

    trainer = make_trainer(reward=fails_in_the_noise, aqn_scope="policy", aqn_sigma_start=0.5, max_steps=4)
    with pytest.raises(RuntimeError, match="user code"):
        trainer.train()
    model, ids = trainer.model.train(), torch.arange(5, 15)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model.eval()(ids).logits)
        assert trainer.aqn.norms == ()


def test_none_and_nan_rewards_keep_trl_s_meaning(make_trainer):
    def sometimes(completions, **kwargs):
        return [None if i % 4 == 0 else float(i) for i in range(len(completions))]

    trainer = make_trainer(reward=[sometimes, spread_reward])
    trainer.train()
    assert all(math.isfinite(value) for value in logged(trainer, "reward"))


def test_non_finite_gradient_stops_before_any_weight_changes(make_trainer):
    trainer = make_trainer(max_steps=3)
    before = adapter_of(trainer)
    name, parameter = next((n, p) for n, p in trainer.model.named_parameters() if "lora_B" in n)
    parameter.register_hook(lambda grad: torch.full_like(grad, math.nan))
    with pytest.raises(RuntimeError, match=f"gradient of .*{name.split('.')[-3]}"):
        trainer.train()
    assert_identical(adapter_of(trainer), before)


TOLD = ("got the same reward in the last 6 rollouts", "have no end within max_completion_length=")


@pytest.mark.parametrize("trainer_class", [QeRLGRPOTrainer, QeRLRLOOTrainer], ids=["grpo", "rloo"])
def test_a_run_that_goes_wrong_says_each_thing_once(make_trainer, caplog, trainer_class):
    """The random model never ends a completion, and its rewards are equal."""

    def flat(completions, **kwargs):
        return [1.0] * len(completions)

    make_trainer(trainer_class=trainer_class, reward=flat, max_steps=8).train()
    for words in TOLD:
        (message,) = [message for message in caplog.messages if words in message]
        assert len(message) <= 200


def test_a_rollout_that_is_masked_as_a_whole_is_reported(make_trainer, caplog):
    make_trainer(max_steps=2, mask_truncated_completions=True).train()
    (message,) = [message for message in caplog.messages if "mask_truncated_completions leaves no loss" in message]
    assert "at step 0" in message and len(message) <= 200


@pytest.mark.parametrize(
    ("problems", "given", "words"),
    [
        (1, {}, "1 training problems are fewer than the 2 prompts of a rollout (generation_batch_size=8 / num_generations=4)"),
        (3, {"steps_per_generation": 2}, "3 training problems are fewer than the 4 prompts of a rollout"),
        (None, {"max_steps": 0}, "max_steps=0"),
        (None, {"max_steps": -1, "num_train_epochs": 0}, "num_train_epochs=0"),
    ],
)  # fmt: skip
def test_a_training_of_no_step_is_refused(make_trainer, tmp_path, problems, given, words):
    """After YuLan-IR#5 and trl#3477: an untrained adapter was saved as if it were trained."""
    trainer = make_trainer(**given)
    trainer.train_dataset = PROMPTS if problems is None else PROMPTS.select(range(problems))
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        trainer.train()
    assert len(str(caught.value)) <= 200 and not [*(tmp_path / "run").glob("*.safetensors")]


def test_rewards_without_spread_are_reported(make_trainer, caplog):
    def flat(completions, **kwargs):
        return [1.0] * len(completions)

    with caplog.at_level(logging.WARNING):
        make_trainer(reward=flat, max_steps=3, zero_advantage_patience=2).train()
    assert "last 2 rollouts" in caplog.text


@pytest.mark.parametrize("reward", [0.1, 0.3, -0.7])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_are_no_signal_whatever_their_mean_is_rounded_to(make_trainer, caplog, reward, scale):
    def equal(completions, **kwargs):
        return [reward] * len(completions)

    make_trainer(
        reward=equal,
        scale_rewards=scale,
        zero_advantage_patience=2,
        max_steps=2,
        num_generations=8,
        per_device_train_batch_size=8,
    ).train()
    assert "in the last 2 rollouts" in caplog.text


def test_an_evaluation_does_not_make_a_rollout_in_the_middle_of_a_step_one_at_its_beginning(make_trainer, tmp_path):
    calls = []

    def fails(completions, **kwargs):
        calls.append(trainer.model.training)
        if sum(calls) == 2 and calls[-1]:
            raise ValueError("the reward server is gone")
        return [float(len(c)) + i for i, c in enumerate(completions)]

    trainer = make_trainer(
        reward=fails, gradient_accumulation_steps=2, steps_per_generation=3, max_steps=4, save_strategy="steps", save_steps=10,
        eval_strategy="steps", eval_steps=1, eval_dataset=PROMPTS.select(range(2)), per_device_eval_batch_size=8,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="the reward server is gone") as caught:
        trainer.train()
    assert False in calls and trainer.state.global_step == 1
    assert "own state is intact" in " ".join(caught.value.__notes__)


def test_what_waited_when_a_training_ended_does_not_end_the_next_one(make_trainer):
    trainer = make_trainer(num_iterations=3, max_steps=6, save_strategy="steps", save_steps=100)
    trainer._saves._pending |= {"should_save", "should_training_stop"}  # of a training that an error ended
    trainer.train()
    assert trainer.state.global_step == 6


def test_a_stop_that_no_step_can_bring_nearer_is_given_way_to(make_trainer):
    """A stream that has run out: Trainer asks for the end once per empty epoch, for ever. A callback may ask in every event of a step."""
    trainer = make_trainer(num_iterations=3, max_steps=9, save_strategy="steps", save_steps=100)
    trainer._step, control, asked = 1, trainer.control, 0
    trainer.state.max_steps, control.should_save = 9, True
    while asked < 100:
        control.should_training_stop, asked = True, asked + 1
        trainer._saves.hold()
        if control.should_training_stop:
            break
    assert control.should_training_stop and control.should_save
    assert 10 < asked < 20


def test_a_stop_that_is_asked_for_in_every_event_waits_for_the_rollout(make_trainer, tmp_path):
    """It was taken for a stream that has run out, and left a checkpoint in the middle of a rollout."""

    def ask(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_training_stop or state.global_step >= 1

    events = [name for name in dir(TrainerCallback) if name.startswith("on_") and "train" not in name]
    trainer = make_trainer(
        num_iterations=3, max_steps=9, save_strategy="steps", save_steps=1, eval_strategy="no", logging_steps=1
    )
    trainer.add_callback(type("Asks", (TrainerCallback,), dict.fromkeys(events, ask))())
    trainer.train()
    assert trainer.state.global_step == 3
    assert order_of(Path(trainer.args.output_dir) / "checkpoint-3") > 0


def test_evaluations_outside_of_a_training_draw_anew(make_trainer):
    trainer = make_trainer(
        eval_dataset=PROMPTS.select(range(2)), per_device_eval_batch_size=8, temperature=1.0, max_completion_length=8
    )
    drawn = []
    for _ in range(2):
        trainer.evaluate()
        drawn.append(list(trainer._logs["completion"]))
    assert drawn[0] != drawn[1][-len(drawn[0]) :]


def test_a_reference_under_noise_has_no_norms_without_it(make_trainer):
    lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["input_layernorm"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="aqn_scope='policy' with beta > 0 cannot work with trained norms"):
        make_trainer(aqn_scope="policy", beta=0.1, peft_config=lora)
    make_trainer(aqn_scope="policy", beta=0.0, peft_config=lora)
