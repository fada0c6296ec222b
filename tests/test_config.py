import pytest
from trl import GRPOConfig, TrlParser

from qerl_trl import QeRLConfig, QeRLRLOOConfig
from qerl_trl.config import QeRLArguments


def make(**kwargs):
    return QeRLConfig(output_dir="out", use_cpu=True, bf16=False, **kwargs)


def test_every_grpo_field_keeps_its_default_but_the_documented_ones():
    ours, theirs = make(), GRPOConfig("out", use_cpu=True, bf16=False)
    fields = GRPOConfig.__dataclass_fields__.keys() - {"logging_dir", "run_name", "accelerator_config"}
    changed = {name for name in fields if getattr(ours, name) != getattr(theirs, name)}
    vllm = {"vllm_importance_sampling_mode", "vllm_gpu_memory_utilization"}
    assert changed == {"learning_rate", "hub_private_repo", "ddp_timeout", *vllm}
    assert ours.hub_private_repo is True and make(hub_private_repo=False).hub_private_repo is False
    assert make(seed=7).aqn_seed == 7 and make(seed=7, aqn_seed=3).aqn_seed == 3
    rloo = QeRLRLOOConfig(output_dir="out", use_cpu=True, bf16=False, aqn_scope="policy")
    assert (rloo.aqn_scope, rloo.base_format) == ("policy", "nvfp4")


def test_command_line_and_yaml(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("output_dir: out\nuse_cpu: true\nbf16: false\naqn_sigma_start: 0.02\n")
    parser = TrlParser((QeRLConfig,))
    (args,) = parser.parse_args_and_config(["--config", str(config), "--aqn", "false", "--base_format", "bf16"])
    assert (args.aqn_sigma_start, args.aqn, args.base_format) == (0.02, False, "bf16")


def test_every_new_field_has_a_help_text():
    for name, field in QeRLArguments.__dataclass_fields__.items():
        assert field.metadata.get("help"), name
        assert name in QeRLArguments.__doc__, name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base_format", "int4"),
        ("scale_rule", "mse"),
        ("compute", "w8a8"),
        ("aqn_schedule", "stepwise"),
        ("aqn_scope", "everywhere"),
        ("zero_advantage_patience", 0),
        ("zero_advantage_patience", 2.5),
        ("rollout_probe", "maybe"),
        ("rollout_probe_steps", -1),
        ("rollout_timeout", -1.0),
        ("rollout_mismatch_threshold", float("nan")),
    ],
)
def test_bad_values_are_named_with_their_value(field, value):
    with pytest.raises(ValueError, match=rf"{field}={value!r} is .*\."):
        make(**{field: value})


@pytest.mark.parametrize(("processes", "accumulated", "pieces"), [(1, 8, 32), (2, 4, 16), (8, 1, 4)])
def test_a_rollout_has_the_same_updates_on_any_number_of_processes(monkeypatch, processes, accumulated, pieces):
    monkeypatch.setattr(QeRLConfig, "world_size", processes)
    batch = {"per_device_train_batch_size": 4, "generation_batch_size": 128, "num_generations": 8}
    args = make(updates_per_rollout=4, **batch)
    assert (args.gradient_accumulation_steps, args.steps_per_generation) == (accumulated, pieces)


def test_a_rollout_has_as_many_steps_as_set():
    options = {"num_generations": 2, "per_device_train_batch_size": 4}
    args = make(updates_per_rollout=3, gradient_accumulation_steps=2, **options)
    assert (args.steps_per_generation, args.generation_batch_size) == (6, 24)


@pytest.mark.parametrize(
    ("processes", "options", "words"),
    [
        (16, {"generation_batch_size": 128}, "does not divide the 2 backward passes"),
        (1, {"generation_batch_size": 128, "gradient_accumulation_steps": 16}, "needs gradient_accumulation_steps=8"),
        (1, {"generation_batch_size": 128, "updates_per_rollout": 0}, "updates_per_rollout=.* is out of range"),
    ],
)
def test_impossible_updates_are_refused(monkeypatch, processes, options, words):
    monkeypatch.setattr(QeRLConfig, "world_size", processes)
    given = {"per_device_train_batch_size": 4, "num_generations": 8, "updates_per_rollout": 4} | options
    with pytest.raises(ValueError, match=words):
        make(**given)


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({}, 4200),
        ({"rollout_timeout": 60, "reward_timeout": 7200}, 7800),
        ({"rollout_timeout": 0, "reward_timeout": None}, 1800),
        ({"ddp_timeout": 900}, 900),
    ],
)
def test_collectives_wait_longer_than_the_limits_of_one_process(options, seconds):
    """Else NCCL ends a run with a rollout within its limit, and names neither."""
    assert make(report_to=[], **options).ddp_timeout == seconds
