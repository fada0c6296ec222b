"""LoRA linears in groups against PEFT's own forward and backward, for packed and dense bases."""

import copy
import logging

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn

from qerl_nvfp4 import reference
from qerl_trl.model.lora import register_nvfp4_lora
from qerl_trl.nvfp4.format import quantize
from qerl_trl.nvfp4.linear import NVFP4Linear
from qerl_trl.update import lora_linear
from qerl_trl.update.compiled_layers import compile_layers
from qerl_trl.update.fused_lora import LoraGroup
from qerl_trl.update.lora_linear import FusedGroup, fuse, unfuse
from tests.tiny_models import FAMILIES, gathered
from tests.update.models import REORDERED, adapted, batch, checkpointed, distance, graphs, layers_of, randomize, update

BASES = ("packed", "dense")
TOKENS = batch(20, padded=False)


def groups(model: nn.Module) -> list[FusedGroup]:
    return list({id(m.fused_group): m.fused_group for m in model.modules() if hasattr(m, "fused_group")}.values())


def both(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(fused, PEFT's own) update of the same model."""
    fuse(model)
    found = update(model, TOKENS)
    unfuse(model)
    return found, update(model, TOKENS)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_peft(family, base):
    model = adapted(family, base)
    assert fuse(model) == sum(isinstance(module, LoraLayer) for module in model.modules())
    assert distance(*both(model)) < REORDERED
    if family == "qwen2":
        checkpointed(model)
        assert distance(*both(model)) < REORDERED


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("family", ["qwen2", "gemma3", "phi3"])
def test_rounds_no_more_often_than_peft(family, base):
    """Under bf16 autocast: as near to the same model in float32 as PEFT's own products."""
    model = adapted(family, base, torch.bfloat16)
    exact = copy.deepcopy(model).float()
    for module in exact.modules():
        if isinstance(module, NVFP4Linear):
            module.compute_dtype = torch.float32
    truth = update(exact, TOKENS)
    peft = update(model, TOKENS, autocast=True)
    fuse(model)
    found = update(model, TOKENS, autocast=True)
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in peft.items()}

    def error(result):
        return sum(((result[n] - t).double().norm() / t.double().norm()).item() ** 2 for n, t in truth.items()) ** 0.5

    assert error(found) < 1.1 * error(peft), (error(found), error(peft))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("base", [*BASES, "w4a8"])
def test_compiled_layers_share_one_graph_with_the_same_results(base, autocast):
    model = adapted("qwen2", base, torch.bfloat16 if autocast else torch.float32, layers=3)
    given = [batch(length) for length in (20, 37, 26)]
    expected = [update(model, each, autocast) for each in given]
    fuse(model)
    eager = [update(model, each, autocast) for each in given]
    compiled = compile_layers(model, backend="aot_eager")
    for each, peft, own in zip(given, expected, eager, strict=True):
        # both differ from PEFT by rounding
        bound = 2 * distance(own, peft) if autocast or base == "w4a8" else REORDERED
        assert distance(update(model, each, autocast), peft) < bound
    assert graphs() == 2 and not compiled.failed, "the layers, and the norm after them"
    assert all(group.x is None and not group.ready for group in groups(model)), "no output is left"


@pytest.mark.parametrize(
    ("targets", "sizes"),
    [("all-linear", [1, 1, 1, 1, 2, 2, 3, 3]), (["q_proj", "v_proj"], [2, 2]), (["k_proj", "up_proj"], [1, 1, 1, 1])],
)
def test_groups_are_layers_with_the_same_input(targets, sizes):
    model = adapted(target_modules=targets)
    assert fuse(model) == sum(sizes)
    assert sorted(len(group.members) for group in groups(model)) == sizes
    assert distance(*both(model)) < REORDERED


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("base", BASES)
def test_ranks_and_scalings_may_differ(base):
    """Within a group and between layers, eager and compiled."""
    scalings = {"layers.0.*v_proj": 7, "layers.1.*v_proj": 8, "layers.1.*down_proj": 2}
    ranks = {"k_proj": 3, "up_proj": 5}
    model = adapted(base=base, rank_pattern=ranks, alpha_pattern=scalings, use_rslora=True)
    found, expected = both(model)
    assert distance(found, expected) < REORDERED
    if base == "packed":
        fuse(model)
        compile_layers(model, backend="aot_eager")
        assert distance(update(model, TOKENS), expected) < REORDERED


def test_a_group_in_fp8_is_the_kernels_function_and_the_adapter():
    """Layers with global scales of their own; the rounding of x counts as the identity."""
    torch.manual_seed(0)
    tensors = [quantize(torch.randn(rows, 64) * size) for rows, size in ((32, 1.0), (16, 0.1))]
    shapes, bias = ((5, 64), (4, 64), (4, 64), (32, 4), (16, 4)), (torch.randn(32), None)
    x, *matrices = given = [torch.randn(shape).requires_grad_() for shape in shapes]
    packed, block_scale, scale = zip(*tensors, strict=True)
    ys = LoraGroup.apply(x, (1.5, 1.0), "auto", "w4a8", *matrices, *bias, *packed, *block_scale, *scale)
    dys = [torch.randn_like(y) for y in ys]
    found = [*ys, *torch.autograd.grad(ys, given, dys)]
    added = [s * (x @ a.t() @ b.t()) for s, a, b in zip((1.5, 1.0), matrices[:2], matrices[2:], strict=True)]
    dx, *others = torch.autograd.grad(added, given, dys)
    rows = torch.cat([each.expand(len(part)) for each, part in zip(scale, packed, strict=True)])
    weight = torch.cat(packed), torch.cat(block_scale), rows
    dx = dx + reference.linear_backward(torch.cat(dys, 1), *weight, "w4a8")
    base = [reference.linear(x, *each, p, compute="w4a8") for each, p in zip(tensors, bias, strict=True)]
    expected = [*(y + t for y, t in zip(base, added, strict=True)), dx, *others]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_the_adapters_gradient_in_fp8_is_that_of_16_bits():
    expected, found = (update(adapted(base=base), TOKENS) for base in ("packed", "w4a8"))
    assert 0.01 < distance(found, expected) < 0.2
    pairs = [(found[name].flatten(), expected[name].flatten()) for name in expected]
    assert min(nn.functional.cosine_similarity(*pair, 0) for pair in pairs) > 0.99


@pytest.mark.parametrize("base", BASES)
def test_switches_of_peft_work_at_any_time(base):
    model = adapted(base=base)
    fuse(model)
    plain = update(model, TOKENS)["logits"]
    with model.disable_adapter(), torch.no_grad():
        without = model(**TOKENS).logits
        unfuse(model)
        assert torch.equal(without, model(**TOKENS).logits)
        fuse(model)
    assert torch.equal(update(model, TOKENS)["logits"], plain)
    model.merge_adapter()
    merged = model(**TOKENS).logits.detach()
    assert torch.allclose(merged[:, 3:], plain, rtol=1e-4, atol=1e-4) and not torch.equal(merged, without)
    model.unmerge_adapter()
    assert torch.allclose(update(model, TOKENS)["logits"], plain, rtol=1e-5, atol=1e-5)


def test_a_second_adapter(caplog):
    caplog.set_level(logging.INFO)
    model = adapted()
    model.add_adapter("other", register_nvfp4_lora(LoraConfig(r=4, target_modules=["q_proj", "up_proj"])))
    randomize(model, seed=2)
    fuse(model)
    first = update(model, TOKENS)
    model.set_adapter("other")
    assert update(model, TOKENS).keys() != first.keys()
    assert distance(*both(model)) < REORDERED
    model.base_model.set_adapter(["default", "other"])
    assert distance(*both(model)) == 0, "PEFT's own forward runs"
    fuse(model)
    assert "14 of 14 LoRA layers keep" in caplog.text and "several active adapters" in caplog.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "Dora"),
        ({"lora_dropout": 0.5}, "lora_dropout"),
        ({"lora_bias": True, "family": "phi3"}, "biases that are trained"),
    ],
    ids=["dora", "dropout", "bias"],
)
def test_other_adapters_run_pefts_forward_with_one_message(options, reason, caplog):
    model = adapted(base="dense", **options)
    with caplog.at_level(logging.INFO):
        assert fuse(model) == 0
    layers = sum(isinstance(module, LoraLayer) for module in model.modules())
    assert f"{layers} of {layers} LoRA layers keep PEFT's own" in caplog.text and reason in caplog.text
    results = []
    for change in (fuse, unfuse):
        change(model)
        torch.manual_seed(0)
        results.append(update(model, TOKENS))
    assert distance(*results) == 0


