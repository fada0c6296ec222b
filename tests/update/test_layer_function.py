"""Layers that recompute in their backward function: eager gradients, a checkpoint's memory, one product less."""

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from qerl_trl.noise.hooks import NoiseDraw, NormNoise
from qerl_trl.noise.norms import find_noisy_norms
from qerl_trl.update import layer_function, lora_linear
from qerl_trl.update.compiled_layers import CompiledLayers, compile_layers
from tests.update.models import (
    REORDERED,
    Branching,
    adapted,
    batch,
    checkpointed,
    distance,
    graphs,
    layers_of,
    saved_bytes,
    small,
    update,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_compiler")]

UNPADDED = batch(40, padded=False)


def recomputing(model: nn.Module, layers: int | None = None) -> CompiledLayers:
    """Compiled; the first `layers`, by default all, recompute inside."""
    compiled = compile_layers(model, backend="aot_eager")
    compiled.recompute(compiled.layers[:layers])
    return compiled


def products(model: nn.Module) -> int:
    """Matrix products of the base and of LoRA in an update."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        update(model, UNPADDED)
    return sum(event.count for event in trace.key_averages() if event.key in ("aten::mm", "aten::addmm"))


def kept_bytes(model: nn.Module) -> int:
    """Bytes kept by the layers and the norm after them."""
    return saved_bytes(model, lambda: model.get_base_model().get_decoder()(**UNPADDED, use_cache=False))


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == layer_function.__name__]


@pytest.mark.parametrize(
    ("family", "base"),
    [("qwen2", "packed"), ("qwen3", "packed"), ("gemma3", "packed"), ("phi3", "packed"), ("qwen2", "dense")],
)
def test_gradients_are_those_of_eager(family, base, caplog):
    """LoRA on all linear layers, computed in groups as the trainer does, against PEFT's own in eager mode."""
    model = adapted(family, base, layers=2 if family.startswith("gemma") else 1)  # Gemma's are of two kinds
    model.enable_input_require_grads()
    expected = update(model, batch(40))
    lora_linear.fuse(model)
    recomputing(model)
    assert distance(update(model, batch(40)), expected) < REORDERED
    assert not warnings_of(caplog) and not counters["graph_break"]


def test_transformers_checkpoints_are_not_doubled():
    model = small()
    compiled = recomputing(model)
    checkpointed(model)
    update(model, UNPADDED)
    with_both = products(model)
    compiled.recompute([])
    assert products(model) == with_both and graphs() == 2, "a layer that keeps, and the norm after them"


@pytest.mark.parametrize("kind", ["16-bit norms", "branch"])
def test_an_eager_layer_has_a_checkpoint_around_it(kind, caplog):
    """16-bit norms without autocast keep the noise's hooks, which act again in the recomputation."""
    model = small(dtype=torch.bfloat16 if kind == "16-bit norms" else torch.float32)
    if kind == "16-bit norms":
        model = model.bfloat16()
        noise = NormNoise(find_noisy_norms(model))
        noise.set(NoiseDraw(0.1, 0, 0, 0))
        noise.in_training = True
    else:
        for layer in layers_of(model):
            layer.mlp = Branching(layer.mlp)
    expected, kept = update(model, UNPADDED), kept_bytes(model)
    compiled = recomputing(model)
    assert distance(update(model, UNPADDED), expected) == 0
    assert kept_bytes(model) < kept / 3
    assert compiled.failed is (kind == "branch")
    assert not compiled.failed or "runs in eager mode" in warnings_of(caplog)[-1]


def test_a_layer_with_dropout_has_a_checkpoint_around_it(caplog):
    """In the backward function the same operator would draw another mask."""
    model = small(lora_dropout=0.5)
    model.enable_input_require_grads()
    kept = compile_layers(model, backend="aot_eager")
    torch.manual_seed(3)
    expected = update(model, UNPADDED)
    kept.remove()
    recomputing(model)
    with caplog.at_level(logging.WARNING, "qerl_trl"):
        for _ in range(2):
            torch.manual_seed(3)
            assert distance(update(model, UNPADDED), expected) < REORDERED
    (message,) = warnings_of(caplog)
    assert "recomputes its whole forward" in message and "it draws random numbers" in message


def test_in_data_parallel_a_layer_is_one_graph_too(one_process_group, monkeypatch):
    """torch would cut layers compiled inside of DDP's forward at full gradient buckets, which keeps more."""
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 64)
    kept = []
    for wrap in (lambda model: model, partial(DistributedDataParallel, bucket_cap_mb=1e-4)):
        torch._dynamo.reset()
        model = small()
        recomputing(model, layers=1)
        policy = wrap(model)
        kept.append(saved_bytes(model, lambda policy=policy: policy(**UNPADDED, use_cache=False)))
    assert kept[0] == kept[1]
