"""Sleep that frees the KV cache only."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")


@pytest.mark.parametrize("has_discard", [True, False], ids=["new allocator", "allocator of 0.25"])
def test_sleep_unmaps_the_kv_cache_only(monkeypatch, has_discard):
    """With a stand-in for the CUDA allocator: which allocations are unmapped and mapped again."""
    import vllm.device_allocator
    from vllm.device_allocator import cumem

    from qerl_trl.rollout.vllm.engine import KVOnlyBackend

    calls = []

    def allocation(tag, handle):
        return SimpleNamespace(tag=tag, handle=(0, handle, 0, 0), is_asleep=False, cpu_backup_tensor=None)

    allocations = {1: allocation("weights", 10), 2: allocation("kv_cache", 20), 3: allocation("kv_cache", 30)}

    class Allocator:
        pointer_to_data = allocations

        def wake_up(self, tags):
            for data in allocations.values():
                if tags is None or data.tag in tags:
                    calls.append(("map", data.handle[1]))
                    data.is_asleep = False

    def discard(self, tags):
        for data in allocations.values():
            if data.tag in tags:
                calls.append(("unmap", data.handle[1]))

    if has_discard:
        Allocator.discard = discard
    monkeypatch.setattr(vllm.device_allocator, "get_mem_allocator_instance", Allocator)
    monkeypatch.setattr(cumem, "unmap_and_release", lambda handle: calls.append(("unmap", handle[1])), raising=False)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    backend = KVOnlyBackend()
    backend.suspend(2)
    assert calls == [("unmap", 20), ("unmap", 30)]
    calls.clear()
    backend.resume(None)
    assert calls == [("map", 20), ("map", 30)]
