"""Whether a completion states the right answer. A grader compares the answer that a text states with the reference.

    auto      numbers by value; words, codes (R2D2) and dates letter by letter, ignoring case; everything else as mathematics, in which
              units count for nothing (the default)
    exact     letter by letter, but for spaces around and repeated inside
    numeric   by value: 1,200 and 1200.0 are equal; what is no number is wrong
    math      math-verify: 1/2, 0.5 and \\frac{1}{2} are equal. Not for words: to it `tenalp` is a product like `planet`

Or one's own function (answer, reference) -> bool, by name: `my_task.py:same_colour`, `package.module:function`. It gets a reference that
is no text as it stands in the data; ours compare numbers as their text. `reward` compares nothing: the task's first reward says what is right.
"""

import importlib.util
import re
from collections.abc import Callable, Iterable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

from .named import function_named

Grader = Callable[[str, Any], bool]

ANSWER_MARK = "####"
MARKED = re.compile(r"####[ \t]*(\S[^\n]*)")
_BOXED = r"\boxed{"
#: a comma stands before each three digits, or nowhere: else it parts the members of a list
_PLAIN_NUMBER = re.compile(r"^-?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?$")
#: what is a name for all its digits, or a date, an address, a version: the same letter by letter
_CODE = re.compile(r"^[^\W\d_]+\d\w*(?:\s+[^\W\d_]+\d\w*)*$|^\d+(?:[-/:.]\d+){2,}$")
#: what makes bold or upright type of a whole answer
_DRESS = re.compile(r"^(?:\*\*(.+)\*\*|\\(?:text|textbf|mathrm|mathbf|textit)\{([^{}]*)\})$")
#: what encloses mathematics; the spaces and the colon of its own that it has; and spaces around what joins the parts of a ratio, or of any code
_ENCLOSED = re.compile(r"^(?:\$+(.+?)\$+|\\\((.+)\\\)|\\\[(.+)\\\])$")
_MATH_SPACES, _MATH_COLON = re.compile(r"\\[!,:; ]"), re.compile(r"\{:\}|\\colon(?![a-z])")
_OF_A_RATIO, _OF_A_CODE = re.compile(r"\s*(:)\s*"), re.compile(r"\s*([-/:.])\s*")
#: letters of any script, and what joins them in a phrase
_WORDS = re.compile(r"^[^\W\d_]{2,}(?:[\s'\u2019-]+[^\W\d_]+)*[.!?]?$")


def final_answer(text: str) -> str | None:
    """What a solution states as its answer: the rest of the last `####` line, or the last `\\boxed{}`, whichever stands later (`####` is a heading
    in Markdown, too); `None` without."""
    *_, last = (None, *MARKED.finditer(text))
    boxed = _boxed(text)
    if boxed is not None and (last is None or text.rfind(_BOXED) > last.start()):
        return boxed
    return None if last is None else last[1].strip()


def _boxed(text: str) -> str | None:
    """What is in the last box, whose braces may hold any others; `None` where there is none, or where it does not end."""
    _, box, rest = text.rpartition(_BOXED)
    depth = 1
    for at, letter in enumerate(rest if box else ""):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[:at].strip()
    return None


def _spaced(answer: str) -> str:
    return " ".join(answer.split())


def _number(answer: str) -> Decimal | None:
    plain = answer.replace("$", "").strip().rstrip(".")
    return Decimal(plain.replace(",", "")) if _PLAIN_NUMBER.match(plain) else None


def _undressed(answer: str) -> str:
    found = _DRESS.match(answer.strip())
    return (found[1] or found[2] or "").strip() if found else answer


def _bare(answer: str, joints: re.Pattern[str]) -> str:
    """Without the end of a sentence, what encloses mathematics, and spaces around the `joints` of a code."""
    found = _ENCLOSED.match(_ended(answer))
    inner = _undressed(_ended(next(filter(None, found.groups())))) if found else answer
    inner = _MATH_COLON.sub(":", _MATH_SPACES.sub("", _ended(inner)))
    return _spaced(joints.sub(lambda space: space[1], inner))


def _ended(answer: str) -> str:
    return answer.strip().rstrip(".!?").rstrip()


def exact(answer: str, reference: str) -> bool:
    return _spaced(answer) == _spaced(reference)


def numeric(answer: str, reference: str) -> bool:
    value = _number(reference)
    if value is None:
        raise ValueError(
            f"The reference {reference!r} is no number, so grader='numeric' cannot compare with it. Choose another grader."
        )
    return _number(answer) == value


