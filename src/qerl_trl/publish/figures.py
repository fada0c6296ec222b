"""The figures that a card may show: what a run measured of itself (`results.json`), what `qerl-trl eval` measured, and the curves.

Such files lie in a folder unsealed, and stay there when something else is trained or copied into it. So each says of what it is, and is shown
for that only: results of the run with the same settings and base after as many steps, an evaluation of the same weights on the same base.
Whatever else lies there is left out with a warning that names it.
"""

import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..checkpoint import seal
from ..checkpoint.records import EVALUATIONS, RESULTS_NAME, Evaluation, Facts, Results

if TYPE_CHECKING:  # it imports PEFT, which `qerl-trl quantize` does without
    from ..checkpoint.settings import RunSettings

logger = logging.getLogger(__name__)

_CURVES_NAME = "curves.png"
_CHECKPOINT = re.compile(r"checkpoint-\d+")
#: logged quantities that a card shows
_LOGGED = re.compile(r"reward|rewards/.+/mean|entropy|aqn/sigma|rollout/mismatch_kl")
#: how an answer was sampled, as a card says it
_PROTOCOL = ("temperature", "top_p", "max_new_tokens", "samples")


def of_run(folder: Path, settings: "RunSettings") -> Facts:
    """What of a card's facts the files in `folder` give: the folder of a run, or a checkpoint in one.

    Args:
        settings: what the run recorded about itself, `global_step` included.
    """
    found: Facts = {}
    # a checkpoint's figures are its run's, one level up; above the folder of a run are those of others
    places = [folder, folder.parent] if _CHECKPOINT.fullmatch(folder.resolve().name) else [folder]
    results = next((place / RESULTS_NAME for place in places if (place / RESULTS_NAME).is_file()), None)
    curves = next((place / _CURVES_NAME for place in places if (place / _CURVES_NAME).is_file()), None)
    content = None if results is None else _read(results, _check_results)
    if results is not None and content is not None and (other := _of_another_run(content, settings)) is not None:
        _warn(
            f"{results} is of another run than {folder}: {other}. Its figures, and the curves beside it, are left out of the card."
        )
        content, curves = None, curves if curves is not None and curves.parent != results.parent else None
    if content is not None:
        found = {"dataset": content.get("dataset"), "versions": content.get("versions")}
        steps, now = content.get("steps"), settings.get("global_step")
        if steps != now:
            _warn(
                f"{results} was measured after {steps} steps, and {folder} has {now}: its figures are left out of the card."
            )
        else:
            found["results"] = cast(Results, known(content, Results))
            found["log"] = log_summary(content.get("log_history") or [])
    if curves is not None:
        found["curves"] = str(curves)
    found["evaluations"] = _evaluations(folder, settings)
    return found


def _of_another_run(content: Mapping[str, Any], settings: "RunSettings") -> str | None:
    theirs = content.get("settings") or {}
    if theirs.get("settings_sha256") is None:
        return "it does not say with which settings it was trained"
    for name in ("settings_sha256", "base_sha256"):
        then, now = theirs.get(name), cast(Mapping[str, Any], settings).get(name)
        if then != now:
            return f"{name} {str(then)[:12]} there, {str(now)[:12]} here"
    return None


def _evaluations(folder: Path, settings: "RunSettings") -> list[Evaluation]:
    weights = functools.cache(lambda: seal.weights_sha256(folder))  # read only where there is something to compare
    found = []
    for path in sorted(folder.glob(EVALUATIONS)):
        content = _read(path, _check_evaluation)
        if content is None:
            continue
        if (why := _of_another_model(content, settings, weights)) is not None:
            _warn(f"{path} {why}: it is left out of the card of {folder}. Measure again with qerl-trl eval.")
            continue
        found.append(cast(Evaluation, known(content, Evaluation)))
    return found


def _of_another_model(
    content: Mapping[str, Any], settings: "RunSettings", weights: Callable[[], str | None]
) -> str | None:
    measured, trained_on = content.get("weights_sha256"), settings.get("base_format")
    if measured is None:
        return "does not say which weights it measured"
    if measured != weights():
        return "measured other weights than are there"
    if trained_on in ("nvfp4", "bf16") and content.get("base_format") != trained_on:
        return f"measured the adapter on a base in {content.get('base_format')}, and it was trained on {trained_on}"
    if trained_on != "full" and content.get("base_sha256") != settings.get("base_sha256"):
        return "measured the adapter on another base than the run's"
    return None


# --- reading ----------------------------------------------------------------------------------------------------------------------


def _read(path: Path, check: Callable[[dict[str, Any]], object]) -> dict[str, Any] | None:
    """The content of a file of figures; `None`, with a warning, for one that `check` cannot read."""
    try:
        content = json.loads(path.read_bytes())
        check(content)
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        _warn(
            f"{path} is damaged ({type(error).__name__}: {error}): its figures are left out of the card. Run the command that wrote it again."
        )
        return None
    return content


def _check_results(content: dict[str, Any]) -> None:
    for name in ("before", "after"):
        if content.get(name) is not None:
            _check_accuracy(content[name])
    if (difference := content.get("difference")) is not None:
        [float(number) for number in (difference["value"], *difference["interval95"])]
    log_summary(content.get("log_history") or [])
    (content.get("settings") or {}).keys()


def _check_evaluation(content: dict[str, Any]) -> None:
    _check_accuracy(content)
    if not isinstance(content["dataset"], str) or not set(_PROTOCOL) <= content["protocol"].keys():
        raise TypeError("no dataset, or no protocol")


def _check_accuracy(measured: dict[str, Any]) -> None:
    low, high = measured["interval95"]
    [float(number) for number in (measured["accuracy"], measured["total"], low, high)]


@functools.cache
def _warn(text: str) -> None:
    """Once: a run that pushes while it trains has a card for every checkpoint."""
    logger.warning(text)


def known(content: Mapping[str, Any], record: Any) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key in record.__annotations__}


def log_summary(history: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """First and last logged value of the few quantities a card shows, each the mean of up to ten entries."""
    logged: dict[str, list[float]] = {}
    for entry in history:
        for key, value in entry.items():
            if isinstance(value, (int, float)) and _LOGGED.fullmatch(key):
                logged.setdefault(key, []).append(value)
    summary = {}
    for key, values in logged.items():
        if len(values) >= 2:
            n = min(10, len(values) // 2)
            summary[key] = [sum(values[:n]) / n, sum(values[-n:]) / n, len(values)]
    return summary
