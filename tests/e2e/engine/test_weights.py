"""Every way weights reach the engine: from folders and from a live trainer, in every form, and what is refused."""

import json

import pytest
import torch

from qerl_trl.noise.hooks import NoiseDraw
from qerl_trl.rollout.engine import RolloutError
from qerl_trl.rollout.server import differences
from qerl_trl.rollout.spec import EngineSpec
from tests.e2e.engine.engines import (
    EXACT,
    adapter_on,
    as_mixed,
    as_modelopt,
    dense,
    engine,
    gap,
    greedy,
    packed,
    separate_scales,
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


# --- from folders, in a stock `LLM` with our quantization ---


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_bf16_checkpoint_is_quantized_as_the_trainer_does(folder, family):
    """Between two stock engines, which our method leaves as they are."""
    path = write_model(folder, family)
    before = greedy(engine(path)) if family == "qwen2" else None
    model, llm = packed(path), engine(path, quantization="qerl_nvfp4")
    mine = model.model.layers[0].self_attn
    fused = torch.cat([layer.weight_packed for layer in (mine.q_proj, mine.k_proj, mine.v_proj)])
    assert torch.equal(fused, model_of(llm).model.layers[0].self_attn.qkv_proj.weight_packed)
    assert gap(model, llm) < EXACT
    if before is not None:
        stock = engine(path)
        assert (
            type(model_of(stock).model.layers[0].self_attn.qkv_proj.quant_method).__name__ == "UnquantizedLinearMethod"
        )
        assert not any(getattr(module, "noisy", False) for module in model_of(stock).modules())
        assert torch.equal(before[1], greedy(stock)[1])


@pytest.fixture(scope="module")
def saved(folder, path):
    packed(path, "four_over_six").save_pretrained(folder / "saved")
    return str(folder / "saved")


def test_a_saved_folder_is_compressed_tensors_that_loads_exactly(saved, path):
    with open(f"{saved}/config.json") as file:
        assert json.load(file)["quantization_config"]["quant_method"] == "compressed-tensors"
    assert gap(packed(saved), engine(saved, quantization="qerl_nvfp4", tokenizer=path)) < EXACT


def test_another_scale_rule_and_layers_that_are_left_dense(saved, path):
    skip = ["re:.*layers\\.1\\.mlp\\..*", "layers.0.self_attn.o_proj"]
    told = {"scale_rule": "four_over_six", "ignore": ["lm_head", *skip]}
    llm = engine(path, quantization="qerl_nvfp4", additional_config={"qerl": told})
    model = packed(path, "four_over_six", modules_to_not_convert=skip)
    assert gap(model, llm) < EXACT
    left = [
        n for n, m in model_of(llm).named_modules() if type(getattr(m, "quant_method", None)).__name__ == "DenseMethod"
    ]
    layers = ("layers.0.self_attn.o_proj", "layers.1.mlp.down_proj", "layers.1.mlp.gate_up_proj")
    assert sorted(left) == [f"model.{name}" for name in layers]


def test_a_mixed_modelopt_folder_with_scales_of_its_own_per_shard(saved, folder, path):
    foreign = separate_scales(saved, folder / "separate")
    mixed = as_mixed(as_modelopt(foreign, folder / "modelopt"), path, folder / "mixed")
    model, llm = packed(mixed), engine(mixed, quantization="qerl_nvfp4", tokenizer=path)
    assert gap(model, llm) < EXACT
    mine, theirs = model.model.layers[0], model_of(llm).model.layers[0]
    assert torch.equal(mine.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight)  # FP8, decoded
    assert theirs.mlp.gate_up_proj.weight_global_scale.numel() == 512  # one scale per row, not one maximum


# --- from a live trainer ---


def test_a_dense_base_is_shared_and_carries_an_adapter(untied):
    targets = ["q_proj", "v_proj", "down_proj"]
    policy = adapter_on(dense(untied), rank=4, alpha=8, use_rslora=True, target_modules=targets)
    g = stub_generation(policy)
    assert g.probe_result.difference < EXACT
    theirs = model_of(g.llm).model.layers[0].self_attn.qkv_proj.weight
    mine = policy.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    assert theirs.data_ptr() == mine.data_ptr()
    g.sync_weights()
    assert gap(policy, g.llm) < EXACT
    assert {n.rpartition(".")[2] for n in g.engine.state.slots} == {*targets, "k_proj"}  # fused with q and v


def test_fp8_layers_of_a_mixed_checkpoint_are_one_copy(untied, folder):
    packed(untied).save_pretrained(folder / "untied")
    policy = adapter_on(packed(as_mixed(as_modelopt(folder / "untied", folder / "m"), untied, folder / "untied mixed")))
    g = stub_generation(policy)
    assert gap(policy, g.llm) < EXACT
    mine, theirs = (m.model.layers[0].self_attn for m in (policy.get_base_model(), model_of(g.llm)))
    for one, other in ((mine.q_proj, theirs.qkv_proj), (mine.o_proj, theirs.o_proj)):
        assert one.base_layer.weight.data_ptr() == other.weight.data_ptr()


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


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "lm_head"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    ],
)
def test_what_the_engine_cannot_carry_is_refused(untied, options, named):
    with pytest.raises(ValueError, match=named):
        stub_generation(adapter_on(packed(untied), **options))


