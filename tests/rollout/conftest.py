"""A worker of a server, for several of these files."""

import pytest

from tests.rollout.workers import worker_over


@pytest.fixture
def worker(monkeypatch):
    """A worker with an adapter, trained norms and noise."""
    pytest.importorskip("vllm")
    return worker_over(monkeypatch)
