"""What a rollout needs to know of the model's adapter."""

import re
from types import SimpleNamespace

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from qerl_trl.rollout.spec import adapter_buffers, check_servable, check_vocabulary, rollout_layers
from qerl_trl.rollout.supported import check_sharding
from tests.tiny_models import make_tiny_model


def adapted(*names, target=("q_proj",)) -> nn.Module:
    """A tiny PEFT model with one adapter per name; the first is active."""
    configs = [LoraConfig(r=4 * (i + 1), target_modules=list(target)) for i in range(len(names))]
    model = get_peft_model(make_tiny_model("qwen2"), configs[0], adapter_name=names[0])
    for name, config in zip(names[1:], configs[1:], strict=True):
        model.add_adapter(name, config)
    return model


def test_the_active_adapter_is_rolled_out_whatever_its_name():
    model = adapted("student", "ref")
    check_servable(model)
    assert adapter_buffers(model) == {"rank": 4, "targets": ["q_proj"]}
    assert all("student" in layer.lora_A for layer in rollout_layers(model).values())
    model.set_adapter("ref")
    with pytest.raises(ValueError, match="several adapters"):
        check_servable(model)


def test_two_active_adapters_are_refused():
    model = adapted("student", "ref")
    model.base_model.set_adapter(["student", "ref"])
    with pytest.raises(ValueError, match="student, ref active at once"):
        check_servable(model)


@pytest.mark.parametrize(
    ("zero_stage", "fsdp_version", "named"), [(3, None, "ZeRO-3"), (0, 1, "fsdp_version: 2")], ids=["zero3", "fsdp1"]
)
def test_sharding_that_hides_the_adapter_is_refused(zero_stage, fsdp_version, named):
    args = SimpleNamespace(use_vllm=True, base_format="bf16")
    with pytest.raises(ValueError, match=named):
        check_sharding(args, zero_stage, fsdp_version)
    check_sharding(args, 2, None)
    check_sharding(args, 0, 2)


@pytest.mark.parametrize("rows", [304, 321, 358])
def test_resized_embeddings_that_no_engine_would_have_are_refused(rows, tiny_model_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"))
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    check_vocabulary(adapted)
    model.resize_token_embeddings(rows)
    with pytest.raises(ValueError, match=f"{rows} embeddings, and its checkpoint, which vLLM loads, has 320") as said:
        check_vocabulary(adapted)
    assert len(str(said.value)) <= 200


@pytest.mark.parametrize("name", ["", "/gone/folder", "someone/model", "of a shape/that/no id has"])
def test_a_checkpoint_that_is_not_at_hand_refuses_nothing(name):
    model = make_tiny_model("qwen2")
    model.config.name_or_path = name
    check_vocabulary(model)


def test_an_adapter_on_a_tower_is_refused_before_an_engine_is_built():
    """The probe's text runs no tower, and without pictures the engine has none: the start ended with a KeyError, or "no buffers in vLLM"."""
    from peft import LoraConfig, get_peft_model

    from qerl_trl.rollout.spec import check_servable
    from tests.architectures import dense_model

    def adapted(**options):
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
        return get_peft_model(dense_model("gemma3"), config)

    with pytest.raises(ValueError, match=r"layers of a tower for pictures .*exclude_modules=") as told:
        check_servable(adapted())
    named = re.search(r"exclude_modules='(.*?)'\)", str(told.value)).group(1).replace("\\\\", "\\")
    check_servable(adapted(exclude_modules=named))
