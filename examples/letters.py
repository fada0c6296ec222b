# /// script
# requires-python = ">=3.11"
# dependencies = ["qerl-trl[math,track] @ git+https://github.com/qerl-trl/qerl-trl"]
# ///
"""Write a word backwards: custom data and a custom reward, without arithmetic. Minutes on a CPU.

accelerate launch examples/letters.py                                # the task in Python, below
qerl-trl train --task examples/tasks/letters.yaml --config letters   # the same task in YAML
"""

import random

from qerl_trl import QeRLGRPOTrainer, Script, Task

CONSONANTS, VOWELS = "BCDFGKLMNPRSTVZ", "AEIOU"


def word(rng: random.Random, letters: int) -> str:
    """A pronounceable made-up word."""
    start = rng.random() < 0.5
    return "".join(rng.choice(VOWELS if (i + start) % 2 else CONSONANTS) for i in range(letters))


def words(train: int = 2000, test: int = 400, seed: int = 0) -> dict[str, list[dict]]:
    """The data: words of 4 to 8 letters, without overlap of the splits."""
    rng = random.Random(seed)
    seen: dict = {}
    while len(seen) < train + test:
        seen[word(rng, rng.randint(4, 8))] = None
    rows = [{"prompt": f"Backwards: {each}", "answer": each[::-1]} for each in seen]
    return {"train": rows[:train], "test": rows[train:]}


def letters_in_place(completions, answer, **kwargs) -> list[float]:
    """The reward: the share of letters in the right place."""
    texts = [completion[0]["content"].strip() for completion in completions]
    pairs = zip(texts, answer, strict=True)
    return [sum(map(str.__eq__, text, right)) / max(len(text), len(right)) for text, right in pairs]


TASK = Task(
    name="words backwards",
    dataset_name=words,
    reward_funcs=[letters_in_place],
    grader="exact",  # evaluation counts complete words only
    answer_format="whole",
)

if __name__ == "__main__":
    script = Script.parse(TASK, config="letters")
    script.train(QeRLGRPOTrainer(**script.trainer_arguments()))
