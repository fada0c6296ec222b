"""Settings of an engine in their two forms, and the models, adapters and data that it can serve."""

import json
import re
import shlex
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from qerl_trl.model.lora import register_nvfp4_lora
from qerl_trl.nvfp4.config import NVFP4Config
from qerl_trl.rollout.engine import batch_invariant
from qerl_trl.rollout.generation import QeRLVLLMGeneration
from qerl_trl.rollout.spec import EngineSpec, adapter_buffers, check_servable, check_vocabulary, rollout_layers
from tests.architectures import dense_model
from tests.tiny_models import make_tiny_model

LEAVES = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "a model"
    make_tiny_model("qwen2").to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def policy(folder, **config):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=NVFP4Config(**config)
    )
    lora = LoraConfig(r=20, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, register_nvfp4_lora(lora))


def parsed(command: str) -> tuple[list[str], dict[str, str]]:
    words = shlex.split(command)
    assert words[:2] == ["vllm", "serve"] and "DEV_MODE" not in command and "SECRET" not in command
    start = next(i for i, word in enumerate(words) if word.startswith("--"))
    return words[:start], dict(zip(words[start::2], words[start + 1 :: 2], strict=True))


def test_command_and_arguments_of_an_nvfp4_model(folder):
    skip = ["model.layers.1.mlp.down_proj"]
    model = policy(folder, scale_rule="four_over_six", modules_to_not_convert=skip)
    spec = EngineSpec.of(model, revision="v1.0", max_model_len=512, max_num_seqs=64, trust_remote_code=True)
    command, arguments = spec.serve_command(), spec.llm_arguments()
    assert command.endswith(" --trust-remote-code") and arguments["trust_remote_code"] is True
    words, options = parsed(command.removesuffix(" --trust-remote-code"))
    assert words == ["vllm", "serve", folder]  # quoted: it has a space
    qerl = {"adapter": {"rank": 20, "targets": LEAVES}, "base": "nvfp4"}
    qerl |= {"scale_rule": "four_over_six", "ignore": [*skip, "lm_head"]}
    assert json.loads(options.pop("--additional-config")) == {"qerl": qerl}
    assert arguments["additional_config"] == {"qerl": qerl | {"holds": spec.holds}}
    expected = "--revision v1.0 --tokenizer-revision v1.0 --host 127.0.0.1 --dtype bfloat16 --quantization qerl_nvfp4"
    expected += " --worker-extension-cls qerl_trl.rollout.vllm.worker.QeRLWorkerExtension"
    expected += " --middleware qerl_trl.rollout.vllm.worker.RolloutEndpoint --max-model-len 512 --max-num-seqs 64"
    expected += " --logprobs-mode processed_logprobs --max-logprobs -1 --config-format hf --tokenizer-mode hf"
    assert options == parsed(f"vllm serve {expected}")[1]
    named = {name.removeprefix("--").replace("-", "_"): text for name, text in options.items()}
    assert all(str(arguments[name]) == text for name, text in named.items() if name in arguments)


def spec_of_a_run(model, data, mode="colocate"):
    """The spec built by a trainer with a processor."""
    args = {"scale_rule": "rtn", "generation_batch_size": 96, "vllm_batch_invariant": False}
    args |= {"model_init_kwargs": None, "bf16": True}
    trainer = SimpleNamespace(args=SimpleNamespace(**args), train_dataset=data, eval_dataset=None)
    options = {"mode": mode, "max_model_length": 256, "max_num_seqs": 24, "model_impl": "auto"}
    generation = SimpleNamespace(model=model, trainer=trainer, trained=None, trust_remote_code=False, **options)
    generation.accelerator = SimpleNamespace(is_main_process=False)
    generation.processing_class = SimpleNamespace(image_processor=None)
    generation._compute_dtype, generation._in_process = lambda: torch.bfloat16, lambda: None
    QeRLVLLMGeneration._build_engine(generation)
    return generation.spec


