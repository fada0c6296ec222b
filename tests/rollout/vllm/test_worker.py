"""The worker extension, without an engine."""

import json
import socket
from types import SimpleNamespace

import pytest
import torch

from qerl_trl.rollout.channel import PORT, Channel
from qerl_trl.rollout.signature import SECRET

pytest.importorskip("vllm")


def test_what_makes_no_sense_is_an_answer(monkeypatch):
    from qerl_trl.rollout.transfers import Transfers
    from qerl_trl.rollout.vllm.worker import QeRLWorkerExtension

    worker = QeRLWorkerExtension()
    worker.device, worker.rank = torch.device("cpu"), 0
    worker.__dict__["_qerl_largest_update"] = lambda: 2**17
    assert "call qerl_layout first" in worker.qerl_apply("t", "00")["error"]
    assert "call qerl_layout first" in worker.qerl_open(f"qerl-{'0' * 32}")["error"]
    assert "call qerl_layout first" in worker.qerl_listen("")["error"]
    assert "no layout" in worker.qerl_layout("[1]")["error"]
    long = json.dumps([["a", "x", "float32", [4, 2**14]], ["b", "x", "float32", [2**14, 4]]])
    assert "at most 131072" in worker.qerl_layout(long)["error"]
    assert worker.qerl_layout(json.dumps([["norm", "x", "float32", [4]]])) == {"bytes": 2**16}
    assert "shares no memory" in worker.qerl_apply("shared", "00")["error"]
    assert "No memory" in worker.qerl_open(f"qerl-{'0' * 32}")["error"]
    assert "no name" in worker.qerl_open("../../etc/passwd")["error"]
    monkeypatch.delenv(SECRET, raising=False)
    assert f"{SECRET} is not set" in worker.qerl_listen("")["error"]
    monkeypatch.setenv(SECRET, "of this test alone")
    assert "not on '10.1.2.3'" in worker.qerl_listen("10.1.2.3")["error"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv(PORT, str(taken.getsockname()[1]))
        refused = worker.qerl_listen("127.0.0.1")["error"]
        assert "in use" in refused and f"{PORT} in the server's environment chooses the port" in refused
    worker._qerl_transfers = Transfers(limit=100)
    assert "incomplete (0 of 65536 bytes" in worker.qerl_apply("t", "00")["error"]
    assert worker.qerl_receive("t", "0", b"abc") == {"bytes": 3}
    assert "came twice" in worker.qerl_receive("t", "0", b"abc")["error"]
    assert "has more than 100 bytes" in worker.qerl_receive("t", "0", b"A" * 400)["error"]
    assert "ValueError" in worker.qerl_receive("t", "x", b"abc")["error"]
    assert "TypeError" in worker.qerl_receive("t")["error"]  # an exception would end a tensor-parallel engine
    worker._qerl_transfers = Transfers()
    worker.qerl_receive("t", "0", bytes(2**16))
    assert "arrived damaged" in worker.qerl_apply("t", "00")["error"]
    worker.qerl_receive("t", "0", b"abc")  # of a trainer that was killed while it sent
    worker.qerl_layout(json.dumps([["norm", "x", "float32", [4]]]))
    assert worker.qerl_receive("of the next one", "0", b"abc") == {"bytes": 3}


def test_engines_side_by_side_are_refused():
    """vLLM passes on what the first one answers: an update that another one refused was taken for applied."""
    from qerl_trl.rollout.vllm.worker import QeRLWorkerExtension

    worker = QeRLWorkerExtension()
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2))
    assert "--data-parallel-size 2 makes 2 engines" in worker.qerl_describe()["error"]


def test_the_first_rank_listens_and_all_have_what_it_gets(monkeypatch):
    from qerl_trl.rollout.vllm.worker import QeRLWorkerExtension

    monkeypatch.setenv(SECRET, "of this test alone")
    ranks = [QeRLWorkerExtension() for _ in range(2)]
    for number, worker in enumerate(ranks):
        worker.device, worker.rank = torch.device("cpu"), number
        worker.__dict__["_qerl_largest_update"] = lambda: 2**17
        worker.qerl_layout(json.dumps([["norm", "x", "float32", [4]]]))
    first, second = (worker.qerl_listen("127.0.0.1") for worker in ranks)
    assert first["port"] > 0 and second == {}
    trainer = Channel("127.0.0.1", first["port"], b"of this test alone", first["name"])
    proofs = [worker.qerl_open(first["name"])["proof"] for worker in ranks]
    assert proofs[0] == proofs[1]
    trainer.send(memoryview(bytes([7]) * 2**16))
    assert all(worker._qerl_shared.data.unique().tolist() == [7] for worker in ranks)
    ranks[0].qerl_layout(json.dumps([["norm", "y", "float32", [4]]]))  # another trainer, or another model
    with pytest.raises(OSError):
        trainer.send(memoryview(bytes([8]) * 2**16))
    assert ranks[1]._qerl_shared.data.unique().tolist() == [7]
