"""Compiled layers: the values and gradients of eager mode, few graphs at any length, and no other change.

Mostly with the backend "aot_eager", which traces and splits forward and backward as inductor does, without its code.
"""

import logging
import shutil
from functools import partial

import pytest
import torch
import torch._inductor.config
import torch.compiler.config
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from qerl_trl.noise.hooks import NoiseDraw, NormNoise
from qerl_trl.noise.norms import find_noisy_norms
from qerl_trl.update import compiled_layers, layer_function
from qerl_trl.update.compiled_layers import compile_layers, warm_up
from tests import shapes
from tests.faults.tiny_runs import TinyRuns
from tests.update.models import (
    REORDERED,
    Branching,
    adapter_of,
    assert_identical,
    batch,
    checkpointed,
    distance,
    graphs,
    layers_of,
    small,
    update,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_compiler")]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_values_and_gradients_are_those_of_eager(family):
    model = small(family)
    expected = {length: update(model, batch(length)) for length in (40, 33)}
    compile_layers(model, backend="aot_eager")
    for length, result in expected.items():
        assert distance(update(model, batch(length)), result) < REORDERED
    assert graphs() and not counters["graph_break"]


def test_gated_delta_nets_stay_eager():
    """Their loop over chunks takes minutes to compile, for each length again."""
    torch.manual_seed(0)
    config = shapes.tiny(shapes.NEWER["qwen3.5-9b"][0], vocab_size=512).get_text_config()
    assert config.layer_types == ["linear_attention", "full_attention"]
    lora = LoraConfig(r=4, target_modules=["o_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32), lora).train()
    expected = {length: update(model, batch(length)) for length in (96, 40)}
    compiled = compile_layers(model, backend="aot_eager")
    for length, result in expected.items():
        assert distance(update(model, batch(length)), result) < 1e-4
    assert graphs() == 2, "the attention layer, and the norm after the layers"
    assert not compiled.failed


def test_one_graph_with_and_without_gradients():
    model, given = small(layers=3), batch(40)
    compiled = compile_layers(model, backend="aot_eager")
    compiled.recompute(compiled.layers)
    expected = update(model, given)
    with torch.no_grad():
        found = model(**given, use_cache=False).logits[:, 3:]
    assert torch.equal(found, expected["logits"]) and not found.requires_grad
    assert graphs() == 2 and not compiled.failed


def test_generation_and_evaluation_are_not_compiled():
    model = small()
    prompt = torch.ones(2, 5, dtype=torch.long)
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    clean = model.eval()(**batch(40)).logits
    compile_layers(model, backend="aot_eager")
    assert torch.equal(model(**batch(40)).logits, clean)
    for mode in (False, True):
        assert torch.equal(model.train(mode).generate(prompt, max_new_tokens=6, do_sample=False), expected)
    assert not graphs()


def noisy_update(model, noise, sigma, step=0):
    noise.set(NoiseDraw(sigma, 0, step, 0))
    noise.in_training = True
    return update(model, batch(33 + step), autocast=model.dtype == torch.bfloat16)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_noise_in_the_update_is_that_of_the_hooks(dtype, recompute):
    model = small(dtype=dtype)
    noise = NormNoise(find_noisy_norms(model))
    sigmas = (0.0, 0.1, 0.02, 0.1, 0.0)
    expected = [noisy_update(model, noise, sigma, step) for step, sigma in enumerate(sigmas)]
    compiled = compile_layers(model, backend="aot_eager")
    if recompute:
        compiled.recompute(compiled.layers)
    for step, sigma in enumerate(sigmas):
        found = noisy_update(model, noise, sigma, step)
        assert distance(found, expected[step]) < (REORDERED if dtype == torch.float32 else 0.03)
        if sigma:
            assert noise.landed == 4 and abs(noise.sigma_effective() - sigma) < 0.2 * sigma
    assert graphs() == 3, "the layers clean and noisy, and the norm after them, which feeds the head"
    assert not torch.equal(expected[0]["logits"], noisy_update(model, noise, 0.1)["logits"])


def test_sigma_0_and_clean_scopes_are_no_noise_bit_for_bit():
    model = small()
    compiled = compile_layers(model, backend="aot_eager")
    expected = update(model, batch(40))
    compiled.remove()
    noise = NormNoise(find_noisy_norms(model))
    compile_layers(model, backend="aot_eager")
    for sigma, in_training in ((0.0, True), (0.1, False)):
        noise.set(NoiseDraw(sigma, 0, 0, 0))
        noise.in_training = in_training
        assert distance(update(model, batch(40)), expected) == 0


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == layer_function.__name__]


def test_a_layer_that_does_not_compile_runs_eagerly_with_one_warning(caplog):
    model = small(layers=4)
    for layer in layers_of(model):
        layer.mlp = Branching(layer.mlp)
    expected = update(model, batch(40))
    compiled = compile_layers(model, backend="eager")
    with caplog.at_level(logging.WARNING, "qerl_trl"):
        for _ in range(2):
            assert distance(update(model, batch(40)), expected) < REORDERED
    (message,) = warnings_of(caplog)
    assert "Qwen2DecoderLayer runs in eager mode" in message and "compile_layers=False" in message
    assert compiled.failed


def test_the_warm_up_compiles_everything_and_leaves_no_trace():
    model = small()
    noise = NormNoise(find_noisy_norms(model))
    before = update(model, batch(40))
    layers_of(model)[0].mlp.eval()
    flags = [module.training for module in model.modules()]
    random, weights = torch.get_rng_state(), {n: p.clone() for n, p in model.named_parameters()}
    compiled = compile_layers(model, backend="aot_eager")
    warm_up(compiled, model, 2, 64, noisy=True)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == flags
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
        assert name not in before or torch.equal(parameter.grad, before[name])
    model.train()
    made = graphs()
    for length in (40, 57, 80):
        update(model, batch(length))
    noisy_update(model, noise, 0.1)
    assert made and graphs() == made and not compiled.failed


@pytest.mark.parametrize("recompute", ["around", "inside"])
def test_fsdp2(one_process_group, recompute):
    """Wrapped after compilation, as accelerate does."""
    model = small()
    expected = update(model, batch(40))
    noise = NormNoise(find_noisy_norms(model))
    compiled = compile_layers(model, backend="aot_eager")
    if recompute == "inside":
        compiled.recompute(compiled.layers)
    for layer in layers_of(model):
        fully_shard(layer)
    fully_shard(model)
    if recompute == "around":
        checkpointed(model)
    for _ in range(2):
        found = update(model, batch(40))
        whole = {name: each.full_tensor() if name != "logits" else each for name, each in found.items()}
        assert distance(whole, expected) < REORDERED
    assert graphs() == 2
    assert not torch.equal(noisy_update(model, noise, 0.1, 7)["logits"], expected["logits"])
    assert noise.landed == 4 and graphs() == 3 and not compiled.failed


@pytest.fixture
def trainer_of(tiny_model_dir, tiny_tokenizer, tmp_path):
    return partial(TinyRuns(tiny_model_dir("qwen2"), tiny_tokenizer).trainer, tmp_path / "run")


def test_resume_is_bit_exact_with_kernels_of_inductor(trainer_of, tmp_path, capsys):
    options = {"compile_layers": True, "max_steps": 4, "save_steps": 2}
    options |= {"gradient_checkpointing": True, "aqn_sigma_start": 0.1, "aqn_scope": "policy"}
    whole = trainer_of(**options)
    whole.train()
    assert "torch.compile of 2 Qwen2DecoderLayer" in capsys.readouterr().out
    assert graphs() and not whole._compiled.failed and whole._compiled.forwards[0].function.recomputes
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    torch._dynamo.reset()
    resumed = trainer_of(**options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert_identical(adapter_of(resumed), adapter_of(whole))


def test_meaning_of_the_option(trainer_of):
    def compiled(**options) -> bool:
        callbacks = trainer_of(**options).callback_handler.callbacks
        return any(isinstance(callback, compiled_layers.WarmUp) for callback in callbacks)

    assert not compiled(), "on a CPU"
    assert compiled(compile_layers=True) and not compiled(compile_layers=False)
    with pytest.raises(ValueError, match="torch_compile=True compiles the whole model"):
        compiled(compile_layers=True, torch_compile=True)
