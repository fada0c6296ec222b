"""Layers that recompute within their backward function: gradients of eager mode, the memory of a checkpoint, and one product less."""

import logging
import shutil
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from qerl_trl.noise.hooks import NoiseDraw, NormNoise
from qerl_trl.noise.norms import find_noisy_norms
from qerl_trl.update import compiled_layers as regional
from qerl_trl.update import layer_function, lora_linear
from qerl_trl.update.compiled_layers import CompiledLayers, compile_layers
from tests.faults.tiny_runs import TinyRuns
from tests.tiny_models import FAMILIES
from tests.update.test_compiled import (  # noqa: F401  (two fixtures)
    _Branching,
    adapted,
    assert_same,
    batch,
    fresh,
    graphs,
    layers_of,
    one_process_group,
    update,
)
from tests.update.test_lora_linear import adapted as adapted_everywhere
from tests.update.test_recompute import with_kept_layers

pytestmark = pytest.mark.filterwarnings("ignore")


UNPADDED = batch(40, padded=False)


def recomputing(model: nn.Module, layers: int | None = None) -> CompiledLayers:
    """Compiled; the first `layers`, by default all, recompute inside."""
    compiled = compile_layers(model, backend="aot_eager")
    compiled.recompute(compiled.layers[:layers])
    return compiled


def around(model: nn.Module) -> None:
    """transformers' own checkpoints around the layers."""
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})


def products(model: nn.Module) -> int:
    """Matrix products of the base and of LoRA in an update."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        update(model, UNPADDED)
    return sum(event.count for event in trace.key_averages() if event.key in ("aten::mm", "aten::addmm"))


def kept_bytes(model: nn.Module, policy: nn.Module | None = None) -> int:
    """What a forward keeps for the backward pass, weights aside; of `policy`, where the model is inside one."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if policy is None:
            hidden = model.get_base_model().get_decoder()(**UNPADDED, use_cache=False).last_hidden_state
        else:
            hidden = policy(**UNPADDED, use_cache=False).logits
    assert hidden.requires_grad
    return sum(kept.values())


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == layer_function.__name__]


@pytest.mark.parametrize(("family", "base"), [*((family, "packed") for family in FAMILIES), ("qwen2", "dense")])
def test_gradients_are_those_of_eager(family, base, caplog):
    """LoRA on all linear layers, computed in groups as the trainer does, against PEFT's own in eager mode."""
    model = adapted_everywhere(family, base, layers=2 if family.startswith("gemma") else 1)  # Gemma's are of two kinds
    model.enable_input_require_grads()
    expected = update(model, batch(40))
    lora_linear.fuse(model)
    recomputing(model)
    assert_same(update(model, batch(40)), expected)
    assert not said(caplog) and not counters["graph_break"]


def test_the_last_product_is_not_computed_again_and_no_more_is_kept():
    model = adapted_everywhere()
    model.enable_input_require_grads()
    lora_linear.fuse(model)
    compiled = compile_layers(model, backend="aot_eager")
    everything_kept = kept_bytes(model)
    compiled.recompute(compiled.layers)
    for forward in compiled.forwards:  # a checkpoint around what is compiled, as after a failure
        forward.function.recomputes = False
    update(model, UNPADDED)
    by_checkpoint = products(model), kept_bytes(model)
    for forward in compiled.forwards:
        forward.function.recomputes = True
    update(model, UNPADDED)
    inside = products(model), kept_bytes(model)
    # of down_proj, in two layers: the base's product and that of B
    assert by_checkpoint[0] - inside[0] == 4
    rotary_tables = 2 * 40 * 32 * 4  # which all layers share, and a checkpoint keeps unseen by these hooks
    assert by_checkpoint[1] <= inside[1] <= by_checkpoint[1] + rotary_tables < everything_kept / 3


def test_a_checkpoint_around_the_layers_is_not_doubled():
    model = adapted()
    compiled = recomputing(model)
    around(model)
    update(model, UNPADDED)
    with_both = products(model)
    compiled.recompute([])
    assert products(model) == with_both and graphs() == 2  # of a layer that keeps, and of the norm after them


def test_one_graph_whatever_the_length_and_the_pass():
    model = adapted(layers=3)
    recomputing(model)
    for length in (40, 33):
        expected = update(model, batch(length))[0]
    with torch.no_grad():
        found = model(**batch(length), use_cache=False).logits[:, 3:]
    assert torch.equal(found, expected) and not found.requires_grad
    assert graphs() == 2  # of the layers and of the norm after them


def test_layers_of_both_kinds():
    """As where the plan lets the last layers keep their activations."""
    model = adapted(layers=3)
    model.enable_input_require_grads()
    expected = update(model, UNPADDED)
    compiled = recomputing(model, 2)
    assert_same(update(model, UNPADDED), expected)
    assert graphs() == 3  # both kinds of the layers, and the norm after them
    sizes = []
    for count in (2, 3):
        compiled.recompute(compiled.layers[:count])
        sizes.append(kept_bytes(model))
    assert sizes[1] < sizes[0]


