"""Datasets in TRL's format: a conversational `prompt`, and an `answer`. From the Hub, files, functions, generators."""

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

#: supported files, also gzipped; a folder uses the first kind found
KINDS = (".jsonl", ".parquet", ".csv", ".tsv", ".json", ".txt")
#: files written by `save_to_disk`: all splits, or one
_SAVED = (("dataset_dict.json",), ("state.json", "dataset_info.json"))
_SPACE = re.compile(r"\s*")
#: errors of a damaged, foreign or empty file; pyarrow's are ValueErrors
_UNREADABLE = (ValueError, AttributeError, DatasetGenerationError, EOFError, gzip.BadGzipFile, zlib.error, csv.Error)
#: column names of problems and reference answers, in order of preference
QUESTIONS = ("prompt", "question", "problem")
ANSWERS = ("answer", "solution")
#: `dataset_name` of a reasoning-gym data set, before its name
GYM = "reasoning_gym:"


def read(
    source: "str | Path | Callable[[], Mapping[str, Any]] | Mapping[str, Any]",
    config: str | None = None,
    folders: Sequence[Path] = (),
    as_text: Sequence[str] = (),
) -> DatasetDict:
    """Read the splits of a Hub dataset, a folder of `<split>.jsonl` or `save_to_disk`, a file (`train`), or a function.

    Files may be of any of the `KINDS`. Columns of .csv and .tsv are text, as are JSON columns in `as_text` if one
    number type would change their spelling.

    Raises:
        `ValueError`: a missing or unreadable file; or the name is neither on the Hub nor in `folders`.
    """
    if isinstance(source, Path):
        if is_saved(source):
            saved = load_from_disk(str(source))
            if isinstance(saved, DatasetDict):
                return saved
            named = re.fullmatch(r"(\w+)(\[.*\])?", str(saved.split or ""))  # a slice stores its expression here
            return DatasetDict({named[1] if named else "train": saved})
        there = sorted(source.iterdir()) if source.is_dir() else [source]
        for kind in KINDS:
            ending = re.compile(rf"(.+){re.escape(kind)}(\.gz)?")
            files = {name[1]: file for file in there if (name := ending.fullmatch(file.name)) and file.is_file()}
            if files:
                made = {split: _of_file(file, kind, as_text) for split, file in files.items()}
                return DatasetDict(made if source.is_dir() else {"train": made.popitem()[1]})
        what = "a folder without" if source.is_dir() else "not"
        raise ValueError(
            f"dataset_name={str(source)!r} is {what} a file that ends with one of {', '.join(KINDS)}. A folder needs "
            "one per split, or is written by save_to_disk. Or name a file.py:function that returns {split: rows}."
        )
    if isinstance(source, str):
        return from_hub(source, config, None, f"dataset_name={source!r}", folders)
    splits = source() if callable(source) else source
    made = {name: rows if isinstance(rows, Dataset) else _of_rows(rows, as_text) for name, rows in splits.items()}
    return DatasetDict(made)


def _of_file(file: Path, kind: str, as_text: Sequence[str]) -> Dataset:
    try:
        if kind == ".parquet":
            return Dataset.from_parquet(str(file))
        data = file.read_bytes()
        text = (gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).decode("utf-8-sig")
        if kind in (".csv", ".tsv"):
            rows = written = _csv(text, "," if kind == ".csv" else "\t")
        elif kind == ".txt":
            rows = written = [{"text": line.rstrip("\r")} for line in text.split("\n") if line.strip()]
        else:
            rows, written = _json(text), _json(text, parse_int=str, parse_float=str, parse_constant=str)
        return _of_rows(rows, as_text, written)
    except _UNREADABLE as error:
        raise ValueError(
            f"{file} cannot be read: {error.__cause__ or error}. Write it again in UTF-8, with a header (.csv) or as "
            "one JSON object per line."
        ) from None


def _csv(text: str, delimiter: str) -> list[dict[str, Any]]:
    limit = csv.field_size_limit(sys.maxsize)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        (header, _), *rows = [(cells, reader.line_num) for cells in reader if cells] or [([], 0)]
    finally:
        csv.field_size_limit(limit)
    for cells, line in rows:
        if len(cells) != len(header):  # refused: cells would be lost
            raise csv.Error(
                f"line {line} has {len(cells)} cells, but the header {len(header)}; quote a text that "
                f"contains {delimiter!r}"
            )
    return [dict(zip(header, cells, strict=True)) for cells, _ in rows]


def _json(text: str, **numbers: Any) -> list[dict[str, Any]]:
    """Parse a list of objects, or concatenated objects. `numbers`: parsers of numbers."""
    decoder = json.JSONDecoder(**numbers)
    rows: list[dict[str, Any]] = []
    at = _SPACE.match(text).end()  # type: ignore[union-attr]  # it matches everywhere
    while at < len(text):
        found, at = decoder.raw_decode(text, at)  # the error names the line
        rows += found if isinstance(found, list) else [found]
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
    return rows


def _of_rows(
    rows: Sequence[Mapping[str, Any]], as_text: Sequence[str], written: Sequence[Mapping[str, Any]] | None = None
) -> Dataset:
    """Make a dataset with one type per column. `written`: the rows with each number as its text in the file."""

    def text(value: Any) -> str | None:
        return value if value is None else json.dumps(value) if isinstance(value, bool) else str(value)

    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    for name, values in columns.items():
        kinds = {type(value) for value in values} - {type(None)}
        too_large = any(type(value) is int and abs(value) >= 2**63 for value in values)
        if kinds <= {str, int, float, bool} and (name in as_text or too_large):
            texts = [text(row.get(name)) for row in written or rows]
            if len(kinds) > 1 or too_large or texts != list(map(text, values)):
                columns[name] = texts
    return Dataset.from_dict(columns, on_mixed_types="use_json")


