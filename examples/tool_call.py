"""Call a tool through TRL's `tools=`: prices are in a list unknown to the model. Minutes on a CPU.

accelerate launch examples/tool_call.py
qerl-trl train --task examples/tasks/tool_call.yaml --config tool_call
"""

import random

from letters import word

from qerl_trl import QeRLGRPOTrainer, Script, Task

_RANDOM = random.Random(1)
PRICES = {word(_RANDOM, _RANDOM.randint(3, 6)): _RANDOM.randint(2, 50) for _ in range(500)}


def price(item: str) -> int:
    """
    Looks up a price.

    Args:
        item: What is sold.
    """
    return PRICES[item]


def question(items: list[str]) -> str:
    return f"What does {items[0]} cost?" if len(items) == 1 else f"What do {' and '.join(items)} cost together?"


def questions(train: int = 2000, test: int = 400, seed: int = 0) -> dict[str, list[dict]]:
    """The data: prices and sums of two prices; the items of the test split occur there only."""
    rng, items = random.Random(seed), sorted(PRICES)
    rng.shuffle(items)
    sides = {"train": (train, items[100:]), "test": (test, items[:100])}
    rows = {}
    for side, (count, known) in sides.items():
        asked = [rng.sample(known, rng.choice([1, 2, 2])) for _ in range(count)]
        rows[side] = [{"prompt": question(a), "items": a, "answer": str(sum(PRICES[i] for i in a))} for a in asked]
    return rows


def looked_up(completions, items, **kwargs) -> list[float]:
    """The first reward: the share of items looked up in the price list."""
    shares = []
    for completion, wanted in zip(completions, items, strict=True):
        calls = [each["function"] for message in completion for each in message.get("tool_calls") or []]
        asked = {each["arguments"].get("item") for each in calls if isinstance(each["arguments"], dict)}
        shares.append(len(asked & set(wanted)) / len(wanted))
    return shares


TASK = Task(
    name="prices from a tool",
    dataset_name=questions,
    tools=[price],
    reward_funcs=[looked_up, "correctness_reward"],  # the first one decides whether a problem counts as solved
    grader="numeric",
)

if __name__ == "__main__":
    script = Script.parse(TASK, config="tool_call")
    script.train(QeRLGRPOTrainer(**script.trainer_arguments()))
