"""The engine of this process without building one; real ones: tests/e2e/engine."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from qerl_trl.rollout.spec import EngineSpec
from tests import architectures

pytest.importorskip("vllm")

from qerl_trl.rollout.vllm import engine


def test_aborted_requests_do_not_answer_the_next_call(monkeypatch):
    """Once two new prompts got the completions of two that had timed out."""
    aborted = []
    llm = engine.SharedLLM.__new__(engine.SharedLLM)
    llm._group = None
    llm.reset_prefix_cache = lambda reset_connector: aborted.append(reset_connector) or True
    llm.llm_engine = SimpleNamespace(
        output_processor=SimpleNamespace(request_states={"3": None, "4": None}),
        abort_request=lambda ids, internal: aborted.append((ids, internal)),
    )

    def hangs(self, *args, **kwargs):
        raise KeyboardInterrupt

    for name in ("generate", "chat"):
        monkeypatch.setattr(engine.LLM, name, hangs)
        with pytest.raises(KeyboardInterrupt):
            getattr(llm, name)([])
    assert aborted == [(["3", "4"], True), True] * 2


# --- classes for vLLM's Transformers backend, apart from the trainer's ---


@pytest.mark.parametrize(("name", "isolates"), [("smollm3", True), ("qwen3", False)])
def test_only_models_without_a_class_in_vllm_are_isolated(name, isolates):
    spec = EngineSpec("somewhere", None, "bfloat16", "nvfp4", "rtn", (), None)
    model = AutoModelForCausalLM.from_config(architectures.config_of(name))
    model.config.architectures = [type(model).__name__]
    assert ("hf_overrides" in engine.isolation_arguments(model, spec, {})) == isolates
    if isolates:
        said = rf"hf_overrides=\{{'a': 1\}}.*{type(model).__name__}.*config\.json"
        with pytest.raises(ValueError, match=said):
            engine.isolation_arguments(model, spec, {"hf_overrides": {"a": 1}})
    else:
        assert engine.isolation_arguments(model, spec, {"model_impl": "transformers"})


@pytest.mark.parametrize("name", ["smollm3", "gemma3"])
def test_the_text_decoder_is_built_from_a_subclass(name):
    isolated = engine.isolated(architectures.config_of(name))
    decoder, other = (
        AutoModel.from_config(config).get_decoder() for config in (architectures.config_of(name), isolated)
    )
    assert type(other) is not type(decoder) and isinstance(other, type(decoder))
    assert list(other.state_dict()) == list(decoder.state_dict())
    again = engine.isolated(engine.isolated(architectures.config_of(name)))
    assert type(AutoModel.from_config(again).get_decoder()) is type(other)


# --- sleep that frees the KV cache only ---


@pytest.mark.parametrize("has_discard", [True, False], ids=["new allocator", "allocator of 0.25"])
def test_sleep_unmaps_the_kv_cache_only(monkeypatch, has_discard):
    """With a stand-in for the CUDA allocator: which allocations are unmapped and mapped again."""
    import vllm.device_allocator
    from vllm.device_allocator import cumem

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
    backend = engine.KVOnlyBackend()
    backend.suspend(2)
    assert calls == [("unmap", 20), ("unmap", 30)]
    calls.clear()
    backend.resume(None)
    assert calls == [("map", 20), ("map", 30)]
