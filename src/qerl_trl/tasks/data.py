"""Problems as TRL wants them: a conversational `prompt`, and an `answer` where there is one. From the Hub, files, or a function."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetNotFoundError

from .named import in_words

#: what reads a file, by its suffix; of a folder the files of the first kind that it has
READERS = {".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".json": "json"}
#: of a folder that `save_to_disk` wrote, of all splits or of one
_SAVED = (("dataset_dict.json",), ("state.json", "dataset_info.json"))
#: column names of problems and reference answers, in the order they are looked for
QUESTIONS = ("prompt", "question", "problem")
ANSWERS = ("answer", "solution")


def read(
    source: "str | Path | Callable[[], Mapping[str, Any]] | Mapping[str, Any]",
    config: str | None = None,
    folders: Sequence[Path] = (),
) -> DatasetDict:
    """The splits of a Hub dataset, of a folder of `<split>.jsonl` or as `save_to_disk` writes it, of a .jsonl file (`train`), or that a function
    returns. Files may be of any kind in `READERS`.

    Raises:
        `ValueError`: it is or has no such file; or the name is neither on the Hub nor in `folders`, where it was looked for.
    """
    if isinstance(source, Path):
        if is_saved(source):
            saved = load_from_disk(str(source))
            if isinstance(saved, DatasetDict):
                return saved
            named = re.fullmatch(r"(\w+)(\[.*\])?", str(saved.split or ""))  # of a slice, the expression that made it
            return DatasetDict({named[1] if named else "train": saved})
        suffix = source.suffix
        if source.is_dir():
            suffix = next((each for each in READERS if any(source.glob(f"*{each}"))), "")
        if suffix not in READERS:
            what = "a folder without" if source.is_dir() else "not"
            raise ValueError(
                f"dataset_name={str(source)!r} is {what} a file that ends with one of {', '.join(READERS)}. A folder needs one for each split, or is what "
                "save_to_disk wrote; for everything else name file.py:function, which returns {split: rows}."
            )
        files = (
            {"train": source} if source.is_file() else {file.stem: file for file in sorted(source.glob(f"*{suffix}"))}
        )
        return load_dataset(READERS[suffix], data_files={split: str(file) for split, file in files.items()})
    if isinstance(source, str):
        return from_hub(source, config, None, f"dataset_name={source!r}", folders)
    splits = source() if callable(source) else source
    made = {name: rows if isinstance(rows, Dataset) else Dataset.from_list(rows) for name, rows in splits.items()}
    return DatasetDict(made)


def from_hub(name: str, config: str | None, split: str | None, said: str, folders: Sequence[Path] = ()) -> Any:
    """All splits of a dataset of the Hub, or one. `said`: by whom it was named.

    Raises:
        `ValueError`: it cannot be loaded; nor is it a file or folder in `folders`, where it was looked for.
    """
    try:
        return load_dataset(name, config, split=split)
    except (DatasetNotFoundError, FileNotFoundError, ConnectionError) as error:
        places = in_words(folders) or "the working directory"
        raise ValueError(
            f"{said} is no file or folder in {places}, and from the Hub it cannot be loaded: {error}. Name a folder with <split>.jsonl, a .jsonl "
            "file, or a dataset of the Hub (user/name) that this machine can reach; of a task also file.py:function."
        ) from error


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote a folder."""
    return any(all((folder / name).is_file() for name in names) for names in _SAVED)


def with_prompts(
    data: Dataset,
    system_prompt: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    needs_answer: bool = True,
) -> Dataset:
    """Questions become a conversational `prompt`, reference answers `answer`, of the type that they have; other columns stay, for the rewards.

    Raises:
        `ValueError`: a column is missing, or a row asks nothing.
    """
    question = prompt_column or next((name for name in QUESTIONS if name in data.column_names), None)
    answer = answer_column or next((name for name in ANSWERS if name in data.column_names), None)
    missing = [name for name in (prompt_column, answer_column) if name and name not in data.column_names]
    if question is None:
        missing.append(f"one of {', '.join(QUESTIONS)} (what is asked)")
    if answer is None and needs_answer:
        missing.append(f"one of {', '.join(ANSWERS)} (the reference that our rewards compare with)")
    if missing or question is None:
        raise ValueError(
            f"The dataset has the columns {', '.join(data.column_names)}, but not {' and '.join(missing)}. Name "
            "others with prompt_column and answer_column, or make them with a formatting_func."
        )
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []

    def row_of(row: dict[str, Any], number: int) -> dict[str, Any]:
        asked = row[question]
        if not asked:
            raise ValueError(f"Row {number} of the dataset (from 0) asks nothing: its {question!r} is {asked!r}.")
        if not isinstance(asked, str) and not _are_messages(asked):
            raise ValueError(
                f"Row {number} of the dataset (from 0) asks with no text: its {question!r} is {asked!r} ({type(asked).__name__}). A text is wanted, or messages "
                "with a role and a content. Name another column (prompt_column), or make it with a formatting_func."
            )
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        if messages and messages[0]["role"] == "system" and system:
            messages = messages[1:]
        return {"prompt": [*system, *messages], **({"answer": row[answer]} if answer else {})}

    gone = [name for name in (question,) if name != "prompt"]
    return data.map(row_of, with_indices=True, remove_columns=gone)


def _are_messages(asked: Any) -> bool:
    return isinstance(asked, list) and all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and (isinstance(message.get("content"), str | list) or bool(message.get("tool_calls")))
        for message in asked
    )


def split_named(data: DatasetDict, name: str, option: str) -> Dataset:
    """One split.

    Raises:
        `ValueError`: there is no such split.
    """
    if name not in data:
        raise ValueError(
            f"{option}={name!r} is none of the splits {', '.join(data)}. Name another, or hold a part of the training split out with "
            "test_split_size (0.1 is a tenth, 200 are 200 problems)."
        )
    return data[name]


def held_out(data: DatasetDict, train: str, test: str, size: float | None) -> tuple[Dataset, Dataset]:
    """(training, held-out) problems: two splits, or one that is divided, always the same way."""
    if size is None:
        return split_named(data, train, "dataset_train_split"), split_named(data, test, "dataset_test_split")
    whole = split_named(data, train, "dataset_train_split")
    parts = whole.train_test_split(test_size=int(size) if size >= 1 else size, seed=0)
    return parts["train"], parts["test"]


def first(data: Dataset, count: int | None) -> Dataset:
    return data if count is None else data.select(range(min(count, len(data))))
