"""Sleep that frees the KV cache and nothing else.

vLLM's own levels unmap everything it allocated, adapter buffers, norms and whatever is shared with the trainer included. That is
right where it has a copy of the weights (`share_weights=False`, level 1), and wrong where it shares them.
Its sleep backends are pluggable (`SleepModeBackendFactory.register_backend`); ours is selected by name on the engine's
model config, which the worker reads at the first sleep.
"""

import gc
from typing import Any

import torch
from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory

BACKEND = "qerl_kv_only"
_TAG = "kv_cache"


class KVOnlyBackend(CuMemBackend):
    """Unmaps the KV cache; every other allocation keeps its address and content."""

    def suspend(self, level: int = 1) -> None:
        """Free the KV cache, at any `level`."""
        from vllm.device_allocator import get_mem_allocator_instance

        allocator: Any = get_mem_allocator_instance()  # its interface has changed between versions
        self._state = "SUSPENDED"
        if hasattr(allocator, "discard"):
            allocator.discard((_TAG,))
        else:  # before vLLM 0.28
            from vllm.device_allocator.cumem import unmap_and_release

            for data in allocator.pointer_to_data.values():
                if data.tag == _TAG and not data.is_asleep:
                    torch.cuda.synchronize(data.handle[0])
                    unmap_and_release(data.handle)
                    data.is_asleep = True
        gc.collect()
        torch.cuda.empty_cache()

    def resume(self, tags: list[str] | None = None) -> None:
        """Map the KV cache again. Never everything: 0.25's allocator would map what is awake a second time."""
        super().resume([_TAG])


def use_kv_only_sleep(llm) -> None:
    """Make `llm.sleep()` and `llm.wake_up()` free and remap the KV cache only. Call before the first sleep."""
    if BACKEND not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend(BACKEND, __name__, KVOnlyBackend.__name__)
    llm.llm_engine.vllm_config.model_config.sleep_mode_backend = BACKEND
    llm.llm_engine.model_executor.driver_worker.vllm_config.model_config.sleep_mode_backend = BACKEND
