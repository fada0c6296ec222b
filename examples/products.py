# /// script
# requires-python = ">=3.11"
# dependencies = ["qerl-trl[math,track] @ git+https://github.com/qerl-trl/qerl-trl"]
# ///
"""Products of two digits, asked as a chat: the task of `make demo-real`, where a real model learns it on a CPU.

qerl-trl train --config smollm2     # SmolLM2-135M-Instruct, from the Hub
"""

import itertools
import random
import re

HOW = "Give only the result as your final answer. Answer with only the result, nothing else."


def products(held_out: int = 40) -> dict[str, list[dict]]:
    """All 81 of 1 to 9; a pair is on one side in both orders, so that nothing held out was seen the other way round."""
    pairs = list(itertools.combinations_with_replacement(range(1, 10), 2))
    random.Random(0).shuffle(pairs)
    rows: list[dict] = []
    for pair in pairs:
        for a, b in sorted({pair, pair[::-1]}):
            rows.append({"prompt": f"Solve the following multiplication: {a} * {b}. {HOW}", "answer": str(a * b)})
    return {"train": rows[held_out:], "test": rows[:held_out]}


def last_number(answer: str, reference: str) -> bool:
    """The grader: what counts is the last number of the first line, so that a whole sentence is right, too."""
    return re.findall(r"\d+", answer.strip().partition("\n")[0])[-1:] == [reference]


def right(completions, answer, **kwargs) -> list[float]:
    texts = [completion[-1]["content"] for completion in completions]
    return [float(last_number(*pair)) for pair in zip(texts, answer, strict=True)]


def brief(completions, **kwargs) -> list[float]:
    """The result alone, as it was asked for."""
    return [float(completion[-1]["content"].strip().isdigit()) for completion in completions]
