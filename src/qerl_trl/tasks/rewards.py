"""Rewards for problems with one final answer, in GSM8K's form: worked lines, then `#### answer`.

Both follow TRL's reward signature (`completions` and the dataset's columns as keyword arguments) and return one float per
completion.
"""

import re
from collections.abc import Callable

from datasets import Dataset

from .grading import ANSWER_MARK, MARKED, grader_of, is_correct


def completion_text(completion: str | list[dict]) -> str:
    """The text of a completion, plain or conversational."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def correctness(grader: str = "auto") -> Callable[..., list[float]]:
    """A reward function: 1.0 where the stated answer equals the dataset's `answer` as `grader` compares (grading.py), else 0.0.

    Raises:
        `ValueError`, `ImportError`: as [`grading.grader_of`].
    """
    compare = grader_of(grader)

    def correctness_reward(completions: list, answer: list[str], **kwargs) -> list[float]:
        return [
            float(is_correct(completion_text(c), gold, compare)) for c, gold in zip(completions, answer, strict=True)
        ]

    if grader != "auto":  # another reward: a run that goes on is compared by its rewards' names
        correctness_reward.__name__ += "_" + re.sub(r"\W+", "_", grader)
    return correctness_reward


def format_reward(completions: list, **kwargs) -> list[float]:
    """1.0 where the completion ends in exactly one `#### answer` line after at least one line of work, else 0.0."""
    return [float(_well_formed(completion_text(c))) for c in completions]


def _well_formed(text: str) -> bool:
    lines = [line for line in text.strip().split("\n") if line.strip()]
    marks = sum(line.lstrip().startswith(ANSWER_MARK) for line in lines)
    return len(lines) >= 2 and marks == 1 and bool(MARKED.match(lines[-1].lstrip()))


def as_prompts(dataset: Dataset, system_prompt: str | None = None) -> Dataset:
    """Map GSM8K's columns to TRL's: `question` becomes a conversational `prompt`, `answer` stays for the reward.

    Raises:
        `ValueError`: a column is missing.
    """
    missing = {"question", "answer"} - set(dataset.column_names)
    if missing:
        raise ValueError(
            f"The dataset has the columns {dataset.column_names}, but {sorted(missing)} is needed: GSM8K's format is a "
            "`question` and an `answer` that ends in '#### <number>'."
        )
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return dataset.map(
        lambda row: {"prompt": [*system, {"role": "user", "content": row["question"]}]}, remove_columns=["question"]
    )
