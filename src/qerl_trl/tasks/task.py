"""A task as one object: data, rewards, grader, chat template, tools or environment. In Python or YAML, in TRL's names.

```yaml
# words.yaml
name: words backwards
dataset_name: words                        # words/train.jsonl and words/test.jsonl next to this file, or a Hub id
reward_funcs: [words.py:letters_in_place]  # also names of trl.rewards, package.module:function, a reward model
grader: exact
answer_format: whole
```

Use it with `--task words.yaml` in the example script, `qerl-trl train`, `eval` and `merge`; the cards name it.
"""
# ruff: noqa: RUF009  (fields of a dataclass made by a function)

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import rewards as trl_rewards

from ..checkpoint.settings import source_sha256
from ..support.recipes import contents
from . import data as problems
from . import grading

#: factories among TRL's rewards, with the values of `trl grpo`
_MADE = {"get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256}}
_OURS = ("correctness_reward", "format_reward")
_THEIRS = [name for name in dir(trl_rewards) if name.endswith(("_reward", "_punishment"))]


def _said(default: Any, help: str, parsed: Any = str) -> Any:
    """Make a field with an option in recipes and on the command line, parsed as `parsed`."""
    return field(default=default, metadata={"help": help, "parsed": parsed})


class Json(dict):
    """A mapping, written as JSON on the command line."""

    def __init__(self, text: str) -> None:
        super().__init__(json.loads(text))


@dataclass
class Task:
    """See the module's docstring. Files are searched for next to the YAML file, then in the working directory.

    Attributes:
        name: in words, for results and cards.
        dataset_name: Hub id, folder with `<split>.jsonl`, .jsonl file, `file.py:function` or a function returning
            `{split: rows}`, or `reasoning_gym:NAME`. Columns: `prompt`, `question` or `problem` for the question (a
            text or messages), `answer` or `solution` for the reference; the rewards get all columns.
        dataset_kwargs: arguments of the function; of reasoning-gym its settings, `train_size` and `test_size`.
        prompt_suffix: text after every question that is a text.
        test_split_size: share or number of training problems to hold out, instead of a test split.
        formatting_func: function from a row to one with `prompt` (and `answer`).
        reward_funcs: functions with TRL's signature, or their names; `correctness_reward` and `format_reward` are ours.
        reward_weights: one per reward, in order.
        grader: comparison with the reference (grading.py), or `reward`: by the first reward.
        answer_format: `marked` (after `####` or in a box), `whole` (all text) or `last` (the last number or word).
        chat_template_path: Jinja file to replace the tokenizer's chat template.
        tools: functions for the model to call, or their names.
        environment_factory: class (or its name) of an environment for TRL's `environment_factory`.
        solved_reward: smallest first reward of a solved problem, if answers are not graded (tools, environments, no
            reference, `grader: reward`).
    """

    name: str | None = None
    dataset_name: str | Callable[[], Mapping[str, Any]] | Mapping[str, Any] | None = _said(
        None, "Hub dataset, folder with train.jsonl and test.jsonl, .jsonl file, file.py:function, reasoning_gym:NAME."
    )
    dataset_config: str | None = _said(None, "Configuration of a Hub dataset.")
    dataset_kwargs: dict[str, Any] | None = _said(None, "Arguments of the function or reasoning-gym set (JSON).", Json)
    dataset_train_split: str = _said("train", "Split to train on (default: train).")
    dataset_test_split: str = _said("test", "Split that is held out (default: test).")
    test_split_size: float | None = _said(None, "Hold out this share (or number) of the training problems.", float)
    formatting_func: str | Callable[[dict], dict] | None = _said(
        None, "Function from a row to one with a prompt: file.py:function."
    )
    prompt_column: str | None = _said(None, "Column with what is asked.")
    answer_column: str | None = _said(None, "Column with the reference answer.")
    system_prompt: str | None = _said(None, "System message put before every question.")
    prompt_suffix: str | None = _said(None, "Text put after every question.")
    reward_funcs: list[str | Callable] | None = _said(
        None, "Rewards: file.py:function, package.module:function, a name of trl.rewards, or a reward model.", list[str]
    )
    reward_weights: list[float] | None = None
    grader: str | grading.Grader = _said(
        "auto", "How answers are compared: auto (default), exact, numeric, math, file.py:function, or reward."
    )
    answer_format: str = _said("marked", "marked (after #### or boxed; default), whole or last.")
    chat_template_path: str | None = _said(None, "Jinja file that replaces the tokenizer's chat template.")
    tools: list[str | Callable] | None = _said(None, "Tools: file.py:function or package.module:function.", list[str])
    environment_factory: str | Callable[[], Any] | None = _said(None, "Environment: file.py:Class.")
    solved_reward: float = _said(1.0, "First reward that counts as solved, where nothing is graded.", float)
    #: search path of files
    folders: list[Path] = field(default_factory=lambda: [Path()], repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.reward_funcs, str) or callable(self.reward_funcs):  # one, as in TRL
            self.reward_funcs = [self.reward_funcs]
        if self.answer_format not in grading.FORMS:
            raise ValueError(
                f"answer_format={self.answer_format!r} is none of {', '.join(grading.FORMS)}. Pass 'marked' for "
                "answers after #### or in a box, 'whole' for a whole text, 'last' for its last number or word."
            )
        if self._gym and self.answer_format == "marked" and self.system_prompt is None:
            self.system_prompt = grading.BOXED_PROMPT

    @classmethod
    def read(cls, file: str | Path, folders: list[Path] | None = None) -> "Task":
        """Read a YAML file."""
        path = Path(file)
        content = contents(path)
        known = [each.name for each in dataclasses.fields(cls) if each.name != "folders"]
        if unknown := sorted(map(str, set(content) - set(known))):
            raise ValueError(
                f"{path} has {', '.join(unknown)}: unknown. A task has {', '.join(known)}; put settings of a run into "
                "--config."
            )
        return cls(**{"name": path.stem.replace("_", " "), **content}, folders=[path.parent, *(folders or [Path()])])

    def with_said(self, said: Mapping[str, Any]) -> "Task":
        """Return a copy with fields replaced by those of a recipe or command line."""
        given = {name: value for name, value in said.items() if value is not None and name in PARSED}
        if given.get("dataset_name") not in (None, self.dataset_name):  # the settings are of the previous data
            given = {"dataset_config": None, "dataset_kwargs": None, **given}
            if given["dataset_name"].startswith(problems.GYM):
                given["name"] = given["dataset_name"]
        return dataclasses.replace(self, **given)

    @property
    def _gym(self) -> str:
        """Name of the reasoning-gym data set, or nothing."""
        before, prefix, name = str(self.dataset_name).partition(problems.GYM)
        return name if prefix and not before else ""

    @property
    def label(self) -> str:
        return self.name or "problems with one answer"

    @property
    def interactive(self) -> bool:
        """True if a completion has several turns."""
        return bool(self.tools or self.environment_factory)

    @property
    def hub_dataset(self) -> str | None:
        """Hub id for a card's link, if any."""
        source = self._source()
        return source if isinstance(source, str) else None

    def _source(self) -> Any:
        named = self.dataset_name
        if named is None:
            raise ValueError("The task has no data: give it a dataset_name.")
        if isinstance(named, str) and ":" not in named:
            return grading.found(named, self.folders) or named
        if self._gym:
            named = functools.partial(problems.of_gym, self._gym)
        elif isinstance(named, str):
            named = grading.function_named(named, "dataset_name", self.folders)
        return functools.partial(named, **self.dataset_kwargs) if callable(named) and self.dataset_kwargs else named

    @property
    def held_out_split(self) -> str | None:
        """Split used for evaluation; `None` for a part of the training split."""
        return self.dataset_test_split if self.test_split_size is None else None

    def splits(self) -> tuple[Dataset, Dataset]:
        """Load the (training, held-out) problems with their prompts."""
        needed = not self.interactive and (self.reward_funcs is None or "correctness_reward" in self.reward_funcs)
        by_text = needed or self.grader == "exact"  # custom rewards may compute with numbers
        as_text = ((self.answer_column,) if self.answer_column else problems.ANSWERS) if by_text else ()
        data = problems.read(self._source(), self.dataset_config, self.folders, as_text)
        parts = problems.held_out(data, self.dataset_train_split, self.dataset_test_split, self.test_split_size)
        if self.formatting_func is not None:
            function = self._function(self.formatting_func, "formatting_func")
            parts = tuple(part.map(function) for part in parts)
        named = self.dataset_name if isinstance(self.dataset_name, str) else "The dataset"
        columns = (self.system_prompt, self.prompt_column, self.answer_column, needed, named, self.prompt_suffix)
        train, test = (problems.with_prompts(part, *columns) for part in parts)
        for part in (train, test) if needed else (test,):
            if self.graded(part):
                instead = f", or grader={grading.BY_REWARD!r}: the first reward then decides"
                grading.require_references(part["answer"], self.grader, self.answer_format, instead)
        return train, test

    def _function(self, said: str | Callable, option: str) -> Callable[..., Any]:
        return grading.function_named(said, option, self.folders) if isinstance(said, str) else said

    def rewards(self) -> list[str | Callable]:
        """Return the reward functions; a reward model stays a name."""
        if self.reward_funcs is None and self.environment_factory is not None:
            return []  # the environment gives rewards
        named = self.reward_funcs
        if named is None:
            named = list(_OURS) if self.answer_format == "marked" else [_OURS[0]]
        return [self._reward(each) if isinstance(each, str) else each for each in named]

    def _reward(self, name: str) -> str | Callable:
        if name == "correctness_reward":
            grader = self._grader() if self._gym else self.grader
            return grading.correctness(grader, self.answer_format, self.folders)
        if name == "format_reward":
            return grading.format_reward
        if name in _THEIRS:
            theirs = getattr(trl_rewards, name)
            return theirs(**_MADE[name]) if name in _MADE else theirs
        folder = grading.found(name, self.folders)
        if ".py:" not in name and ("/" in name or folder):  # a model, on the Hub or in a folder
            return str(folder or name)
        return grading.function_named(name, "reward_funcs", self.folders)

    def weights(self) -> list[float] | None:
        """Return the reward weights; defaults: 1 for the answer, 0.1 for its form."""
        if self.reward_weights is not None or self.reward_funcs is not None or self.environment_factory is not None:
            return self.reward_weights
        return [1.0, 0.1][: len(self.rewards())]

    def for_trainer(self) -> dict[str, Any]:
        """Return the arguments for a TRL trainer: data, rewards, and tools or the environment if any."""
        if self.grader not in (*grading.GRADERS, grading.BY_REWARD):
            self._grader()  # raises for an unknown name, before a model is loaded
        train, test = self.splits()
        arguments: dict[str, Any] = {"reward_funcs": self.rewards(), "train_dataset": train, "eval_dataset": test}
        if self.tools:
            arguments["tools"] = [self._function(each, "tools") for each in self.tools]
        if self.environment_factory is not None:
            arguments["environment_factory"] = self._function(self.environment_factory, "environment_factory")
        return arguments

    def prepared(self, tokenizer: Any) -> Any:
        """Set this task's chat template on the tokenizer, and return it.

        Raises:
            `ValueError`: no chat template, or an empty vocabulary (missing tokenizer files).
        """
        if self.chat_template_path is not None:
            file = grading.found(self.chat_template_path, self.folders) or Path(self.chat_template_path)
            tokenizer.chat_template = file.read_text().rstrip("\n")
        if tokenizer.chat_template is None:
            raise ValueError(
                f"{tokenizer.name_or_path or 'The tokenizer'} has no chat template (usual for a base model), but "
                "the prompts of a task are messages. Set chat_template_path to a Jinja file, or use an instruct model."
            )
        if not tokenizer.encode("1 + 1", add_special_tokens=False):
            raise ValueError(
                f"The tokenizer of {tokenizer.name_or_path} makes no tokens of a text: its files (tokenizer.json) are "
                "missing or empty. Copy them from the model's repository."
            )
        return tokenizer

    def graded(self, problems: Dataset) -> bool:
        """True if completions are compared with references, False if a reward decides."""
        return not self.interactive and self.grader != grading.BY_REWARD and "answer" in problems.column_names

    def _grader(self) -> grading.Grader:
        if self._gym and self.grader == "auto":
            return grading.Verifier(self._gym, self.dataset_kwargs or {})
        return grading.grader_of(self.grader, self.folders) if isinstance(self.grader, str) else self.grader

    def graded_by(self) -> dict[str, Any]:
        """Settings of [`verdicts`]: the grader, a custom one with its source, and the answer's format."""
        compare = self._grader()
        known = next((name for name, each in grading.GRADERS.items() if each is compare), None)
        return {
            "grader": known or f"own function {getattr(compare, '__name__', type(compare).__name__)}",
            "grader_sha256": None if known else source_sha256(getattr(compare, "verify", compare)),
            "answer_format": self.answer_format,
        }

    def verdicts(self, completions: list[str], problems: Dataset) -> list[bool]:
        """Return a verdict per completion: whether it states the reference answer."""
        return grading.verdicts(completions, problems, self._grader(), self.answer_format)


#: fields with an option in recipes and on the command line
PARSED = {each.name: each for each in dataclasses.fields(Task) if "parsed" in each.metadata}


def _argument(name: str, help: str, kind: Any, default: Any = None) -> tuple[str, Any, Any]:
    return name, kind, field(default=default, metadata={"help": help})


#: options of a task for `TrlParser`; each overrides the task file
TaskArguments = dataclasses.make_dataclass(
    "TaskArguments",
    [
        _argument("task", "YAML file of a task, or the name of a shipped one.", str | None),
        *(_argument(name, each.metadata["help"], each.metadata["parsed"] | None) for name, each in PARSED.items()),
        _argument("eval_problems", "Held-out problems to grade (default: all).", int | None),
        _argument("eval_batch_size", "Problems at a time in the evaluation without vLLM.", int, 64),
        _argument("overwrite", "Replace a run with other settings in output_dir.", bool, False),
    ],
)
