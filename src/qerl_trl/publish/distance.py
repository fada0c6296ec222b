"""How far two models are apart on given text: logits, KL divergence, greedy agreement."""

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..checkpoint.records import Measured


def prompt_batches(
    source: Path | Iterable[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    limit: int = 64,
) -> list[torch.Tensor]:
    """Token ids (1, T) of the first problems of a .jsonl file or of a task's data, worked solution included where there is one.

    Args:
        chat_template_kwargs: for the chat template, as the run had them.

    Raises:
        `ValueError`: no `question`, `problem`, `prompt` or `text` in a line.
    """
    lines: Iterable[Any] = source.read_text().splitlines() if isinstance(source, Path) else source
    batches = []
    for line in itertools.islice(lines, limit):
        row: dict[str, Any] = json.loads(line) if isinstance(line, str) else line
        question = next((row[key] for key in ("question", "problem", "prompt", "text") if key in row), None)
        if isinstance(row.get("prompt"), list):  # a task's, with its system message
            question = row["prompt"]
        if question is None:
            raise ValueError(
                f"{source}: a line has the keys {sorted(row)}; question, problem, prompt or text is needed."
            )
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        text = "".join(message["content"] for message in messages)
        if tokenizer.chat_template:
            asked = {"tokenize": False, "add_generation_prompt": True, **(chat_template_kwargs or {})}
            text = str(tokenizer.apply_chat_template(messages, **asked))
        text += str(row.get("answer", ""))
        batches.append(tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"])
    if not batches:
        raise ValueError(f'{source} is empty. Give it a line per prompt: {{"question": "..."}}.')
    return batches


@torch.no_grad()
def logits_of(model: nn.Module, batches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Logits, float32 on the CPU, for batches of token ids (B, T)."""
    model.eval()
    return [model(batch.to(next(model.parameters()).device)).logits.float().cpu() for batch in batches]


def logit_distance(policy: list[torch.Tensor], other: list[torch.Tensor]) -> Measured:
    """How far `other` is from `policy`, from their logits (lists of (B, T, V)): mean and largest absolute difference, KL(policy || other)
    in nats per token, and the share of positions with the same most likely token."""
    tokens = sum(a.shape[0] * a.shape[1] for a in policy)
    total = largest = kl = agree = 0.0
    values = 0
    for a, b in zip(policy, other, strict=True):
        difference = (a - b).abs()
        total += difference.sum(dtype=torch.float64).item()
        values += difference.numel()
        largest = max(largest, difference.max().item())
        log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
        kl += (log_a.exp() * (log_a - log_b)).sum(dtype=torch.float64).item()
        agree += (a.argmax(-1) == b.argmax(-1)).sum().item()
    return {
        "mean_logit_distance": total / values,
        "max_logit_distance": largest,
        "kl_nats_per_token": kl / tokens,
        "same_greedy_token": agree / tokens,
        "tokens": tokens,
    }
