import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from qerl_trl import NVFP4Config, QeRLConfig, QeRLRLOOConfig
from qerl_trl.checkpoint import records
from qerl_trl.model.lora import register_nvfp4_lora
from qerl_trl.run import banner


def test_descriptions(tiny_model_dir, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"), quantization_config=NVFP4Config())
    policy = get_peft_model(model, register_nvfp4_lora(LoraConfig(r=4, target_modules="all-linear")))
    assert "NVFP4 in 14 linear layers, bfloat16 elsewhere" in banner.base_description(policy, "nvfp4")
    assert banner.base_description(torch.nn.Linear(2, 2), "bf16") == "bf16, frozen"
    for threads, text in ((1, "1 thread"), (2, "2 threads")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert records.device_name(torch.device("cpu")).endswith(f" CPU, {text}")
    assert 0 < banner.peak_memory_gib(torch.device("cpu")) < 100
    assert {"python", "torch", "trl", "transformers", "peft", "qerl-trl"} <= records.versions().keys()


@pytest.mark.parametrize("config", [QeRLConfig, QeRLRLOOConfig])
def test_differences_from_trl_are_listed_unless_the_user_chose_them(config, tmp_path):
    common = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    found = banner.unlike_trl(config(**common))
    assert found[0].startswith("the base is frozen in nvfp4") and "aqn=False" in found[1]
    assert (
        found[2:]
        == [
            "learning_rate 1e-05 (TRL: 1e-06)",
            "vllm_importance_sampling_mode token_truncate (TRL: sequence_mask)",
        ][: 2 if config is QeRLConfig else 1]
    )
    private = "what is pushed is private (undo: hub_private_repo=False)"
    assert private in banner.unlike_trl(config(**common, push_to_hub=True))
    assert banner.unlike_trl(config(**common, base_format="full", aqn=False, learning_rate=1e-6)) == []
