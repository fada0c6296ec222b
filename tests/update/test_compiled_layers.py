"""Regional compilation: the same values and gradients as eager, few graphs whatever the lengths, and nothing else changed.

Mostly with the backend "aot_eager", which traces and splits forward and backward as inductor does and generates no code.
"""

import copy
import logging
import pickle
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config
import torch.compiler.config
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from qerl_trl.model.lora import register_nvfp4_lora
from qerl_trl.noise.hooks import NoiseDraw, NormNoise
from qerl_trl.noise.norms import find_noisy_norms
from qerl_trl.nvfp4.linear import NVFP4Linear
from qerl_trl.update import compiled_layers as regional
from qerl_trl.update import layer_function, lora_linear
from qerl_trl.update.compiled_layers import compile_layers, warm_up
from tests import shapes
from tests.faults.tiny_runs import TinyRuns
from tests.ranks import on_ranks
from tests.tiny_models import FAMILIES, make_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def adapted(family: str = "qwen2", layers: int = 2, **config) -> nn.Module:
    """LoRA on two projections per layer, B not 0, in training mode."""
    torch.manual_seed(0)
    model = make_tiny_model(family, dtype=torch.float32, num_hidden_layers=layers)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    targets = [name for name in names if name.endswith(("o_proj", "down_proj"))]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **config)).train()


def layers_of(model: nn.Module) -> list[nn.Module]:
    return list(model.get_base_model().get_decoder().layers)


