"""The worker extension, without an engine."""

import pytest

pytest.importorskip("vllm")


def test_parts_of_a_transfer_must_come_in_order():
    from qerl_trl.rollout.transfers import Transfers
    from qerl_trl.rollout.vllm.worker import QeRLWorkerExtension

    worker = QeRLWorkerExtension()
    assert "damaged or incomplete" in worker.qerl_apply("t", "00")["error"]  # before any part
    worker._qerl_transfers = Transfers(limit=100)
    assert "unknown transfer" in worker.qerl_receive("t", "1", "AAAA")["error"]
    assert worker.qerl_receive("t", "0", "AAAA") == {"bytes": 3}
    assert "which is the last" in worker.qerl_receive("t", "5", "AAAA")["error"]
    assert "not base64" in worker.qerl_receive("t", "0", "no base64!")["error"]
    assert "damaged or incomplete" in worker.qerl_apply("t", "00")["error"]
    assert "has more than 100 bytes" in worker.qerl_receive("t", "0", "A" * 400)["error"]
    assert "TypeError" in worker.qerl_receive("t")["error"]  # an exception would end a tensor-parallel engine
