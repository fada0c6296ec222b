"""Data of a task: files of every kind, folders, functions; columns, splits, and the errors of each."""

import csv
import json

import pytest
from datasets import Dataset, DatasetDict

from qerl_trl.tasks.data import with_prompts
from qerl_trl.tasks.evaluation import Protocol, load_problems
from qerl_trl.tasks.grading import is_correct
from qerl_trl.tasks.task import Task

COLUMNS = {"prompt_column": "text", "answer_column": "label"}


def test_folders_functions_and_saved_splits(folder, read):
    task = read(dataset_name=".", system_prompt="Be brief.", **COLUMNS)
    train, test = task.splits()
    assert (len(train), len(test), task.label, task.hub_dataset) == (10, 3, "my words", None)
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "test 0"}
    assert test[0] == {"prompt": [system, user], "answer": 0, "label": 0}
    train, test = read(dataset_name="own.py:rows").splits()
    assert (len(train), test[0]["answer"], test[0]["solution"]) == (8, 9, 9)
    DatasetDict({"train": train, "test": test}).save_to_disk(folder / "saved")
    assert read(dataset_name="saved").splits()[0].to_list() == train.to_list()
    train, _ = read(dataset_name=".", formatting_func="own.py:turned").splits()
    assert train[1]["prompt"] == [{"role": "user", "content": "turned train 1"}] and train[1]["answer"] == 1
    for split in ("train", "test"):
        Dataset.from_json(str(folder / f"{split}.jsonl")).to_parquet(folder / "data" / f"{split}.parquet")
    train, test = read(dataset_name="data", **COLUMNS).splits()
    assert (len(train), len(test), test[2]["answer"]) == (10, 3, 2)


@pytest.mark.parametrize(("name", "message"), [("train.xlsx", "not"), ("nothing", "a folder without")])
def test_other_files_and_empty_folders_are_refused(folder, read, name, message):
    (folder / "train.xlsx").write_text("")
    (folder / "nothing").mkdir()
    with pytest.raises(ValueError, match=f"dataset_name=.*{name}' is {message} a file that ends with .*parquet"):
        read(dataset_name=name).splits()


def write_file(file, answers):
    rows = [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
    if file.suffix == ".csv":
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif file.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(file)
    else:
        file.write_text("\n".join(map(json.dumps, rows)))


def rewards_of(task, texts):
    """By the task's own reward, for each text on the row of the same number; the held-out verdicts agree."""
    made = task.for_trainer()
    (reward,), (_, test) = made["reward_funcs"], task.splits()
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    rewards = reward(completions=completions, prompts=[""] * len(texts), answer=test["answer"][:])
    assert [reward == 1.0 for reward in rewards] == task.verdicts(texts, test)
    return rewards


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("answers", "others"),
    [
        (["007", "042", "101"], ["7", "42", "0101"]),
        (["2024-01-02", "2024-01-02 00:00:00"], ["2024-01-02 00:00:00", "2024-01-02"]),
        (["NA", "null", "nan", "None"], ["", "None", "None", "nan"]),
        (["true", "a, b", 'say "a"', "two\nlines"], ["True", "a", "say a", "two"]),
    ],
    ids=["code", "date", "missing", "quoted"],
)
def test_text_of_a_file_is_graded_as_it_is_written(tmp_path, kind, answers, others):
    """ "007" of a .csv became 7: the right answer got a reward of 0, the wrong one 1."""
    file = tmp_path / f"test.{kind}"
    write_file(file, answers)
    task = Task(dataset_name=str(file), dataset_test_split="train", grader="exact", answer_format="whole")
    assert rewards_of(task, answers) == [1.0] * len(answers) and rewards_of(task, others) == [0.0] * len(answers)
    assert load_problems(Protocol(str(file)))["answer"][:] == answers


