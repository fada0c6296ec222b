"""Every symbol of TRL, PEFT and transformers that this package builds on, by name and signature.

A failure means that upstream moved something; the message has its use here.
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
from trl.kernels import chunked_logprob
from trl.trainer import grpo_trainer, rloo_trainer

from qerl_trl import QeRLGRPOTrainer, QeRLRLOOTrainer

PARENTS = (trl.GRPOTrainer, trl.RLOOTrainer)


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("module", [grpo_trainer, rloo_trainer], ids=["grpo", "rloo"])
def test_vllm_generation_is_a_module_global_called_in_init(module):
    assert module.VLLMGeneration is vllm_generation.VLLMGeneration, "QeRLMixin rebinds this name during __init__"
    cls = module.GRPOTrainer if module is grpo_trainer else module.RLOOTrainer
    assert "VLLMGeneration(" in inspect.getsource(cls.__init__), "the trainer must build it through the module global"


@pytest.mark.parametrize("cls", PARENTS)
def test_overridden_methods(cls):
    for method, expected in {
        "_generate": "prompts",
        "_generate_and_score_completions": "inputs",
        "_calculate_rewards": "inputs prompts completions completion_ids_list",
        "training_step": "model inputs num_items_in_batch",
        "_prepare_for_training": "max_steps train_dataloader resume_from_checkpoint",
        "_get_train_sampler": "dataset",
        "log": "logs start_time",
        "_load_from_checkpoint": "resume_from_checkpoint model",
        "_save_checkpoint": "model trial",
        "_get_per_token_logps_and_entropies": "model input_ids attention_mask logits_to_keep",  # called
    }.items():
        names = ["self", *expected.split()]
        assert parameters(getattr(cls, method))[: len(names)] == names, f"QeRLMixin uses {cls.__name__}.{method}"
    names = parameters(cls.__init__)
    assert names[1:4] == ["model", "reward_funcs", "args"], "QeRLMixin.__init__ takes these three by position"
    assert {"quantization_config", "peft_config"} <= set(names)
    assert "resume_from_checkpoint" in parameters(cls.train) and parameters(cls._get_output_dir) == ["self", "trial"]


@pytest.mark.parametrize("cls", [QeRLGRPOTrainer, QeRLRLOOTrainer])
def test_overrides_take_the_arguments_of_their_parents(cls):
    """By name, or all: an argument of a newer release must be neither swallowed nor a surprise."""
    unknown, compared = {}, 0
    for own in (part for part in cls.__mro__ if part.__module__.startswith("qerl_trl.")):
        for name, method in vars(own).items():
            behind = cls.__mro__[cls.__mro__.index(own) + 1 :]
            parent = next((vars(part)[name] for part in behind if name in vars(part)), None)
            if name.startswith("__") or not (inspect.isfunction(method) and inspect.isfunction(parent)):
                continue
            ours, theirs = (inspect.signature(function).parameters for function in (method, parent))
            if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in ours.values()):
                continue  # and passes them on
            named = {key for key, parameter in theirs.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD}
            compared += 1
            if missing := named - ours.keys():
                unknown[f"{own.__name__}.{name}"] = missing
    assert compared >= 8 and not unknown


READ = "self._metrics self._step self.reward_funcs self.reward_func_names self.use_vllm"
READ += ' "frac_reward_zero_std" "reward" "prompt_ids" "completion_mask"'
LOGPS = '"sampling_per_token_logps" "old_per_token_logps" "importance_sampling_ratio"'


@pytest.mark.parametrize(
    ("where", "texts", "use"),
    [
        (trl.GRPOTrainer, READ.split(), "QeRLMixin reads it"),
        (trl.RLOOTrainer, READ.split(), "QeRLMixin reads it"),
        (trl.GRPOTrainer, LOGPS.split(), "mismatch.measure reads it"),
        *(
            (cls._generate_single_turn, ["self.state.global_step != self._last_loaded_step"], "syncs")
            for cls in PARENTS
        ),
        (chunked_logprob.ChunkedLogProbFunction, ["hidden, weight, bias, targets,", "kernel_args"], "candidate_logps"),
        (
            trl.GRPOTrainer._prepare_inputs,
            ["self.args.steps_per_generation * self.num_iterations"],
            "SaveBetweenRollouts repeats this product",
        ),
        (Trainer._save_checkpoint, ["self.args.save_total_limit"], "QeRLMixin postpones rotation by clearing it"),
        (Trainer._finalize_training, ["on_train_end"], "PublishingMixin hides push_to_hub from callbacks there"),
        (Trainer._finalize_training, ["_finish_current_push"], "it waits for the pushes"),
    ],
)
def test_upstream_source_has_the_names_used_here(where, texts, use):
    source = inspect.getsource(where)
    for text in texts:
        assert text in source, f"{text}: {use}"


def test_peft_custom_modules():
    assert parameters(peft.LoraConfig._register_custom_module) == ["self", "mapping"]
    assert {"safe_merge", "adapter_names"} <= set(parameters(lora_layer.Linear.merge))
    fields = peft.LoraConfig.__dataclass_fields__
    assert "_custom_modules" not in fields, "the mapping must not be in adapter_config.json"


def test_transformers_quantizer_hooks():
    hooks = "validate_environment update_dtype param_element_size param_needs_quantization get_quantize_ops"
    hooks += " _process_model_before_weight_loading _process_model_after_weight_loading get_state_dict_and_metadata"
    hooks += " get_weight_conversions is_serializable is_trainable"
    missing = [name for name in hooks.split() if not hasattr(HfQuantizer, name)]
    assert not missing, "NVFP4's quantizer overrides them"
    assert hasattr(transformers.quantizers, "register_quantization_config")
    assert hasattr(transformers.quantizers, "register_quantizer")
