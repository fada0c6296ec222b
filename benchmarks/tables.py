"""Write the tables of the README and the documentation from the committed measurements; `--check` only compares.

A table stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`, on one page.
"""

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]

import acceptance as acceptance_runs  # noqa: E402
import faults_gpu_cases  # noqa: E402
import kernel_tables  # noqa: E402
import learning  # noqa: E402
import multi_gpu_tables  # noqa: E402
import peers_tables  # noqa: E402
import probe_separation  # noqa: E402
import rollout_tables  # noqa: E402
import speed_tables  # noqa: E402
from tests.faults import catalog  # noqa: E402

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs/source").glob("*.md")), ROOT / "examples/assets/README.md")
YOUR_TASK = ROOT / "benchmarks/results/your_task_cpu.json"
DEMO = ROOT / "benchmarks/results/demo.json"
FAULTS = ROOT / "benchmarks/results/faults_gpu.json"
#: what started where, by device; a file that is not there yet adds no rows
ACCEPTANCE = [ROOT / f"benchmarks/results/acceptance_{device}.json" for device in ("h200", "h100")]
#: what a run's time was noted at -> what had happened by then
_SEEN = {"ready_s": "it was ready", "evaluated_s": "the held-out problems were answered", "trained_s": "its steps"}
ARCHITECTURES = ROOT / "docs/architectures.json"


def architectures() -> str:
    """What works for which model; what is refused is quoted below. A refusal after which nothing is left holds for the rest."""
    record = json.loads(ARCHITECTURES.read_text())
    cells = list(dict.fromkeys(cell for found in record["architectures"].values() for cell in found))
    rows = [f"| `model_type` | {' | '.join(cells)} |", f"|---|{'---|' * len(cells)}"]
    reasons: dict[str, list[str]] = {}
    for name, found in record["architectures"].items():
        shown = []
        for cell in cells:
            if cell not in found and not shown[-1:] == ["refused"]:
                raise ValueError(f"{ARCHITECTURES.name}: {name} has no cell {cell!r}; run {record['command']}.")
            kind, _, why = found.get(cell, "refused").partition(": ")
            shown.append("yes" if kind == "works" else kind)
            if why:
                reasons.setdefault(f"{cell}: {why}", []).append(f"`{name}`")
        rows.append(f"| `{name}` | {' | '.join(shown)} |")

    lines = "\n".join(f"- {', '.join(names)}, {reason}" for reason, names in reasons.items())
    source = ARCHITECTURES.relative_to(ROOT)
    return (
        "\n".join(rows)
        + f"\n\nWhat is refused, and the error's words:\n\n{lines}"
        + f"\n\ntransformers {record['versions']['transformers']}, commit {', '.join(record['commits'])}. {engines(record['rollouts'])} [{source.name}]({source})."
    )


def engines(rollouts: dict[str, dict[str, str]]) -> str:
    """In what the rollouts were computed: what most share, and who differs."""
    shared: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, row in rollouts.items():
        where = (f"vLLM {row['vllm']} on {'a CPU' if row['device'] == 'CPU' else row['device']}", row["commit"])
        shared.setdefault(where, {}).setdefault(row["dtype"], []).append(f"`{name}`")
    parts = []
    for (where, commit), types in shared.items():
        (most, _), *fewer = sorted(types.items(), key=lambda item: -len(item[1]))
        less = "".join(f" ({', '.join(names)}: {dtype})" for dtype, names in fewer)
        parts.append(f"{where}, commit {commit}, in {most}{less}")
    return f"Rollouts: {'; '.join(parts)}."


