"""The worker extension, without an engine."""

import json

import pytest
import torch

pytest.importorskip("vllm")


def test_what_makes_no_sense_is_an_answer():
    from qerl_trl.rollout.transfers import Transfers
    from qerl_trl.rollout.vllm.worker import QeRLWorkerExtension

    worker = QeRLWorkerExtension()
    worker.device = torch.device("cpu")
    worker.__dict__["_qerl_largest_update"] = lambda: 2**17
    assert "call qerl_layout first" in worker.qerl_apply("t", "00")["error"]
    assert "call qerl_layout first" in worker.qerl_open(f"qerl-{'0' * 32}")["error"]
    assert "no layout" in worker.qerl_layout("[1]")["error"]
    long = json.dumps([["a", "x", "float32", [4, 2**14]], ["b", "x", "float32", [2**14, 4]]])
    assert "at most 131072" in worker.qerl_layout(long)["error"]
    assert worker.qerl_layout(json.dumps([["norm", "x", "float32", [4]]])) == {"bytes": 2**16}
    assert "shares no memory" in worker.qerl_apply("shared", "00")["error"]
    assert "No memory" in worker.qerl_open(f"qerl-{'0' * 32}")["error"]
    assert "no name" in worker.qerl_open("../../etc/passwd")["error"]
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
