"""What no engine of this trainer can do, refused before anything is loaded."""

from types import SimpleNamespace

import pytest

from qerl_trl import QeRLConfig, QeRLGRPOTrainer
from qerl_trl.rollout.supported import check_given, check_sharding
from qerl_trl.support.options import check_options


def config(**options) -> QeRLConfig:
    options = {"use_vllm": True, **options}
    args = QeRLConfig(output_dir="out", use_cpu=True, bf16=False, report_to=[], **options)
    check_options(args)
    return args


@pytest.mark.parametrize("arm", ["full", "nf4"])
def test_a_server_cannot_run_these_arms(arm):
    with pytest.raises(ValueError, match=f"base_format='{arm}' with vllm_mode='server'.*vllm_mode='colocate'"):
        config(base_format=arm, vllm_mode="server")


@pytest.mark.parametrize("arm", ["nvfp4", "bf16"])
def test_a_server_runs_these_arms(arm):
    assert config(base_format=arm, vllm_mode="server").base_format == arm


@pytest.mark.parametrize("options", [{"base_format": "bf16"}, {"base_format": "nf4"}, {"use_vllm": False}], ids=str)
def test_batch_invariant_is_for_nvfp4_in_vllm(options):
    assert config(vllm_batch_invariant=True).vllm_batch_invariant
    with pytest.raises(ValueError, match=r"vllm_batch_invariant=True with .* cannot work"):
        config(vllm_batch_invariant=True, **options)


def test_bitsandbytes_weights_cannot_be_split():
    with pytest.raises(ValueError, match="vllm_tensor_parallel_size=2 cannot work"):
        config(base_format="nf4", vllm_tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("zero_stage", "fsdp_version", "named"), [(3, None, "ZeRO-3"), (0, 1, "fsdp_version: 2")], ids=["zero3", "fsdp1"]
)
def test_sharding_that_hides_the_adapter_is_refused(zero_stage, fsdp_version, named):
    args = SimpleNamespace(use_vllm=True, base_format="bf16")
    with pytest.raises(ValueError, match=named):
        check_sharding(args, zero_stage, fsdp_version)
    check_sharding(args, 2, None)
    check_sharding(args, 0, 2)


@pytest.mark.parametrize("arm", ["nvfp4", "full"])
def test_sharding_that_the_engine_cannot_follow_is_refused(monkeypatch, arm):
    args = config(base_format=arm)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    with pytest.raises(ValueError, match="ZeRO-3"):
        QeRLGRPOTrainer("/does/not/exist", lambda **_: [], args=args, train_dataset=[])
    if arm == "nvfp4":
        args.use_vllm = False  # what cannot be partitioned is the base
        with pytest.raises(ValueError, match="ZeRO-3, which partitions weights"):
            QeRLGRPOTrainer("/does/not/exist", lambda **_: [], args=args, train_dataset=[])
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ValueError, match="FSDP version 1"):
        QeRLGRPOTrainer("/does/not/exist", lambda **_: [], args=config(base_format=arm), train_dataset=[])


@pytest.mark.parametrize("name", ["tools", "environment_factory"])
@pytest.mark.parametrize("option", [{"vllm_mode": "server"}, {"vllm_tensor_parallel_size": 2}], ids=str)
def test_turns_of_several_processes_with_one_engine_are_refused(name, option, monkeypatch):
    """TRL's loop asks for as many rows as are not done yet in a process, and deals the answers out as if all had asked
    for as many."""
    args = QeRLConfig(output_dir="unused", use_cpu=True, bf16=False, report_to=[], use_vllm=True, **option)
    check_given(args, {name: [print]})
    monkeypatch.setattr(type(args), "world_size", 2)
    with pytest.raises(ValueError, match=f"{name} with {next(iter(option))}=.* in 2 processes.*vllm_mode='colocate'"):
        check_given(args, {name: [print]})
    check_given(args, {"rollout_func": print})


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"tensor_parallel_size": 2}, "set vllm_tensor_parallel_size"),
        ({"load_format": "auto"}, "load_format='auto'.*leave it out"),
        ({"speculative_config": {"method": "draft_model", "model": "x"}}, "into the draft"),
    ],
    ids=str,
)
def test_an_engine_stays_this_trainers(engine, said):
    with pytest.raises(ValueError, match=said):
        config(vllm_engine_kwargs=engine)
    config(vllm_engine_kwargs=engine, vllm_mode="server")  # which has none


def test_an_engine_may_be_told_anything_else():
    config(
        vllm_engine_kwargs={"speculative_config": {"method": "ngram"}, "enforce_eager": True, "kv_cache_dtype": "fp8"}
    )
    config(vllm_engine_kwargs={"speculative_config": {"model": "[ngram]", "num_speculative_tokens": 3}})
    config(vllm_engine_kwargs={"cpu_offload_gb": 8})
