"""The engine of this process, as far as it can be seen without building one; with the real engine: tests/rollout/scenarios.py."""

import gc
from types import SimpleNamespace

import pytest
from peft import LoraConfig, get_peft_model

from qerl_trl.rollout.spec import EngineSpec
from tests.tiny_models import make_tiny_model

pytest.importorskip("vllm")

from qerl_trl.rollout.vllm import engine, loader


def test_what_lives_is_set_aside_before_vllm_searches_it(monkeypatch):
    """Where vLLM fails nothing stays so: the next one may need the memory that a search frees."""
    seen = []

    def fail(**arguments):
        seen.append(gc.get_freeze_count())
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(engine, "SharedLLM", fail)
    model = get_peft_model(make_tiny_model("qwen2"), LoraConfig(r=4, target_modules="all-linear"))
    model.get_base_model().name_or_path = "somewhere"
    with pytest.raises(RuntimeError, match="no memory"):
        engine.InProcessEngine(model, EngineSpec.of(model), share=False, sleeps=False)
    assert seen[0] > 10_000
    assert gc.get_freeze_count() == 0
    assert loader._PUBLISHED is None


def test_what_was_given_up_does_not_answer_the_next_call(monkeypatch):
    """At ab98d3d two new prompts got the completions of two that a limit of time had ended."""
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
