#!/usr/bin/env python3
"""Generated word problems in GSM8K's format, with a held-out split that training cannot reach.

    python make_problems.py            # writes train.jsonl and test.jsonl next to this file, always the same bytes

A problem is a template with numbers, names and things. A line of the files is `{"question": ..., "answer": ...}`; the
answer has one line per step and ends with `#### n`, as in GSM8K (without its `<<48/2=24>>` calculator marks).

The split comes before any draw: `bucket(template, numbers)` hashes the template's name and the numbers, without names
and things, and holds out a fifth of the combinations. `pretrain.py` and `train.jsonl` draw from the other four fifths,
so training has not seen a held-out problem, not even with other names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
HELD_OUT_BUCKETS, BUCKETS = 2, 10
LARGEST = 199  # maximum of all quantities in a problem and its solution

NAMES = ("Tom", "Anna", "Ben", "Lucy", "Omar", "Mia", "Sam", "Nina")
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")


@dataclass(frozen=True)
class Template:
    """One kind of story: `{who}`, `{other}` and `{thing}` are drawn freely, the numbers decide the solution.

    `steps` are (result, expression, sentence): the expression has two known quantities around one of `+-*/`, and the
    sentence shows the equation in place of `{eq}`.
    """

    name: str
    question: str
    numbers: dict[str, tuple[int, int]]
    steps: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Problem:
    template: Template
    numbers: dict[str, int]
    story: dict[str, str] = field(hash=False)

    @property
    def question(self) -> str:
        return self.template.question.format(**self.numbers, **self.story)

    def equations(self) -> list[tuple[int, str, int, int]] | None:
        """(left, operator, right, result) of each step; None if a result is not an integer from 1 to LARGEST."""
        known = dict(self.numbers)
        out = []
        for result, expression, _ in self.template.steps:
            left, op, right = re.fullmatch(r"(\w+)([-+*/])(\w+)", expression).groups()
            value = calculate(known[left], op, known[right])
            if value is None:
                return None
            known[result] = value
            out.append((known[left], op, known[right], value))
        return out

    def lines(self) -> list[str]:
        return [
            sentence.format(eq=f"{a}{op}{b}={c}", **self.story)
            for (_, _, sentence), (a, op, b, c) in zip(self.template.steps, self.equations(), strict=True)
        ]

    @property
    def result(self) -> int:
        return self.equations()[-1][3]

    @property
    def answer(self) -> str:
        return "\n".join([*self.lines(), f"#### {self.result}"])


def calculate(a: int, op: str, b: int) -> int | None:
    """a op b, or None if it is not an integer from 1 to LARGEST."""
    if op == "/":
        if b == 0 or a % b:
            return None
        value = a // b
    else:
        value = {"+": a + b, "-": a - b, "*": a * b}[op]
    return value if 1 <= value <= LARGEST else None


def bucket(template: str, numbers: dict[str, int]) -> int:
    """0 to BUCKETS-1 from the template's name and the numbers; the first HELD_OUT_BUCKETS are held out."""
    key = json.dumps([template, sorted(numbers.items())])
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % BUCKETS


def held_out(problem: Problem) -> bool:
    return bucket(problem.template.name, problem.numbers) < HELD_OUT_BUCKETS


def problems(rng: random.Random, from_held_out: bool) -> Iterator[Problem]:
    """Endless problems of one side of the split, with equal shares of the templates."""
    while True:
        template = rng.choice(TEMPLATES)
        who, other = rng.sample(NAMES, 2)
        story = {"who": who, "other": other, "thing": rng.choice(THINGS)}
        while True:
            numbers = {name: rng.randint(low, high) for name, (low, high) in template.numbers.items()}
            problem = Problem(template, numbers, story)
            if held_out(problem) == from_held_out and problem.equations() is not None:
                break
        yield problem


def distinct(count: int, seed: int, from_held_out: bool) -> list[Problem]:
    """`count` problems with distinct combinations of template and numbers."""
    seen: set[tuple] = set()
    out: list[Problem] = []
    for problem in problems(random.Random(seed), from_held_out):
        key = (problem.template.name, *sorted(problem.numbers.items()))
        if key not in seen:
            seen.add(key)
            out.append(problem)
        if len(out) == count:
            return out
    raise AssertionError("problems() is endless")