def test_noise_is_that_of_the_hooks():
    model = adapted()
    noise = NormNoise(find_noisy_norms(model))

    def under(step: int):
        noise.set(NoiseDraw(0.1 * step, 0, step, 0))
        noise.in_training = True
        return update(model, batch(40))

    expected = [under(step) for step in (0, 1, 2)]
    recomputing(model)
    for step, wanted in enumerate(expected):
        assert_same(under(step), wanted)
    assert graphs() == 3 and not torch.equal(expected[0][0], expected[1][0])


def test_noise_that_stays_with_its_hooks_is_there_again_when_the_layer_is_recomputed():
    """A 16-bit norm without autocast: its layer runs in eager mode, with a checkpoint around it."""
    model = adapted().bfloat16()
    noise = NormNoise(find_noisy_norms(model))
    noise.set(NoiseDraw(0.1, 0, 0, 0))
    noise.in_training = True
    expected = update(model, UNPADDED)
    kept = kept_bytes(model)
    recomputing(model)
    found = update(model, UNPADDED)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())
    assert kept_bytes(model) < kept / 3


def test_a_layer_with_dropout_gets_a_checkpoint_around_it_and_says_so_once(caplog):
    """In the backward function the same operator would draw another mask."""
    model = adapted(layers=2, lora_dropout=0.5)
    model.enable_input_require_grads()
    reference = compile_layers(model, backend="aot_eager")
    torch.manual_seed(3)
    expected = update(model, UNPADDED)
    reference.remove()
    recomputing(model)
    with caplog.at_level(logging.WARNING, "qerl_trl"):
        for _ in range(2):
            torch.manual_seed(3)
            assert_same(update(model, UNPADDED), expected)
    (line,) = said(caplog)
    assert "recomputes its whole forward" in line and "it draws random numbers" in line


def test_a_layer_that_does_not_compile_has_a_checkpoint_around_it(caplog):
    model = adapted()
    for layer in layers_of(model):
        layer.mlp = _Branching(layer.mlp)
    expected, kept = update(model, UNPADDED), kept_bytes(model)
    compiled = recomputing(model)
    assert_same(update(model, UNPADDED), expected)
    assert compiled.failed and "runs in eager mode" in said(caplog)[-1]
    assert kept_bytes(model) < kept / 3


def test_fsdp2(one_process_group):  # noqa: F811  (a fixture)
    model = adapted()
    expected = update(model, UNPADDED)
    recomputing(model)
    for layer in layers_of(model):
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        logits, gradients = update(model, UNPADDED)
        assert_same((logits, {name: value.full_tensor() for name, value in gradients.items()}), expected)
    assert graphs() == 2


# ---------------------------------------------------------------------------------------------------------- the trainer


def test_a_trainers_layers_recompute_inside_and_resume_to_the_bit(
    tiny_model_dir, tiny_tokenizer, tmp_path, monkeypatch
):
    """With noise in the update."""
    monkeypatch.setattr(regional, "compile_layers", partial(compile_layers, backend="aot_eager"))
    runs = TinyRuns(tiny_model_dir("qwen2"), tiny_tokenizer)

    def trained(resume: bool):
        torch._dynamo.reset()
        trainer = runs.trainer(
            tmp_path / "run",
            gradient_checkpointing=True,
            compile_layers=True,
            max_steps=4,
            save_steps=2,
            aqn_sigma_start=0.1,
            aqn_scope="policy",
        )
        inside: list[bool] = []
        for forward in trainer._compiled.forwards:
            forward.module.register_forward_hook(lambda module, *_: inside.append(torch.is_grad_enabled()))
        trainer.train(resume_from_checkpoint=resume or None)
        assert [forward.recomputes for forward in trainer._compiled.forwards] == [True, True, False]
        assert inside.count(True) == 3 * (trainer.state.global_step - 2 * resume), "no layer's call is repeated"
        assert not trainer._compiled.failed and trainer._compiled.forwards[0].function.recomputes
        return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name}

    expected = trained(resume=False)
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    found = trained(resume=True)
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def test_the_plan_says_which_layers_of_a_trainer_recompute(tiny_model_dir, tiny_tokenizer, tmp_path):
    runs = TinyRuns(tiny_model_dir("qwen2"), tiny_tokenizer)

    def recomputes(checkpointing: bool | None, kept: int = 0) -> list[bool]:
        trainer = runs.trainer(
            tmp_path / f"{checkpointing}{kept}", gradient_checkpointing=checkpointing, compile_layers=True
        )
        if kept:
            with_kept_layers(trainer, kept)
        return [forward.recomputes for forward in trainer._compiled.forwards if not forward.is_norm]

    assert recomputes(True) == [True, True] and recomputes(False) == [False, False]
    assert [recomputes(None, kept) for kept in (0, 1, 2)] == [[True, True], [True, False], [False, False]]


def test_in_data_parallel_a_layer_is_one_graph_too(one_process_group, monkeypatch):  # noqa: F811
    """torch cuts what is compiled inside of DDP's forward where a bucket of gradients is full, and each part keeps activations of its own."""
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 64)
    kept = []
    for wrap in (lambda model: model, partial(DistributedDataParallel, bucket_cap_mb=1e-4)):
        torch._dynamo.reset()
        model = adapted()
        recomputing(model, layers=1)
        kept.append(kept_bytes(model, wrap(model)))
    assert kept[0] == kept[1]
