"""torch.compile of the whole model: a graph must read current weights, adapters and noise."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from qerl_trl.noise.hooks import NoiseDraw, NormNoise
from qerl_trl.noise.norms import find_noisy_norms
from tests.e2e.engine.engines import (
    DEVICE,
    EXACT,
    adapter_on,
    gap,
    greedy,
    packed,
    randomize,
    stub_generation,
    write_model,
)

#: torch reads it at its import
ENVIRONMENT, COLD = {"TORCHDYNAMO_DISABLE": "0"}, True
#: in float32 the kernels' plain PyTorch path copies a table to the GPU, which no CUDA graph takes
COMPILED = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "NONE"}}
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="float32 and torch.compile: vLLM 0.25.1's own triton_unified_attention reads out of bounds",
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def policy_of(arm: str, path: str):
    if arm == "nvfp4":
        return adapter_on(packed(path))
    if arm == "full":
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(DEVICE)
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, **options)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=quantization)
    policy = get_peft_model(model.to(DEVICE), LoraConfig(r=6, lora_alpha=18, target_modules="all-linear"))
    randomize(policy)
    return policy


@pytest.mark.parametrize("arm", ["nvfp4", "nf4", "full"])
def test_updates_in_place_are_seen(arm, path):
    policy = policy_of(arm, path)
    g = stub_generation(policy, engine=COMPILED)
    for seed in range(1, 3):
        if arm == "full":
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.mul_(1.1)
        else:
            randomize(policy, seed)
        assert gap(policy, g.llm) > 0.01
        g.sync_weights()
        assert gap(policy, g.llm) < EXACT
    if arm == "nvfp4":
        check_noise(policy, g)


def check_noise(policy, g) -> None:
    g.engine.reset_prefix_cache()  # with cached prefixes the prefill would have another shape
    clean = greedy(g.llm)[1]
    noise = NormNoise(find_noisy_norms(policy))
    g.trainer.aqn.draw = NoiseDraw(5e-2, 7, 3, 1)
    noise.set(g.trainer.aqn.draw)
    g.sync_noise()
    with noise.active():
        assert gap(policy, g.llm) < EXACT
    assert gap(policy, g.llm) > 0.1
    g.trainer.aqn.draw = None
    g.sync_noise()
    assert torch.equal(clean, greedy(g.llm)[1])
