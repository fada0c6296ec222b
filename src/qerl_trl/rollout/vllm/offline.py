"""A checkpoint on disk in vLLM as everybody runs it, the adapter in vLLM's own LoRA slots: for evaluation, not for training."""

import json
from pathlib import Path
from typing import Any

from ..sampling import end_tokens, stored

#: what vLLM takes as `max_lora_rank`
_SLOT_RANKS = (8, 16, 32, 64, 128, 256, 512)


def slot_of(rank: int) -> int | None:
    """vLLM's `max_lora_rank` for an adapter of this rank; `None`: its slots have no such size."""
    return next((size for size in _SLOT_RANKS if size >= rank), None)


class CheckpointEngine:
    """vLLM on `model`, a folder or Hub id of a bf16 or NVFP4 checkpoint.

    Args:
        adapter: folder of a PEFT adapter. Completions end where those of its run did.
        arguments: further arguments of `vllm.LLM`. The prompts are text: a model that sees pictures is built without its tower, unless
            `language_model_only=False` is among them.

    Raises:
        `ImportError`: vLLM is not installed.
        `ValueError`: the adapter's rank is larger than vLLM's slots can be.
        `RuntimeError`: the adapter changes no log-probability.
    """

    def __init__(self, model: str, adapter: str | None = None, seed: int = 0, **arguments: Any) -> None:
        from transformers import AutoConfig, AutoTokenizer
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        self.request = None
        if adapter is not None:
            self.request = LoRARequest("adapter", 1, adapter)
            rank = json.loads(Path(adapter, "adapter_config.json").read_text())["r"]
            slot = slot_of(rank)
            if slot is None:
                raise ValueError(
                    f"The adapter in {adapter} has rank {rank}; vLLM's slots end at {_SLOT_RANKS[-1]}. Merge it "
                    "(qerl-trl merge), or evaluate with transformers."
                )
            arguments = {"enable_lora": True, "max_lora_rank": slot, **arguments}
        named = {name: arguments[name] for name in ("revision", "trust_remote_code") if name in arguments}
        config = AutoConfig.from_pretrained(model, **named)
        if config.get_text_config(decoder=True) is not config:
            arguments = {"language_model_only": True, **arguments}
        own = adapter if adapter and Path(adapter, "generation_config.json").is_file() else model
        self.stored = stored(own, config, named.get("revision"))
        own = adapter if adapter and Path(adapter, "tokenizer_config.json").is_file() else model
        self.tokenizer = AutoTokenizer.from_pretrained(own, **named)
        self.llm = LLM(model=model, seed=seed, **arguments)
        if self.request is not None:
            self._check_adapter_applied()

    def _check_adapter_applied(self) -> None:
        from vllm import SamplingParams

        probe = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
        with_adapter, without = (
            self.llm.generate(["One and one makes"], probe, lora_request=request, use_tqdm=False)[0].outputs[0]
            for request in (self.request, None)
        )
        same_tokens = list(with_adapter.token_ids) == list(without.token_ids)
        if same_tokens and with_adapter.cumulative_logprob == without.cumulative_logprob:
            raise RuntimeError("vLLM gives the same log-probabilities with and without the adapter: it is not applied.")

    def chat(
        self,
        prompts: list[list[Any]],
        temperature: float,
        top_p: float,
        max_tokens: int,
        seed: int,
        **template: Any,
    ) -> list[str]:
        """One completion per conversation; number i is drawn with `seed + i`, since equal prompts would repeat under one seed.

        Args:
            template: `chat_template` and `chat_template_kwargs` of `vllm.LLM.chat`.
        """
        from vllm import SamplingParams

        how = {"chat_template": template.get("chat_template"), **(template.get("chat_template_kwargs") or {})}
        ends = end_tokens(self.stored, self.tokenizer, **how)
        common: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
        sampling = [SamplingParams(**common, stop_token_ids=ends, seed=seed + i) for i in range(len(prompts))]
        outputs = self.llm.chat(prompts, sampling, lora_request=self.request, **template)
        return [output.outputs[0].text for output in outputs]
