"""A task as an object: rewards, graders, tools and environments by name, and the verdicts."""

import json
import sys
from types import SimpleNamespace

import pytest
from datasets import Dataset
from trl.rewards import think_format_reward

from qerl_trl.support import recipes
from qerl_trl.tasks.task import PARSED, Task

ROWS = "own.py:rows"


def test_a_reference_that_is_a_list(folder, read):
    """It came to one's own reward as the text of a list, and no completion was ever right."""
    lines = [{"prompt": f"{i}?", "answer": [str(i), "or so"]} for i in range(4)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    common = {"dataset_name": "train.jsonl", "test_split_size": 1, "reward_funcs": ["own.py:shouted"]}
    with pytest.raises(ValueError, match=r"Problem 0 .*: The reference \['2', 'or so'\] .*or grader='reward'"):
        read(**common).splits()
    task = read(**common, grader="own.py:one_of", answer_format="whole")
    train, test = task.splits()
    assert train[0]["answer"] == ["0", "or so"] and task.verdicts(["or so"], test) == [True]
    task = read(**common, grader="reward")
    assert task.for_trainer()["train_dataset"][0]["answer"] == ["0", "or so"] and not task.graded(test)
    with pytest.raises(ValueError, match="'reward' needs reward_funcs of your own"):
        read(grader="reward").rewards()


@pytest.mark.parametrize("form", ["marked", "whole"])
def test_a_reference_that_is_no_number_is_found_before_a_rollout(form):
    rows = [{"question": "a", "answer": "12"}, {"question": "b", "answer": "50%"}]
    task = Task(dataset_name={"train": rows, "test": rows}, grader="numeric", answer_format=form)
    with pytest.raises(ValueError, match=r"Problem 1 \(from 0\): The reference '50%' is no number"):
        task.splits()


@pytest.mark.parametrize(
    ("grader", "form", "text", "right"),
    [
        ("exact", "whole", " TENALP ", True),
        ("exact", "marked", "TENALP", False),
        ("exact", "marked", "so\n#### TENALP", True),
        ("own.py:same_colour", "whole", "T", True),
    ],
)
def test_verdicts(read, grader, form, text, right):
    task = read(dataset_name=".", grader=grader, answer_format=form, reward_funcs=["correctness_reward"])
    rows = Dataset.from_dict({"answer": ["TENALP"]})
    assert task.graded(rows) and task.verdicts([text], rows) == [right]
    assert task.rewards()[0](completions=[[{"content": text}]], answer=["TENALP"]) == [float(right)]


GYM = "chain_sum basic_arithmetic products gcd letter_counting simple_equations gsm_symbolic leg_counting"


@pytest.mark.parametrize("name", [*GYM.split(), "spell_backward", "number_sequence"])
def test_a_reasoning_gym_task_is_scored_by_its_own_verifier(name):
    pytest.importorskip("reasoning_gym")
    given = {"dataset_name": f"reasoning_gym:{name}", "dataset_kwargs": {"train_size": 20, "test_size": 10}}
    task = Task(**given, answer_format="last")
    train, test = task.splits()
    texts = [f"The answer is {answer}." for answer in test["answer"]]
    assert task.verdicts(texts, test) == [True] * 10 and not any(task.verdicts(["no"] * 10, test))
    score = task.rewards()[0]
    assert score([[{"content": text}] for text in texts], **test[:]) == [1.0] * 10
    assert len(train) == 20 and not {*map(str, train["prompt"])} & {*map(str, test["prompt"])}
    if name == "gsm_symbolic":
        assert len(Task(**given, dataset_test_split="unseen").splits()[1]) == 10
    if name == "spell_backward":  # each letter in its place counts
        assert 0 < score([[{"content": test["answer"][0][:-1]}]], **test[:1])[0] < 1


def test_reasoning_gym_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"reasoning_gym:gcd.*pip install 'qerl-trl\[reasoning-gym\]'"):
        Task(dataset_name="reasoning_gym:gcd").splits()


