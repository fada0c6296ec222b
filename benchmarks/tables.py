"""Write the tables of the README and the documentation from the committed measurements; `--check` only compares.

Each table is on one page, between `<!-- begin: NAME -->` and `<!-- end: NAME -->`.
"""

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]

import demos  # noqa: E402
import evidence  # noqa: E402
import kernel_tables  # noqa: E402
import peers_tables  # noqa: E402
import probe_separation  # noqa: E402
import real_models  # noqa: E402
import rules  # noqa: E402
import speed_tables  # noqa: E402
from speed_tables import measured_by, table  # noqa: E402
from tests.faults import catalog  # noqa: E402

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs/source").glob("*.md")), ROOT / "examples/assets/README.md")
#: runs of shipped configurations by GPU; their script is in the commits that they name
ACCEPTANCE = [ROOT / f"benchmarks/results/acceptance_{device}.json" for device in ("h200", "h100")]
ARMS = ("nvfp4", "nvfp4 without noise", "bf16", "bf16 with noise", "nf4", "full")
#: field of a run's times -> description of the event
SEEN = {"ready_s": "it was ready", "evaluated_s": "the held-out problems were answered", "trained_s": "its steps"}
EMBEDDED_ARMS = ROOT / "benchmarks/results/embedded_arms.json"
ARCHITECTURES = ROOT / "docs/architectures.json"


def architectures() -> str:
    """Support of models with equal results, and why something is refused; a refusal applies to all later cells."""
    record = json.loads(ARCHITECTURES.read_text())
    cells = list(dict.fromkeys(cell for found in record["architectures"].values() for cell in found))
    alike: dict[tuple[str, ...], list[str]] = {}
    reasons: dict[str, list[str]] = {}
    for name, found in record["architectures"].items():
        shown: list[str] = []
        for cell in cells:
            if cell not in found and not shown[-1:] == ["refused"]:
                raise ValueError(f"{ARCHITECTURES.name}: {name} has no cell {cell!r}; run {record['command']}.")
            kind, _, why = found.get(cell, "refused").partition(": ")
            shown.append("yes" if kind == "works" else kind)
            if why and cell != "rollout noise":  # refused as noise is
                sentence = re.sub(r" ?\([^)]*\)", "", why).partition(". ")[0].rstrip(".")
                sentence = re.sub(r"^\w+ForCausalLM ", "", re.sub(r"(?<=trainer's )\w+ForCausalLM", "model", sentence))
                sentence = re.sub(r"model\.layers\.0[\w.]+(?= (has|is) )", "the layer", sentence)
                reasons.setdefault(f"{cell}: {sentence}", []).append(f"`{name}`")
        alike.setdefault(tuple(shown), []).append(f"`{name}`")
    rows = [[", ".join(names), *shown] for shown, names in alike.items()]
    lines = "\n".join(f"- {', '.join(names)}, {reason}." for reason, names in reasons.items())
    source = ARCHITECTURES.relative_to(ROOT)
    devices = {(row["vllm"], row["device"]) for row in record["rollouts"].values()}
    engines = ", ".join(f"vLLM {vllm} on a {device}" for vllm, device in sorted(devices))
    return (
        table(["`model_type`", *cells], rows, left=1 + len(cells))
        + f"\n\nRefused:\n\n{lines}\n\ntransformers {record['versions']['transformers']}; rollouts: {engines}. "
        f"[{source.name}]({source})."
    )


