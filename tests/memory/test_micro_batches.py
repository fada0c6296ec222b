import dataclasses
import json
from pathlib import Path

import pytest

from qerl_trl.memory import micro_batches
from qerl_trl.memory.formulas import shape_of
from qerl_trl.memory.micro_batches import RECOMPUTATION, advice, computed
from qerl_trl.memory.plan import Gpu, plan_run
from qerl_trl.memory.workload import Workload, on_a_gpu
from tests.shapes import SEVEN_B

WORK = Workload(
    batch=64, prompt_length=256, completion_length=512, completions=64, gradient_checkpointing=None, generations=8,
    rollout="colocate", **on_a_gpu("nvfp4"),
)  # fmt: skip


@pytest.fixture(scope="module")
def shape():
    return shape_of(SEVEN_B)


def test_what_recomputing_adds_is_what_was_measured():
    results = Path(__file__).parents[2] / "examples/benchmarks/results/update_speed_h200.json"
    seconds = json.loads(results.read_text())["cases"]["nvfp4-compiled-fused"]["seconds"]
    assert seconds["checkpointed"] / seconds["plain"] - 1 == pytest.approx(RECOMPUTATION, rel=0.05)


def test_the_settings_that_are_named_recompute_less_in_the_same_memory(shape):
    gpu = Gpu.of_gib(40)
    plan = plan_run(shape, WORK, gpu)
    assert 0 < plan.work.kept_layers < shape.layers
    said = advice(shape, plan)
    assert said.startswith("per_device_train_batch_size: 8 (gradient_accumulation_steps: 8) would recompute no layer")
    made = plan_run(shape, dataclasses.replace(WORK, batch=8, accumulation=8), gpu)
    assert made.work.kept_layers == shape.layers and made.fits and made.waves == plan.waves
    assert computed(shape, made) < 0.8 * computed(shape, plan)
    assert advice(shape, made) is None


@pytest.mark.parametrize(
    "change",
    [{"gradient_checkpointing": True}, {"packed": False}, {"completion_length": 8192, "batch": 1}],
    ids=["recomputation is set", "padded", "one sequence"],
)
def test_nothing_is_said_where_it_would_not_help(shape, change):
    assert advice(shape, plan_run(shape, dataclasses.replace(WORK, **change), Gpu.of_gib(48))) is None


def test_short_passes_are_not_proposed(shape, monkeypatch):
    work = dataclasses.replace(WORK, batch=8, completions=8, prompt_length=16, completion_length=384)
    plan = plan_run(shape, work, Gpu.of_gib(16))
    assert advice(shape, plan) is None
    monkeypatch.setattr(micro_batches, "_FEWEST_TOKENS", 1)
    assert "per_device_train_batch_size: 2" in advice(shape, plan)