def math(answer: str, reference: str) -> bool:
    from math_verify import parse, verify

    if (value := _number(reference)) is not None and (stated := _number(answer)) is not None:
        return value == stated
    return bool(verify(parse(f"${reference}$"), parse(f"${answer}$")))


def auto(answer: str, reference: str) -> bool:
    answer, reference = _undressed(answer), _undressed(reference)
    if _CODE.match(_bare(reference, _OF_A_RATIO)):  # `2 - 3 - 4` is a difference
        return _bare(answer, _OF_A_CODE).casefold() == _bare(reference, _OF_A_CODE).casefold()
    if _WORDS.match(reference.strip()):
        return _spaced(answer).casefold().rstrip(".!?") == _spaced(reference).casefold().rstrip(".!?")
    return math(answer, reference)


GRADERS: dict[str, Grader] = {"auto": auto, "exact": exact, "numeric": numeric, "math": math}

#: in place of a grader: the first reward says what is right
BY_REWARD = "reward"


def grader_of(name: str, folders: list[Path] | None = None) -> Grader:
    """The grader of that name, or the function that a path names, its file looked for in `folders`.

    Raises:
        `ValueError`: there is no such grader or function.
        `ImportError`: it compares mathematics, and math-verify is not installed. Here, and not in the middle of a run.
    """
    if name == BY_REWARD:
        raise ValueError(
            f"grader={name!r} compares nothing, so it needs reward_funcs of your own, and a run to be measured in. Otherwise choose one of "
            f"{', '.join(GRADERS)}, or file.py:function."
        )
    if name in ("auto", "math") and importlib.util.find_spec("math_verify") is None:
        raise ImportError(f"The grader {name!r} compares answers with math-verify: pip install 'qerl-trl[math]'.")
    if name in GRADERS:
        return GRADERS[name]
    if ":" not in name:
        raise ValueError(
            f"grader={name!r} is none of {', '.join(GRADERS)}, and no function: name one as file.py:function or package.module:function."
        )
    return function_named(name, "grader", folders)


def comparable(gold: Any) -> bool:
    """Whether the graders above can compare with `gold`: text, a number, a date. Not lists, records or nothing."""
    return isinstance(gold, str | int | float | Decimal | date)


def require_references(golds: Iterable[Any], grader: str | Grader, whole: bool = False, instead: str = "") -> None:
    """Whether a grader can compare with every reference, before anything is generated. Of one's own nothing is known.

    Args:
        instead: what else could be done, for the message.

    Raises:
        `ValueError`: it cannot; by the problem's number.
    """
    if grader not in GRADERS:
        return
    for row, gold in enumerate(golds):
        if not comparable(gold):
            raise ValueError(
                f"The reference answer of problem {row} (from 0) is {gold!r}, and grader={grader!r} compares with texts and numbers. Name "
                f"a grader of your own (file.py:function), which gets it as it is{instead}."
            )
        if grader == "numeric":
            try:
                is_correct(f"{ANSWER_MARK} 0", gold, "numeric", whole)
            except ValueError as error:
                raise ValueError(f"Problem {row} (from 0): {error}") from error


def in_form(text: str, grader: str | Grader = "auto", whole: bool = False) -> bool:
    """Whether `text` states an answer that the grader can compare, right or wrong."""
    answer = text.strip() if whole else final_answer(text)
    return bool(answer) and (grader != "numeric" or _number(answer or "") is not None)


def is_correct(text: str, gold: Any, grader: str | Grader = "auto", whole: bool = False) -> bool:
    """Whether the answer that `text` states equals `gold` (an answer, or a worked solution that ends in one).

    Args:
        whole: all of `text` is the answer, and all of `gold`; otherwise what stands after `####` or in a box.
    """
    answer = text.strip() if whole else final_answer(text)
    if not answer:
        return False
    compare = grader_of(grader) if isinstance(grader, str) else grader
    if not isinstance(gold, str) and compare in GRADERS.values():
        if not comparable(gold):
            raise ValueError(
                f"The reference {gold!r} is no text and no number, so a grader of one's own has to compare with it."
            )
        if isinstance(gold, bool):  # `true` in JSON, `True` in Python
            answer, gold = answer.lower(), str(gold).lower()
        gold = str(gold)
    if isinstance(gold, str):
        gold = gold.strip() if whole else final_answer(gold) or gold
    return bool(compare(answer, gold))
