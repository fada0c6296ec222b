"""The plan of a trainer, and the number of layers that recompute by it, with the same result."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import HfArgumentParser

from qerl_trl import QeRLConfig
from qerl_trl.memory.formulas import DEEPSPEED_BYTES, model_bytes, shape_of
from qerl_trl.memory.of_trainer import Recomputation, plan_trainer
from qerl_trl.memory.plan import Gpu, plan_run
from qerl_trl.memory.workload import Workload
from qerl_trl.run.banner import banner
from qerl_trl.update.layer_function import decoder_layers
from tests.faults.tiny_runs import logged
from tests.update.models import adapter_of, assert_identical


def with_kept_layers(trainer, count):
    """As if the GPU had room for so many."""
    plan = trainer.memory_plan
    trainer.memory_plan = dataclasses.replace(plan, work=dataclasses.replace(plan.work, kept_layers=count))
    Recomputation(trainer).prepare()
    return trainer


def forwards_in_updates(trainer) -> list[int]:
    """Number of the layer, for each of its forwards in an update."""
    calls = []
    for number, layer in enumerate(decoder_layers(trainer.model)):
        layer.self_attn.register_forward_pre_hook(
            lambda *_, number=number: calls.append(number) if torch.is_grad_enabled() else None
        )
    return calls


def test_a_trainer_plans_with_its_own_data_and_counts_its_own_model(make_trainer):
    prompts = Dataset.from_dict({"prompt": ["a", "a prompt of some length", "b"]})
    trainer = make_trainer(dataset=prompts, gradient_accumulation_steps=2, gradient_checkpointing=None)
    made = trainer.memory_plan
    assert made is plan_trainer(trainer)
    lengths = {"batch": 4, "prompt_length": 23, "completion_length": 4, "completions": 8, "accumulation": 2}
    work = Workload(**lengths, lora_rank=4, dtype_bytes=4, gradient_checkpointing=None, generations=4, fused=True)
    assert made.work == work.on_a_cpu()
    counted = model_bytes(trainer.model)
    sizes = {part.name: part.update for part in made.parts}
    assert sizes["frozen base, nvfp4"] == counted.base and sizes["adapter, rank 4"] == counted.trained
    assert made.gpu == Gpu.of_machine() and made.max_model_len == 64
    assert "planned peak" in banner(trainer) and "4 per prompt" in banner(trainer)


def test_a_plan_that_does_not_fit_is_a_warning_on_a_gpu(make_trainer, caplog):
    trainer = make_trainer()
    trainer.memory_plan = None
    made = plan_trainer(trainer, Gpu(10**8))
    assert "does not fit into 0.1 GiB" in caplog.text and trainer.memory_plan is made


def test_a_run_beyond_the_machines_memory_is_refused_on_a_cpu(make_trainer, monkeypatch):
    machine = Gpu.of_machine(0.5)
    monkeypatch.setattr(Gpu, "of_machine", lambda: machine)
    reason = r"memory, GiB.*(?s:.*)It does not fit into 0\.5 GiB.*machine with more memory"
    with pytest.raises(RuntimeError, match=reason):
        make_trainer()


def test_kept_layers_deepspeed_and_further_models_are_planned(make_trainer):
    trainer = make_trainer(gradient_checkpointing=None)
    assert trainer.memory_plan.work.gradient_checkpointing and trainer.memory_plan.work.kept_layers == 0, "on a CPU"

    def planned(gpu=None, **changes):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {"memory_plan": None, **changes}.items():
                patch.setattr(trainer, name, value)
            return plan_trainer(trainer, gpu or Gpu.of_gib(80))

    made = planned()
    assert made.work.kept_layers == 2
    assert planned(is_fsdp_enabled=True).work.kept_layers == planned(is_deepspeed_enabled=True).work.kept_layers == 0
    # the GPU has the model only, and with both layers kept the update just fits; a reward model is still to come
    counted = sum(part.update for part in made.parts if part.name.startswith(("frozen base", "adapter")))
    total = round(made.update / 0.9) + 2**20
    gpu = Gpu(total, made.gpu.outside, total - made.gpu.outside - counted)
    reward = torch.nn.Linear(1024, 1024).to("meta")
    assert planned(gpu).work.kept_layers == 2 > planned(gpu, reward_funcs=[reward]).work.kept_layers
    trainer.args.gradient_checkpointing, trainer.args.recompute_as_needed = True, False
    assert planned(is_deepspeed_enabled=True).peak - planned().peak == DEEPSPEED_BYTES


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_the_last_layers_keep_their_activations_with_the_same_result(make_trainer, kept):
    """With 3 of 2 layers to keep, none is. TRL switches checkpointing off and on for the noise's scoring pass."""
    options = {"aqn_schedule": "constant", "aqn_sigma_start": 0.1}
    all_recomputed = make_trainer(gradient_checkpointing=True, **options)
    all_recomputed.train()
    trainer = with_kept_layers(make_trainer(gradient_checkpointing=None, **options), kept)
    calls = forwards_in_updates(trainer)
    trainer.train()
    assert [calls.count(layer) for layer in (0, 1)] == {0: [4, 4], 1: [4, 2], 2: [2, 2], 3: [4, 4]}[kept]
    assert_identical(adapter_of(trainer), adapter_of(all_recomputed))
    assert logged(trainer, "loss") == logged(all_recomputed, "loss")


