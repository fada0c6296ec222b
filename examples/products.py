# /// script
# requires-python = ">=3.11"
# dependencies = ["qerl-trl[math,track] @ git+https://github.com/qerl-trl/qerl-trl"]
# ///
"""Products of two digits as a chat: the task of `make demo-real`, learned by a real model on a CPU.

qerl-trl train --config smollm2     # SmolLM2-135M-Instruct, from the Hub
"""

import itertools
import random


def products(held_out: int = 40) -> dict[str, list[dict]]:
    """All 81 products of 1 to 9. Both orders of a pair are in one split, so no held-out product was seen reversed."""
    pairs = list(itertools.combinations_with_replacement(range(1, 10), 2))
    random.Random(0).shuffle(pairs)
    rows: list[dict] = []
    for pair in pairs:
        for a, b in sorted({pair, pair[::-1]}):
            rows.append({"prompt": f"Solve the following multiplication: {a} * {b}.", "answer": str(a * b)})
    return {"train": rows[held_out:], "test": rows[:held_out]}


def brief(completions, **kwargs) -> list[float]:
    """Reward for the result alone, as the prompt asks."""
    return [float(len(completion[-1]["content"].split()) == 1) for completion in completions]
