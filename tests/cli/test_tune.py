"""`qerl-trl tune` as far as a CPU goes: what it asks of the kernels' package, and what it says. kernels/tests/test_kernels_measured.py has the rest."""

import json

import pytest
import torch

from qerl_trl.cli.plan import numbers_of_tokens
from qerl_trl.nvfp4 import linear
from tests.faults.tiny_runs import call

qerl_nvfp4 = pytest.importorskip("qerl_nvfp4")


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU on which a measurement takes no time; holds what was asked to be measured."""
    pytest.importorskip("triton")
    from qerl_nvfp4 import refine, select

    asked = {}

    def measure(weights, sizes, seconds, tell):
        asked.update(weights=weights, sizes=sizes, seconds=seconds)
        print("# WRONG 128x64")
        return [
            refine.Refined(
                w.N, w.K, [{"tokens": M, "config": {}, "shipped": {}, "us": 1.0, "shipped_us": 1.0} for M in sizes], []
            )
            for w in weights
        ]

    monkeypatch.setattr(refine, "refine", measure)
    monkeypatch.setattr(select, "device_properties", lambda index: ("a GPU", 132, (9, 0)))
    monkeypatch.setattr(linear, "_kernels", lambda device: (qerl_nvfp4, ""))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setenv("QERL_NVFP4_CACHE", str(tmp_path))
    return asked


def test_the_models_own_matrices_are_measured(gpu, tiny_model_dir, tmp_path):
    code, out, err = call("tune", tiny_model_dir("qwen2"), "--tokens", "16-32", "--rank", 8, "--seconds", 5, "--json")
    assert code == 0, err
    assert (gpu["sizes"], gpu["seconds"]) == ([16, 24, 32], 5.0)
    assert [(sum(w.splits), w.rank) for w in gpu["weights"]] == [(w.N, 8) for w in gpu["weights"]]
    assert sorted(len(w.splits) for w in gpu["weights"]) == [1, 1, 2, 3], "o, down, gate/up, q/k/v"
    result = json.loads(out)
    assert result["rank"] == 16 and result["cache"].startswith(str(tmp_path))
    assert len(result["matrices"]) == 4
    assert "WRONG" in err, "a candidate that fails is named"
    assert "QERL_NVFP4_TUNED=0 is set" in err
    code, out, _ = call("tune", tiny_model_dir("qwen2"), "--tokens", "64")
    assert code == 0 and out.count("1 numbers of tokens measured") == 4 and str(tmp_path) in out
    assert "2 x q_proj + k_proj + v_proj 256 x 128: " in out


def test_without_a_gpu_it_says_so(tiny_model_dir):
    code, _, err = call("tune", tiny_model_dir("qwen2"))
    assert code == 1 and "there is no CUDA device" in err


@pytest.mark.parametrize("text", ["", "12", "8-", "64-8", "eight", "0-16", "64,65"])
def test_numbers_of_tokens_that_are_none(text, tiny_model_dir):
    code, _, err = call("tune", tiny_model_dir("qwen2"), "--tokens", text)
    assert code == 2 and "8-512" in err


def test_numbers_of_tokens():
    assert numbers_of_tokens("8-40") == [8, 16, 24, 32, 40]
    assert numbers_of_tokens("64,128") == [64, 128]
    assert len(numbers_of_tokens("8-512")) == 64