def from_hub(name: str, config: str | None, split: str | None, said: str, folders: Sequence[Path] = ()) -> Any:
    """Load all splits of a Hub dataset, or one. `said`: the option and its value, for the message."""
    try:
        return load_dataset(name, config, split=split)
    except (DatasetNotFoundError, FileNotFoundError, ConnectionError) as error:
        places = ", ".join(dict.fromkeys(str(folder.resolve()) for folder in folders)) or "the working directory"
        raise ValueError(
            f"{said} is no file or folder in {places}, and from the Hub it cannot be loaded: {error}. Name a folder "
            "with <split>.jsonl, a file, a dataset of the Hub (user/name), or, for a task, file.py:function."
        ) from error


def gym(name: str, train_size: int = 0, test_size: int = 0, **settings: Any) -> Any:
    """Make a reasoning-gym data set with these settings of its configuration."""
    try:
        import reasoning_gym

        return reasoning_gym.create_dataset(name, **settings)
    except ImportError as error:
        raise ImportError(f"dataset_name='{GYM}{name}': {error}. pip install 'qerl-trl[reasoning-gym]'.") from error
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"'{GYM}{name}' with dataset_kwargs={settings}: {error}. Choose others it has.") from error


def of_gym(
    name: str, train_size: int = 2000, test_size: int = 200, seed: int = 0, **settings: Any
) -> dict[str, list[dict[str, Any]]]:
    """Generate splits without a common question. gsm_symbolic names templates: every fifth is in `unseen` alone."""
    wanted = train_size + test_size
    made = gym(name, **{"seed": seed, "size": 4 * wanted} | settings)
    templates = getattr(made, "task_indices", None)
    known, unseen = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    for index in range(len(made)):
        part, most = (unseen, test_size) if templates and templates[index] % 5 == 0 else (known, wanted)
        if len(part) < most:
            entry = made[index]
            question, metadata = entry["question"], json.dumps(entry["metadata"], default=str)
            part.setdefault(question, {"question": question, "answer": entry["answer"] or "", "metadata": metadata})
        elif len(known) == wanted and (not templates or len(unseen) == test_size):
            break
    rows, cut = list(known.values()), min(test_size, len(known) // 2)
    return {"train": rows[cut:], "test": rows[:cut]} | ({"unseen": list(unseen.values())} if unseen else {})


def is_saved(folder: Path) -> bool:
    """True for a folder written by `save_to_disk`."""
    return any(all((folder / name).is_file() for name in names) for names in _SAVED)


def with_prompts(
    data: Dataset,
    system_prompt: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    needs_answer: bool = True,
    named: Any = "The dataset",
    suffix: str | None = None,
) -> Dataset:
    """Rename questions to a conversational `prompt`, references to `answer` (type unchanged); other columns stay."""
    question = prompt_column or next((name for name in QUESTIONS if name in data.column_names), None)
    answer = answer_column or next((name for name in ANSWERS if name in data.column_names), None)
    missing = [name for name in (prompt_column, answer_column) if name and name not in data.column_names]
    if question is None:
        missing.append(f"one of {', '.join(QUESTIONS)} (what is asked)")
    if answer is None and needs_answer:
        missing.append(f"one of {', '.join(ANSWERS)} (the reference that our rewards compare with)")
    if missing or question is None:
        raise ValueError(
            f"{named} has the columns {', '.join(data.column_names) or '(no row)'}, but not {' and '.join(missing)}. "
            "Name others with prompt_column and answer_column, or make them with a formatting_func."
        )
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []

    def row_of(row: dict[str, Any], number: int) -> dict[str, Any]:
        asked = row[question]
        if not asked or not (isinstance(asked, str) or _are_messages(asked)):
            raise ValueError(
                f"Row {number} of the dataset (from 0) asks nothing: its {question!r} is {asked!r}, and has to be a "
                "text, or messages with a role and a content. Name another column (prompt_column), or use a "
                "formatting_func."
            )
        text = f"{asked} {suffix}" if suffix else asked
        messages = [{"role": "user", "content": text}] if isinstance(asked, str) else list(asked)
        if messages and messages[0]["role"] == "system" and system:
            messages = messages[1:]
        return {"prompt": [*system, *messages], **({"answer": row[answer]} if answer else {})}

    return data.map(row_of, with_indices=True, remove_columns=[question] if question != "prompt" else [])


def _are_messages(asked: Any) -> bool:
    return isinstance(asked, list) and all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and (isinstance(message.get("content"), str | list) or bool(message.get("tool_calls")))
        for message in asked
    )


def split_named(data: DatasetDict, name: str, option: str) -> Dataset:
    """Return the split `name`, or raise `ValueError` naming `option`."""
    if name not in data:
        raise ValueError(
            f"{option}={name!r} is none of the splits {', '.join(data)}. Name another, or hold out a part of the "
            "training split with test_split_size (0.1 is a tenth, 200 are 200 problems)."
        )
    return data[name]


def held_out(data: DatasetDict, train: str, test: str, size: float | None) -> tuple[Dataset, Dataset]:
    """Return (training, held-out) problems: two splits, or one divided deterministically."""
    whole = split_named(data, train, "dataset_train_split")
    if size is None:
        return whole, split_named(data, test, "dataset_test_split")
    parts = whole.train_test_split(test_size=int(size) if size >= 1 else size, seed=0)
    return parts["train"], parts["test"]


def first(data: Dataset, count: int | None) -> Dataset:
    return data if count is None else data.select(range(min(count, len(data))))