@pytest.mark.parametrize("written", [["5", "2.5"], ["5", '"x"'], ["1e3", "7"], ["5", "6"]], ids=" ".join)
def test_a_number_of_json_is_graded_as_it_is_written(tmp_path, written):
    file = tmp_path / "test.jsonl"
    file.write_text("\n".join(f'{{"question": "{i}?", "answer": {value}}}' for i, value in enumerate(written)))
    answers = load_problems(Protocol(str(file)))["answer"][:]
    texts = [value.strip('"') for value in written]
    others = [f"{text}.0" if text.isdigit() else f"{text}0" for text in texts]
    assert all(is_correct(text, gold, "exact", "whole") for text, gold in zip(texts, answers, strict=True))
    assert not any(is_correct(text, gold, "exact", "whole") for text, gold in zip(others, answers, strict=True))
    assert isinstance(answers[0], int) == (written == ["5", "6"])


def test_own_rewards_compute_with_the_numbers_of_json(folder, read):
    (folder / "train.jsonl").write_text('{"prompt": "1?", "answer": 5}\n{"prompt": "2?", "answer": 2.5}\n')
    fields = {"dataset_name": "train.jsonl", "dataset_test_split": "train", "reward_funcs": ["own.py:shouted"]}
    assert read(**fields).splits()[0]["answer"][:] == [5.0, 2.5]
    assert read(**fields, grader="exact").splits()[0]["answer"][:] == ["5", "2.5"]


PER_LINE = "one JSON object per line"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.jsonl", b'{"question": "1?", "answer": 1}\n{"question": "2?",\n', f"read: .*line 3 .*{PER_LINE}"),
        ("train.csv", b"question,answer\n1?,1\n\n2?,2,3\n", "line 4 has 3 cells, but the header 2; quote a text"),
        ("train.csv", "question,answer\né?,2\n".encode("latin-1"), "can't decode byte 0xe9.*Write it again in UTF-8"),
        ("train.parquet", b"PAR1", "read: .*Write it again"),
        ("train.csv", b"question;answer\n1?;1\n", "columns question;answer, but not one of prompt, .*prompt_column"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    task = Task(dataset_name=str(tmp_path / name), dataset_test_split="train")
    for start in (task.for_trainer, lambda: load_problems(Protocol(str(tmp_path / name)))):
        with pytest.raises(ValueError, match=f"{name}.*{message}"):
            start()


def test_missing_columns_are_named(folder, read):
    with pytest.raises(ValueError, match=r"text, label, but not one of prompt, question, problem \(what is asked\)\."):
        read(dataset_name=".", reward_funcs=["own.py:shouted"]).splits()
    with pytest.raises(ValueError, match=r"but not one of answer, solution \(the reference that our rewards"):
        read(dataset_name=".", prompt_column="text").splits()
    (folder / "train.jsonl").write_text('{"prompt": "1?"}\n{"prompt": null}')
    with pytest.raises(ValueError, match=r"Row 1 of the dataset .* asks nothing"):
        read(dataset_name="train.jsonl", dataset_test_split="train", reward_funcs=[]).splits()


@pytest.mark.parametrize("asked", [3, ["one", "two"], [{"role": "user"}]])
def test_a_prompt_that_is_neither_text_nor_messages(asked):
    """It ended in a TypeError that named neither row nor column."""
    data = Dataset.from_list([{"question": asked, "answer": "1"}])
    with pytest.raises(ValueError, match=r"Row 0 .* asks nothing: its 'question' is .* has to be a text.*prompt_col"):
        with_prompts(data)


def test_a_split_is_held_out_if_there_is_none(folder, read):
    (folder / "test.jsonl").unlink()
    with pytest.raises(ValueError, match=r"dataset_test_split='test'.*test_split_size"):
        read(dataset_name=".", **COLUMNS).splits()
    for size, count in ((0.3, 3), (4, 4)):
        task = read(dataset_name="train.jsonl", test_split_size=size, **COLUMNS)
        train, test = task.splits()
        assert (len(train), len(test)) == (10 - count, count)
        assert not set(train["answer"]) & set(test["answer"])
        assert task.splits()[1]["answer"][:] == test["answer"][:]