def test_an_engine_without_pictures_builds_no_tower(folder, tmp_path):
    """vLLM would load the tower again, and reserve memory for the largest pictures."""
    dense_model("gemma3").save_pretrained(tmp_path)
    seeing = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16)
    words = Dataset.from_dict({"prompt": ["What is 2 + 2?"]})
    text = spec_of_a_run(seeing, words)
    assert text.llm_arguments()["language_model_only"] is True and "--language-model-only" in text.serve_command()
    others = [EngineSpec.of(seeing), spec_of_a_run(seeing, words.add_column("image", [None]))]
    for spec in (*others, EngineSpec.of(policy(folder), pictures=False)):
        assert "language_model_only" not in spec.llm_arguments() and "language-model" not in spec.serve_command()
    # vLLM's default for a server captures CUDA graphs for more; TRL's is of one of the processes' engines
    assert spec_of_a_run(seeing, words, "server").max_num_seqs == 96


def test_architectures_with_other_states(folder, tmp_path):
    dense_model("lfm2").save_pretrained(tmp_path / "lfm2")
    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM cannot .*short convolutions.*use_vllm=False"):
        EngineSpec.of(AutoModelForCausalLM.from_pretrained(tmp_path / "lfm2"))
    dense_model("qwen3_5_text").save_pretrained(tmp_path / "delta net")
    spec = EngineSpec.of(AutoModelForCausalLM.from_pretrained(tmp_path / "delta net"))
    assert spec.llm_arguments()["gdn_prefill_backend"] == "triton"  # FlashInfer's needs a compiler
    assert spec.llm_arguments()["enable_prefix_caching"] is False
    assert parsed(spec.serve_command())[1]["--gdn-prefill-backend"] == "triton"
    assert "gdn_prefill_backend" not in EngineSpec.of(policy(folder)).llm_arguments()


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False)])
def test_the_batch_invariant_mode(folder, monkeypatch, value, on):
    spec = EngineSpec.of(policy(folder), batch_invariant=on)
    assert spec.options()["qerl"].get("batch_invariant", False) is on
    assert spec.serve_command().startswith("VLLM_BATCH_INVARIANT=1 vllm serve ") is on
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    assert batch_invariant() is on


# --- adapters and embeddings ---


def test_the_active_adapter_is_rolled_out_and_a_second_one_refused():
    def adapted(*names) -> nn.Module:
        configs = [LoraConfig(r=4 * (i + 1), target_modules=["q_proj"]) for i in range(len(names))]
        model = get_peft_model(make_tiny_model("qwen2"), configs[0], adapter_name=names[0])
        for name, config in zip(names[1:], configs[1:], strict=True):
            model.add_adapter(name, config)
        return model

    model = adapted("student", "ref")
    check_servable(model)
    assert adapter_buffers(model) == {"rank": 4, "targets": ["q_proj"]}
    assert all("student" in layer.lora_A for layer in rollout_layers(model).values())
    model.set_adapter("ref")
    with pytest.raises(ValueError, match="several adapters"):
        check_servable(model)
    model.base_model.set_adapter(["student", "ref"])
    with pytest.raises(ValueError, match="student, ref active at once"):
        check_servable(model)


def test_an_adapter_on_a_tower_is_refused_with_the_option_that_leaves_it_out():
    """The probe's text runs no tower, and without pictures the engine has none."""

    def seeing(**options):
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
        return get_peft_model(dense_model("gemma3"), config)

    with pytest.raises(ValueError, match=r"layers of a tower for pictures .*exclude_modules=") as told:
        check_servable(seeing())
    named = re.search(r"exclude_modules='(.*?)'\)", str(told.value)).group(1).replace("\\\\", "\\")
    check_servable(seeing(exclude_modules=named))


def test_resized_embeddings_are_refused(tiny_model_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"))
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    check_vocabulary(adapted)
    model.resize_token_embeddings(358)
    with pytest.raises(ValueError, match="358 embeddings, and its checkpoint, which vLLM loads, has 320"):
        check_vocabulary(adapted)