def acceptance() -> str:
    """Every run of a shipped configuration, on the card that it was shown; one that did not end as it should says so."""
    rows = [
        "| configuration | arm | GPU | card, GiB | taken, GiB | ready after, s | whole run, s | |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    notes = []
    for path in filter(Path.is_file, ACCEPTANCE):
        record = json.loads(path.read_text())
        for run in sorted(record["runs"], key=lambda run: _family_and_size(run["config"])):
            figures = " | ".join(str(run.get(name) or "-") for name in ("card_gib", "peak_gib", "ready_s", "seconds"))
            ended = f"{run['steps']} steps" if run["passed"] else _failed(run)
            gpu = record["device"].split()[1].rstrip(",") + (f", `{run['layout']}`" if "layout" in run else "")
            rows.append(f"| {Path(run['config']).stem} | {run['arm']} | {gpu} | {figures} | {ended} |")
        commits = [run["commit"] for run in record["runs"]]
        notes.append(
            speed_tables.measured_by(
                path, record["device"].partition(" x ")[0], commits, vLLM=record["versions"]["vllm"]
            )
        )
    return (
        "\n".join(rows)
        + f"\n\nRandom weights; seconds are those of runs side by side. {'; '.join(notes)}.\n\nNot run to the end: {_not_run()}."
    )


def _failed(run: dict[str, Any]) -> str:
    seen = [text for name, text in _SEEN.items() if run.get(name)]
    return f"**failed**{': its time ended' if run['exit_code'] == -9 else ''}{f' after {seen[-1]}' if seen else ''}"


def _missing() -> dict[tuple[str, ...], list[str]]:
    """Arms that took no step on a GPU -> the configurations of which that is so, of all that are for one."""
    passed = {
        (run["config"], run["arm"])
        for path in filter(Path.is_file, ACCEPTANCE)
        for run in json.loads(path.read_text())["runs"]
        if run["passed"]
    }
    alike: dict[tuple[str, ...], list[str]] = {}
    for file in sorted((ROOT / "examples/configs").glob("*b.yaml"), key=_family_and_size):
        missing = tuple(arm for arm in acceptance_runs.ARMS if (str(file.relative_to(ROOT)), arm) not in passed)
        alike.setdefault(missing, []).append(file.stem)
    return alike


def _not_run() -> str:
    every = tuple(acceptance_runs.ARMS)
    return "; ".join(
        f"{', '.join(names)} in {'any arm' if missing == every else ', '.join(missing)}"
        for missing, names in _missing().items()
        if missing
    )


def cards() -> str:
    only_planned = ", ".join(f"`{name}`" for name in _missing().get(tuple(acceptance_runs.ARMS), ()))
    return speed_tables.cards() + (
        f" Planned only, not trained on a GPU by us: {only_planned}." if only_planned else ""
    )


def _family_and_size(config: str | Path) -> tuple[str, float]:
    family, _, size = Path(config).stem.rpartition("-")
    return family, float(size.removesuffix("b"))


def embedded() -> str:
    record = json.loads(learning.ARMS_RESULT.read_text())
    first = record["runs"][0]
    versions = {name: first["versions"][name] for name in ("torch", "trl")}
    return (
        f"{learning.arms_table(record)}\n\n{first['steps']} steps, {first['before']['total']} held-out problems, accuracy in percent; "
        f"{speed_tables.measured_by(learning.ARMS_RESULT, first['device'], [record['commit']], **versions)}."
    )


def small_examples() -> str:
    """What words, a tool call and a game learn on a CPU."""
    record, source = json.loads(learning.EXAMPLES_RESULT.read_text()), learning.EXAMPLES_RESULT.relative_to(ROOT)
    return f"{learning.examples_table(record)}\n\n`{record['command'].replace('examples/benchmarks/examples_learning.py', 'benchmarks/learning.py examples')}`, [{source.name}]({source})."


def _device(record: dict[str, Any]) -> str:
    """Records say "1 threads" that are older than the singular."""
    device: str = record["device"]
    return re.sub(r"\b1 threads\b", "1 thread", device)


def your_task() -> str:
    """The commands of the page "Your own task", timed."""
    record = json.loads(YOUR_TASK.read_text())
    rows = ["| command | s |", "|---|---:|"]
    for row in record["commands"]:
        rows.append(f"| `{row['command'].partition('  ')[0].replace('|', '')}` | {row['seconds']:.0f} |")
    after, source = record["after"], YOUR_TASK.relative_to(ROOT)
    return (
        "\n".join(rows)
        + f"\n\nIn all {record['seconds'] / 60:.0f} minutes, of which training {record['steps']} steps took {record['train_seconds']:.0f} s: {record['before']['correct']} of "
        f"{after['total']} held-out words are right before, {after['correct']} after. {_device(record)}; {record['note']}. The Hub was the tests' stand-in on this machine, "
        f"`git clone` a local copy. Commit {record['commit']}, [{source.name}]({source}), by `benchmarks/your_task.py`."
    )


def faults_on_gpu() -> str:
    """Faults injected into training on a GPU."""
    record = json.loads(FAULTS.read_text())
    rows = ["| fault | caught | goes on afterwards |", "|---|---|---|"]
    again = {None: "", True: "yes", False: "no"}
    for row in record["faults"]:
        caught = row["when"] if row["caught"] else "no" if row["fault"] != "healthy" else "nothing, as it should"
        rows.append(f"| {row['fault']} | {caught} | {again[row['recovered']]} |")
    commits = [row.get("commit", record["commit"]) for row in record["faults"]]
    cards = dict.fromkeys([record["gpu"], *(row.get("gpu", record["gpu"]) for row in record["faults"])])
    measured = {row["fault"] for row in record["faults"]}
    missing = [
        f"{name} ({fault.processes} GPUs)" if fault.processes > record["gpus"] else name
        for name, fault in faults_gpu_cases.FAULTS.items()
        if name not in measured
    ]
    not_run = f" Not run there: {', '.join(missing)}." if missing else ""
    return (
        "\n".join(rows)
        + f"\n\n{speed_tables.measured_by(FAULTS, ' and '.join(cards), commits, vLLM=record['versions']['vllm'])}.{not_run}"
    )


def demo() -> str:
    """The README's sentence on what the embedded run learns."""
    runs = json.loads(DEMO.read_text())["runs"]
    before, after = ([100 * run[when]["accuracy"] for run in runs] for when in ("before", "after"))
    return (
        f"A run of it takes {statistics.mean(run['train_seconds'] for run in runs):.0f} s on {_device(runs[0])}; {len(runs)} of them, with a seed each, went from {before[0]:.0f} % of "
        f"held-out problems to {', '.join(f'{value:.0f}' for value in after)} %. [The table of arms]"
        "(docs/source/benchmarks.md#learning) says what that shows and what it does not: the noise buys no accuracy there."
    )


def real_model() -> str:
    """What the documentation shows of `make demo-real`."""
    if not learning.REAL_RESULT.is_file():
        return "No whole run is recorded yet."
    record, source = json.loads(learning.REAL_RESULT.read_text()), learning.REAL_RESULT.relative_to(ROOT)
    return (
        f"{learning.real_table(record)} {record['run']['device']}, {record['cpu_seconds'] / 60:.0f} minutes of one core; one seed; commit "
        f"{record['commit'][:7]}, [{source.name}]({source}), by `{record['command']}`."
    )


TABLES: dict[str, Callable[[], str]] = {
    "acceptance": acceptance,
    "aims": speed_tables.aims,
    "architectures": architectures,
    "cards": cards,
    "checks": speed_tables.checks,
    "demo": demo,
    "demo_real": real_model,
    "embedded_arms": embedded,
    "humming": kernel_tables.humming,
    "every_size": kernel_tables.every_size,
    "every_size_h100": kernel_tables.every_size_h100,
    "faults": catalog.table,
    "faults_on_gpu": faults_on_gpu,
    "kernels": kernel_tables.kernels,
    "kills": multi_gpu_tables.kills,
    "sync_parts": multi_gpu_tables.sync_parts,
    "layouts": multi_gpu_tables.layouts,
    "multi_gpu": multi_gpu_tables.multi_gpu,
    "notebooks": peers_tables.notebooks,
    "peers": peers_tables.peers,
    "neighbours": speed_tables.neighbours,
    "plan": speed_tables.plan,
    "rollout": rollout_tables.rollout,
    "separation": probe_separation.markdown,
    "rollout_4096": rollout_tables.small_steps,
    "rollout_before": rollout_tables.before,
    "rollout_wanted": rollout_tables.wanted,
    "rollout_why": kernel_tables.rollout_why,
    "small_examples": small_examples,
    "speed": speed_tables.speed,
    "start": speed_tables.start,
    "step": speed_tables.step,
    "training": speed_tables.training,
    "update": speed_tables.update,
    "tuners": peers_tables.tuners,
    "window": peers_tables.window,
    "your_task": your_task,
}
_TABLE = re.compile(r"(<!-- begin: (\w+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)


def filled(page: Path) -> tuple[str, list[str]]:
    """The page with every table written anew, its links seen from there, and the names of its tables."""
    found: list[str] = []

    def write(match: re.Match[str]) -> str:
        found.append(match[2])
        up = os.path.relpath(ROOT, page.parent)
        table = TABLES[match[2]]()
        return match[1] + (table if up == "." else table.replace("](", f"]({up}/")) + "\n" + match[3]

    return _TABLE.sub(write, page.read_text()), found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    seen: list[str] = []
    for page in PAGES:
        new, names = filled(page)
        seen += names
        if not check:
            page.write_text(new)
        elif new != page.read_text():
            sys.exit(f"{page.name} differs from the measurements; run python benchmarks/tables.py")
    if sorted(seen) != sorted(TABLES):
        sys.exit(
            f"Each of {sorted(TABLES)} needs one place, marked by its begin and end comments; found {sorted(seen)}."
        )
