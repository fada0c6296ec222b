"""Models with a tower: an adapter is of the class that TRL trains, and whoever rebuilds the policy loads that one."""

import json

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig

from qerl_trl import NVFP4Config, from_pretrained
from qerl_trl.checkpoint import fingerprint, seal
from qerl_trl.model.lora import register_nvfp4_lora
from qerl_trl.nvfp4.linear import NVFP4Linear
from qerl_trl.publish import card, export
from qerl_trl.publish.load import TrainedPolicy, load_any, load_policy
from qerl_trl.publish.quantize import REPORT_NAME, quantize_folder
from tests import architectures
from tests.e2e.test_recipes import write_tiny_model
from tests.tiny_models import make_tiny_tokenizer


def tensors_of(folder):
    """Name -> dtype and bytes of each tensor in a folder."""
    found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name: (str(t.dtype), t.reshape(-1).view(torch.uint8).tolist()) for name, t in found.items()}


def base_of(name, folder):
    """A checkpoint, and the class by which TRL loads it."""
    if name in architectures.VISION:
        model = architectures.dense_model(name)
        model.save_pretrained(folder)
        make_tiny_tokenizer().save_pretrained(folder)
        return folder, type(model)
    write_tiny_model(name, folder)
    return folder, getattr(transformers, AutoConfig.from_pretrained(folder).architectures[0])


@pytest.mark.parametrize("name", ["qwen3.5-9b", "gemma3-12b", "qwen2_5_vl"])
def test_a_policy_with_a_tower_is_rebuilt_merged_and_quantized(name, tmp_path):
    folder, kind = base_of(name, tmp_path / "base")
    model = from_pretrained(folder, NVFP4Config(compute_dtype="bfloat16"), dtype=torch.bfloat16)
    assert type(model) is kind
    targets = {"target_modules": ["q_proj", "down_proj"], "exclude_modules": r".*(visual|vision).*"}
    policy = get_peft_model(model, register_nvfp4_lora(LoraConfig(r=4, task_type="CAUSAL_LM", **targets))).eval()
    with torch.no_grad():
        for parameter_name, parameter in policy.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(std=0.1)
    expected = architectures.logits(policy)
    settings = {"base_format": "nvfp4", "scale_rule": "rtn", "dtype": "bfloat16", "model": str(folder)}
    exported = TrainedPolicy(policy, make_tiny_tokenizer(), settings)
    facts = card.facts_of(exported)
    export.save_adapter(exported, tmp_path / "adapter", card=lambda folder, record: card.write(folder, facts, record))
    rebuilt = load_policy(tmp_path / "adapter")
    assert type(rebuilt.transformers_model) is kind
    assert torch.equal(architectures.logits(rebuilt.model), expected)
    auto = "AutoModelForImageTextToText"
    assert f"base = {auto}.from_pretrained" in (tmp_path / "adapter/README.md").read_text()
    assert f"base = {auto}.from_pretrained" in card.render(card.facts_of_run(tmp_path / "adapter", rebuilt.settings))

    export.save_merged(rebuilt, tmp_path / "merged")
    merged = load_any(str(tmp_path / "merged")).model
    assert type(merged) is kind and architectures.difference(architectures.logits(merged), expected) < 0.1

    quantize_folder(folder, tmp_path / "packed", card=lambda f, e: card.write(f, card.facts_of_quantization(f, e), e))
    assert f"model = {auto}.from_pretrained" in (tmp_path / "packed/README.md").read_text()
    packed = from_pretrained(tmp_path / "packed")
    report = json.loads((tmp_path / "packed" / REPORT_NAME).read_text())
    modules = set(dict(packed.named_modules()))  # as --skip takes them
    assert report["layers"] and {*(each["name"] for each in report["layers"]), *report["not_quantized"]} <= modules
    assert type(packed) is kind and any(isinstance(module, NVFP4Linear) for module in packed.modules())
    # equal to the model quantized while loading, and to the run's own base
    model = from_pretrained(folder, NVFP4Config())
    assert torch.equal(architectures.logits(packed), architectures.logits(model))
    recorded = seal.recorded_settings(tmp_path / "packed")["base_sha256"]
    assert fingerprint.base_sha256(packed) == fingerprint.base_sha256(model) == recorded
    export.save_base(rebuilt, tmp_path / "of the run")
    assert tensors_of(tmp_path / "packed") == tensors_of(tmp_path / "of the run")
