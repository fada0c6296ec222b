"""Faults of an engine, for probe_separation.py and the tests: a wrong adapter {layer: tensors}, or wrong weights."""

import dataclasses
from collections.abc import Callable
from typing import Any


def scaled(factor: float) -> Callable[[dict], dict]:
    return lambda adapter: {name: dataclasses.replace(t, b=t.b * factor) for name, t in adapter.items()}


def exchanged(adapter: dict) -> dict:
    def other(name: str) -> str:
        return name.replace("k_proj", "v_proj") if "k_proj" in name else name.replace("v_proj", "k_proj")

    return {name: adapter[other(name)] for name in adapter}


def serve_unquantized() -> None:
    """Let vLLM compute with the bf16 weights of the base before quantization."""
    from qerl_trl.rollout.spec import EngineSpec
    from qerl_trl.rollout.vllm.engine import InProcessEngine

    build = InProcessEngine.__init__

    def wrong(self: Any, model: Any, spec: Any, share: bool, *args: Any, **kwargs: Any) -> None:
        import torch
        from peft import get_peft_model
        from transformers import AutoModelForCausalLM

        dense = AutoModelForCausalLM.from_pretrained(model.config._name_or_path, dtype=torch.bfloat16)
        policy = get_peft_model(dense.to(model.device), model.peft_config["default"])
        policy.requires_grad_(False)
        spec = EngineSpec.of(policy, dtype=torch.bfloat16, max_model_len=spec.max_model_len)
        build(self, policy, spec, False, *args, **kwargs)

    InProcessEngine.__init__ = wrong
