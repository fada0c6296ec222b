"""The truth check at start: an adapter that is known to matter must change what vLLM generates, as the trainer says it does.

A random B is put into the trainer's adapter, synced, and a few greedy tokens are generated; the adapter is then restored bit
for bit and synced again. This catches what nothing else would: an engine with other weights, an adapter that lands nowhere,
a scaling applied twice, a stale prefix cache.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .linear import compute_dtype
from .rollout_policy import active_adapter, rollout_layers

if TYPE_CHECKING:
    from .rollout import QeRLVLLMGeneration

_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 4, 12, 8
#: mean |difference| of log-probabilities between trainer and engine, in nats, by compute dtype. Stock vLLM in bf16 against
#: transformers in bf16: 0.05 on random weights; an adapter that is missing or doubled: above 1
TOLERANCE = {torch.float32: 2e-2, torch.float16: 0.2, torch.bfloat16: 0.35}
_STRENGTHS = (0.05, 0.2, 0.8, 3.2)


@dataclass(frozen=True)
class ProbeResult:
    """`difference`: mean |log-probability difference| in nats; `changed`: share of greedy tokens that the adapter changed."""

    difference: float
    base_difference: float
    changed: float
    strength: float

    def __str__(self) -> str:
        return (
            f"an adapter of strength {self.strength:g} changed {self.changed:.0%} of the greedy tokens; log-probabilities differ "
            f"from the trainer's by {self.difference:.4f} nats with it, {self.base_difference:.4f} without"
        )


@torch.no_grad()
def probe(generation: "QeRLVLLMGeneration") -> ProbeResult:
    """Run the check on a started engine. Every process calls it; it is collective in the same places as a rollout.

    Raises:
        `RolloutError`: greedy tokens did not change, or log-probabilities disagree.
    """
    from .rollout import RolloutError

    model, device = generation.model, generation.accelerator.device
    tolerance = TOLERANCE[compute_dtype(model)]
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, vocab, (_PROMPTS, _PROMPT_TOKENS), generator=generator).tolist()
    adapter = active_adapter(model)
    ups = [layer.lora_B[adapter].weight for layer in rollout_layers(model).values()]
    saved = [up.detach().clone() for up in ups]
    for up in ups:
        up.zero_()
    generation.sync_weights()
    base_tokens, base_logps = _greedy(generation, prompts)
    base_difference = _difference(model, device, prompts, base_tokens, base_logps)
    result = None
    try:
        for strength in _STRENGTHS:
            for up in ups:
                b = torch.randn(up.shape, generator=generator) * strength / up.shape[1] ** 0.5
                up.copy_(b.to(up.device, up.dtype))
            generation.sync_weights()
            tokens, logps = _greedy(generation, prompts)
            changed = sum(x != y for a, b in zip(tokens, base_tokens, strict=True) for x, y in zip(a, b, strict=True))
            changed /= _PROMPTS * _NEW_TOKENS
            if changed > 0:
                difference = _difference(model, device, prompts, tokens, logps)
                result = ProbeResult(difference, base_difference, changed, strength)
                break
    finally:
        for up, b in zip(ups, saved, strict=True):
            up.copy_(b)
        generation.sync_weights()
    if result is None:
        raise RolloutError(
            f"A probe adapter with B up to {_STRENGTHS[-1]:g}/sqrt(r) did not change one greedy token in vLLM: the adapter does "
            "not reach the engine. This is a bug or an unsupported architecture; please report it with the model's name."
        )
    if not max(result.difference, result.base_difference) <= tolerance:
        raise RolloutError(
            f"vLLM and the trainer disagree: {result}. At most {tolerance:g} is expected for this dtype, so they do not compute "
            "the same model (other weights, another adapter, other norms)."
        )
    return result


def _greedy(generation: "QeRLVLLMGeneration", prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens and their log-probabilities, on every process."""
    from accelerate.utils import broadcast_object_list

    if generation.mode == "server":
        payload = [None]
        if generation.server is not None:
            output = generation.vllm_client.generate(
                prompts,
                n=1,
                temperature=0.0,
                max_tokens=_NEW_TOKENS,
                logprobs=0,
                generation_kwargs={"ignore_eos": True},
            )
            payload = [(output["completion_ids"], [[lp[0] for lp in seq] for seq in output["logprobs"]])]
        broadcast_object_list(payload, from_process=0)
        return payload[0]
    from vllm import SamplingParams

    outputs = generation.llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, logprobs=0, ignore_eos=True),
        use_tqdm=False,
    )
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    logps = [
        [step[token].logprob for step, token in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)]
        for o in outputs
    ]
    return tokens, logps


def _difference(model, device, prompts, tokens, logps) -> float:
    """Mean |trainer - engine| over the log-probabilities of `tokens`."""
    training = model.training
    model.eval()
    try:
        ids = torch.tensor([p + t for p, t in zip(prompts, tokens, strict=True)], device=device)
        logits = model(input_ids=ids, use_cache=False).logits[:, _PROMPT_TOKENS - 1 : -1].float()
    finally:
        model.train(training)
    mine = logits.log_softmax(-1).gather(-1, ids[:, _PROMPT_TOKENS:, None]).squeeze(-1)
    return (mine - torch.tensor(logps, device=device)).abs().mean().item()
