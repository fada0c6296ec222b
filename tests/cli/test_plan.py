"""`qerl-trl plan` from shapes alone, and `qerl-trl tune` without a GPU (kernels/tests/test_kernels_measured.py)."""

import json

import pytest
import torch
from transformers import MixtralConfig

from qerl_trl.nvfp4 import linear
from tests.faults.tiny_runs import call

qerl_nvfp4 = pytest.importorskip("qerl_nvfp4")
BASE = ("--config", "qwen2.5-7b")


@pytest.fixture
def plan(tiny_model_dir):
    """`plan(*words)`: the plan of a tiny model as data."""

    def run(*words) -> dict:
        code, out, err = call("plan", tiny_model_dir("llama"), *words, "--json")
        assert code == 0, err
        return json.loads(out)

    return run


def test_a_plan_adds_up_and_fits_or_not(plan, tiny_model_dir):
    result = plan("--gpu-gib", 24, "--no-vllm")
    assert result["fits"] is True and result["peak"] == max(result["update"], result["rollout"])
    for phase in ("update", "rollout"):
        assert result[phase] == sum(part[phase] for part in result["parts"])
    code, out, _ = call("plan", tiny_model_dir("llama"), "--gpu-gib", 3, "--batch", 32)
    assert code == 1
    assert "does not fit into 3.0 GiB" in out and "not one sequence of" in out and "per_device_train_batch_size" in out


def test_options_come_before_the_recipe(plan, tiny_model_dir):
    _, out, _ = call("plan", tiny_model_dir("llama"), *BASE, "--gpu-gib", 24)
    assert "128 completions run in 1 wave" in out and "optimizer, adamw_8bit" in out
    words = ("--base-format", "full", "--optimizer", "adamw_torch", "--completion-length", 2048, "--sleep")
    work = plan(*BASE, *words)["work"]
    assert work["base_format"] == "full" and work["optimizer"] == "adamw_torch" and work["sleep"]
    assert work["completion_length"] == 2048 and work["completions"] == 128


def test_several_gpus_share_a_rollout_and_an_update(plan, tiny_model_dir):
    one, four = plan(*BASE)["work"], plan(*BASE, "--gpus", 4)["work"]
    assert four["processes"] == 4 and four["completions"] * 4 == one["completions"]
    assert four["batch"] * four["accumulation"] * 4 == one["batch"] * one["accumulation"]
    whole, sharded = (
        {part["name"]: part["update"] for part in plan("--gpus", 2, *words)["parts"]}
        for words in ((), ("--fsdp", "--tensor-parallel", 2))
    )
    adapter, copy = "adapter, rank 32", "the engine's copy of the weights"
    assert 2 * sharded[adapter] == whole[adapter]
    assert whole[copy] == 0 < sharded[copy] < whole["frozen base, nvfp4"]
    zero2 = plan("--gpus", 2, "--zero2")["work"]
    assert zero2["deepspeed"] and zero2["gradient_checkpointing"] and not zero2["sharded"]
    out = call("plan", tiny_model_dir("llama"), *BASE, "--gpus", 2, "--fsdp")[1]
    assert "2 GPUs, which share the base: 64 completions" in out and "optimizer, adamw_torch_fused" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu-gib", -5), "--gpu-gib"),
        (("--card", "T4"), "older than Ampere"),
        (("--fsdp",), "give one, and how many with --gpus"),
        (("--gpus", 2, "--zero2", "--fsdp"), "two ways to share"),
        ((*BASE, "--gpus", 3), "(128) must be divisible by the global batch size (12)"),
    ],
)
def test_options_out_of_range_are_refused_before_the_network(words, message):
    code, _, err = call("plan", "nobody/nothing", *words)
    assert code == 2 and message in err and "Hub" not in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_completion_lenght: 16000", "Did you mean --max_completion_length"),
        ("max_completion_length: -4", "max_completion_length=-4 is out of range"),
        ("vllm_engine_kwargs: '{foo'", "vllm_engine_kwargs is not JSON"),
        ("task: nowhere", "task: nowhere is no file here or beside run.yaml"),
    ],
)
def test_a_recipe_that_no_run_could_have_is_refused(line, message, tiny_model_dir, tmp_path):
    (tmp_path / "run.yaml").write_text(f"model_name_or_path: {tiny_model_dir('qwen2')}\noutput_dir: x\n{line}\n")
    code, _, err = call("plan", "--config", tmp_path / "run.yaml")
    assert code == 2 and message in err


def test_a_base_that_cannot_be_trained_is_refused(tiny_model_dir, tmp_path):
    config = json.loads((tiny_model_dir("qwen2") / "config.json").read_text())
    stored = {"quant_method": "awq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    code, _, err = call("plan", tmp_path)
    assert code == 2 and "quant_method='awq' is not an NVFP4 checkpoint" in err
    assert call("plan")[2].startswith("There is nothing to plan")


def test_a_mixture_of_experts_is_planned_without_an_engine(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, vocab_size=320).save_pretrained(tmp_path)
    code, _, err = call("plan", tmp_path)
    assert code == 2 and "mixture of experts" in err and "--no-vllm" in err
    code, _, err = call("plan", tmp_path, "--no-vllm")
    assert code == 0 and "modules_to_not_convert: [experts]" in err


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU on which a measurement takes no time; holds the arguments of the measurement."""
    pytest.importorskip("triton")
    from qerl_nvfp4 import refine, select

    asked = {}

    def measure(weights, sizes, seconds, tell):
        asked.update(weights=weights, sizes=sizes, seconds=seconds)
        print("# WRONG 128x64")
        row = {"config": {}, "shipped": {}, "us": 1.0, "shipped_us": 1.0}
        return [refine.Refined(w.N, w.K, [row | {"tokens": M} for M in sizes], []) for w in weights]

    monkeypatch.setattr(refine, "refine", measure)
    monkeypatch.setattr(select, "device_properties", lambda index: ("a GPU", 132, (9, 0)))
    monkeypatch.setattr(linear, "_kernels", lambda device: (qerl_nvfp4, ""))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setenv("QERL_NVFP4_CACHE", str(tmp_path))
    return asked


def test_tune_measures_the_models_own_matrices(gpu, tiny_model_dir, tmp_path):
    code, out, err = call("tune", tiny_model_dir("qwen2"), "--tokens", "16-32", "--rank", 8, "--seconds", 5, "--json")
    assert code == 0, err
    assert (gpu["sizes"], gpu["seconds"]) == ([16, 24, 32], 5.0)
    assert [(sum(w.splits), w.rank) for w in gpu["weights"]] == [(w.N, 8) for w in gpu["weights"]]
    assert sorted(len(w.splits) for w in gpu["weights"]) == [1, 1, 2, 3], "o, down, gate/up, q/k/v"
    result = json.loads(out)
    assert result["rank"] == 16 and result["cache"].startswith(str(tmp_path)) and len(result["matrices"]) == 4
    assert "WRONG" in err and "QERL_NVFP4_TUNED=0 is set" in err  # a failing candidate is named
    code, _, err = call("tune", tiny_model_dir("qwen2"), "--tokens", "12")
    assert code == 2 and "8-512" in err


def test_tune_without_a_gpu_is_refused(tiny_model_dir):
    code, _, err = call("tune", tiny_model_dir("qwen2"))
    assert code == 1 and "there is no CUDA device" in err
