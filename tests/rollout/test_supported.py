"""Options that no engine of this trainer supports, refused before anything is loaded."""

from types import SimpleNamespace

import pytest

from qerl_trl import QeRLConfig, QeRLGRPOTrainer
from qerl_trl.rollout.supported import check_given, check_sharding, settle_optimizer
from qerl_trl.support.options import check_options


def config(**options) -> QeRLConfig:
    args = QeRLConfig(output_dir="out", use_cpu=True, bf16=False, report_to=[], **{"use_vllm": True, **options})
    check_options(args)
    return args


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"base_format": "full", "vllm_mode": "server"}, "base_format='full' with .*server.*vllm_mode='colocate'"),
        ({"base_format": "nf4", "vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2 cannot work"),
        ({"vllm_batch_invariant": True, "base_format": "bf16"}, "vllm_batch_invariant=True with .* cannot work"),
        ({"compute": "w4a8", "base_format": "bf16"}, "compute='w4a8' with base_format='bf16' .* cannot work"),
        ({"compute": "w4a8", "vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2 cannot work"),
        ({"vllm_engine_kwargs": {"load_format": "auto"}}, "load_format='auto'.*leave it out"),
        ({"score_centering_top_k": 21}, "score_centering_top_k=21 cannot work"),
        ({"score_centering_top_k": 9, "use_vllm": False}, "use_vllm=False cannot work with score_centering_top_k"),
        ({"score_centering_top_k": 9, "loss_type": "vespo"}, "loss_type='vespo' .*'dr_grpo'"),
    ],
    ids=str,
)
def test_combinations_that_cannot_work(options, said):
    with pytest.raises(ValueError, match=said):
        config(**options)


def test_combinations_that_work():
    config(base_format="bf16", vllm_mode="server")
    config(vllm_batch_invariant=True, compute="w4a8")
    config(vllm_engine_kwargs={"speculative_config": {"method": "ngram"}, "kv_cache_dtype": "fp8"})
    check_sharding(args := SimpleNamespace(use_vllm=True, base_format="bf16"), 2, None)
    check_sharding(args, 0, 2)


@pytest.mark.parametrize("arm", ["nvfp4", "full"])
def test_a_trainer_refuses_sharding_before_it_loads_a_model(monkeypatch, arm):
    def trainer(args):
        return QeRLGRPOTrainer("/does/not/exist", lambda **_: [], args=args, train_dataset=[])

    args = config(base_format=arm)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    with pytest.raises(ValueError, match="ZeRO-3"):
        trainer(args)
    if arm == "nvfp4":
        args.use_vllm = False  # the base cannot be partitioned
        with pytest.raises(ValueError, match="ZeRO-3, which partitions weights"):
            trainer(args)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ValueError, match="FSDP version 1"):
        trainer(config(base_format=arm))


def test_fsdp_replaces_an_optimizer_of_bitsandbytes(monkeypatch, caplog):
    args = config(optim="adamw_8bit")
    settle_optimizer(args)
    assert args.optim.value == "adamw_8bit"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    args = config(optim="paged_adamw_8bit", use_vllm=False)
    settle_optimizer(args)
    assert args.optim.value == "adamw_torch_fused"
    assert "optim='paged_adamw_8bit' is a bitsandbytes optimizer" in caplog.text


@pytest.mark.parametrize("option", [{"vllm_mode": "server"}, {"vllm_tensor_parallel_size": 2}], ids=str)
def test_turns_of_several_processes_with_one_engine_are_refused(option, monkeypatch):
    """TRL deals the answers as if every process had asked for the same number of rows."""
    args = QeRLConfig(output_dir="unused", use_cpu=True, bf16=False, report_to=[], use_vllm=True, **option)
    check_given(args, {"tools": [print]})
    monkeypatch.setattr(type(args), "world_size", 2)
    with pytest.raises(ValueError, match="tools with score_centering_top_k cannot work: it needs single turns"):
        check_given(config(score_centering_top_k=9), {"tools": [print]})
    with pytest.raises(ValueError, match=f"tools with {next(iter(option))}=.* in 2 processes.*vllm_mode='colocate'"):
        check_given(args, {"tools": [print]})
    check_given(args, {"rollout_func": print})


def test_turns_without_an_engine_are_refused_if_weights_are_sharded(monkeypatch):
    """Processes take different numbers of turns, and each forward gathers weights from all."""
    args = config(use_vllm=False, base_format="bf16")
    check_given(args, {"rollout_func": print})
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    check_given(config(), {"rollout_func": print})
    with pytest.raises(ValueError, match="rollout_func with use_vllm=False cannot work under FSDP"):
        check_given(args, {"rollout_func": print})
    with pytest.raises(ValueError, match="FSDP with score_centering_top_k cannot work"):
        check_given(config(score_centering_top_k=9), {})
