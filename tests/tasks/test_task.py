"""A task as an object: read from YAML, said on a command line, made into a trainer's arguments, graded."""

import csv
import dataclasses
import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from datasets import Dataset, DatasetDict
from trl import ModelConfig, get_peft_config
from trl.rewards import think_format_reward

from qerl_trl import QeRLConfig
from qerl_trl.support import recipes
from qerl_trl.support.recipes import parser_of
from qerl_trl.tasks import data as problems
from qerl_trl.tasks import evaluation, run
from qerl_trl.tasks.data import with_prompts
from qerl_trl.tasks.grading import is_correct
from qerl_trl.tasks.script import Script, with_config
from qerl_trl.tasks.task import PARSED, Task

OWN = """
from helper import SCORE

def shouted(completions, **kwargs):
    return [SCORE * float(c[0]["content"].isupper()) for c in completions]

def rows():
    return {"train": [{"question": f"q{i}", "solution": i} for i in range(8)], "test": [{"question": "t", "solution": 9}]}

def turned(row):
    return {"prompt": "turned " + row["text"], "answer": row["label"]}

def same_colour(answer, reference):
    return answer[0] == reference[0]

def look(where: str) -> str:
    \"\"\"
    Looks.

    Args:
        where: a place.
    \"\"\"
    return where

def one_of(answer, reference):
    return answer in reference

class World:
    def reset(self, **row):
        return None

    def get_reward(self):
        return 1.0

NUMBER = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    place = tmp_path / "task"
    place.mkdir()
    (place / "own.py").write_text(OWN)
    (place / "helper.py").write_text("SCORE = 2\n")
    for split, count in (("train", 10), ("test", 3)):
        lines = (json.dumps({"text": f"{split} {i}", "label": i}) for i in range(count))
        (place / f"{split}.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)  # names are looked for beside the YAML file, not only here
    return place


def read(folder, **content):
    (folder / "my_words.yaml").write_text(yaml.safe_dump(content))
    return Task.read(folder / "my_words.yaml")


def test_data_of_a_folder_beside_the_file(folder):
    task = read(folder, dataset_name=".", prompt_column="text", answer_column="label", system_prompt="Be brief.")
    train, test = task.splits()
    assert (len(train), len(test), task.label, task.hub_dataset) == (10, 3, "my words", None)
    assert [m["content"] for m in test[0]["prompt"]] == ["Be brief.", "test 0"]
    assert test[0]["answer"] == test[0]["label"] == 0


def test_data_of_a_function_and_formatted(folder):
    train, test = read(folder, dataset_name="own.py:rows").splits()
    assert (len(train), test[0]["answer"], test[0]["solution"]) == (8, 9, 9)
    train, _ = read(folder, dataset_name=".", formatting_func="own.py:turned").splits()
    assert train[1]["prompt"] == [{"role": "user", "content": "turned train 1"}] and train[1]["answer"] == 1


@pytest.mark.parametrize("kind", ["csv", "parquet", "json"])
def test_files_of_other_kinds(folder, kind):
    for split in ("train", "test"):
        rows = Dataset.from_json(str(folder / f"{split}.jsonl"))
        getattr(rows, f"to_{kind}")(folder / "data" / f"{split}.{kind}")
    train, test = read(folder, dataset_name="data", prompt_column="text", answer_column="label").splits()
    assert (len(train), len(test), test[2]["answer"]) == (10, 3, "2" if kind == "csv" else 2)
    one = f"data/train.{kind}"
    assert (
        len(read(folder, dataset_name=one, prompt_column="text", test_split_size=4, reward_funcs=[]).splits()[1]) == 4
    )


def test_files_that_are_no_data_are_refused(folder):
    (folder / "train.xlsx").write_text("")
    (folder / "nothing").mkdir()
    for name, said in (("train.xlsx", "not"), ("nothing", "a folder without")):
        with pytest.raises(ValueError, match=f"dataset_name=.*{name}' is {said} a file that ends with .*parquet"):
            read(folder, dataset_name=name).splits()


def test_a_reference_stays_what_it_is(folder):
    """A list came to one's own reward as the text of a list, and no completion was ever right."""
    lines = [{"prompt": f"{i}?", "answer": [str(i), "or so"]} for i in range(4)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    common = {"dataset_name": "train.jsonl", "test_split_size": 1, "reward_funcs": ["own.py:shouted"]}
    with pytest.raises(
        ValueError, match=r"Problem 0 .*: The reference \['2', 'or so'\] is no text and no number.*or grader='reward'"
    ):
        read(folder, **common).splits()
    task = read(folder, **common, grader="own.py:one_of", answer_format="whole")
    train, test = task.splits()
    assert train[0]["answer"] == ["0", "or so"] and task.verdicts(["or so"], test) == [True]
    task = read(folder, **common, grader="reward")
    assert task.for_trainer()["train_dataset"][0]["answer"] == ["0", "or so"] and not task.graded(test)
    with pytest.raises(ValueError, match="'reward' needs reward_funcs of your own"):
        read(folder, grader="reward").rewards()


def test_a_number_is_compared_as_its_text(folder):
    task = read(folder, dataset_name=".", prompt_column="text", answer_column="label", grader="exact")
    _, test = task.splits()
    assert task.verdicts(["#### 0", "#### 1", "#### 1"], test) == [True, True, False]


def write_file(file, answers):
    """Texts as each kind of file has them."""
    rows = [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
    if file.name.endswith((".csv", ".tsv")):
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, rows[0], delimiter="," if file.suffix == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    elif file.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(file)
    else:
        text = json.dumps(rows, indent=1) if file.suffix == ".json" else "\n".join(map(json.dumps, rows))
        file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else b"\xef\xbb\xbf" + text.encode())


def paid(task, texts):
    """By the task's own reward, for each text on the row of the same number; the held-out verdicts say the same."""
    made = task.for_trainer()
    (reward,), (_, test) = made["reward_funcs"], task.splits()
    said = [[{"role": "assistant", "content": text}] for text in texts]
    rewards = reward(completions=said, prompts=[""] * len(said), answer=test["answer"][:])
    assert [reward == 1.0 for reward in rewards] == task.verdicts(texts, test)
    return rewards


@pytest.mark.parametrize("kind", ["csv", "tsv", "json", "jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize(
    ("answers", "others"),
    [
        (["007", "042", "101"], ["7", "42", "0101"]),
        (["2024-01-02", "2024-01-02 00:00:00", "1/2/24"], ["2024-01-02 00:00:00", "2024-01-02", "2024-01-02"]),
        (["NA", "null", "nan", "None", "N/A"], ["", "None", "None", "nan", "NA"]),
        (["1234567890" * 4, "0.1000000000000000055511151231257827"], ["1234567890" * 3 + "1234567891", "0.1"]),
        (["2.5", "5", "2.50", "1e3"], ["2.50", "5.0", "2.5", "1000.0"]),
        (["true", "false", "True"], ["True", "False", "true"]),
        (["a, b", 'say "a"', "two\nlines"], ["a", "say a", "two"]),
    ],
    ids=["code", "date", "missing", "digits", "float next to int", "truth", "quoted"],
)
def test_text_of_a_file_is_what_is_graded(tmp_path, kind, answers, others):
    """ "007" of a .csv became 7: the right answer was paid 0, the wrong one 1."""
    file = tmp_path / f"test.{kind}"
    write_file(file, answers)
    task = Task(dataset_name=str(file), dataset_test_split="train", grader="exact", answer_format="whole")
    assert paid(task, answers) == [1.0] * len(answers) and paid(task, others) == [0.0] * len(answers)
    assert evaluation.load_problems(evaluation.Protocol(str(file)))["answer"][:] == answers


def test_spaces_are_the_file_s(tmp_path):
    (tmp_path / "train.csv").write_text("question,answer\n1?, a \n2?,\n")
    (tmp_path / "train.txt").write_text(" a \r\n\n007\u2028\n")
    assert problems.read(tmp_path / "train.csv")["train"]["answer"][:] == [" a ", ""]
    assert problems.read(tmp_path / "train.txt")["train"]["text"][:] == [" a ", "007\u2028"]


@pytest.mark.parametrize("kind", ["json", "jsonl"])
@pytest.mark.parametrize(
    "written",
    [
        ["5", "2.5"],
        ["5", '"x"'],
        ["2.50", "1.0"],
        ["1e3", "7"],
        ["9" * 40, "1"],
        ["true", '"maybe"'],
        ["5", "null", "2.5"],
        ["5", "6"],
        ["2.5", "3.0"],
    ],
    ids=" ".join,
)
def test_a_number_of_json_is_graded_as_it_is_written(tmp_path, kind, written):
    lines = [f'{{"question": "{i}?", "answer": {value}}}' for i, value in enumerate(written)]
    file = tmp_path / f"test.{kind}"
    file.write_text(f"[{', '.join(lines)}]" if kind == "json" else "\n".join(lines))
    answers = evaluation.load_problems(evaluation.Protocol(str(file)))["answer"][:]
    texts = [value.strip('"') for value in written if value != "null"]
    graded = [is_correct(text, gold, "exact", True) for text, gold in zip(texts, filter(None, answers), strict=True)]
    assert graded == [True] * len(texts)
    others = [f"{text}.0" if text.isdigit() else f"{text}0" for text in texts]
    assert not any(
        is_correct(text, gold, "exact", True) for text, gold in zip(others, filter(None, answers), strict=True)
    )
    assert isinstance(answers[0], int) == (written == ["5", "6"]) and (None in answers) == ("null" in written)


def test_a_truth_value_is_right_in_either_spelling(tmp_path):
    assert [is_correct(text, True, "exact", True) for text in ("true", "True", "false", "1")] == [
        True,
        True,
        False,
        False,
    ]


def test_rewards_of_one_s_own_compute_with_the_numbers_of_json(folder):
    (folder / "train.jsonl").write_text('{"prompt": "1?", "answer": 5}\n{"prompt": "2?", "answer": 2.5}\n')
    said = {"dataset_name": "train.jsonl", "dataset_test_split": "train", "reward_funcs": ["own.py:shouted"]}
    assert read(folder, **said).splits()[0]["answer"][:] == [5.0, 2.5]
    assert read(folder, **said, grader="exact").splits()[0]["answer"][:] == ["5", "2.5"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "train.jsonl",
            b'{"question": "1?", "answer": 1}\n{"question": "2?",\n',
            "cannot be read: .*line 3 column 1.*one JSON object per line",
        ),
        (
            "train.json",
            b'[{"question": "1?"},\n{"question" 2}]',
            "cannot be read: .*line 2 column 13.*JSON object per line",
        ),
        ("train.jsonl", b'{"question": "1?"}\n\n"2?"\n', "cannot be read: 'str' object .*JSON object per line"),
        (
            "train.csv",
            b"question,answer\n1?,1\n\n2?,2,3\n",
            "line 4 has 3 cells, and the header 2; a text with ',' in it stands in quotes",
        ),
        ("train.tsv", b"question\tanswer\n1?\n", "line 2 has 1 cells, and the header 2; a text with"),
        ("train.csv", b'question,answer\n1?,1\n"2?,2\n3?,3\n', "cannot be read: unexpected end of data"),
        (
            "train.csv",
            "question,answer\n1?,1\né?,2\n".encode("latin-1"),
            "can't decode byte 0xe9.*Write it again in UTF-8",
        ),
        ("train.csv", "question,answer\n1?,1\n".encode("utf-16"), "byte 0xff.*Write it again in UTF-8"),
        (
            "train.jsonl.gz",
            gzip.compress(b'{"question": "1?"}', mtime=0)[:-9],
            "cannot be read: .*Write it again",
        ),
        ("train.jsonl.gz", b"<html>\n", "cannot be read: .*line 1 column 1.*one JSON object per line"),
        ("train.parquet", b"PAR1", "cannot be read: .*Write it again"),
        ("train.parquet", b"", "cannot be read: .*Write it again"),
        ("train.jsonl", b"", r"has the columns \(no row\), but not one of prompt"),
        ("train.csv", b"question,answer\n", r"has the columns \(no row\), but not one of prompt"),
        (
            "train.csv",
            b"question;answer\n1?;1\n",
            "has the columns question;answer, but not one of prompt, .*prompt_column",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    task = Task(dataset_name=str(tmp_path / name), dataset_test_split="train")
    for start in (task.for_trainer, lambda: evaluation.load_problems(evaluation.Protocol(str(tmp_path / name)))):
        with pytest.raises(ValueError, match=f"{name}.*{said}") as info:
            start()
        assert str(info.value).count("\n") < 3 and type(info.value) is ValueError
        assert info.value.__cause__ is None and (info.value.__suppress_context__ or info.value.__context__ is None)


def test_what_is_missing_is_said_and_nothing_else(folder):
    with pytest.raises(
        ValueError, match=r"text, label, but not one of prompt, question, problem \(what is asked\)\. Name"
    ):
        read(folder, dataset_name=".", reward_funcs=["own.py:shouted"]).splits()
    with pytest.raises(
        ValueError, match=r"but not one of answer, solution \(the reference that our rewards compare with\)"
    ):
        read(folder, dataset_name=".", prompt_column="text").splits()
    (folder / "train.jsonl").write_text('{"prompt": "1?"}\n{"prompt": null}')
    with pytest.raises(ValueError, match=r"Row 1 of the dataset .* asks nothing"):
        read(folder, dataset_name="train.jsonl", dataset_test_split="train", reward_funcs=[]).splits()


@pytest.mark.parametrize(
    "asked", [3, ["one", "two"], [{"content": "one"}], [{"role": "user"}], [{"role": "user", "content": 3}]]
)
def test_a_prompt_that_is_neither_text_nor_messages(folder, asked):
    """It ended in a TypeError that named neither row nor column."""
    rows = [{"question": asked, "answer": "1"}]
    with pytest.raises(
        ValueError, match=r"Row 0 .* asks nothing: its 'question' is .* has to be a text.*prompt_column"
    ):
        with_prompts(Dataset.from_list(rows))


def test_a_file_of_another_kind_makes_no_saved_folder(tmp_path):
    """A folder with a `state.json` of something else was taken for one, and not found to be one."""
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"question": "1?", "answer": "1"}\n')
    (tmp_path / "state.json").write_text("{}")
    assert sorted(problems.read(tmp_path)) == ["test", "train"]


def test_one_split_that_was_saved_is_measured(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"question": "1?", "answer": "1"}\n')
    Dataset.from_json(str(tmp_path / "test.jsonl"), split="test").save_to_disk(tmp_path / "saved")
    assert list(problems.read(tmp_path / "saved")) == ["test"]
    Dataset.from_list([{"question": "1?", "answer": "1"}]).save_to_disk(tmp_path / "without")
    for split, named in (("test[:1]", "test"), ("test+test", "train")):
        Dataset.from_json({"test": str(tmp_path / "test.jsonl")}, split=split).save_to_disk(tmp_path / split)
        assert list(problems.read(tmp_path / split)) == [named]  # it was called by the whole expression
    for name in ("saved", "without"):
        assert len(evaluation.load_problems(evaluation.Protocol(str(tmp_path / name)))) == 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_folder_that_save_to_disk_wrote(folder, whole):
    rows = Dataset.from_list([{"question": f"{i}?", "answer": str(i)} for i in range(4)])
    (DatasetDict({"train": rows, "test": rows}) if whole else rows).save_to_disk(folder / "saved")
    said = {} if whole else {"test_split_size": 2}
    train, test = read(folder, dataset_name="saved", **said).splits()
    assert (len(train), len(test)) == ((4, 4) if whole else (2, 2))
    assert set(train["answer"]) <= set("0123")


def test_a_split_is_held_out_where_there_is_none(folder):
    (folder / "test.jsonl").unlink()
    columns = {"prompt_column": "text", "answer_column": "label"}
    with pytest.raises(ValueError, match=r"dataset_test_split='test'.*test_split_size"):
        read(folder, dataset_name=".", **columns).splits()
    for size, count in ((0.3, 3), (4, 4)):
        train, test = read(folder, dataset_name="train.jsonl", test_split_size=size, **columns).splits()
        assert (len(train), len(test)) == (10 - count, count)
        assert not {row["answer"] for row in train} & {row["answer"] for row in test}
    again = read(folder, dataset_name="train.jsonl", test_split_size=4, **columns).splits()[1]
    assert again["answer"][:] == test["answer"][:]


def test_rewards_by_every_kind_of_name(folder):
    names = [
        "own.py:shouted",
        "think_format_reward",
        "trl.rewards.accuracy_reward",
        "user/reward-model",
        "format_reward",
    ]
    own, think, dotted, model, form = read(folder, dataset_name=".", reward_funcs=names).rewards()
    assert own([[{"content": "HI"}], [{"content": "hi"}]]) == [2.0, 0.0]  # and its own file found the one beside it
    assert think is think_format_reward and dotted.__name__ == "accuracy_reward" and model == "user/reward-model"
    assert form.__name__ == "format_reward"
    made = read(folder, dataset_name=".", reward_funcs=["get_soft_overlong_punishment"]).rewards()[0]
    assert made(completion_ids=[[1] * 10]) == [0.0]
    assert [r.__name__ for r in read(folder, dataset_name=".").rewards()] == ["correctness_reward", "format_reward"]
    assert read(folder, dataset_name=".").weights() == [1.0, 0.1]


@pytest.mark.parametrize("said", ["own.py:shouted", "own:shouted", "own.shouted"])
def test_a_reward_beside_the_file_by_path_or_as_a_module(folder, said):
    (reward,) = read(folder, dataset_name=".", reward_funcs=[said]).rewards()
    assert reward([[{"content": "HI"}]]) == [2.0]


@pytest.mark.parametrize(
    ("field", "said", "names"),
    [
        (
            "reward_funcs",
            ["acuracy_reward"],
            ["acuracy_reward", "no function", "file.py:function"],
        ),
        (
            "reward_funcs",
            ["own.py:lost"],
            ["own.py has no function 'lost'"],
        ),
        ("reward_funcs", ["own.lost"], ["own has no function 'lost'"]),
        ("reward_funcs", ["owm.shouted"], ["owm.shouted", "No module named 'owm'"]),
        ("grader", "equal", ["grader='equal' is none of auto, exact"]),
        ("grader", "own.py:same_color", ["own.py has no function 'same_color'"]),
        (
            "dataset_name",
            "wordz",
            ["dataset_name='wordz' is no file or folder in", "task", "from the Hub", "<split>.jsonl"],
        ),
        ("reward_funcs", ["gone.py:shouted"], ["gone.py:shouted", "No such file", "gone.py"]),
        ("reward_funcs", ["own.py:NUMBER"], ["NUMBER", "no function"]),
        ("tools", ["no.such.module"], ["tools='no.such.module'"]),
        ("environment_factory", "own.py:Wrld", ["environment_factory='own.py:Wrld'"]),
    ],
)
def test_a_name_that_leads_nowhere_is_named(folder, field, said, names):
    task = read(folder, **{"dataset_name": "own.py:rows", field: said})
    with pytest.raises(ValueError) as info:
        task.for_trainer()
        task.prepared(None)
    assert all(name in str(info.value) for name in names), info.value


def test_what_no_task_has_is_refused(folder):
    with pytest.raises(ValueError, match=r"learning_rate.*--config"):
        read(folder, dataset_name=".", learning_rate=1)
    with pytest.raises(ValueError, match=r"neither 'marked' nor 'whole'\. Pass 'marked' where"):
        read(folder, answer_format="all")
    with pytest.raises(ValueError, match="dataset_name"):
        read(folder).splits()


def test_tools_and_environments_reach_the_trainer(folder):
    arguments = read(folder, dataset_name="own.py:rows", tools=["own.py:look"]).for_trainer()
    assert [tool.__name__ for tool in arguments["tools"]] == ["look"]
    task = read(folder, dataset_name="own.py:rows", environment_factory="own.py:World")
    arguments = task.for_trainer()
    assert arguments["environment_factory"]().get_reward() == 1.0
    assert arguments["reward_funcs"] == []  # the environment's own
    assert task.interactive and not task.graded(arguments["eval_dataset"])


def test_prompts_need_a_chat_template(folder):
    plain = SimpleNamespace(chat_template=None, name_or_path="some/base", encode=lambda text, **options: [1])
    with pytest.raises(ValueError, match=r"some/base has no chat template.*chat_template_path"):
        read(folder).prepared(plain)
    (folder / "own.jinja").write_text("{{ messages }}\n")
    assert read(folder, chat_template_path="own.jinja").prepared(plain).chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("grader", "form", "text", "right"),
    [
        ("exact", "whole", " TENALP ", True),
        ("exact", "whole", "tenalp", False),
        ("exact", "marked", "TENALP", False),
        ("exact", "marked", "so\n#### TENALP", True),
        ("own.py:same_colour", "whole", "T", True),
        ("own.py:same_colour", "whole", "", False),
    ],
)
def test_verdicts(folder, grader, form, text, right):
    task = read(folder, dataset_name=".", grader=grader, answer_format=form)
    rows = Dataset.from_dict({"answer": ["TENALP"]})
    assert task.graded(rows) and task.verdicts([text], rows) == [right]
    reward = read(folder, reward_funcs=["correctness_reward"], grader=grader, answer_format=form).rewards()[0]
    assert reward(completions=[[{"content": text}]], answer=["TENALP"]) == [float(right)]


# --- scripts ---------------------------------------------------------------------------------------------------------------------


def parse(folder, *words, recipe="max_steps: 3\n", task=None):
    (folder / "recipe.yaml").write_text(f"use_cpu: true\nbf16: false\noutput_dir: {folder}/run\n{recipe}")
    return Script.parse(task, argv=["--config", str(folder / "recipe.yaml"), *words])


def test_a_task_inside_a_recipe(folder):
    script = parse(folder, recipe="dataset_name: own.py:rows\nreward_funcs: [own.py:shouted]\ngrader: exact\n")
    assert (script.task.dataset_name, script.task.reward_funcs) == ("own.py:rows", ["own.py:shouted"])
    assert script.task.grader == "exact" and script.task.answer_format == "marked"


def test_the_command_line_replaces_the_recipe_and_the_file(folder):
    read(folder, dataset_name="own.py:rows", grader="exact", system_prompt="A")
    recipe = "dataset_name: user/other\nsystem_prompt: of the recipe\n"
    script = parse(folder, "--task", str(folder / "my_words.yaml"), "--grader", "numeric", recipe=recipe)
    assert (script.task.dataset_name, script.task.grader, script.task.system_prompt) == ("own.py:rows", "numeric", "A")
    script = parse(folder, recipe=f"task: {folder}/my_words.yaml\ngrader: math\n")
    assert (script.task.dataset_name, script.task.grader) == ("own.py:rows", "math")
    own = Task(name="mine", dataset_name="user/mine")
    assert parse(folder, recipe=recipe, task=own).task.dataset_name == "user/mine"
    assert parse(folder, "--dataset_name", "user/other", task=own).task.dataset_name == "user/other"


def test_fewer_problems_than_a_rollout_has_prompts_are_refused_before_a_model_is_loaded(folder):
    """It ended after minutes, with an untrained adapter, a card and results.json (0.0 %)."""
    rows = [{"prompt": f"Backwards: ABC{i}", "answer": f"{i}CBA"} for i in range(20)]
    own = Task(dataset_name=lambda: {"train": rows[:5], "test": rows}, grader="exact", answer_format="whole")
    words = (
        "--per_device_train_batch_size",
        "128",
        "--num_generations",
        "16",
        "--model_name_or_path",
        "examples/assets/tiny-tasks",
    )
    with pytest.raises(ValueError, match="5 training problems are fewer than the 8 prompts of a rollout"):
        parse(folder, *words, task=own).trainer_arguments()


def test_a_model_that_is_none_is_refused_before_data_is_read(folder):
    own = Task(dataset_name=lambda: pytest.fail("the data was read"), grader="exact")
    with pytest.raises(ValueError, match="typo is neither a folder here nor a Hub id"):
        parse(folder, "--model_name_or_path", "./typo", task=own).trainer_arguments()


@pytest.mark.parametrize(
    ("grader", "form", "text", "said"),
    [
        ("auto", "marked", "so 6\n#### 6", True),
        ("auto", "marked", r"so \boxed{7}", True),
        ("auto", "marked", "The answer is 6.", False),
        ("numeric", "whole", " 7 ", True),
        ("numeric", "whole", "The answer is 6.", False),
        ("exact", "whole", "The answer is 6.", True),
        ("exact", "whole", " ", False),
    ],
)
def test_a_first_rollout_without_an_answer_in_the_graders_form_is_reported(caplog, grader, form, text, said):
    texts = [text] if form == "whole" and grader == "exact" else ["no", text, ""]
    run._warn_of_form(texts, Task(grader=grader, answer_format=form))
    assert len(caplog.messages) == (not said) and all(len(message) <= 200 for message in caplog.messages)


def test_a_recipes_task_lies_beside_it(folder, monkeypatch, tmp_path):
    """Only the working directory was looked at, which a recipe knows nothing of, and the error named an option that nobody gave."""
    read(folder, dataset_name="own.py:rows", grader="exact")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    assert parse(folder, recipe="task: my_words.yaml\n").task.dataset_name == "own.py:rows"
    with pytest.raises(
        ValueError,
        match=r"\.yaml: task: words.yaml is no file here or beside .*\.yaml, and not one of the shipped ones",
    ):
        parse(folder, recipe="task: words.yaml\n")
    with pytest.raises(ValueError, match=r"task: 5 is no file here or beside"):  # was a TypeError of os.path
        parse(folder, recipe="task: 5\n")
    (elsewhere / "my_words.yaml").write_text("dataset_name: other.jsonl\n")
    assert parse(folder, recipe="task: my_words.yaml\n").task.dataset_name == "own.py:rows"


def test_a_script_without_any_argument(folder):
    """As docs/source/your_task.md has it in Python."""
    text = f"use_cpu: true\nbf16: false\noutput_dir: {folder}/run\nmax_steps: 3\n"
    (folder / "recipe.yaml").write_text(text)
    own = Task(name="mine", dataset_name="user/mine")
    with pytest.raises(ValueError, match="--task  is no file"):  # of a shell's variable that is not set: was a KeyError
        Script.parse(own, argv=["--task="], config=str(folder / "recipe.yaml"))
    script = Script.parse(own, argv=[], config=str(folder / "recipe.yaml"))
    assert script.task.dataset_name == "user/mine" and script.args.max_steps == 3


def test_the_task_of_a_script_is_trained_whatever_the_recipe_trains(folder, caplog):
    """As docs/source/your_task.md has it in Python, with a shipped recipe: that one's data and rewards were trained, without a word."""
    own = Task(name="mine", dataset_name="user/mine", reward_funcs=["correctness_reward"], grader="exact")
    script = Script.parse(own, config="letters", argv=["--output_dir", str(folder / "run")])
    assert script.task.dataset_name == "user/mine" and script.task.reward_funcs == ["correctness_reward"]
    assert "is not trained" not in caplog.text
    script = parse(folder, recipe="task: letters\ndataset_name: user/other\n", task=own)
    assert (
        script.task.dataset_name == "user/mine"
        and "of the recipe task: letters, dataset_name: user/other is left out" in caplog.text
    )
    assert parse(folder, "--task", "letters", task=own).task.dataset_name != "user/mine"


def test_both_spellings_of_an_option(folder):
    """The parser takes --dataset-name too; of a --task's fields that were said so, nothing was heard, nor of --report-to."""
    read(folder, dataset_name="own.py:rows", grader="exact")
    words = ("--task", str(folder / "my_words.yaml"))
    for said in (("--dataset-name", "user/other"), ("--dataset-name=user/other",)):
        assert parse(folder, *words, *said).task.dataset_name == "user/other"


@pytest.mark.parametrize("said", [[], ["--learning_rate", "1e-5"], ["--use_cpu=true", "--max_completion_length", "32"]])
def test_a_model_without_a_recipe_gets_no_value_of_the_embedded_one(said, capsys, monkeypatch, tmp_path):
    """Its learning rate, lengths, data and adapter are for the tiny model alone."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    script = Script.parse(argv=["--model_name_or_path", str(tmp_path), "--output_dir", str(tmp_path / "run"), *said])
    parser = parser_of([QeRLConfig, ModelConfig])
    words = ["--output_dir", str(tmp_path / "run"), "--use_cpu", "true", "--bf16", "false", *said]
    args, model_args = parser.parse_args_into_dataclasses(args=words)
    embedded = recipes.contents(recipes.config_file("embedded"))
    for name in embedded.keys() - {"task", "model_name_or_path", "report_to", "eval_batch_size", "dtype"}:
        kind, got = (args, script.args) if hasattr(args, name) else (model_args, script.model_args)
        assert getattr(got, name) == getattr(kind, name), name
    assert script.task.dataset_name == "openai/gsm8k" and script.model_args.dtype == "bfloat16"
    (line,) = capsys.readouterr().out.splitlines()
    assert "No recipe" in line and f"learning rate {args.learning_rate:g}," in line
    assert f"at most {args.max_completion_length} tokens" in line and "--config" in line


@pytest.mark.parametrize("model", [[], ["--model_name_or_path", "examples/assets/tiny-qwen2"], ["absolute"]])
def test_the_embedded_model_keeps_its_recipe(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = (
        ["--model_name_or_path", str(recipes.examples_folder() / "assets/tiny-qwen2")] if "absolute" in model else model
    )
    assert Script.parse(argv=words).args.learning_rate == 5e-4


def test_an_option_that_there_is_not(folder):
    with pytest.raises(ValueError, match=r"--max_stepps: no option of a run.* There is --max_steps"):
        parse(folder, "--max_stepps", "3", recipe="learning_rate: 1.0e-5\n")
    with pytest.raises(ValueError, match=r"--reward_func --zebra=1: no option .* There is --reward_funcs"):
        parse(folder, "--zebra=1", recipe="reward_func: [own.py:shouted]\n")


@pytest.mark.parametrize("base_format", ["nvfp4", "full"])
@pytest.mark.parametrize("use_peft", ["true", "false"])
def test_an_adapter_that_is_asked_for_beside_all_weights_is_told(folder, caplog, base_format, use_peft):
    words = ("--base_format", base_format, "--use_peft", use_peft, "--lora_r", "4")
    recipe = "task: arithmetic\nmodel_name_or_path: examples/assets/tiny-qwen2\n"
    adapter = parse(folder, *words, recipe=recipe).trainer_arguments()["peft_config"]
    assert (adapter is not None) == (base_format == "nvfp4" and use_peft == "true")
    told = [r.getMessage() for r in caplog.records if "use_peft and lora_* of the recipe" in r.getMessage()]
    assert len(told) == (base_format == "full" and use_peft == "true")


def test_other_data_has_no_configuration_of_the_first(folder):
    script = parse(folder, "--dataset_name", "user/other", recipe="task: gsm8k\n")
    assert (script.task.dataset_name, script.task.dataset_config) == ("user/other", None)
    assert parse(folder, recipe="task: gsm8k\n").task.dataset_config == "main"
    assert parse(folder).task.dataset_name == "openai/gsm8k"


def test_trackio_where_it_is_installed_and_nobody_says_otherwise(folder, monkeypatch):
    assert parse(folder, recipe="report_to: none\n").args.report_to == []
    monkeypatch.setattr("qerl_trl.tasks.script.importlib.util.find_spec", lambda name: name == "trackio" or None)
    args = parse(folder).args
    assert (args.report_to, args.trackio_space_id, args.trackio_static_space_id) == (["trackio"], None, False)
    assert (args.log_completions, args.num_completions_to_print) == (
        True,
        0,
    )  # what was sampled is seen there, and only there
    assert parse(folder, "--log_completions", "false").args.log_completions is False
    assert parse(folder, "--report_to", "none").args.report_to == []
    assert parse(folder, recipe="report_to: none\n").args.report_to == []


def test_no_option_has_two_homes():
    taken = {field.name for kind in (QeRLConfig, ModelConfig) for field in dataclasses.fields(kind)}
    assert not taken & {*PARSED, "task", "eval_problems"}


def test_the_documentation_names_every_field():
    page = (Path(__file__).resolve().parents[2] / "docs" / "source" / "your_task.md").read_text()
    missing = [name for name in (*PARSED, "reward_weights") if f"`{name}`" not in page]
    assert not missing


def test_a_shipped_name_or_what_there_is(folder):
    assert recipes.task_file("gsm8k").name == "gsm8k.yaml"
    with pytest.raises(ValueError, match=r"--task nothing .*arithmetic.*gsm8k"):
        recipes.task_file("nothing")
    assert with_config(["--a", "1", "--config", "embedded"])[2:] == ["--config", str(recipes.config_file("embedded"))]


@pytest.mark.parametrize("file", sorted((recipes.examples_folder() / "tasks").glob("*.yaml")), ids=lambda f: f.stem)
def test_every_shipped_task_is_whole(file):
    task = Task.read(file)
    if task.hub_dataset:  # not from here
        assert task.rewards()
        return
    arguments = task.for_trainer()
    # of the grid game and of products these are all that there are: every board of its size, every two digits once
    least, held_out = {"treasure on a grid": (600, 200), "products of two digits": (41, 40)}.get(task.name, (1000, 200))
    assert len(arguments["train_dataset"]) >= least and len(arguments["eval_dataset"]) >= held_out
    asked, held = ({json.dumps(row) for row in arguments[name]} for name in ("train_dataset", "eval_dataset"))
    assert not asked & held
    assert arguments["reward_funcs"] or "environment_factory" in arguments


def test_what_nobody_said_of_the_model_is_as_in_three_lines(folder):
    """TRL's ModelConfig says float32, and keeps lora_* to itself unless use_peft is said."""
    plain = parse(folder).model_args
    assert plain.dtype == "bfloat16" and get_peft_config(plain) is None  # the trainer's own
    small = parse(folder, "--lora-r", "4", recipe="lora_target_modules: [q_proj]\n").model_args
    config = get_peft_config(small)
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 8, 0.0) and config.target_modules == "q_proj"
    said = parse(folder, "--dtype=float32", recipe="use_peft: true\nlora_r: 4\n").model_args
    assert said.dtype == "float32" and (get_peft_config(said).lora_alpha, get_peft_config(said).lora_dropout) == (
        32,
        0.05,
    )  # TRL's
    full = parse(folder, recipe="base_format: full\n").model_args
    assert full.dtype == "float32" and not full.use_peft


@pytest.mark.parametrize("whole", [False, True])
def test_a_reference_that_is_no_number_is_found_before_a_rollout_is(folder, whole):
    rows = [{"question": "a", "answer": "12"}, {"question": "b", "answer": "50%"}]
    form = "whole" if whole else "marked"
    task = Task(dataset_name={"train": rows, "test": rows}, grader="numeric", answer_format=form)
    with pytest.raises(ValueError, match=r"Problem 1 \(from 0\): The reference '50%' is no number"):
        task.splits()


@pytest.mark.parametrize("one", ["correctness_reward", think_format_reward], ids=["name", "function"])
def test_one_reward_needs_no_list(one):
    assert Task(reward_funcs=one).reward_funcs == [one]
