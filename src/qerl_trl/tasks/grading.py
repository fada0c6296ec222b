"""Graders: compare the answer stated in a completion with the reference.

    auto      numbers by value; words, codes (R2D2) and dates letter by letter, ignoring case; everything else as
              mathematics, ignoring units (the default)
    exact     letter by letter, ignoring spaces around and repeated spaces inside
    numeric   by value: 1,200 and 1200.0 are equal; anything else is wrong
    math      math-verify: 1/2, 0.5 and \\frac{1}{2} are equal. Not for words: to it `tenalp` is a product like `planet`

Or a custom function (answer, reference) -> bool or score, by name: `my_task.py:same_colour`, `package.module:function`.
It gets the reference in the data's type; built-in graders get numbers as text. `reward`: the first reward decides.
"""

import functools
import importlib
import importlib.util
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from datetime import date
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

from .data import gym

Grader = Callable[..., bool | float]

#: the answer stands after #### or in a box, is all of the text, or is its last number or word
FORMS = ("marked", "whole", "last")
#: least score of a right answer
RIGHT = 0.99
BOXED_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
ANSWER_MARK = "####"
MARKED = re.compile(r"####[ \t]*(\S[^\n]*)")
_BOXED = r"\boxed{"
#: commas before every three digits, or none: otherwise they separate list members
_PLAIN_NUMBER = re.compile(r"^-?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?$")
#: a number in a sentence; the minus of a difference is none of its sign
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?")
#: a name with digits, date, address or version: compared letter by letter
_CODE = re.compile(r"^[^\W\d_]+\d\w*(?:\s+[^\W\d_]+\d\w*)*$|^\d+(?:[-/:.]\d+){2,}$")
#: bold or upright type around a whole answer
_DRESS = re.compile(r"^(?:\*\*(.+)\*\*|\\(?:text|textbf|mathrm|mathbf|textit)\{([^{}]*)\})$")
#: delimiters of mathematics; its spaces and colon; spaces around the joints of a ratio, or of any code
_ENCLOSED = re.compile(r"^(?:\$+(.+?)\$+|\\\((.+)\\\)|\\\[(.+)\\\])$")
_MATH_SPACES, _MATH_COLON = re.compile(r"\\[!,:; ]"), re.compile(r"\{:\}|\\colon(?![a-z])")
_OF_A_RATIO, _OF_A_CODE = re.compile(r"\s*(:)\s*"), re.compile(r"\s*([-/:.])\s*")
#: letters of any script, and the joints of a phrase
_WORDS = re.compile(r"^[^\W\d_]{2,}(?:[\s'\u2019-]+[^\W\d_]+)*[.!?]?$")


def final_answer(text: str) -> str | None:
    """Return the stated answer of a solution: the later of the last `####` line and the last `\\boxed{}`."""
    *_, last = (None, *MARKED.finditer(text))
    boxed = _boxed(text)
    if boxed is not None and (last is None or text.rfind(_BOXED) > last.start()):
        return boxed
    return None if last is None else last[1].strip()


def stated(text: str, reference: Any, form: str) -> str | None:
    """Return the answer in `text` by one of the `FORMS`. `last`: the last number if `reference` is one, else a word."""
    if form != "last":
        return text.strip() if form == "whole" else final_answer(text)
    number = _number(final_answer(str(reference)) or str(reference)) is not None
    parts = _NUMBER.findall(text) if number else [word.strip("*_.,:;!?()[]\"'`$") for word in text.split()]
    return next(filter(None, reversed(parts)), None)


def _boxed(text: str) -> str | None:
    """Return the last box's content, nested braces allowed; `None` without a complete box."""
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


