# /// script
# requires-python = ">=3.11"
# dependencies = ["qerl-trl[math,track] @ git+https://github.com/qerl-trl/qerl-trl"]
# ///
"""Products of two digits as a chat: the task of `make demo-real`, learned by a real model on a CPU.

qerl-trl train --config smollm2     # SmolLM2-135M-Instruct, from the Hub
"""

import itertools
import random
import re

HOW = "Give only the result as your final answer. Answer with only the result, nothing else."


def products(held_out: int = 40) -> dict[str, list[dict]]:
    """All 81 products of 1 to 9. Both orders of a pair are in one split, so no held-out product was seen reversed."""
    pairs = list(itertools.combinations_with_replacement(range(1, 10), 2))
    random.Random(0).shuffle(pairs)
    rows: list[dict] = []
    for pair in pairs:
        for a, b in sorted({pair, pair[::-1]}):
            rows.append({"prompt": f"Solve the following multiplication: {a} * {b}. {HOW}", "answer": str(a * b)})
    return {"train": rows[held_out:], "test": rows[:held_out]}


def last_number(answer: str, reference: str) -> bool:
    """The grader: compares the last number of the first line, so that a full sentence is right, too."""
    return re.findall(r"\d+", answer.strip().partition("\n")[0])[-1:] == [reference]


def right(completions, answer, **kwargs) -> list[float]:
    texts = [completion[-1]["content"] for completion in completions]
    return [float(last_number(*pair)) for pair in zip(texts, answer, strict=True)]


def brief(completions, **kwargs) -> list[float]:
    """Reward for the result alone, as the prompt asks."""
    return [float(completion[-1]["content"].strip().isdigit()) for completion in completions]
