"""The middleware in front of the server, without one."""

import json

import pytest

from qerl_trl.rollout.engine import CALL, LISTEN
from tests.rollout.asgi import FakeVLLM, allowed, ask, guarded


def call(method="qerl_put", args=("{}",), reset=False) -> bytes:
    return json.dumps({"method": method, "args": args, "reset": reset}).encode()


@pytest.mark.parametrize("parts", [1, 7])
def test_calls_of_the_trainer_reach_the_engine(parts):
    vllm = FakeVLLM()
    served = guarded(vllm)
    assert ask(served, "POST", CALL, call(), allowed(), parts) == (200, {"results": [{"run": "1"}]})
    assert ask(served, "POST", CALL, call(reset=True), allowed()) == (200, {"results": [{"run": "1"}], "reset": True})
    assert ask(served, "POST", CALL, call("", reset=True), allowed()) == (200, {"reset": True})
    assert vllm.asked == [("qerl_put", "{}")] * 2 + [("reset",)] * 2 and vllm.reached == []


def test_vllms_own_paths_are_the_trainers_too():
    vllm = FakeVLLM()
    assert ask(guarded(vllm), "POST", "/v1/completions", b"{}", allowed())[0] == 200
    assert vllm.reached == ["POST /v1/completions"] and vllm.bodies == [b"{}"]


def test_other_methods_of_a_worker_are_refused():
    vllm = FakeVLLM()
    status, content = ask(guarded(vllm), "POST", CALL, call("save_sharded_state"), allowed())
    assert status == 400 and "not a method of the worker extension" in content["error"] and vllm.asked == []


def test_a_failure_in_the_engine_is_reported():
    vllm = FakeVLLM(RuntimeError("EngineCore died"))
    status, content = ask(guarded(vllm), "POST", CALL, call(reset=True), allowed())
    assert (status, content["error"]) == (400, "RuntimeError: EngineCore died") and len(vllm.asked) == 1


def test_the_port_for_updates_is_opened_once():
    served = guarded(FakeVLLM())
    first, again = (ask(served, "POST", LISTEN, b"", allowed()) for _ in range(2))
    assert first == again and first[1]["port"] > 0


def test_without_a_secret_the_server_does_not_start():
    with pytest.raises(RuntimeError, match="export QERL_SERVER_SECRET="):
        guarded(FakeVLLM(), "")
