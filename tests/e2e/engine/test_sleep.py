"""Shared weights stay where they are while the engine sleeps: only the KV cache is freed."""

import pytest
import torch

from qerl_trl.noise.hooks import NoiseDraw
from tests.e2e.engine.engines import (
    EXACT,
    MEMORY,
    PROMPTS,
    adapter_on,
    gap,
    greedy,
    packed,
    randomize,
    stub_generation,
    write_model,
)


@pytest.mark.gpu
def test_sleep_frees_the_cache_and_keeps_shared_weights(tmp_path):
    """With a sync while it sleeps. vLLM allows one engine per process that can sleep."""
    # large enough that its bytes stand out from what the allocator rounds and keeps
    large = {"hidden_size": 512, "intermediate_size": 8192, "num_hidden_layers": 8, "initializer_range": 0.05}
    policy = adapter_on(packed(write_model(tmp_path, **large)), adapter_name="student")
    frozen = sum(p.numel() * p.element_size() for p in policy.parameters() if not p.requires_grad)
    g = stub_generation(policy, enable_sleep_mode=True)
    assert g.engine.asleep
    randomize(policy, 3)
    g.sync_weights()
    g.engine.wake()
    assert gap(policy, g.llm) < EXACT  # synced while it slept
    g.trainer.aqn.draw = NoiseDraw(5e-2, 7, 3, 1)
    g.sync_noise()
    before = greedy(g.llm)
    torch.cuda.empty_cache()
    awake = torch.cuda.mem_get_info()[0]
    g.engine.sleep()
    freed, cache = torch.cuda.mem_get_info()[0] - awake, MEMORY["kv_cache_memory_bytes"]
    assert 0.9 * cache < freed < cache + 0.5 * frozen
    g.engine.wake()
    g.engine.reset_prefix_cache()  # with cached prefixes the prefill would have another shape
    after = greedy(g.llm)
    assert before[0] == after[0] and torch.equal(before[1], after[1])
    g.engine.sleep()
    g.generate(PROMPTS, None, 1)
    assert g.engine.asleep
