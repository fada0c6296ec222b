import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from qerl_trl import NVFP4Config, QeRLConfig, QeRLRLOOConfig
from qerl_trl.checkpoint import records
from qerl_trl.model.lora import register_nvfp4_lora
from qerl_trl.run import banner


@pytest.fixture
def policy(tiny_model_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"), quantization_config=NVFP4Config())
    return get_peft_model(model, register_nvfp4_lora(LoraConfig(r=4, target_modules="all-linear")))


def test_versions_name_what_decides_a_result():
    versions = records.versions()
    assert {"python", "torch", "trl", "transformers", "peft", "qerl-trl"} <= versions.keys()


def test_descriptions(policy, monkeypatch):
    assert "NVFP4 in 14 linear layers, bfloat16 elsewhere" in banner.base_description(policy, "nvfp4")
    assert banner.base_description(torch.nn.Linear(2, 2), "bf16") == "bf16, frozen"
    assert "CPU" in records.device_name(torch.device("cpu"))
    for threads, said in ((1, "1 thread"), (2, "2 threads")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert records.device_name(torch.device("cpu")).endswith(f" CPU, {said}")
    assert 0 < banner.peak_memory_gib(torch.device("cpu")) < 100


def test_what_differs_from_trl_is_said_and_what_the_user_chose_is_not():
    common = {"output_dir": "out", "use_cpu": True, "bf16": False}
    said = banner.unlike_trl(QeRLConfig(**common))
    assert len(said) == 4
    assert said[0].startswith("the base is frozen in nvfp4") and "aqn=False" in said[1]
    assert said[2:] == [
        "learning_rate 1e-05 (TRL: 1e-06)",
        "vllm_importance_sampling_mode token_truncate (TRL: sequence_mask)",
    ]
    assert "what is pushed is private (undo: hub_private_repo=False)" in banner.unlike_trl(
        QeRLConfig(**common, push_to_hub=True)
    )
    assert "learning_rate 1e-05 (TRL: 1e-06)" in banner.unlike_trl(QeRLRLOOConfig(**common))
    stock = QeRLConfig(**common, base_format="full", aqn=False, learning_rate=1e-6)
    assert banner.unlike_trl(stock) == []
