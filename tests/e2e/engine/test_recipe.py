"""A shipped recipe with rollouts in vLLM, and its published adapter in plain vLLM."""

import json
import runpy

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from qerl_trl.publish.export import save_adapter
from qerl_trl.publish.load import load_policy
from tests.e2e.engine.engines import DEVICE, MEMORY, engine, gap, greedy, randomize, transformers_greedy
from tests.e2e.test_recipes import EXAMPLES, INSTEAD, words, write_tiny_model

#: vLLM's attention on a CPU has no heads of 16; greedy tokens have to depend on the weights
LARGER = {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.2}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    instead = INSTEAD | {
        "model_name_or_path": write_tiny_model("qwen2.5-3b", folder / "model", **LARGER),
        "output_dir": str(folder / "run"),
        "vllm_engine_kwargs": json.dumps({"enforce_eager": True, **MEMORY}),
        "use_vllm": "true",
        "use_cpu": str(DEVICE == "cpu").lower(),
    }
    runpy.run_path(str(EXAMPLES / "grpo_gsm8k.py"))["main"](["--config", "qwen2.5-3b", *words(instead)])
    return folder / "run"


def test_two_steps_with_its_rollouts_in_vllm(run):
    results = json.loads((run / "results.json").read_text())
    first, second = (entry for entry in results["log_history"] if "loss" in entry)
    assert 0 < first["grad_norm"] < float("inf") and 0 < second["grad_norm"] < float("inf")
    # bfloat16 on both sides, as the recipe says
    assert first["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=0.02)
    assert abs(first["rollout/logp_gap"]) < 0.01 and results["settings"]["base_format"] == "nvfp4"


def test_a_published_adapter_opens_in_the_lora_slots_of_plain_vllm(run, tmp_path):
    """On the dequantized base, in float32, with the log-probabilities of PEFT in transformers."""
    from vllm.lora.request import LoRARequest

    trained = load_policy(run, dtype="float32")
    randomize(trained.model)  # two steps change too little to tell an adapter from none
    save_adapter(trained, tmp_path / "adapter")
    trained.model.unload().dequantize().save_pretrained(tmp_path / "dense")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32).to(DEVICE)
    expected = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    slots = {"enable_lora": True, "max_lora_rank": 32}
    llm = engine(str(tmp_path / "dense"), tokenizer=str(run.parent / "model"), **slots)
    request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    assert llm.llm_engine.vllm_config.model_config.quantization is None
    difference = gap(expected, llm, request)
    assert difference < 1e-3 and gap(expected, llm) > 100 * difference
    assert greedy(llm, request)[0] == transformers_greedy(expected)
