"""Weights reach the engine from folders and from a live trainer, in every format, and a server's are compared."""

import json

import pytest
import torch

from qerl_trl.noise.hooks import NoiseDraw
from qerl_trl.rollout.server import differences
from qerl_trl.rollout.spec import EngineSpec
from tests.e2e.engine.engines import (
    EXACT,
    adapter_on,
    as_mixed_modelopt,
    dense,
    engine,
    gap,
    packed,
    stub_generation,
    write_model,
)


def model_of(llm):
    from qerl_trl.rollout.vllm.engine import engine_model

    return engine_model(llm)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def path(folder):
    return write_model(folder)


@pytest.fixture(scope="module")
def untied(folder):
    return write_model(folder, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def mixed(folder, untied):
    packed(untied).save_pretrained(folder / "untied")
    return as_mixed_modelopt(folder / "untied", untied, folder / "mixed")


# --- from folders, in a stock `LLM` with our quantization ---


def test_a_bf16_checkpoint_is_quantized_as_in_the_trainer(path):
    """With another scale rule and dense layers; a stock engine after it has none of our methods."""
    skip = ["re:.*layers\\.1\\.mlp\\..*", "layers.0.self_attn.o_proj"]
    qerl = {"scale_rule": "four_over_six", "ignore": ["lm_head", *skip]}
    llm = engine(path, quantization="qerl_nvfp4", additional_config={"qerl": qerl})
    model, theirs = packed(path, "four_over_six", modules_to_not_convert=skip), model_of(llm)
    assert gap(model, llm) < EXACT
    mine = model.model.layers[0].self_attn
    fused = torch.cat([layer.weight_packed for layer in (mine.q_proj, mine.k_proj, mine.v_proj)])
    assert torch.equal(fused, theirs.model.layers[0].self_attn.qkv_proj.weight_packed)
    methods = {n: type(getattr(m, "quant_method", None)).__name__ for n, m in theirs.named_modules()}
    layers = ("layers.0.self_attn.o_proj", "layers.1.mlp.down_proj", "layers.1.mlp.gate_up_proj")
    assert sorted(n for n, method in methods.items() if method == "DenseMethod") == [f"model.{n}" for n in layers]
    stock = engine(path)
    assert not any(getattr(module, "noisy", False) for module in model_of(stock).modules())
    assert gap(dense(path), stock) < EXACT


def test_a_saved_folder_is_compressed_tensors_that_loads_exactly(folder):
    path, saved = write_model(folder, "qwen3"), str(folder / "saved")
    packed(path, "four_over_six").save_pretrained(saved)
    with open(f"{saved}/config.json") as file:
        assert json.load(file)["quantization_config"]["quant_method"] == "compressed-tensors"
    assert gap(packed(saved), engine(saved, quantization="qerl_nvfp4", tokenizer=path)) < EXACT


def test_a_mixed_modelopt_folder_with_a_scale_per_shard(mixed):
    model, llm = packed(mixed), engine(mixed, quantization="qerl_nvfp4")
    assert gap(model, llm) < EXACT
    mine, theirs = model.model.layers[0], model_of(llm).model.layers[0]
    assert torch.equal(mine.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight)  # FP8, decoded
    assert theirs.mlp.gate_up_proj.weight_global_scale.numel() == 512  # one scale per row, not one maximum


# --- from a live trainer; dense, NF4 and whole models: test_training.py ---


def test_a_copied_base_with_rank_and_alpha_patterns_and_trained_norms(untied):
    patterns = {"rank_pattern": {"o_proj": 20}, "alpha_pattern": {"up_proj": 7}, "modules_to_save": ["input_layernorm"]}
    policy = adapter_on(packed(untied), rank=4, alpha=4, adapter_name="student", **patterns)
    g = stub_generation(policy, share=False)
    assert policy.active_adapter == "student"
    mine, theirs = policy.get_base_model().model.embed_tokens, model_of(g.llm).model.embed_tokens
    assert mine.weight.data_ptr() != theirs.weight.data_ptr()

    @torch.no_grad()
    def move_norms(by):
        for name, parameter in policy.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(by)

    def put_noise(draw):
        g.trainer.aqn.draw = draw
        g.sync_noise()

    move_norms(0.3)
    g.sync_weights()
    put_noise(NoiseDraw(0.0, 0, 0, 0))
    assert gap(policy, g.llm) < EXACT
    put_noise(NoiseDraw(3e-2, 0, 0, 0))
    move_norms(0.1)
    g.sync_weights()
    put_noise(None)
    assert gap(policy, g.llm) < EXACT


# --- an engine as in a server, compared with trainers ---


def test_differences_of_an_engine_from_a_trainer_are_named(path, folder):
    from qerl_trl.rollout.vllm.state import RolloutState
    from qerl_trl.rollout.vllm.worker import describe

    left_dense = {"modules_to_not_convert": ["model.layers.1.self_attn.o_proj"]}
    leaves = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]

    def policy(base=None, rank=8, targets=leaves):
        return adapter_on(packed(path) if base is None else base, rank=rank, alpha=rank, target_modules=targets)

    mine = policy()
    spec = EngineSpec.of(mine)
    llm = engine(path, quantization="qerl_nvfp4", additional_config=spec.options())

    def found(model) -> list[str]:
        answer = describe(RolloutState(model_of(llm)), llm.llm_engine.vllm_config)
        return differences(EngineSpec.of(model), model, [json.loads(json.dumps(answer))])  # as over HTTP

    def check_named(found: list[str], *expected: str) -> None:
        for line in expected:
            assert any(difference.startswith(line) for difference in found), found

    assert found(mine) == []
    other_there = "NVFP4 there and dense in the trainer:"
    check_named(found(policy(packed(path, **left_dense))), f"{other_there} model.layers.1.self_attn.o_proj")
    check_named(found(policy(dense(path))), f"{other_there} model.layers.0")
    check_named(
        found(policy(packed(write_model(folder, initializer_range=0.21)), rank=20, targets="all-linear")),
        "other NVFP4 weights (another checkpoint): model.layers.0",
        "other embedding weights (another checkpoint): lm_head, model.embed_tokens",
        "adapter buffers of rank 16, but the trainer's adapter has rank 20, in model.layers.0",
        "no adapter buffers in model.layers.0.mlp.down_proj",
    )
    with torch.no_grad():
        model_of(llm).model.layers[1].input_layernorm.weight.add_(0.1)
    check_named(found(mine), "other norm weights (another checkpoint, or an earlier run trained them on this server)")
