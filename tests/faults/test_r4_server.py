"""Faults of a rollout server: strangers, another service on the port, and updates that its worker refuses."""

import importlib.util
import json
import math

import pytest
import torch

from qerl_trl.rollout.engine import CALL, SECRET
from tests.faults.catalog import fault, raises
from tests.rollout.asgi import KEY, FakeVLLM, allowed, ask, bridged, guarded, http
from tests.rollout.workers import NORMS, RANK, K, everything, send, taken, update

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="TRL's client asks for vLLM")
BODY = json.dumps({"method": "qerl_put", "args": ["{}"], "reset": True}).encode()


@fault("R4.server_unauthenticated")
@pytest.mark.parametrize("path", [CALL, "/v1/completions", "/collective_rpc", "/sleep?level=2", "/invocations"])
@pytest.mark.parametrize(
    "headers", [{}, allowed("another secret"), {"Authorization": KEY}], ids=["none", "other", "bare"]
)
def test_a_stranger_can_do_nothing(path, headers):
    vllm = FakeVLLM()
    status, content = ask(guarded(vllm), "POST", path, BODY, headers)
    assert status == 401 and "its trainer only" in content["error"] and vllm.reached == vllm.asked == []


@fault("R4.server_unauthenticated")
@needs_vllm
def test_a_trainer_without_the_secret_learns_how_to_set_it(monkeypatch):
    from qerl_trl.rollout.server import Client

    vllm = FakeVLLM()
    with http(bridged(guarded(vllm))) as (url, requests):
        assert Client(url, KEY, 5).call("qerl_put", "{}") == [{"run": "1"}]
        with raises(RuntimeError, url, "401", f"the same {SECRET}"):
            Client(url, "another secret", 5)
        before = len(requests)
        monkeypatch.delenv(SECRET, raising=False)
        with raises(RuntimeError, f"export {SECRET}=", "vllm serve", "--middleware"):
            engine(url)
        assert len(requests) == before
    assert len(vllm.asked) == 2


def engine(url: str):
    from qerl_trl.rollout.server import ServerEngine
    from qerl_trl.rollout.spec import EngineSpec
    from tests.rollout.workers import policy

    model = policy()
    return ServerEngine(url, EngineSpec.of(model), model, 1)


@fault("R4.server_unauthenticated")
@needs_vllm
def test_another_service_on_the_port_or_none(monkeypatch):
    """TRL's client waits for it without end."""
    monkeypatch.setenv(SECRET, KEY)
    with (
        http(lambda *request: (404, b"not here")) as (url, _),
        raises(ConnectionError, url, "404", "vllm_server_timeout", "vllm serve"),
    ):
        engine(url)
    with raises(ConnectionError, url, "refused", "vllm_server_base_url", "vllm serve"):
        engine(url)


# --- updates ---

BAD = {
    "a layer that is not there": ({"a:v_proj": torch.ones(RANK, K), "b:v_proj": torch.ones(6, RANK)}, "v_proj"),
    "a rank beyond the buffers": ({"a:k_proj": torch.ones(9, K), "b:k_proj": torch.ones(2, 9)}, "reserved 4"),
    "NaN in the last layer": ({"b:k_proj": torch.full((2, RANK), math.nan)}, "k_proj.lora_B holds NaN"),
    "beyond bf16 once alpha/r is in": ({"b:k_proj": torch.full((2, RANK), 3e38)}, "k_proj.lora_B holds NaN or inf"),
    "NaN in a norm": ({f"norm:{NORMS[1]}": torch.full((K,), math.nan)}, f"{NORMS[1]} holds NaN"),
}


@needs_vllm
@fault("R4.update_refused", recovered=True)
@pytest.mark.parametrize(("changes", "words"), BAD.values(), ids=BAD)
def test_an_update_that_is_refused_has_changed_nothing(worker, changes, words):
    """A good one is taken after it."""
    before, contents = everything(worker), worker.qerl_contents()
    assert words in send(worker, *update(1, **changes))["error"]
    assert all(torch.equal(left, right) for left, right in zip(before, everything(worker), strict=True))
    assert worker.qerl_contents() == contents and not contents["damaged"]
    assert taken(send(worker, *update(1))) == {"layers": 2, "norms": 1}
    assert worker.qerl_contents()["received"] != contents["received"] and not worker.qerl_contents()["damaged"]