SMALL, MIDDLE, LARGE = (2, 9), (2, 20), (10, 60)

TEMPLATES = (
    # two steps
    Template(
        "gain_lose",
        "{who} has {a} {thing}. {other} gives {who} {b} more. "
        "Then {who} loses {c}. How many {thing} does {who} have now?",
        {"a": LARGE, "b": MIDDLE, "c": MIDDLE},
        (("x", "a+b", "{who} gets {eq} {thing}."), ("y", "x-c", "After the loss there are {eq}.")),
    ),
    Template(
        "lose_gain",
        "{who} had {a} {thing} and sold {b} of them. Later {who} bought {c} {thing}. How many {thing} are there now?",
        {"a": LARGE, "b": MIDDLE, "c": MIDDLE},
        (("x", "a-b", "{who} keeps {eq} {thing}."), ("y", "x+c", "With the new ones that is {eq}.")),
    ),
    Template(
        "boxes_plus",
        "{who} has {a} boxes with {b} {thing} in each box and {c} loose {thing}. How many {thing} does {who} have?",
        {"a": SMALL, "b": SMALL, "c": MIDDLE},
        (("x", "a*b", "The boxes hold {eq} {thing}."), ("y", "x+c", "Altogether {who} has {eq}.")),
    ),
    Template(
        "boxes_minus",
        "{who} fills {a} bags with {b} {thing} each. Then {c} {thing} break. How many good {thing} are left?",
        {"a": SMALL, "b": SMALL, "c": MIDDLE},
        (("x", "a*b", "The bags hold {eq} {thing}."), ("y", "x-c", "That leaves {eq}.")),
    ),
    Template(
        "share_gained",
        "{who} has {a} {thing} and finds {b} more. {who} shares them equally among {c} friends. "
        "How many {thing} does each get?",
        {"a": LARGE, "b": MIDDLE, "c": SMALL},
        (("x", "a+b", "{who} has {eq} {thing}."), ("y", "x/c", "Each friend gets {eq}.")),
    ),
    Template(
        "share_left",
        "{who} had {a} {thing} and ate {b}. The rest goes into {c} equal piles. How many {thing} are in a pile?",
        {"a": LARGE, "b": MIDDLE, "c": SMALL},
        (("x", "a-b", "There are {eq} {thing} left."), ("y", "x/c", "Each pile has {eq}.")),
    ),
    Template(
        "older",
        "{who} has {a} {thing}. {other} has {b} more than {who}. How many {thing} do they have together?",
        {"a": LARGE, "b": MIDDLE},
        (("x", "a+b", "{other} has {eq} {thing}."), ("y", "a+x", "Together they have {eq}.")),
    ),
    Template(
        "fewer",
        "{who} has {a} {thing}. {other} has {b} fewer than {who}. How many {thing} do they have together?",
        {"a": LARGE, "b": MIDDLE},
        (("x", "a-b", "{other} has {eq} {thing}."), ("y", "a+x", "Together they have {eq}.")),
    ),
    Template(
        "times",
        "{who} has {a} {thing}. {other} has {b} times as many. How many {thing} do they have together?",
        {"a": MIDDLE, "b": SMALL},
        (("x", "a*b", "{other} has {eq} {thing}."), ("y", "a+x", "Together they have {eq}.")),
    ),
    Template(
        "change",
        "A pack of {thing} costs {a} dollars. {who} buys {b} packs and pays with {c} dollars. "
        "How much change does {who} get?",
        {"a": SMALL, "b": SMALL, "c": (20, 99)},
        (("x", "a*b", "The packs cost {eq} dollars."), ("y", "c-x", "The change is {eq} dollars.")),
    ),
    Template(
        "earn_save",
        "{who} earns {a} dollars an hour and works {b} hours. {who} spends {c} dollars. How many dollars are left?",
        {"a": SMALL, "b": SMALL, "c": MIDDLE},
        (("x", "a*b", "{who} earns {eq} dollars."), ("y", "x-c", "What is left is {eq} dollars.")),
    ),
    Template(
        "two_days",
        "{who} reads {a} pages a day for {b} days, and {other} reads {c} pages. How many pages do they read together?",
        {"a": SMALL, "b": SMALL, "c": LARGE},
        (("x", "a*b", "{who} reads {eq} pages."), ("y", "x+c", "Together they read {eq} pages.")),
    ),
    # three steps
    Template(
        "two_kinds",
        "{who} buys {a} bags of {b} {thing} and {c} boxes of {d} {thing}. How many {thing} is that?",
        {"a": SMALL, "b": SMALL, "c": SMALL, "d": SMALL},
        (
            ("x", "a*b", "The bags hold {eq}."),
            ("y", "c*d", "The boxes hold {eq}."),
            ("z", "x+y", "That is {eq} {thing}."),
        ),
    ),
    Template(
        "shop_change",
        "{who} buys a toy for {a} dollars and {b} pens for {c} dollars each, and pays with {d} dollars. "
        "How much change is due?",
        {"a": MIDDLE, "b": SMALL, "c": SMALL, "d": (40, 99)},
        (
            ("x", "b*c", "The pens cost {eq} dollars."),
            ("y", "a+x", "The total is {eq} dollars."),
            ("z", "d-y", "The change is {eq} dollars."),
        ),
    ),
    Template(
        "three_people",
        "{who} picks {a} {thing}. {other} picks {b} more than {who}. They give away {c}. How many {thing} remain?",
        {"a": LARGE, "b": MIDDLE, "c": MIDDLE},
        (
            ("x", "a+b", "{other} picks {eq} {thing}."),
            ("y", "a+x", "Together they pick {eq}."),
            ("z", "y-c", "There remain {eq}."),
        ),
    ),
    Template(
        "bus",
        "A bus has {a} people. At one stop {b} get off and {c} get on, at the next {d} get off. "
        "How many people are on the bus?",
        {"a": LARGE, "b": MIDDLE, "c": MIDDLE, "d": SMALL},
        (
            ("x", "a-b", "After leaving there are {eq}."),
            ("y", "x+c", "Others get on, so {eq}."),
            ("z", "y-d", "After the next stop {eq}."),
        ),
    ),
    Template(
        "sell_rest",
        "{who} bakes {a} trays of {b} cakes, eats {c} and sells the rest for {d} dollars each. "
        "How many dollars does {who} earn?",
        {"a": SMALL, "b": SMALL, "c": MIDDLE, "d": SMALL},
        (
            ("x", "a*b", "{who} bakes {eq} cakes."),
            ("y", "x-c", "To sell there are {eq}."),
            ("z", "y*d", "{who} earns {eq} dollars."),
        ),
    ),
    Template(
        "team_share",
        "{who} has {a} {thing} and {other} has {b}. "
        "They lose {c} and share the rest between {d} children. How many does each get?",
        {"a": LARGE, "b": MIDDLE, "c": MIDDLE, "d": SMALL},
        (
            ("x", "a+b", "Together they have {eq} {thing}."),
            ("y", "x-c", "After the loss {eq}."),
            ("z", "y/d", "Each child gets {eq}."),
        ),
    ),
)


def write(path: Path, chosen: list[Problem]) -> None:
    text = "".join(json.dumps({"question": p.question, "answer": p.answer}) + "\n" for p in chosen)
    beside = path.with_suffix(".tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--test", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train, test = (
        distinct(args.train, args.seed, from_held_out=False),
        distinct(args.test, args.seed + 1, from_held_out=True),
    )
    for what in (lambda p: p.question, lambda p: (p.template.name, *sorted(p.numbers.items()))):
        overlap = set(map(what, train)) & set(map(what, test))
        assert not overlap, f"{len(overlap)} problems are on both sides of the split, such as {next(iter(overlap))}"
    write(args.out / "train.jsonl", train)
    write(args.out / "test.jsonl", test)
    print(f"{len(train)} training and {len(test)} held-out problems in {args.out}")


if __name__ == "__main__":
    main()