def test_rewards_by_every_kind_of_name(read):
    names = ["own.py:shouted", "own:shouted", "own.shouted", "think_format_reward", "trl.rewards.accuracy_reward"]
    *own, think, dotted, model = read(dataset_name=".", reward_funcs=[*names, "user/reward-model"]).rewards()
    for reward in own:  # `own.py` found the module next to it
        assert reward([[{"content": "HI"}], [{"content": "hi"}]]) == [2.0, 0.0]
    assert think is think_format_reward and dotted.__name__ == "accuracy_reward" and model == "user/reward-model"
    (made,) = read(dataset_name=".", reward_funcs="get_soft_overlong_punishment").rewards()
    assert made(completion_ids=[[1] * 10]) == [0.0]
    default = read(dataset_name=".")
    assert [r.__name__ for r in default.rewards()] == ["correctness_reward", "format_reward"]
    assert default.weights() == [1.0, 0.1]
    assert Task(reward_funcs=think_format_reward).reward_funcs == [think_format_reward]  # one needs no list


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("reward_funcs", ["acuracy_reward"], r"acuracy_reward.*no function.*file\.py:function"),
        ("reward_funcs", ["own.py:lost"], r"own\.py has no function 'lost'"),
        ("reward_funcs", ["gone.py:shouted"], r"gone\.py:shouted.*No such file.*gone\.py"),
        ("grader", "equal", "grader='equal' is none of auto, exact"),
        ("dataset_name", "wordz", "dataset_name='wordz' is no file or folder in .*task.*from the Hub.*<split>.jsonl"),
        ("dataset_name", None, "no data: give it a dataset_name"),
        ("environment_factory", "own.py:Wrld", "environment_factory='own.py:Wrld'"),
        ("learning_rate", 1, "learning_rate.*--config"),
        ("answer_format", "all", r"none of marked, whole, last\. Pass 'marked'"),
    ],
)
def test_an_invalid_field_is_named(read, field, value, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        read(**{"dataset_name": ROWS, field: value}).for_trainer()


def test_tools_and_environments_reach_the_trainer(read):
    arguments = read(dataset_name=ROWS, tools=["own.py:look"]).for_trainer()
    assert [tool.__name__ for tool in arguments["tools"]] == ["look"]
    task = read(dataset_name=ROWS, environment_factory="own.py:World")
    arguments = task.for_trainer()
    assert arguments["environment_factory"]().get_reward() == 1.0
    assert arguments["reward_funcs"] == []  # the environment's own
    assert task.interactive and not task.graded(arguments["eval_dataset"])


def test_prompts_need_a_chat_template(folder, read):
    plain = SimpleNamespace(chat_template=None, name_or_path="some/base", encode=lambda text, **options: [1])
    with pytest.raises(ValueError, match=r"some/base has no chat template.*chat_template_path"):
        read().prepared(plain)
    (folder / "own.jinja").write_text("{{ messages }}\n")
    assert read(chat_template_path="own.jinja").prepared(plain).chat_template == "{{ messages }}"


def test_the_documentation_names_every_field():
    page = (recipes.examples_folder().parent / "docs" / "source" / "your_task.md").read_text()
    assert not [name for name in (*PARSED, "reward_weights") if f"`{name}`" not in page]


@pytest.mark.parametrize("file", sorted((recipes.examples_folder() / "tasks").glob("*.yaml")), ids=lambda f: f.stem)
def test_every_shipped_task_is_whole(file):
    task = Task.read(file)
    if task.hub_dataset or file.stem == "gsm_symbolic":  # not from here
        assert task.hub_dataset is None or file.stem == "own" or task.rewards()
        return
    arguments = task.for_trainer()
    # all boards of the grid game's size, and all products of two digits
    least, held_out = {"treasure on a grid": (600, 200), "products of two digits": (41, 40)}.get(task.name, (1000, 200))
    assert len(arguments["train_dataset"]) >= least and len(arguments["eval_dataset"]) >= held_out
    train, test = ({json.dumps(row) for row in arguments[name]} for name in ("train_dataset", "eval_dataset"))
    assert not train & test
    assert arguments["reward_funcs"] or "environment_factory" in arguments
