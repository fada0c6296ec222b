import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from qerl_trl import NVFP4Config, report
from qerl_trl.lora import register_nvfp4_lora


@pytest.fixture
def policy(tiny_model_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"), quantization_config=NVFP4Config())
    return get_peft_model(model, register_nvfp4_lora(LoraConfig(r=4, target_modules="all-linear")))


def test_bytes_add_up_and_shared_storage_counts_once(policy):
    sizes = report.model_bytes(policy)
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    frozen = sum(p.numel() * p.element_size() for p in policy.parameters() if not p.requires_grad)
    assert sizes["trained_parameters"] == trained
    assert sizes["trained"] == 4 * trained
    assert sizes["optimizer"] == 8 * trained
    assert sizes["base"] == frozen  # q/k/v and gate/up are row slices of one storage


@pytest.mark.parametrize(("optimizer", "factor"), [("adamw_torch_fused", 8.0), ("adamw_8bit", 2.1), ("sgd", 0.0)])
def test_optimizer_state_follows_the_optimizer(policy, optimizer, factor):
    sizes = report.model_bytes(policy, optimizer)
    assert sizes["optimizer"] == round(factor * sizes["trained_parameters"])


def test_versions_name_what_decides_a_result():
    versions = report.versions()
    assert {"python", "torch", "trl", "transformers", "peft", "qerl-trl"} <= versions.keys()


def test_descriptions(policy):
    assert "NVFP4 in 14 linear layers, bfloat16 elsewhere" in report.base_description(policy, "nvfp4")
    assert report.base_description(torch.nn.Linear(2, 2), "bf16") == "bf16, frozen"
    assert "CPU" in report.device_name(torch.device("cpu"))
    assert 0 < report.peak_memory_gib(torch.device("cpu")) < 100
