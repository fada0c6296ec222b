"""The file of rollout_speed.py: what several runs measured, each case with the run that it is of, ratios only between cases of one run.

`runs` says of each run its command, commit, device and versions; a case names its run, and so none says these twice. A case that is
measured again replaces the former one. A run of which no case is left goes with it.
"""

import json
import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WHAT = (
    "tokens per second; 256-token prompts, 256 new tokens, temperature 1, processed log-probabilities, full decode CUDA graphs, no "
    "torch.compile, rank-32 adapter on all seven projections; ours: NVFP4 base shared with a trainer's model, adapter inside the quantized "
    "layer; stock-lora: bf16 with vLLM's LoRA slots; stock-merged: bf16 without adapter, what TRL runs after merging; median of up to three "
    "rollouts; ratios are of engines of one run"
)


def added(
    record: dict[str, Any] | None, name: str, run: dict[str, Any], cases: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """`record`, a file's content or None, with what the run `name` measured.

    Args:
        run: what the run says of itself: `command`, `commit`, `device`, `versions` and more.
        cases: by their names; `tokens_per_s` of each holds values by the number of sequences, which is text.
    """
    before: dict[str, Any] = record or {"runs": {}, "cases": {}}
    merged = before["cases"] | {case: {**found, "run": name} for case, found in cases.items()}
    used = {case["run"] for case in merged.values()}
    runs = {key: value for key, value in (before["runs"] | {name: run}).items() if key in used}
    speed = {
        case: {batch: statistics.median(values) for batch, values in found["tokens_per_s"].items()}
        for case, found in merged.items()
    }
    return {"what": WHAT, "tokens_per_s": speed, "ratios": ratios(merged, speed), "runs": runs, "cases": merged}


def ratios(cases: dict[str, dict[str, Any]], speed: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Speed of ours relative to each other engine on the same model in the same run, by the number of sequences."""
    found = {}
    for ours in cases:
        for other in cases:
            one_model = ours.split(":")[1] == other.split(":")[1]
            one_run = cases[ours]["run"] == cases[other]["run"]
            if ours.startswith("ours:") and other != ours and one_model and one_run:
                shared = [batch for batch in speed[ours] if batch in speed[other]]
                found[f"{ours} over {other}"] = {b: round(speed[ours][b] / speed[other][b], 3) for b in shared}
    return found


def latest(lines: Path) -> dict[str, dict[str, Any]]:
    """What the processes of a run have written so far: of each case the last line, where it has measured something."""
    if not lines.exists():
        return {}
    found = {case["case"]: case for case in map(json.loads, lines.read_text().splitlines())}
    return {name: case for name, case in found.items() if case["tokens_per_s"]}


def read(path: Path) -> dict[str, Any] | None:
    """The file's content, or None where there is no file.

    Raises:
        `ValueError`: it is not a file of this kind.
    """
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    if not {"runs", "cases"} <= record.keys() or not all(
        case.get("run") in record["runs"] for case in record["cases"].values()
    ):
        raise ValueError(
            f"{path} has no `runs` that its `cases` name, so what was measured when cannot be kept. Give --out another name."
        )
    return record


def write(path: Path, record: dict[str, Any]) -> None:
    """Whole or not at all."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    beside.replace(path)


def label(size: str) -> str:
    """A model as its publisher writes it; a bare size is Qwen2.5's."""
    return (f"Qwen2.5-{size}" if size[0].isdigit() else size).title()


def by_model(sizes: Iterable[str]) -> list[str]:
    """Sorted by family, then by size."""
    return sorted(
        sizes,
        key=lambda size: (not size[0].isdigit(), label(size).rpartition("-")[0], float(size.rpartition("-")[2][:-1])),
    )
