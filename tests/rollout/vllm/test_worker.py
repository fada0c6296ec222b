"""The worker extension, and the endpoint in front of a server.

Updates: tests/faults/test_r4_server.py; a real server: tests/e2e/engine/test_server.py.
"""

import json
from types import SimpleNamespace

import pytest
import torch

from qerl_trl.rollout.engine import CALL
from tests.rollout.asgi import FakeVLLM, allowed, ask, guarded

pytest.importorskip("vllm")

from qerl_trl.rollout.vllm.worker import QeRLWorkerExtension


def test_refusals_are_answers():
    """An exception would end a tensor-parallel engine; vLLM answers for the first of several engines only."""
    worker = QeRLWorkerExtension()
    worker.device, worker._qerl_rollout_state = torch.device("cpu"), object()
    update = {"layout": json.dumps([["norm", "x", "float32", [4]]]), "memory": f"qerl-{'0' * 32}", "checksum": ""}
    for memory in (update["memory"], "../../etc/passwd"):
        text = json.dumps({"update": update | {"memory": memory}, "noisy": [], "draw": None})
        assert "No such file" in worker.qerl_put(text)["error"]
    assert "TypeError" in worker.qerl_put()["error"]
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2))
    assert "--data-parallel-size 2 makes 2 engines" in worker.qerl_describe("")["error"]


def test_requests_of_the_trainer_reach_vllm():
    vllm = FakeVLLM()
    served = guarded(vllm)
    for method in ("qerl_contents", "qerl_put"):
        answer = ask(served, "POST", CALL, json.dumps({"method": method, "args": ["{}"]}).encode(), allowed())
        assert answer == (200, {"results": [{"run": "1"}], "reset": True})
    assert vllm.asked == [("qerl_contents", "{}"), ("qerl_put", "{}"), ("reset",)] and vllm.reached == []
    assert ask(served, "POST", "/v1/completions", b"{}", allowed())[0] == 200
    assert vllm.reached == ["POST /v1/completions"]
