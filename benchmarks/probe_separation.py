"""Does the engine check at start (`qerl_trl.rollout.probe`) separate correct from faulty engines?

Judges the record of engines on an H200 by the package's current rules. A record has the measurements at every size of
adapter and noise: on the healthy engine, and with a fault in its adapter or noise, before training and after some
updates. The script that measured them is in the history: git log -- benchmarks/probe_separation.py.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results/probe_separation.json"
FAULTS = "lost,halved,doubled,half of the layers,MLPs lost,k and v exchanged,noise lost,unquantized".split(",")


def judged(record: dict[str, Any], floor: float) -> Any:
    """A record as the package's probe result."""
    from qerl_trl.rollout.probe import ProbeResult, large_enough

    clean = record["base_difference"]
    result = ProbeResult(clean, record["rounding"], floor, record["kind"])
    if not record.get("sizes"):
        return replace(result, kind=None)
    sizes = {size: rest for size, *rest in record["sizes"]}
    size, effect = large_enough((size, each[0], max(each[1], clean, floor / 4)) for size, each in sizes.items())
    if size is None:
        return replace(result, effect=effect)
    return replace(result, effect=effect, size=size, difference=sizes[size][2], rounding_there=sizes[size][3])


def table(engines: list[dict[str, Any]], of: Any = lambda record: True) -> list[dict[str, Any]]:
    """One row per fault over the records with `of`: number of probes refused by the current rules, and smallest margins
    (2: measured at half of the limit, or at twice the limit).
    """
    import torch

    from qerl_trl.rollout.probe import FLOOR

    rows = []
    for fault in (None, *FAULTS):
        counts, base, changed = {"passed": 0, "undecided": 0, "refused": 0}, [], []
        for engine in engines:
            for record in engine["records"]:
                if record["fault"] != fault or not of(record):
                    continue
                result = judged(record, FLOOR[getattr(torch, engine["dtype"])])
                counts["refused" if result.fault else "undecided" if result.undecided else "passed"] += 1
                base.append(result.base_difference / result.limits[0])
                changed += [result.difference / result.limits[1]] if result.size else []
        if fault is None:
            margins = {"base": 1 / max(base, default=1), "adapter or noise": 1 / max(changed, default=1)}
        elif fault == "unquantized":
            margins = {"base": min(base, default=None), "adapter or noise": None}
        else:
            margins = {"base": None, "adapter or noise": min(changed, default=None)}
        having = sum(any(record["fault"] == fault for record in engine["records"]) for engine in engines)
        rows.append({"fault": fault or "healthy", "engines": having} | counts | {"margins": margins})
    return rows


def markdown() -> str:
    """The table of docs/source/rollout.md."""
    engines = json.loads(RESULT.read_text())
    lines = [
        "| engine | engines | probes | passed | undecided | refused "
        "| smallest margin before training | after updates |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    halves_of = (lambda record: not record["updates"], lambda record: record["updates"])
    for row, *halves in zip(table(engines), *(table(engines, of) for of in halves_of), strict=True):
        counts = [row[name] for name in ("passed", "undecided", "refused")]
        margins = [min(filter(None, half["margins"].values()), default=None) for half in halves]
        shown = [row["fault"], row["engines"], sum(counts), *counts, *(f"{m:.1f}" if m else "-" for m in margins)]
        lines.append(f"| {' | '.join(map(str, shown))} |")
    models = ", ".join(sorted({engine["model"] for engine in engines}))
    devices = ", ".join(sorted({engine["device"] for engine in engines}))
    return (
        "\n".join(lines)
        + f"\n\nEngines in bf16 of {models} on {devices}, NVFP4 and bf16, on other prompts each time, 7B before "
        "training only (`benchmarks/probe_separation.py`). Margin: 2 means half of the limit for a healthy engine, "
        "twice the limit for a faulty one. Undecided engines are logged and not warned about. After the updates these "
        "engines' rounding was measured under Accelerate's autocast and came out too small, and those with lost noise "
        "still held the adapter of the fault before it; both are mended since."
    )
