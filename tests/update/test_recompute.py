"""How many layers recompute: as many as the plan says, with the same result."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from qerl_trl import QeRLConfig
from qerl_trl.checkpoint import settings as identity
from qerl_trl.memory.formulas import DEEPSPEED_BYTES, model_bytes, shape_of
from qerl_trl.memory.of_trainer import Recomputation, plan_trainer
from qerl_trl.memory.plan import Gpu, plan_run
from qerl_trl.update.layer_function import decoder_layers
from tests.trainers import adapter_of, assert_identical, logged, settings


def with_kept_layers(trainer, count):
    """As if the GPU had room for so many."""
    plan = trainer.memory_plan
    trainer.memory_plan = dataclasses.replace(plan, work=dataclasses.replace(plan.work, kept_layers=count))
    Recomputation(trainer).prepare()
    return trainer


def forwards_of_layers(trainer) -> list[tuple[int, bool]]:
    """(layer, whether of an update) of each time that a decoder layer is computed."""
    calls = []
    for number, layer in enumerate(decoder_layers(trainer.model)):
        layer.self_attn.register_forward_pre_hook(
            lambda *_, number=number: calls.append((number, torch.is_grad_enabled()))
        )
    return calls


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_the_last_layers_keep_their_activations_and_nothing_else_changes(make_trainer, kept):
    # noise makes TRL's own switching on and off around a scoring pass part of it
    options = {"aqn_schedule": "constant", "aqn_sigma_start": 0.1, "max_steps": 2}
    all_recomputed = make_trainer(gradient_checkpointing=True, **options)
    all_recomputed.train()
    trainer = with_kept_layers(make_trainer(gradient_checkpointing=None, **options), kept)
    calls = forwards_of_layers(trainer)
    trainer.train()
    of_updates = [number for number, update in calls if update]
    assert [of_updates.count(layer) for layer in (0, 1)] == [2 if layer >= 2 - kept else 4 for layer in (0, 1)]
    assert_identical(adapter_of(trainer), adapter_of(all_recomputed))
    assert logged(trainer, "loss") == logged(all_recomputed, "loss")


@pytest.mark.parametrize(("given", "computed"), [(True, 4), (False, 2)])
def test_what_is_asked_for_is_done(make_trainer, given, computed):
    trainer = make_trainer(gradient_checkpointing=given)
    assert trainer.memory_plan.work.gradient_checkpointing is given
    calls = forwards_of_layers(trainer)
    trainer.train()
    assert [number for number, update in calls if update].count(0) == computed


def test_a_trainer_plans_how_many(make_trainer):
    trainer = make_trainer(gradient_checkpointing=None)
    assert trainer.memory_plan.work.gradient_checkpointing and trainer.memory_plan.work.kept_layers == 0  # on a CPU
    for name, kept in ((None, 2), ("is_fsdp_enabled", 0), ("is_deepspeed_enabled", 0)):
        if name:
            setattr(trainer, name, True)
        trainer.memory_plan = None
        assert plan_trainer(trainer, Gpu.of_gib(80)).work.kept_layers == kept
        if name:
            setattr(trainer, name, False)


def test_what_deepspeed_takes_beside_is_planned(make_trainer):
    """Measured on two H200s (`ours-zero2`): a plan without it was 12 % short."""
    trainer, taken = make_trainer(gradient_checkpointing=True), []
    for under in (False, True):
        trainer.memory_plan, trainer.is_deepspeed_enabled = None, under
        taken.append(plan_trainer(trainer, Gpu.of_gib(80)).peak)
    trainer.is_deepspeed_enabled = False
    assert taken[1] - taken[0] == DEEPSPEED_BYTES


def test_models_that_are_not_on_the_gpu_yet_have_their_room(make_trainer):
    trainer = make_trainer(gradient_checkpointing=None)
    reward = torch.nn.Linear(1024, 1024)  # on its way to another device
    kept = []
    for models in ([], [reward.to("meta")]):
        trainer.memory_plan, trainer.reward_funcs = None, [lambda **_: [0.0], *models]
        plan = trainer.memory_plan = plan_trainer(trainer, Gpu.of_gib(80))
        counted = sum(part.update for part in plan.parts if part.name.startswith(("frozen base", "adapter")))
        # nothing but the model is in memory, and with both layers kept the update just fits
        total = round(plan.update / 0.9) + 2**20
        trainer.memory_plan = None
        gpu = Gpu(total, plan.gpu.outside, total - plan.gpu.outside - counted)
        kept.append(plan_trainer(trainer, gpu).work.kept_layers)
    assert kept[0] == 2 and kept[1] < 2


def test_what_turns_out_to_be_computed_otherwise_is_planned_again(make_trainer):
    """A plan for packed and compiled updates on a GPU in which both layers just fit; they are padded and eager here."""
    trainer = make_trainer(gradient_checkpointing=None, num_generations=4, max_completion_length=24)
    shape, counted = shape_of(trainer.model.config), model_bytes(trainer.model)
    on_gpu = dataclasses.replace(trainer.memory_plan.work, cpu=False, gradient_checkpointing=None)
    better = dataclasses.replace(on_gpu, packed=True, compiled=True, kept_layers=2)
    most = plan_run(shape, better, None, counted).update
    trainer.memory_plan = plan_run(
        shape, dataclasses.replace(better, kept_layers=0), Gpu(round(most / 0.9) + 2**12), counted
    )
    assert trainer.memory_plan.work.kept_layers == 2
    trainer._compiled = SimpleNamespace(failed=False, layers=[], recompute=lambda layers: None)
    trainer._packing.on = True
    Recomputation(trainer).prepare()
    assert trainer.memory_plan.work.packed
    trainer._packing.on, trainer._compiled.failed = False, True
    calls = forwards_of_layers(trainer)
    trainer.train()
    work = trainer.memory_plan.work
    assert not work.packed and not work.compiled and work.kept_layers < 2
    of_updates = [number for number, update in calls if update]
    assert [of_updates.count(layer) for layer in (0, 1)] == [
        2 if layer >= 2 - work.kept_layers else 4 for layer in (0, 1)
    ]


def test_a_model_without_such_layers_recomputes_all(make_trainer):
    trainer = with_kept_layers(make_trainer(gradient_checkpointing=None), 3)
    calls = forwards_of_layers(trainer)
    trainer.train()
    assert [number for number, update in calls if update].count(1) == 4


@pytest.mark.filterwarnings("error:.*checkpointing:FutureWarning")
@pytest.mark.parametrize("value", [None, True, False])
@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_the_setting_is_one_of_three(tmp_path, name, value):
    from transformers import HfArgumentParser

    if name not in QeRLConfig.__dataclass_fields__:
        pytest.skip(f"this transformers has no {name}")
    made = settings(tmp_path, **{"gradient_checkpointing": None, name: value})
    assert (made.gradient_checkpointing, made.recompute_as_needed) == (value is not False, value is None)
    assert getattr(made, name) is made.gradient_checkpointing and identity.may_differ(name)
    assert made.to_dict()[name] is value
    plain = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    again = QeRLConfig(**plain, **{key: told for key, told in made.to_dict().items() if key.endswith("_checkpointing")})
    assert (again.gradient_checkpointing, again.recompute_as_needed) == (value is not False, value is None)
    parser = HfArgumentParser(QeRLConfig)
    (parsed,) = parser.parse_dict(plain | ({} if value is None else {name: value}))
    assert parsed.to_dict()["gradient_checkpointing"] is value
    arguments = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    (parsed,) = parser.parse_args_into_dataclasses(arguments + ([] if value is None else [f"--{name}", str(value)]))
    assert parsed.to_dict()["gradient_checkpointing"] is value
