"""A protocol file as runs: arms x rates x seeds by stage, what earlier stages chose, and the records of runs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from common import RESULTS, ROOT

LEARNING = RESULTS / "learning"
CANDIDATES = "candidates.json"
#: parts of the held-out problems, in their order in held_out.jsonl
PARTS = ("validation", "test", "unseen")
Records = Mapping[str, dict[str, Any]]


class NotYet(Exception):
    """A stage needs the records of an earlier one."""


def encoded(verdicts: list[bool]) -> str:
    """Verdicts as hexadecimal digits, the first problem in the highest bit."""
    text = "".join("01"[bool(each)] for each in verdicts)
    return "".join(f"{int(text[i : i + 4].ljust(4, '0'), 2):x}" for i in range(0, len(text), 4))


def decoded(digits: str, count: int) -> list[int]:
    return [int(bit) for digit in digits for bit in f"{int(digit, 16):04b}"][:count]


def verdicts(record: dict[str, Any], part: str, when: str = "after") -> list[int]:
    return decoded(record["answers"][part][when], record["problems"][part])


def accuracy(record: dict[str, Any], part: str, when: str = "after") -> float:
    found = verdicts(record, part, when)
    return sum(found) / len(found)


def read(*folders: Path) -> dict[str, dict[str, Any]]:
    """Records of runs by name, in the order of their names."""
    files = {file.stem: file for folder in folders for file in folder.glob("*.json") if file.name != CANDIDATES}
    return {name: json.loads(files[name].read_text()) for name in sorted(files)}


@dataclass(frozen=True)
class Planned:
    """One run. A stage with options of its own is part of the name."""

    stage: str
    task: str
    arm: str
    noise: str
    rate: float
    seed: int
    own: bool = False

    @property
    def name(self) -> str:
        parts = [self.task, self.arm, self.noise, f"{self.rate:g}", f"seed{self.seed}", *[self.stage] * self.own]
        return "_".join(parts).replace(".", "p")


class Protocol:
    def __init__(self, file: Path) -> None:
        self.file, content = file, yaml.safe_load(file.read_text())
        self.content: dict[str, Any] = content
        further: dict[str, Any] = content.get("further", {})
        self.groups = {"all": list(content["arms"]), "further": list(further)}
        self.arms, self.stages, self.noises = content["arms"] | further, content["stages"], content["noises"]
        self.rates, self.problems = content["rates"], content["problems"]

        recipe = yaml.safe_load((ROOT / content["config"]).read_text()) | content.get("options", {})
        self.longest = recipe["max_completion_length"]

    def noisy(self, arm: str) -> bool:
        return not self.arms[arm]["arm"].endswith("-no-noise")

    def base(self, arm: str) -> str:
        """What an arm's frozen weights are: format and scale rule."""
        return " ".join([self.arms[arm]["arm"].partition("-")[0], self.arms[arm].get("scale_rule", "")])

    def measured(self, stage: str) -> dict[str, int]:
        """Numbers of held-out problems that a stage's runs answer."""
        wanted = self.stages[stage]["measure"]
        assert wanted == list(PARTS[: len(wanted)]), f"{stage}: measure is not a beginning of {PARTS}"
        return {part: self.problems[part] for part in wanted}

    def options(self, run: Planned) -> dict[str, Any]:
        """Options of the training command, but for model, task and folder."""
        from qerl_trl.tasks.arms import ARMS

        own = {name: value for name, value in self.arms[run.arm].items() if name not in ("like", "rate")}
        found = {**ARMS[own.pop("arm")], **self.noises.get(run.noise, {}), **own, **self.content.get("options", {})}
        found |= self.stages[run.stage].get("options", {})
        held_out = sum(self.measured(run.stage).values())
        return found | {"learning_rate": run.rate, "seed": run.seed, "data_seed": run.seed, "eval_problems": held_out}

    def second(self, measured: Mapping[str, Any]) -> str:
        """The second task: the first candidate that passes. `measured`: content of candidates.json."""
        for name in self.content["second"]["candidates"]:
            if name in measured and self.passes(measured[name]):
                return name
        raise NotYet("no candidate has passed; run `learning.py select`")

    def passes(self, row: Mapping[str, Any]) -> bool:
        low, high = self.content["second"]["greedy"]
        enough = row.get("problems") and row["pass_16"] >= self.content["second"]["gain"] * row["greedy_of_sampled"]
        return bool(enough and low <= row["greedy"] <= high)

    def _tuned(self, arm: str, noise: str, rate: float, records: Records) -> float:
        run = Planned("rates", next(iter(self.content["tasks"])), arm, noise, rate, 0)
        if run.name not in records:
            raise NotYet(f"{run.name} has not run")
        return accuracy(records[run.name], "validation")

    def best_noise(self, arm: str, records: Records) -> str:
        """Of validation accuracy at the stage's rate; `none` for an arm without noise."""
        arm = self.arms[arm].get("like", arm)
        if not self.noisy(arm):
            return "none"
        (rate,) = self.stages["noise"]["rates"]
        return max(self.noises, key=lambda noise: self._tuned(arm, noise, rate, records))

    def best_rate(self, arm: str, noise: str, records: Records) -> float:
        own = self.arms[arm]
        arm = own.get("like", arm)
        return own.get("rate") or max(self.rates, key=lambda rate: self._tuned(arm, noise, rate, records))

    def planned(self, stage: str, records: Records, measured: Mapping[str, Any]) -> tuple[list[Planned], list[str]]:
        """Runs of a stage, and what the missing ones wait for. `measured`: content of candidates.json."""
        given, task, runs, missing = self.stages[stage], next(iter(self.content["tasks"])), list[Planned](), []
        for arm in self.groups[given["arms"]] if isinstance(given["arms"], str) else given["arms"]:
            try:
                task = self.second(measured) if given.get("task") == "second" else task
                every = given["noises"] == "all" and self.noisy(arm)
                for noise in self.noises if every else [self.best_noise(arm, records)]:
                    rates = self.rates if given["rates"] == "all" else given["rates"]
                    for rate in [self.best_rate(arm, noise, records)] if rates == "best" else rates:
                        own = "options" in given
                        runs += [Planned(stage, task, arm, noise, rate, seed, own) for seed in given["seeds"]]
            except NotYet as reason:
                missing.append(f"{arm} waits: {reason}")
        return sorted(runs, key=lambda run: run.seed), missing
