"""What a run records of itself."""

import dataclasses

from qerl_trl import QeRLConfig, QeRLRLOOConfig, QeRLRLOOTrainer, identity
from tests.test_trainer import make_trainer  # noqa: F401  (a fixture)


def test_every_recorded_name_is_an_argument_and_has_a_type():
    arguments = {field.name for config in (QeRLConfig, QeRLRLOOConfig) for field in dataclasses.fields(config)}
    computed = {"world_size"}  # a property of TrainingArguments
    assert set(identity._FIELDS) - computed <= arguments
    assert set(identity._FIELDS) <= set(identity.RunSettings.__annotations__)


def test_settings_of_a_run(make_trainer, tiny_model_dir):  # noqa: F811
    found = identity.run_settings(make_trainer(seed=7))
    assert set(found) <= set(identity.RunSettings.__annotations__)
    assert (found["trainer"], found["seed"], found["base_format"], found["dtype"]) == ("GRPO", 7, "nvfp4", "float32")
    assert found["model"] == str(tiny_model_dir("qwen2"))
    assert found["lora"]["r"] == 4 and any(name.endswith("q_proj") for name in found["lora"]["targets"])
    assert found["loss_type"] == "dapo"
    assert "aqn_entropy_target" not in found  # was not set
    assert identity.run_settings(make_trainer(trainer_class=QeRLRLOOTrainer))["trainer"] == "RLOO"


def test_a_user_s_trainer_keeps_its_name(make_trainer):  # noqa: F811
    class Mine(QeRLRLOOTrainer):
        _name = "Mine"

    assert identity.run_settings(make_trainer(trainer_class=Mine))["trainer"] == "Mine"
