"""Arguments of a training script: a task, `QeRLConfig` and TRL's `ModelConfig`, from a recipe and the command line.

```python
from qerl_trl import QeRLGRPOTrainer, Script

script = Script.parse()  # --config recipe.yaml --task task.yaml, and any field of the three
script.train(QeRLGRPOTrainer(**script.trainer_arguments()))
```
"""

import dataclasses
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from trl import ModelConfig, get_peft_config

from ..checkpoint.records import AFTER_NAME, BEFORE_NAME, RESULTS_NAME, RunResults
from ..checkpoint.settings import run_settings
from ..checks.rewards import check_steps
from ..config import QeRLConfig
from ..model.lora import settle_model_config
from ..publish.gguf import folder_of
from ..publish.load import require_adapter
from ..run.folder import clear
from ..support.files import check_name, named_in_errors
from ..support.recipes import OPTIONS, config_file, contents, examples_folder, meant, parser_of, task_file
from ..support.secrets import check_places
from .run import train_and_measure
from .task import PARSED, Task, TaskArguments

logger = logging.getLogger(__name__)

#: classes with a field for each option in a recipe and on the command line
KINDS: list[Any] = [TaskArguments, QeRLConfig, ModelConfig]
_NAMES = [field.name for kind in KINDS for field in dataclasses.fields(kind)]
#: default without a task
DEFAULT_TASK = "gsm8k"


