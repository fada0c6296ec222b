"""A shipped recipe whose rollouts are vLLM's, and its published adapter in vLLM without us. All other recipes: tests/test_recipes.py."""

import pytest


def test_two_steps_with_its_rollouts_in_vllm(recipe):
    first, second = recipe["steps"]
    assert 0 < first["grad_norm"] < float("inf") and 0 < second["grad_norm"] < float("inf")
    # bfloat16 on both sides, as the recipe says
    assert first["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=0.02)
    assert abs(first["rollout/logp_gap"]) < 0.01
    assert recipe["settings"]["base_format"] == "nvfp4"


def test_the_same_in_two_processes_under_fsdp_with_the_recipes_own_optimizer(recipe_sharded):
    """Accuracy before and after too: there is no engine before training begins."""
    assert recipe_sharded["steps"] == 2 and recipe_sharded["device"].endswith(" x 2")
    assert recipe_sharded["before"]["total"] == recipe_sharded["after"]["total"] == 3
    assert "optim" not in recipe_sharded["settings"]["options"], "the default, adamw_torch_fused"
    first, second = (entry for entry in recipe_sharded["log_history"] if "loss" in entry)
    assert 0 < first["grad_norm"] < float("inf") and 0 < second["grad_norm"] < float("inf")
    assert first["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=0.02)


def test_a_published_adapter_opens_in_the_lora_slots_of_plain_vllm(recipe):
    """On the dequantized base, in float32: what PEFT computes in transformers, vLLM computes."""
    assert recipe["quantization"] == "None"
    assert recipe["adapter"] < 1e-3 and recipe["no adapter"] > 100 * recipe["adapter"]
    assert recipe["greedy"] == recipe["greedy in transformers"]
