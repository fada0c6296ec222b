"""Accuracy on problems with one final answer: greedy or sampled, noise off, with confidence intervals."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from .rewards import is_correct

_Z95 = 1.959963984540054


@dataclass(frozen=True)
class Accuracy:
    """Share of problems solved, with its 95 % Wilson score interval."""

    correct: int
    total: int

    @property
    def value(self) -> float:
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        p, n, z = self.value, self.total, _Z95
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, centre - half), min(1.0, centre + half)

    def as_dict(self) -> dict:
        return {**asdict(self), "accuracy": self.value, "interval95": list(self.interval)}

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}] ({self.correct} of {self.total})"


def paired_difference(before: Iterable[bool], after: Iterable[bool]) -> tuple[float, float, float]:
    """Mean change in accuracy on the same problems with its 95 % interval (normal approximation of paired differences).

    Returns:
        `(difference, low, high)`, as fractions.
    """
    differences = [int(b) - int(a) for a, b in zip(before, after, strict=True)]
    n = len(differences)
    mean = sum(differences) / n
    variance = sum((d - mean) ** 2 for d in differences) / max(n - 1, 1)
    half = _Z95 * math.sqrt(variance / n)
    return mean, mean - half, mean + half


@torch.no_grad()
def solve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    max_new_tokens: int,
    batch_size: int = 64,
    generation_config: GenerationConfig | None = None,
    progress: bool = True,
) -> list[str]:
    """Completions for the conversational `prompt` column of `dataset`, in its order.

    Greedy unless a `generation_config` says otherwise. The model is put into evaluation mode, where no noise acts, and back.

    Args:
        max_new_tokens: length limit of a completion, in tokens.
        batch_size: prompts generated for at a time; sorted by length inside so that padding stays small.
    """
    if generation_config is None:
        generation_config = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens)
    generation_config.pad_token_id = tokenizer.pad_token_id
    generation_config.eos_token_id = generation_config.eos_token_id or (
        model.generation_config.eos_token_id or tokenizer.eos_token_id
    )
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in dataset["prompt"]]
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    answers: list[str] = [""] * len(texts)
    was_training = model.training
    model.eval()
    try:
        for start in tqdm(range(0, len(order), batch_size), desc="evaluating", leave=False, disable=not progress):
            rows = order[start : start + batch_size]
            batch = tokenizer(
                [texts[i] for i in rows],
                return_tensors="pt",
                padding=True,
                padding_side="left",
                add_special_tokens=False,
            ).to(model.device)
            output = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                generation_config=generation_config,
            )
            decoded = tokenizer.batch_decode(output[:, batch["input_ids"].size(1) :], skip_special_tokens=True)
            for row, text in zip(rows, decoded, strict=True):
                answers[row] = text
    finally:
        model.train(was_training)
    return answers


def grade(completions: list[str], dataset: Dataset) -> list[bool]:
    """Whether each completion states the dataset's `answer`."""
    return [is_correct(text, gold) for text, gold in zip(completions, dataset["answer"], strict=True)]