@dataclass
class Script:
    """Task, configuration and model of a script.

    Attributes:
        eval_problems, eval_batch_size: for the evaluations before and after.
        overwrite: replace a run with other settings in `output_dir`; a run with equal settings is resumed.
    """

    task: Task
    args: QeRLConfig
    model_args: ModelConfig
    eval_problems: int | None = None
    eval_batch_size: int = 64
    overwrite: bool = False

    @classmethod
    def parse(cls, task: Task | None = None, config: str | None = None, argv: Sequence[str] | None = None) -> "Script":
        """Parse the command line.

        A recipe's data and rewards belong to its own task: another `task`, or `--task`, replaces all of them.

        Args:
            task: the script's default, overridden by `--task`.
            config: recipe (a file, or a shipped one's name) without `--config`; by default chosen by machine.
            argv: words of the command line; default: `sys.argv[1:]`.

        Raises:
            `ValueError`: an unknown option, with similar names.
        """
        by_user = list(sys.argv[1:] if argv is None else argv)
        words = with_config(by_user, config)
        file = _value(words, "config")
        recipe = contents(Path(file)) if file else {}
        tracked = "report_to" not in recipe and _value(words, "report_to") is None
        tracked = tracked and importlib.util.find_spec("trackio") is not None
        if tracked:
            words = [*words, "--report_to", "trackio"]
            if "log_completions" not in recipe and _value(words, "log_completions") is None:
                # read in the dashboard, not in the terminal
                words += ["--log_completions", "true", "--num_completions_to_print", "0"]
        said, args, model_args, *unknown = parser_of(KINDS, allow_abbrev=False).parse_args_and_config(
            words, return_remaining_strings=True, separate_remaining_strings=True
        )
        _check_known([*unknown[0], *unknown[1]])
        if tracked:  # no Space by default: nothing is uploaded without a request
            args.trackio_space_id, args.trackio_static_space_id = None, False
        if file is None and os.environ.get("RANK", "0") == "0":
            print(
                f"No recipe: TRL's and this package's defaults on the CPU, learning rate {args.learning_rate:g}, "
                f"{args.num_generations} completions of at most {args.max_completion_length} tokens a prompt. Choose a "
                "recipe with --config."
            )
        check_places(vars(said) | vars(model_args))
        chosen = _task_of(task, said, words, recipe, file, by_user)
        named = {word.removeprefix("--").partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
        settle_model_config(model_args, {*recipe, *named}, args.base_format)
        return cls(chosen, args, model_args, said.eval_problems, said.eval_batch_size, said.overwrite)

    def trainer_arguments(self) -> dict[str, Any]:
        """Return the arguments for [`QeRLGRPOTrainer`]: from task and recipe, adapter, tokenizer with its template."""
        args, named = self.args, self.model_args
        model = named.model_name_or_path
        if model is None:
            raise ValueError("No model is named: --model_name_or_path, or model_name_or_path in the recipe.")
        places = Path(folder_of(model)), examples_folder().parent / model
        folder = next(filter(Path.is_dir, places), None)
        if folder is not None:  # absolute, so that a later merge or evaluation works from any directory
            model = str(folder.resolve())
            if not (folder / "config.json").is_file():
                require_adapter(folder.resolve())
        check_name(model)
        given = args.model_init_kwargs or {}
        assert isinstance(given, dict), "parsed by the configuration"
        args.model_init_kwargs = {
            "revision": named.model_revision,
            "dtype": named.dtype,
            **({"attn_implementation": named.attn_implementation} if named.attn_implementation else {}),
            **given,
        }
        args.reward_weights = args.reward_weights or self.task.weights()
        given_to_trainer = self.task.for_trainer()
        check_steps(args, given_to_trainer["train_dataset"])
        adapter = get_peft_config(named)
        if args.base_format == "full" and adapter is not None:
            logger.warning(
                "base_format='full' trains every weight: use_peft and lora_* of the recipe or the command line have no "
                "effect. Pass --use_peft false, or choose --base_format bf16 for LoRA on a bf16 base."
            )
            adapter = None
        with named_in_errors(model):
            tokenizer = AutoTokenizer.from_pretrained(
                model, revision=named.model_revision, padding_side="left", trust_remote_code=args.trust_remote_code
            )
        return {
            "model": model,
            "args": args,
            "processing_class": self.task.prepared(tokenizer),
            "peft_config": adapter,
            **given_to_trainer,
        }

    def train(self, trainer: Any) -> RunResults:
        """See [`run.train_and_measure`]."""
        if self.overwrite:
            with trainer.accelerator.main_process_first():
                clear(trainer.args.output_dir, run_settings(trainer), (RESULTS_NAME, BEFORE_NAME, AFTER_NAME))
        return train_and_measure(trainer, self.task, self.eval_problems, self.eval_batch_size)


def _task_of(
    own: Task | None, said: Any, words: list[str], recipe: dict[str, Any], file: str | None, by_user: list[str]
) -> Task:
    """Return the command line's task, else the script's `own`, else the recipe's, with its fields overridden."""
    on_command_line = _value(words, "task")
    fields = {name: getattr(said, name) for name in PARSED}
    if own is not None or on_command_line is not None:  # the recipe's fields belong to its own task
        fields = {name: value for name, value in fields.items() if _value(words, name) is not None}
    if own is not None and on_command_line is None:
        left = [name for name in ("task", *PARSED) if name in recipe and _value(words, name) is None]
        if left and _value(by_user, "config") is not None:
            logger.warning(
                "This script has its own task, so these fields of the recipe are ignored: %s. Pass --task, or each of "
                "them, on the command line to replace the script's.",
                ", ".join(f"{name}: {recipe[name]}" for name in left),
            )
        return own.with_said(fields)
    named = said.task if said.task is not None else (None if fields["dataset_name"] else DEFAULT_TASK)
    if named is None:
        return Task(folders=_folders()).with_said(fields)
    of_recipe = None if said.task is None or on_command_line is not None else Path(file or "")
    return Task.read(task_file(str(named), of_recipe), _folders()).with_said(fields)


def check_recipe(file: Path) -> None:
    """Raise `ValueError` if a recipe has an unknown field or names a missing task."""
    values = contents(file)
    if values.get("task") is not None:
        task_file(str(values["task"]), file)
    _check_known([f"--{name}" for name in values if name not in {"env", *_NAMES}])  # TRL's parser removes `env`


def _check_known(rest: Sequence[str]) -> None:
    """Refuse leftovers of a recipe or a command line."""
    if not rest:
        return
    known = [f"--{name}" for name in _NAMES]
    said = [word for word in rest if word.startswith("--")] or list(rest)
    hint = "".join(dict.fromkeys(meant(word.partition("=")[0], known) for word in said))
    raise ValueError(f"{' '.join(said)}: unknown option in the recipe or on the command line.{hint} {OPTIONS}")


def with_config(words: list[str], config: str | None = None) -> list[str]:
    """Resolve `--config` in the command line to a file: the given one, `config`, or the machine's default (printed).

    Without a GPU, only the embedded model gets a recipe: its learning rate and lengths fit no other.
    """
    given = _value(words, "config")
    if given is None and config is None:
        model, embedded = _value(words, "model_name_or_path"), contents(config_file("embedded"))["model_name_or_path"]
        same = model is None or any((place / model).resolve() == _folders()[1] / embedded for place in _folders())
        if not same and not torch.cuda.is_available():
            return ["--use_cpu", "true", "--bf16", "false", *words]
        given, why = "embedded", "no GPU was found, so the default is the embedded tiny model and problems"
        if torch.cuda.is_available():
            given, why = "qwen2.5-3b", "a GPU was found, so the default is Qwen2.5-3B-Instruct on openai/gsm8k"
        if os.environ.get("RANK", "0") == "0":
            print(f"Using examples/configs/{given}.yaml: {why}. Choose another with --config <name or file>.")
    kept = [word for i, word in enumerate(words) if not (_is(word, "config") or (i and words[i - 1] == "--config"))]
    return [*kept, "--config", str(config_file(given or config or ""))]


def _is(word: str, option: str) -> bool:
    """Match both spellings of the parser, `--dataset_name` and `--dataset-name`."""
    return word.startswith("--") and word[2:].partition("=")[0].replace("-", "_") == option


def _value(words: list[str], option: str) -> str | None:
    """Return the word after `--option` on the command line; `None` without it."""
    for word, after in zip(words, [*words, ""][1:], strict=True):
        if _is(word, option):
            return word.partition("=")[2] if "=" in word else after
    return None


def _folders() -> list[Path]:
    """Return the folders searched for task files besides the task's: the working directory and the shipped ones."""
    return [Path(), examples_folder().parent]