def batch(length: int, sequences: int = 2, padded: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(2, 300, (sequences, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def update(model: nn.Module, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(logits, gradients)"""
    model.zero_grad()
    logits = model(**given, use_cache=False).logits[:, 3:].float()
    logits.log_softmax(-1)[..., 7].mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected, rtol=1e-4, atol=1e-6) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=rtol, atol=1e-4)
    assert found[1].keys() == expected[1].keys() and found[1]
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            found[1][name], gradient, rtol=rtol, atol=atol + 1e-5 * gradient.abs().max(), msg=name
        )


def assert_near(found, expected) -> None:
    """In bfloat16, where sums of what was rounded in another order differ in single elements."""
    for one, other in ((found[0], expected[0]), *((found[1][name], expected[1][name]) for name in expected[1])):
        assert (one - other).float().norm() < 0.03 * other.float().norm()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_eager(family):
    model = adapted(family)
    expected = {length: update(model, batch(length)) for length in (40, 33)}
    compile_layers(model, backend="aot_eager")
    for length, wanted in expected.items():
        assert_same(update(model, batch(length)), wanted)
    assert graphs() and not counters["graph_break"]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_gated_delta_nets_stay_as_they_are_beside_attention_that_is_compiled(recompute):
    """Of their loop over chunks the compiler makes a graph of minutes, for each length another: on a GPU no step of Qwen3.5 began in time."""
    torch.manual_seed(0)
    config = shapes.tiny(shapes.NEWER["qwen3.5-9b"][0], vocab_size=512).get_text_config()
    assert config.layer_types == ["linear_attention", "full_attention"]
    plain = LoraConfig(r=4, target_modules=["o_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32), plain).train()
    expected = {length: update(model, batch(length)) for length in (96, 40)}
    compiled = compile_layers(model, backend="aot_eager")
    if recompute:
        compiled.recompute(compiled.layers)
        model.enable_input_require_grads()
    for length, wanted in expected.items():
        assert_same(update(model, batch(length)), wanted)
    assert graphs() == 2  # the layer of attention, and the norm after the layers
    assert not compiled.failed


def test_no_length_compiles_again():
    model = adapted(layers=3)
    compile_layers(model, backend="eager")
    for length in (40, 41, 64, 33, 57, 128):
        update(model, batch(length))
    update(model, batch(45, sequences=3))
    assert graphs() == 2  # the layers, and the norm after them


def test_a_forward_without_gradient_and_a_checkpointed_one_run_the_same_graph():
    model = adapted()
    given = batch(40)
    compiled = compile_layers(model, backend="aot_eager")
    expected = update(model, given)
    before = graphs()
    with torch.no_grad():
        found = model(**given, use_cache=False).logits[:, 3:]
    assert torch.equal(found, expected[0]) and not found.requires_grad
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(update(model, given), expected, rtol=0, atol=0)
    assert graphs() == before and not compiled.failed


def test_generation_and_evaluation_run_the_layers_as_they_are():
    model = adapted()
    prompt = torch.ones(2, 5, dtype=torch.long)
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    clean = model.eval()(**batch(40)).logits
    compile_layers(model, backend="aot_eager")
    assert torch.equal(model(**batch(40)).logits, clean)
    for mode in (False, True):
        assert torch.equal(model.train(mode).generate(prompt, max_new_tokens=6, do_sample=False), expected)
    assert not graphs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_noise_in_the_update_is_that_of_the_hooks(dtype):
    model = adapted().to(dtype)
    noise = NormNoise(find_noisy_norms(model))
    cpu = torch.device("cpu").type

    def under(draw: NoiseDraw, length: int):
        noise.set(draw)
        noise.in_training = True
        with torch.autocast(cpu, torch.bfloat16, enabled=dtype == torch.bfloat16):
            return update(model, batch(length))

    draws = [NoiseDraw(sigma, 0, step, 0) for step, sigma in enumerate((0.0, 0.1, 0.02, 0.1, 0.0))]
    expected = [under(draw, 33 + draw.step) for draw in draws]
    compile_layers(model, backend="aot_eager")
    for draw, wanted in zip(draws, expected, strict=True):
        found = under(draw, 33 + draw.step)
        (assert_same if dtype == torch.float32 else assert_near)(found, wanted)
        if draw.sigma:
            assert noise.landed == 4 and abs(noise.sigma_effective() - draw.sigma) < 0.2 * draw.sigma
    assert graphs() == 3  # the layers clean and noisy, and the norm after them, which feeds the head
    assert not torch.equal(expected[0][0], expected[1][0])


def test_hooks_that_do_nothing_change_no_bit():
    """sigma = 0, and a scope in which the update is clean: as if there were no noise."""
    model = adapted()
    compiled = compile_layers(model, backend="aot_eager")
    expected = update(model, batch(40))
    compiled.remove()
    noise = NormNoise(find_noisy_norms(model))
    compile_layers(model, backend="aot_eager")
    for draw, in_training in ((NoiseDraw(0.0, 0, 0, 0), True), (NoiseDraw(0.1, 0, 0, 0), False)):
        noise.set(draw)
        noise.in_training = in_training
        assert_same(update(model, batch(40)), expected, rtol=0, atol=0)


class _Branching(nn.Module):
    """What no compiler can make one graph of."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.sum().item() > -1e9 else x


def test_a_layer_that_does_not_compile_runs_as_it_is_and_says_so_once(caplog):
    model = adapted()
    for layer in layers_of(model):
        layer.mlp = _Branching(layer.mlp)
    expected = update(model, batch(40))
    compiled = compile_layers(model, backend="eager")
    with caplog.at_level(logging.WARNING, "qerl_trl"):
        for _ in range(2):
            assert_same(update(model, batch(40)), expected)
    assert compiled.failed
    (said,) = [record.getMessage() for record in caplog.records if record.name == layer_function.__name__]
    assert "Qwen2DecoderLayer runs in eager mode" in said and "it does not compile (" in said


def test_a_layer_of_too_many_graphs_runs_as_it_is(caplog, monkeypatch):
    """Here because each layer reads a number of its own."""
    monkeypatch.setattr(layer_function, "_MOST_GRAPHS", 2)
    model = adapted(layers=4)
    for index, layer in enumerate(layers_of(model)):
        layer.mlp.register_forward_hook(lambda module, args, output, scale=f"{index}": output * (1 + len(scale) * 0))
    expected = update(model, batch(40))
    compiled = compile_layers(model, backend="eager")
    with caplog.at_level(logging.WARNING, "qerl_trl"):
        assert_same(update(model, batch(40)), expected)
    assert compiled.failed and caplog.text.count("runs in eager mode") == 1
    assert torch._dynamo.config.recompile_limit != 2


def test_lengths_that_each_compile_anew_are_found_at_the_start(caplog):
    model, ones = adapted(), [1.0] * 100

    class Specialized(_Branching):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * ones[x.shape[1]]

    for layer in layers_of(model):
        layer.mlp = Specialized(layer.mlp)
    compiled = compile_layers(model, backend="eager")
    with caplog.at_level(logging.WARNING, "qerl_trl"):
        warm_up(compiled, model, 2, 64)
    assert compiled.failed and "compiled anew" in caplog.text


def test_the_warm_up_compiles_everything_and_leaves_no_trace():
    model = adapted()
    noise = NormNoise(find_noisy_norms(model))
    before = update(model, batch(40))[1]  # also gradients that must stay
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
    noise.set(NoiseDraw(0.1, 0, 0, 0))
    noise.in_training = True
    update(model, batch(41))
    assert graphs() == made


def test_copies_pickles_and_files_know_nothing_of_it(tmp_path):
    model = adapted()
    names = list(model.state_dict())
    compiled = compile_layers(model, backend="eager")
    assert list(model.state_dict()) == names
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for layer in layers_of(copied):
            assert layer.forward.__func__ is type(layer).forward and layer.forward.__self__ is layer
    model.save_pretrained(tmp_path)
    compiled.remove()
    assert not any("forward" in vars(layer) for layer in layers_of(model))


def test_torchs_settings_are_as_before():
    settings = [dict(config.get_config_copy()) for config in (torch._dynamo.config, torch._inductor.config)]
    sources = torch.compiler.config.dynamic_sources
    model = adapted(layers=1)
    compile_layers(model, backend="eager")
    update(model, batch(40))
    assert [dict(c.get_config_copy()) for c in (torch._dynamo.config, torch._inductor.config)] == settings
    assert torch.compiler.config.dynamic_sources == sources


@pytest.fixture
def one_process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_fsdp2(one_process_group):
    """Wrapped after it was compiled, as accelerate does; with checkpointing and noise."""
    model = adapted()
    expected = update(model, batch(40))
    noise = NormNoise(find_noisy_norms(model))
    compiled = compile_layers(model, backend="aot_eager")
    for layer in layers_of(model):
        fully_shard(layer)
    fully_shard(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for _ in range(2):
        logits, gradients = update(model, batch(40))
        assert_same((logits, {name: value.full_tensor() for name, value in gradients.items()}), expected)
    assert graphs() == 2
    noise.set(NoiseDraw(0.1, 0, 0, 0))
    noise.in_training = True
    assert not torch.equal(update(model, batch(40))[0], expected[0])
    assert noise.landed == 4 and graphs() == 3 and not compiled.failed


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "nvfp4"])
def test_lora_layers_with_their_own_backward(packed):
    torch.manual_seed(0)
    model = make_tiny_model("qwen2", dtype=torch.float32, num_hidden_layers=2)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    if packed:
        for layer in model.model.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, child in list(part.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(part, name, NVFP4Linear.from_linear(child))
        config = register_nvfp4_lora(config)
    model = get_peft_model(model, config).train()
    assert lora_linear.fuse(model)

    expected = {length: update(model, batch(length)) for length in (40, 33)}
    compiled = compile_layers(model, backend="aot_eager")
    for length, wanted in expected.items():
        assert_same(update(model, batch(length)), wanted)
    assert graphs() == 2 and not compiled.failed


def test_of_two_processes_one_compiles(tmp_path, monkeypatch):
    """Inductor's own code, on devices of the same name, with a cache that is empty before."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def work(rank: int):
        torch.set_num_threads(1)
        model = adapted(layers=1)
        warm_up(compile_layers(model), model, 2, 64)
        return counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"], graphs()

    # forward and backward of two graphs: the layer, and the norm after it
    assert sorted(outcome.answer for outcome in on_ranks(2, work, 300)) == [(0, 4, 2), (4, 0, 2)]


def test_without_our_kernels_nobody_waits(monkeypatch):
    monkeypatch.setitem(sys.modules, "qerl_nvfp4", None)  # its import fails
    monkeypatch.delitem(sys.modules, "qerl_nvfp4.turns", raising=False)
    model = adapted(layers=1)
    compiled = compile_layers(model, backend="eager")
    warm_up(compiled, model, 2, 64)
    assert graphs() == 2 and not compiled.failed


# ---------------------------------------------------------------------------------------------------------- the trainer


@pytest.fixture
def runs(tiny_model_dir, tiny_tokenizer):
    return TinyRuns(tiny_model_dir("qwen2"), tiny_tokenizer)


def adapter(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name}


def test_a_resumed_run_equals_the_uninterrupted_one(runs, tmp_path, capsys):
    """With inductor's own kernels, and noise in the rollouts."""
    options = {"compile_layers": True, "max_steps": 4, "save_steps": 2, "aqn_sigma_start": 0.1}
    whole = runs.trainer(tmp_path / "run", **options)
    whole.train()
    assert "torch.compile of 2 Qwen2DecoderLayer" in capsys.readouterr().out
    assert graphs()
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    torch._dynamo.reset()
    resumed = runs.trainer(tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint=True)
    found, expected = adapter(resumed), adapter(whole)
    assert resumed.state.global_step == 4 and found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def test_what_the_option_means(runs, tmp_path):
    def compiled(**options) -> bool:
        trainer = runs.trainer(tmp_path / str(len(list(tmp_path.iterdir()))), **options)
        return any(isinstance(callback, regional.WarmUp) for callback in trainer.callback_handler.callbacks)

    assert not compiled()  # on a CPU
    assert compiled(compile_layers=True) and not compiled(compile_layers=False)
    with pytest.raises(ValueError, match="torch_compile=True compiles the whole model"):
        compiled(compile_layers=True, torch_compile=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_that_gathers_within_layers_is_refused(stage):
    plugin = SimpleNamespace(zero_stage=stage)
    trainer = SimpleNamespace(
        args=SimpleNamespace(torch_compile=False, compile_layers=True, device=torch.device("cuda")),
        is_deepspeed_enabled=True,
        accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin), unwrap_model=lambda model: model),
        model=adapted(),
        add_callback=lambda callback: None,
    )
    if stage == 2:
        assert regional.reason_against(trainer) is None and regional.compile_for(trainer) is not None
        return
    assert "ZeRO-3" in regional.reason_against(trainer)
    with pytest.raises(ValueError, match="ZeRO-3 gathers weights inside of layers"):
        regional.compile_for(trainer)