class Verifier:
    """Grader of a reasoning-gym data set: the score of its own `score_answer`, from 0 to 1."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self.__name__ = f"reasoning_gym_{name}"
        self.verify = gym(name, **settings).score_answer

    def __call__(self, answer: str, reference: str, metadata: str = "{}") -> float:
        answer = _undressed(answer)
        if _number(answer) is not None and "," not in reference:  # several verifiers read 1,200 as 1
            answer = answer.replace("$", "").replace(",", "").strip().rstrip(".")
        try:
            return float(self.verify(answer, {"answer": reference or None, "metadata": json.loads(metadata)}))
        except Exception:  # some verifiers parse the answer without a check
            return 0.0


def _undressed(answer: str) -> str:
    found = _DRESS.match(answer.strip())
    return (found[1] or found[2] or "").strip() if found else answer


def _bare(answer: str, joints: re.Pattern[str]) -> str:
    """Strip final punctuation, delimiters of mathematics, and spaces around the `joints` of a code."""
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
        raise ValueError(f"The reference {reference!r} is no number, as grader='numeric' needs. Choose another grader")
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

#: instead of a grader: the first reward decides
BY_REWARD = "reward"


def grader_of(name: str, folders: list[Path] | None = None) -> Grader:
    """Return the built-in grader `name`, or the function at a path, its file searched for in `folders`.

    Raises:
        `ValueError`: unknown grader or function. `ImportError`: math-verify is not installed.
    """
    if name in ("auto", "math") and importlib.util.find_spec("math_verify") is None:
        raise ImportError(f"The grader {name!r} compares answers with math-verify: pip install 'qerl-trl[math]'.")
    if name in GRADERS:
        return GRADERS[name]
    if ":" not in name:
        raise ValueError(
            f"grader={name!r} is none of {', '.join(GRADERS)}, and no function: name one as file.py:function or "
            f"package.module:function. ({BY_REWARD!r} needs reward_funcs of your own, in a run.)"
        )
    return function_named(name, "grader", folders)


def require_references(golds: Iterable[Any], grader: str | Grader, form: str = "marked", instead: str = "") -> None:
    """Raise `ValueError` for the first reference unusable by a built-in grader. `instead`: a remedy."""
    if grader not in GRADERS:
        return
    kind = "numeric" if grader == "numeric" else "exact"  # "exact" is quick and accepts anything
    for row, gold in enumerate(golds):
        try:
            is_correct(f"{ANSWER_MARK} 0", gold, kind, form)
        except ValueError as error:
            raise ValueError(f"Problem {row} (from 0): {error}{instead}.") from error


def in_form(text: str, grader: str | Grader = "auto", form: str = "marked") -> bool:
    """True if `text` states an answer in the grader's form, right or wrong."""
    answer = stated(text, 0 if grader == "numeric" else "", form)
    return bool(answer) and (grader != "numeric" or _number(answer or "") is not None)


def is_correct(text: str, gold: Any, grader: str | Grader = "auto", form: str = "marked") -> bool:
    """True if the answer in `text` has the full [`score`]."""
    return score(text, gold, grader, form) >= RIGHT


def score(text: str, gold: Any, grader: str | Grader = "auto", form: str = "marked") -> float:
    """Score the answer in `text` against `gold` (an answer, or a worked solution ending in one), from 0 to 1.

    Args:
        form: one of the `FORMS`; with `whole` all of `gold` is the reference, too.
    """
    answer = stated(text, gold, form)
    if not answer:
        return 0.0
    compare = grader_of(grader) if isinstance(grader, str) else grader
    if not isinstance(gold, str) and compare in GRADERS.values():
        if not isinstance(gold, int | float | Decimal | date):
            raise ValueError(
                f"The reference {gold!r} is no text and no number. Name a grader of your own (file.py:function)"
            )
        if isinstance(gold, bool):  # `true` in JSON, `True` in Python
            answer, gold = answer.lower(), str(gold).lower()
        gold = str(gold)
    if isinstance(gold, str):
        gold = gold.strip() if form == "whole" else final_answer(gold) or gold
    verdict = compare(answer, gold)
    return verdict if isinstance(verdict, float) else float(bool(verdict))


def scores(texts: Iterable[str], columns: Mapping[str, Any], grader: Grader, form: str) -> list[float]:
    """Score completions against the column `answer`, and for a [`Verifier`] `metadata`."""
    graders: Iterable[Grader] = itertools.repeat(grader)
    if isinstance(grader, Verifier):
        graders = [functools.partial(grader, metadata=each) for each in columns["metadata"]]
    pairs = zip(texts, columns["answer"], strict=True)
    return [score(*pair, each, form) for pair, each in zip(pairs, graders, strict=False)]


