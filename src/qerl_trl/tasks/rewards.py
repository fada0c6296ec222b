"""Rewards for problems with one final answer, in GSM8K's form: worked lines, then `#### answer`.

Both follow TRL's reward signature (`completions` and the dataset's columns as keyword arguments) and return one float per
completion.
"""

import re

from datasets import Dataset

try:
    from math_verify import parse, verify
except ImportError as error:  # at import, not in the middle of a run, when the first answer is not a plain number
    raise ImportError("Rewards compare answers with math-verify: pip install qerl-trl[math].") from error

ANSWER_MARK = "####"
_MARKED = re.compile(r"####[ \t]*(\S[^\n]*)")
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_PLAIN_NUMBER = re.compile(r"^-?\d+(?:\.\d+)?$")


def completion_text(completion: str | list[dict]) -> str:
    """The text of a completion, plain or conversational."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def final_answer(text: str) -> str | None:
    """What a solution states as its answer: the rest of the last `####` line, or the last `\\boxed{}`; `None` without."""
    found = _MARKED.findall(text) or _BOXED.findall(text)
    return found[-1].strip() if found else None


def is_correct(text: str, gold: str) -> bool:
    """Whether the answer that `text` states equals `gold` (an answer, or a worked solution that ends in one).

    Equal numbers are recognised directly; anything else goes to math-verify, so `1/2`, `0.5` and `\\frac{1}{2}` agree.
    """
    answer = final_answer(text)
    if answer is None:
        return False
    gold = final_answer(gold) or gold
    plain_answer, plain_gold = _plain(answer), _plain(gold)
    if _PLAIN_NUMBER.match(plain_answer) and _PLAIN_NUMBER.match(plain_gold):
        return float(plain_answer) == float(plain_gold)
    return bool(verify(parse(f"${gold}$"), parse(f"${answer}$")))


def correctness_reward(completions: list, answer: list[str], **kwargs) -> list[float]:
    """1.0 where the stated answer equals the dataset's `answer`, else 0.0."""
    return [float(is_correct(completion_text(c), gold)) for c, gold in zip(completions, answer, strict=True)]


def format_reward(completions: list, **kwargs) -> list[float]:
    """1.0 where the completion ends in exactly one `#### answer` line after at least one line of work, else 0.0."""
    return [float(_well_formed(completion_text(c))) for c in completions]


def _well_formed(text: str) -> bool:
    lines = [line for line in text.strip().split("\n") if line.strip()]
    marks = sum(line.lstrip().startswith(ANSWER_MARK) for line in lines)
    return len(lines) >= 2 and marks == 1 and bool(_MARKED.match(lines[-1].lstrip()))


def _plain(answer: str) -> str:
    return answer.replace(",", "").replace("$", "").strip().rstrip(".")


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