def acceptance() -> str:
    """Every run of a shipped configuration on a GPU."""
    rows, notes = [], []
    for path in ACCEPTANCE:
        record = json.loads(path.read_text())
        for run in sorted(record["runs"], key=lambda run: _family_and_size(run["config"])):
            gpu = record["device"].split()[1].rstrip(",") + (f", `{run['layout']}`" if "layout" in run else "")
            figures = [str(run.get(name) or "-") for name in ("card_gib", "peak_gib", "ready_s", "seconds")]
            ended = f"{run['steps']} steps" if run["passed"] else _failed(run)
            rows.append([Path(run["config"]).stem, run["arm"], gpu, *figures, ended])
        commits, device = [run["commit"] for run in record["runs"]], record["device"].partition(" x ")[0]
        notes.append(measured_by(path, device, commits, vLLM=record["versions"]["vllm"]))
    heads = ["configuration", "arm", "GPU", "card, GiB", "taken, GiB", "ready after, s", "whole run, s", ""]
    arms = {missing: "any arm" if missing == ARMS else ", ".join(missing) for missing in _missing() if missing}
    left = "; ".join(f"{', '.join(names)} in {arms[of]}" for of, names in _missing().items() if of)
    return table(heads, rows, left=3) + (
        f"\n\nRandom weights; seconds are those of runs side by side. {'; '.join(notes)}.\n\nNot run to the end: "
        f"{left}."
    )


def _failed(run: dict[str, Any]) -> str:
    seen = [text for name, text in SEEN.items() if run.get(name)]
    late = ": its time ended" if run["exit_code"] == -9 else ""
    return f"**failed**{late}{f' after {seen[-1]}' if seen else ''}"


def _missing() -> dict[tuple[str, ...], list[str]]:
    """Arms without a step on a GPU -> their configurations."""
    runs = [run for path in ACCEPTANCE for run in json.loads(path.read_text())["runs"]]
    passed = {(run["config"], run["arm"]) for run in runs if run["passed"]}
    alike: dict[tuple[str, ...], list[str]] = {}
    for file in sorted((ROOT / "examples/configs").glob("*b.yaml"), key=_family_and_size):
        missing = tuple(arm for arm in ARMS if (str(file.relative_to(ROOT)), arm) not in passed)
        alike.setdefault(missing, []).append(file.stem)
    return alike


def _family_and_size(config: str | Path) -> tuple[str, float]:
    family, _, size = Path(config).stem.rpartition("-")
    return family, float(size.removesuffix("b"))


def cards() -> str:
    ran = speed_tables.W4A8[1].read_text()
    planned = ", ".join(f"`{name}`" for name in _missing().get(ARMS, ()) if f"/{name}.yaml" not in ran)
    return speed_tables.cards() + (f" Planned only, not trained on a GPU by us: {planned}." if planned else "")


def demo() -> str:
    """The README's sentence on the result of the embedded run."""
    runs = json.loads(demos.DEMO_RESULT.read_text())["runs"]
    before, after = ([100 * run[when]["accuracy"] for run in runs] for when in ("before", "after"))
    device = re.sub(r"\b1 threads\b", "1 thread", runs[0]["device"])
    return (
        f"A run of it takes {statistics.mean(run['train_seconds'] for run in runs):.0f} s on {device}; {len(runs)} of "
        f"them, with a seed each, went from {before[0]:.0f} % of held-out problems to "
        f"{', '.join(f'{value:.0f}' for value in after)} %. [The table of arms]"
        "(docs/source/benchmarks.md#learning): noise buys no accuracy there."
    )


def arms() -> str:
    """The embedded model in four arms over seeds."""
    record, rows = json.loads(EMBEDDED_ARMS.read_text()), []
    runs, mean = sorted(record["runs"], key=lambda run: run["seed"]), statistics.mean
    for arm in ("NVFP4 + AQN", "NVFP4", "bf16 + AQN", "bf16"):
        of = [run for run in runs if run["arm_name"] == arm]
        after = [100 * run["after"]["accuracy"] for run in of]
        gain = [100 * run["difference"]["value"] for run in of]
        sure = 100 * min(run["difference"]["interval95"][0] for run in of)
        entropy = [mean(mean(run["curves"]["entropy"][part]) for run in of) for part in (slice(10), slice(-10, None))]
        seeds, before = ", ".join(f"{x:.1f}" for x in after), f"{100 * of[0]['before']['accuracy']:.1f}"
        cells = [before, f"{mean(after):.1f} ({seeds})", f"+{mean(gain):.1f}, sd {statistics.stdev(gain):.1f}"]
        rows.append([arm, *cells, f"+{sure:.1f}", " -> ".join(f"{x:.3f}" for x in entropy)])
    heads = ["arm", "before, %", "after: mean (seeds), %", "gain, points", "its lowest 95 % bound"]
    return table([*heads, "entropy, first and last ten steps"], rows) + (
        f"\n\n{runs[0]['steps']} steps, {runs[0]['after']['total']} held-out problems. "
        f"{measured_by(EMBEDDED_ARMS, runs[0]['device'], [record['commit']], trl=runs[0]['versions']['trl'])}."
    )