def test_the_probe_finds_a_wrong_engine(untied):
    g = stub_generation(adapter_on(packed(untied)))
    scale = model_of(g.llm).model.layers[0].mlp.down_proj.weight_global_scale
    scale.mul_(3)
    with pytest.raises(RolloutError, match="other weights or norms"):
        g.run_probe()
    scale.div_(3)
    g.sync_weights()
    g.engine.state.load_adapter = lambda adapter, norms: len(adapter)  # an adapter that lands nowhere
    with pytest.raises(RolloutError, match="clean log-probabilities differ"):
        g.run_probe()
    for slot in g.engine.state.slots.values():
        slot.b_NR.zero_()
    with pytest.raises(RolloutError, match="the adapter acts otherwise"):
        g.run_probe()


# --- an engine as a server would build it, and what the trainer finds there ---


def compare(llm, model, spec) -> list[str]:
    from qerl_trl.rollout.vllm.state import RolloutState
    from qerl_trl.rollout.vllm.worker import describe

    answer = describe(RolloutState(model_of(llm)), llm.llm_engine.vllm_config)
    return differences(spec, model, [json.loads(json.dumps(answer))])  # as it travels


def built(spec, path, **changed):
    options = {"qerl": spec.options()["qerl"] | changed}
    return engine(path, quantization="qerl_nvfp4", additional_config=options)


def check_named(found: list[str], *expected: str) -> None:
    for line in expected:
        assert any(difference.startswith(line) for difference in found), found


def test_an_engine_that_was_told_by_the_spec_passes_and_what_differs_is_named(path):
    policy = adapter_on(packed(path), rank=20, alpha=20)
    spec = EngineSpec.of(policy)
    right = built(spec, path)
    assert compare(right, policy, spec) == []
    skipped = adapter_on(packed(path, modules_to_not_convert=["model.layers.1.self_attn.o_proj"]), rank=20, alpha=20)
    check_named(
        compare(right, skipped, EngineSpec.of(skipped)),
        "NVFP4 there and dense in the trainer: model.layers.1.self_attn.o_proj",
    )
    plain = adapter_on(dense(path), rank=20, alpha=20)
    check_named(compare(right, plain, EngineSpec.of(plain)), "NVFP4 there and dense in the trainer: model.layers.0")
    with torch.no_grad():
        model_of(right).model.layers[1].input_layernorm.weight.add_(0.1)
        model_of(right).model.layers[0].self_attn.qkv_proj.bias.mul_(2)
    check_named(
        compare(right, policy, spec),
        "other norm weights (another checkpoint, or an earlier run trained them on this server): model.layers.1.input",
        "other bias weights (another checkpoint): model.layers.0.self_attn.k_proj.bias",
    )


def test_an_engine_with_other_options_and_another_checkpoint(path, folder):
    policy = adapter_on(packed(path), rank=20, alpha=20)
    spec = EngineSpec.of(policy)
    targets = ["q_proj", "k_proj", "v_proj"]
    ignored = [*spec.ignore, "model.layers.0.mlp.down_proj"]
    wrong = built(spec, path, scale_rule="four_over_six", ignore=ignored, adapter={"rank": 8, "targets": targets})
    check_named(
        compare(wrong, policy, spec),
        "other NVFP4 weights (scale_rule='four_over_six' there, 'rtn' in the trainer): model.layers.0",
        "dense there and NVFP4 in the trainer: model.layers.0.mlp.down_proj",
        "adapter buffers of rank 16, but the trainer's adapter has rank 20, in model.layers.0",
        "no adapter buffers in model.layers.0.mlp.down_proj",
    )
    check_named(
        compare(built(spec, write_model(folder, initializer_range=0.21)), policy, spec),
        "other NVFP4 weights (another checkpoint): model.layers.0",
        "other embedding weights (another checkpoint): lm_head, model.embed_tokens",
    )
