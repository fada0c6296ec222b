"""Options and adapters that stock TRL accepts: trained without a warning, or warned of as documented."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from qerl_trl import QeRLGRPOTrainer
from qerl_trl.checkpoint import seal
from qerl_trl.publish.load import load_policy
from qerl_trl.tasks import script
from tests.faults.tiny_runs import PROMPTS, spread_reward
from tests.trainers import settings

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
#: options of one trainer each
GROUPS = {
    "optimizer": {
        "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}, "optim": "adamw_torch",
        "neftune_noise_alpha": 1.0, "torch_empty_cache_steps": 1, "data_seed": 5, "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4, "pad_to_multiple_of": 8, "top_entropy_quantile": 0.5, "entropy_coef": 0.01,
        "use_adaptive_entropy": True, "entropy_target": 0.1, "scale_rewards": "batch", "loss_type": "dr_grpo",
        "fp16_full_eval": True, "vllm_importance_sampling_correction": False,
    },
    "precision": {
        "bf16": True, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "model_init_kwargs": {"dtype": "auto", "attn_implementation": "eager", "use_cache": False}, "use_cache": False,
        "trust_remote_code": True, "cast_lm_head_to_fp32": True, "bf16_full_eval": True, **EVALUATED,
    },
    "saving": {
        **EVALUATED, "eval_on_start": True, "prediction_loss_only": True,
        "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_reward", "greater_is_better": True, "enable_jit_checkpoint": True,
    },
    "logging": {
        "run_name": "a run", "project": "a project", "log_completions": True, "trackio_space_id": "a/space",
        "num_completions_to_print": 0, "skip_memory_metrics": False, "save_only_model": True,
        "save_strategy": "epoch", "loss_type": "cispo", "epsilon_high": 5.0, "vllm_mode": "server",
        "vllm_enable_sleep_mode": True, "vllm_max_model_length": 64, "vllm_structured_outputs_regex": "a+",
        "vllm_server_base_url": "http://localhost:1",
        "vllm_server_timeout": 1.0, "vllm_gpu_memory_utilization": 0.2,
    },
    "data": {
        "max_steps": -1, "num_train_epochs": 0.25, "shuffle_dataset": False, "train_sampling_strategy": "sequential",
        "accelerator_config": {"split_batches": False}, "label_names": ["labels"], "ignore_data_skip": True,
        "ddp_find_unused_parameters": False, "ddp_timeout": 600, "generation_batch_size": 16, "loss_type": "sapo",
        "hub_strategy": "end", "hub_private_repo": False,
        "transformers_continuous_batching_config": {"max_batch_tokens": 64},
    },
    "sampling": {
        "temperature": 0.9, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1,
        "cache_implementation": "dynamic", "chat_template_kwargs": {"enable_thinking": False}, "loss_type": "bnpo",
        "max_tool_calling_iterations": 2, "num_generations": 2,
        "generation_kwargs": {
            "eos_token_id": [1, 5], "max_new_tokens": 5, "typical_p": 0.9, "no_repeat_ngram_size": 3,
            "stop_token_ids": None,
        },
    },
    "loss": {
        "beta": 0.1, "num_iterations": 2, "epsilon": 0.1, "epsilon_high": 0.3, "delta": 2.0, "loss_type": "grpo",
        "steps_per_generation": 2, "importance_sampling_level": "sequence", "reward_weights": [0.5, -1.0],
        "multi_objective_aggregation": "normalize_then_sum", "scale_rewards": False,
        "mask_truncated_completions": True, "generation_kwargs": {"eos_token_id": list(range(40))},
        "use_bias_correction_kl": False, "off_policy_mask_threshold": 0.5,
        "vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 2.0,
        "vllm_importance_sampling_clip_min": 0.5,
    },
}  # fmt: skip
#: options with a warning, and its words
WARNED = [
    ({"use_transformers_continuous_batching": True}, "casts the model to bf16"),
    ({"log_completions": True, "log_completions_hub_repo": "a/b"}, "uploads completions"),
    ({"generation_kwargs": {"temperature": 0.5}}, "overrides temperature=1.0"),
    ({"generation_kwargs": {"num_beams": 2}}, "from another policy"),
]


@pytest.fixture
def make(tiny_model_dir, tiny_tokenizer, tmp_path):
    def build(lora=None, model=None, data=PROMPTS, rewards=spread_reward, **options):
        arm = {"base_format": "bf16", "aqn": False, "max_steps": 1, **options}
        adapter = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | (lora or {})
        return QeRLGRPOTrainer(
            str(model or tiny_model_dir("qwen2")), rewards, settings(tmp_path, **arm), data, PROMPTS.select(range(2)),
            tiny_tokenizer, peft_config=LoraConfig(**adapter),
        )  # fmt: skip

    return build


def trained_of(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model.eval()(torch.arange(5, 25)[None]).logits


@pytest.mark.parametrize("group", GROUPS)
def test_legal_options_train_without_a_warning(make, tiny_model_dir, caplog, group):
    options = GROUPS[group]
    rewards = [spread_reward, spread_reward] if "reward_weights" in options else spread_reward
    with caplog.at_level(logging.WARNING):
        trainer = make(model=tiny_model_dir("llama"), rewards=rewards, **options)
        trainer.train()
        trainer.save_model()
    assert trainer.state.global_step == (2 if options.get("max_steps") == -1 else 1)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("qerl_trl")]
    assert not said


@pytest.mark.parametrize(("options", "words"), WARNED, ids=[repr(row[0]) for row in WARNED])
def test_a_lossy_option_is_warned_of_once(tmp_path, caplog, options, words):
    settings(tmp_path, **options)
    assert caplog.text.count(words) == 1
    page = (Path(__file__).parents[2] / "docs/source/index.md").read_text()
    assert any(f"`{option}`" in page for option in options)


@pytest.mark.parametrize(
    ("base_format", "lora"),
    [
        ("nvfp4", {"bias": "lora_only"}),
        ("bf16", {"init_lora_weights": "pissa"}),
        ("bf16", {"use_rslora": True, "use_dora": True, "lora_dropout": 0.1, "rank_pattern": {"q_proj": 2}}),
    ],
    ids=["bias", "pissa", "dora"],
)
def test_adapters_of_peft_are_trained_saved_and_merged(make, tmp_path, base_format, lora):
    trainer = make(lora, base_format=base_format, learning_rate=5e-2, max_steps=2)
    before, first = trained_of(trainer), logits_of(trainer.model)
    assert any(name.endswith("bias") for name in before) is ("bias" in lora)
    trainer.train()
    assert not [name for name, value in trained_of(trainer).items() if torch.equal(value, before[name])]
    trainer.save_model()
    trainer.save_merged(tmp_path / "merged")
    wanted = logits_of(trainer.model)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    effect = (wanted - first).abs().max().item()
    for model in (load_policy(tmp_path / "run").model, merged):  # `merged` is rounded to bf16
        assert (logits_of(model) - wanted).abs().max().item() < 0.1 * effect


class AsksInTheMiddle(TrainerCallback):
    """Like transformers three seconds after SIGTERM."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.manager.is_checkpoint_requested = True