@pytest.mark.parametrize("change", ["weights", "input", "scale", "gradients"])
def test_a_cached_output_is_never_stale(change):
    model = adapted()
    fuse(model)
    attention, x = layers_of(model)[0].self_attn, torch.randn(2, 5, 128)
    with torch.set_grad_enabled(change != "gradients"):
        attention.q_proj(x)
    if change == "weights":
        randomize(model, seed=3)
    elif change == "input":
        x.mul_(2)
    elif change == "scale":
        attention.k_proj.set_scale("default", 5.0)
    found = attention.k_proj(x)
    unfuse(model)
    torch.testing.assert_close(found, attention.k_proj(x), rtol=1e-5, atol=1e-5)
    assert found.requires_grad


def test_bytes_gathered_as_floats_are_the_same_bytes():
    """FSDP 2 of torch 2.11 casts the packed weights too, to the dtype of mixed precision."""
    model, results = adapted(dtype=torch.bfloat16, layers=1), []
    for whole_numbers in (False, True):
        twin = gathered(model, torch.bfloat16, whole_numbers=whole_numbers)
        assert fuse(twin) == 7
        results.append(update(twin, TOKENS, autocast=True))
    assert distance(*results) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("tokens", [20, 200], ids=["few", "many"])
@pytest.mark.parametrize("base", BASES)
def test_on_the_gpu_as_on_the_cpu(base, tokens, backend):
    """The decoding kernel writes next to room for the adapter; few tokens run PEFT's forward on other kernels."""
    given = batch(tokens, padded=False)
    model = adapted("qwen2", base, torch.bfloat16)
    truth = update(model.float() if base == "dense" else model, given)
    model = adapted("qwen2", base, torch.bfloat16).to("cuda")
    peft = update(model, given, autocast=True)
    fuse(model)
    if backend:
        torch.compiler.reset()
        compile_layers(model, backend=backend)
    results = [{name: tensor.cpu() for name, tensor in each.items()} for each in (update(model, given, True), peft)]
    assert distance(results[0], truth) < 2 * distance(results[1], truth)


@pytest.mark.parametrize("switch", [True, False])
def test_meaning_of_the_option(make, switch):
    modules = make(base_format="nvfp4", padding_free=False, fused_lora=switch).model.modules()
    assert sum(isinstance(module, lora_linear._Fused) for module in modules) == 14 * switch
