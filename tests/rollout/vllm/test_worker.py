"""The worker extension, and the endpoint in front of a server.

Updates: tests/faults/test_r4_server.py; a real server: tests/e2e/engine/test_server.py.
"""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from qerl_trl.rollout.engine import CALL
from qerl_trl.rollout.weights import SharedMemory
from tests.rollout.asgi import FakeVLLM, allowed, ask, guarded

pytest.importorskip("vllm")

from qerl_trl.rollout.vllm.worker import QeRLWorkerExtension


def test_refusals_are_answers():
    """An exception would end a tensor-parallel engine; vLLM answers for the first of several engines only."""
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
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2))
    assert "--data-parallel-size 2 makes 2 engines" in worker.qerl_describe("")["error"]


# --- the endpoint ---


def call(method="qerl_put", args=("{}",)) -> bytes:
    return json.dumps({"method": method, "args": args}).encode()


@pytest.mark.parametrize("parts", [1, 7])
def test_requests_of_the_trainer_reach_vllm(parts):
    vllm = FakeVLLM()
    served = guarded(vllm)
    for method in ("qerl_contents", "qerl_put"):
        answer = ask(served, "POST", CALL, call(method), allowed(), parts)
        assert answer == (200, {"results": [{"run": "1"}], "reset": True})
    assert vllm.asked == [("qerl_contents", "{}"), ("qerl_put", "{}"), ("reset",)] and vllm.reached == []
    assert ask(served, "POST", "/v1/completions", b"{}", allowed())[0] == 200
    assert vllm.reached == ["POST /v1/completions"] and vllm.bodies == [b"{}"]


def test_a_failure_in_the_engine_is_reported():
    vllm = FakeVLLM(RuntimeError("EngineCore died"))
    status, content = ask(guarded(vllm), "POST", CALL, call(), allowed())
    assert (status, content["error"]) == (400, "RuntimeError: EngineCore died") and len(vllm.asked) == 1


@pytest.mark.parametrize("parts", [1, 7])
def test_an_update_from_another_host(parts):
    served, cpu = guarded(FakeVLLM()), torch.device("cpu")
    names = set()
    for _ in range(2):
        data = os.urandom(3 * 2**16)
        status, answer = ask(served, "PUT", CALL, data, allowed() | {"Content-Length": str(len(data))}, parts)
        assert status == 200 and bytes(SharedMemory(len(data), cpu, answer["memory"]).data.numpy()) == data
        names.add(answer["memory"])
    assert len(names) == 1  # the workers have mapped it
    assert ask(served, "PUT", CALL, data, {"Content-Length": str(len(data))})[0] == 401


def test_without_a_secret_the_server_does_not_start():
    with pytest.raises(RuntimeError, match="export QERL_SERVER_SECRET="):
        guarded(FakeVLLM(), "")
