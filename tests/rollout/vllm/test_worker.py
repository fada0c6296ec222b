"""The worker extension, without an engine; tests/faults/test_s_updates.py has updates."""

import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")


def test_a_refusal_is_an_answer():
    """An exception would end a tensor-parallel engine."""
    from qerl_trl.rollout.vllm.worker import QeRLWorkerExtension

    worker = QeRLWorkerExtension()
    worker.device, worker._qerl_rollout_state = torch.device("cpu"), object()
    update = {"layout": json.dumps([["norm", "x", "float32", [4]]]), "memory": f"qerl-{'0' * 32}", "checksum": ""}
    for changed, words in (
        ({}, "No such file"),
        ({"memory": "../../etc/passwd"}, "No such file"),
        ({"layout": "[1]"}, "TypeError"),
        ({"layout": "no JSON"}, "Error"),
    ):
        text = json.dumps({"update": update | changed, "noisy": [], "draw": None})
        assert words in worker.qerl_put(text)["error"]
    assert "TypeError" in worker.qerl_put()["error"]


def test_engines_side_by_side_are_refused():
    """vLLM passes on what the first one answers: an update that another one refused was taken for applied."""
    from qerl_trl.rollout.vllm.worker import QeRLWorkerExtension

    worker = QeRLWorkerExtension()
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2))
    assert "--data-parallel-size 2 makes 2 engines" in worker.qerl_describe("")["error"]