def real_model() -> str:
    """The result of `make demo-real`."""
    record, source = json.loads(demos.REAL_RESULT.read_text()), demos.REAL_RESULT.relative_to(ROOT)
    return (
        f"{demos.real_table(record)} {record['run']['device']}, {record['cpu_seconds'] / 60:.0f} minutes of one "
        f"core; one seed; [{source.name}]({source}), by `{record['command']}`."
    )


TABLES: dict[str, Callable[[], str]] = {
    "acceptance": acceptance,
    "architectures": architectures,
    "arms": arms,
    "cards": cards,
    "cards_bf16": kernel_tables.cards_bf16,
    "demo": demo,
    "demo_real": real_model,
    "every_size": kernel_tables.every_size,
    "every_size_h100": lambda: kernel_tables.layers_of(kernel_tables.LAYERS["h100"]),
    "every_size_w4a8": lambda: kernel_tables.layers_of(kernel_tables.LAYERS["w4a8_h200"]),
    "faults": catalog.table,
    "humming": kernel_tables.humming,
    "kernels": kernel_tables.kernels,
    "multi_gpu": speed_tables.multi_gpu,
    "noise": real_models.noise,
    "notebooks": peers_tables.notebooks,
    "peers": peers_tables.peers,
    "plan": speed_tables.plan,
    "rollout": speed_tables.rollout,
    "rules": rules.markdown,
    "separation": probe_separation.markdown,
    "real_models": real_models.markdown,
    "speed": speed_tables.speed,
    "start": speed_tables.start,
    "step": speed_tables.step,
    "tuners": peers_tables.tuners,
    "update": speed_tables.update,
    "w4a8": speed_tables.w4a8,
    "window": peers_tables.window,
}
EVIDENCE = evidence.Evidence()
TABLES |= EVIDENCE.tables()
_TABLE = re.compile(r"(<!-- begin: (\w+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)


def filled(page: Path, tables: Mapping[str, Callable[[], str]] = TABLES) -> tuple[str, list[str]]:
    """The page with regenerated tables and relative links, and the names of its tables."""
    found: list[str] = []

    def write(match: re.Match[str]) -> str:
        found.append(match[2])
        up, text = os.path.relpath(ROOT, page.parent), tables[match[2]]()
        return match[1] + (text if up == "." else text.replace("](", f"]({up}/")) + "\n" + match[3]

    return _TABLE.sub(write, page.read_text()), found


def write_all(check: bool) -> None:
    """Write pages and plots, or only compare them."""
    seen: list[str] = []
    pictures = EVIDENCE.plots() | speed_tables.pictures()
    made = {ROOT / "docs/source" / name: text for name, text in pictures.items()}
    for page in PAGES:
        made[page], names = filled(page)
        seen += names
    for path, text in made.items():
        if not check:
            path.write_text(text)
        elif not path.is_file() or text != path.read_text():
            sys.exit(f"{path.name} differs from the measurements; run python benchmarks/tables.py")
    if sorted(seen) != sorted(TABLES):
        sys.exit(f"Each of {sorted(TABLES)} needs one place between its begin and end comments; found {sorted(seen)}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    write_all(parser.parse_args().check)
