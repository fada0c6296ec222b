"""Every `base_format` in the engine: what is refused before anything is loaded, and runs of each arm against transformers."""

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

from qerl_trl import QeRLConfig, QeRLGRPOTrainer
from qerl_trl.rollout.supported import check_given
from qerl_trl.rollout.vllm import plugin
from qerl_trl.support.options import check_options

ROOT = Path(__file__).resolve().parents[2]


def config(**options) -> QeRLConfig:
    options = {"use_vllm": True, **options}
    args = QeRLConfig(output_dir="out", use_cpu=True, bf16=False, report_to=[], **options)
    check_options(args)
    return args


# ---------------------------------------------------------------------------------------- refused before anything is loaded


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


def start(monkeypatch, **options) -> None:
    """A trainer of a model that does not exist: whoever tries to load it fails otherwise than expected."""
    QeRLGRPOTrainer(
        model="/does/not/exist", reward_funcs=lambda **_: [], args=config(**options), train_dataset=[], peft_config=None
    )


@pytest.mark.parametrize("version", ["0.22.0", "0.25.0"])
def test_a_version_that_is_too_old_is_refused(monkeypatch, version):
    monkeypatch.setattr(plugin, "installed_version", lambda: version)
    with pytest.raises(
        ImportError, match=rf"vLLM {version} is installed.*{plugin.OLDEST_VLLM} to {plugin.NEWEST_VLLM}"
    ):
        start(monkeypatch)


@pytest.mark.parametrize("version", [plugin.OLDEST_VLLM, "0.25.1+cu129", plugin.NEWEST_VLLM, "0.99.0"])
def test_tested_and_newer_versions_are_taken(monkeypatch, version):
    monkeypatch.setattr(plugin, "installed_version", lambda: version)
    plugin.check_vllm()


def test_vllm_that_is_missing_is_said_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="vLLM is not installed"):
        start(monkeypatch)


def test_one_window_of_versions():
    """pyproject.toml, the plug-in, and the version that these tests run with."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (vllm,) = (Requirement(line) for line in extras["vllm"] if Requirement(line).name == "vllm")
    assert {str(part) for part in vllm.specifier} == {f">={plugin.OLDEST_VLLM}", f"<={plugin.NEWEST_VLLM}"}
    plugin.check_vllm()


@pytest.mark.parametrize("arm", ["nvfp4", "full"])
def test_sharding_that_the_engine_cannot_follow_is_refused(monkeypatch, arm):
    args = config(base_format=arm)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    with pytest.raises(ValueError, match="ZeRO-3"):
        QeRLGRPOTrainer(model="/does/not/exist", reward_funcs=lambda **_: [], args=args, train_dataset=[])
    if arm == "nvfp4":
        args.use_vllm = False  # what cannot be partitioned is the base
        with pytest.raises(ValueError, match="ZeRO-3, which partitions weights"):
            QeRLGRPOTrainer(model="/does/not/exist", reward_funcs=lambda **_: [], args=args, train_dataset=[])
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ValueError, match="FSDP version 1"):
        start(monkeypatch, base_format=arm)


# ------------------------------------------------------------------------------------------------------ runs of each arm

ARMS = ["nvfp4", "bf16", "nf4", "full"]
#: largest |log-probability difference| between two float32 implementations of a tiny model
EXACT = 1e-4


@pytest.mark.parametrize(
    ("arm", "method"),
    [("nvfp4", "NVFP4Method"), ("bf16", "DenseMethod"), ("nf4", "NF4Method"), ("full", "DenseMethod")],
)
def test_each_arm_computes_with_its_own_base(arms, arm, method):
    assert arms[arm]["method"] == method
    assert arms[arm]["probe"]["base_difference"] < EXACT
    assert arms[arm]["shared"] is (arm != "full")


@pytest.mark.parametrize("arm", ARMS)
def test_two_steps_agree_with_the_trainer_and_carry_noise(arms, arm):
    clean, noisy = arms[arm]["logs"]
    assert clean["aqn/sigma"] == 0 and clean["sampling/sampling_logp_difference/max"] < 1e-3
    assert noisy["aqn/sigma_effective"] == pytest.approx(noisy["aqn/sigma"], rel=0.15)
    assert noisy["sampling/sampling_logp_difference/max"] > 0.1  # the rollout is noisy, the trainer is not
    assert all(log["grad_norm"] > 0 for log in arms[arm]["logs"])


@pytest.mark.parametrize("arm", ARMS)
def test_an_update_reaches_the_engine(arms, arm):
    assert arms[arm]["stale"] > 0.1  # before the last update is synced, with noise
    assert arms[arm]["after training"] < EXACT
    assert arms[arm]["moved"] > 0.1
    assert arms[arm]["changed by hand"] > 0.1
    assert arms[arm]["generate syncs by itself"] < EXACT


def test_weights_that_land_nowhere_end_the_run(arms):
    assert arms["full"]["lost weights"].startswith("RolloutError")
    assert "model.layers.0.self_attn.q_proj" in arms["full"]["lost weights"]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="float32 with torch.compile: see test_engine.py, and below in bfloat16"
)
@pytest.mark.parametrize("arm", ["nf4", "full"])
def test_torch_compile_reads_what_is_there_now(compiled_arms, arm):
    for stale, synced in compiled_arms[arm]:
        assert synced < EXACT < 0.01 < stale


@pytest.mark.gpu
@pytest.mark.parametrize("arm", ARMS)
def test_cuda_graphs_read_what_is_there_now(graphs_of_arms, arm):
    """bfloat16: stock vLLM differs from transformers by 0.05 nats on random weights."""
    case = graphs_of_arms[arm]
    assert case["dtype"] == "bfloat16"
    assert case["first rollout"] < 0.1
    assert case["probe"]["difference"] < 0.1 < case["moved"]


@pytest.mark.parametrize("name", ["tools", "environment_factory"])
@pytest.mark.parametrize("option", [{"vllm_mode": "server"}, {"vllm_tensor_parallel_size": 2}], ids=str)
def test_turns_of_several_processes_with_one_engine_are_refused(name, option, monkeypatch):
    """TRL's loop asks for as many rows as are not done yet in a process, and deals the answers out as if all had asked for as many."""
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
