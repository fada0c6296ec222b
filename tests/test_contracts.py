"""Every symbol of TRL, PEFT and transformers that this package builds on, checked by name and shape.

A failure here means that upstream moved something; the message says what we used it for. Nothing else in the test set should be
the first to notice.
"""

import inspect

import peft
import pytest
import transformers
import trl
from peft.tuners.lora import layer as lora_layer
from transformers import Trainer
from transformers.quantizers.base import HfQuantizer
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer, rloo_trainer

from qerl_trl import QeRLGRPOTrainer, QeRLRLOOTrainer


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("module", [grpo_trainer, rloo_trainer], ids=["grpo", "rloo"])
def test_vllm_generation_is_a_module_global_called_in_init(module):
    assert module.VLLMGeneration is vllm_generation.VLLMGeneration, "QeRLMixin rebinds this name during __init__"
    cls = module.GRPOTrainer if module is grpo_trainer else module.RLOOTrainer
    assert "VLLMGeneration(" in inspect.getsource(cls.__init__), "the trainer must build it through the module global"


@pytest.mark.parametrize("cls", [trl.GRPOTrainer, trl.RLOOTrainer])
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("_generate", ["self", "prompts"]),
        ("_generate_and_score_completions", ["self", "inputs"]),
        ("_calculate_rewards", ["self", "inputs", "prompts", "completions", "completion_ids_list"]),
        ("training_step", ["self", "model", "inputs", "num_items_in_batch"]),
        ("_prepare_for_training", ["self", "max_steps", "train_dataloader", "resume_from_checkpoint"]),
        ("_get_train_sampler", ["self", "dataset"]),
        ("log", ["self", "logs", "start_time"]),
        ("_load_from_checkpoint", ["self", "resume_from_checkpoint", "model"]),
        ("_save_checkpoint", ["self", "model", "trial"]),
    ],
)
def test_overridden_methods(cls, method, expected):
    assert parameters(getattr(cls, method))[: len(expected)] == expected, f"QeRLMixin overrides {cls.__name__}.{method}"


@pytest.mark.parametrize("cls", [QeRLGRPOTrainer, QeRLRLOOTrainer])
def test_overrides_take_what_their_parents_take(cls):
    """By name, or whatever it is: an argument that only a newer release has must not be swallowed, nor be a surprise."""
    unknown, compared = {}, 0
    for own in (part for part in cls.__mro__ if part.__module__.startswith("qerl_trl.")):
        for name, method in vars(own).items():
            behind = cls.__mro__[cls.__mro__.index(own) + 1 :]
            parent = next((vars(part)[name] for part in behind if name in vars(part)), None)
            if name.startswith("__") or not (inspect.isfunction(method) and inspect.isfunction(parent)):
                continue
            ours, theirs = (inspect.signature(function).parameters for function in (method, parent))
            if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in ours.values()):
                continue  # and hands them on
            named = {key for key, parameter in theirs.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD}
            compared += 1
            if missing := named - ours.keys():
                unknown[f"{own.__name__}.{name}"] = missing
    assert compared >= 8 and not unknown


@pytest.mark.parametrize("cls", [trl.GRPOTrainer, trl.RLOOTrainer])
def test_init_arguments(cls):
    names = parameters(cls.__init__)
    assert names[1:4] == ["model", "reward_funcs", "args"], "QeRLMixin.__init__ takes these three by position"
    assert {"quantization_config", "peft_config"} <= set(names)


@pytest.mark.parametrize("cls", [trl.GRPOTrainer, trl.RLOOTrainer])
def test_what_the_mixin_reads(cls):
    source = inspect.getsource(cls)
    for attribute in ("self._metrics", "self._step", "self.reward_funcs", "self.reward_func_names", "self.use_vllm"):
        assert attribute in source, f"QeRLMixin reads {attribute}"
    for key in ('"frac_reward_zero_std"', '"reward"', '"prompt_ids"', '"completion_mask"'):
        assert key in source, f"QeRLMixin reads {key}"


@pytest.mark.parametrize("cls", [trl.GRPOTrainer, trl.RLOOTrainer])
def test_the_weights_are_put_where_the_rollout_says_so(cls):
    assert "self.state.global_step != self._last_loaded_step" in inspect.getsource(cls._generate_single_turn)


def test_log_probabilities_behind_the_mismatch():
    source = inspect.getsource(trl.GRPOTrainer)
    for key in ('"sampling_per_token_logps"', '"old_per_token_logps"', '"importance_sampling_ratio"'):
        assert key in source, f"mismatch.measure reads {key}"
    for cls in (trl.GRPOTrainer, trl.RLOOTrainer):
        names = parameters(cls._get_per_token_logps_and_entropies)
        assert names[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]


def test_completions_are_drawn_every_steps_per_generation_times_num_iterations():
    source = inspect.getsource(trl.GRPOTrainer._prepare_inputs)
    assert "self.args.steps_per_generation * self.num_iterations" in source, "SaveBetweenRollouts repeats this product"


def test_trainer_hooks():
    assert "resume_from_checkpoint" in parameters(Trainer.train)
    assert parameters(Trainer._get_output_dir) == ["self", "trial"]
    source = inspect.getsource(Trainer._save_checkpoint)
    assert "self.args.save_total_limit" in source, "QeRLMixin postpones rotation by clearing this argument"
    source = inspect.getsource(Trainer._finalize_training)
    assert "on_train_end" in source, "PublishingMixin hides push_to_hub from the callbacks there"
    assert "_finish_current_push" in source, "it waits for the pushes"


def test_peft_custom_modules():
    assert parameters(peft.LoraConfig._register_custom_module) == ["self", "mapping"]
    assert {"safe_merge", "adapter_names"} <= set(parameters(lora_layer.Linear.merge))
    assert "_custom_modules" not in peft.LoraConfig.__dataclass_fields__, (
        "the mapping must not land in adapter_config.json"
    )


def test_transformers_quantizer_hooks():
    for name in (
        "validate_environment",
        "update_dtype",
        "param_element_size",
        "param_needs_quantization",
        "_process_model_before_weight_loading",
        "_process_model_after_weight_loading",
        "get_quantize_ops",
        "get_state_dict_and_metadata",
        "get_weight_conversions",
        "is_serializable",
        "is_trainable",
    ):
        assert hasattr(HfQuantizer, name), f"NVFP4's quantizer overrides HfQuantizer.{name}"
    assert hasattr(transformers.quantizers, "register_quantization_config")
    assert hasattr(transformers.quantizers, "register_quantizer")