def verdicts(texts: Iterable[str], columns: Mapping[str, Any], grader: Grader, form: str) -> list[bool]:
    """Return for each completion whether it has the full score."""
    return [each >= RIGHT for each in scores(texts, columns, grader, form)]


# --- rewards, with TRL's signature: worked lines, then `#### answer` as in GSM8K --------------------


def completion_text(completion: str | list[dict]) -> str:
    """Return the text of a completion, plain or conversational."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def correctness(
    grader: str | Grader = "auto", form: str = "marked", folders: list[Path] | None = None
) -> Callable[..., list[float]]:
    """Make a reward function: 1.0 if the stated answer equals the dataset's `answer` under `grader`, else 0.0.

    Args:
        form: one of the `FORMS`.
        folders: searched for the file of a grader.
    """
    compare = grader_of(grader, folders) if isinstance(grader, str) else grader
    name = grader if isinstance(grader, str) else getattr(grader, "__name__", "own")

    def correctness_reward(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
        return scores(map(completion_text, completions), {"answer": answer, **kwargs}, compare, form)

    suffix = "" if form == "marked" else f"_{form}"
    if name != "auto" or suffix:  # rename: a resumed run compares the names of its rewards
        correctness_reward.__name__ += "_" + re.sub(r"\W+", "_", name) + suffix
    return correctness_reward


def format_reward(completions: list, **kwargs) -> list[float]:
    """1.0 for a completion ending in one `#### answer` line, or one box, after at least one line of work, else 0.0."""
    return [float(_well_formed(completion_text(c))) for c in completions]


def _well_formed(text: str) -> bool:
    lines = [line for line in text.strip().split("\n") if line.strip()]
    marks = sum(line.lstrip().startswith(ANSWER_MARK) for line in lines)
    if marks == 0 and text.count(_BOXED) == 1:
        lines = [line for line in lines if re.search(r"\w", line)]  # a closing delimiter may follow the box
        return len(lines) >= 2 and _boxed(lines[-1]) is not None
    return len(lines) >= 2 and marks == 1 and bool(MARKED.match(lines[-1].lstrip()))


# --- functions by name, for YAML files and the command line ---------------------------

_HOW = "Name it as file.py:function or package.module:function."


def found(name: str, folders: list[Path]) -> Path | None:
    """Return the file or folder `name` in the first of `folders` containing it, else `None`."""
    return next((place for folder in folders if (place := folder / name).exists()), None)


def function_named(name: str, option: str, folders: list[Path] | None = None) -> Callable[..., Any]:
    """Import the function or class `name`; a file is searched for in `folders`, by default the working directory.

    Raises:
        `ValueError`: not found; the message names `option`.
    """
    place, _, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    try:
        module = (_of_file if place.endswith(".py") else _of_module)(place or "builtins", folders or [Path()])
    except (ImportError, OSError) as error:
        raise ValueError(f"{option}={name!r} cannot be found: {error}. {_HOW}") from error
    if not callable(value := getattr(module, attribute, None)):
        raise ValueError(f"{option}={name!r}: {place or 'Python'} has no function {attribute!r}. {_HOW}")
    return value


def _of_module(place: str, folders: list[Path]) -> ModuleType:
    """Import an installed module, otherwise a file of that name in one of `folders`."""
    file = f"{place.replace('.', '/')}.py"
    if importlib.util.find_spec(place.split(".")[0]) is None and found(file, folders) is not None:
        return _of_file(file, folders)
    return importlib.import_module(place)


def _of_file(place: str, folders: list[Path]) -> ModuleType:
    file = (found(place, folders) or Path(place)).resolve()
    name = f"_qerl_task_{abs(hash(file))}"  # one module for all functions of a file
    if name in sys.modules:
        return sys.modules[name]
    main = sys.modules.get("__main__")
    if main is not None and getattr(main, "__file__", None) and Path(main.__file__ or "").resolve() == file:
        return main
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, beside := str(file.parent))  # as for a script: modules next to it can be imported
    with ExitStack() as failed:
        failed.callback(sys.modules.pop, name)
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(beside)
        failed.pop_all()
    return module
