"""What a run measured of itself: the verdicts before training, which wait in its folder for those after it, and `results.json`."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..checkpoint import write_json_atomically
from ..publish.records import Arm

if TYPE_CHECKING:
    from datasets import Dataset

BEFORE_NAME = "before.json"


def write_before(output_dir: str | os.PathLike, verdicts: list[bool], problems: "Dataset") -> None:
    """Keep which of `problems` were solved before training."""
    from .. import identity

    Path(output_dir).mkdir(parents=True, exist_ok=True)
    content = {"correct": verdicts, "problems_sha256": identity.dataset_sha256(problems)}
    write_json_atomically(Path(output_dir, BEFORE_NAME), content)


def read_before(output_dir: str | os.PathLike, problems: "Dataset") -> list[bool] | None:
    """Which of `problems` were solved before the run in `output_dir` began to train; `None` where nobody has measured it.

    Raises:
        `ValueError`: it was measured on other problems, and the trained weights cannot say it any more.
    """
    from .. import identity

    file = Path(output_dir, BEFORE_NAME)
    if not file.is_file():
        return None
    content = json.loads(file.read_text())
    if isinstance(content, list):  # of an older version
        content = {"correct": content}
    then, now = len(content["correct"]), len(problems)
    digest = identity.dataset_sha256(problems)
    if then != now or content.get("problems_sha256", digest) != digest:
        which = f"{then} problems then, {now} now" if then != now else f"{now} problems both times, but others"
        raise ValueError(
            f"The accuracy before training in {file} was measured on other held-out problems ({which}), so the accuracy after it could not be "
            f"compared with it. Go on with the same problems (--eval_problems {then}, the same data and system prompt), or choose another "
            "output_dir."
        )
    return content["correct"]


def arm_of(settings: Mapping[str, Any]) -> Arm:
    """The arm of a comparison that a run with these recorded settings is."""
    return cast(Arm, {name: settings.get(name) for name in Arm.__annotations__})