def test_a_checkpoint_on_sigterm_can_be_resumed(make, tmp_path):
    """Transformers' own is in the middle of a rollout, and no checkpoint has its completions."""
    options = {"steps_per_generation": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 500}
    whole = make(**options, output_dir=str(tmp_path / "whole"))
    whole.train()
    trainer = make(**options, enable_jit_checkpoint=True)
    jit = next(each for each in trainer.callback_handler.callbacks if isinstance(each, JITCheckpointCallback))
    ask = AsksInTheMiddle()
    ask.manager, jit.jit_manager.kill_wait = jit.jit_manager, 0
    trainer.callback_handler.callbacks.insert(0, ask)
    trainer.train()
    assert trainer.state.global_step == 2
    assert [path.name for path in sorted((tmp_path / "run").glob("checkpoint-*"))] == ["checkpoint-2"]
    resumed = make(**options)
    resumed.train(resume_from_checkpoint=True)
    wanted = trained_of(whole)
    assert all(torch.equal(value, wanted[name]) for name, value in trained_of(resumed).items())


def test_a_run_is_resumed_with_other_micro_batches(make, caplog):
    options = {"save_strategy": "steps", "save_steps": 1}
    whole = make(**options, max_steps=2)
    whole.train()
    shutil.rmtree(Path(whole.args.output_dir, "checkpoint-2"))
    smaller = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 2}
    again = make(**options, **smaller, max_steps=2)
    again.train(resume_from_checkpoint=True)
    assert "per_device_train_batch_size: 8 then, 4 now" in caplog.text
    rewards = [[entry["reward"] for entry in each.state.log_history if "reward" in entry] for each in (whole, again)]
    assert rewards[0] == pytest.approx(rewards[1])
    other = make(data=PROMPTS.add_column("number", range(len(PROMPTS))), **options, **smaller, max_steps=3)
    with pytest.raises(ValueError, match="dataset_sha256: the training data changed"):
        other.train(resume_from_checkpoint=True)


def test_overwrite_replaces_another_run_and_resumes_its_own(make, monkeypatch, tmp_path):
    run, resumed = tmp_path / "run", []

    def train(trainer, *args):
        resumed.append(trainer.to_resume())
        trainer.train(resume_from_checkpoint=resumed[-1])
        trainer.save_model()

    monkeypatch.setattr(script, "train_and_measure", train)
    parsed = script.Script.parse(argv=["--config", "embedded", "--overwrite", "--output_dir", str(run)])
    for rate in (1e-3, 1e-3, 2e-3):
        parsed.train(make(save_strategy="steps", save_steps=1, learning_rate=rate))
        for name in ("results.json", "mine.txt"):
            assert (run / name).is_file() is (bool(resumed[1:]) and (name == "mine.txt" or rate == 1e-3))
            (run / name).write_text("{}")
    assert resumed == [None, str(run / "checkpoint-1"), None]
    assert seal.recorded_run(run)["learning_rate"] == 2e-3
