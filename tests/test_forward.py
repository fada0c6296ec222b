"""What a model computes on a fixed prompt stays the same, wherever and however it is computed, and tells another model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import qerl_trl
from qerl_trl import NVFP4Config, checkpoint, forward
from qerl_trl.publish import export
from qerl_trl.publish.run import TrainedPolicy, load_any
from tests.faults.catalog import told
from tests.publish.test_export import make_policy


@pytest.fixture(scope="module")
def exported(tiny_model_dir, tiny_tokenizer, tmp_path_factory):
    """A merged model, and its NVFP4 base."""
    root = tmp_path_factory.mktemp("exported")
    policy = make_policy(tiny_model_dir("llama"), size=0.2).train()
    export.save_merged(TrainedPolicy(policy, tiny_tokenizer, {}), root / "merged")
    export.save_base(TrainedPolicy(policy, tiny_tokenizer, {}), root / "base")
    assert policy.training
    return root


def recorded(folder):
    return json.loads((folder / forward.FORWARD_NAME).read_text())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["merged", "base"])
def test_rounding_is_far_below_the_tolerance(name, dtype, exported):
    then = recorded(exported / name)
    now = forward.measure(load_any(str(exported / name), dtype=dtype).model, then["tokens"])
    assert forward.difference(then, now) < forward.TOLERANCE / 5
    assert now["computed_with"]["dtype"] == dtype


def test_what_is_trained_stays_so(tiny_model_dir, tiny_tokenizer, tmp_path):
    policy = make_policy(tiny_model_dir("llama"))
    next(p for name, p in policy.named_parameters() if "lora_A" in name).requires_grad_(False)
    before = {name: p.requires_grad for name, p in policy.named_parameters()}
    export.save_base(TrainedPolicy(policy, tiny_tokenizer, {}), tmp_path / "base")
    assert {name: p.requires_grad for name, p in policy.named_parameters()} == before


def test_the_base_is_recorded_without_its_adapter(exported):
    assert forward.difference(recorded(exported / "merged"), recorded(exported / "base")) > forward.TOLERANCE


def swap(tensors, first, second):
    for name in [name for name in tensors if first in name]:
        other = name.replace(first, second)
        tensors[name], tensors[other] = tensors[other], tensors[name]


CHANGES = {
    "layers swapped": lambda tensors: swap(tensors, "layers.0.", "layers.1."),
    "k and v swapped": lambda tensors: swap(tensors, "k_proj", "v_proj"),
    "no MLP": lambda tensors: [t.zero_() for name, t in tensors.items() if "down_proj" in name],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_model_with_a_good_seal_is_refused(change, exported, tmp_path):
    folder = shutil.copytree(exported / "merged", tmp_path / "merged")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint.seal(folder, checkpoint.recorded_run(folder))
    with told(ValueError, str(folder), "something else than when it was exported", "torch", "export it again"):
        load_any(str(folder))
    (folder / checkpoint.MANIFEST_NAME).unlink()
    load_any(str(folder))


def test_weights_that_overflow_are_not_exported(tiny_model_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("llama"), dtype=torch.float16)
    with torch.no_grad():
        model.lm_head.weight.fill_(60000)
        model.model.norm.weight.fill_(60000)
    with told(ValueError, "LlamaForCausalLM", "float16", "overflows", "Use bfloat16"):
        export.save_merged(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_merged_model_that_is_quantized_again_is_not_compared(exported, monkeypatch):
    monkeypatch.setattr(forward, "TOLERANCE", 0.0)
    with pytest.raises(ValueError, match="computes something else"):
        qerl_trl.from_pretrained(exported / "base", NVFP4Config(compute_dtype="float16"))
    qerl_trl.from_pretrained(exported / "merged")


def test_another_class_is_not_compared(exported):
    forward.compare(AutoModel.from_pretrained(exported / "merged"))  # has no logits
