"""Noise on the norms of a live model: exact values, exact restoration, gradients, wrappers."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard

from qerl_trl.noise.generator import standard_noise
from qerl_trl.noise.hooks import NoiseDraw, NormNoise
from qerl_trl.noise.norms import find_noisy_norms
from tests.tiny_models import FAMILIES, make_tiny_model

DRAW = NoiseDraw(sigma=0.05, seed=1, step=2, generation=3)
IDS = torch.arange(2, 34).reshape(2, 16)


@pytest.fixture
def noisy():
    """`noisy(model, draw)`: the noise on a model, removed after the test."""
    made = []

    def make(model, draw=DRAW):
        noise = NormNoise(find_noisy_norms(model))
        made.append(noise)
        noise.set(draw)
        return noise

    yield make
    for noise in made:
        noise.remove()


@torch.no_grad()
def written(model: nn.Module, draw: NoiseDraw = DRAW) -> nn.Module:
    """Reference: a copy of the model with the noise written into its norm weights."""
    model = copy.deepcopy(model)
    for name, norm in find_noisy_norms(model).items():
        unit = standard_noise(draw.seed, draw.step, draw.generation, name, norm.weight.numel())
        norm.weight.add_(unit * draw.sigma)
    return model


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_noise_written_into_the_weights(family, noisy):
    model = make_tiny_model(family, dtype=torch.float32)
    clean, expected = logits(model), logits(written(model))
    noise = noisy(model)
    with noise.active():
        assert torch.equal(logits(model), expected)
    assert (expected - clean).abs().max() > 1e-2  # or the line above would compare nothing
    assert torch.equal(logits(model), clean)


@pytest.mark.parametrize(("family", "sigma"), [("qwen2", 1e-2), ("qwen2", 5e-4), ("qwen2", 1e-4), ("gemma2", 5e-4)])
def test_sigma_effective_equals_sigma_in_bf16(family, sigma, noisy):
    """A noisy bf16 weight near 1 would have a twentieth of 5e-4."""
    model = make_tiny_model(family, dtype=torch.bfloat16)
    noise = noisy(model, NoiseDraw(sigma, 1, 2, 3))
    assert noise.sigma_effective() is None
    with noise.active():
        assert logits(model).dtype == torch.bfloat16
    assert noise.landed == 4
    drawn = torch.cat([standard_noise(1, 2, 3, name, 128) for name in noise.norms]).square().mean().sqrt().item()
    assert noise.sigma_effective() == pytest.approx(drawn * sigma, rel=1e-3)
    assert noise.sigma_effective() == pytest.approx(sigma, rel=5 / math.sqrt(2 * 4 * 128))


def test_relative_noise_is_the_absolute_one_times_a_scale_per_norm(noisy):
    model = make_tiny_model("qwen2", dtype=torch.bfloat16)
    names = list(find_noisy_norms(model))
    scales = dict(zip(names, (0.02, 0.3, 2.5, 40.0), strict=True))
    noise = noisy(model, DRAW._replace(scales=scales))
    with noise.active():
        logits(model)
    for name, scale in scales.items():
        unit = standard_noise(1, 2, 3, name, 128)
        assert torch.equal(noise._noise[name], unit * 0.05 * torch.tensor(scale))
        assert torch.equal(DRAW.noise([name], [128], unit.device), unit * 0.05)
    assert noise.sigma_effective() == pytest.approx(0.05, rel=5 / math.sqrt(2 * 4 * 128))


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_a_bf16_norm_computes_with_the_fp32_weight(family, noisy):
    model = make_tiny_model(family, dtype=torch.bfloat16)
    noise = noisy(model, NoiseDraw(5e-4, 1, 2, 3))
    name, norm = next(iter(noise.norms.items()))
    hidden = torch.randn(3, 128).bfloat16()
    with noise.active(), torch.no_grad():
        out = norm(hidden)
    weight = norm.weight.detach().float() + standard_noise(1, 2, 3, name, 128) * 5e-4
    x = hidden.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    expected = x.bfloat16() * weight if family == "qwen2" else x * (1 + weight)
    assert torch.equal(out, expected.bfloat16())
    assert not torch.equal(out, norm(hidden))


@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm], ids=["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_norms_of_torch(kind, dtype):
    torch.manual_seed(0)
    norm = kind(256).to(dtype)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_(1.0, 0.1)
    hidden = torch.randn(4, 256, dtype=dtype)
    noise = NormNoise({"norm": norm})
    noise.set(NoiseDraw(1e-3, 0, 0, 0))
    with noise.active(), torch.no_grad():
        out = norm(hidden)
    reference = copy.deepcopy(norm).float()
    with torch.no_grad():
        reference.weight.add_(standard_noise(0, 0, 0, "norm", 256) * 1e-3)
        expected = reference(hidden.float()).to(dtype)
    assert out.dtype == dtype and torch.equal(out, expected)
    assert noise.sigma_effective() == pytest.approx(1e-3, rel=0.2)
    assert {parameter.dtype for parameter in norm.parameters()} == {dtype}
    noise.remove()


def test_state_dict_is_clean_while_active(noisy):
    model = make_tiny_model("qwen2")
    before = copy.deepcopy(model.state_dict())
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    inside = []

    def look(module, args):  # in the middle of the layer, after a noisy norm
        inside.append({name: value.clone() for name, value in model.state_dict().items()})

    handle = model.get_submodule("model.layers.1.mlp").register_forward_pre_hook(look)
    with noisy(model).active():
        logits(model)
    handle.remove()
    for state in (*inside, model.state_dict()):
        assert list(state) == list(before)
        assert all(torch.equal(state[name], before[name]) for name in before)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == identities


def test_two_noises_on_one_norm_are_refused_until_one_is_removed():
    model = make_tiny_model("qwen2")
    noise = NormNoise(find_noisy_norms(model))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.input_layernorm.*already carries"):
        NormNoise(find_noisy_norms(model))
    noise.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    NormNoise(find_noisy_norms(model)).remove()


def adapted(trained_norms: bool) -> nn.Module:
    """LoRA on every linear layer with B != 0, in training mode, norms trainable if asked."""
    torch.manual_seed(0)
    model = make_tiny_model("qwen2", dtype=torch.float32)
    saved = ["input_layernorm", "post_attention_layernorm"] if trained_norms else None
    config = LoraConfig(r=4, target_modules="all-linear", modules_to_save=saved, init_lora_weights=False)
    return get_peft_model(model, config).train()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("trained_norms", [False, True], ids=["frozen-norms", "trained-norms"])
def test_gradients_are_those_of_the_noisy_model(trained_norms, checkpointing, noisy):
    model = adapted(trained_norms)
    expected = gradients(written(model))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    noise = noisy(model)
    noise.in_training = True
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert any("layernorm" in name for name in found) == trained_norms
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7, msg=name)
    assert noise.landed == 4


def test_a_trained_norm_sees_its_own_updates(noisy):
    model = adapted(trained_norms=True)
    noise = noisy(model)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    with noise.active():
        logits(model)
        gradients(model)
        optimizer.step()
        assert torch.equal(logits(model), logits(written(model)))


@pytest.fixture
def one_process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("sharded_norms", [False, True], ids=["layer", "norm-itself"])
@pytest.mark.parametrize("hooks", ["before", "after"])
def test_fsdp2(hooks, sharded_norms, one_process_group, noisy):
    model = make_tiny_model("qwen2", dtype=torch.float32).train()
    expected = gradients(written(model))
    clean = logits(copy.deepcopy(model))
    noise = noisy(model) if hooks == "before" else None
    for layer in model.model.layers:
        if sharded_norms:
            fully_shard(layer.input_layernorm)
        fully_shard(layer)
    fully_shard(model)
    noise = noise or noisy(model)
    noise.in_training = True
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name].full_tensor(), expected[name], rtol=1e-4, atol=1e-6, msg=name)
    noise.in_training = False
    assert torch.equal(logits(model), clean)