@pytest.mark.parametrize(
    ("given", "kept", "recomputed"),
    [(True, 0, [True, True]), (False, 0, [False, False]), (None, 1, [True, False]), (None, 2, [False, False])],
)
def test_compiled_layers_recompute_inside_by_the_plan(make_trainer, given, kept, recomputed):
    trainer = make_trainer(gradient_checkpointing=given, compile_layers=True)
    if kept:
        with_kept_layers(trainer, kept)
    assert [forward.recomputes for forward in trainer._compiled.forwards if not forward.is_norm] == recomputed


def test_padded_and_eager_updates_are_planned_again(make_trainer):
    """The GPU has room for both layers of packed and compiled updates only."""
    trainer = make_trainer(gradient_checkpointing=None, per_device_train_batch_size=8, max_completion_length=24)
    shape, counted = shape_of(trainer.model.config), model_bytes(trainer.model)
    on_gpu = dataclasses.replace(trainer.memory_plan.work, cpu=False, gradient_checkpointing=None)
    work = dataclasses.replace(on_gpu, packed=True, compiled=True)
    most = plan_run(shape, dataclasses.replace(work, kept_layers=2), None, counted).update
    trainer.memory_plan = plan_run(shape, work, Gpu(round(most / 0.9) + 2**12), counted)
    assert trainer.memory_plan.work.kept_layers == 2
    trainer._compiled = SimpleNamespace(failed=False, layers=[], recompute=lambda layers: None)
    trainer._packing.on = True
    Recomputation(trainer).prepare()
    assert trainer.memory_plan.work.packed
    trainer._packing.on, trainer._compiled.failed = False, True
    calls = forwards_in_updates(trainer)
    trainer.train()
    work = trainer.memory_plan.work
    assert not work.packed and not work.compiled and work.kept_layers < 2
    assert [calls.count(layer) for layer in (0, 1)] == [2 if layer >= 2 - work.kept_layers else 4 for layer in (0, 1)]


@pytest.mark.parametrize("value", [None, True, False])
@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_the_setting_has_three_values(tmp_path, name, value):
    if name not in QeRLConfig.__dataclass_fields__:
        pytest.skip(f"this transformers has no {name}")
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    words += [] if value is None else [f"--{name}={value}"]
    (args,) = HfArgumentParser(QeRLConfig).parse_args_into_dataclasses(words)
    saved = {key: setting for key, setting in args.to_dict().items() if key.endswith("_checkpointing")}
    for made in (args, QeRLConfig(str(tmp_path), use_cpu=True, bf16=False, **saved)):
        assert (made.gradient_checkpointing, made.recompute_as_needed) == (value is not False, value is None)
        assert made.to_dict()[name] is value
