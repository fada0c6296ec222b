"""Rewards for problems with one final answer, in GSM8K's form: worked lines, then `#### answer`.

Both follow TRL's reward signature (`completions` and the dataset's columns as keyword arguments) and return one float per
completion.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .grading import ANSWER_MARK, MARKED, Grader, grader_of, is_correct


def completion_text(completion: str | list[dict]) -> str:
    """The text of a completion, plain or conversational."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def correctness(
    grader: str | Grader = "auto", whole: bool = False, folders: list[Path] | None = None
) -> Callable[..., list[float]]:
    """A reward function: 1.0 where the stated answer equals the dataset's `answer` as `grader` compares (grading.py), else 0.0.

    Args:
        whole: all that the model says last is its answer; otherwise what stands after `####` or in a box.
        folders: where the file of a grader is looked for.

    Raises:
        `ValueError`, `ImportError`: as [`grading.grader_of`].
    """
    compare = grader_of(grader, folders) if isinstance(grader, str) else grader
    name = grader if isinstance(grader, str) else getattr(grader, "__name__", "own")

    def correctness_reward(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
        texts = map(completion_text, completions)
        return [float(is_correct(text, gold, compare, whole)) for text, gold in zip(texts, answer, strict=True)]

    if name != "auto" or whole:  # another reward: a run that goes on is compared by its rewards' names
        correctness_reward.__name__ += "_" + re.sub(r"\W+", "_", name) + ("_whole" if whole else "")
    return correctness_reward


def format_reward(completions: list, **kwargs) -> list[float]:
    """1.0 where the completion ends in exactly one `#### answer` line after at least one line of work, else 0.0."""
    return [float(_well_formed(completion_text(c))) for c in completions]


def _well_formed(text: str) -> bool:
    lines = [line for line in text.strip().split("\n") if line.strip()]
    marks = sum(line.lstrip().startswith(ANSWER_MARK) for line in lines)
    return len(lines) >= 2 and marks == 1 and bool(MARKED.match(lines[-1].lstrip()))
