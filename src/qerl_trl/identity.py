"""What a run is, as data: the settings that decide its trajectory and its result.

A checkpoint's manifest keeps them, a resumed run is compared with them, and a card shows them.
"""

from typing import TypedDict

from accelerate.utils import is_peft_model

from . import report
from .nvfp4.linear import compute_dtype
from .upstream import OnlineTrainer

_FIELDS = """base_format scale_rule aqn aqn_schedule aqn_sigma_start aqn_sigma_end aqn_num_stages aqn_scope aqn_seed
    aqn_entropy_target seed data_seed learning_rate max_steps num_train_epochs per_device_train_batch_size
    gradient_accumulation_steps num_generations steps_per_generation num_iterations temperature max_completion_length
    loss_type beta world_size modules_to_not_convert""".split()


class LoraSettings(TypedDict):
    r: int
    alpha: int
    targets: list[str] | str  # names, or one regular expression


class RunSettings(TypedDict, total=False):
    """JSON. A key is absent where the run has no such setting, and everywhere for a model that no run is known of."""

    trainer: str  # the algorithm: "GRPO", "RLOO"
    model: str  # the base: Hub id or folder
    dtype: str  # compute dtype
    base_format: str
    scale_rule: str
    modules_to_not_convert: list[str]
    lora: LoraSettings
    aqn: bool
    aqn_schedule: str
    aqn_sigma_start: float
    aqn_sigma_end: float
    aqn_num_stages: int
    aqn_scope: str
    aqn_seed: int
    aqn_entropy_target: float
    seed: int
    data_seed: int
    learning_rate: float
    max_steps: int
    num_train_epochs: float
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    num_generations: int
    steps_per_generation: int
    num_iterations: int
    temperature: float
    max_completion_length: int
    loss_type: str
    beta: float
    world_size: int
    versions: dict[str, str]
    # added by an export
    global_step: int
    merged_onto: str  # format of the base that the exported model was built on


def run_settings(trainer: OnlineTrainer) -> RunSettings:
    """What must agree for a resumed run to continue the same trajectory, and what a reader of its results wants to know."""
    settings: RunSettings = {"trainer": trainer._name.removeprefix("QeRL-")}
    for name in _FIELDS:
        if (value := getattr(trainer.args, name, None)) is not None:
            settings[name] = value  # type: ignore[literal-required]  # the names above are keys of RunSettings
    model = trainer.accelerator.unwrap_model(trainer.model)
    settings["model"] = getattr(model.config, "_name_or_path", "")
    settings["dtype"] = str(compute_dtype(model)).removeprefix("torch.")
    if is_peft_model(model):
        lora = model.peft_config[model.active_adapter]
        targets = lora.target_modules  # a string is a regular expression
        targets = targets if isinstance(targets, str) else sorted(targets)
        settings["lora"] = {"r": lora.r, "alpha": lora.lora_alpha, "targets": targets}
    settings["versions"] = report.versions()
    return settings
