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


def test_versions_name_what_decides_a_result():
    versions = report.versions()
    assert {"python", "torch", "trl", "transformers", "peft", "qerl-trl"} <= versions.keys()


def test_descriptions(policy):
    assert "NVFP4 in 14 linear layers, bfloat16 elsewhere" in report.base_description(policy, "nvfp4")
    assert report.base_description(torch.nn.Linear(2, 2), "bf16") == "bf16, frozen"
    assert "CPU" in report.device_name(torch.device("cpu"))
    assert 0 < report.peak_memory_gib(torch.device("cpu")) < 100
