"""Answers found in completions, and compared with the reference by each grader."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_trl.tasks import run
from qerl_trl.tasks.grading import correctness, final_answer, format_reward, grader_of, in_form, is_correct
from qerl_trl.tasks.task import Task

GOOD = "3 + 4 = 7\n#### 7"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD, "7"),
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"first \boxed{2}. Then \boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{2}, or \boxed{3", None),  # cut off
        ("#### Step 1: Expand\nx\n#### Step 2: Simplify\nSo the answer is \\boxed{5}.", "5"),  # headings in Markdown
        ("\\boxed{4} was wrong.\n#### 5", "5"),
        ("#### \\boxed{5}", "5"),
        ("the answer is 7", None),
    ],
)
def test_final_answer(text, expected):
    assert final_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        (GOOD, "work\n#### 7", True),
        ("x\n#### 1,234", "1234", True),
        ("x\n#### $18.00", "18", True),
        ("7", "7", False),
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"The answer is \boxed{\frac{\sqrt{3}}{3}}.", r"\boxed{\frac{\sqrt{3}}{2}}", False),
        ("x\n#### 7 apples", "7", True),
    ],
)
def test_is_correct(text, gold, expected):
    assert is_correct(text, gold) is expected


@pytest.mark.parametrize(
    ("grader", "answer", "gold", "expected"),
    [
        ("auto", "tenalp", "planet", False),  # the same letters: to mathematics the same product
        ("auto", "Planet", "planet", True),
        ("auto", "two  words", "Two words.", True),
        ("auto", r"\frac{2}{4}", "0.5", True),
        ("auto", "x + 1", "1 + x", True),
        ("math", "tenalp", "planet", True),
        ("math", "357", "3,5,7", False),  # a comma that parts members is no thousands separator
        ("math", "7,5,3", "3,5,7", True),
        ("math", "12", "1,2", False),
        ("numeric", "1,200,000.5", "1200000.5", True),
        ("numeric", "10,00", "1000", False),
        ("auto", r"\text{Yes}", "Yes", True),
        ("auto", "$R2D2$.", "R2D2", True),
        ("auto", r"2\colon3\colon5", "2:3:5", True),
        ("auto", "-5", "2 - 3 - 4", True),
        ("auto", "168.192.0.1", "192.168.0.1", False),
        ("auto", "E5 E4", "E4 E5", False),
        ("auto", "2x", "x2", False),
        ("auto", "x \\cdot 2", "2x", True),
        ("exact", "Planet", "planet", False),
        ("exact", " two  words ", "two words", True),
        ("numeric", "12 or 13", "12", False),
    ],
)
def test_graders(grader, answer, gold, expected):
    assert is_correct(f"work\n#### {answer}", gold, grader) is expected
    assert correctness(grader)([f"#### {answer}"], answer=[gold]) == [float(expected)]


def test_the_last_number_or_word_is_the_answer():
    right = {"The answer is 6.": "6", "7 * 4 = **28**": "28", "It has 3 of them.": 3, "It costs $1,234.50!": "1234.5"}
    right |= {"so it is -4.": "work\n#### -4", "In 2 steps: 'TENALP'.": "TENALP"}
    assert correctness("auto", "last")([*right], answer=[*right.values()]) == [1.0] * 6
    assert not any(is_correct(text, gold, form="last") for text, gold in (("9-4", "-4"), ("Six.", "6"), ("", "6")))


def test_a_truth_value_is_right_in_either_spelling():
    verdicts = [is_correct(text, True, "exact", "whole") for text in ("true", "True", "false", "1")]
    assert verdicts == [True, True, False, False]


def test_a_grader_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text("def same_length(answer, reference):\n    return len(answer) == len(reference)\n")
    name = f"{tmp_path / 'mine.py'}:same_length"
    assert is_correct("#### abc", "xyz", name) and not is_correct("#### ab", "xyz", name)
    assert correctness(name).__name__.endswith("mine_py_same_length")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fuzzy", "'fuzzy' is none of auto, exact, numeric, math.*file.py:function"),
        ("absent.py:f", "cannot be found"),
        ("math:pi", "math has no function 'pi'"),
    ],
)
def test_an_unknown_grader_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        grader_of(name)


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_numbers_are_correct_iff_equal(a, b):
    assert is_correct(f"work\n#### {a:,}", f"#### {b}") is (a == b)


def test_format():
    assert format_reward([GOOD, "#### 7", "a\n#### 7\nmore", "a\n#### 7\n#### 7"]) == [1.0, 0.0, 0.0, 0.0]
    boxed = [
        "3 + 4\n\\[\n\\boxed{7}\n\\]",
        "\\boxed{7}",
        "a\n\\boxed{7}\nmore",
        "\\boxed{3}\n\\boxed{7}",
        "a\n\\boxed{7",
    ]
    assert format_reward(boxed) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_rewards_read_conversational_completions():
    completions = [[{"role": "assistant", "content": GOOD}], [{"role": "assistant", "content": "no"}]]
    assert correctness()(completions, answer=["#### 7", "#### 7"]) == [1.0, 0.0]
    assert format_reward(completions) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("grader", "form", "text", "expected"),
    [
        ("auto", "marked", r"so \boxed{7}", True),
        ("auto", "marked", "The answer is 6.", False),
        ("numeric", "whole", " 7 ", True),
        ("numeric", "whole", "The answer is 6.", False),
        ("exact", "whole", "The answer is 6.", True),
        ("numeric", "last", "The answer is 6.", True),
        ("numeric", "last", "Six.", False),
    ],
)
def test_a_first_rollout_without_an_answer_in_the_graders_form_gives_a_warning(caplog, grader, form, text, expected):
    assert in_form(text, grader, form) is expected
    with caplog.at_level(logging.WARNING):
        run._warn_of_form([text, ""], Task(grader=grader, answer_format=form))
    assert len(caplog.messages) == (not expected) and all(len(message) <= 200 for message in caplog.messages)
