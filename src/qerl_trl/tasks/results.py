"""What a run measured of itself: the verdicts before training, which wait in its folder for those after it, and `results.json`."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..checkpoint.records import BEFORE_NAME, Arm
from ..checkpoint.seal import write_json_atomically

if TYPE_CHECKING:
    from datasets import Dataset


def write_before(
    output_dir: str | os.PathLike, verdicts: list[bool], problems: "Dataset", measured_by: Mapping[str, Any]
) -> None:
    """Keep which of `problems` were solved before training, and by what that was measured ([`held_out.measured_by`])."""
    from ..checkpoint import settings as identity

    Path(output_dir).mkdir(parents=True, exist_ok=True)
    content = {
        "correct": verdicts,
        "problems_sha256": identity.dataset_sha256(problems),
        "measured_by": dict(measured_by),
    }
    write_json_atomically(Path(output_dir, BEFORE_NAME), content)


def read_before(
    output_dir: str | os.PathLike, problems: "Dataset", measured_by: Mapping[str, Any]
) -> list[bool] | None:
    """Which of `problems` were solved before the run in `output_dir` began to train; `None` where nobody has measured it.

    Raises:
        `ValueError`: it was measured on other problems or in another way, and the trained weights cannot say it any more.
    """
    from ..checkpoint import settings as identity

    file = Path(output_dir, BEFORE_NAME)
    if not file.is_file():
        return None
    content = json.loads(file.read_text())
    then, now = len(content["correct"]), len(problems)
    digest = identity.dataset_sha256(problems)
    if then != now or content["problems_sha256"] != digest:
        which = f"{then} problems then, {now} now" if then != now else f"{now} problems both times, but others"
        raise ValueError(
            f"The accuracy before training in {file} was measured on other held-out problems ({which}), so the accuracy after it could not be "
            f"compared with it. Go on with the same problems (--eval_problems {then}, the same data and system prompt), or choose another "
            "output_dir."
        )
    lines = [f"{name}: {_shown(was)} then, {_shown(is_now)} now" for name, was, is_now in _others(content, measured_by)]
    if lines:
        raise ValueError(
            f"The accuracy before training in {file} was measured in another way ({'; '.join(lines)}), so the accuracy after it could not be "
            "compared with it. Go on with the same grader (or first reward) and the same limits and prompts, or choose another output_dir."
        )
    return content["correct"]


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Names of what differs in two such ways."""
    return [name for name in sorted({*first, *second}) if first.get(name) != second.get(name)]


def _others(content: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name, value then and value now of what differs."""
    for name, was in content["measured_by"].items():
        is_now = json.loads(json.dumps(now.get(name)))
        unread = name.endswith("_sha256") and name in now and None in (was, is_now)  # typed in a prompt
        if was != is_now and not unread:
            yield name, was, is_now


def _shown(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", text)


def arm_of(settings: Mapping[str, Any]) -> Arm:
    """The arm of a comparison that a run with these recorded settings is."""
    return cast(Arm, {name: settings.get(name) for name in Arm.__annotations__})
