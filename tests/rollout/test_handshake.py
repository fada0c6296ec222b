"""The numbers that trainer and server compare, without an engine; tests/e2e/engine/test_weights.py compares real
ones."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from qerl_trl.rollout.server import differences, trainer_summaries
from qerl_trl.rollout.spec import EngineSpec
from qerl_trl.rollout.weights import WeightSummary, summary
from tests.tiny_models import make_tiny_model


def policy(**lora):
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **lora}
    model = make_tiny_model("qwen2").float()
    model.name_or_path = "a-checkpoint"
    return get_peft_model(model, LoraConfig(**settings))


def answers(model, ranks: int = 1, **changed) -> list[dict]:
    """What `ranks` tensor-parallel ranks would answer: every matrix cut by rows, everything else on each of them."""
    replies = []
    adapters = {"model.layers.0.self_attn.q_proj": 16, "model.layers.1.self_attn.q_proj": 16}
    adapters |= {"model.layers.0.mlp.down_proj": 16, "model.layers.1.mlp.down_proj": 16}
    base = model.get_base_model()
    for rank in range(ranks):
        weights = {}
        for name, parameter in base.named_parameters():
            name = name.replace(".base_layer", "").removesuffix(".weight")
            if "lora_" in name:
                continue
            kind = "bias" if name.endswith(".bias") else "norm" if parameter.ndim == 1 else "dense"
            kind = "embedding" if name in ("lm_head", "model.embed_tokens") else kind
            shard = parameter.chunk(ranks)[rank] if parameter.ndim == 2 else parameter
            weights[name] = list(summary(kind, shard))
        settings = {"dtype": "float32", "logprobs_mode": "processed_logprobs", "max_model_len": 256, "options": {}}
        settings["batch_invariant"] = False
        replies.append({"weights": weights, "adapter_ranks": adapters, **settings, **changed})
    return replies


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_same_model_passes_however_it_is_cut(ranks):
    model = policy()
    assert differences(EngineSpec.of(model), model, answers(model, ranks)) == []


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"dtype": "bfloat16"}, "it computes in bfloat16, the trainer in float32"),
        ({"logprobs_mode": "raw_logprobs"}, "its log-probabilities are raw_logprobs, not processed_logprobs"),
        ({"max_model_len": 64}, "its longest sequence is 64 tokens, the trainer's 128"),
        ({"adapter_ranks": {}}, "no adapter buffers in model.layers.0.mlp.down_proj"),
    ],
)
def test_settings_that_differ_are_named(changed, named):
    model = policy()
    (found,) = differences(EngineSpec.of(model, max_model_len=128), model, answers(model, **changed))
    assert found.startswith(named)


def test_a_server_without_the_batch_invariant_mode_is_named():
    model = policy()
    spec = EngineSpec.of(model, batch_invariant=True)
    assert differences(spec, model, answers(model, batch_invariant=True)) == []
    (found,) = differences(spec, model, answers(model))
    assert "vllm_batch_invariant" in found


def test_other_weights_are_named_by_kind():
    model, other = policy(), policy()
    with torch.no_grad():
        for parameter in other.get_base_model().parameters():
            parameter.mul_(1.01)
    found = differences(EngineSpec.of(model), model, answers(other, 2))
    for kind, name in [
        ("dense", "layers.0.mlp.down_proj"),
        ("embedding", "embed_tokens"),
        ("bias", "layers.0.self_attn.k_proj"),
    ]:
        assert any(line.startswith(f"other {kind} weights (another checkpoint): model.{name}") for line in found), found
    assert any(line.startswith("other norm weights") and "layers.0.input_layernorm" in line for line in found), found


def test_norms_that_the_adapter_trains_are_not_compared():
    model = policy(modules_to_save=["input_layernorm"])
    names = trainer_summaries(model, ["model.norm", "model.layers.0.input_layernorm"])
    assert "model.norm" in names and "model.layers.0.input_layernorm" not in names


def test_layers_that_only_one_side_has():
    model = policy()
    reply = answers(model)[0]
    reply["weights"]["model.layers.9.mlp.up_proj"] = list(WeightSummary("dense", 4, [1, 2, 3, 4]))
    (found,) = differences(EngineSpec.of(model), model, [reply])
    assert found == "layers that the trainer's model does not have: model.layers.9.mlp.up_proj"
