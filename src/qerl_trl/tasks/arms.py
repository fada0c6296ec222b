"""Arms of a comparison: the options of each, and the paired table of their runs.

Quantization and noise are two changes, so a claim about one needs arms differing in it alone, over several seeds. Runs
with the same seed share the order of problems and the initial adapter, so differences are paired by seed.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.records import RESULTS_NAME

#: full fine-tuning needs float32: at the usual learning rates, updates of 16-bit weights round to zero
_FURTHER = {"full": {"use_peft": "false", "dtype": "float32"}}
#: arm -> options of the example; a claim compares two of them
ARMS: dict[str, dict[str, str]] = {
    f"{base}{suffix}": {"base_format": base, "aqn": noise, **_FURTHER.get(base, {})}
    for base in ("nvfp4", "bf16", "nf4", "full")
    for suffix, noise in (("", "true"), ("-no-noise", "false"))
}


def check(arms: Sequence[str]) -> None:
    """Raise `ValueError` for unknown arms."""
    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise ValueError(f"--arms {' '.join(unknown)}: there is no such arm. Choose from {', '.join(ARMS)}.")


def read_run(folder: Path, arm: str, seed: int) -> dict[str, Any]:
    """Read a short record of the results in `folder`."""
    results: dict[str, Any] = json.loads((folder / RESULTS_NAME).read_text())
    measured = ("before", "after", "difference", "steps", "train_seconds", "measured_by")
    return {"arm": arm, "seed": seed, "folder": folder.name, **{name: results[name] for name in measured}}


def summary(arms: Sequence[str], seeds: Sequence[int], runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Compare the runs: accuracies of each arm, and differences from the first arm by seed, with their mean.

    Raises:
        `ValueError`: the runs differ in their number of problems or steps, or in the measurement.
    """
    runs = list(runs)
    ways = [run["measured_by"] | {"steps": run["steps"], "problems": run["after"]["total"]} for run in runs]
    for run, way in zip(runs, ways, strict=True):
        first = ways[0]
        if names := [name for name in sorted({*first, *way}) if first.get(name) != way.get(name)]:
            lines = "; ".join(f"{name}: {first.get(name)!r}, {way.get(name)!r}" for name in names)
            raise ValueError(
                f"These runs cannot be compared: {runs[0]['folder']} and {run['folder']} were measured in different "
                f"ways ({lines}). Start the same command again with one set of options, in another --output_dir."
            )
    accuracy: dict[str, Any] = {}
    for arm in arms:
        own = {run["seed"]: run for run in runs if run["arm"] == arm}
        accuracy[arm] = {
            "before": _mean({seed: run["before"]["accuracy"] for seed, run in own.items()}, seeds),
            "after": _mean({seed: run["after"]["accuracy"] for seed, run in own.items()}, seeds),
            "gain": _mean({seed: run["difference"]["value"] for seed, run in own.items()}, seeds),
        }
    reference, *others = arms
    differences: dict[str, Any] = {
        arm: {
            "after": _mean(_paired(accuracy[reference]["after"], accuracy[arm]["after"]), seeds),
            "gain": _mean(_paired(accuracy[reference]["gain"], accuracy[arm]["gain"]), seeds),
        }
        for arm in others
    }
    return {
        "arms": list(arms),
        "seeds": list(seeds),
        "reference": reference,
        "problems": runs[0]["after"]["total"] if runs else None,
        "steps": runs[0]["steps"] if runs else None,
        "accuracy": accuracy,
        "differences": differences,
        "runs": runs,
    }


def _paired(reference: Mapping[str, Any], other: Mapping[str, Any]) -> dict[int, float]:
    then = reference["by_seed"]
    return {int(seed): value - then[seed] for seed, value in other["by_seed"].items() if seed in then}


def _mean(by_seed: Mapping[int, float], seeds: Sequence[int]) -> dict[str, Any]:
    values = [by_seed[seed] for seed in seeds if seed in by_seed]
    return {
        "by_seed": {str(seed): by_seed[seed] for seed in seeds if seed in by_seed},
        "mean": statistics.mean(values) if values else None,
        "standard_error": statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None,
    }


def table(found: Mapping[str, Any]) -> str:
    """[`summary`] as Markdown: a row per seed, then mean and standard error."""
    accuracy, differences, reference = found["accuracy"], found["differences"], found["reference"]
    head = ["seed", *found["arms"], *(f"{arm} - {reference}" for arm in differences)]
    rows = [head, ["---"] * len(head)]
    for seed in map(str, found["seeds"]):
        row = [seed]
        for arm in found["arms"]:
            own = accuracy[arm]
            row.append(_change(own["before"]["by_seed"].get(seed), own["after"]["by_seed"].get(seed), None))
        row += [_points(values["after"]["by_seed"].get(seed), None) for values in differences.values()]
        rows.append(row)
    row = ["mean"]
    for arm in found["arms"]:
        before, after = accuracy[arm]["before"], accuracy[arm]["after"]
        row.append(_change(before["mean"], after["mean"], after["standard_error"]))
    row += [_points(values["after"]["mean"], values["after"]["standard_error"]) for values in differences.values()]
    rows.append(row)
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return (
        f"{text}\n\nHeld-out accuracy in percent, before and after {found['steps']} steps, on {found['problems']} "
        "problems; differences of the accuracy after training in points, seed by seed; +- is the standard error of a "
        "mean over seeds."
    )


def _change(before: float | None, after: float | None, error: float | None) -> str:
    if before is None or after is None:
        return ""
    return f"{100 * before:.1f} -> {100 * after:.1f}{_error(error)}"


def _points(value: float | None, error: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f}{_error(error)}"


def _error(error: float | None) -> str:
    return "" if error is None else f" +- {100 * error:.1f}"
